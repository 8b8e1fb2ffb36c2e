"""A loss as it was seen in a loop of the user's own: a loss that has a rule, or any function of the outputs.

`recognise` finds out whether a taped loss is one of torch's, times a constant, at outputs that were only reshaped,
sliced or reordered. `TapedLoss` is any other: its residual and its Hessian at each sample come from autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _random
from woodbury.loop.tape import Base, Node
from woodbury.losses.rules import FUNCTIONS, LossRule, register_loss

_signature = cache(inspect.signature)
_MOST_OUTPUTS = 1024  # per sample, whose Hessian is formed


class TapedLoss(nn.Module):
    """Any loss f(y) of the outputs y of a batch that is a sum of one term for each sample.

    Targets are the places of samples in the batch: what a subset of the samples adds to f is found by leaving the
    outputs of the others as they were seen.
    """

    def __init__(self, root: Node, base: Base, samples: int) -> None:
        super().__init__()
        self.root, self.base, self.samples = root, base, samples
        self.seen = base.tensor.reshape(samples, -1)
        self.at_seen = self.value(self.seen).detach()

    def value(self, outputs: Tensor) -> Tensor:
        """f, for outputs (n, C) of the whole batch."""
        with torch.enable_grad():
            return self.root.value_from(self.base, outputs.reshape(self.base.tensor.shape)).sum()  # of one number

    def slope(self, outputs: Tensor) -> Tensor:
        """df/dy at outputs (n, C) of the whole batch."""
        point = outputs.detach().requires_grad_()
        return torch.autograd.grad(self.value(point), point)[0]

    def hessian_times(self, outputs: Tensor, directions: Iterable[Tensor]) -> list[Tensor]:
        """Products of the second derivatives of f at outputs (n, C) of the whole batch."""
        point = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.value(point), point, create_graph=True)
        if not slope.requires_grad:  # f is linear
            return [torch.zeros_like(each) for each in directions]
        try:
            return [torch.autograd.grad(slope, point, each, retain_graph=True)[0] for each in directions]
        except RuntimeError as error:
            if "not implemented" not in str(error) and "differentiate twice" not in str(error):
                raise
            raise ValueError(
                f"the loss ({self.root.name}) has no second derivative ({error}): use NaturalGradient, or write a "
                "rule for it with woodbury.register_loss"
            ) from error

    def with_others(self, outputs: Tensor, places: Tensor) -> Tensor:
        """Outputs (n, C) of the whole batch, those at `places` given and the others as they were seen."""
        return self.seen.to(outputs.dtype).index_copy(0, places, outputs.reshape(len(places), -1))


@register_loss(TapedLoss)
class _TapedRule(LossRule):
    """f = (1/N) sum_i l_i with l_i = N times what sample i adds to f: r_i = N df/dy_i, H_i = N d2f/dy_i2."""

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        assert targets is not None
        return targets

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        total = self.total(loss, outputs, targets)
        return (total / len(targets)).expand(len(targets))  # only their sum is known

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        assert isinstance(loss, TapedLoss)
        gained = loss.value(loss.with_others(outputs, targets)) - loss.at_seen
        return loss.samples * gained + len(targets) * loss.at_seen

    def residual(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        slope: Tensor = loss.slope(loss.with_others(outputs.detach(), targets))
        return slope[targets] * loss.samples

    def factor(self, loss: Any, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        size = outputs.shape[1]
        if size > _MOST_OUTPUTS:
            raise ValueError(
                f"this loss is not one that has a rule, and its Hessian at {size} outputs per sample is too "
                f"large to be formed (up to {_MOST_OUTPUTS}): use a loss of torch.nn in the loop (cross entropy "
                "on logits that are reshaped or sliced is recognised), or NaturalGradient, which needs no Hessian"
            )
        units = torch.eye(size, dtype=torch.float64, device=outputs.device).unsqueeze(1)
        directions = units.expand(-1, loss.samples, -1)  # each the same for all samples
        columns = loss.hessian_times(loss.with_others(outputs.double(), targets), directions)
        hessian = loss.samples * torch.stack(columns, 2)[targets]
        eigenvalues, eigenvectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
        return (eigenvectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)).mT.to(outputs.dtype), None


def check_taped(loss: TapedLoss) -> None:
    """Raise if the loss draws random numbers, or if it mixes samples.

    With signs s_i, H (s v) = s (H v) where H has one block per sample. Where there is no H, samples whose outputs
    stay have the gradient they had.
    """
    random = _random.snapshot(loss.seen.device)
    loss.value(loss.seen)
    if _random.drawn_since(random):
        raise ValueError(
            "the loss draws random numbers between the outputs of the model and its value, by dropout say, and a "
            "step computes it more than once. Ways out: draw them inside the model, or once, into a tensor"
        )
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = loss.seen.shape
    vector = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(loss.seen.device)
    signs = torch.ones(shape[0], 1, dtype=torch.float64, device="cpu")
    signs[1::2] = -1.0
    signs = signs[torch.randperm(shape[0], generator=generator, device="cpu")].to(loss.seen.device)
    try:
        product, of_signed = loss.hessian_times(loss.seen.double(), (vector, signs * vector))
    except ValueError:  # no second derivative
        moved = loss.seen.double() + vector * (signs > 0)
        product = of_signed = loss.slope(moved) - loss.slope(loss.seen.double())
    # the second derivative of one sample is exact to rounding; operations in float32 inside have fewer digits
    if (signs * product - of_signed).abs().max() > 1e-3 * product.abs().max():
        raise ValueError(
            "the loss mixes samples: its second derivatives between outputs of different samples are not zero. A "
            "step needs a loss that is a sum of one term per sample"
        )


@dataclass(frozen=True)
class Recognised:
    """c loss(outputs, targets), for outputs as the model gives them, or with the last axis brought second."""

    loss: nn.Module
    base: Base
    targets: Tensor
    factor: float
    classes_last: bool


def recognise(root: Node, base: Base, samples: int) -> Recognised | None:
    """The loss that a tape ends in, if it has a rule."""
    node = root
    while node.function not in FUNCTIONS:
        parents = node.parents()
        if len(parents) != 1 or parents[0].tensor.numel() != 1 or isinstance(node, Base):
            return None
        (node,) = parents
    kind, (args, kwargs) = FUNCTIONS[node.function], node.arguments
    arguments = dict(_signature(node.function).bind(*args, **kwargs).arguments)
    source, targets = arguments.pop("input"), arguments.pop("target")
    options = {name: value for name, value in arguments.items() if value is not None}
    factor = _constant_factor(root, node)
    if not isinstance(source, Node) or not isinstance(targets, Tensor) or not factor > 0:
        return None
    if any(isinstance(value, Node) for value in options.values()):
        return None
    if kind is nn.GaussianNLLLoss:
        variance = torch.as_tensor(options.pop("var"), device=targets.device).to(targets)
        targets = torch.stack([targets, variance.expand_as(targets)], 1)
    loss = _module(kind, options)
    placed = None if loss is None else _place(loss, source, base, targets.detach(), samples)
    if loss is None or placed is None:
        return None
    return Recognised(loss, base, placed[0], factor, classes_last=placed[1])


def _constant_factor(root: Node, node: Node) -> float:
    """c where root = c node, whatever the value of the node; 0 where it is no such thing."""
    if root is node:
        return 1.0
    seen = node.tensor.double()
    points = [torch.full_like(seen, point) for point in (1.0, 2.0**-10, 8.0)] + [seen.abs() + 1]
    slopes = torch.stack([root.value_from(node, point).sum() / point.sum() for point in points])
    factor, spread = float(slopes[0]), float((slopes - slopes[0]).abs().max())
    return factor if spread <= 8 * torch.finfo(root.tensor.dtype).eps * abs(factor) else 0.0


def _place(loss: Any, source: Node, base: Base, targets: Tensor, samples: int) -> tuple[Tensor, bool] | None:
    """Targets for outputs as the base has them, and whether these have their classes last; None if unknown."""
    outputs = base.tensor
    if source is base and len(outputs) == samples:
        return targets, False
    per_class = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if per_class and (source.tensor.dim() != 2 or targets.dim() != 1):
        return None  # of other shapes only as the base has them
    if isinstance(loss, nn.GaussianNLLLoss) or outputs.numel() % samples or base.is_overwritten:
        return None
    # where each number at the loss comes from: the operations between run on the places of the outputs
    places = torch.arange(outputs.numel(), dtype=torch.float64, device=outputs.device).reshape(outputs.shape)
    try:
        found = source.value_from(base, places).long()
        same = torch.equal(outputs.reshape(-1)[found.clamp(0, outputs.numel() - 1)], source.tensor)
    except (RuntimeError, IndexError):
        return None
    flat = found.reshape(-1)
    if not same or len(flat) != len(flat.unique()):
        return None
    if not per_class:
        if len(flat) != outputs.numel() or targets.shape != source.tensor.shape:
            return None
        placed = torch.empty(outputs.numel(), dtype=targets.dtype, device=targets.device)
        placed[flat] = targets.reshape(-1)
        return placed.reshape(outputs.shape if outputs.shape[:1] == (samples,) else (samples, -1)), False
    classes = outputs.shape[-1]
    start = found[:, 0]
    consecutive = start.unsqueeze(1) + torch.arange(classes, device=start.device)
    if not torch.equal(found, consecutive):
        return None
    ignored = int(loss.ignore_index)
    placed = torch.full((outputs.numel() // classes,), ignored, dtype=targets.dtype, device=targets.device)
    placed[start // classes] = targets
    positions = len(placed) // samples
    return (placed, False) if positions == 1 else (placed.reshape(samples, positions), True)


def _module(kind: type[nn.Module], options: Mapping[str, Any]) -> nn.Module | None:
    """A loss of one number with these options, None if the module does not have one of them."""
    try:
        loss = kind(**options)
    except TypeError:
        return None
    tensors = {name for name, value in options.items() if isinstance(value, Tensor)}
    return loss if loss.reduction != "none" and tensors <= loss._buffers.keys() else None


def same_loss(a: nn.Module, b: nn.Module) -> bool:
    """Whether two losses are of one kind with the same options."""

    def options(loss: nn.Module) -> dict[str, Any]:
        named = {**vars(loss), **loss._buffers}.items()
        public = {name: value for name, value in named if name[0] != "_" and name != "training"}
        return {name: id(own) if isinstance(own, Tensor) else own for name, own in public.items()}

    return type(a) is type(b) and options(a) == options(b)
