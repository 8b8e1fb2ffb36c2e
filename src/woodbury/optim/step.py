"""What a step is made of: the problem posed, the proposal that answers it, and what gets reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._batch import Batch
from woodbury._random import Snapshot
from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, Truth, as_double, as_truth, is_known, root, scalar
from woodbury.displacement import Displacement
from woodbury.model.chain import Chain
from woodbury.model.plan import Plan
from woodbury.optim.passes import Batches, Passes
from woodbury.optim.settings import Hyperparameters


class Numbers(NamedTuple):
    """The numbers of a step as it leaves them; `StepInfo` shows them as tensors."""

    loss: Scalar
    damping: Scalar
    ratio: Scalar
    predicted: Scalar
    squared_norm: Scalar
    accepted: Truth
    length: Scalar = 1.0
    share: Scalar = 1.0
    bent: Truth = False


@dataclass(frozen=True)
class StepInfo:
    """What happened in a step, as 0-dim tensors (reading one waits for the device); `as_dict` gives plain numbers.

    Attributes:
        loss: f(theta) on the batch before the step, without the weight decay term.
        damping: lambda used; with a search that of the rung with the largest c.
        ratio: rho = actual over predicted decrease at theta + p; -inf if not finite or none predicted.
        predicted: m(0) - m(p), the decrease that the quadratic model promises.
        step_norm: |p|; theta moved by lr p. On a GPU up to a relative error of eps lmax |c|^2 / |p|^2.
        accepted: whether theta moved.
        length: alpha of a step with `search=`: theta moved by lr (alpha p + alpha^2 bend); 0 for a rejected step.
            Without a search 1.
        share: sum of c in p = sum_j c_j p_j: far below 1 says that the step is limited by the samples. Without a
            search 1.
        bent: whether a step with `search=` went along the bent path.
    """

    loss: Tensor
    damping: Tensor
    ratio: Tensor
    predicted: Tensor
    step_norm: Tensor
    accepted: Tensor
    length: Tensor
    share: Tensor
    bent: Tensor

    @classmethod
    def later(cls, numbers: Numbers | Tensor) -> StepInfo:
        """From `Numbers`, or a tensor of these: each is made when it is asked for, as few steps are looked at."""
        info = cls.__new__(cls)
        vars(info)["_numbers"] = numbers
        return info

    def __getattr__(self, name: str) -> Tensor:  # what is not there yet
        names = [entry.name for entry in fields(self)]
        numbers = vars(self).get("_numbers")
        if numbers is None or name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with torch.inference_mode(False):
            index = names.index(name)
            value = numbers[index] if index < len(numbers) else Numbers._field_defaults[name]
            vars(self)[name] = tensor = _as_shown(name, value)
        return tensor

    def as_dict(self) -> dict[str, float | bool]:
        """The same as plain Python numbers."""
        names, numbers = [entry.name for entry in fields(self)], vars(self).get("_numbers")
        if isinstance(numbers, Numbers) and all(map(is_known, numbers)):  # without a tensor for each
            plain = {name: float(value) for name, value in zip(names, numbers, strict=True)}
            plain["step_norm"] = float(root(plain["step_norm"]))
            return plain | {name: bool(plain[name]) for name in ("accepted", "bent")}
        return {name: getattr(self, name).item() for name in names}


def _as_shown(name: str, value: Any) -> Tensor:
    """A number of a `StepInfo` as the tensor it shows; it holds |p|^2 for |p|."""
    if name in ("accepted", "bent"):
        return as_truth(value)
    return as_double(root(value) if name == "step_norm" else value)


@dataclass
class Problem:
    """Everything `_propose` may use: the trainable parameters, the batch and the current settings."""

    passes: Passes
    batch: Batch
    damping: Scalar
    hyper: Hyperparameters
    full: Batches | None
    previous: Vector | None  # q = mu p_prev, or None when zero
    is_chain: bool  # whether the model is a plain chain of Linear layers, by its structure or as it was seen
    held_out: tuple[Any, Tensor | None] | None = None  # other samples, on which a search judges the step
    random: Snapshot | None = None  # before the first pass through the model, if it may draw random numbers
    plan: Plan = field(init=False)
    chain: Chain | None = field(init=False)

    def __post_init__(self) -> None:
        self.plan, self.chain = self.passes.plan, self.passes.chain


@dataclass
class Answer:
    """p for one damping, with what the quadratic model says about it."""

    displacement: Displacement
    predicted: Scalar  # m(0) - m(p)
    squared_norm: Scalar  # |p|^2
    usable: Truth  # whether the system could be solved
    image: Tensor | None = field(default=None, kw_only=True)  # Z p, where it is known
    doubt: str | None = field(default=None, kw_only=True)  # why p cannot be trusted, where that was looked at


@dataclass
class Proposal(Answer):
    """A step before it is taken."""

    damping: Scalar  # the lambda it was computed with
    loss: Scalar  # f(theta), float64
    parts: list[Any]  # the inputs as they went through the model at theta
    center: Vector | None  # q of the damping term lambda |p - q|^2 / 2, None for zero
    evaluate: Callable[[Displacement], Scalar]  # f(theta) - f(theta + p), float64, loss alone
    scale: Scalar | None = None  # of K, where the damping is relative to it
    raised: bool = False  # whether lambda was raised within the step
    memory: dict[str, Any] = field(default_factory=dict)  # what the optimizer's state gains by the step
    metric: Callable[[], Vector] | None = None  # D of the damping term lambda |p - q|_D^2 / 2, None for I
    length: float = 1.0  # alpha, sum of c, and whether the path is bent: of a step with a search
    share: float = 1.0
    bent: bool = False


def decay_decrease(problem: Problem, vector: Vector) -> Scalar:
    """The decrease of weight_decay |theta|^2 / 2 at theta + p, without cancellation."""
    decrease: Scalar = 0.0
    for name, decay in problem.hyper.weight_decay.items() if problem.hyper.any_decay else ():
        if decay:
            own = vector[name]
            change = own * (problem.plan.parameters[name].detach() + 0.5 * own)
            decrease = decrease - decay * scalar(change.sum())
    return decrease


def answer_of_inexact(
    problem: Problem, displacement: Displacement, vector: Vector, slope: Scalar, curvature: Scalar, usable: Truth
) -> Answer:
    """The answer for a p that need not solve its system: vector is p, slope = g . p and curvature = p^T B p.

    m(0) - m(p) = -(g + W theta) . p - p^T (B + W) p / 2
    """
    for name, decay in problem.hyper.weight_decay.items():
        if decay:
            own = vector[name]
            slope = slope + decay * scalar((own * problem.plan.parameters[name].detach()).sum())
            curvature = curvature + decay * scalar(own.square().sum())
    return Answer(displacement, -slope - 0.5 * curvature, scalar(_vector.dot(vector, vector)), usable)


def answer_of_vector(
    problem: Problem, displacement: Displacement, damping: Scalar, curvature: Scalar, usable: Truth
) -> Answer:
    """The answer for a p that is formed, with curvature = p^T B p.

    m(0) - m(p) = lambda p . (p - q) + p^T (B + W) p / 2
    """
    vector = displacement.dense()
    squared = pull = scalar(_vector.dot(vector, vector))
    if problem.previous is not None:
        pull = pull - scalar(_vector.dot(vector, problem.previous))
    for name, decay in problem.hyper.weight_decay.items():
        if decay:
            curvature = curvature + decay * scalar(vector[name].square().sum())
    return Answer(displacement, damping * pull + 0.5 * curvature, squared, usable)
