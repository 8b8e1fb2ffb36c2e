"""Losses that are sums over single outputs: squared error, logistic, likelihoods, and those that grow linearly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.losses.factors import DiagonalFactor, Factor
from woodbury.losses.rules import (
    LossRule,
    buffer_of,
    check_weights,
    over_outputs,
    register_loss,
    share_of_output,
    smallest_probability,
)


@register_loss(nn.MSELoss)
class SquaredError(LossRule):
    """l = |y - t|^2 / C, so H = (2/C) I: torch's MSELoss averages over outputs and has no 1/2."""

    by_hand = takes_sum = True

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return over_outputs(loss, (outputs - targets).square())

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        total = F.mse_loss(outputs, targets, reduction="sum")
        return total if self.is_sum(loss) else total / outputs.shape[1]

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) * (2 * share_of_output(loss, outputs))

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        root = math.sqrt(2 * share_of_output(loss, outputs))
        return DiagonalFactor((outputs - targets) * root, outputs.new_full((), root).expand_as(outputs))


@register_loss(nn.BCEWithLogitsLoss)
class Logistic(LossRule):
    """l = -(1/C) sum_c v [w t log s + (1 - t) log(1 - s)], s = sigmoid(y), v = weight, w = pos_weight.

    r = v (a s - w t)/C and H = diag(v a s (1 - s))/C with a = 1 + (w - 1) t: exact for targets in [0, 1]. Both
    weights are those of outputs, the same for all samples.
    """

    by_hand = takes_sum = True

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        for name in ("weight", "pos_weight"):
            check_weights(loss, name)

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        prepared = super().prepare(loss, outputs, targets)
        if not prepared.is_cuda:
            lowest, highest = (end.item() for end in torch.aminmax(prepared))
            if lowest < 0 or highest > 1:
                raise ValueError(
                    f"BCEWithLogitsLoss: targets must lie between 0 and 1, got {lowest:g} to {highest:g}"
                )
        if outputs.dim() != 2 and _is_weighted(loss):
            return prepared.reshape(outputs.shape)  # the shape that the weights are broadcast against
        return prepared

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight, pos_weight = _weights(loss, outputs, targets)
        targets = targets.reshape(outputs.shape).to(outputs.dtype)
        each = F.binary_cross_entropy_with_logits(
            outputs, targets, weight, pos_weight=pos_weight, reduction="none"
        )
        return over_outputs(loss, each)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if _is_weighted(loss):
            return super().total(loss, outputs, targets)
        total = torch.addcmul(F.softplus(outputs), targets, outputs, value=-1).sum()
        return total if outputs.shape[1] == 1 or self.is_sum(loss) else total / outputs.shape[1]

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight, pos_weight = _weights(loss, outputs, targets)
        targets = targets if targets.dim() == 2 else targets.reshape(outputs.shape)
        if pos_weight is None:
            residual = outputs.sigmoid() - targets
        else:
            residual = (1 + (pos_weight - 1) * targets) * outputs.sigmoid() - pos_weight * targets
        share = share_of_output(loss, outputs)
        if weight is None and share == 1.0:
            return residual
        return residual * (share if weight is None else weight * share)

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        # sigmoid(y) sigmoid(-y) keeps its digits where 1 - sigmoid(y) has none left
        variance, share = outputs.sigmoid() * outputs.neg().sigmoid(), share_of_output(loss, outputs)
        if share != 1.0:
            variance = variance * share
        weight, pos_weight = _weights(loss, outputs, targets)
        if pos_weight is not None:
            variance = variance * (1 + (pos_weight - 1) * targets.reshape(outputs.shape))
        if weight is not None:
            variance = variance * weight
        root = variance.clamp_min(smallest_probability(outputs.dtype)).sqrt()
        return DiagonalFactor(self.residual(loss, outputs, targets) / root, root)


def _is_weighted(loss: nn.Module) -> bool:
    return buffer_of(loss, "pos_weight") is not None or buffer_of(loss, "weight") is not None


def _weights(loss: nn.Module, outputs: Tensor, targets: Tensor) -> list[Tensor | None]:
    """weight and pos_weight of each output of a sample, (C,), or None; prepared targets have the shape."""
    found: list[Tensor | None] = []
    for name in ("weight", "pos_weight"):
        own, shape = buffer_of(loss, name), tuple(targets.shape)
        try:
            found.append(None if own is None else own.expand(1, *shape[1:]).reshape(-1).to(outputs.dtype))
        except RuntimeError:
            raise ValueError(
                f"BCEWithLogitsLoss({name}=...) of shape {tuple(own.shape)} does not fit outputs of shape "
                f"{shape}: it must have a shape that torch broadcasts to {shape[1:]}, the outputs of one sample"
            ) from None
    return found


