"""What a fit can know of a term: how its residuals depend on the parameters of the model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from woodbury._process import level_of_caller
from woodbury.model.graph import graph_edges

_CREATE_GRAPH = 4  # its place among the arguments of torch.autograd.grad


class _Derivatives(TorchFunctionMode):
    """Inside, notes the leaves of what is differentiated by torch.autograd.grad without create_graph=True."""

    cut: tuple[Any, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            kept = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else (kwargs or {}).get("create_graph")
            outputs = args[0] if args else (kwargs or {})["outputs"]
            self.cut += () if kept else tuple(leaf for value in tree_leaves(outputs) for leaf in _leaves_of(value))
        return func(*args, **(kwargs or {}))


def _leaves_of(values: Tensor) -> list[Any]:
    """The leaves of the graph behind some values, and None for what is none."""
    edges = graph_edges(values) if getattr(values, "grad_fn", None) is not None else ()
    return [getattr(node, "variable", None) for _, node in edges]


def check_derivatives(model: nn.Module, shape: tuple[int, int], residual: Any, *batch: Any) -> None:
    """Warn of what is lost of the residuals of a few points, or raise; shape is that of the residuals of all."""
    own = {id(parameter) for parameter in model.parameters()}
    with torch.enable_grad(), _Derivatives() as derivatives:
        values = residual(model, *batch)
    leaves, is_cut = _leaves_of(values), any(id(leaf) in own for leaf in derivatives.cut)
    if values.shape[1] != shape[1] or len(values) < shape[0] == shape[1]:
        text = f"fit: term {residual.name!r} gives (n, n) numbers for n points: is (n,) combined with (n, 1)?"
        if values.shape[1] != shape[1]:
            raise ValueError(text)
        warnings.warn(text, stacklevel=level_of_caller())
    if not any(id(leaf) in own for leaf in leaves):
        why = "torch.autograd.grad needs create_graph=True" if is_cut else "is something detached?"
        raise ValueError(f"fit: term {residual.name!r} does not depend on the parameters of the model: {why}")
    if is_cut:
        warnings.warn(
            f"fit: term {residual.name!r} takes a derivative without create_graph=True: how it depends on the "
            "parameters is not known, and the fit goes astray. Add it, or use woodbury.laplacian or derivatives",
            stacklevel=level_of_caller(),
        )
    if shapes := {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in own}:
        warnings.warn(
            f"fit: term {residual.name!r} uses parameters that the model does not have, of shape {shapes}, which "
            "stay as they are: make them parameters of the model (model.k = torch.nn.Parameter(...)), or call "
            "requires_grad_(False) on them",
            stacklevel=level_of_caller(),
        )
