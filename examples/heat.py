"""Solve the heat equation with a network by one call of `woodbury.fit`, beside Adam and L-BFGS by the clock.

u_t = c (u_xx + u_yy) in the unit square for 0 < t < 1, u = 0 on its sides, and two waves at the start:

    u = sin(pi x) sin(pi y) + sin(2 pi x) sin(pi y) / 2   at t = 0,     c = 0.05

A 3-16-16-16-1 tanh network of (t, x, y), float64. Of every 8 points 6 are inside, 1 is at the start and 1 is on a
side. Every method gets the same residuals and the same CPU seconds; Adam and L-BFGS are tried with three settings
each.

    woodbury.fit(model, nn.MSELoss(), draw, forward=residuals, seconds=17)    # all there is to it

    python examples/heat.py                       # 4 minutes; writes heat.png
    python examples/heat.py --seconds 5 --seeds 1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import woodbury
from equations import Batch, Equation, compare, onto_faces, points_in, residual
from harness import Curve

CONDUCTIVITY = 0.05
LOW, HIGH = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # of t, x, y


def waves(points: Tensor) -> tuple[Tensor, Tensor]:
    _, x, y = (torch.pi * points).split(1, dim=1)
    return torch.sin(x) * torch.sin(y), torch.sin(2 * x) * torch.sin(y) / 2


def solution(points: Tensor) -> Tensor:
    """Each wave decays at its own rate: c pi^2 (1 + 1) and c pi^2 (4 + 1)."""
    first, second = waves(points)
    decay = torch.exp(-CONDUCTIVITY * torch.pi**2 * points[:, :1])
    return decay**2 * first + decay**5 * second


def draw(count: int) -> tuple[Batch, None]:
    points, kind = points_in(count, LOW, HIGH), torch.arange(count).unsqueeze(1) % 8
    points = torch.where(kind == 7, onto_faces(points, (1, 2), LOW, HIGH), points)
    points[kind.squeeze(1) == 6, 0] = 0.0
    first, second = waves(points)
    known = torch.where(kind == 6, first + second, 0.0)
    return (points, kind < 6, known), None


def residuals(model: nn.Module, batch: Batch) -> Tensor:
    value, gradient, bend = woodbury.laplacian(model, batch[0], weights=(0, 1, 1))  # bend: u_xx + u_yy
    return residual(batch, value, gradient[..., 0] - CONDUCTIVITY * bend)


EQUATION = Equation("Heat equation in two dimensions", (3, 16, 16, 16, 1), draw, residuals, solution, LOW, HIGH)


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    return compare(EQUATION, __doc__, "heat.png", seconds=17.0, argv=argv)


if __name__ == "__main__":
    main()
