"""Cross entropy of a softmax, per sample or per token, from logits or from log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.device.constants import indices
from woodbury.device.scalars import Scalar, scalar
from woodbury.losses.factors import Factor, SoftmaxFactor, by_position, by_sample
from woodbury.losses.rules import LossRule, buffer_of, check_weights, register_loss, smallest_probability


@register_loss(nn.CrossEntropyLoss)
class Softmax(LossRule):
    """l = -sum_c w_c t_c log p_c, p = softmax(y), summed over the positions of a sample; w are class weights.

    Outputs (n, C) or (n, C, d1, ...), one distribution for each of T = d1 d2 ... positions; targets are class
    indices (n, d1, ...) or probabilities of the outputs' shape. f is the mean over all positions whose target is
    not `ignore_index`, as in torch: an ignored one has neither residual nor curvature. With class weights the mean
    over class indices divides by the sum of the weights of the targets; that over probabilities does not.

    r = p - t and H = diag(p) - p p^T where w = 1 and t sums to 1; otherwise t stands for w t, and p and H are
    multiplied by sum(t), as torch does. H = S S^T with S = diag(sqrt p) - p sqrt(p)^T. As S sqrt(p) = 0, the
    Householder reflection mapping sqrt(p) to -e_j leaves C - 1 columns: with j the most likely class,

        column i != j:  sqrt(p_i) (e_i - t e_j - (1 - t) p),      t = sqrt(p_j) / (1 + sqrt(p_j))
        e_i = r_i / sqrt(p_i) - sqrt(p_i) r_j / (sqrt(p_j) (1 + sqrt(p_j)))

    This j keeps sqrt(p_j) away from zero, and so e accurate.

    Prepared targets are class indices, (n,) if none is ignored, else (n, T) with -1 for the ignored; or
    probabilities times class weights, (n, C) or (n, C, T). On a GPU a search for ignored targets (n,) would make a
    step wait: there targets (n,) can be ignored only if `ignore_index` is not torch's default -100.
    """

    by_hand = takes_sum = True

    def check(self, loss: nn.Module) -> None:
        super().check(loss)
        check_weights(loss, "weight")
        smoothing: Any = _smoothing(loss)
        index: Any = loss.ignore_index
        if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
            raise ValueError(f"{type(loss).__name__}: label_smoothing must lie in [0, 1], got {smoothing!r}")
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"{type(loss).__name__}: ignore_index must be a whole number, got {index!r}")

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        name = type(loss).__name__
        if outputs.dim() < 2:
            raise ValueError(
                f"{name} needs outputs (n, C) or (n, C, d1, ...), got the shape {tuple(outputs.shape)}"
            )
        if targets is None:
            probabilities = "" if isinstance(loss, nn.NLLLoss) else ", or probabilities of the outputs' shape"
            raise ValueError(f"{name} needs targets: class indices (n,) or (n, d1, ...){probabilities}")
        if targets.shape == outputs.shape[:-1] != (outputs.shape[0], *outputs.shape[2:]):
            raise ValueError(
                f"{name} takes outputs (n, C, T), the classes second, and targets (n, T); got outputs "
                f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}, which look like (n, T, C): return "
                f"{'.transpose(1, 2)' if outputs.dim() == 3 else '.movedim(-1, 1)'} of them"
            )
        if outputs.shape[1] < 2:
            raise ValueError(
                f"{name} needs outputs (n, C) with C >= 2 classes, got C = 1; for one logit use BCEWithLogitsLoss"
            )
        weight = _weight(loss, outputs.dtype)
        if weight is not None and weight.shape != outputs.shape[1:2]:
            raise ValueError(
                f"{name}(weight=...) of shape {tuple(weight.shape)} does not fit {outputs.shape[1]} classes: it "
                f"must have the shape ({outputs.shape[1]},)"
            )
        if targets.is_floating_point():
            return self._prepare_probabilities(loss, outputs, targets)
        return self._prepare_indices(loss, outputs, targets)

    def _prepare_probabilities(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape:
            raise ValueError(
                f"CrossEntropyLoss: targets of {targets.dtype} are probabilities and must have the shape of the "
                f"outputs {tuple(outputs.shape)}, got {tuple(targets.shape)}; for class indices write "
                f"targets{_squeezed(outputs, targets)}.long()"
            )
        targets = targets.to(outputs.dtype)
        if not targets.is_cuda and targets.min().item() < 0:
            raise ValueError("CrossEntropyLoss: probability targets must not be negative")
        smoothing, weight = _smoothing(loss), _weight(loss, targets.dtype)
        if smoothing:
            targets = (1 - smoothing) * targets + smoothing / outputs.shape[1]
        if weight is not None:
            targets = targets * weight.view(-1, *[1] * (targets.dim() - 2))
        return targets if targets.dim() == 2 else targets.flatten(2)

    def _prepare_indices(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        n, classes = outputs.shape[:2]
        if targets.shape != (n, *outputs.shape[2:]):
            if targets.shape == outputs.shape and not isinstance(loss, nn.NLLLoss):
                instead = f": for probabilities write targets.to({outputs.dtype}), for one-hot codes .argmax(1)"
            else:
                squeezed = _squeezed(outputs, targets)
                instead = f": write targets{squeezed}" if squeezed else ""
            raise ValueError(
                f"{type(loss).__name__}: class indices must have shape {(n, *outputs.shape[2:])}, "
                f"got {targets.dtype} of shape {tuple(targets.shape)}{instead}"
            )
        ignored, targets = loss.ignore_index, targets if targets.dtype == torch.long else targets.long()
        if targets.dim() > 1:
            targets = targets.flatten(1)
        if targets.is_cuda:
            if targets.dim() == 1 and ignored == _UNUSED:
                return targets
        else:
            smallest, largest = torch.aminmax(targets)
            lowest, highest = smallest.item(), largest.item()
            if lowest >= 0 and highest < classes and not lowest <= ignored <= highest:
                return targets
            labels = targets[targets != ignored]
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise ValueError(
                    f"{type(loss).__name__}: class indices must lie in 0..{classes - 1}, got {int(wrong[0])}"
                )
        return targets.masked_fill(targets == ignored, -1).reshape(n, -1)

    def count(self, loss: nn.Module, targets: Tensor) -> Scalar:
        if targets.is_floating_point():
            return len(targets) * _positions(targets)
        weight = _weight(loss, torch.float64)
        if weight is not None:
            labels, ignored = _labels(targets)
            own = weight[labels]
            return scalar((own if ignored is None else own.masked_fill(ignored, 0.0)).sum())
        if targets.dim() == 1:
            return targets.shape[0]
        return scalar((targets >= 0).sum(dtype=torch.float64))

    def count_of_first(self, loss: nn.Module, targets: Tensor, samples: int) -> Scalar:
        is_plain = targets.dim() == 1 and buffer_of(loss, "weight") is None
        return samples if is_plain else self.count(loss, targets[:samples])

    def column_count(self, shape: Sequence[int]) -> int:
        return (shape[1] - 1) * math.prod(shape[2:])

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        positions = _positions(targets)
        outputs = by_position(outputs, positions)
        if targets.is_floating_point():
            values = -(by_position(targets.flatten(1), positions) * outputs.log_softmax(1)).sum(1)
        else:
            labels, ignored = (targets, _UNUSED) if targets.dim() == 1 else (targets.flatten(), -1)
            values = self._of_labels(loss, outputs, labels, ignored, "none")
        return values if positions == 1 else values.view(-1, positions).sum(1)

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            return self._of_labels(loss, outputs, targets, _UNUSED, "sum")
        return super().total(loss, outputs, targets)

    def _of_labels(self, loss: nn.Module, outputs: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
        """torch's own values for outputs (n T, C) and class indices (n T,), 0 where these are ignored."""
        options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": _smoothing(loss)}
        return F.cross_entropy(outputs, labels, _weight(loss, outputs.dtype), reduction=reduction, **options)

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        positions = _positions(targets)
        probabilities = by_position(outputs, positions).softmax(1)
        return by_sample(self._residual(loss, probabilities, targets), positions)

    def _residual(self, loss: nn.Module, probabilities: Tensor, targets: Tensor) -> Tensor:
        """r for p = softmax(y), (n T, C), position by position."""
        if targets.is_floating_point():
            targets = by_position(targets.flatten(1), _positions(targets))
            return probabilities * targets.sum(1, keepdim=True) - targets
        labels, ignored = _labels(targets)
        smoothing, weight = _smoothing(loss), _weight(loss, probabilities.dtype)
        if weight is None:
            residual = probabilities.scatter(1, labels, smoothing - 1.0, reduce="add")
        else:
            own = weight[labels] * (1 - smoothing)
            residual = (probabilities * _mass(weight, smoothing, labels)).scatter_add_(1, labels, -own)
        if smoothing:
            residual -= (1.0 if weight is None else weight) * (smoothing / probabilities.shape[1])
        return residual if ignored is None else residual.masked_fill(ignored, 0.0)

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        samples, positions = outputs.shape[0], _positions(targets)
        p = by_position(outputs, positions).softmax(1)
        residual = self._residual(loss, p, targets)
        roots = p.clamp_min_(smallest_probability(p.dtype)).sqrt()
        top_root, top = roots.max(1, keepdim=True)  # (n T, 1): sqrt(p_j) and j
        others = indices(p.shape[1] - 1, torch.long, p.device)
        others = others + (others >= top)  # (n T, C - 1): every class but j
        root = roots.gather(1, others)
        t_minus_1 = torch.rsub(top_root, -1).reciprocal_()  # = -1 / (1 + sqrt(p_j)); the operator takes longer
        common = (p * t_minus_1).scatter_add_(1, top, top_root * t_minus_1)  # -(1 - t) p - t e_j
        shift = residual.gather(1, top) * t_minus_1 / top_root
        e = torch.addcmul(residual.gather(1, others) / root, root, shift)
        mass = ignored = None  # H = mass (diag(p) - p p^T)
        if targets.is_floating_point():
            mass = by_position(targets.flatten(1), positions).sum(1, keepdim=True)
        elif targets.dim() > 1 or buffer_of(loss, "weight") is not None:
            labels, ignored = _labels(targets)
            weight = _weight(loss, p.dtype)
            mass = None if weight is None else _mass(weight, _smoothing(loss), labels)
        if mass is not None:
            mass = mass.sqrt()
            root = root * mass
            e = e / mass.clamp_min(torch.finfo(mass.dtype).tiny)  # a target of zero mass has no residual either
        if ignored is not None:
            root = root.masked_fill(ignored, 0.0)
        return SoftmaxFactor(e if positions == 1 else e.view(samples, -1), root, others, common, positions)


