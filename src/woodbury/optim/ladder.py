"""The ladder of a search: p of every damping, from one Gram matrix, and the ones that go deeper."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.blocks import BLOCKS
from woodbury.optim.linearize import Linearization
from woodbury.optim.metric import Units
from woodbury.optim.sample_space import Cholesky, System
from woodbury.optim.step import Answer, Problem
from woodbury.row_matrix import Rows
from woodbury.search import CurvedSearch


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

    def image(self, vector: Vector) -> Tensor:
        """Z p."""
        assert isinstance(self.line.rows, Rows)
        return self.line.rows.matvec(self._into(vector))  # (Z s) (p / s) = Z p

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
        image = rung.image if rung.image is not None else self.image(rung.vector)
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


def ladder_of(systems: Systems, search: CurvedSearch, trace: float, dropped: int, depth: int) -> list[Rung]:
    """Every rung but the dropped last ones, as far as its system could be solved, and those of some depth."""
    if not 0 < trace < math.inf:
        return []
    wanted = search.rungs[: len(search.rungs) - dropped]
    solved = [systems.rung(relative * trace, trace) for relative in wanted]
    ladder = [rung for rung in solved if rung is not None]
    if not depth or search.deep is None or not systems.can_deepen():
        return ladder
    deep = systems.rung(search.deep * trace, trace)
    ladder += [] if deep is None else [deep]
    if ladder and depth > 1:
        ladder.append(systems.deepened(ladder[-1], 2 ** (depth - 2)))
    return ladder
