"""A step with a `CurvedSearch`: p from a ladder of dampings, the bend of its path, and the length along it.

The numbers of the search decide what comes next, so that such a step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury import _batch, _random, _vector
from woodbury._vector import Vector
from woodbury.blocks import BLOCKS
from woodbury.curvature import Curvature
from woodbury.displacement import Displacement
from woodbury.linalg import minimize_nonnegative
from woodbury.optim.linearize import Linearization
from woodbury.optim.metric import Units
from woodbury.optim.passes import Piece, check_loss, mean_of
from woodbury.optim.sample_space import Cholesky, System
from woodbury.optim.step import Answer, Problem, Proposal, decay_decrease
from woodbury.row_matrix import Rows
from woodbury.search import LENGTHS_OF_ONE_RUNG, STAY, CurvedSearch, Length, find_length

OUT_OF_SCALE = 30.0  # residuals over what the parameters produce
KEPT = 0.7  # of the decrease that the quadratic model promised: deeper from here on (half a step gives 3/4)
DEEPEST = 5
RIDGE = 1e-10  # of the k x k system of the combination, relative to its diagonal


@dataclass
class Judge:
    """The samples on which the combination and the length are chosen: the held-out ones, or the batch."""

    pieces: list[Piece]
    loss: float  # f(theta) on them
    slopes: Tensor  # (k,): g . p_j there, on the CPU
    products: Tensor  # (k, k): p_i^T B p_j there
    trace: float  # of K of the batch
    random: _random.Snapshot | None  # at the start of their pass

    def predicted(self, coefficients: Tensor) -> float:
        """m(0) - m(sum_j c_j p_j) of the quadratic model."""
        return float(-self.slopes @ coefficients - 0.5 * coefficients @ self.products @ coefficients)


class Rung(NamedTuple):
    """p of one damping."""

    damping: float
    vector: Vector
    predicted: float  # m(0) - m(p) on the batch
    image: Tensor | None  # Z p, if it is known


@dataclass(frozen=True)
class Systems:
    """(B + lambda D) p = -g for any lambda: a plain system in the units of the metric D (`Units`, None for I)."""

    problem: Problem
    solver: Cholesky
    system: System
    line: Linearization  # in these units
    units: Units | None

    def trace(self) -> float:
        """Of K."""
        return float(self.solver.trace(self.problem, self.line, self.system))

    def rung(self, damping: float, trace: float) -> Rung | None:
        """p of a damping, None where it cannot be had."""
        system = self.system._replace(refine_below=1e-8 * trace)  # larger ones have eight digits without it
        answer = self.solver.answer(self.problem, self.line, system, damping)
        if not _is_usable(answer):
            return None
        vector = self._back(answer.displacement.dense())
        return Rung(damping, vector, float(answer.predicted), answer.image)  # (Z s) (p / s) = Z p

    def by_layer(self, damping: float) -> Vector | None:
        """p of each layer alone."""
        line = replace(self.line, gram=None, matrices=None)
        system = self.system._replace(blocks=BLOCKS["layer"], factors=None)
        answer = self.solver.answer(self.problem, line, system, damping)
        return self._back(answer.displacement.dense()) if _is_usable(answer) else None

    def pull_back(self, weights: Tensor, damping: float) -> Vector:
        """(B + lambda D)^{-1} U^T w."""
        return self._back(self.solver.pull_back(self.problem, self.line, self.system, weights, damping))

    def can_deepen(self) -> bool:
        """Whether all of g is U^T e, of one block and without weight decay, in float64."""
        line, problem = self.line, self.problem
        assert isinstance(line.rows, Rows)
        is_whole = line.gradient is None and line.rows.row_count == line.curvature_rows
        is_plain = self.system.blocks.name == "full" and not problem.hyper.any_decay
        return is_whole and is_plain and problem.plan.dtype == torch.float64

    def deepened(self, rung: Rung, iterations: int) -> Rung:
        """A rung of less damping than can be factored: conjugate gradients on B p = -g, from a rung's p on.

        They are preconditioned by (B + lambda D)^{-1}, whose factor is there. With Z = sqrt(D) U all but p is
        known by its image: the residual -g - B p = Z^T w / D, and Z q of the direction q.
        """
        line, rows = self.line, self.line.rows
        assert isinstance(rows, Rows)
        image = rung.image if rung.image is not None else rows.matvec(self._into(rung.vector))
        e = line.factor_weights(image) * (float(line.divisor) / float(line.term_count))
        w, q_image, before = -e - image, torch.zeros_like(image), math.inf
        q = change = _vector.zeros_like(rung.vector)
        for _ in range(iterations):
            z = self.solver.pull_back(self.problem, line, self.system, w, rung.damping, refine=False)
            z_image = rows.matvec(z)
            slope = float(torch.dot(w, z_image))
            q, q_image = _vector.combine(z, q, slope / before), z_image + slope / before * q_image
            before = slope
            curved = float(torch.dot(q_image, q_image))
            if not (slope > 0 and 0 < curved < math.inf):
                break
            step = slope / curved
            change, image, w = _vector.combine(change, q, step), image + step * q_image, w - step * q_image
        vector = _vector.combine(rung.vector, self._back(change))
        predicted = -torch.dot(e + 0.5 * image, image) / line.divisor
        return Rung(rung.damping, vector, float(predicted), image)

    def _into(self, vector: Vector) -> Vector:
        return vector if self.units is None else self.units.divided(vector)

    def _back(self, vector: Vector) -> Vector:
        return vector if self.units is None else self.units.times(vector)


def _is_usable(answer: Answer) -> bool:
    return bool(answer.usable) and math.isfinite(float(answer.squared_norm))


class Choice(NamedTuple):
    """A step that a search may take."""

    vector: Vector
    length: Length
    coefficients: Tensor  # c of the rungs; the vector is alpha sum_j c_j p_j, bent or not


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
        depth = self.depth + (1 if 0 < KEPT * promised <= decrease else -1)
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
    ladder = _ladder(systems, search, trace, memory)
    if not ladder:
        nothing = {name: torch.zeros_like(own) for name, own in problem.plan.parameters.items()}
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
        vector, length, rung = _best_of(problem, judge, [own.vector for own in ladder], LENGTHS_OF_ONE_RUNG)
        coefficients = torch.zeros_like(combined)
        coefficients[rung] = float(length.length > 0)
        choice, memory = Choice(vector, length, coefficients), replace(memory, dull=0)
    else:
        choice = _along_path(problem, search, curvature, systems, pieces, judge, ladder, combined, memory)
        memory = memory.after(search, choice, judge.loss, judge.predicted(combined))
    memory.agreement = _agreement(line, ladder, judge, combined)
    predicted = judge.predicted(choice.length.length * choice.coefficients)
    damping = ladder[int(choice.coefficients.argmax())].damping
    return _proposal(problem, line, pieces, choice, predicted, damping, memory)


def _along_path(
    problem: Problem,
    search: CurvedSearch,
    curvature: Curvature,
    systems: Systems,
    pieces: list[Piece],
    judge: Judge,
    ladder: Sequence[Rung],
    combined: Tensor,
    memory: Memory,
) -> Choice:
    """The best step along theta + alpha p + alpha^2 bend, or straight ahead, for p = sum_j c_j p_j."""
    p = _combine(combined.tolist(), [rung.vector for rung in ladder])
    if not bool(combined.any()):
        return Choice(p, STAY, combined)
    bend = None
    if search.bend is not None:
        bend = _bend(problem, curvature, systems, pieces, p, search.bend * judge.trace)

    def path(length: float, bent: bool) -> Vector:
        straight = {name: length * value for name, value in p.items()}
        return straight if bend is None or not bent else _vector.combine(straight, bend, length**2)

    def decrease(length: float, bent: bool) -> float:
        return _decrease(problem, judge, path(length, bent))

    length = find_length(decrease, search, memory.length, bend is not None)
    return Choice(path(length.length, length.bent), length, combined)


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


def _ladder(systems: Systems, search: CurvedSearch, trace: float, memory: Memory) -> list[Rung]:
    """Every rung but the last ones, as far as its system could be solved, and the deep ones."""
    if not 0 < trace < math.inf:
        return []
    wanted = search.rungs[: len(search.rungs) - memory.dropped]
    solved = [systems.rung(relative * trace, trace) for relative in wanted]
    ladder = [rung for rung in solved if rung is not None]
    if not memory.depth or search.deep is None or not systems.can_deepen():
        return ladder
    deep = systems.rung(search.deep * trace, trace)
    ladder += [] if deep is None else [deep]
    if ladder and memory.depth > 1:
        ladder.append(systems.deepened(ladder[-1], 2 ** (memory.depth - 2)))
    return ladder


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
        with nullcontext() if random is None else _random.replayed(random):
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
    return Judge(pieces, loss, slopes, products, trace, random)


def _combine(coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
    """sum_j c_j p_j."""
    used = [(c, vector) for c, vector in zip(coefficients, vectors, strict=True) if c]
    if not used:
        return {name: torch.zeros_like(value) for name, value in vectors[0].items()}
    total = {name: used[0][0] * value for name, value in used[0][1].items()}
    for c, vector in used[1:]:
        total = _vector.combine(total, vector, c)
    return total


def _decrease(problem: Problem, judge: Judge, vector: Vector) -> float:
    """f(theta) - f(theta + vector) on the samples that judge the step, weight decay included."""
    displacement = Displacement(problem.plan.parameters, base=vector)
    with nullcontext() if judge.random is None else _random.replayed(judge.random):
        decrease = float(problem.passes.decrease_on(judge.pieces, displacement))
    return decrease + float(decay_decrease(problem, vector))


def _bend(
    problem: Problem,
    curvature: Curvature,
    systems: Systems,
    pieces: list[Piece],
    p: Vector,
    damping: float,
) -> Vector | None:
    """-(B + lambda D)^{-1} J^T H y'' / 2 on the curvature samples of the batch; None if it is not finite."""
    passes, samples = problem.passes, problem.batch.curvature
    piece, random = pieces[0], problem.random
    with nullcontext() if random is None else _random.replayed(random):
        curve = piece.capture.second_derivative(p)[:samples]
    outputs = piece.capture.outputs.detach()[:samples]
    factor = curvature.factor(passes.rule, passes.loss, outputs, piece.targets[:samples])
    weights = factor.rmatvec(curve).flatten()
    bend = systems.pull_back(weights, damping)
    if not math.isfinite(float(_vector.dot(bend, bend))):
        return None
    return {name: -0.5 * value for name, value in bend.items()}


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
    best, length = _best_of(problem, judge, [_vector.restrict(vector, block) for block in names], (1.0,))[:2]
    return (best, length) if length.decrease >= 0.5 * abs(judge.loss) else None


def _best_of(
    problem: Problem, judge: Judge, vectors: Sequence[Vector], lengths: Sequence[float]
) -> tuple[Vector, Length, int]:
    """The best step along one of some vectors, and which one it is."""
    best, step, which = STAY, {}, 0
    for index, own in enumerate(vectors):
        for length in lengths:
            trial = {name: length * value for name, value in own.items()}
            decrease = _decrease(problem, judge, trial)
            if decrease > best.decrease:
                best, step, which = Length(length, False, decrease), trial, index
    return step or {name: torch.zeros_like(own) for name, own in vectors[0].items()}, best, which
