"""Loss rules: what a loss says about its curvature at the outputs.

A mean loss f = (1/M) sum_i l(y_i, t_i) has at each sample a gradient r_i = dl/dy_i and a Hessian
H_i = d2l/dy_i2 = S_i S_i^T. A rule gives the values l, the residuals r, the factor S and the count M: the number
of samples, or of tokens where l sums over those of a sample. Where r lies in the range of S it also gives e with
S e = r, which keeps small damping accurate (see `optim.smw`).

Outputs and targets reach a rule with one row per sample: outputs (n, C), all of a sample's in one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury._scalar import Scalar, is_known, scalar
from woodbury.factors import DenseFactor, DiagonalFactor, Factor, SoftmaxFactor, by_position, by_sample

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

    def count(self, loss: nn.Module, targets: Tensor) -> Scalar:
        """M, what the mean divides by: f = sum_i l(y_i, t_i) / M. The number of samples by default."""
        return len(targets)

    def count_of_first(self, loss: nn.Module, targets: Tensor, samples: int) -> Scalar:
        """M of the first samples alone."""
        return samples if type(self).count is LossRule.count else self.count(loss, targets[:samples])

    @abstractmethod
    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """l(y_i, t_i) for each sample, (n,)."""

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_i l(y_i, t_i), where nobody asks for the terms."""
        return self.values(loss, outputs, targets).sum()

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

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        """S and e held in as little memory as the loss allows; here what `factor` gives."""
        columns, e = self.factor(loss, outputs, targets)
        return DenseFactor(e, columns)

    def column_count(self, shape: Sequence[int]) -> int:
        """k, or a bound on it, for outputs of the model's own shape (n, ...): known before `factor` is called."""
        return math.prod(shape[1:])


class _Structured(LossRule):
    """A loss whose S has a structure: `compact_factor` is written by hand and `factor` shows it."""

    @abstractmethod
    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor: ...

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        compact = self.compact_factor(loss, outputs, targets)
        return compact.columns(), compact.e


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


def check_count(count: Scalar, what: str = "the batch") -> Scalar:
    """The count of a mean loss; raises if it is zero, where asking does not wait."""
    if is_known(count) and count == 0:
        raise ValueError(
            f"every target of {what} is ignored (ignore_index of the loss), and a mean over none is not a number: "
            "leave out samples without a target"
        )
    return count


def _refuse(loss: nn.Module, option: str, advice: str) -> None:
    raise ValueError(f"{type(loss).__name__}({option}=...) is not supported: {advice}")


def _smallest_probability(dtype: torch.dtype) -> float:
    """Where a probability is cut off in S: a change of H far below rounding that keeps e = r / S finite."""
    return torch.finfo(dtype).eps ** 1.5


