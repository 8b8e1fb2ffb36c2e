"""U, the matrix behind every method here: one row S_i^T J_i / sqrt(n) per sample and factor column.

With U the damped curvature matrix is U^T U + lambda I and the Gram matrix is K = U U^T. Rows are
sample-major (row = i k + a) and stored layer by layer; U itself is formed only by `dense`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from woodbury._batch import Batch, check_batch
from woodbury._choice import FALLBACKS, part_named
from woodbury._random import restore, snapshot
from woodbury._vector import Parts, Vector
from woodbury.curvature import CURVATURES
from woodbury.layers.forms import Dtype, RowForm, Scales, add_own_product, byte_limit, length_of, paired, windows
from woodbury.linalg import Solution, full_precision
from woodbury.losses.rules import check_term_count, loss_rule, prepare
from woodbury.model.buffers import Buffers
from woodbury.model.capture import GraphCapture, call_model, capture
from woodbury.model.compiled import run_as_written, written_model
from woodbury.model.fallback import Forward
from woodbury.model.independence import check_samples_apart
from woodbury.model.plan import Plan, plan_layers

_PASSES = 200  # operations in the time that one number of p takes in memory: written, added, its norm taken


SmallSolver = Callable[[Tensor, Tensor], Solution]  # of (b, m, m) and (b, m)


class Slab(NamedTuple):
    """Part of a parameter: parameter[window], of `size` numbers."""

    name: str
    window: slice
    size: int


@lru_cache(256)
def forming_pays(sizes: tuple[tuple[int, int, int, int], ...], r: int, head: int) -> bool:
    """Whether p formed, with the first `head` rows of K, costs less than p factored, with all of K.

    For layers (i, o) of n samples, (i, o, n, m), and r rows, the first `head` those of the first m samples.
    Factored, a layer costs 2 n^2 i + 2 r^2 o for K and, after the first layer, 2 n^2 (i + o) in the trial pass;
    formed, it costs several passes over its weights instead.
    """
    factored = formed = 0
    for index, (i, o, n, m) in enumerate(sizes):
        factored += 2 * n * n * i + 2 * r * r * o + 2 * n * n * (i + o if index else o)
        formed += 2 * m * n * i + 2 * head * r * o + _PASSES * i * o
        if index == 0:  # the first layer in the trial pass: known from its Gram matrix, or computed
            formed += min(2 * n * n * (i + o), 2 * n * i * o)
    return formed < factored


class Rows:
    """The matrix U: rows stored layer by layer. See the module docstring for their order."""

    joint = False  # whether they are those of several processes

    def __init__(self, plan: Plan, forms: Mapping[str, RowForm], row_count: int) -> None:
        self.plan = plan
        self.forms = forms
        self.row_count = row_count
        self._written: Tensor | None = None  # U itself, where `curvature` has written it out

    def gram(self, other: Rows | None = None, scales: Scales = None, dtype: Dtype = None) -> Tensor:
        """K = U D U'^T, (r, r'), summed over layers; U' = U and D = I by default.

        scales gives D as one number per parameter name; sums are accumulated in dtype. other are rows of the same
        model, perhaps of a batch that uses other layers. With the gradient rows, the row sums give U g without
        forming g.
        """
        other = self if other is None else other
        total: Tensor | None = None
        with full_precision():
            for name, form in self.forms.items():
                if name in other.forms:
                    mine, theirs = (form, form) if other is self else paired(form, other.forms[name])
                    own = None if scales is None else self._scales_of(name, scales)
                    total = mine.gram(theirs, own, dtype, total)
        return self.new_zeros(self.row_count, other.row_count, dtype=dtype) if total is None else total

    def new_zeros(self, *sizes: int, dtype: Dtype = None) -> Tensor:
        """Zeros of the type of the rows, or of dtype."""
        return torch.zeros(sizes, dtype=self.plan.dtype if dtype is None else dtype, device=self.plan.device)

    def diagonal(self, width: int = 1, scales: Scales = None, dtype: Dtype = None) -> Tensor:
        """The diagonal of K = U D U^T, (r,): the squared norms of the rows. K itself is not formed.

        A width above 1 gives blocks of so many rows along the diagonal, (r / width, width, width): with the number
        of columns per sample, the block of each sample.
        """
        dtype = self.plan.dtype if dtype is None else dtype
        total = self.new_zeros(self.row_count // width, width, width, dtype=dtype)
        with full_precision():
            for name, form in self.forms.items():
                total += form.diagonal(width, self._scales_of(name, scales), dtype, self._byte_limit)
        return total.flatten() if width == 1 else total

    def gram_head(self, row_count: int, dtype: Dtype = None) -> list[Tensor]:
        """The first rows of the Gram matrix of each layer, (row_count, r)."""
        with full_precision():
            return [form.gram_head(row_count, dtype, index == 0) for index, form in enumerate(self.forms.values())]

    def head_forms(self, row_count: int) -> Mapping[str, RowForm]:
        """The first rows by layer: of this process, if they are those of several."""
        if self.row_count == row_count:
            return self.forms
        return {name: form.head(row_count) for name, form in self.forms.items()}

    def joined(self, columns: Tensor) -> Tensor:
        """Columns of the Gram matrix that belong to the rows here, and those of other processes if any."""
        return columns

    def shared_out(self, solve: SmallSolver) -> SmallSolver:
        """A solver of the small systems, whose blocks are shared out to processes if there are several."""
        return solve

    def forming_pays(self, head: int) -> bool:
        """`forming_pays` for these layers; False if one of them is not affine."""
        sizes = []
        for form in self.forms.values():
            own = form.affine_sizes(head)
            if own is None:
                return False
            sizes.append(own)
        return forming_pays(tuple(sizes), self.row_count, head)

    def layer_grams(self, scales: Scales = None, dtype: Dtype = None) -> list[Tensor]:
        """The terms of `gram`, one per layer."""
        with full_precision():
            return [form.gram(form, self._scales_of(name, scales), dtype) for name, form in self.forms.items()]

    def _scales_of(self, block: str, scales: Scales) -> Scales:
        """The scales of a block's parameters, by their own names."""
        return None if scales is None else {own: scales[full] for own, full in self.plan.owned[block].items()}

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        """U v, (r,), for a vector v by parameter name (the paper's J theta_1)."""
        if self._written is not None and isinstance(vector, Vector):
            return self._written.mv(vector.flat)
        return torch.stack(self.layer_matvec(vector)).sum(0)

    def layer_matvec(self, vector: Mapping[str, Tensor]) -> list[Tensor]:
        """The terms of `matvec`, one per layer."""
        return [
            form.matvec({own: vector[full] for own, full in self.plan.owned[name].items()})
            for name, form in self.forms.items()
        ]

    def rmatvec(self, coefficients: Tensor) -> Vector:
        """U^T c for coefficients (r,), or (layers, r) to give each layer its own (the paper's J^T x)."""
        if self._written is not None and coefficients.dim() == 1:
            return Vector(self.plan.space, self._written.t().mv(coefficients))
        result: Parts = {}
        for index, (name, form) in enumerate(self.forms.items()):
            own = coefficients[index] if coefficients.dim() == 2 else coefficients
            result |= {self.plan.owned[name][local]: value for local, value in form.rmatvec(own).items()}
        return self.plan.space.pack(result) if result else self.plan.space.zeros(coefficients)

    def dense(self) -> Tensor:
        """U itself, (r, p), columns in the order of the model's trainable parameters."""
        parameters = self.plan.parameters.items()
        strip = [Slab(name, slice(0, length_of(own.shape)), own.numel()) for name, own in parameters]
        return self._write_rows(strip, self.row_count, self.plan.dtype).detach()

    def curvature(self, row_count: int, blocks: Sequence[Sequence[str]], dtype: Dtype = None) -> list[Tensor]:
        """U^T U over the first rows, (p, p) for the parameters of each block, in the order of its names.

        Cheaper than the Gram matrix where there are more rows than parameters. Sums are accumulated in dtype. Rows
        are written out for as many parameters at a time as `max_bytes` of the plan allows.
        """
        dtype = self.plan.dtype if dtype is None else dtype
        with full_precision():
            return [self._curvature_of(self._strips(block, dtype), row_count, dtype) for block in blocks]

    def _curvature_of(self, strips: list[list[Slab]], row_count: int, dtype: torch.dtype) -> Tensor:
        """U^T U over the first rows for the parameters of these strips."""
        ends = list(accumulate(sum(slab.size for slab in strip) for strip in strips))
        spans = [slice(*own) for own in pairwise([0, *ends])]
        matrix = torch.empty(ends[-1], ends[-1], dtype=dtype, device=self.plan.device)
        for strip, rows in zip(strips, spans, strict=True):
            left = self._write_rows(strip, row_count, dtype)
            add_own_product(matrix[rows, rows], left.t(), beta=0)
            is_whole = left.shape == self.shape and [slab.name for slab in strip] == list(self.plan.parameters)
            if is_whole and dtype == self.plan.dtype:
                self._written = left
            for other, columns in zip(strips, spans, strict=True):
                if columns.start >= rows.stop:
                    right = self._write_rows(other, row_count, dtype)
                    torch.mm(left.t(), right, out=matrix[rows, columns])
                    matrix[columns, rows] = matrix[rows, columns].t()
        return matrix

    def squared_columns(self, row_count: int) -> Parts:
        """The diagonal of U^T U over the first rows, by parameter."""
        squares: dict[str, list[Tensor]] = {name: [] for name in self.plan.parameters}
        with full_precision():
            for strip in self._strips(tuple(self.plan.parameters), self.plan.dtype):
                for slab in strip:
                    written = self._write_rows([slab], row_count, self.plan.dtype)
                    squares[slab.name].append(written.square().sum(0))
        return {name: torch.cat(own).view_as(self.plan.parameters[name]).detach() for name, own in squares.items()}

    @property
    def _byte_limit(self) -> int:
        """For rows that are written out: half of `max_bytes`."""
        return byte_limit(self.plan.max_bytes, self.plan.device) // 2

    def _strips(self, block: Sequence[str], dtype: torch.dtype) -> list[list[Slab]]:
        """The parameters of a block in strips; the rows of each take at most half of `max_bytes`."""
        budget = self._byte_limit // dtype.itemsize // max(1, self.row_count)
        strips: list[list[Slab]] = [[]]
        room = budget
        for name in block:
            shape = self.plan.parameters[name].shape
            inside = math.prod(shape[1:])
            for window in windows(length_of(shape), budget // max(1, inside)):
                size = (window.stop - window.start) * inside
                if size > room and strips[-1]:
                    strips.append([])
                    room = budget
                strips[-1].append(Slab(name, window, size))
                room -= size
        return strips

    def _write_rows(self, strip: Sequence[Slab], row_count: int, dtype: torch.dtype) -> Tensor:
        """The first rows for the parameters of a strip, (row_count, p)."""
        columns = []
        for name, window, size in strip:
            module, own = self.plan.block_of[name]
            if module in self.forms:
                columns.append(self.forms[module].slab(own, window, dtype)[:row_count].reshape(row_count, size))
            else:
                columns.append(torch.zeros(row_count, size, dtype=dtype, device=self.plan.device))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    @property
    def shape(self) -> tuple[int, int]:
        """(r, p)."""
        return self.row_count, self.plan.size


def rows(
    model: nn.Module,
    loss: nn.Module | None,
    inputs: Any,
    targets: Tensor | None = None,
    curvature: str = "gauss-newton",
    forward: Forward | None = None,
    fallback: str | None = None,
    max_bytes: int | None = None,
) -> Rows:
    """The rows U of a batch, for use without an optimizer (neural tangent kernels, Laplace, influence).

    Args:
        model: a module; only parameters with requires_grad count.
        loss: one that `GaussNewton` takes, or None for S = I: then U = J, a row for each of the C numbers that the
            model returns for a sample, and nothing is divided by n.
        inputs, targets: a batch of n samples.
        curvature: "gauss-newton" (k rows per sample, U^T U = (1/n) sum J^T H J) or "empirical" (one row per
            sample, U^T U = (1/n) sum of outer products of per-sample gradients), without 1/n for a loss that is a
            sum. Where the loss is a mean over tokens, see `woodbury.curvature`.
        forward: f(model, inputs) in place of model(inputs).
        fallback: "autograd" computes rows that no layer rule covers.
        max_bytes: memory for temporaries of the Gram matrix, beside the rows and the matrix itself.
    """
    kind = part_named("curvature", curvature, CURVATURES)
    if loss is None:
        return capture_rows(model, inputs, targets, unit_columns, forward, fallback, max_bytes)
    loss = written_model(loss)
    rule = loss_rule(loss)

    def columns_of(captured: GraphCapture) -> Tensor:
        prepared = prepare(rule, loss, captured.raw, targets)
        columns = kind.factor(rule, loss, captured.outputs.detach(), prepared).columns()
        if rule.is_sum(loss):
            return columns
        term_count = check_term_count(rule.count(loss, prepared))
        return columns / float(kind.divisor(term_count, len(columns))) ** 0.5

    return capture_rows(model, inputs, targets, columns_of, forward, fallback, max_bytes)


def unit_columns(captured: GraphCapture) -> Tensor:
    """S = I: the unit vectors at the outputs of each sample, (n, C, C)."""
    n, width = captured.outputs.shape
    return torch.eye(width, dtype=captured.outputs.dtype, device=captured.outputs.device).expand(n, width, width)


def capture_rows(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    columns_of: Callable[[GraphCapture], Tensor],
    forward: Forward | None = None,
    fallback: str | None = None,
    max_bytes: int | None = None,
    check: bool = True,
) -> Rows:
    """The rows U of the columns (n, k, C) that a function makes of a pass over a batch.

    check looks whether the model mixes samples, which takes a few passes more.
    """
    model, has_fallback = written_model(model), part_named("fallback", fallback, FALLBACKS)
    plan = plan_layers(model, dict(model.named_parameters()), has_fallback, max_bytes=max_bytes)
    samples, random = check_batch(inputs, targets), snapshot(plan.device)
    inputs = Batch(inputs, targets, samples, samples).copied().inputs  # which rows keep
    buffers = Buffers(plan.buffers, {})
    try:
        run = buffers.preserved(run_as_written(forward or call_model, plan.has_compiled), inputs)
        captured = capture(plan, run, inputs, samples)
        if check:
            check_samples_apart(captured)
        columns = columns_of(captured)
        return Rows(plan, captured.rows([columns]), columns.shape[:2].numel())
    finally:
        buffers.put_back()
        restore(random)


def kernel(
    model: nn.Module,
    x1: Any,
    x2: Any = None,
    forward: Forward | None = None,
    fallback: str | None = "autograd",
    max_bytes: int | None = None,
) -> Tensor:
    """The empirical neural tangent kernel J(x1) J(x2)^T, of shape (n1, C, n2, C); x2 = x1 by default.

    Entry [i, a, j, b] is the inner product of the gradients of output a at sample i of x1 and of output b at
    sample j of x2 in all trainable parameters. C counts all numbers that the model returns for a sample. No
    gradient is written out where the layer's rows have a structure.

    Args:
        model, forward, fallback, max_bytes: as in `woodbury.rows`.
        x1, x2: inputs of n1 and n2 samples.
    """
    x2 = x1 if x2 is None else x2
    settings: dict[str, Any] = {"forward": forward, "fallback": fallback, "max_bytes": max_bytes}
    first = rows(model, None, x1, **settings)
    K = first.gram(first if x2 is x1 else rows(model, None, x2, **settings))
    n1, n2 = check_batch(x1, None), check_batch(x2, None)
    return K.reshape(n1, K.shape[0] // n1, n2, K.shape[1] // n2)
