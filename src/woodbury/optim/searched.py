"""A step with a `CurvedSearch`: p from a ladder of dampings, the bend of its path, and the length along it.

The numbers of the search decide what comes next, so that such a step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from woodbury import _batch, _random, _vector
from woodbury._vector import Vector
from woodbury.blocks import BLOCKS
from woodbury.curvature import Curvature
from woodbury.displacement import Displacement
from woodbury.linalg import minimize_nonnegative
from woodbury.optim.ladder import Rung, Systems, ladder_of
from woodbury.optim.linearize import Linearization
from woodbury.optim.metric import Units
from woodbury.optim.passes import Piece, check_loss, mean_of
from woodbury.optim.path import Choice, Judge, along_path
from woodbury.optim.sample_space import Cholesky, System
from woodbury.optim.step import Problem, Proposal, decay_decrease
from woodbury.row_matrix import Rows
from woodbury.search import LENGTHS_OF_ONE_RUNG, STAY, CurvedSearch, Length

OUT_OF_SCALE = 30.0  # residuals over what the parameters produce
KEPT = 0.7  # of the decrease that the quadratic model promised: deeper from here on (half a step gives 3/4),
LOST = 0.4  # back below this (a quarter of a step gives 7/16)
DEEPEST = 5
RIDGE = 1e-10  # of the k x k system of the combination, relative to its diagonal


@dataclass
class Memory:
    """What a search remembers from step to step."""

    length: float = 1.0  # where the next line search starts
    dull: int = 0  # steps in a row that gained next to nothing
    dropped: int = 0  # rungs left out
    agreement: float = 1.0  # see `_agreement`
    depth: int = 0  # 1: with the deep rung; above: continued by 2^(depth - 2) iterations
    is_new: bool = field(default=True, repr=False)  # before the first step

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Memory:
        return cls(**state, is_new=False) if state else cls()

    def as_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("length", "dull", "dropped", "agreement", "depth")}

    def after(self, search: CurvedSearch, choice: Choice, loss: float, promised: float) -> Memory:
        """After a step along the combination, whose quadratic model promised some decrease."""
        length, decrease = choice.length.length, choice.length.decrease
        gained = decrease >= search.least_gain * abs(loss)
        dropped = self.dropped
        if length <= search.hopeless and bool(choice.coefficients.any()):
            dropped = min(dropped + 1, len(search.rungs) - 1)
        elif length >= 0.25:
            dropped = max(dropped - 1, 0)
        kept = decrease / promised if promised > 0 else 0.0
        depth = self.depth + (kept >= KEPT) - (kept < LOST)
        depth = 0 if search.deep is None or dropped else min(max(depth, 0), DEEPEST)
        return Memory(length or 1.0, 0 if gained else self.dull + 1, dropped, depth=depth)


def searched_proposal(
    problem: Problem,
    search: CurvedSearch,
    curvature: Curvature,
    solver: Cholesky,
    system: System,
    line: Linearization,
    pieces: list[Piece],
    state: Mapping[str, Any],
    units: Units | None = None,
) -> Proposal:
    """The step that a search finds; state is what it left behind at the step before, units those of a metric."""
    systems = Systems(problem, solver, system, line if units is None else units.of_line(line), units)
    trace, memory = systems.trace(), Memory.read(state)
    ladder = ladder_of(systems, search, trace, memory.dropped, memory.depth)
    if not ladder:
        nothing = _vector.zeros_like(problem.plan.parameters)
        choice = Choice(nothing, STAY._replace(decrease=math.nan), torch.zeros(1))
        return _proposal(problem, line, pieces, choice, math.nan, 0.0, memory)
    judge = _judge_of(problem, curvature, line, pieces, ladder, trace)
    combined = minimize_nonnegative(judge.products, -judge.slopes, RIDGE)
    layer = None
    if memory.is_new and _is_out_of_scale(problem, search, line):
        layer = _best_layer(problem, search, systems, judge)
    if layer is not None:
        choice, memory = Choice(*layer[:2], combined), Memory()
    elif memory.dull >= search.patience:
        vector, length, rung = _best_of(judge, [own.vector for own in ladder], LENGTHS_OF_ONE_RUNG)
        coefficients = torch.zeros_like(combined)
        coefficients[rung] = float(length.length > 0)
        choice, memory = Choice(vector, length, coefficients), replace(memory, dull=0)
    else:
        choice = along_path(curvature, systems, pieces[0], search, judge, ladder, combined, memory.length)
        memory = memory.after(search, choice, judge.loss, judge.predicted(combined))
    memory.agreement = _agreement(line, ladder, judge, combined)
    predicted = judge.predicted(choice.length.length * choice.coefficients)
    damping = ladder[int(choice.coefficients.argmax())].damping
    return _proposal(problem, line, pieces, choice, predicted, damping, memory)


def _proposal(
    problem: Problem,
    line: Linearization,
    pieces: list[Piece],
    choice: Choice,
    predicted: float,
    damping: float,
    memory: Memory,
) -> Proposal:
    vector, length = choice.vector, choice.length
    # what `_judge` subtracts for weight decay is part of the decrease already
    decrease = length.decrease - float(decay_decrease(problem, vector))
    return Proposal(
        displacement=Displacement(problem.plan.parameters, base=vector),
        predicted=predicted,
        squared_norm=float(_vector.dot(vector, vector)),
        usable=length.length > 0,
        damping=damping,
        loss=line.loss,
        parts=[piece.inputs for piece in pieces],
        center=None,
        evaluate=lambda _: decrease,
        memory={"search": memory.as_state()},
        length=length.length,
        share=float(choice.coefficients.sum()),
        bent=length.bent,
    )


def _agreement(line: Linearization, ladder: Sequence[Rung], judge: Judge, combined: Tensor) -> float:
    """How much of the relative decrease that the batch promises for its smallest damping other samples promise.

    Well below 1 says that the step is limited by the number of samples.
    """
    promised = ladder[-1].predicted / abs(float(line.loss)) if float(line.loss) else 0.0
    if not promised > 0 or not judge.loss:
        return 1.0
    return min(1.0, judge.predicted(combined) / abs(judge.loss) / promised)


def _judge_of(
    problem: Problem,
    curvature: Curvature,
    line: Linearization,
    pieces: list[Piece],
    ladder: Sequence[Rung],
    trace: float,
) -> Judge:
    """The quadratic model along the rungs, on the samples that judge the step."""
    vectors = [rung.vector for rung in ladder]
    if problem.held_out is None:
        rows = line.rows
        assert isinstance(rows, Rows)
        images = torch.stack([rows.matvec(own.vector) if own.image is None else own.image for own in ladder])
        slopes = torch.tensor(
            [float(line.slope(v, own)) for v, own in zip(vectors, images, strict=True)], dtype=torch.float64
        )
        factors = images[:, : line.curvature_rows].double() / float(line.divisor) ** 0.5
        loss, random = float(line.loss), problem.random
    else:
        passes, (inputs, targets) = problem.passes, problem.held_out
        random = None if problem.chain is not None else _random.snapshot(problem.plan.device)
        piece, outputs = passes.evaluate(inputs, targets, _batch.sample_count(inputs))
        pieces, term_count = [piece], float(passes.term_count([piece]))
        loss = float(check_loss(mean_of([piece.losses], term_count)))
        with _random.replayed(random):
            images = piece.capture.push_forward(vectors)  # (k, n, C)
        residual = passes.residual(outputs, piece.targets)
        factor = curvature.factor(passes.rule, passes.loss, outputs, piece.targets)
        slopes = (images.flatten(1).double() @ residual.flatten().double()).cpu() / term_count
        divisor = float(passes.divisor(curvature, term_count, len(outputs), len(outputs)))
        factors = torch.stack([factor.rmatvec(image).flatten() for image in images]).double() / divisor**0.5
    products = (factors @ factors.T).cpu()
    for name, decay in problem.hyper.weight_decay.items():
        if decay:
            own = torch.stack([vector[name].flatten() for vector in vectors]).double()
            theta = problem.plan.parameters[name].detach().flatten().double()
            slopes = slopes + decay * (own @ theta).cpu()
            products = products + decay * (own @ own.T).cpu()
    return Judge(problem, pieces, loss, slopes, products, trace, random)


def _is_out_of_scale(problem: Problem, search: CurvedSearch, line: Linearization) -> bool:
    """Whether the residuals of the batch are far larger than what the parameters produce: |e| > 30 |S^T J theta|.

    Then steps in all layers at once are limited by the product of their changes: one layer must find the scale.
    """
    if search.first is None or problem.held_out is not None or line.e is None:
        return False
    assert isinstance(line.rows, Rows)
    theta = {name: own.detach() for name, own in problem.plan.parameters.items()}
    own = line.rows.matvec(theta)[: line.curvature_rows]
    # the rows are S^T J / s and e is s S^-1 r: e / s^2 is in their unit
    unit = float(line.divisor) / float(line.term_count) * problem.batch.samples / problem.batch.curvature
    return bool(unit * line.e.norm() > OUT_OF_SCALE * own.norm())


def _best_layer(
    problem: Problem, search: CurvedSearch, systems: Systems, judge: Judge
) -> tuple[Vector, Length] | None:
    """The best step of a single layer, -(B_ll + lambda D)^{-1} g_l, if it takes away at least half of the loss."""
    names = BLOCKS["layer"].parameter_names(problem.plan)
    if search.first is None or len(names) < 2:
        return None
    vector = systems.by_layer(search.first * judge.trace)
    if vector is None:
        return None
    best, length = _best_of(judge, [_vector.restrict(vector, block) for block in names], (1.0,))[:2]
    return (best, length) if length.decrease >= 0.5 * abs(judge.loss) else None


def _best_of(judge: Judge, vectors: Sequence[Vector], lengths: Sequence[float]) -> tuple[Vector, Length, int]:
    """The best step along one of some vectors, and which one it is."""
    best, step, which = STAY, {}, 0
    for index, own in enumerate(vectors):
        for length in lengths:
            trial = _vector.scaled(own, length)
            decrease = judge.decrease(trial)
            if decrease > best.decrease:
                best, step, which = Length(length, False, decrease), trial, index
    return step or _vector.zeros_like(vectors[0]), best, which
