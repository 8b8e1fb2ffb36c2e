"""A step with a `CurvedSearch`: p from a ladder of dampings, the bend of its path, and the length along it.

The numbers of the search decide what comes next, so that such a step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury import _random
from woodbury._vector import Vector, weighted_sum
from woodbury.device.scalars import Scalar, as_number
from woodbury.linalg import minimize_nonnegative
from woodbury.policies.proposal import AnyQuadratic, Policy, Proposal
from woodbury.policies.search import LONGEST, STAY, CurvedSearch, Length, find_length
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.objective import Objective, OnPieces, on_samples
from woodbury.quadratic.quadratic import Damped, Minimizer

HOPELESS = 2.0**-12  # a length that leaves out the smallest rung
DULL, LEAST_GAIN = 3, 0.01  # steps in a row that each gain less than this of the loss: the search is stuck
LENGTHS_OF_ONE_RUNG = (1.0, 1 / 4, 1 / 16, 1 / 64)  # tried along each rung alone then
CORRECTIONS = 2  # of a point, at most
OUT_OF_SCALE = 30.0  # residuals over what the parameters produce
KEPT = 0.7  # of the decrease that the quadratic model promised: deeper from here on (half a step gives 3/4),
LOST = 0.4  # back below this (a quarter of a step gives 7/16)
DEEPEST = 5
ENOUGH = 0.95  # of the promised decrease: no corrections
REFINED = 1e-8  # of the trace: dampings below it are refined, larger ones have eight digits without it
RIDGE = 1e-10  # of the k x k system of the combination, relative to its diagonal


@dataclass
class Memory:
    """What a search remembers from step to step."""

    length: float = 1.0  # where the next line search starts
    dull: int = 0  # steps in a row that gained next to nothing
    dropped: int = 0  # rungs left out
    agreement: float = 1.0  # see `_agreement`
    depth: int = 0  # 1: with the deep rung; above: continued by 2^(depth - 2) iterations

    def after(self, search: CurvedSearch, choice: Choice, loss: float, promised: float) -> Memory:
        """After a step along the combination, whose quadratic model promised some decrease."""
        length, decrease = choice.length.length, choice.length.decrease
        gained = decrease >= LEAST_GAIN * abs(loss)
        dropped = self.dropped
        if length <= HOPELESS and bool(choice.coefficients.any()):
            dropped = min(dropped + 1, len(search.rungs) - 1)
        elif length >= 0.25:
            dropped = max(dropped - 1, 0)
        kept = decrease / promised if promised > 0 else 0.0
        depth = self.depth + (kept >= KEPT) - (kept < LOST)
        depth = 0 if search.deep is None or dropped else min(max(depth, 0), DEEPEST)
        return Memory(length or 1.0, 0 if gained else self.dull + 1, dropped, depth=depth)


class Rung(NamedTuple):
    """p of one damping."""

    damping: float
    vector: Vector
    predicted: float  # m(0) - m(p) on the batch
    image: Tensor  # Z p


@dataclass
class Ladder:
    """The damped models of one quadratic model: each is factored once, and gives p and the bends."""

    quadratic: AnyQuadratic
    trace: float  # of K
    _damped: dict[float, Damped] = field(default_factory=dict)

    def at(self, damping: float) -> Damped:
        if damping not in self._damped:
            self._damped[damping] = self.quadratic.at(damping, refine=damping < REFINED * self.trace)
        return self._damped[damping]

    def rung(self, damping: float) -> Rung | None:
        """p of a damping, None where it cannot be had."""
        found = self.at(damping).minimizer()
        if not (found.usable and math.isfinite(float(found.squared_norm))):
            return None
        p = found.displacement.dense()
        image = self.quadratic.image(p) if found.image is None else found.image
        return Rung(damping, p, float(found.predicted), image)

    def rungs(self, search: CurvedSearch, dropped: int, depth: int) -> list[Rung]:
        """Every rung but the dropped last ones, as far as its system could be solved, and those of some depth."""
        if not 0 < self.trace < math.inf:
            return []
        quadratic, wanted = self.quadratic, search.rungs[: len(search.rungs) - dropped]
        deep = search.deep if depth and quadratic.plan.dtype == torch.float64 else None
        if not quadratic.is_plain or quadratic.gradient is not None:  # then g is not U^T e
            deep = None
        if deep is not None:
            wanted = (*wanted, deep)
        solved = [self.rung(relative * self.trace) for relative in wanted]
        rungs = [rung for rung in solved if rung is not None]
        if deep is not None and depth > 1 and rungs:
            rungs.append(self._deepened(rungs[-1], 2 ** (depth - 2)))
        return rungs

    def _deepened(self, rung: Rung, iterations: int) -> Rung:
        """A rung of less damping than can be factored: conjugate gradients on B p = -g, from a rung's p on.

        They are preconditioned by (B + lambda D)^{-1}, whose factor is there. With Z = sqrt(D) U all but p is
        known by its image: the residual -g - B p = Z^T w / D, and Z q of the direction q.
        """
        quadratic, damped, image = self.quadratic, self.at(rung.damping), rung.image
        w, q_image, before = quadratic.pull - image, torch.zeros_like(image), math.inf
        q = p = rung.vector
        for iteration in range(iterations):
            z = damped.pull_back(w, refine=False)
            z_image = quadratic.image(z)
            slope = float(torch.dot(w, z_image))
            q = z if iteration == 0 else z.plus(q, slope / before)
            q_image = z_image + slope / before * q_image
            before = slope
            curved = float(torch.dot(q_image, q_image))
            if not (slope > 0 and 0 < curved < math.inf):
                break
            step = slope / curved
            p, image, w = p.plus(q, step), image + step * q_image, w - step * q_image
        predicted = float(torch.dot(torch.add(quadratic.pull, image, alpha=-0.5), image))
        return Rung(rung.damping, p, predicted / float(quadratic.divisor), image)


@dataclass
class Judge:
    """The samples on which the combination and the length are chosen: the held-out ones, or the batch."""

    objective: Objective
    loss: float  # f(theta) on them
    slopes: Tensor  # (k,): g . p_j there, weight decay included, on the CPU
    products: Tensor  # (k, k): p_i^T B p_j there

    def predicted(self, coefficients: Tensor) -> float:
        """m(0) - m(sum_j c_j p_j) of the quadratic model."""
        return -float((self.slopes + 0.5 * (self.products @ coefficients)) @ coefficients)

    def decrease(self, p: Vector) -> float:
        """f(theta) - f(theta + p) of the true loss, weight decay included."""
        return float(self.objective.decrease(Displacement.of(self.objective.passes.plan, p)))


class Choice(NamedTuple):
    """A step that a search may take."""

    vector: Vector
    length: Length
    coefficients: Tensor  # c of the rungs


@dataclass(frozen=True)
class Path:
    """theta + alpha p + alpha^2 b with b = -(B + lambda_b D)^{-1} J^T H y'' / 2, on the curvature samples."""

    quadratic: AnyQuadratic
    p: Vector
    damped: Damped | None = None  # at lambda_b; None for a straight path
    bend: Vector | None = None  # b

    def at(self, length: float, bent: bool) -> Vector:
        straight = self.p * length
        return straight.plus(self.bend, length**2) if bent and self.bend is not None else straight

    @cached_property
    def image(self) -> Tensor:
        """S^T J p."""
        return self.quadratic.image(self.p)[: self.quadratic.curvature_rows]

    def corrected(self, length: float, vector: Vector) -> Vector:
        """d - (B + lambda_b D)^{-1} J^T H (y(theta + d) - y - alpha J p): closer to outputs y + alpha J p."""
        assert self.damped is not None
        missed = self.quadratic.change_of_outputs(vector) - length * self.image
        return vector - self.damped.pull_back(missed)

    def beyond(self, length: Length, judge: Judge, promised: float) -> tuple[Vector, Length]:
        """The best of corrected points, at the length found and at twice that as long as they are better."""
        best, vector, alpha = length, self.at(length.length, length.bent), length.length
        while 0 < alpha <= LONGEST and best.decrease < ENOUGH * promised:
            before, trial = best, self.at(alpha, bent=True)
            for _ in range(CORRECTIONS):
                trial = self.corrected(alpha, trial)
                decrease = judge.decrease(trial)
                if not decrease > best.decrease:
                    break
                best, vector = Length(alpha, True, decrease), trial
            if best is before:
                break
            alpha *= 2
        return vector, best


@dataclass(eq=False)
class SearchedStep(Policy):
    """The step that a search finds; it is judged on other samples where the problem holds some."""

    search: CurvedSearch

    def propose(self, quadratic: AnyQuadratic, objective: Objective, state: Mapping[str, Any]) -> Proposal:
        search, remembered = self.search, state.get("search", {})
        memory = Memory(**remembered)
        ladder = Ladder(quadratic, float(quadratic.trace()))
        rungs = ladder.rungs(search, memory.dropped, memory.depth)
        if not rungs:
            nothing = quadratic.space.zeros(next(iter(quadratic.plan.parameters.values())))
            choice = Choice(nothing, STAY._replace(decrease=math.nan), torch.zeros(1, device="cpu"))
            return _proposal(quadratic, objective, choice, math.nan, 0.0, memory)
        judge = _judge_of(quadratic, objective, rungs)
        combined = minimize_nonnegative(judge.products, -judge.slopes, RIDGE)
        layer = None if remembered else self._best_layer(quadratic, ladder.trace, judge)
        if layer is not None:
            choice, memory = Choice(*layer, combined), Memory()
        elif memory.dull >= DULL:
            vector, length, rung = _best_of(judge, [own.vector for own in rungs], LENGTHS_OF_ONE_RUNG)
            coefficients = torch.zeros_like(combined)
            coefficients[rung] = float(length.length > 0)
            choice, memory = Choice(vector, length, coefficients), replace(memory, dull=0)
        else:
            choice = self._along_path(ladder, rungs, judge, combined, memory.length)
            memory = memory.after(search, choice, judge.loss, judge.predicted(combined))
        memory.agreement = _agreement(objective, rungs, judge, combined)
        predicted = judge.predicted(choice.length.length * choice.coefficients)
        damping = rungs[int(choice.coefficients.argmax())].damping
        return _proposal(quadratic, objective, choice, predicted, damping, memory)

    def solve(self, quadratic: AnyQuadratic, state: Mapping[str, Any]) -> tuple[Damped, Minimizer]:
        damped = quadratic.at(self.search.rungs[-1] * float(quadratic.trace()))
        return damped, damped.minimizer()

    def next_damping(self, proposal: Proposal, state: Mapping[str, Any]) -> Scalar:
        return as_number(state["damping"])  # its dampings follow the trace of K

    def _along_path(
        self, ladder: Ladder, rungs: Sequence[Rung], judge: Judge, combined: Tensor, start: float
    ) -> Choice:
        """The best step along the path of p = sum_j c_j p_j, or straight ahead, tried from some length on."""
        search, quadratic = self.search, ladder.quadratic
        p = weighted_sum([rung.vector for rung in rungs], combined.tolist())
        if not bool(combined.any()):
            return Choice(p, STAY, combined)
        path = Path(quadratic, p)
        if search.bend is not None:
            damped = ladder.at(search.bend * ladder.trace)
            bend = damped.pull_back(quadratic.second_derivative(p)) * -0.5
            if math.isfinite(float(bend.dot(bend))):
                path = Path(quadratic, p, damped, bend)

        def gain(length: float, bent: bool) -> float:
            return judge.decrease(path.at(length, bent))

        length = find_length(gain, start, path.bend is not None)
        if path.bend is None or quadratic.held_out is None:
            return Choice(path.at(length.length, length.bent), length, combined)
        return Choice(*path.beyond(length, judge, judge.predicted(combined)), combined)

    def _is_out_of_scale(self, quadratic: AnyQuadratic) -> bool:
        """Whether the residuals are far larger than what the parameters produce: |e| > 30 |S^T J theta|.

        Then steps in all layers at once are limited by the product of their changes: one layer must find the
        scale.
        """
        if quadratic.held_out is not None or quadratic.e is None:
            return False
        theta = {name: own.detach() for name, own in quadratic.plan.parameters.items()}
        own = quadratic.image(quadratic.space.pack(theta))[: quadratic.curvature_rows]
        # the rows are S^T J / s and e is s S^-1 r: e / s^2 is in their unit
        samples = sum(len(piece.targets) for piece in quadratic.pieces)
        share = samples / quadratic.batch.curvature
        unit = float(quadratic.divisor) / float(quadratic.term_count) * share
        return bool(unit * quadratic.e.norm() > OUT_OF_SCALE * own.norm())

    def _best_layer(self, quadratic: AnyQuadratic, trace: float, judge: Judge) -> tuple[Vector, Length] | None:
        """The best step of one layer, -(B_ll + lambda D)^{-1} g_l, if it takes away at least half of the loss."""
        first = self.search.first
        if first is None or len(quadratic.plan.blocks) < 2 or not self._is_out_of_scale(quadratic):
            return None
        by_layer = quadratic.by_layer()
        found = by_layer.at(first * trace).minimizer()
        if not (found.usable and math.isfinite(float(found.squared_norm))):
            return None
        p = found.displacement.dense()
        layers = [p.restrict(names) for names in by_layer.blocks.parameter_names(quadratic.plan)]
        best, length, _ = _best_of(judge, layers, (1.0,))
        return (best, length) if length.decrease >= 0.5 * abs(judge.loss) else None


def _judge_of(quadratic: AnyQuadratic, objective: Objective, rungs: Sequence[Rung]) -> Judge:
    """The quadratic model along the rungs, on the samples that judge the step."""
    vectors = [rung.vector for rung in rungs]
    if quadratic.held_out is None:
        images = torch.stack([rung.image for rung in rungs])
        slopes = torch.tensor(quadratic.slopes(vectors, images), dtype=torch.float64, device="cpu")
        factors = images[:, : quadratic.curvature_rows].double() / float(quadratic.divisor) ** 0.5
    else:
        inputs, targets = quadratic.held_out
        objective = on_samples(objective.passes, inputs, targets, quadratic.decay)
        slopes, factors = _push_forward(quadratic, objective, vectors)
    products = (factors @ factors.T).cpu()
    if quadratic.decay is not None:  # p_i^T W p_j
        own = torch.stack([vector.flat for vector in vectors]).double()
        weighted = torch.stack([quadratic.decay.times(vector).flat for vector in vectors]).double()
        products = products + (own @ weighted.T).cpu()
    return Judge(objective, float(objective.loss), slopes, products)


def _push_forward(quadratic: AnyQuadratic, held_out: OnPieces, vectors: Sequence[Vector]) -> tuple[Tensor, Tensor]:
    """(g + W theta) . p_j on other samples, and U p_j as the rows of a matrix."""
    passes, (piece,), term_count = held_out.passes, held_out.pieces, float(held_out.term_count)
    with _random.replayed(held_out.random):
        images = piece.capture.push_forward([own.parts for own in vectors])  # (k, n, C)
    residual, count = passes.residual(piece), len(piece.outputs)
    factor = quadratic.curvature.factor(passes.rule, passes.loss, piece.outputs, piece.targets)
    slopes = (images.flatten(1).double() @ residual.flatten().double()).cpu() / term_count
    divisor = float(passes.divisor(quadratic.curvature, term_count, count, count)) / factor.unit**2
    factors = torch.stack([factor.rmatvec(image).flatten() for image in images]).double() / divisor**0.5
    if quadratic.decay is not None:
        decayed = [float(quadratic.decay.slope(own)) for own in vectors]
        slopes = slopes + torch.tensor(decayed, dtype=torch.float64, device="cpu")
    return slopes, factors


def _best_of(judge: Judge, vectors: Sequence[Vector], lengths: Sequence[float]) -> tuple[Vector, Length, int]:
    """The best step along one of some vectors, and which one it is."""
    best, step, which = STAY, vectors[0] * 0.0, 0
    for index, own in enumerate(vectors):
        for length in lengths:
            trial = own * length
            decrease = judge.decrease(trial)
            if decrease > best.decrease:
                best, step, which = Length(length, False, decrease), trial, index
    return step, best, which


def _proposal(
    quadratic: AnyQuadratic, objective: Objective, choice: Choice, predicted: float, damping: float, memory: Memory
) -> Proposal:
    p, length = choice.vector, choice.length
    return Proposal(
        Displacement.of(quadratic.plan, p),
        predicted,
        float(p.dot(p)),
        length.length > 0,
        loss=objective.loss,
        damping=damping,
        decrease=length.decrease,
        length=length.length,
        share=float(choice.coefficients.sum()),
        bent=length.bent,
        gains={"search": asdict(memory)},
    )


def _agreement(objective: Objective, rungs: Sequence[Rung], judge: Judge, combined: Tensor) -> float:
    """How much of the relative decrease that the batch promises for its smallest damping other samples promise.

    Well below 1 says that the step is limited by the number of samples.
    """
    loss = float(objective.loss)
    promised = rungs[-1].predicted / abs(loss) if loss else 0.0
    if not promised > 0 or not judge.loss:
        return 1.0
    return min(1.0, judge.predicted(combined) / abs(judge.loss) / promised)
