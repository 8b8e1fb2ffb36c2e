"""Solve the Helmholtz equation with a network by one call of `woodbury.fit`, beside Adam and L-BFGS by the clock.

u_xx + u_yy + u = q in the square -1 < x, y < 1, u = 0 on its sides, with q such that

    u = sin(pi x) sin(4 pi y)

(a test problem of the literature on PINNs). A 2-24-24-1 tanh network, float64. Of every 8 points 7 are inside and
1 is on a side. Every method gets the same residuals and the same CPU seconds; Adam and L-BFGS are tried with three
settings each.

    woodbury.fit(model, nn.MSELoss(), draw, forward=residuals, seconds=17)    # all there is to it

    python examples/helmholtz.py                       # 4 minutes; writes helmholtz.png
    python examples/helmholtz.py --seconds 5 --seeds 1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import woodbury
from equations import Batch, Equation, compare, onto_faces, points_in, residual
from harness import Curve

WEIGHT = 100.0  # of a residual on a side: those inside are as large as q, up to 167
LOW, HIGH = (-1.0, -1.0), (1.0, 1.0)


def solution(points: Tensor) -> Tensor:
    return torch.sin(torch.pi * points[:, :1]) * torch.sin(4 * torch.pi * points[:, 1:])


def force(points: Tensor) -> Tensor:
    """q = u_xx + u_yy + u."""
    return (1 - 17 * torch.pi**2) * solution(points)


def draw(count: int) -> tuple[Batch, None]:
    points, kind = points_in(count, LOW, HIGH), torch.arange(count).unsqueeze(1) % 8
    points = torch.where(kind == 7, onto_faces(points, (0, 1), LOW, HIGH), points)
    return (points, kind < 7, torch.zeros_like(points[:, :1])), None


def residuals(model: nn.Module, batch: Batch) -> Tensor:
    value, _, bend = woodbury.laplacian(model, batch[0])
    return residual(batch, value, bend + value - force(batch[0]), WEIGHT)


EQUATION = Equation("Helmholtz equation", (2, 24, 24, 1), draw, residuals, solution, LOW, HIGH)


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    return compare(EQUATION, __doc__, "helmholtz.png", seconds=17.0, argv=argv)


if __name__ == "__main__":
    main()