@register_loss(nn.NLLLoss)
class LogLikelihood(Softmax):
    """l = -w_t y_t for log-probabilities y, the outputs of a model that ends in LogSoftmax.

    l is linear in y, so that its Hessian there is 0. The curvature is that of the cross entropy at y instead, with
    y as logits: y = log_softmax(z) and z differ by a number per position, so that softmax(y) = softmax(z) = p, and
    the values are the same. As J_y = (I - 1 p^T) J_z and H 1 = 0,

        J_y^T H J_y = J_z^T H J_z      J_y^T p = 0, so that   J_y^T r = J_z^T r   with   r = w_t (p - t)

    and every step is that of the model without its LogSoftmax under CrossEntropyLoss. It needs outputs that are
    log-probabilities, logsumexp(y) = 0: others raise an error, and on a CUDA device have no finite loss, so that
    the step is rejected.
    """

    by_hand = takes_sum = True

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        if targets is not None and targets.is_floating_point():
            raise ValueError(
                "NLLLoss takes class indices, got targets of floating-point numbers: CrossEntropyLoss on logits "
                "takes probabilities"
            )
        prepared = super().prepare(loss, outputs, targets)
        if not outputs.is_cuda:
            off = outputs.detach().logsumexp(1).abs().max().item()
            if off > torch.finfo(outputs.dtype).eps ** 0.5:  # what is not finite is named elsewhere
                raise ValueError(
                    "NLLLoss needs log-probabilities, and the outputs of the model are none: logsumexp over the "
                    f"classes is {off:.2g} away from 0. End the model in LogSoftmax(dim=1), or use "
                    "CrossEntropyLoss"
                )
        return prepared

    def _of_labels(self, loss: nn.Module, outputs: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
        if outputs.is_cuda:
            off = outputs.logsumexp(1, keepdim=True).abs() > 0.1  # beyond the rounding of any type
            outputs = outputs.masked_fill(off, math.nan)
        weight = _weight(loss, outputs.dtype)
        return F.nll_loss(outputs, labels, weight, ignore_index=ignored, reduction=reduction)

    def curved_loss(self, loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
        options = {"ignore_index": loss.ignore_index, "reduction": loss.reduction}
        return partial(F.cross_entropy, weight=loss.weight, **options)


def _squeezed(outputs: Tensor, targets: Tensor) -> str:
    """What to write after `targets` if they have an axis of one entry in the place of the classes."""
    return ".squeeze(1)" if targets.shape == (outputs.shape[0], 1, *outputs.shape[2:]) else ""


_UNUSED = -100  # the default ignore_index of CrossEntropyLoss


def _smoothing(loss: nn.Module) -> float:
    smoothing: float = getattr(loss, "label_smoothing", 0.0)
    return smoothing


def _weight(loss: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """w (C,), None for ones."""
    weight = buffer_of(loss, "weight")
    return None if weight is None else weight.to(dtype)


def _mass(weight: Tensor, smoothing: float, labels: Tensor) -> Tensor:
    """Sum over the classes of w t, (n T, 1), for class indices (n T, 1): smoothing gives all classes a part."""
    own = weight[labels]
    return (1 - smoothing) * own + smoothing * weight.mean() if smoothing else own


def _positions(targets: Tensor) -> int:
    """T of prepared targets: class indices (n,) or (n, T), probabilities (n, C) or (n, C, T)."""
    return math.prod(targets.shape[2:] if targets.is_floating_point() else targets.shape[1:])


def _labels(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Prepared class indices as (n T, 1), and which are ignored (class 0 there), None for none."""
    if targets.dim() == 1:
        return targets.unsqueeze(1), None
    labels = targets.reshape(-1, 1)
    return labels.clamp_min(0), labels < 0
