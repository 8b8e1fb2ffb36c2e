"""Solve the Helmholtz equation with a network by one call of `woodbury.fit`, beside Adam and L-BFGS by the clock.

u_xx + u_yy + k^2 u = 0 in the unit square, k = 3 pi, with the values of a plane wave on its sides:

    u = sin(k (x cos(a) + y sin(a))),   a = 0.5

A 2-20-20-1 tanh network, float64. Of every 8 points 6 are inside and 2 are on a side. Every method gets the same
residuals and the same CPU seconds; Adam and L-BFGS are tried with three settings each.

    woodbury.fit(model, nn.MSELoss(), draw, forward=residuals, seconds=17)    # all there is to it

    python examples/helmholtz.py                       # 4 minutes; writes helmholtz.png
    python examples/helmholtz.py --seconds 5 --seeds 1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import woodbury
from equations import Batch, Equation, compare, onto_faces, points_in, residual
from harness import Curve

NUMBER = 3 * math.pi  # k
DIRECTION = (math.cos(0.5), math.sin(0.5))
WEIGHT = 50.0  # of a residual on a side: those inside are as large as k^2 u, up to 89
LOW, HIGH = (0.0, 0.0), (1.0, 1.0)


def solution(points: Tensor) -> Tensor:
    return torch.sin(NUMBER * (DIRECTION[0] * points[:, :1] + DIRECTION[1] * points[:, 1:]))


def draw(count: int) -> tuple[Batch, None]:
    points, kind = points_in(count, LOW, HIGH), torch.arange(count).unsqueeze(1) % 8
    points = torch.where(kind >= 6, onto_faces(points, (0, 1), LOW, HIGH), points)
    return (points, kind < 6, torch.where(kind >= 6, solution(points), 0.0)), None


def residuals(model: nn.Module, batch: Batch) -> Tensor:
    value, _, bend = woodbury.laplacian(model, batch[0])
    return residual(batch, value, bend + NUMBER**2 * value, WEIGHT)


EQUATION = Equation("Helmholtz equation", (2, 20, 20, 1), draw, residuals, solution, LOW, HIGH)


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    return compare(EQUATION, __doc__, "helmholtz.png", seconds=17.0, argv=argv)


if __name__ == "__main__":
    main()
