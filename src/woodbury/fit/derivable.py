"""What a fit can know of a term: how its residuals depend on the parameters of the model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from woodbury._process import level_of_caller
from woodbury.model.graph import graph_edges

_CREATE_GRAPH = 4  # its place among the arguments of torch.autograd.grad


class _Derivatives(TorchFunctionMode):
    """Inside, notes whether torch.autograd.grad was called without create_graph=True."""

    is_cut = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            kept = args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else (kwargs or {}).get("create_graph")
            self.is_cut = self.is_cut or not kept
        return func(*args, **(kwargs or {}))


def check_derivatives(model: nn.Module, residual: Any, *batch: Any) -> None:
    """Warn of parameters that the model lacks, and of lost derivatives; raise where no parameter counts."""
    with torch.enable_grad(), _Derivatives() as derivatives:
        values = residual(model, *batch)
    edges = graph_edges(values) if values.requires_grad else ()
    leaves = [getattr(node, "variable", None) for _, node in edges]
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(leaf) in own for leaf in leaves):
        why = "torch.autograd.grad needs create_graph=True" if derivatives.is_cut else "is something detached?"
        raise ValueError(f"fit: term {residual.name!r} does not depend on the parameters of the model: {why}")
    if derivatives.is_cut:
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
