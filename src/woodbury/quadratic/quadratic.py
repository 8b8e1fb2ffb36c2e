"""m(p): the quadratic model of the loss around theta for one batch.

    m(p) - m(0) = (g + W theta) . p + p^T (B + W) p / 2,     B = U^T U,  W the weight decay

With the rows Z of the batch (factor rows of S2 in front, then gradient rows of the samples outside it)

    U = Z[:curvature_rows] / sqrt(D),      g = Z^T (e / M, 1 / M) + gradient

`quadratic.at(damping)` adds lambda |p - q|^2 / 2 and minimises. A metric and the rows of earlier batches give
quadratics again (`woodbury.quadratic.metric`, `woodbury.quadratic.memory`).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from woodbury._batch import Batch
from woodbury._random import Snapshot, replayed
from woodbury._vector import Space, Vector
from woodbury.curvature import Curvature
from woodbury.device.constants import ones
from woodbury.device.scalars import Scalar, Scale, Truth, compute
from woodbury.linalg import sum_of_squares, trace
from woodbury.losses.factors import Factor
from woodbury.model.plan import Plan
from woodbury.parallel.group import Group
from woodbury.products import FactorProducts
from woodbury.quadratic.decay import Decay
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.passes import Batches, Passes, Piece
from woodbury.row_matrix import Rows


@dataclass(frozen=True)
class Blocks:
    """Which blocks of B are kept: all of it, or one block per layer (SMW-NG-BD).

    The terms of layers form the small system: (r, r), or (b, r, r) for b blocks.
    """

    name: str
    is_whole: bool

    def parameter_names(self, plan: Plan) -> list[tuple[str, ...]]:
        """The names of the parameters of each block."""
        return [tuple(plan.parameters)] if self.is_whole else plan.blocks

    def sizes(self, plan: Plan) -> list[int]:
        """The number of parameters in each block."""
        return [plan.size] if self.is_whole else plan.block_sizes

    def are_smaller(self, plan: Plan, row_count: int) -> bool:
        """Whether each block of B is smaller than the Gram matrix of so many factor rows."""
        return row_count > max(self.sizes(plan))

    def gram(self, rows: Rows, scales: Mapping[str, Scale] | None, dtype: torch.dtype | None) -> Tensor:
        """Z D Z^T of each block."""
        if self.is_whole:
            return rows.gram(scales=scales, dtype=dtype)
        return torch.stack(rows.layer_grams(scales=scales, dtype=dtype))

    def join(self, terms: list[Tensor]) -> Tensor:
        """The sum of the terms of each block, from one term per layer."""
        if self.is_whole and len(terms) < 4:
            return reduce(torch.add, terms)
        stacked = torch.stack(terms)
        return stacked.sum(0) if self.is_whole else stacked


BLOCKS = {"full": Blocks("full", is_whole=True), "layer": Blocks("layer", is_whole=False)}


@dataclass(frozen=True)
class Solver(ABC):
    """A way to minimise a damped quadratic model: the name that users choose, and the finals it leads to."""

    name: ClassVar[str]
    forms_rows: ClassVar[bool] = True  # else it takes products alone, and needs no layer rules
    exact: ClassVar[bool] = False  # fails only where the matrix is not definite, and looks at no number meanwhile
    has_trace: ClassVar[bool] = True  # whether there is a K that a damping can be relative to
    takes_processes: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False  # whether tensors of a step live on in the state
    tolerance: float | None = field(default=None, kw_only=True)  # relative residual at which an iteration stops

    @abstractmethod
    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        """The damped model."""

    def trace(self, quadratic: Quadratic) -> Scalar:
        """The trace of K, which is that of B. What it needs is kept for the solves that follow."""
        return trace(quadratic.factor_gram()) / quadratic.divisor

    def size(self, plan: Plan, blocks: Blocks, row_count: int, others: int) -> int:
        """Rows of each matrix to be factored, or 0 for none, for so many factor rows and rows of other samples."""
        return row_count + others


@dataclass
class Minimizer:
    """p of one damping, with what the quadratic model says about it."""

    displacement: Displacement
    predicted: Scalar  # m(0) - m(p)
    squared_norm: Scalar  # |p|^2
    usable: Truth  # whether the system could be solved
    image: Tensor | None = field(default=None, kw_only=True)  # Z p, where it is known
    gains: dict[str, Any] = field(default_factory=dict, kw_only=True)  # of the optimizer's state


class Damped(ABC):
    """m(p) + lambda |p - q|^2 / 2: factored once, where it is factored at all, and solved many times."""

    def __init__(self, quadratic: Quadratic, damping: Scalar, refine: bool = False) -> None:
        """refine: its minimizer by one step, where the factorisation allows it."""
        self.quadratic, self.damping, self.refine = quadratic, damping, refine

    @property
    def center(self) -> Vector | None:
        """q, None for zero."""
        return self.quadratic.center

    @cached_property
    def base(self) -> Vector | None:
        """p0."""
        return self.quadratic.base(self.damping)

    @abstractmethod
    def minimizer(self) -> Minimizer:
        """p = argmin m(p) + lambda |p - q|^2 / 2."""

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        """(B + W + lambda I)^{-1} U^T w for w = weights / sqrt(D), with one weight per factor row, (m,).

        refine: by one step, where the factorisation allows it. Without it the matrix is symmetric to rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factorisation to pull back with")

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        """Why p cannot be trusted, if so; the condition of the system is asked for with `look` alone."""
        return None


