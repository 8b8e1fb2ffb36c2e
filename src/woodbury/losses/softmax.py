"""Cross entropy of a softmax, per sample or per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.device.constants import indices
from woodbury.device.scalars import Scalar, scalar
from woodbury.losses.factors import Factor, SoftmaxFactor, by_position, by_sample
from woodbury.losses.rules import StructuredRule, refuse, register_loss, smallest_probability


@register_loss(nn.CrossEntropyLoss)
class Softmax(StructuredRule):
    """l = -sum_c t_c log p_c, p = softmax(y), summed over the positions of a sample.

    Outputs (n, C) or (n, C, d1, ...), one distribution for each of T = d1 d2 ... positions; targets are class
    indices (n, d1, ...) or probabilities of the outputs' shape. f is the mean over all positions whose target is
    not `ignore_index`, as in torch: an ignored one has neither residual nor curvature.

    r = p - t and H = diag(p) - p p^T where t sums to 1; otherwise p and H are multiplied by sum(t), as torch
    does. H = S S^T with S = diag(sqrt p) - p sqrt(p)^T. As S sqrt(p) = 0, the Householder reflection mapping
    sqrt(p) to -e_j leaves C - 1 columns: with j the most likely class,

        column i != j:  sqrt(p_i) (e_i - t e_j - (1 - t) p),      t = sqrt(p_j) / (1 + sqrt(p_j))
        e_i = r_i / sqrt(p_i) - sqrt(p_i) r_j / (sqrt(p_j) (1 + sqrt(p_j)))

    This j keeps sqrt(p_j) away from zero, and so e accurate.

    Prepared targets are class indices, (n,) if none is ignored, else (n, T) with -1 for the ignored; or
    probabilities (n, C) or (n, C, T). On a GPU a search for ignored targets (n,) would make a step wait: there
    targets (n,) can be ignored only if `ignore_index` is not torch's default -100.
    """

    by_hand = True

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        if loss.weight is not None:
            refuse(loss, "weight", "class weights change the normaliser with the batch; resample the classes")
        smoothing: Any = loss.label_smoothing
        index: Any = loss.ignore_index
        if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
            raise ValueError(f"CrossEntropyLoss: label_smoothing must lie in [0, 1], got {smoothing!r}")
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"CrossEntropyLoss: ignore_index must be a whole number, got {index!r}")

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
            labels = targets[targets != ignored]
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise ValueError(
                    f"CrossEntropyLoss: class indices must lie in 0..{classes - 1}, got {int(wrong[0])}"
                )
            if len(labels) == targets.numel():
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
        if targets.dim() == 1 and not _smoothing(loss):  # none is ignored
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
        p = outputs.softmax(1).clamp_min_(smallest_probability(outputs.dtype))
        roots = p.sqrt()
        top_root, top = roots.max(1, keepdim=True)  # (n T, 1): sqrt(p_j) and j
        others = indices(outputs.shape[1] - 1, p.device)
        others = others + (others >= top)  # (n T, C - 1): every class but j
        root = roots.gather(1, others)
        t_minus_1 = (-1 - top_root).reciprocal_()  # = -1 / (1 + sqrt(p_j))
        common = (p * t_minus_1).scatter_add_(1, top, top_root * t_minus_1)  # -(1 - t) p - t e_j
        shift = residual.gather(1, top) * t_minus_1 / top_root
        e = torch.addcmul(residual.gather(1, others) / root, root, shift)
        if targets.is_floating_point():  # H = sum(t) (diag(p) - p p^T)
            mass = by_position(targets.flatten(1), positions).sum(1, keepdim=True).sqrt()
            root = root * mass
            e = e / mass.clamp_min(torch.finfo(mass.dtype).tiny)  # a target of zero mass has no residual either
        else:
            _, ignored = _labels(targets)
            if ignored is not None:
                root = root.masked_fill(ignored, 0.0)
        return SoftmaxFactor(e if positions == 1 else e.view(samples, -1), root, others, common, positions)


_UNUSED = -100  # the default ignore_index of CrossEntropyLoss


def _smoothing(loss: nn.Module) -> float:
    smoothing: float = getattr(loss, "label_smoothing")  # noqa: B009  (typed as any module attribute)
    return smoothing


def _positions(targets: Tensor) -> int:
    """T of prepared targets: class indices (n,) or (n, T), probabilities (n, C) or (n, C, T)."""
    return math.prod(targets.shape[2:] if targets.is_floating_point() else targets.shape[1:])


def _labels(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Prepared class indices as (n T, 1), and which are ignored (class 0 there), None for none."""
    if targets.dim() == 1:
        return targets.unsqueeze(1), None
    labels = targets.reshape(-1, 1)
    return labels.clamp_min(0), labels < 0
