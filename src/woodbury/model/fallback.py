"""Rows past every layer rule: derivatives of each sample's outputs in chosen parameters, written out.

Three exact ways, from fast to slow, for a model that was run on a batch of n samples:

    func     torch.func: one sample's pass, differentiated and mapped over the samples in chunks
    chunks   ordinary autograd on a few samples at a time, with a backward pass batched over them
    graph    ordinary autograd on the graph of the batch itself, sample after sample

`func` needs a model that torch.func can transform, and both `func` and `chunks` one that computes for some samples
what it computes for all (no dropout, say). Which works is found out by comparing outputs, at every batch: a model
may change its mind (`model.train()`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._vector import Vector
from woodbury.layers.forms import limit, windows

Forward = Callable[[nn.Module, Any], Tensor]

_AT_A_TIME = 32  # samples in a chunk of plain autograd: its work grows with the square, its overhead falls


@dataclass(frozen=True)
class Pass:
    """A forward pass over a batch: what was run, on what, and the outputs (n, C) attached to the graph."""

    model: nn.Module
    forward: Forward
    inputs: Any
    outputs: Tensor


class _Bound(nn.Module):
    """forward(model, inputs) as a module, so that functional_call can exchange the model's parameters."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, inputs: Any) -> Tensor:
        return self.run(self.model, inputs)


def written_rows(
    made: Pass,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    start: int,
    way: str | None,
    max_bytes: int | None,
) -> tuple[Vector, str]:
    """Rows (m, k, *shape) of each parameter for columns (m, k, C) of the samples from `start` on.

    way is what was found to work for this model before, if anything, and is tried first; the one that did comes
    back.
    """
    window = slice(start, start + len(columns))
    inputs = _batch.part(made.inputs, window, len(made.outputs))
    ways: dict[str, Callable[[], tuple[Tensor, Vector]]] = {
        "func": lambda: rows_by_func(made.model, made.forward, inputs, parameters, columns, max_bytes),
        "chunks": lambda: rows_by_chunks(made.model, made.forward, inputs, parameters, columns),
    }
    for name, compute in ways.items():
        if way not in (None, name):
            continue
        # To compare would make a device wait: there what was found holds until the model changes its mode.
        known = way is not None and columns.device.type != "cpu"
        random = None if known else _random.snapshot(columns.device)
        try:
            outputs, rows = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever torch.func, or a model on fewer samples, does not like
            way = None
        else:
            if random is None or agree(outputs, made.outputs[window]):
                return rows, name
            way = None
        if random is not None:
            _random.restore(random)
    return rows_on_graph(made.outputs, parameters, columns, start), "graph"


def agree(a: Tensor, b: Tensor, digits: float = 0.5) -> bool:
    """Whether two passes gave the same up to rounding, in this share of the digits."""
    if a.shape != b.shape:
        return False
    tolerance, size = torch.finfo(a.dtype).eps ** digits, float(b.detach().abs().max())
    return math.isfinite(size) and torch.allclose(a, b.detach(), rtol=tolerance, atol=tolerance * size)


def rows_by_func(
    model: nn.Module,
    forward: Forward,
    inputs: Any,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    max_bytes: int | None = None,
) -> tuple[Tensor, Vector]:
    """Outputs (n, C) and, for columns (n, k, C), the rows of each parameter, (n, k, *shape)."""
    bound = _Bound(model, forward)
    samples, per_sample, _ = columns.shape
    point = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    leaves, structure = pytree.tree_flatten(inputs)
    mapped = [index for index, leaf in enumerate(leaves) if _batch.has_samples(leaf, samples)]

    def one(sample: list[Tensor], seeds: Tensor) -> tuple[Tensor, Vector]:
        own = list(leaves)
        for index, leaf in zip(mapped, sample, strict=True):
            own[index] = leaf.unsqueeze(0)
        batch = pytree.tree_unflatten(own, structure)

        def outputs(values: Vector) -> Tensor:
            result: Tensor = torch.func.functional_call(bound, values, (batch,))
            return result.reshape(-1)

        made: Any = torch.func.vjp(outputs, point)
        raw, back = made
        return raw, torch.func.vmap(lambda seed: back(seed)[0])(seeds)

    each = per_sample * sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    results = []
    with warnings.catch_warnings(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the others do not batch
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        for window in windows(samples, limit(max_bytes, columns.device) // max(1, each)):
            chosen = [leaves[index][window] for index in mapped]
            results.append(torch.func.vmap(one)(chosen, columns[window]))
    outputs = [own for own, _ in results]
    rows = [own for _, own in results]
    return _cat(outputs), {name: _cat([row[f"model.{name}"] for row in rows]) for name in parameters}


def rows_by_chunks(
    model: nn.Module, forward: Forward, inputs: Any, parameters: Mapping[str, nn.Parameter], columns: Tensor
) -> tuple[Tensor, Vector]:
    """The same by plain autograd on a few samples at a time."""
    samples = len(columns)
    outputs, pieces = [], []
    for window in windows(samples, _AT_A_TIME):
        with torch.enable_grad():
            raw = forward(model, _batch.part(inputs, window, samples))
            flat = raw.reshape(window.stop - window.start, -1)
        pieces.append(rows_on_graph(flat, parameters, columns[window], together=True))
        outputs.append(flat.detach())
    return _cat(outputs), {name: _cat([rows[name] for rows in pieces]) for name in parameters}


def rows_on_graph(
    outputs: Tensor,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    start: int = 0,
    together: bool = False,
) -> Vector:
    """Rows (m, k, *shape) of samples from `start` on, for outputs (n, C) attached to the graph of any model.

    One backward pass a sample, batched over its columns; or one for all samples together.
    """
    m, k, width = columns.shape
    rows = []
    for window in windows(m, m if together else 1):
        count = window.stop - window.start
        seeds = columns.new_zeros(count, k, len(outputs), width)
        own = torch.arange(count, device=columns.device)
        seeds[own, :, own + window.start + start] = columns[window]
        grads = grads_of_many(outputs, list(parameters.values()), seeds.flatten(0, 1))
        rows.append(
            [
                parameter.new_zeros(count, k, *parameter.shape)
                if grad is None
                else grad.detach().unflatten(0, (count, k))
                for parameter, grad in zip(parameters.values(), grads, strict=True)
            ]
        )
    return {name: _cat(own) for name, own in zip(parameters, zip(*rows, strict=True), strict=True)}


def grads_of_many(outputs: Tensor, sources: Sequence[Any], seeds: Tensor) -> list[Tensor | None]:
    """Gradients of seed . outputs in each source for every seed, stacked; None where there is none.

    One backward pass for all seeds, or one for each where an operation cannot be batched (cuDNN's LSTM).
    """
    try:
        grads = torch.autograd.grad(
            outputs, sources, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return list(grads)
    except RuntimeError as error:
        if "atching rule not implemented" not in str(error):
            raise
    each = [torch.autograd.grad(outputs, sources, seed, retain_graph=True, allow_unused=True) for seed in seeds]
    return [None if own[0] is None else torch.stack(own) for own in zip(*each, strict=True)]


def _cat(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
