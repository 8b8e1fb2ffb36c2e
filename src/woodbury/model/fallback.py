"""Rows that no layer rule gives: derivatives of each sample's outputs in some parameters, written out.

Four exact methods, from fast to slow, for a model that was run on a batch of n samples:

    expanded  the pass once more with a copy of the parameters for each sample (`woodbury.model.expanded`)
    func      torch.func: one sample's pass, differentiated and mapped over the samples in chunks
    chunks    ordinary autograd on a few samples at a time, with a backward pass batched over them
    graph     ordinary autograd on the graph of the batch itself, sample after sample

`expanded` needs functions of parameters that torch.func can map over samples, `func` a whole model that it can
transform, be it one that calls torch.func itself. `func` and `chunks` need outputs for some samples that are
those it gives for the whole batch, and so no random numbers. The outputs are compared at every batch, as a model
may change (`model.train()`), and the rows at every new shape, or every batch if the model reorders samples: an
axis may look like that of samples, and torch.func has had wrong rules for some operations (the backward pass of
`prelu`, mapped twice over as many samples as seeds).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._process import ForAllThreads
from woodbury._vector import Parts
from woodbury.layers.forms import Dtype, byte_limit, windows
from woodbury.layers.maps import plain_attention
from woodbury.layers.rules import WEIGHT_AND_BIAS
from woodbury.model.expanded import expand, grads_by_sample
from woodbury.model.graph import PassGraph
from woodbury.model.plan import Plan
from woodbury.products import transposed_jacobian_product

Forward = Callable[[nn.Module, Any], Tensor]

_CHUNK = 32  # samples in a chunk of plain autograd: work per chunk grows with the square, overhead falls
_IN_CHUNKS = (
    f"torch.func cannot map the model over samples, so that it runs on {_CHUNK} samples at a time, with a "
    "backward pass over all of them for each"
)
_ONE_BY_ONE = "the model does not give the same on part of a batch, so that rows take a backward pass per sample"


@dataclass
class Pass:
    """A forward pass over a batch: what was run, on what, and the outputs (n, C) attached to the graph."""

    plan: Plan
    forward: Forward
    inputs: Any
    outputs: Tensor
    autocast: torch.dtype | None = field(default=None, kw_only=True)  # its type, if not that of the parameters
    random: _random.Snapshot | None = field(default=None, kw_only=True)  # before it, if it may be repeated

    @cached_property
    def graph(self) -> PassGraph:
        return PassGraph.behind(self.outputs)

    @cached_property
    def reorders(self) -> bool:
        """Whether samples may have another order inside; not asked on a device, which would have to wait."""
        samples = len(self.outputs)
        return samples > 1 and self.plan.device.type == "cpu" and self.graph.reorders(samples)

    def moved(self, share: float) -> float:
        """max |y(theta + d) - y(theta)| for changes d by this share of the parameters; 0 where it is not known."""
        return 0.0

    def repeat(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), replayed from a recording of this name where that saves time."""
        return function(*arguments)

    def gives(self, outputs: Tensor) -> bool:
        """Whether another pass gave these outputs for the same samples."""
        return outputs_agree(outputs, self.outputs.detach(), self)

    def run_with(self, values: Mapping[str, Tensor], inputs: Any = None) -> Tensor:
        """What is returned with these values in place of parameters, for the same inputs or others."""
        model = self.plan.model
        with _exchanged(model, values):
            return self.forward(model, self.inputs if inputs is None else inputs)


