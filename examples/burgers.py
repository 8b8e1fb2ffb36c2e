"""Solve Burgers' equation with a network by one call of `woodbury.fit`, beside Adam and L-BFGS by the clock.

u_t + u u_x = nu u_xx for -1 < x < 1 and 0 < t < 1, u = -sin(pi x) at t = 0 and u = 0 at both ends: a wave that
steepens into a front at x = 0, nu = 0.1 / pi. (The 0.01 / pi of some papers makes it ten times as
steep: there the error of fit is 5e-2 after 50 seconds.)

A 2-16-16-16-1 tanh network of (t, x), float64. Of every 8 points 6 are inside, 1 is at the start and 1 at an end.
The error is measured against the solution by Cole and Hopf (an integral, by Gauss-Hermite quadrature), which no
training sees. Every method gets the same residuals and the same CPU seconds; Adam and L-BFGS are tried with three
settings each.

    woodbury.fit(model, nn.MSELoss(), draw, forward=residuals, seconds=17)    # all there is to it

    python examples/burgers.py                       # 4 minutes; writes burgers.png
    python examples/burgers.py --seconds 5 --seeds 1
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import woodbury
from equations import Batch, Equation, compare, onto_faces, points_in, residual
from harness import Curve

NU = 0.1 / torch.pi
LOW, HIGH = (0.0, -1.0), (1.0, 1.0)  # of t, x


def solution(points: Tensor, nodes: int = 200) -> Tensor:
    """u = -int sin(pi y) g dz / int g dz,  g = exp(-cos(pi y) / (2 pi nu) - z^2),  y = x - 2 sqrt(nu t) z."""
    z, weights = (torch.from_numpy(array) for array in np.polynomial.hermite.hermgauss(nodes))
    y = torch.pi * (points[:, 1:] - 2 * (NU * points[:, :1]).sqrt() * z)
    exponents = -torch.cos(y) / (2 * torch.pi * NU)
    f = weights * torch.exp(exponents - exponents.amax(1, keepdim=True))
    return -(torch.sin(y) * f).sum(1, keepdim=True) / f.sum(1, keepdim=True)


def draw(count: int) -> tuple[Batch, None]:
    points, kind = points_in(count, LOW, HIGH), torch.arange(count).unsqueeze(1) % 8
    points = torch.where(kind == 7, onto_faces(points, (1,), LOW, HIGH), points)
    points[kind.squeeze(1) == 6, 0] = 0.0
    known = torch.where(kind == 6, -torch.sin(torch.pi * points[:, 1:]), 0.0)
    return (points, kind < 6, known), None


def residuals(model: nn.Module, batch: Batch) -> Tensor:
    value, gradient, bend = woodbury.laplacian(model, batch[0], weights=(0, 1))  # bend: u_xx
    return residual(batch, value, gradient[..., 0] + value * gradient[..., 1] - NU * bend)


EQUATION = Equation("Burgers' equation", (2, 16, 16, 16, 1), draw, residuals, solution, LOW, HIGH)


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    return compare(EQUATION, __doc__, "burgers.png", seconds=17.0, argv=argv)


if __name__ == "__main__":
    main()
