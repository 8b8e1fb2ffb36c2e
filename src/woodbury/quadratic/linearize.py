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
from woodbury.model.plan import Plan
from woodbury.products import FactorProducts
from woodbury.quadratic.blocks import Blocks
from woodbury.quadratic.decay import Decay
from woodbury.quadratic.joint import JointRows, take_apart
from woodbury.quadratic.objective import Objective, OnPieces, over_loader
from woodbury.quadratic.passes import Batches, Passes, Piece, check_loss, mean_of
from woodbury.quadratic.quadratic import Outputs, Quadratic, Solver
from woodbury.row_matrix import Rows


@dataclass(frozen=True)
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


@dataclass
class _Parts:
    """What a pass over the batch gives the quadratic model."""

    pieces: list[Piece]
    rows: Rows | FactorProducts
    width: int  # factor rows
    divisor: Scalar
    term_count: Scalar
    e: Tensor | None
    gradient: Vector | None
    loss: Scalar


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
    parts = _at_once(problem) if at_once and problem.solver.forms_rows and alone else _in_pieces(problem)
    objective: Objective
    if full is None:
        objective = OnPieces(passes, parts.loss, problem.decay, problem.random, parts.pieces, parts.term_count)
    else:
        objective, parts.gradient = full, full.gradient
        if passes.is_sum:  # over the samples of the loader
            parts.divisor = parts.divisor * batch.samples / full.samples
    outputs = Outputs(passes, problem.curvature, parts.pieces[0], batch.curvature, problem.random)
    quadratic = Quadratic(
        plan=problem.plan,
        blocks=problem.blocks,
        solver=problem.solver,
        gram_dtype=problem.gram_dtype,
        rows=parts.rows,
        curvature_rows=parts.width,
        divisor=parts.divisor,
        term_count=parts.term_count,
        e=parts.e,
        gradient=parts.gradient,
        decay=problem.decay,
        center=problem.center,
        loss=parts.loss,
        pieces=parts.pieces,
        outputs=outputs,
        is_chain=problem.is_chain,
        group=passes.group,
        state=problem.state,
    )
    return quadratic, objective


def _at_once(problem: Problem) -> _Parts:
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
    return _Parts([piece], rows, width, divisor, term_count, seeds.e, gradient, loss)


def _in_pieces(problem: Problem) -> _Parts:
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
    parts = _Parts(pieces, None, len(e), divisor / factor.unit**2, term_count, e, None, loss)  # type: ignore[arg-type]
    in_rows = len(pieces) if forms_rows else 1  # pieces whose gradient Z holds
    if not from_loader:
        parts.gradient = _outside_rows(problem, evaluated, factor.rest, in_rows, term_count)
    if not forms_rows:
        names = problem.blocks.parameter_names(problem.plan)
        parts.rows = FactorProducts(pieces[0].capture.outputs, problem.plan.parameters, factor, names)
        return parts
    columns = [factor.columns()]
    for piece, outputs in evaluated[1:]:
        columns.append(passes.residual(outputs, piece.targets).unsqueeze(1))
    with group.together():
        forms = [piece.capture.rows([own]) for piece, own in zip(pieces, columns, strict=True)]
        height = sum(own.shape[0] * own.shape[1] for own in columns)
        own_rows = Rows(problem.plan, concatenate_forms(forms), height)
        head = take_apart(problem.plan.model, forms[0]) if group.size > 1 else None
    parts.rows = own_rows
    if head is not None:
        parts.rows = joint = JointRows(own_rows, head, parts.width, parts.gradient is not None, group)
        parts.e = torch.cat(group.gather(e, joint.factor_rows))
        parts.width = len(parts.e)
        if joint.has_gradient:
            nothing = problem.plan.space.zeros(outputs)
            parts.gradient = group.sum_vector(parts.gradient or nothing)
    return parts


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