@contextmanager
def _exchanged(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, these tensors stand for parameters wherever the model has them.

    (`torch.func.functional_call` does not give its parameters back to a module that has two names.)
    """
    others = {id(own): values[name] for name, own in model.named_parameters() if name in values}
    places = [
        (module._parameters, name, own)
        for module in model.modules()
        for name, own in module._parameters.items()
        if id(own) in others
    ]
    try:
        for parameters, name, own in places:
            parameters[name] = others[id(own)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, own in places:
            parameters[name] = own


def outputs_agree(a: Tensor, b: Tensor, forward_pass: Pass, digits: float = 0.5, dtype: Dtype = None) -> bool:
    """Whether the outputs of two passes agree in this share of their digits, or those of `dtype`.

    They do if they differ by at most d |b|, d = eps^digits. Residuals of an equation near its solution are small
    differences of large terms, and their rounding errors are larger than that. The rounding of a pass acts like
    changes of the parameters by eps of themselves: `moved(d)`, how far the outputs move where every parameter
    changes by d of itself, is d times the size of the terms.
    """
    if a.shape != b.shape:
        return False
    share, size = torch.finfo(dtype or a.dtype).eps ** digits, float(b.abs().max())
    a = a.to(b.dtype)  # of a model that casts inside
    if not math.isfinite(size):
        return False
    if torch.allclose(a, b, rtol=share, atol=share * size):
        return True
    return float((a - b).abs().max()) <= forward_pass.moved(share)


@contextmanager
def _without_batching_warnings() -> Iterator[None]:
    """Inside, torch.func does not tell of operations that it maps slowly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


no_batching_warnings = ForAllThreads(_without_batching_warnings)


def tells_little(name: str) -> bool:
    """Whether the name of a parameter does: there are many of it."""
    return name.rpartition(".")[2] in WEIGHT_AND_BIAS


@dataclass(frozen=True)
class WrittenRows:
    """Rows (n, k, *shape) of some parameters, for columns (n, k, C); methods give the outputs they saw as well."""

    forward_pass: Pass
    parameters: Mapping[str, nn.Parameter]
    columns: Tensor

    def compute(self) -> Parts:
        """By the method that worked for this model before, if any, without a check of shapes that were right."""
        columns, findings = self.columns, self.forward_pass.plan.findings
        method, checked = findings.fallback_method, findings.checked_rows
        checked = set() if self.forward_pass.reorders else checked  # what was right for others says nothing
        methods = {"expanded": self.by_expansion, "func": self.by_func, "chunks": self.by_chunks}
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
                is_right = self.forward_pass.gives(outputs) and (
                    (name, columns.shape) in checked or not self.wrong(rows)
                )
            if is_right:
                findings.note_method(name, columns.shape)
                if name == "chunks":
                    self._warn(min(len(columns), _CHUNK), _IN_CHUNKS)
                return rows
            if random is not None:
                _random.restore(random)
        self._warn(len(columns), _ONE_BY_ONE)
        findings.note_method("graph")
        return _rows_on_graph(self.forward_pass.outputs, self.parameters, columns)

    def _warn(self, count: int, why: str) -> None:
        """Say once that rows of parameters without a rule make a step slow."""
        plan, name = self.forward_pass.plan, min(self.parameters, key=tells_little)  # the first telling one
        block, _ = plan.block_of[name]
        plan.findings.warn_of_passes(
            count,
            f"parameter {name!r} of {type(plan.model.get_submodule(block)).__name__} {block!r} has no layer "
            f"rule where it is used, and {why}. Ways out: a rule by woodbury.register_layer, layers that have "
            "one, solver='products', which needs no rows, or requires_grad_(False) on it",
        )

    def wrong(self, rows: Parts, dtype: torch.dtype | None = None) -> set[str]:
        """The parameters for which sum_ik c_ik row_ik is not the gradient of sum_ik c_ik columns_ik . outputs_i.

        For some fixed c: no two samples, and no two columns, have the same. Half of the digits must agree, of
        those that `dtype` has, or the rows.
        """
        (n, k, _), outputs = self.columns.shape, self.forward_pass.outputs
        generator = torch.Generator(device="cpu").manual_seed(0)
        c = torch.rand(n, k, generator=generator, dtype=torch.float32, device="cpu").to(self.columns) + 0.5
        seed = torch.einsum("nk,nkc->nc", c, self.columns).to(outputs.dtype)
        wrong = set()
        for name, grad in transposed_jacobian_product(outputs, self.parameters, seed).items():
            own = rows[name]
            if own.shape != (n, k, *grad.shape):
                wrong.add(name)
                continue
            flat = own.reshape(n * k, -1)
            # of the terms that add up
            size = float(c.flatten().to(own) @ flat.abs().amax(1)) if flat.shape[1] else 0.0
            tolerance = torch.finfo(dtype or own.dtype).eps ** 0.5 * size
            difference = (c.flatten().to(own) @ flat - grad.flatten()).abs()
            if not math.isfinite(size) or not bool((difference <= tolerance).all()):
                wrong.add(name)
        return wrong

    def by_expansion(self) -> tuple[Tensor, Parts]:
        """By one pass with a copy of the parameters for each sample."""
        columns, samples = self.columns, len(self.columns)
        leaves, copies = expand(self.parameters, samples)
        random = _random.replayed(self.forward_pass.random)
        with torch.enable_grad(), random, no_batching_warnings, plain_attention:
            outputs = self.forward_pass.run_with(copies).reshape(samples, -1)
        each = [grads_by_sample(outputs, leaves, copies, seed) for seed in columns.unbind(1)]
        rows: Parts = {}
        for (name, own), grads in zip(self.parameters.items(), zip(*each, strict=True), strict=True):
            zero = own.new_zeros(()).expand(samples, *own.shape)
            # not of the class that inputs may have
            found = [zero if grad is None else grad.as_subclass(Tensor) for grad in grads]
            rows[name] = found[0].unsqueeze(1) if len(found) == 1 else torch.stack(found, 1)
        return outputs.detach(), rows

    def by_func(self) -> tuple[Tensor, Parts]:
        """By torch.func, a pass of one sample at a time."""
        columns, (samples, per_sample, _) = self.columns, self.columns.shape
        point = {name: parameter.detach() for name, parameter in self.parameters.items()}
        leaves, structure = _batch.leaves_of(self.forward_pass.inputs, samples)
        mapped = [index for index, leaf in enumerate(leaves) if _batch.has_samples(leaf, samples)]
        if not all(isinstance(leaves[index], Tensor) for index in mapped):
            raise TypeError("torch.func maps over tensors alone")  # the next method takes lists too

        def rows_of_sample(sample: list[Tensor], seeds: Tensor) -> tuple[Tensor, Parts]:
            own = list(leaves)
            for index, leaf in zip(mapped, sample, strict=True):
                own[index] = leaf.unsqueeze(0)
            batch = pytree.tree_unflatten(own, structure)
            run = self.forward_pass.run_with
            raw, back = cast(Any, torch.func.vjp(lambda values: run(values, batch).reshape(-1), point))
            return raw, torch.func.vmap(lambda seed: back(seed)[0])(seeds)

        bytes_per_sample = per_sample * sum(own.nbytes for own in self.parameters.values())
        limit = byte_limit(self.forward_pass.plan.max_bytes, columns.device) // max(1, bytes_per_sample)
        chunk = max(1, limit) if limit < samples else None
        with no_batching_warnings, torch.no_grad(), plain_attention:
            return torch.func.vmap(rows_of_sample, chunk_size=chunk)([leaves[index] for index in mapped], columns)

    def by_chunks(self) -> tuple[Tensor, Parts]:
        """By plain autograd on a few samples at a time."""
        samples, inputs, outputs, pieces = len(self.columns), self.forward_pass.inputs, [], []
        for window in windows(samples, _CHUNK):
            with torch.enable_grad():
                raw = self.forward_pass.forward(self.forward_pass.plan.model, _batch.part(inputs, window, samples))
                flat = raw.reshape(window.stop - window.start, -1)
            pieces.append(_rows_on_graph(flat, self.parameters, self.columns[window], together=True))
            outputs.append(flat.detach())
        return _cat(outputs), {name: _cat([rows[name] for rows in pieces]) for name in self.parameters}


def _rows_on_graph(
    outputs: Tensor, parameters: Mapping[str, nn.Parameter], columns: Tensor, together: bool = False
) -> Parts:
    """Rows (n, k, *shape) for outputs (n, C) attached to the graph of any model.

    One backward pass per sample, batched over its columns; or one for all samples together.
    """
    n, k, width = columns.shape
    rows = []
    for window in windows(n, n if together else 1):
        sample_count = window.stop - window.start
        seeds = columns.new_zeros(sample_count, k, n, width)
        own = torch.arange(sample_count, device=columns.device)
        seeds[own, :, own + window.start] = columns[window]
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
    outputs: Tensor | GradientEdge, sources: Sequence[Any], seeds: Tensor, tell: Callable[[int], Any] | None = None
) -> list[Tensor | None]:
    """Gradients of seed . outputs in each source for every seed, stacked; None where there is none.

    One backward pass for all seeds, or one for each where an operation cannot be batched (cuDNN's LSTM, GroupNorm
    on memory with channels last); `tell` hears of their number.
    """
    gradients = partial(torch.autograd.grad, outputs, sources, retain_graph=True, allow_unused=True)
    try:
        return list(gradients(seeds, is_grads_batched=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # what holds for one seed as well is raised below
    if tell is not None:
        tell(len(seeds))
    each = zip(*[gradients(seed) for seed in seeds], strict=True)
    return [None if own[0] is None else torch.stack(own) for own in each]


def _cat(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
