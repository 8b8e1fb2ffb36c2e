"""The path of a search: how it bends, how its points are corrected, and how far to go along it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from woodbury import _random, _vector
from woodbury._vector import Vector
from woodbury.curvature import Curvature
from woodbury.displacement import Displacement
from woodbury.losses.factors import Factor
from woodbury.optim.ladder import Rung, Systems
from woodbury.optim.passes import Piece
from woodbury.optim.step import Problem, decay_decrease
from woodbury.search import STAY, CurvedSearch, Length, find_length

ENOUGH = 0.95  # of the decrease that the quadratic model promised: no corrections


@dataclass
class Judge:
    """The samples on which the combination and the length are chosen: the held-out ones, or the batch."""

    problem: Problem
    pieces: list[Piece]
    loss: float  # f(theta) on them
    slopes: Tensor  # (k,): g . p_j there, on the CPU
    products: Tensor  # (k, k): p_i^T B p_j there
    trace: float  # of K of the batch
    random: _random.Snapshot | None  # at the start of their pass

    def predicted(self, coefficients: Tensor) -> float:
        """m(0) - m(sum_j c_j p_j) of the quadratic model."""
        return float(-self.slopes @ coefficients - 0.5 * coefficients @ self.products @ coefficients)

    def decrease(self, vector: Vector) -> float:
        """f(theta) - f(theta + vector) of the true loss, weight decay included."""
        displacement = Displacement(self.problem.plan.parameters, base=vector)
        with _random.replayed(self.random):
            decrease = float(self.problem.passes.decrease_on(self.pieces, displacement))
        return decrease + float(decay_decrease(self.problem, vector))


class Choice(NamedTuple):
    """A step that a search may take."""

    vector: Vector
    length: Length
    coefficients: Tensor  # c of the rungs


@dataclass(frozen=True)
class Path:
    """theta + alpha p + alpha^2 b with b = -(B + lambda_b D)^{-1} J^T H y'' / 2, on the curvature samples."""

    systems: Systems
    piece: Piece  # whose first samples are those of the curvature
    factor: Factor  # S of H = S S^T there
    damping: float  # lambda_b
    p: Vector
    bend: Vector  # b

    def at(self, length: float, bent: bool) -> Vector:
        straight = _vector.scaled(self.p, length)
        return _vector.combine(straight, self.bend, length**2) if bent else straight

    @cached_property
    def image(self) -> Tensor:
        """S^T J p."""
        return self.systems.image(self.p)[: self.systems.line.curvature_rows]

    def corrected(self, length: float, vector: Vector) -> Vector:
        """d - (B + lambda_b D)^{-1} J^T H (y(theta + d) - y - alpha J p): closer to outputs y + alpha J p."""
        problem = self.systems.problem
        with _random.replayed(problem.random):
            moved = Displacement(problem.plan.parameters, base=vector).outputs_on(self.piece.capture)
        before = self.piece.capture.outputs.detach()
        change = (moved.reshape(before.shape) - before)[: problem.batch.curvature]
        missed = self.factor.rmatvec(change).flatten() - length * self.image
        return _vector.combine(vector, self.systems.pull_back(missed, self.damping), -1.0)

    def beyond(self, length: Length, judge: Judge, search: CurvedSearch, promised: float) -> tuple[Vector, Length]:
        """The best of corrected points, at the length found and at twice that as long as they are better."""
        best, vector, alpha = length, self.at(length.length, length.bent), length.length
        while 0 < alpha <= search.longest and best.decrease < ENOUGH * promised:
            before, trial = best, self.at(alpha, bent=True)
            for _ in range(search.corrections):
                trial = self.corrected(alpha, trial)
                decrease = judge.decrease(trial)
                if not decrease > best.decrease:
                    break
                best, vector = Length(alpha, True, decrease), trial
            if best is before:
                break
            alpha *= 2
        return vector, best


def along_path(
    curvature: Curvature,
    systems: Systems,
    piece: Piece,
    search: CurvedSearch,
    judge: Judge,
    ladder: Sequence[Rung],
    combined: Tensor,
    start: float,
) -> Choice:
    """The best step along the path of p = sum_j c_j p_j, or straight ahead, tried from some length on."""
    p = _vector.weighted_sum([rung.vector for rung in ladder], combined.tolist())
    if not bool(combined.any()):
        return Choice(p, STAY, combined)
    path = None
    if search.bend is not None:
        path = _path(curvature, systems, piece, p, search.bend * judge.trace)

    def at(length: float, bent: bool) -> Vector:
        return _vector.scaled(p, length) if path is None else path.at(length, bent)

    length = find_length(lambda *point: judge.decrease(at(*point)), search, start, path is not None)
    if path is None or systems.problem.held_out is None:
        return Choice(at(length.length, length.bent), length, combined)
    return Choice(*path.beyond(length, judge, search, judge.predicted(combined)), combined)


def _path(curvature: Curvature, systems: Systems, piece: Piece, p: Vector, damping: float) -> Path | None:
    """The path of p, None if its bend is not finite."""
    problem, passes = systems.problem, systems.problem.passes
    samples = problem.batch.curvature
    with _random.replayed(problem.random):
        curve = piece.capture.second_derivative(p)[:samples]
    outputs = piece.capture.outputs.detach()[:samples]
    factor = curvature.factor(passes.rule, passes.loss, outputs, piece.targets[:samples])
    bend = _vector.scaled(systems.pull_back(factor.rmatvec(curve).flatten(), damping), -0.5)
    if not math.isfinite(float(_vector.dot(bend, bend))):
        return None
    return Path(systems, piece, factor, damping, p, bend)
