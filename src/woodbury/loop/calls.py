"""Calls of the model as they were seen, and the batch and the loss that follow from them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury.loop.seen import Recognised, TapedLoss, recognise, same_loss
from woodbury.loop.tape import Base, LossesInside, Node, has_version, state_of
from woodbury.losses.rules import ScaledLoss, loss_rule
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward

CANNOT_RUN_AGAIN = (
    "the loss was computed with operations that cannot be run again: what a view shares was written into, "
    "something was written under no_grad, or torch.autograd.grad differentiated the outputs. Write results into "
    "new tensors (y = y * mask, torch.where, torch.cat), and derivatives into the model's forward"
)


@dataclass(eq=False)
class ModelCall:
    """A call of the model: what it was given, where its random numbers began, and the loss that came of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: _random.Snapshot
    training: bool
    autocast: torch.dtype | None  # that it ran in
    is_tensor: bool = False  # whether the model returned one tensor
    inside: bool = False  # whether the loss is computed inside the model
    is_sent_back: bool = False  # whether there is a loss with a backward pass: then
    root: Node = field(init=False)  # it ends here
    base: Base = field(init=False)  # and begins here

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self._states = [(leaf, state_of(leaf)) for leaf in leaves if has_version(leaf)]

    @property
    def inputs(self) -> Any:
        """As `step` takes them."""
        if self.is_plain:
            return self.args[0]
        return {"args": self.args, "kwargs": self.kwargs}

    @property
    def is_plain(self) -> bool:
        """Whether it is model(inputs) with one tensor that gives one tensor."""
        single = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
        return single and self.is_tensor and not self.inside

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise if what the loss was computed from is not there any more."""
        if any(state_of(leaf) != state for leaf, state in self._states):
            raise ValueError(
                "the inputs of the model were changed in place after its call: a step runs the model on them again"
            )
        if self.root.is_stale(self.base.owner):
            raise ValueError(
                "targets, weights or another tensor that the loss was computed with was changed in place before "
                "step(), which computes the loss again: change it after the step, or a copy of it"
            )
        if any(node.is_lost for node in self.root.ancestors(self.base.owner)):
            raise ValueError(CANNOT_RUN_AGAIN)
        if model.training is not self.training:
            raise ValueError("model.train() or model.eval() was called between the model's call and step()")


@dataclass(frozen=True)
class SeenForward:
    """Runs the model as it was called in the loop, and returns the outputs that its loss began at."""

    place: int
    inside: bool
    classes_last: bool

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        samples = _batch.sample_count(inputs)
        args, kwargs = (inputs["args"], inputs["kwargs"]) if isinstance(inputs, dict) else ((inputs,), {})
        if self.inside:
            with LossesInside() as seen:
                model(*args, **kwargs)
            outputs = seen.inputs[self.place]
        else:
            outputs = differentiable(model(*args, **kwargs))[self.place]
        return _by_sample(outputs, samples, self.classes_last)


@dataclass(frozen=True)
class SeenBatch:
    """What a step on a watched loss is taken with."""

    inputs: Any
    targets: Tensor
    loss: nn.Module
    forward: Forward
    random: _random.Snapshot | None  # from which the passes of the step draw; None where nothing can be repeated
    autocast: torch.dtype | None  # that the model was called in


@dataclass(frozen=True)
class Seen:
    """What a loop did for one step."""

    batch: SeenBatch
    pieces: list[SeenBatch]  # the same, as the model was called
    gradients: list[Tensor | None]  # that the loop has left, by parameter
    expected: float  # what they were multiplied by beside the loss
    what: Any  # the operations of the loop: it is the same in another step that does the same
    cause: str  # why the gradients may be others than those of the batch


def differentiable(outputs: Any) -> list[Tensor]:
    """The tensors in what a model returns that a loss may begin at."""
    leaves = [outputs] if isinstance(outputs, Tensor) else pytree.tree_leaves(outputs)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return [leaf for leaf in tensors if leaf.requires_grad and leaf.is_floating_point()]


def _by_sample(outputs: Tensor, samples: int, classes_last: bool) -> Tensor:
    """Outputs that a loss began at, with the sample axis first and the classes second."""
    if outputs.dim() == 0 or len(outputs) != samples:  # tokens of all samples in one axis
        rest = outputs.shape[1:] if outputs.dim() > 1 and classes_last else ()
        outputs = outputs.reshape(samples, -1, *rest)
    return outputs.movedim(-1, 1) if classes_last else outputs


def join(calls: Sequence[ModelCall], factor: float, known: nn.Module) -> SeenBatch:
    """One batch of all calls, and its loss, times a factor."""
    first = calls[0]
    sizes = [_batch.sample_count(call.inputs) for call in calls]
    found = [_recognised(call, size, len(calls)) for call, size in zip(calls, sizes, strict=True)]
    loss = found[0].loss
    if any(not same_loss(loss, each.loss) for each in found[1:]):
        raise ValueError("the micro-batches before one step have different losses")
    layouts = {(call.base.place, call.inside, each.classes_last) for call, each in zip(calls, found, strict=True)}
    if len(layouts) != 1:
        raise ValueError("the micro-batches before one step use the outputs of the model in different ways")
    plain = first.is_plain and not found[0].classes_last
    forward = call_model if plain else SeenForward(*layouts.pop())
    inputs, targets = first.inputs, found[0].targets
    if len(calls) > 1:
        inputs = _batch.join([call.inputs for call in calls], sizes)
        targets = torch.cat([each.targets for each in found])
    loss, scale = _mean_of_all(loss, found, factor)
    loss = known if same_loss(loss, known) else loss
    if not _is_one(scale, found[0]):
        loss = ScaledLoss(loss, scale)
    random = first.random if len(calls) == 1 else None
    return SeenBatch(inputs, targets, loss, forward, random, first.autocast)


def _recognised(call: ModelCall, samples: int, call_count: int) -> Recognised:
    """The loss of a call, one of several perhaps: one that has a rule, or else a function of the outputs."""
    root, base = call.root, call.base
    found = recognise(root, base, samples)
    if found is not None:
        return found
    if call_count > 1:
        raise ValueError(
            "micro-batches can be accumulated with losses that have a rule only (those of torch.nn, at outputs "
            "that are only reshaped or sliced): take a step for each, or use such a loss"
        )
    if call.inside:
        raise ValueError("the loss inside the model has no rule: compute it outside, from the model's outputs")
    if base.is_overwritten:
        raise ValueError(CANNOT_RUN_AGAIN)
    if base.tensor.dim() == 0 or len(base.tensor) != samples:
        raise ValueError(
            f"the loss begins at outputs of shape {tuple(base.tensor.shape)} for {samples} samples: the first "
            "axis must be the sample axis"
        )
    places = torch.arange(samples, device=base.tensor.device)
    return Recognised(TapedLoss(root, base, samples), base, places, 1.0, classes_last=False)


def _mean_of_all(loss: Any, found: Sequence[Recognised], factor: float) -> tuple[nn.Module, float]:
    """The loss over all micro-batches, c times a mean, with the factor c; a sum is left as it is."""
    weights, is_sum = [each.factor * factor for each in found], loss_rule(loss).is_sum(loss)
    if is_sum and all(map(_is_one, weights, found)):
        return loss, 1.0
    if is_sum:
        loss = copy.copy(loss)
        loss.reduction = "mean"
    elif len(found) == 1:
        return loss, weights[0]
    terms = [_term_count(loss, each) for each in found]
    if not is_sum:
        weights = [weight / count for weight, count in zip(weights, terms, strict=True)]  # of each term of the sum
    if max(weights) > (1 + 1e-6) * min(weights):
        warnings.warn(
            "micro-batches of different sizes were accumulated, each as a mean: the step gives every sample the "
            "same weight, and not every micro-batch",
            RuntimeWarning,
            stacklevel=2,
        )
        return loss, 1.0
    return loss, weights[0] * math.fsum(terms)


def _is_one(factor: float, seen: Recognised) -> bool:
    """Whether a factor is 1 to rounding."""
    return abs(factor - 1) <= 8 * torch.finfo(seen.base.tensor.dtype).eps


def _term_count(loss: nn.Module, seen: Recognised) -> float:
    """How many terms the loss of a call is a mean of."""
    outputs = seen.base.tensor
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return outputs.numel()
    rule, shaped = loss_rule(loss), _by_sample(outputs, len(seen.targets), seen.classes_last)
    return float(rule.count(loss, rule.prepare(loss, shaped, seen.targets)))
