"""Rows that no layer rule gives: derivatives of each sample's outputs in some parameters, written out.

Four exact methods, from fast to slow, for a model that was run on a batch of n samples:

    expanded  the pass once more with a copy of the parameters for each sample (`woodbury.model.expanded`)
    func      torch.func: one sample's pass, differentiated and mapped over the samples in chunks
    chunks    ordinary autograd on a few samples at a time, with a backward pass batched over them
    graph     ordinary autograd on the graph of the batch itself, sample after sample

`expanded` needs functions of parameters that torch.func can map over samples, `func` a whole model that it can
transform, be it one that calls torch.func itself. `func` and `chunks` need outputs for some samples that are
those it gives for the whole batch, and so no random numbers. The outputs are compared at every batch, as a model
may change (`model.train()`), and the rows at every new shape: an axis may look like that of samples, and
torch.func has had wrong rules for some operations (the backward pass of `prelu`, mapped twice over as many samples
as seeds).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._process import ForAllThreads
from woodbury._vector import Parts
from woodbury.layers.attention import plain_attention
from woodbury.layers.forms import byte_limit, windows
from woodbury.model.expanded import expand
from woodbury.model.findings import Findings

Forward = Callable[[nn.Module, Any], Tensor]

_CHUNK = 32  # samples in a chunk of plain autograd: work per chunk grows with the square, overhead falls

# max |y(theta + d theta') - y(theta)|, theta' being theta with random signs, for a share d; 0 if it is not known
Moved = Callable[[float], float]
Announce = Callable[[int, str], None]  # the number of passes through the model that rows take, and why
_IN_CHUNKS = (
    f"torch.func cannot map the model over samples, so that it runs on {_CHUNK} samples at a time, with a "
    "backward pass over all of them for each"
)
_ONE_BY_ONE = "the model does not give the same on part of a batch, so that rows take a backward pass per sample"


@dataclass(frozen=True)
class Pass:
    """A forward pass over a batch: what was run, on what, and the outputs (n, C) attached to the graph."""

    model: nn.Module
    forward: Forward
    inputs: Any
    outputs: Tensor
    moved: Moved
    random: _random.Snapshot | None = None  # the random state before it, if it may be repeated

    def gives(self, outputs: Tensor, window: slice | None = None) -> bool:
        """Whether another pass gave these outputs for the same samples, or for a window of them."""
        return outputs_agree(outputs, self.outputs[window or slice(None)].detach(), self.moved)

    def part(self, start: int, count: int) -> Any:
        """The inputs of the samples from `start` on."""
        return _batch.part(self.inputs, slice(start, start + count), len(self.outputs))


class Bound(nn.Module):
    """forward(model, inputs) as a module, so that functional_call can exchange the model's parameters."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, inputs: Any) -> Tensor:
        return self.run(self.model, inputs)


def written_rows(
    forward_pass: Pass,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    start: int,
    findings: Findings,
    max_bytes: int | None,
    announce: Announce,
) -> Parts:
    """Rows (m, k, *shape) of each parameter for columns (m, k, C) of the samples from `start` on.

    By the method that worked for this model before, if any: `findings` know it, and the shapes of columns whose
    rows were checked. `announce` hears how many passes a slow method is going to take.
    """
    method, checked = findings.fallback_method, findings.checked_rows
    outputs_of_all, window = forward_pass.outputs, slice(start, start + len(columns))
    methods: dict[str, Callable[[], tuple[Tensor, Parts]]] = {
        "expanded": lambda: rows_by_expansion(forward_pass, parameters, columns, start),
        "func": lambda: rows_by_func(forward_pass, parameters, columns, start, max_bytes),
        "chunks": lambda: rows_by_chunks(forward_pass, parameters, columns, start),
    }
    # the one that worked before first; where it fails (another term of the same fit, say) all others are tried
    order = [] if method == "graph" else sorted(methods, key=lambda name: name != method)
    for name in order:
        # A comparison would make a device wait: there a method that worked is trusted until the model's mode
        # changes.
        known = name == method and columns.device.type != "cpu" and (name, columns.shape) in checked
        random = None if known else _random.snapshot(columns.device)
        try:
            outputs, rows = methods[name]()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever torch.func, or a model on fewer samples, does not like
            is_right = False
        else:
            if random is None:
                return rows
            is_right = forward_pass.gives(outputs, window) and (
                (name, columns.shape) in checked
                or not wrong_rows(rows, outputs_of_all, parameters, columns, start)
            )
        if is_right:
            findings.note_method(name, columns.shape)
            if name == "chunks":
                announce(min(len(columns), _CHUNK), _IN_CHUNKS)
            return rows
        if random is not None:
            _random.restore(random)
    announce(len(columns), _ONE_BY_ONE)
    findings.note_method("graph")
    return rows_on_graph(outputs_of_all, parameters, columns, start)


