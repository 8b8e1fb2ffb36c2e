"""The factor S of the curvature B = U^T U: Gauss-Newton and natural gradient as two small objects.

The methods differ in the columns S_i that are sent back through the model, in e with S_i e_i = r_i, and in the
divisor D of U = Z / sqrt(D). Everything else is the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from woodbury.device.scalars import Scalar
from woodbury.losses.factors import DenseFactor, Factor
from woodbury.losses.rules import LossRule, loss_rule
from woodbury.products import is_sum, loss_of


class Seeds(NamedTuple):
    """The columns to send back for the rows Z of a batch: those of S2, then of the samples outside it."""

    columns: list[Tensor]  # (m, k, C) each, or (m, C) for one per sample
    e: Tensor | None  # (m k,) of S2 with S e = r, None for ones
    rest: Tensor | None  # (m, C): what of r the columns of S2 do not hold, r = S e + rest; None for zero
    unit: float = 1.0  # that S is in: D is to be divided by its square


class Curvature(ABC):
    """The curvature matrix B of a method, defined by what it takes from the loss."""

    name: ClassVar[str]
    fits_loss: ClassVar[bool]  # whether B is the Hessian of the loss where the model is linear
    one_pass: ClassVar[bool]  # whether one pass over all samples costs no more than S2 and the others apart

    @abstractmethod
    def factor(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        """S of each sample, and e with S_i e_i = r_i up to the rest that the factor names."""

    @abstractmethod
    def seeds(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor, m: int) -> Seeds:
        """The seeds of a batch whose first m samples are S2."""

    @abstractmethod
    def at_outputs(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None, image: Tensor) -> Tensor:
        """What J^T turns into B v, from J v of the shape of the outputs (n, ...), by autograd.

        It shares no code with rows. The loss, over n unless it is a sum, is differentiated itself.
        """

    @abstractmethod
    def divisor(self, term_count: Scalar, samples: int) -> Scalar:
        """D for n curvature samples whose mean loss divides by M = term_count."""

    @abstractmethod
    def column_count(self, rule: LossRule, shape: Sequence[int]) -> int:
        """k, the number of rows per sample, or a bound on it, for outputs of this shape (n, ...)."""


class GaussNewtonMatrix(Curvature):
    """B = (1/M) sum J_i^T H_i J_i: S_i is a square root of the Hessian of the loss, D = M."""

    name = "gauss-newton"
    fits_loss = True
    one_pass = False

    def factor(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        return rule.compact_factor(loss, outputs, targets)

    def seeds(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor, m: int) -> Seeds:
        own = (outputs, targets) if m == outputs.shape[0] else (outputs[:m], targets[:m])
        factor = self.factor(rule, loss, *own)
        columns = [factor.columns()]
        if m < outputs.shape[0]:
            columns.append(rule.residual(loss, outputs[m:], targets[m:]))
        return Seeds(columns, factor.e.flatten(), factor.rest, factor.unit)

    def at_outputs(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None, image: Tensor) -> Tensor:
        """H_i (J v)_i / n, or without 1/n; H of the loss, or of the function that its rule takes it from."""
        curved = loss_rule(loss).curved_loss(loss)
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(curved, point, targets), point, create_graph=True)  # r_i / n
            if not slope.requires_grad:
                return torch.zeros_like(point)
            (weights,) = torch.autograd.grad(slope, point, image)
        return weights

    def divisor(self, term_count: Scalar, samples: int) -> Scalar:
        return term_count

    def column_count(self, rule: LossRule, shape: Sequence[int]) -> int:
        return rule.column_count(shape)


class EmpiricalFisher(Curvature):
    """B = (1/n) sum g_i g_i^T with g_i = (n/M) J_i^T r_i, whose mean is g: S_i = r_i, e_i = 1, D = M^2 / n.

    The empirical Fisher matrix of the paper. Every factor row is a gradient row; D = n where M = n. Of a loss that
    is a sum, B = (N1/N2) sum_{S2} g_i g_i^T with g_i = J_i^T r_i, the Fisher matrix of a sum.
    """

    name = "empirical"
    fits_loss = False
    one_pass = True

    def factor(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        residual = rule.residual(loss, outputs, targets)
        return DenseFactor(torch.ones_like(residual[:, :1]), residual.unsqueeze(1))

    def seeds(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor, m: int) -> Seeds:
        return Seeds([rule.residual(loss, outputs, targets)], None, None)

    def at_outputs(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None, image: Tensor) -> Tensor:
        """r_i (r_i . (J v)_i) / n, without 1/n for a loss that is a sum."""
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(loss, point, targets), point)  # r_i / n
        inner = (slope * image).reshape(len(outputs), -1).sum(1)
        return (1 if is_sum(loss) else len(outputs)) * slope * inner.reshape(-1, *[1] * (slope.dim() - 1))

    def divisor(self, term_count: Scalar, samples: int) -> Scalar:
        return term_count * term_count / samples

    def column_count(self, rule: LossRule, shape: Sequence[int]) -> int:
        return 1


class OwnScale(GaussNewtonMatrix):
    """The same B with the columns of S over their largest entry s, e times s and D over s^2.

    A loss multiplied by a constant then has the same rows to the last bit, and so the same Gram matrix: at small
    damping even its rounding decides about p.
    """

    def factor(self, rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        factor = super().factor(rule, loss, outputs, targets)
        columns = factor.columns()
        largest = float(columns.abs().max()) if columns.numel() else 1.0
        unit = largest if 0 < largest < math.inf else 1.0  # where there is none to divide by
        return DenseFactor(factor.e * unit, columns / unit, rest=factor.rest, unit=unit)


CURVATURES: dict[str, Curvature] = {kind.name: kind for kind in (GaussNewtonMatrix(), EmpiricalFisher())}
