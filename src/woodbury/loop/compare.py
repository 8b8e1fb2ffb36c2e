"""Is the gradient of the loss that was seen the one that the loop has left in `.grad`?

What a loop does between the call of its model and `step` can escape those who watch it: hooks, penalties with a
backward pass of their own, gradients that are changed by hand, random numbers. All of it shows in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._batch import in_words
from woodbury.loop.calls import Seen, SeenBatch
from woodbury.loop.seen import TapedLoss, check_taped
from woodbury.losses.rules import loss_rule, prepare
from woodbury.model.graph import fewest_digits
from woodbury.parallel.group import Group

FACTOR = 8  # for the operations between two numbers that differ by rounding alone
Gradient = list[Tensor]


class Comparison:
    """When to compare: in steps 1, 2, 4, 8, ..., and where the loop does something new or a factor was found."""

    def __init__(self) -> None:
        self._steps = 0
        self._known: Any = None  # what the loop did in the last step that was compared

    def is_due(self, what: Any) -> bool:
        """Whether a step whose loop did `what` is to be compared."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0 or what != self._known

    def settle(self, what: Any, factor: float) -> None:
        """A step was compared, and needed this factor: where it is not 1, so does every step after it."""
        self._known = what if factor == 1 else object()


def compare(
    seen: Seen,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    again: Callable[[SeenBatch], AbstractContextManager[Any]],  # inside, the model runs as it did in the loop
    group: Group,
) -> float:
    """What the gradient of the loss as it was seen is to be multiplied by; raises if that makes it no `.grad`."""
    found = []
    with group.together():
        for piece in seen.pieces:
            with again(piece):
                found.append(rebuilt_gradient(model, piece, list(parameters.values())))
    mine, errors = ([sum(pieces) for pieces in zip(*parts, strict=True)] for parts in zip(*found, strict=True))
    theirs = [
        torch.zeros_like(ours) if gradient is None else gradient.detach().double() / seen.expected
        for ours, gradient in zip(mine, seen.gradients, strict=True)
    ]

    def distance(gradient: Gradient) -> float:
        return sum(float((one - other).square().sum()) for one, other in zip(gradient, theirs, strict=True))

    if group.size > 1:  # DistributedDataParallel leaves the mean over all processes
        means, errors = [group.sum(part) / group.size for part in mine], [group.sum(part) for part in errors]
        mine = min(mine, means, key=distance)
    with group.together():
        return common_factor(list(parameters), mine, errors, theirs, seen.cause)


def rebuilt_gradient(model: nn.Module, seen: SeenBatch, parameters: Sequence[Tensor]) -> tuple[Gradient, Gradient]:
    """The gradient of the loss as it was seen, and how far rounding may take it from that of the loop.

    That is measured by two more backward passes: of residuals that are changed by eps of the numbers they are
    differences of, with random signs, and multiplied by 3 or 5, so that all results are rounded in another way.
    """
    loss, rule = seen.loss, loss_rule(seen.loss)
    for own in loss.modules():  # itself, and the loss that it is a multiple of
        if isinstance(own, TapedLoss):
            check_taped(own)
    device, dtype = parameters[0].device, seen.autocast
    with torch.enable_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
        raw = seen.forward(model, seen.inputs)
    targets = prepare(rule, loss, raw.detach(), seen.targets)
    outputs = raw.detach().reshape(len(targets), -1)
    count = 1.0 if rule.is_sum(loss) else rule.count(loss, targets)
    residual = rule.residual(loss, outputs, targets)

    def send_back(columns: Tensor) -> Gradient:
        columns = (columns / count).to(raw.dtype).reshape(raw.shape)
        found = torch.autograd.grad(raw, parameters, columns, retain_graph=True, materialize_grads=True)
        return [part.double() for part in found]

    gradient = send_back(residual)
    eps = max(torch.finfo(dtype).eps for dtype in (fewest_digits(raw), *(each.dtype for each in parameters)))
    spread = eps * _sizes(lambda point: rule.residual(loss, point, targets), outputs, residual)
    generator = torch.Generator(device="cpu").manual_seed(0)
    errors = [torch.zeros((), dtype=torch.float64, device=device) for _ in parameters]
    for unit in (3.0, 5.0):
        signs = torch.randint(2, residual.shape, generator=generator, device="cpu").to(residual) * 2 - 1
        other = send_back(unit * (residual + signs * spread))
        changes = [(changed / unit - mine).norm() for changed, mine in zip(other, gradient, strict=True)]
        errors = [torch.maximum(error, change) for error, change in zip(errors, changes, strict=True)]
    return gradient, errors


def _sizes(residual: Callable[[Tensor], Tensor], outputs: Tensor, here: Tensor) -> Tensor:
    """How large the numbers are that a residual is a difference of: of y and t, of a probability and 1."""
    step = torch.finfo(outputs.dtype).eps ** 0.5
    at_zero = residual(torch.zeros_like(outputs))
    slope = (residual(outputs * (1 + step)) - here).abs() / step
    return here.abs() + (at_zero.abs() + slope).nan_to_num(0.0, 0.0, 0.0)


def common_factor(names: Sequence[str], mine: Gradient, errors: Gradient, theirs: Gradient, cause: str) -> float:
    """c where their gradient is c times mine, 1 where they are equal to rounding.

    Raises an error that names the parameters if there is no such c; `cause` says why that may be.
    """
    if not all(bool(torch.isfinite(gradient).all()) for gradient in mine):
        return 1.0  # the step says which samples are to blame
    share = torch.stack(errors).square().sum() / sum(gradient.numel() for gradient in mine)
    bounds = [FACTOR * (error + (share * part.numel()).sqrt()) for error, part in zip(errors, mine, strict=True)]

    def differences(factor: float) -> dict[str, float]:
        """Of the parameters for which their gradient is not `factor` times mine, relative to the larger one."""
        wrong = {}
        for name, ours, other, bound in zip(names, mine, theirs, bounds, strict=True):
            difference = (other - factor * ours).norm()
            if not difference <= factor * bound:
                wrong[name] = float(difference / torch.maximum(other.norm(), factor * ours.norm()))
        return wrong

    wrong = differences(1.0)
    if not wrong:
        return 1.0
    size = sum(float(gradient.square().sum()) for gradient in mine)
    product = sum(float((ours * other).sum()) for ours, other in zip(mine, theirs, strict=True))
    factor = product / size if size else 0.0
    if factor > 0 and not differences(factor):
        return factor
    worst = max(wrong, key=lambda name: wrong[name])
    raise ValueError(
        f"the step would not be that of the loop: the gradient of the loss as it was seen is not .grad of "
        f"{in_words([*map(repr, wrong)])} (by {wrong[worst]:.1%} of it for {worst!r}). {cause}. Nothing was "
        "changed. Ways out: put all that belongs to the loss into one expression of the model's outputs, with one "
        "backward pass; weight_decay= for a penalty on the weights; or step(inputs, targets) with a loss of your "
        "own (register_loss)"
    )
