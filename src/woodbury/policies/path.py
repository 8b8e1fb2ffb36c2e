"""The path of a search: how it bends, how its points are corrected, and how far to go along it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from woodbury._vector import Vector
from woodbury.policies.proposal import AnyQuadratic
from woodbury.policies.search import CORRECTIONS, LONGEST, Length
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.objective import Objective
from woodbury.quadratic.quadratic import Damped

ENOUGH = 0.95  # of the decrease that the quadratic model promised: no corrections


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
    damped: Damped  # at lambda_b
    p: Vector
    bend: Vector | None  # b; None for a straight path

    def at(self, length: float, bent: bool) -> Vector:
        straight = self.p * length
        return straight.plus(self.bend, length**2) if bent and self.bend is not None else straight

    @cached_property
    def image(self) -> Tensor:
        """S^T J p."""
        return self.quadratic.image(self.p)[: self.quadratic.curvature_rows]

    def corrected(self, length: float, vector: Vector) -> Vector:
        """d - (B + lambda_b D)^{-1} J^T H (y(theta + d) - y - alpha J p): closer to outputs y + alpha J p."""
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


def bent_path(quadratic: AnyQuadratic, damped: Damped, p: Vector) -> Path:
    """The path of p; straight if its bend is not finite."""
    bend = damped.pull_back(quadratic.second_derivative(p)) * -0.5
    return Path(quadratic, damped, p, bend if math.isfinite(float(bend.dot(bend))) else None)