def wrong_rows(
    rows: Parts,
    outputs: Tensor,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    start: int,
    dtype: torch.dtype | None = None,
) -> set[str]:
    """The parameters for which sum_ik c_ik row_ik is not the gradient of sum_ik c_ik columns_ik . outputs_i.

    For some fixed c: no two samples, and no two columns, have the same. Half of the digits must agree, of those
    that `dtype` has, or the rows.
    """
    m, k, _ = columns.shape
    generator = torch.Generator(device="cpu").manual_seed(0)
    c = torch.rand(m, k, generator=generator, dtype=torch.float32, device="cpu").to(columns) + 0.5
    seed = torch.zeros_like(outputs)
    seed[start : start + m] = torch.einsum("nk,nkc->nc", c, columns)
    grads = torch.autograd.grad(
        outputs, list(parameters.values()), seed, retain_graph=True, materialize_grads=True
    )
    wrong = set()
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        own = rows[name]
        if own.shape != (m, k, *parameter.shape):
            wrong.add(name)
            continue
        flat = own.reshape(m * k, -1)
        # of the terms that add up
        size = float(c.flatten().to(own) @ flat.abs().amax(1)) if flat.shape[1] else 0.0
        tolerance = torch.finfo(dtype or own.dtype).eps ** 0.5 * size
        difference = (c.flatten().to(own) @ flat - grad.flatten()).abs()
        if not math.isfinite(size) or not bool((difference <= tolerance).all()):
            wrong.add(name)
    return wrong


def outputs_agree(
    a: Tensor, b: Tensor, moved: Moved, digits: float = 0.5, dtype: torch.dtype | None = None
) -> bool:
    """Whether the outputs of two passes agree in this share of their digits, or those of `dtype`.

    They do if they differ by at most d |b|, d = eps^digits. Residuals of an equation near its solution are small
    differences of large terms, and their rounding errors are larger than that. The rounding of a pass acts like
    changes of the parameters by eps of themselves: `moved(d)`, how far the outputs move where every parameter
    changes by d of itself, is d times the size of the terms.
    """
    if a.shape != b.shape:
        return False
    share, size = torch.finfo(dtype or a.dtype).eps ** digits, float(b.abs().max())
    if not math.isfinite(size):
        return False
    if torch.allclose(a, b, rtol=share, atol=share * size):
        return True
    return float((a - b).abs().max()) <= moved(share)


