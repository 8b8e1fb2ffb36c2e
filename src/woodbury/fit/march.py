"""Points of an equation in time: what comes first is solved first.

A network that has all times to fulfil at once may leave the right solution where a small residual is enough for
that, and settle on another one from there on. So points have weights that fall with the residual before them:

    w(t) = max(exp(-R(t) / tolerance), 1/100),      R(t) = integral of |r|^2 up to t,

the tolerance being 1e-5 of the first loss. Once the residual is below that, all weights are near 1. This is for
paths whose start the form of the network has. Where conditions are terms the start is wrong at first, and the
first loss is no scale of the residual: a pendulum, and Burgers' equation, were solved worse that way.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 1e-5  # of the first loss: as much as may be left before a time
LEAST = 0.01  # weight of points whose time has not come: without one the solution runs away there
MOST = 0.9  # mean of the weights from which on all times count as reached
LONGEST = 0.75  # of the seconds of a fit: then all weights are 1


@dataclass
class March:
    """How far in time an equation is solved; the last column of its inputs is the time."""

    first_loss: float
    until: float = math.inf  # by time.perf_counter
    reached: float = 1.0  # mean of exp(-R / tolerance), as last seen

    @property
    def is_over(self) -> bool:
        return self.reached > MOST

    def weigh(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """The weights of candidates (n, d) with residuals (n, k)."""
        squares, order = residual.double().square().mean(1), inputs[:, -1].argsort()
        tolerance = (
            SMALL * self.first_loss if time.perf_counter() < self.until and self.first_loss > 0 else math.inf
        )
        before = torch.cat([squares.new_zeros(1), squares[order][:-1]]).cumsum(0) / len(squares)
        weight = torch.empty_like(squares)
        weight[order] = torch.exp(-before / tolerance)
        self.reached = float(weight.mean())
        return weight.clamp(min=LEAST)

    @staticmethod
    def choose(inputs: Tensor, share: Tensor, count: int) -> Tensor:
        """Indices of as many candidates, with these probabilities, evenly in time: one from each n-th of them."""
        order = inputs[:, -1].argsort()
        ends = share[order].cumsum(0)
        places = (torch.arange(count).to(ends) + torch.rand(1).to(ends)) / count * ends[-1]
        return order[torch.searchsorted(ends, places).clamp(max=len(order) - 1)]