@register_loss(nn.MSELoss)
class SquaredError(_Structured):
    """l = |y - t|^2 / C, so H = (2/C) I: torch's MSELoss averages over outputs and has no 1/2."""

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
class Logistic(_Structured):
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

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._positive(loss, outputs) is not None:
            return super().total(loss, outputs, targets)
        total = torch.addcmul(F.softplus(outputs), targets, outputs, value=-1).sum()
        return total if outputs.shape[1] == 1 else total / outputs.shape[1]

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self._positive(loss, outputs)
        if weight is None:
            return (outputs.sigmoid() - targets) / outputs.shape[1]
        return ((1 + (weight - 1) * targets) * outputs.sigmoid() - weight * targets) / outputs.shape[1]

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        # sigmoid(y) sigmoid(-y) keeps its digits where 1 - sigmoid(y) has none left
        variance = outputs.sigmoid() * outputs.neg().sigmoid() / outputs.shape[1]
        weight = self._positive(loss, outputs)
        if weight is not None:
            variance = variance * (1 + (weight - 1) * targets)
        root = variance.clamp_min(_smallest_probability(outputs.dtype)).sqrt()
        return DiagonalFactor(self.residual(loss, outputs, targets) / root, root)

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
class Softmax(_Structured):
    """l = -sum_c t_c log p_c, p = softmax(y), summed over the positions of a sample.

    Outputs (n, C) or (n, C, d1, ...), one distribution for each of T = d1 d2 ... positions; targets are class
    indices (n, d1, ...) or probabilities of the outputs' shape. f is the mean over all positions whose target is
    not `ignore_index`, as torch takes it: an ignored one has neither residual nor curvature.

    r = p - t and H = diag(p) - p p^T where t sums to 1; otherwise p and H are multiplied by sum(t), as torch
    does. H = S S^T with S = diag(sqrt p) - p sqrt(p)^T. As S sqrt(p) = 0, the Householder reflection mapping
    sqrt(p) to -e_j leaves C - 1 columns: with j the most likely class,

        column i != j:  sqrt(p_i) (e_i - t e_j - (1 - t) p),      t = sqrt(p_j) / (1 + sqrt(p_j))
        e_i = r_i / sqrt(p_i) - sqrt(p_i) r_j / (sqrt(p_j) (1 + sqrt(p_j)))

    Choosing j so keeps sqrt(p_j) away from zero, and with it the digits of e.

    Prepared targets are class indices (n,) where every one counts, or (n, T) with -1 for the ignored, or
    probabilities (n, C) or (n, C, T). To look for ignored ones among targets (n,) would make a GPU wait, and to
    allow for them costs time: there they count only if `ignore_index` is given another value than torch's -100.
    """

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        if loss.weight is not None:
            _refuse(loss, "weight", "class weights change the normaliser with the batch; resample the classes")

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        if outputs.dim() < 2:
            raise ValueError(
                f"CrossEntropyLoss needs outputs (n, C) or (n, C, d1, ...), got the shape {tuple(outputs.shape)}"
            )
        if targets is None:
            raise ValueError(
                "CrossEntropyLoss needs targets: class indices (n,) or (n, d1, ...), or probabilities of the "
                "outputs' shape"
            )
        if targets.shape == outputs.shape[:-1] != (len(outputs), *outputs.shape[2:]):
            raise ValueError(
                f"CrossEntropyLoss takes outputs (n, C, T), the classes second, and targets (n, T); got outputs "
                f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}, which look like (n, T, C): return "
                f"{'.transpose(1, 2)' if outputs.dim() == 3 else '.movedim(-1, 1)'} of them"
            )
        if outputs.shape[1] < 2:
            raise ValueError(
                "CrossEntropyLoss needs outputs (n, C) with C >= 2 classes, got C = 1; "
                "for one logit use BCEWithLogitsLoss"
            )
        if targets.is_floating_point():
            return self._prepare_probabilities(loss, outputs, targets)
        return self._prepare_indices(loss, outputs, targets)

    def _prepare_probabilities(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape:
            raise ValueError(
                f"CrossEntropyLoss: probability targets must have the shape of the outputs "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}"
            )
        targets = targets.to(outputs.dtype)
        if not targets.is_cuda and targets.min().item() < 0:
            raise ValueError("CrossEntropyLoss: probability targets must not be negative")
        smoothing = _smoothing(loss)
        if smoothing:
            targets = (1 - smoothing) * targets + smoothing / outputs.shape[1]
        return targets if targets.dim() == 2 else targets.flatten(2)

    def _prepare_indices(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        n, classes = outputs.shape[:2]
        if targets.shape != (n, *outputs.shape[2:]):
            raise ValueError(
                f"CrossEntropyLoss: class indices must have shape {(n, *outputs.shape[2:])}, "
                f"got {tuple(targets.shape)}"
            )
        ignored: int = getattr(loss, "ignore_index")  # noqa: B009  (typed as any module attribute)
        if targets.dtype != torch.int64:
            targets = targets.long()
        if targets.dim() > 1:
            targets = targets.flatten(1)
        if targets.is_cuda:
            if targets.dim() == 1 and ignored == _UNUSED:
                return targets
        else:
            lowest, highest = (int(value) for value in torch.aminmax(targets))
            if lowest >= 0 and highest < classes and not lowest <= ignored <= highest:
                return targets
            counted = targets[targets != ignored]
            wrong = counted[(counted < 0) | (counted >= classes)]
            if len(wrong):
                raise ValueError(
                    f"CrossEntropyLoss: class indices must lie in 0..{classes - 1}, got {int(wrong[0])}"
                )
            if len(counted) == targets.numel():
                return targets
        return targets.masked_fill(targets == ignored, -1).reshape(n, -1)

    def count(self, loss: nn.Module, targets: Tensor) -> Scalar:
        if targets.dim() == 1:
            return len(targets)
        if targets.is_floating_point():
            return len(targets) * _positions(targets)
        return scalar((targets >= 0).sum(dtype=torch.float64))

    def count_of_first(self, loss: nn.Module, targets: Tensor, samples: int) -> Scalar:
        return samples if targets.dim() == 1 else self.count(loss, targets[:samples])

    def column_count(self, shape: Sequence[int]) -> int:
        return (shape[1] - 1) * math.prod(shape[2:])

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        positions = _positions(targets)
        if targets.dim() == 1 and not _smoothing(loss):  # every one counts
            return F.cross_entropy(outputs, targets, reduction="none", ignore_index=_UNUSED)
        logarithms = by_position(outputs, positions).log_softmax(1)
        if targets.is_floating_point():
            values = -(by_position(targets.flatten(1), positions) * logarithms).sum(1)
        else:
            labels, ignored = _labels(targets)
            values = -logarithms.gather(1, labels).squeeze(1)
            smoothing = _smoothing(loss)
            if smoothing:
                values = (1 - smoothing) * values - smoothing * logarithms.mean(1)
            if ignored is not None:
                values = values.masked_fill(ignored.squeeze(1), 0.0)
        return values if positions == 1 else values.view(-1, positions).sum(1)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1 and not _smoothing(loss):
            return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=_UNUSED)
        return super().total(loss, outputs, targets)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        positions = _positions(targets)
        return by_sample(self._residual(loss, by_position(outputs, positions), targets), positions)

    def _residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """r for outputs (n T, C), position by position."""
        probabilities = outputs.softmax(1)
        if targets.is_floating_point():
            targets = by_position(targets.flatten(1), _positions(targets))
            return probabilities * targets.sum(1, keepdim=True) - targets
        labels, ignored = _labels(targets)
        smoothing = _smoothing(loss)
        residual = probabilities.scatter_(1, labels, smoothing - 1.0, reduce="add")
        if smoothing:
            residual -= smoothing / outputs.shape[1]
        return residual if ignored is None else residual.masked_fill(ignored, 0.0)

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        samples, positions = len(outputs), _positions(targets)
        outputs = by_position(outputs, positions)
        residual = self._residual(loss, outputs, targets)
        p = outputs.softmax(1).clamp_min_(_smallest_probability(outputs.dtype))
        top_p, top = p.max(1, keepdim=True)  # (n T, 1): p_j and j
        others = torch.arange(outputs.shape[1] - 1, device=p.device)
        others = others + (others >= top)  # (n T, C - 1): every class but j
        top_root = top_p.sqrt()
        root = p.gather(1, others).sqrt()
        t = top_root / (1 + top_root)
        common = ((t - 1) * p).scatter_add_(1, top, -t)  # -(1 - t) p - t e_j
        shift = residual.gather(1, top) / (top_root * (1 + top_root))
        e = residual.gather(1, others) / root - root * shift
        if targets.is_floating_point():  # H = sum(t) (diag(p) - p p^T)
            mass = by_position(targets.flatten(1), positions).sum(1, keepdim=True).sqrt()
            root = root * mass
            e = e / mass.clamp_min(torch.finfo(mass.dtype).tiny)  # a target of zero mass has no residual either
        else:
            _, ignored = _labels(targets)
            if ignored is not None:
                root = root.masked_fill(ignored, 0.0)
        return SoftmaxFactor(e if positions == 1 else e.view(samples, -1), root, others, common, positions)


_OWN = (SquaredError, Logistic, Softmax)


def is_own(rule: LossRule) -> bool:
    """Whether a rule is one of these very classes: then it draws no random numbers and always gives e."""
    return type(rule) in _OWN


_UNUSED = -100  # ignore_index of a CrossEntropyLoss that was given none


def _smoothing(loss: nn.Module) -> float:
    smoothing: float = getattr(loss, "label_smoothing")  # noqa: B009  (typed as any module attribute)
    return smoothing


def _positions(targets: Tensor) -> int:
    """T of prepared targets: class indices (n,) or (n, T), probabilities (n, C) or (n, C, T)."""
    return math.prod(targets.shape[2:] if targets.is_floating_point() else targets.shape[1:])


def _labels(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Prepared class indices as (n T, 1), any class for the ignored, and which those are; None for none."""
    if targets.dim() == 1:
        return targets.unsqueeze(1), None
    labels = targets.reshape(-1, 1)
    return labels.clamp_min(0), labels < 0
