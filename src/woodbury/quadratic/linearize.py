"""The quadratic model of a batch, from passes through the model: its rows, S2 in front, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodbury._batch import Batch
from woodbury._random import Snapshot
from woodbury._vector import Vector
from woodbury.curvature import Curvature
from woodbury.device.scalars import Scalar
from woodbury.layers.forms import concatenate_forms
from woodbury.losses.factors import Factor
from woodbury.model.plan import Plan
from woodbury.products import FactorProducts
from woodbury.quadratic.blocks import Blocks
from woodbury.quadratic.decay import Decay
from woodbury.quadratic.joint import JointRows, take_apart
from woodbury.quadratic.objective import Objective, OnPieces, over_loader
from woodbury.quadratic.passes import Batches, Passes, Piece, check_loss, mean_of
from woodbury.quadratic.quadratic import Outputs, Quadratic, Solver
from woodbury.row_matrix import Rows


@dataclass(eq=False)
class Problem:
    """The question of one step: a batch, how it goes through the model, and what the model of it is made of."""

    passes: Passes
    batch: Batch
    curvature: Curvature
    solver: Solver
    blocks: Blocks
    gram_dtype: torch.dtype | None
    decay: Decay | None
    center: Vector | None  # q = mu p_prev
    is_chain: bool  # whether the model is a plain chain of Linear layers, by its structure or as it was seen
    apart: bool  # whether the rows of S2 must be had without the others
    full: Batches | None  # a loader that f and g are taken over, instead of the batch
    held_out: tuple[Any, Tensor | None] | None  # other samples, on which a search judges the step
    random: Snapshot | None  # before the first pass through the model, if it may draw random numbers
    state: Mapping[str, Any]  # of the optimizer
    check_memory: Callable[[Problem, Tensor], None]  # hears of the outputs before rows are formed

    @property
    def plan(self) -> Plan:
        return self.passes.plan


def linearize(problem: Problem) -> tuple[Quadratic, Objective]:
    """The quadratic model of a problem, and f with its decrease."""
    passes, batch, full = problem.passes, problem.batch, None
    if problem.full is not None:
        # The loader first: its random numbers must be the ones that its second reading repeats.
        full = over_loader(passes, problem.full, problem.decay, problem.random)
    # One pass over the whole batch, unless sending the columns of S2 back would drag the rest along.
    whole = batch.curvature == batch.samples or problem.is_chain
    at_once = whole or (problem.curvature.one_pass and not problem.apart)
    alone = problem.full is None and passes.group.size == 1
    quadratic = (_at_once if at_once and problem.solver.forms_rows and alone else _in_pieces)(problem)
    if full is None:
        pieces, random = quadratic.pieces, problem.random
        return quadratic, OnPieces(passes, quadratic.loss, problem.decay, random, pieces, quadratic.term_count)
    quadratic.gradient = full.gradient
    if passes.is_sum:  # over the samples of the loader
        quadratic.divisor = quadratic.divisor * batch.samples / full.samples
    return quadratic, full


def _quadratic(problem: Problem, pieces: list[Piece], **parts: Any) -> Quadratic:
    """The quadratic model of pieces that have gone through the model; parts are what they gave."""
    passes = problem.passes
    return Quadratic(
        plan=problem.plan,
        blocks=problem.blocks,
        solver=problem.solver,
        gram_dtype=problem.gram_dtype,
        decay=problem.decay,
        center=problem.center,
        pieces=pieces,
        outputs=Outputs(passes, problem.curvature, pieces[0], problem.batch.curvature, problem.random),
        is_chain=problem.is_chain,
        group=passes.group,
        state=problem.state,
        **parts,
    )


def _at_once(problem: Problem) -> Quadratic:
    """By one pass over the whole batch."""
    passes, batch, m = problem.passes, problem.batch, problem.batch.curvature
    piece, outputs = passes.evaluate(batch.inputs, batch.targets, batch.samples)
    targets, gradient = piece.targets, None
    term_count = curvature_terms = passes.term_count([piece])
    loss = check_loss(mean_of([piece.losses], term_count))
    problem.check_memory(problem, piece.capture.raw)
    if m < batch.samples and not passes.is_sum:
        curvature_terms = passes.rule.count_of_first(passes.loss, targets, m)
    seeds = problem.curvature.seeds(passes.rule, passes.loss, outputs, targets, m)
    shapes = [own.shape for own in seeds.columns]
    heights = [shape[0] * shape[1] if len(shape) == 3 else shape[0] for shape in shapes]
    width = m * shapes[0][1] if len(shapes[0]) == 3 else m
    if seeds.rest is not None:
        weights = torch.cat([seeds.rest, outputs.new_zeros(batch.samples - m, seeds.rest.shape[1])])
        gradient = problem.plan.space.pack(piece.capture.gradient(weights / term_count))
    rows = Rows(problem.plan, piece.capture.rows(seeds.columns), sum(heights))
    divisor = passes.divisor(problem.curvature, curvature_terms, m, batch.samples) / seeds.unit**2
    return _quadratic(
        problem,
        [piece],
        rows=rows,
        curvature_rows=width,
        divisor=divisor,
        term_count=term_count,
        e=seeds.e,
        gradient=gradient,
        loss=loss,
    )


def _in_pieces(problem: Problem) -> Quadratic:
    """The same with S2 and the samples outside it run through the model one after the other.

    Where no rows are formed Z has the factor rows alone: products with them are taken block by block.
    """
    passes, batch, group = problem.passes, problem.batch, problem.passes.group
    from_loader, forms_rows = problem.full is not None, problem.solver.forms_rows
    with group.together():
        # where g comes from a loader, S2 is all we need
        evaluated = [passes.evaluate(*part) for part in batch.pieces()[: 1 if from_loader else None]]
        pieces = [piece for piece, _ in evaluated]
        if forms_rows:
            problem.check_memory(problem, pieces[0].capture.raw)
        piece, outputs = evaluated[0]
        factor = problem.curvature.factor(passes.rule, passes.loss, outputs, piece.targets)
    term_count, loss, divisor = passes.totals(pieces, problem.curvature, batch)
    assert factor.e is not None
    e = outputs.new_zeros(factor.e.numel()) if from_loader else factor.e.flatten()
    in_rows = len(pieces) if forms_rows else 1  # pieces whose gradient Z holds
    gradient = None
    if not from_loader:
        gradient = _outside_rows(problem, evaluated, factor.rest, in_rows, term_count)
    rows: Rows | FactorProducts
    if not forms_rows:
        names = problem.blocks.parameter_names(problem.plan)
        rows = FactorProducts(pieces[0].capture.outputs, problem.plan.parameters, factor, names)
    else:
        rows, e, gradient = _rows_of(problem, evaluated, factor, e, gradient)
    return _quadratic(
        problem,
        pieces,
        rows=rows,
        curvature_rows=len(e),
        divisor=divisor / factor.unit**2,
        term_count=term_count,
        e=e,
        gradient=gradient,
        loss=loss,
    )


def _rows_of(
    problem: Problem, evaluated: list[tuple[Piece, Tensor]], factor: Factor, e: Tensor, gradient: Vector | None
) -> tuple[Rows, Tensor, Vector | None]:
    """The rows of all pieces, those of S2 in front; rows, e and gradient of all processes if there are several."""
    plan, passes, group = problem.plan, problem.passes, problem.passes.group
    columns = [factor.columns()]
    for piece, outputs in evaluated[1:]:
        columns.append(passes.residual(outputs, piece.targets).unsqueeze(1))
    with group.together():
        pairs = zip(evaluated, columns, strict=True)
        forms = [piece.capture.rows([own]) for (piece, _), own in pairs]
        height = sum(own.shape[0] * own.shape[1] for own in columns)
        rows = Rows(plan, concatenate_forms(forms), height)
        if group.size == 1:
            return rows, e, gradient
        head = take_apart(plan.model, forms[0])
    joint = JointRows(rows, head, len(e), gradient is not None, group)
    e = torch.cat(group.gather(e, joint.factor_rows))
    if joint.has_gradient:
        gradient = group.sum_vector(plan.space.zeros(e) if gradient is None else gradient)
    return joint, e, gradient


def _outside_rows(
    problem: Problem,
    evaluated: list[tuple[Piece, Tensor]],
    rest: Tensor | None,
    in_rows: int,
    term_count: Scalar,
) -> Vector | None:
    """The part of the gradient that Z does not hold: the rest of the factor, and pieces without rows."""
    passes, space = problem.passes, problem.plan.space
    gradient: Vector | None = None
    if rest is not None:
        gradient = space.pack(evaluated[0][0].capture.gradient(rest / term_count))
    for piece, outputs in evaluated[in_rows:]:
        part = space.pack(piece.capture.gradient(passes.residual(outputs, piece.targets) / term_count))
        gradient = part if gradient is None else gradient + part
    return gradient