@contextmanager
def _without_batching_warnings() -> Iterator[None]:
    """Inside, torch.func does not tell of operations that it maps slowly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


no_batching_warnings = ForAllThreads(_without_batching_warnings)


def rows_by_expansion(
    forward_pass: Pass, parameters: Mapping[str, nn.Parameter], columns: Tensor, start: int
) -> tuple[Tensor, Parts]:
    """Outputs (m, C) and rows (m, k, *shape) for columns (m, k, C) of the samples from `start` on."""
    samples, window = len(forward_pass.outputs), slice(start, start + len(columns))
    leaves, copies = expand(parameters, samples)
    bound = Bound(forward_pass.model, forward_pass.forward)
    with torch.enable_grad(), _random.replayed(forward_pass.random), no_batching_warnings, plain_attention:
        named = {f"model.{name}": own for name, own in copies.items()}
        outputs = torch.func.functional_call(bound, named, (forward_pass.inputs,)).reshape(samples, -1)
    seeds = columns.new_zeros(columns.shape[1], samples, columns.shape[2])
    seeds[:, window] = columns.transpose(0, 1)
    grads = grads_of_many(outputs, leaves, seeds)
    rows: Parts = {}
    for (name, own), grad in zip(parameters.items(), grads, strict=True):
        rows[name] = (
            own.new_zeros(*columns.shape[:2], *own.shape) if grad is None else grad[:, window].transpose(0, 1)
        )
    return outputs[window].detach(), rows


def rows_by_func(
    forward_pass: Pass,
    parameters: Mapping[str, nn.Parameter],
    columns: Tensor,
    start: int,
    max_bytes: int | None,
) -> tuple[Tensor, Parts]:
    """Outputs (n, C) and, for columns (n, k, C) of the samples from `start` on, rows (n, k, *shape)."""
    bound = Bound(forward_pass.model, forward_pass.forward)
    samples, per_sample, _ = columns.shape
    inputs = forward_pass.part(start, samples)
    point = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    leaves, structure = _batch.leaves_of(inputs, samples)
    mapped = [index for index, leaf in enumerate(leaves) if _batch.has_samples(leaf, samples)]
    if not all(isinstance(leaves[index], Tensor) for index in mapped):
        raise TypeError("torch.func maps over tensors alone")  # the next method takes lists too

    def rows_of_sample(sample: list[Tensor], seeds: Tensor) -> tuple[Tensor, Parts]:
        own = list(leaves)
        for index, leaf in zip(mapped, sample, strict=True):
            own[index] = leaf.unsqueeze(0)
        batch = pytree.tree_unflatten(own, structure)

        def outputs(values: Parts) -> Tensor:
            result: Tensor = torch.func.functional_call(bound, values, (batch,))
            return result.reshape(-1)

        raw, back = cast(Any, torch.func.vjp(outputs, point))
        return raw, torch.func.vmap(lambda seed: back(seed)[0])(seeds)

    bytes_per_sample = per_sample * sum(
        parameter.numel() * parameter.element_size() for parameter in parameters.values()
    )
    results = []
    with no_batching_warnings, torch.no_grad(), plain_attention:
        for window in windows(samples, byte_limit(max_bytes, columns.device) // max(1, bytes_per_sample)):
            own = [leaves[index][window] for index in mapped]
            results.append(torch.func.vmap(rows_of_sample)(own, columns[window]))
    outputs, rows = zip(*results, strict=True)
    return _cat(outputs), {name: _cat([row[f"model.{name}"] for row in rows]) for name in parameters}


def rows_by_chunks(
    forward_pass: Pass, parameters: Mapping[str, nn.Parameter], columns: Tensor, start: int
) -> tuple[Tensor, Parts]:
    """The same as `rows_by_func`, by plain autograd on a few samples at a time."""
    samples = len(columns)
    inputs = forward_pass.part(start, samples)
    outputs, pieces = [], []
    for window in windows(samples, _CHUNK):
        with torch.enable_grad():
            raw = forward_pass.forward(forward_pass.model, _batch.part(inputs, window, samples))
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
) -> Parts:
    """Rows (m, k, *shape) of samples from `start` on, for outputs (n, C) attached to the graph of any model.

    One backward pass per sample, batched over its columns; or one for all samples together.
    """
    m, k, width = columns.shape
    rows = []
    for window in windows(m, m if together else 1):
        sample_count = window.stop - window.start
        seeds = columns.new_zeros(sample_count, k, len(outputs), width)
        own = torch.arange(sample_count, device=columns.device)
        seeds[own, :, own + window.start + start] = columns[window]
        grads = grads_of_many(outputs, list(parameters.values()), seeds.flatten(0, 1))
        rows.append(
            [
                parameter.new_zeros(sample_count, k, *parameter.shape)
                if grad is None
                else grad.detach().unflatten(0, (sample_count, k))
                for parameter, grad in zip(parameters.values(), grads, strict=True)
            ]
        )
    return {name: _cat(own) for name, own in zip(parameters, zip(*rows, strict=True), strict=True)}


def grads_of_many(
    outputs: Tensor | GradientEdge,
    sources: Sequence[Any],
    seeds: Tensor,
    tell: Callable[[int], None] | None = None,
) -> list[Tensor | None]:
    """Gradients of seed . outputs in each source for every seed, stacked; None where there is none.

    One backward pass for all seeds, or one for each where an operation cannot be batched (cuDNN's LSTM, GroupNorm
    on memory with channels last); `tell` hears of their number.
    """
    try:
        grads = torch.autograd.grad(
            outputs, sources, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return list(grads)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # what holds for one seed as well is raised below
    if tell is not None:
        tell(len(seeds))
    each = [torch.autograd.grad(outputs, sources, seed, retain_graph=True, allow_unused=True) for seed in seeds]
    return [None if own[0] is None else torch.stack(own) for own in zip(*each, strict=True)]


def _cat(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
