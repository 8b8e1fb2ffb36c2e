"""The model around theta: the rows of a batch, S2 in front, and what of the gradient they do not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.curvature import Curvature
from woodbury.device.scalars import Scalar, scalar
from woodbury.layers.forms import RowForm, concatenate_forms
from woodbury.optim.joint import JointRows, take_apart
from woodbury.optim.passes import Piece, check_loss, mean_of
from woodbury.optim.step import Problem
from woodbury.products import FactorProducts
from woodbury.row_matrix import Rows


@dataclass
class Linearization:
    """The model around theta: Z with U in front, and g = Z^T (e / M, 1 / M) + gradient."""

    rows: Rows | FactorProducts  # Z, unscaled
    curvature_rows: int  # the first so many rows of Z, over sqrt(D), are U
    divisor: Scalar  # D
    term_count: Scalar  # M, what the mean loss of the batch divides by
    e: Tensor | None  # (curvature rows,), S e = r up to a rest, None for ones; zero where g is that of a loader
    gradient: Vector | None  # the part of g that is not in Z
    loss: Scalar  # f(theta) of the samples that were run
    matrices: list[Tensor] | None = None  # B by block, once formed
    gram: Tensor | None = None  # Z Z^T, or its first rows, once formed: for other dampings
    complete: Vector | None = None  # all of g, once formed

    def all_of_gradient(self) -> Vector:
        """g = Z^T (e / M, 1 / M) + gradient."""
        if self.complete is None:
            assert isinstance(self.rows, Rows)
            inside = self.factor_weights(next(iter(self.rows.plan.parameters.values())).detach())
            outside = inside.new_ones(self.rows.row_count - self.curvature_rows)
            self.complete = self.rows.rmatvec(torch.cat([inside, outside]) / self.term_count)
            if self.gradient is not None:
                self.complete = _vector.combine(self.complete, self.gradient)
        return self.complete

    def factor_forms(self) -> Mapping[str, RowForm]:
        """The rows of S2 by layer, without those of other samples."""
        assert isinstance(self.rows, Rows)
        if self.rows.row_count == self.curvature_rows:
            return self.rows.forms
        return {name: form.head(self.curvature_rows) for name, form in self.rows.forms.items()}

    def slope(self, vector: Vector, image: Tensor) -> Scalar:
        """g . p for a vector p with the image Z p, (rows,)."""
        inside = self.factor_weights(image)
        weights = torch.cat([inside, inside.new_ones(len(image) - self.curvature_rows)])
        slope = scalar(torch.dot(weights, image)) / self.term_count
        return slope if self.gradient is None else slope + scalar(_vector.dot(self.gradient, vector))

    def factor_weights(self, like: Tensor) -> Tensor:
        """e, written out."""
        return like.new_ones(self.curvature_rows) if self.e is None else self.e

    def written_out(self, most: int) -> Linearization:
        """The same with rows written out in layers of at most so many parameters whose rows are sums."""
        assert isinstance(self.rows, Rows)
        plan, forms = self.rows.plan, dict(self.rows.forms)
        for name, form in self.rows.forms.items():
            size = sum(plan.parameters[full].numel() for full in plan.owned[name].values())
            if size <= most:
                forms[name] = form.written_out()
        return replace(self, rows=Rows(plan, forms, self.rows.row_count))


def linearize(
    problem: Problem,
    curvature: Curvature,
    products_by: Sequence[tuple[str, ...]] | None,
    check_memory: Callable[[Tensor], None],
    apart: bool = False,
) -> tuple[Linearization, list[Piece]]:
    """Run the model on the batch and return its rows, S2 in front, with the loss of every sample.

    With blocks in products_by Z has the factor rows alone, and none of them is formed: products with them are
    taken block by block. check_memory hears of the outputs of the model before rows are formed. With `apart` the
    rows of S2 can be had without the others (`Linearization.factor_forms`).
    """
    batch = problem.batch
    # One pass over the whole batch, unless sending the columns of S2 back would drag the rest along.
    at_once = batch.curvature == batch.samples or problem.is_chain or (curvature.one_pass and not apart)
    if at_once and products_by is None and problem.full is None and problem.passes.group.size == 1:
        return _at_once(problem, curvature, check_memory)
    return _in_pieces(problem, curvature, products_by, check_memory)


def _at_once(
    problem: Problem, curvature: Curvature, check_memory: Callable[[Tensor], None]
) -> tuple[Linearization, list[Piece]]:
    """By one pass over the whole batch."""
    passes, batch, m = problem.passes, problem.batch, problem.batch.curvature
    piece, outputs = passes.evaluate(batch.inputs, batch.targets, batch.samples)
    targets, gradient = piece.targets, None
    term_count = curvature_terms = passes.term_count([piece])
    loss = check_loss(mean_of([piece.losses], term_count))
    check_memory(piece.capture.raw)
    if m < batch.samples and not passes.is_sum:
        curvature_terms = passes.rule.count_of_first(passes.loss, targets, m)
    columns, e, rest = curvature.seeds(passes.rule, passes.loss, outputs, targets, m)
    shapes = [own.shape for own in columns]
    heights = [shape[0] * shape[1] if len(shape) == 3 else shape[0] for shape in shapes]
    width = m * shapes[0][1] if len(shapes[0]) == 3 else m
    if rest is not None:
        weights = torch.cat([rest, outputs.new_zeros(batch.samples - m, rest.shape[1])])
        gradient = piece.capture.gradient(weights / term_count)
    rows = Rows(problem.plan, piece.capture.rows(columns), sum(heights))
    divisor = passes.divisor(curvature, curvature_terms, m, batch.samples)
    return Linearization(rows, width, divisor, term_count, e, gradient, loss), [piece]


def _in_pieces(
    problem: Problem,
    curvature: Curvature,
    products_by: Sequence[tuple[str, ...]] | None,
    check_memory: Callable[[Tensor], None],
) -> tuple[Linearization, list[Piece]]:
    """The same with S2 and the samples outside it run through the model one after the other."""
    passes, batch = problem.passes, problem.batch
    from_loader = problem.full is not None  # g comes from the loader: S2 is all we need
    group = passes.group
    with group.together():
        evaluated = [passes.evaluate(*part) for part in batch.pieces()[: 1 if from_loader else None]]
        pieces = [piece for piece, _ in evaluated]
        if products_by is None:
            check_memory(pieces[0].capture.raw)
        piece, outputs = evaluated[0]
        factor = curvature.factor(passes.rule, passes.loss, outputs, piece.targets)
    term_count, loss, divisor = passes.totals(pieces, curvature, batch)
    assert factor.e is not None
    width = batch.curvature * factor.width
    in_rows = 1 if products_by is not None else len(pieces)  # pieces whose gradient Z holds
    gradient: Vector | None = None
    if factor.rest is not None and not from_loader:
        gradient = piece.capture.gradient(factor.rest / term_count)
    for piece, outputs in evaluated[len(evaluated) if from_loader else in_rows :]:
        part = piece.capture.gradient(passes.residual(outputs, piece.targets) / term_count)
        gradient = part if gradient is None else _vector.combine(gradient, part)
    e = outputs.new_zeros(width) if from_loader else factor.e.flatten()
    if products_by is not None:
        rows: Rows | FactorProducts = FactorProducts(
            pieces[0].capture.outputs, problem.plan.parameters, factor, products_by
        )
    else:
        columns = [factor.columns()]
        for piece, outputs in evaluated[1:in_rows]:
            columns.append(passes.residual(outputs, piece.targets).unsqueeze(1))
        with group.together():
            forms = [piece.capture.rows([own]) for piece, own in zip(pieces, columns, strict=False)]
            height = sum(own.shape[0] * own.shape[1] for own in columns)
            rows = own_rows = Rows(problem.plan, concatenate_forms(forms), height)
            if group.size > 1:
                head = take_apart(problem.plan.model, forms[0])
        if group.size > 1:
            rows = joint_rows = JointRows(own_rows, head, width, gradient is not None, group)
            e = torch.cat(group.gather(e, joint_rows.factor_rows))
            width = len(e)
            if joint_rows.has_gradient:
                gradient = group.sum_vector(gradient or _vector.zeros_like(problem.plan.parameters))
    return Linearization(rows, width, divisor, term_count, e, gradient, loss), pieces
