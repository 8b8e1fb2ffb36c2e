"""A constant times a loss, and no loss at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from woodbury.device.scalars import Scalar
from woodbury.losses.factors import DenseFactor, Factor
from woodbury.losses.rules import LossRule, StructuredRule, loss_rule, register_loss


class NoLoss(nn.Module):
    """Stands in for a loss that is seen in a closure or in a watched loop."""


@register_loss(NoLoss)
class _NoLossRule(LossRule):
    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        raise ValueError(
            "the optimizer was made without a loss, which it sees in a closure or a watched loop: pass the loss "
            "as its second argument to call step(inputs, targets)"
        )

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError


class ScaledLoss(nn.Module):
    """A constant times a loss; without `counts` that of a process that has borrowed a sample, having none."""

    def __init__(self, loss: nn.Module, factor: float, counts: bool = True) -> None:
        super().__init__()
        self.loss, self.factor, self.counts = loss, factor, counts

    @property
    def reduction(self) -> str:
        return str(getattr(self.loss, "reduction", "mean"))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = self.factor * self.loss(outputs, targets)
        return value


@register_loss(ScaledLoss)
class _ScaledRule(StructuredRule):
    """c l: values and residuals times c, S and e times sqrt(c)."""

    def check(self, loss: Any) -> None:
        _rule(loss).check(loss.loss)

    def is_sum(self, loss: Any) -> bool:
        return _rule(loss).is_sum(loss.loss)

    def prepare(self, loss: Any, outputs: Tensor, targets: Tensor | None) -> Tensor:
        return _rule(loss).prepare(loss.loss, outputs, targets)

    def count(self, loss: Any, targets: Tensor) -> Scalar:
        return _rule(loss).count(loss.loss, targets) if loss.counts else 0

    def values(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return _rule(loss).values(loss.loss, outputs, targets) * loss.factor

    def total(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return _rule(loss).total(loss.loss, outputs, targets) * loss.factor

    def residual(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return _rule(loss).residual(loss.loss, outputs, targets) * loss.factor

    def compact_factor(self, loss: Any, outputs: Tensor, targets: Tensor) -> Factor:
        own, root = _rule(loss).compact_factor(loss.loss, outputs, targets), math.sqrt(loss.factor)
        return DenseFactor(
            None if own.e is None else own.e * root,
            own.columns() * root,
            rest=None if own.rest is None else own.rest * loss.factor,
        )

    def curved_loss(self, loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
        own = _rule(loss).curved_loss(loss.loss)
        return lambda outputs, targets: own(outputs, targets) * loss.factor


def _rule(loss: Any) -> LossRule:
    return loss_rule(loss.loss)
