"""Loss rules: what a loss says about its curvature at the outputs.

A mean loss f = (1/N) sum_i l(y_i, t_i) has at each sample a gradient r_i = dl/dy_i and a Hessian
H_i = d2l/dy_i2 = S_i S_i^T. A rule gives the values l, the residuals r and the factor S; where r lies in
the range of S it also gives e with S e = r, which keeps small damping accurate (see `optim.smw`).

Outputs and targets reach a rule with one row per sample: outputs (n, C).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RuleType = TypeVar("RuleType", bound="type[LossRule]")

_RULES: dict[type[nn.Module], LossRule] = {}


class LossRule(ABC):
    """One kind of loss. `values` is all a rule must define; the rest follows from it by autograd.

    The derived `factor` takes the Hessian of each sample's value and its positive semi-definite square
    root by an eigendecomposition (C x C a sample), so a hand-written one pays for many outputs.
    """

    def check(self, loss: nn.Module) -> None:
        """Raise if an option of this loss is not supported, naming the option."""
        reduction = getattr(loss, "reduction", "mean")
        if reduction != "mean":
            raise ValueError(
                f"{type(loss).__name__}(reduction={reduction!r}) is not supported: the step is defined for a "
                "mean over samples; use reduction='mean'"
            )

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Targets checked against the outputs and brought to the form the other methods take.

        outputs are in the model's own shape, (n, ...); here the targets must have that very shape.
        """
        if targets is None:
            return torch.zeros_like(outputs).reshape(outputs.shape[0], -1)
        if targets.shape != outputs.shape:
            raise ValueError(
                f"{type(loss).__name__}: targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: they must be equal"
            )
        return targets.reshape(targets.shape[0], -1).to(outputs.dtype)

    @abstractmethod
    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """l(y_i, t_i) for each sample, (n,)."""

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """r_i = dl/dy_i, (n, C)."""
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.values(loss, point, targets).sum(), point)
        return gradient

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns of S_i as rows, (n, k, C), and e (n, k) with S_i e_i = r_i, or None."""

        def value(output: Tensor, target: Tensor) -> Tensor:
            return self.values(loss, output.unsqueeze(0), target.unsqueeze(0)).squeeze(0)

        hessian = torch.func.vmap(torch.func.hessian(value))(outputs.detach(), targets)
        eigenvalues, eigenvectors = torch.linalg.eigh(hessian)
        return (eigenvectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)).mT, None


def register_loss(kind: type[nn.Module]) -> Callable[[RuleType], RuleType]:
    """Class decorator that makes a `LossRule` the rule for losses of class `kind`.

    >>> @woodbury.register_loss(torch.nn.PoissonNLLLoss)
    ... class Poisson(woodbury.LossRule):
    ...     def values(self, loss, outputs, targets):
    ...         return (outputs.exp() - targets * outputs).mean(1)
    """

    def register(rule: RuleType) -> RuleType:
        _RULES[kind] = rule()
        return rule

    return register


def loss_rule(loss: nn.Module) -> LossRule:
    """The rule for this loss, its options checked."""
    rule = _RULES.get(type(loss))
    if rule is None:
        known = ", ".join(sorted(kind.__name__ for kind in _RULES))
        raise TypeError(
            f"no rule for the loss {type(loss).__name__}; known: {known}. Add one with woodbury.register_loss"
        )
    rule.check(loss)
    return rule


def _refuse(loss: nn.Module, option: str, advice: str) -> None:
    raise ValueError(f"{type(loss).__name__}({option}=...) is not supported: {advice}")


def _smallest_probability(dtype: torch.dtype) -> float:
    """Where a probability is cut off in S: a change of H far below rounding that keeps e = r / S finite."""
    return torch.finfo(dtype).eps ** 1.5


@register_loss(nn.MSELoss)
class SquaredError(LossRule):
    """l = |y - t|^2 / C, so H = (2/C) I: torch's MSELoss averages over outputs and has no 1/2."""

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) * (2 / outputs.shape[1])

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        n, width = outputs.shape
        root = math.sqrt(2 / width)
        columns = (root * torch.eye(width, dtype=outputs.dtype, device=outputs.device)).expand(n, -1, -1)
        return columns, (outputs - targets) * root


@register_loss(nn.BCEWithLogitsLoss)
class Logistic(LossRule):
    """l = -(1/C) sum_c [w t log s + (1 - t) log(1 - s)], s = sigmoid(y), w = pos_weight.

    r = (a s - w t)/C and H = diag(a s (1 - s))/C with a = 1 + (w - 1) t: exact for targets in [0, 1].
    """

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        if loss.weight is not None:
            _refuse(loss, "weight", "weight the samples in the data, or use pos_weight")

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        prepared = super().prepare(loss, outputs, targets)
        if not prepared.is_cuda:
            lowest, highest = torch.aminmax(prepared)
            if lowest.item() < 0 or highest.item() > 1:
                raise ValueError("BCEWithLogitsLoss: targets must lie between 0 and 1")
        return prepared

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self._positive(loss, outputs)
        if weight is None:
            return (F.softplus(outputs) - targets * outputs).mean(1)
        targets = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction="none").mean(1)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self._positive(loss, outputs)
        if weight is None:
            return (outputs.sigmoid() - targets) / outputs.shape[1]
        return ((1 + (weight - 1) * targets) * outputs.sigmoid() - weight * targets) / outputs.shape[1]

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # sigmoid(y) sigmoid(-y) keeps its digits where 1 - sigmoid(y) has none left
        variance = outputs.sigmoid() * outputs.neg().sigmoid() / outputs.shape[1]
        weight = self._positive(loss, outputs)
        if weight is not None:
            variance = variance * (1 + (weight - 1) * targets)
        root = variance.clamp_min(_smallest_probability(outputs.dtype)).sqrt()
        return torch.diag_embed(root), self.residual(loss, outputs, targets) / root

    @staticmethod
    def _positive(loss: nn.Module, outputs: Tensor) -> Tensor | None:
        weight: Tensor | None = getattr(loss, "pos_weight")  # noqa: B009  (typed as any module attribute)
        if weight is None:
            return None
        if weight.numel() not in (1, outputs.shape[1]):
            raise ValueError(
                f"BCEWithLogitsLoss(pos_weight=...) of shape {tuple(weight.shape)} is not supported for "
                f"{outputs.shape[1]} outputs a sample: give one number, or one per output"
            )
        return weight.to(outputs.dtype).flatten().expand(outputs.shape[1])


