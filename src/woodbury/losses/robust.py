"""Losses that grow linearly: absolute value, Huber, smooth L1, with the curvature of reweighted least squares.

l = rho(d) at each output, d = y - t. On the linear part rho'' is 0, and a Gauss-Newton step there would be that of
gradient descent. S S^T is not the Hessian here but the diagonal matrix of w = rho'(d) / d, the weights of
iteratively reweighted least squares: the parabola q(x) = rho(d) + w (x^2 - d^2) / 2 touches rho at d and lies
nowhere below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.losses.factors import DiagonalFactor, Factor
from woodbury.losses.rules import StructuredRule, over_outputs, register_loss, share_of_output

# Without it an output that meets its target would never leave it again. Of 1e-1 to 1e-8, 1e-4 ended with the
# lowest loss or nearly so on a regression with noise and without (60 steps); more than 1e-3 kept the loss up.
FLOOR = 1e-4


@register_loss(nn.HuberLoss)
@register_loss(nn.SmoothL1Loss)
@register_loss(nn.L1Loss)
class Robust(StructuredRule):
    """rho is a parabola up to a knee, |d| <= b, and a line of slope s beyond it: w = s / max(|d|, b).

    HuberLoss has s = b = delta, SmoothL1Loss s = 1 and b = beta, L1Loss s = 1 and b = 0. Where the knee is 0, |d|
    counts in w as at least `FLOOR` |t| + eps; r = sign(d) is exact.
    """

    by_hand = takes_sum = True

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        slope, knee = _slope_and_knee(loss)
        if not (slope > 0 and 0 <= knee < math.inf):
            raise ValueError(f"{type(loss).__name__}: delta must be more than 0, beta not negative, both finite")

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        each = self._rho(loss, outputs, targets, "none")
        return over_outputs(loss, each)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._rho(loss, outputs, targets, "sum") * share_of_output(loss, outputs)

    def _rho(self, loss: nn.Module, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """rho(d) of each output, or their sum: s times torch's SmoothL1Loss of the same knee."""
        slope, knee = _slope_and_knee(loss)
        smooth = F.smooth_l1_loss(outputs, targets.to(outputs.dtype), reduction=reduction, beta=knee)
        return smooth if slope == 1.0 else smooth * slope

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        slope, knee = _slope_and_knee(loss)
        size, difference = slope * share_of_output(loss, outputs), outputs - targets
        if knee == 0:
            return difference.sign() * size
        return difference.clamp(-knee, knee) * (size / knee)

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        root = (self.weights(loss, outputs, targets) * share_of_output(loss, outputs)).sqrt()
        return DiagonalFactor(self.residual(loss, outputs, targets) / root, root)

    def weights(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """w of each output."""
        slope, knee = _slope_and_knee(loss)
        size = (outputs - targets).abs()
        if knee == 0:
            size = torch.maximum(size, FLOOR * targets.abs() + torch.finfo(outputs.dtype).eps)
        else:
            size = size.clamp_min(knee)
        return slope / size

    def curved_loss(self, loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def parabola(outputs: Tensor, targets: Tensor) -> Tensor:
            weights = self.weights(loss, outputs.detach(), targets)
            each = 0.5 * weights * (outputs - targets).square()
            return each.sum() if self.is_sum(loss) else each.mean()

        return parabola


def _slope_and_knee(loss: nn.Module) -> tuple[float, float]:
    """s and b."""
    if isinstance(loss, nn.HuberLoss):
        return float(loss.delta), float(loss.delta)
    return 1.0, float(loss.beta) if isinstance(loss, nn.SmoothL1Loss) else 0.0
