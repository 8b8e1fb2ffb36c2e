"""Calls of the model as they were seen, and the batch and the loss that follow from them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury.loop.seen import (
    FUNCTIONS,
    Recognised,
    ScaledLoss,
    TapedLoss,
    check_terms_apart,
    recognise,
    same_loss,
)
from woodbury.loop.tape import LossesInside, Node
from woodbury.losses.rules import loss_rule
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward


@dataclass(eq=False)
class ModelCall:
    """A call of the model: what it was given, where its random numbers began, and the loss that came of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: _random.Snapshot
    training: bool
    versions: list[int]  # of the tensors it was given
    outputs: list[Tensor] = field(default_factory=list)  # that a loss may begin at
    is_tensor: bool = False  # whether the model returned one tensor
    inside: bool = False  # whether the loss is computed inside the model
    root: Node | None = None  # of the backward pass
    place: int = 0  # among the outputs, or among the losses inside: where the loss begins

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
        if versions_of(self.args, self.kwargs) != self.versions:
            raise ValueError(
                "the inputs of the model were changed in place after its call: a step runs the model on them again"
            )
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
            with LossesInside(FUNCTIONS, _ignore) as seen:
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


def _ignore(root: Node, run: Callable[[], Any]) -> None:
    """Hears of no backward pass: one inside a step is its own."""
    run()


def differentiable(outputs: Any) -> list[Tensor]:
    """The tensors in what a model returns that a loss may begin at."""
    leaves = [outputs] if isinstance(outputs, Tensor) else pytree.tree_leaves(outputs)
    return [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
    ]


def _by_sample(outputs: Tensor, samples: int, classes_last: bool) -> Tensor:
    """Outputs that a loss began at, with the sample axis first and the classes second."""
    if outputs.dim() == 0 or len(outputs) != samples:  # tokens of all samples in one axis
        rest = outputs.shape[1:] if outputs.dim() > 1 and classes_last else ()
        outputs = outputs.reshape(samples, -1, *rest)
    return outputs.movedim(-1, 1) if classes_last else outputs


def versions_of(*trees: Any) -> list[int]:
    leaves = pytree.tree_leaves(trees)
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def join(calls: Sequence[ModelCall], factor: float, known: nn.Module, count: int) -> SeenBatch:
    """One batch of all calls, and its loss; `factor` was taken off the gradients after the backward passes."""
    first = calls[0]
    sizes = [_batch.sample_count(call.inputs) for call in calls]
    seen = [_recognised(call, size) for call, size in zip(calls, sizes, strict=True)]
    random = first.random if len(calls) == 1 else None
    if any(own is None for own in seen):
        return _of_any_loss(calls, sizes, factor, count)
    found = [own for own in seen if own is not None]
    loss = found[0].loss
    if any(not same_loss(loss, own.loss) for own in found[1:]):
        raise ValueError("the micro-batches before one step have different losses")
    layouts = {(call.place, call.inside, own.classes_last) for call, own in zip(calls, found, strict=True)}
    if len(layouts) != 1:
        raise ValueError("the micro-batches before one step use the outputs of the model in different ways")
    ((place, inside, classes_last),) = layouts
    plain = first.is_plain and not classes_last and place == 0
    forward = call_model if plain else SeenForward(place, inside, classes_last)
    inputs, targets = first.inputs, found[0].targets
    if len(calls) > 1:
        inputs = _batch.join([call.inputs for call in calls], sizes)
        targets = torch.cat([own.targets for own in found])
    loss, scale = _mean_of_all(loss, found, factor)
    loss = known if same_loss(loss, known) else loss
    if abs(scale - 1) > 1e-6:
        loss = ScaledLoss(loss, scale)
    return SeenBatch(inputs, targets, loss, forward, random)


def _mean_of_all(loss: Any, found: Sequence[Recognised], factor: float) -> tuple[nn.Module, float]:
    """The loss over all micro-batches, c times a mean, with the factor c; a sum is left as it is."""
    factors = [own.factor * factor for own in found]
    if loss_rule(loss).is_sum(loss):
        if all(abs(own - 1) < 1e-6 for own in factors):
            return loss, 1.0
        loss = copy.copy(loss)
        loss.reduction = "mean"
        terms = [float(_term_count(loss, own)) for own in found]
        weights = factors
    else:
        if len(found) == 1:
            return loss, factors[0]
        terms = [float(_term_count(loss, own)) for own in found]
        weights = [own / count for own, count in zip(factors, terms, strict=True)]  # of each term of the sum
    if max(weights) > (1 + 1e-6) * min(weights):
        warnings.warn(
            "micro-batches of different sizes were accumulated, each as a mean: the step gives every sample the "
            "same weight, and not every micro-batch",
            RuntimeWarning,
            stacklevel=2,
        )
        return loss, 1.0
    return loss, weights[0] * math.fsum(terms)


def _recognised(call: ModelCall, samples: int) -> Recognised | None:
    assert call.root is not None
    return recognise(call.root, samples)


def _term_count(loss: nn.Module, seen: Recognised) -> Any:
    """M, what the mean loss of a call divided by."""
    rule, outputs = loss_rule(loss), _by_sample(seen.base.tensor, len(seen.targets), seen.classes_last)
    return rule.count(loss, rule.prepare(loss, outputs, seen.targets))


def _of_any_loss(calls: Sequence[ModelCall], sizes: Sequence[int], factor: float, count: int) -> SeenBatch:
    """A batch whose loss has no rule: a function of the outputs, by its tape."""
    call = calls[0]
    if len(calls) > 1:
        raise ValueError(
            "micro-batches can be accumulated with losses that have a rule only (those of torch.nn, at outputs "
            "that are only reshaped or sliced): take a step for each, or use such a loss"
        )
    if call.inside:
        raise ValueError("the loss inside the model has no rule: compute it outside, from the model's outputs")
    assert call.root is not None
    base, samples = call.root.bases()[0], sizes[0]
    if base.tensor.dim() == 0 or len(base.tensor) != samples:
        raise ValueError(
            f"the loss begins at outputs of shape {tuple(base.tensor.shape)} for {samples} samples: the first "
            "axis must be the sample axis"
        )
    loss = TapedLoss(call.root, base, factor, samples)
    if count & (count - 1) == 0:  # at steps 1, 2, 4, 8, ...
        check_terms_apart(loss)
    forward = call_model if call.is_plain else SeenForward(call.place, False, False)
    places = torch.arange(samples, device=base.tensor.device)
    return SeenBatch(call.inputs, places, loss, forward, call.random)