@register_loss(nn.PoissonNLLLoss)
class Poisson(LossRule):
    """l = (1/C) sum_c exp(y) - t y, or with log_input=False (1/C) sum_c y - t log(y + eps), for counts t >= 0.

    `full` adds what depends on the counts alone. With mu = exp(y): r = (mu - t)/C and H = diag(mu)/C; with
    log_input=False and mu = y + eps: r = (1 - t/mu)/C and H = diag(t/mu^2)/C, where a count of 0 has a residual
    but no curvature: there r is not in the range of S.
    """

    by_hand = takes_sum = True

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        prepared = super().prepare(loss, outputs, targets)
        if not prepared.is_cuda and prepared.min().item() < 0:
            raise ValueError("PoissonNLLLoss: targets are counts, and must not be negative")
        return prepared

    def values(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        options = {"log_input": loss.log_input, "full": loss.full, "eps": loss.eps}
        each = F.poisson_nll_loss(outputs, targets.to(outputs.dtype), **options, reduction="none")
        return over_outputs(loss, each)

    def residual(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        slope = outputs.exp() - targets if loss.log_input else 1 - targets / (outputs + loss.eps)
        return slope * share_of_output(loss, outputs)

    def compact_factor(self, loss: Any, outputs: Tensor, targets: Tensor) -> Factor:
        share, least = share_of_output(loss, outputs), smallest_probability(outputs.dtype)
        residual = self.residual(loss, outputs, targets)
        if loss.log_input:
            root = (outputs.exp() * share).clamp_min(least).sqrt()
            return DiagonalFactor(residual / root, root)
        variance = targets / (outputs + loss.eps).square() * share
        curved = variance > least
        root = torch.where(curved, variance, 0.0).sqrt()
        e = torch.where(curved, residual / torch.where(curved, root, 1.0), 0.0)
        if not outputs.is_cuda and bool(curved.all()):
            return DiagonalFactor(e, root)
        return DiagonalFactor(e, root, rest=torch.where(curved, 0.0, residual))


@register_loss(nn.GaussianNLLLoss)
class Gaussian(LossRule):
    """l = (1/2C) sum_c log v + (y - t)^2 / v, v = max(var, eps), with a variance that is given, not learned.

    r = (y - t)/(v C) and H = diag(1/v)/C. The variances come with the targets, as one tensor (n, 2, ...):
    torch.stack([target, var], dim=1), each of the shape of the outputs.
    """

    by_hand = takes_sum = True

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        wanted = (len(outputs), 2, *outputs.shape[1:])
        if targets is None or targets.shape != wanted:
            given = "None" if targets is None else f"the shape {tuple(targets.shape)}"
            raise ValueError(
                "GaussianNLLLoss takes its variances with the targets: pass torch.stack([target, var], dim=1), of "
                f"shape {wanted}, got {given}. For a variance that the model gives, write a loss of your own "
                "(woodbury.register_loss)"
            )
        prepared = targets.reshape(len(outputs), 2, -1).to(outputs.dtype)
        if not prepared.is_cuda and prepared[:, 1].min().item() < 0:
            raise ValueError("GaussianNLLLoss: variances, targets[:, 1], must not be negative")
        return prepared

    def values(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        target, variance = targets.unbind(1)
        variance = variance.to(outputs.dtype).clamp_min(loss.eps)  # torch's function would wait for a device
        each = 0.5 * (variance.log() + (outputs - target).square() / variance)
        if loss.full:
            each = each + 0.5 * math.log(2 * math.pi)
        return over_outputs(loss, each)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        precision, target = self._precision(loss, outputs, targets)
        return (outputs - target) * precision

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        precision, target = self._precision(loss, outputs, targets)
        root = precision.sqrt()
        return DiagonalFactor((outputs - target) * root, root)

    @staticmethod
    def _precision(loss: Any, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """1/(v C), 1/v for a sum, and the targets, (n, C) each."""
        target, variance = targets.unbind(1)
        return share_of_output(loss, outputs) / variance.clamp_min(loss.eps), target


# Without it an output that meets its target would never leave it again. Of 1e-1 to 1e-8, 1e-4 ended with the
# lowest loss or nearly so on a regression with noise and without (60 steps); more than 1e-3 kept the loss up.
FLOOR = 1e-4


@register_loss(nn.HuberLoss)
@register_loss(nn.SmoothL1Loss)
@register_loss(nn.L1Loss)
class Robust(LossRule):
    """l = rho(d) at each output, d = y - t: a parabola up to a knee, |d| <= b, and a line of slope s beyond it.

    On the line rho'' is 0, and a Gauss-Newton step there would be that of gradient descent. S S^T is not the
    Hessian here but the diagonal matrix of w = rho'(d) / d = s / max(|d|, b), the weights of iteratively
    reweighted least squares: the parabola q(x) = rho(d) + w (x^2 - d^2) / 2 touches rho at d and lies nowhere
    below it.

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
        return over_outputs(loss, self._rho(loss, outputs, targets, "none"))

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
    if isinstance(loss, nn.HuberLoss):
        return float(loss.delta), float(loss.delta)
    return 1.0, float(loss.beta) if isinstance(loss, nn.SmoothL1Loss) else 0.0
