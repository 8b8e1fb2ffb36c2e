"""The model around theta: the rows of a batch, S2 in front, and what of the gradient they do not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from woodbury import _vector
from woodbury._batch import Batch
from woodbury._vector import Vector
from woodbury.device.scalars import Scalar
from woodbury.layers.forms import concatenate_forms
from woodbury.losses.rules import check_count
from woodbury.optim.passes import Passes, Piece, total_count
from woodbury.optim.step import Problem
from woodbury.products import FactorProducts
from woodbury.row_matrix import Rows, curvature_divisor, loss_factor


@dataclass
class Linearization:
    """The model around theta: Z with U in front, and g = Z^T (e / M, 1 / M) + gradient."""

    rows: Rows | FactorProducts  # Z, unscaled
    curvature_rows: int  # the first so many rows of Z, over sqrt(D), are U
    divisor: Scalar  # D
    count: Scalar  # M, what the mean loss of the batch divides by
    e: Tensor | None  # (curvature rows,), S e = r, None for ones; zero where g is given by `gradient` alone
    gradient: Vector | None  # the part of g that is not in Z
    curvature: list[Tensor] | None = None  # B by block, once formed

    def factor_weights(self, like: Tensor) -> Tensor:
        """e, written out."""
        return like.new_ones(self.curvature_rows) if self.e is None else self.e


def linearize(
    problem: Problem,
    curvature: str,
    products_by: Sequence[tuple[str, ...]] | None,
    check_memory: Callable[[Tensor], None],
) -> tuple[Linearization, list[Piece]]:
    """Run the model on the batch and return its rows, S2 in front, with the loss of every sample.

    With blocks in products_by Z has the factor rows alone, and none of them is formed: products with them are
    taken block by block. check_memory hears of the outputs of the model before rows are formed.
    """
    batch = problem.batch
    # One pass over the whole batch, unless sending the columns of S2 back would drag the rest along.
    whole = batch.curvature == batch.samples or curvature == "empirical" or problem.is_chain
    if whole and products_by is None and problem.full is None:
        return _at_once(problem, curvature, check_memory)
    return _in_pieces(problem, curvature, products_by, check_memory)


def segments_of(
    passes: Passes, curvature: str, batch: Batch, outputs: Tensor, targets: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Columns for the rows of Z: of S2, then of the samples outside it where e, which comes too, holds S2's g.

    (m, k, C), or (m, C) for one a sample. e is None for ones, and where the loss has none.
    """
    if curvature == "empirical":  # every factor row is a gradient row: all in one go
        return [passes.residual(outputs, targets)], None
    m = batch.curvature
    factor = passes.rule.compact_factor(passes.loss, outputs[:m], targets[:m])
    segments = [factor.columns()]
    if factor.e is None:
        return segments, None
    if m < batch.samples:
        segments.append(passes.residual(outputs[m:], targets[m:]))
    return segments, factor.e.flatten()


def divisor_of(curvature: str, count: Scalar, samples: int) -> Scalar:
    """D for S2 with this count and so many samples."""
    return curvature_divisor(curvature, check_count(count, "the curvature samples"), samples)


def _at_once(
    problem: Problem, curvature: str, check_memory: Callable[[Tensor], None]
) -> tuple[Linearization, list[Piece]]:
    """By one pass over the whole batch."""
    passes, batch, m = problem.passes, problem.batch, problem.batch.curvature
    piece, outputs = passes.evaluate(batch.inputs, batch.targets, batch.samples)
    targets, gradient = piece.targets, None
    count = chosen = total_count([piece])
    check_memory(piece.capture.raw)
    if m < batch.samples:
        chosen = passes.rule.count_of_first(passes.loss, targets, m)
    segments, e = segments_of(passes, curvature, batch, outputs, targets)
    if e is None and curvature == "gauss-newton":
        gradient = piece.capture.gradient(passes.residual(outputs, targets) / count)
    segments = [columns if columns.dim() == 3 else columns.unsqueeze(1) for columns in segments]
    height = sum(columns.shape[0] * columns.shape[1] for columns in segments)
    rows = Rows(problem.plan, piece.capture.rows(segments), height)
    width = m * segments[0].shape[1]
    if gradient is not None:
        e = outputs.new_zeros(width)
    return Linearization(rows, width, divisor_of(curvature, chosen, m), count, e, gradient), [piece]


def _in_pieces(
    problem: Problem,
    curvature: str,
    products_by: Sequence[tuple[str, ...]] | None,
    check_memory: Callable[[Tensor], None],
) -> tuple[Linearization, list[Piece]]:
    """The same with S2 and the samples outside it run through the model one after the other."""
    passes, batch = problem.passes, problem.batch
    given = problem.full is not None  # g comes from the loader: S2 is all we need
    evaluated = [passes.evaluate(*part) for part in batch.pieces()[: 1 if given else None]]
    pieces = [piece for piece, _ in evaluated]
    divisor = divisor_of(curvature, pieces[0].count, batch.curvature)
    count = total_count(pieces)
    if products_by is None:
        check_memory(pieces[0].capture.raw)
    piece, outputs = evaluated[0]
    factor = loss_factor(passes.rule, passes.loss, outputs, piece.targets, curvature)
    width = batch.curvature * factor.width
    in_rows = (
        0 if factor.e is None else 1 if products_by is not None else len(pieces)
    )  # pieces whose gradient Z holds
    gradient: Vector | None = None
    for piece, outputs in evaluated[len(evaluated) if given else in_rows :]:
        part = piece.capture.gradient(passes.residual(outputs, piece.targets) / count)
        gradient = part if gradient is None else _vector.combine(gradient, part)
    e = outputs.new_zeros(width) if factor.e is None or given else factor.e.flatten()
    if products_by is not None:
        rows: Rows | FactorProducts = FactorProducts(
            pieces[0].capture.outputs, problem.plan.parameters, factor, products_by
        )
    else:
        segments = [factor.columns()]
        for piece, outputs in evaluated[1:in_rows]:
            segments.append(passes.residual(outputs, piece.targets).unsqueeze(1))
        forms = [piece.capture.rows([own]) for piece, own in zip(pieces, segments, strict=False)]
        height = sum(own.shape[0] * own.shape[1] for own in segments)
        rows = Rows(problem.plan, concatenate_forms(forms), height)
    return Linearization(rows, width, divisor, count, e, gradient), pieces
