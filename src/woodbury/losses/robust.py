"""Losses that grow linearly: absolute value, Huber, smooth L1, with the curvature of reweighted least squares.

l = rho(d) at each output, d = y - t. On the linear part rho'' is 0, and a Gauss-Newton step there would be that of
gradient descent. S S^T is not the Hessian here but the diagonal matrix of w = rho'(d) / d, the weights of
iteratively reweighted least squares: the parabola q(x) = rho(d) + w (x^2 - d^2) / 2 touches rho at d and lies
nowhere below it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.losses.factors import DiagonalFactor, Factor
from woodbury.losses.rules import StructuredRule, register_loss, share_of_output


class Robust(StructuredRule):
    """rho is a parabola up to a knee, |d| <= b, and a line of slope s beyond it: w = s / max(|d|, b)."""

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        for name, least in (("delta", "more than 0"), ("beta", "not negative")):
            value: Any = getattr(loss, name, 1.0)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf or (value == 0 and name == "delta"):
                raise ValueError(f"{type(loss).__name__}: {name} must be a finite number, {least}, got {value!r}")

    @abstractmethod
    def slope(self, loss: Any) -> float:
        """s."""

    @abstractmethod
    def knee(self, loss: Any) -> float:
        """b, 0 for the absolute value."""

    @abstractmethod
    def each(self, loss: Any, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """torch's own values."""

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        each = self.each(loss, outputs, targets.to(outputs.dtype), "none")
        return each.sum(1) if self.is_sum(loss) else each.mean(1)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.each(loss, outputs, targets.to(outputs.dtype), "sum") * share_of_output(loss, outputs)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        knee, size = self.knee(loss), self.slope(loss) * share_of_output(loss, outputs)
        difference = outputs - targets
        if knee == 0:
            return difference.sign() * size
        return difference.clamp(-knee, knee) * (size / knee)

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        root = (self.weights(loss, outputs, targets) * share_of_output(loss, outputs)).sqrt()
        return DiagonalFactor(self.residual(loss, outputs, targets) / root, root)

    def weights(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """w of each output; where the knee is 0, |d| counts as at least `FLOOR` |t| + eps."""
        size, knee = (outputs - targets).abs(), self.knee(loss)
        if knee == 0:
            size = torch.maximum(size, FLOOR * targets.abs() + torch.finfo(outputs.dtype).eps)
        else:
            size = size.clamp_min(knee)
        return self.slope(loss) / size

    def curved_loss(self, loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def parabola(outputs: Tensor, targets: Tensor) -> Tensor:
            weights = self.weights(loss, outputs.detach(), targets)
            each = 0.5 * weights * (outputs - targets).square()
            return each.sum() if self.is_sum(loss) else each.mean()

        return parabola


# Without it an output that meets its target would never leave it again. Of 1e-1 to 1e-8, 1e-4 ended with the
# lowest loss or nearly so on a regression with noise and without (60 steps); more than 1e-3 kept the loss up.
FLOOR = 1e-4


@register_loss(nn.HuberLoss)
class Huber(Robust):
    """rho = d^2 / 2 up to |d| = delta, then delta (|d| - delta/2): w = delta / max(|d|, delta)."""

    by_hand = True
    takes_sum = True

    def slope(self, loss: Any) -> float:
        return float(loss.delta)

    def knee(self, loss: Any) -> float:
        return float(loss.delta)

    def each(self, loss: Any, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.huber_loss(outputs, targets, reduction=reduction, delta=loss.delta)


@register_loss(nn.SmoothL1Loss)
class SmoothAbsolute(Robust):
    """rho = d^2 / (2 beta) up to |d| = beta, then |d| - beta/2: w = 1 / max(|d|, beta). beta = 0 is L1Loss."""

    by_hand = True
    takes_sum = True

    def slope(self, loss: Any) -> float:
        return 1.0

    def knee(self, loss: Any) -> float:
        return float(loss.beta)

    def each(self, loss: Any, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.smooth_l1_loss(outputs, targets, reduction=reduction, beta=loss.beta)


@register_loss(nn.L1Loss)
class Absolute(Robust):
    """rho = |d|: w = 1 / max(|d|, `FLOOR` |t| + eps); r = sign(d) is exact. SmoothL1Loss has a floor to choose."""

    by_hand = True
    takes_sum = True

    def slope(self, loss: Any) -> float:
        return 1.0

    def knee(self, loss: Any) -> float:
        return 0.0

    def each(self, loss: Any, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.l1_loss(outputs, targets, reduction=reduction)
