"""The quadratic model of a batch, from passes through the model: its rows, S2 in front, and its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from woodbury import _random
from woodbury._vector import Vector
from woodbury.curvature import Seeds
from woodbury.device.scalars import Scalar
from woodbury.layers.forms import concatenate_forms
from woodbury.losses.factors import Factor
from woodbury.products import FactorProducts
from woodbury.quadratic.joint import Head, JointRows, take_apart
from woodbury.quadratic.objective import Objective, OnPieces, over_loader
from woodbury.quadratic.passes import Piece
from woodbury.quadratic.quadratic import Problem, Quadratic
from woodbury.row_matrix import Rows


def linearize(problem: Problem) -> tuple[Quadratic, Objective]:
    """The quadratic model of a problem, and f with its decrease."""
    passes, batch, full = problem.passes, problem.batch, None
    if problem.full is not None:
        # The loader first: its random numbers must be the ones that its second reading repeats.
        full = over_loader(passes, problem.full, problem.decay, problem.random)
    quadratic = _quadratic(problem)
    if full is None:
        pieces, random = quadratic.pieces, problem.random
        return quadratic, OnPieces(passes, quadratic.loss, problem.decay, random, pieces, quadratic.term_count)
    quadratic.gradient = full.gradient
    if passes.is_sum:  # over the samples of the loader
        quadratic.divisor = quadratic.divisor * batch.samples / full.samples
    return quadratic, full


def _evaluate(problem: Problem) -> list[Piece]:
    """One pass over the whole batch, or S2 and the samples outside it one after the other.

    One where it costs no more: columns of S2 sent back would drag the rest along, but not along a chain. Whether a
    model is one, its passes show; it is taken for one until then.
    """
    passes, batch, findings = problem.passes, problem.batch, problem.plan.findings
    whole = batch.inputs, batch.targets, batch.samples
    alone = problem.full is None and problem.group.size == 1 and problem.solver.forms_rows
    if alone and (batch.curvature == batch.samples or (problem.curvature.one_pass and not problem.apart)):
        return [passes.evaluate(*whole)]
    if alone and findings.is_chain is not False:
        piece = passes.evaluate(*whole)
        findings.is_chain = piece.capture.chain is not None
        if findings.is_chain:
            return [piece]
        if problem.random is not None:
            _random.restore(problem.random)
    # where g comes from a loader, S2 is all we need
    parts = batch.pieces()[: 1 if problem.full is not None else None]
    return [passes.evaluate(*part) for part in parts]


def _quadratic(problem: Problem) -> Quadratic:
    """By passes through the model.

    Where no rows are formed Z has the factor rows alone: products with them are taken block by block.
    """
    passes, batch, group, plan = problem.passes, problem.batch, problem.group, problem.plan
    from_loader, forms_rows = problem.full is not None, problem.solver.forms_rows
    with group.together():
        pieces = _evaluate(problem)
    first = pieces[0]
    term_count, loss, divisor = passes.totals(pieces, problem.curvature, batch)
    at_outputs = passes.rule, passes.loss, first.outputs, first.targets
    rows: Rows | FactorProducts
    source: Seeds | Factor
    gradient: Vector | None = None
    with group.together():
        if forms_rows:
            problem.check_room(problem, first.capture.raw)
            source = problem.curvature.seeds(*at_outputs, batch.curvature)
        else:
            source = problem.curvature.factor(*at_outputs)
        if not from_loader and not (forms_rows and source.rest is None):
            gradient = _outside_rows(problem, pieces, source.rest, term_count)
        if isinstance(source, Seeds):
            forms, height = [], 0
            for piece in pieces:
                segments = source.columns if piece is first else [passes.residual(piece)]
                forms.append(piece.capture.rows(segments))
                height += sum([math.prod(segment.shape[:-1]) for segment in segments])
            rows, e = Rows(plan, concatenate_forms(forms), height), source.e
            curvature_rows = batch.curvature * math.prod(source.columns[0].shape[1:-1])
            head = take_apart(plan.model, forms[0]) if group.size > 1 else {}
        else:
            names = problem.blocks.parameter_names(plan)
            rows, e = FactorProducts(first.capture.outputs, plan.parameters, source, names), source.e.flatten()
            curvature_rows = len(e)
    quadratic = Quadratic(
        **vars(problem),
        pieces=pieces,
        rows=rows,
        curvature_rows=curvature_rows,
        divisor=divisor / source.unit**2,
        term_count=term_count,
        e=first.outputs.new_zeros(curvature_rows) if from_loader else e,
        gradient=gradient,
        loss=loss,
    )
    return quadratic if group.size == 1 or not forms_rows else _joint(quadratic, head)


def _joint(local: Quadratic, head: Mapping[str, Head]) -> Quadratic:
    """The quadratic model of all processes, from that of this one and its factor rows."""
    group, e, gradient = local.group, local.factor_weights, local.gradient
    rows = JointRows(local.all_rows, head, len(e), gradient is not None, group)
    if rows.has_gradient:
        gradient = group.sum_vector(local.space.zeros(e) if gradient is None else gradient)
    e = torch.cat(group.gather(e, rows.factor_rows))
    return replace(local, rows=rows, curvature_rows=len(e), e=e, gradient=gradient)


def _outside_rows(problem: Problem, pieces: list[Piece], rest: Tensor | None, term_count: Scalar) -> Vector | None:
    """The part of the gradient that Z does not hold: the rest of the factor, and pieces without rows."""
    passes, space = problem.passes, problem.plan.space
    gradient: Vector | None = None
    if rest is not None:
        others = rest.new_zeros(len(pieces[0].outputs) - len(rest), rest.shape[1])
        gradient = space.pack(pieces[0].capture.gradient(torch.cat([rest, others]) / term_count))
    for piece in [] if problem.solver.forms_rows else pieces[1:]:
        part = space.pack(piece.capture.gradient(passes.residual(piece) / term_count))
        gradient = part if gradient is None else gradient + part
    return gradient