@register_loss(nn.CrossEntropyLoss)
class Softmax(LossRule):
    """l = -sum_c t_c log p_c, p = softmax(y); targets are class indices (n,) or probabilities (n, C).

    r = p - t and H = diag(p) - p p^T where t sums to 1; otherwise p and H are multiplied by sum(t), as torch
    does. H = S S^T with S = diag(sqrt p) - p sqrt(p)^T. As S sqrt(p) = 0, the Householder reflection mapping
    sqrt(p) to -e_j leaves C - 1 columns: with j the most likely class,

        column i != j:  sqrt(p_i) (e_i - t e_j - (1 - t) p),      t = sqrt(p_j) / (1 + sqrt(p_j))
        e_i = r_i / sqrt(p_i) - sqrt(p_i) r_j / (sqrt(p_j) (1 + sqrt(p_j)))

    Choosing j so keeps sqrt(p_j) away from zero, and with it the digits of e.
    """

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        if loss.weight is not None:
            _refuse(loss, "weight", "class weights change the normaliser with the batch; resample the classes")
        if loss.ignore_index != -100:
            _refuse(loss, "ignore_index", "drop the ignored samples from the batch")

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        if outputs.dim() != 2:
            raise ValueError(f"CrossEntropyLoss needs outputs (n, C), got the shape {tuple(outputs.shape)}")
        n, classes = outputs.shape
        if classes < 2:
            raise ValueError(
                "CrossEntropyLoss needs outputs (n, C) with C >= 2 classes, got C = 1; "
                "for one logit use BCEWithLogitsLoss"
            )
        if targets is None:
            raise ValueError("CrossEntropyLoss needs targets: class indices (n,) or probabilities (n, C)")
        smoothing: float = getattr(loss, "label_smoothing")  # noqa: B009
        if targets.is_floating_point():
            if targets.shape != outputs.shape:
                raise ValueError(
                    f"CrossEntropyLoss: probability targets must have the shape of the outputs "
                    f"{tuple(outputs.shape)}, got {tuple(targets.shape)}"
                )
            targets = targets.to(outputs.dtype)
            if not targets.is_cuda and targets.min().item() < 0:
                raise ValueError("CrossEntropyLoss: probability targets must not be negative")
        else:
            if targets.shape != (n,):
                raise ValueError(
                    f"CrossEntropyLoss: class indices must have shape ({n},), got {tuple(targets.shape)}"
                )
            if not targets.is_cuda:
                lowest, highest = (int(value) for value in torch.aminmax(targets))
                if lowest < 0 or highest >= classes:
                    raise ValueError(
                        f"CrossEntropyLoss: class indices must lie in 0..{classes - 1}, "
                        f"got {lowest if lowest < 0 else highest}"
                    )
            targets = targets.long()
            if smoothing:
                targets = F.one_hot(targets, classes).to(outputs.dtype)
        return (1 - smoothing) * targets + smoothing / classes if smoothing else targets

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        logarithms = outputs.log_softmax(1)
        if targets.is_floating_point():
            return -(targets * logarithms).sum(1)
        return -logarithms.gather(1, targets.unsqueeze(1)).squeeze(1)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        probabilities = outputs.softmax(1)
        if targets.is_floating_point():
            return probabilities * targets.sum(1, keepdim=True) - targets
        ones = torch.ones((), dtype=outputs.dtype, device=outputs.device).expand(len(targets), 1)
        return probabilities.scatter_add(1, targets.unsqueeze(1), -ones)

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        classes = outputs.shape[1]
        residual = self.residual(loss, outputs, targets)
        p = outputs.softmax(1).clamp_min_(_smallest_probability(outputs.dtype))
        top_p, top = p.max(1, keepdim=True)  # (n, 1): p_j and j
        others = torch.arange(classes - 1, device=p.device)
        others = others + (others >= top)  # (n, C - 1): every class but j
        top_root = top_p.sqrt()
        root = p.gather(1, others).sqrt()
        t = top_root / (1 + top_root)
        common = ((t - 1) * p).scatter_add_(1, top, -t)  # -(1 - t) p - t e_j
        columns = common.unsqueeze(1).repeat(1, classes - 1, 1)
        columns.scatter_add_(2, others.unsqueeze(2), torch.ones_like(columns[:, :, :1]))
        columns *= root.unsqueeze(2)
        shift = residual.gather(1, top) / (top_root * (1 + top_root))
        e = residual.gather(1, others) / root - root * shift
        if targets.is_floating_point():  # H = sum(t) (diag(p) - p p^T)
            mass = targets.sum(1, keepdim=True).sqrt()
            # a target of zero mass has no residual either
            return columns * mass.unsqueeze(2), e / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        return columns, e
