"""Losses that are sums over single outputs: squared error and logistic."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.losses.factors import DiagonalFactor, Factor
from woodbury.losses.rules import StructuredRule, refuse, register_loss, smallest_probability


@register_loss(nn.MSELoss)
class SquaredError(StructuredRule):
    """l = |y - t|^2 / C, so H = (2/C) I: torch's MSELoss averages over outputs and has no 1/2."""

    by_hand = True

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets, reduction="sum") / outputs.shape[1]

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) * (2 / outputs.shape[1])

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        root = math.sqrt(2 / outputs.shape[1])
        return DiagonalFactor((outputs - targets) * root, outputs.new_full((), root).expand_as(outputs))


@register_loss(nn.BCEWithLogitsLoss)
class Logistic(StructuredRule):
    """l = -(1/C) sum_c [w t log s + (1 - t) log(1 - s)], s = sigmoid(y), w = pos_weight.

    r = (a s - w t)/C and H = diag(a s (1 - s))/C with a = 1 + (w - 1) t: exact for targets in [0, 1].
    """

    by_hand = True

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        if loss.weight is not None:
            refuse(loss, "weight", "weight the samples in the data, or use pos_weight")
        weight: Any = loss.pos_weight
        if weight is None:
            return
        if (
            not isinstance(weight, Tensor)
            or weight.is_complex()
            or not bool(((weight >= 0) & (weight < math.inf)).all())
        ):
            refuse(loss, "pos_weight", "it must be a tensor of finite numbers that are not negative")

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        prepared = super().prepare(loss, outputs, targets)
        if not prepared.is_cuda:
            lowest, highest = torch.aminmax(prepared)
            if lowest.item() < 0 or highest.item() > 1:
                raise ValueError("BCEWithLogitsLoss: targets must lie between 0 and 1")
        if outputs.dim() != 2 and loss.pos_weight is not None:
            return prepared.reshape(outputs.shape)  # the shape that pos_weight is broadcast against
        return prepared

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self._pos_weight(loss, outputs, targets)
        if weight is None:
            return (F.softplus(outputs) - targets * outputs).mean(1)
        targets = targets.reshape(outputs.shape).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction="none").mean(1)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if getattr(loss, "pos_weight") is not None:  # noqa: B009  (typed as any module attribute)
            return super().total(loss, outputs, targets)
        total = torch.addcmul(F.softplus(outputs), targets, outputs, value=-1).sum()
        return total if outputs.shape[1] == 1 else total / outputs.shape[1]

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self._pos_weight(loss, outputs, targets)
        if weight is None:
            return (outputs.sigmoid() - targets) / outputs.shape[1]
        targets = targets.reshape(outputs.shape)
        return ((1 + (weight - 1) * targets) * outputs.sigmoid() - weight * targets) / outputs.shape[1]

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        # sigmoid(y) sigmoid(-y) keeps its digits where 1 - sigmoid(y) has none left
        variance = outputs.sigmoid() * outputs.neg().sigmoid() / outputs.shape[1]
        weight = self._pos_weight(loss, outputs, targets)
        if weight is not None:
            variance = variance * (1 + (weight - 1) * targets.reshape(outputs.shape))
        root = variance.clamp_min(smallest_probability(outputs.dtype)).sqrt()
        return DiagonalFactor(self.residual(loss, outputs, targets) / root, root)

    @staticmethod
    def _pos_weight(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """w for each output of a sample, (C,), broadcast as torch does: prepared targets have the shape."""
        weight: Tensor | None = getattr(loss, "pos_weight")  # noqa: B009  (typed as any module attribute)
        if weight is None:
            return None
        own, shape = tuple(weight.shape), tuple(targets.shape)
        if len(own) == len(shape) and own[0] == 1:
            own = own[1:]  # the sample axis
        # torch lines the axes up from the last one
        if len(own) >= len(shape) or any(
            a not in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False)
        ):
            raise ValueError(
                f"BCEWithLogitsLoss(pos_weight=...) of shape {tuple(weight.shape)} does not fit outputs of shape "
                f"{shape}: it must have a shape that torch broadcasts to {shape[1:]}, the outputs of one sample"
            )
        return weight.reshape(own).to(outputs.dtype).expand(shape[1:]).reshape(-1)
