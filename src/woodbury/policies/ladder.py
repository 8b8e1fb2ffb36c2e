"""The ladder of a search: p of every damping, from one Gram matrix, and the ones that go deeper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from woodbury._vector import Vector
from woodbury.policies.proposal import AnyQuadratic
from woodbury.policies.search import CurvedSearch
from woodbury.quadratic.quadratic import Damped

REFINED = 1e-8  # of the trace: dampings below it are refined, larger ones have eight digits without it


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
        wanted = search.rungs[: len(search.rungs) - dropped]
        solved = [self.rung(relative * self.trace) for relative in wanted]
        rungs = [rung for rung in solved if rung is not None]
        quadratic = self.quadratic
        if not depth or search.deep is None or quadratic.plan.dtype != torch.float64:
            return rungs
        if not quadratic.is_plain or quadratic.gradient is not None:  # then g is not U^T e
            return rungs
        deep = self.rung(search.deep * self.trace)
        rungs += [] if deep is None else [deep]
        if rungs and depth > 1:
            rungs.append(self._deepened(rungs[-1], 2 ** (depth - 2)))
        return rungs

    def _deepened(self, rung: Rung, iterations: int) -> Rung:
        """A rung of less damping than can be factored: conjugate gradients on B p = -g, from a rung's p on.

        They are preconditioned by (B + lambda D)^{-1}, whose factor is there. With Z = sqrt(D) U all but p is
        known by its image: the residual -g - B p = Z^T w / D, and Z q of the direction q.
        """
        quadratic, damped, image = self.quadratic, self.at(rung.damping), rung.image
        divisor = float(quadratic.divisor)
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
        predicted = float(torch.dot(torch.add(quadratic.pull, image, alpha=-0.5), image)) / divisor
        return Rung(rung.damping, p, predicted, image)