@dataclass(eq=False)
class Problem:
    """The question of one step: a batch, how it goes through the model, and what the model of it is made of."""

    plan: Plan
    group: Group  # the processes whose samples are one batch
    passes: Passes
    batch: Batch
    curvature: Curvature
    solver: Solver
    blocks: Blocks
    gram_dtype: torch.dtype | None
    decay: Decay | None  # W
    center: Vector | None  # q = mu p_prev, None for zero
    apart: bool  # whether the rows of S2 must be had without the others
    full: Batches | None  # a loader that f and g are taken over, instead of the batch
    held_out: tuple[Any, Tensor | None] | None  # other samples, on which a search judges the step
    random: Snapshot | None  # before the first pass through the model, if it may draw random numbers
    state: Mapping[str, Any]  # of the optimizer
    check_room: Callable[[Problem, Tensor], None]  # hears of the outputs before rows are formed


@dataclass(eq=False)
class Quadratic(Problem):
    """A problem with its quadratic model; see the module docstring."""

    pieces: list[Piece]  # the batch as it went through the model, S2 first
    rows: Rows | FactorProducts  # Z, unscaled
    curvature_rows: int
    divisor: Scalar  # D
    term_count: Scalar  # M, what the mean loss of the batch divides by
    e: Tensor | None  # (curvature rows,), S e = r up to a rest, None for ones; zero where g is that of a loader
    gradient: Vector | None  # the part of g that is not in Z
    loss: Scalar  # f(theta) of the samples that were run
    _gram: Tensor | None = None  # Z Z^T, or its first rows, once formed: for other dampings
    _complete: Vector | None = None  # all of g, once formed

    @property
    def space(self) -> Space:
        return self.plan.space

    @property
    def is_plain(self) -> bool:
        """Whether Z has the factor rows alone, as one block, and there is no weight decay."""
        return self.all_rows.row_count == self.curvature_rows and self.blocks.is_whole and self.decay is None

    @property
    def all_rows(self) -> Rows:
        """Z, where it is formed."""
        assert isinstance(self.rows, Rows)
        return self.rows

    def at(self, damping: Scalar, refine: bool = False) -> Damped:
        """m(p) + lambda |p - q|^2 / 2; with `refine` its minimizer is refined by one step."""
        return self.solver.at(self, damping, refine)

    def by_layer(self) -> Quadratic:
        """The same without the entries of B between parameters of two layers."""
        return replace(self, blocks=BLOCKS["layer"], _gram=None)

    # -- what is asked of it --------------------------------------------------------------------------------

    def trace(self) -> Scalar:
        """Of K, which is that of B."""
        return self.solver.trace(self)

    def image(self, p: Vector) -> Tensor:
        """Z p, (rows,)."""
        return self.all_rows.matvec(p)

    def slopes(self, vectors: Sequence[Vector], images: Tensor) -> list[float]:
        """(g + W theta) . p for vectors p with the images Z p, (k, rows); waits for the device."""
        term_count = float(self.term_count)
        slopes = [total / term_count for total in (images @ self._row_weights(images.shape[1])).tolist()]
        outside = self._outside
        if outside is not None:
            slopes = [slope + float(outside.dot(p)) for slope, p in zip(slopes, vectors, strict=True)]
        return slopes

    def predicted(self, p: Vector, images: Tensor) -> Scalar:
        """m(0) - m(p) = -(g + W theta) . p - p^T (B + W) p / 2 for Z p of each block, (b, rows) or (rows,)."""
        image = images if images.dim() == 1 else images.sum(0)
        curvature = sum_of_squares(images[..., : self.curvature_rows]) / self.divisor
        if self.decay is not None:
            curvature = curvature + self.decay.curvature(p)
        return -self.slopes([p], image.unsqueeze(0))[0] - 0.5 * curvature

    # -- g --------------------------------------------------------------------------------------------------

    @property
    def factor_weights(self) -> Tensor:
        """e, written out."""
        return ones(self.curvature_rows, self.plan.dtype, self.plan.device) if self.e is None else self.e

    @cached_property
    def pull(self) -> Tensor:
        """w = -D e / M, one per factor row: Z[:m]^T w / D is -g, but for rows of other samples and `gradient`."""
        return self.factor_weights * -(self.divisor / self.term_count)

    @property
    def _outside(self) -> Vector | None:
        """g' + W theta, None for zero: g' is the part of the gradient that is not in the rows."""
        if self.decay is None:
            return self.gradient
        return self.decay.force if self.gradient is None else self.decay.force + self.gradient

    def _row_weights(self, row_count: int) -> Tensor:
        """(e, 1), one weight per row."""
        e, others = self.factor_weights, row_count - self.curvature_rows
        return e if not others else torch.cat([e, e.new_ones(others)])

    def all_of_gradient(self) -> Vector:
        """g = Z^T (e / M, 1 / M) + gradient."""
        if self._complete is None:
            complete = self.rows.rmatvec(self._row_weights(self.rows.row_count) / self.term_count)
            if self.gradient is not None:
                complete = complete + self.gradient
            # rows are those of all processes; products are those of this one
            self._complete = complete if isinstance(self.rows, Rows) else self.group.sum_vector(complete)
        return self._complete

    def slope(self) -> Vector:
        """g + W theta."""
        gradient = self.all_of_gradient()
        return gradient if self.decay is None else gradient + self.decay.force

    def force(self, damping: Scalar) -> Vector:
        """lambda q - W theta - g, which (B + lambda + W) p is equal to."""
        force = -self.slope()
        return force if self.center is None else force + self.center * damping

    def base(self, damping: Scalar) -> Vector | None:
        """p0 = (lambda q - W theta - g') / (lambda + W): p without any row; None if zero."""
        outside = self._outside
        if outside is None:
            return self.center
        base = outside / -damping
        if self.center is not None:
            base = base + self.center
        return base if self.decay is None else self.decay.scaled(base, damping)

    # -- matrices -------------------------------------------------------------------------------------------

    def gram(self, damping: Scalar | None = None, head: bool = False) -> Tensor:
        """Z D Z^T of each block for D = lambda / (lambda + W), or with `head` its first rows.

        Without a damping Z Z^T. Another damping comes back with the same Z Z^T.
        """
        scales = None if damping is None or self.decay is None else self.decay.scales(damping)
        if scales is not None and self.decay is not None and not self.decay.is_uniform:
            return self.blocks.gram(self.all_rows, scales, self.gram_dtype)
        if self._gram is None:
            rows = self.all_rows
            if head:
                by_layer = rows.gram_head(self.curvature_rows, self.gram_dtype)
                self._gram = rows.joined(self.blocks.join(by_layer))
            else:
                self._gram = self.blocks.gram(rows, None, self.gram_dtype)
        return self._gram if scales is None else self._gram * next(iter(scales.values()))

    def factor_gram(self, damping: Scalar | None = None) -> Tensor:
        """The same between factor rows, (b, m, m)."""
        m, gram = self.curvature_rows, self.gram(damping)
        return gram if gram.shape[-1] == m else gram.narrow(-1, 0, m).narrow(-2, 0, m)

    @cached_property
    def matrices(self) -> list[Tensor]:
        """B by block, for all dampings."""
        (divisor,) = compute(self.divisor)
        names = self.blocks.parameter_names(self.plan)
        formed = self.all_rows.curvature(self.curvature_rows, names, self.gram_dtype)
        return [matrix.div_(divisor) for matrix in formed]

    # -- rows -----------------------------------------------------------------------------------------------

    def combine_factor_rows(self, c: Tensor) -> Vector:
        """Z[:m]^T c for coefficients (m,), or (b, m) to give each layer its own."""
        rows, others = self.all_rows, self.all_rows.row_count - self.curvature_rows
        return rows.rmatvec(torch.cat([c, c.new_zeros(*c.shape[:-1], others)], dim=-1) if others else c)

    def written_out(self, most: int) -> Quadratic:
        """The same with rows written out in layers of at most so many parameters whose rows are sums."""
        rows = self.all_rows
        forms = dict(rows.forms)
        for name, size in zip(self.plan.owned, self.plan.block_sizes, strict=True):
            if size <= most and name in forms:
                forms[name] = forms[name].written_out()
        if all(map(operator.is_, forms.values(), rows.forms.values())):
            return self
        return replace(self, rows=Rows(self.plan, forms, rows.row_count))

    # -- the outputs y of the curvature samples around theta, in the units of the rows: S^T y, (m,) -----------

    def second_derivative(self, p: Vector) -> Tensor:
        """S^T y'' along p."""
        with replayed(self.random):
            return self._in_rows(self.pieces[0].capture.second_derivative(p.parts))

    def change_of_outputs(self, p: Vector) -> Tensor:
        """S^T (y(theta + p) - y)."""
        piece = self.pieces[0]
        with replayed(self.random):
            moved = Displacement.of(self.plan, p).outputs_on(piece.capture)
        return self._in_rows(moved.reshape(piece.outputs.shape) - piece.outputs)

    def _in_rows(self, outputs: Tensor) -> Tensor:
        return self._factor.rmatvec(outputs[: self.batch.curvature]).flatten()

    @cached_property
    def _factor(self) -> Factor:
        piece, samples = self.pieces[0], self.batch.curvature
        outputs, targets = piece.outputs[:samples], piece.targets[:samples]
        return self.curvature.factor(self.passes.rule, self.passes.loss, outputs, targets)
