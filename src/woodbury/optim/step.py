"""What a step is made of: the problem posed, the proposal that answers it, and what gets reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from woodbury._batch import Batch
from woodbury._scalar import Scalar, Truth, as_double, root, scalar
from woodbury._vector import Vector
from woodbury.capture import Capture
from woodbury.chain import Chain, ChainPass
from woodbury.chain_step import ChainDisplacement
from woodbury.displacement import Displacement
from woodbury.losses import check_count
from woodbury.optim.settings import Hyperparameters
from woodbury.plan import Plan

Batches = Iterable[tuple[Any, "Tensor | None"]]


class NonFiniteLossError(ValueError):
    """The loss at the current parameters, before any step, is not a finite number."""


class StepInfo:
    """What happened in a step, as 0-dim tensors (reading one waits for the device).

    They are made when asked for: most steps are never looked at.
    """

    def __init__(
        self,
        loss: Scalar,
        damping: Scalar,
        ratio: Scalar,
        predicted: Scalar,
        squared_norm: Scalar,
        accepted: Truth,
    ) -> None:
        self._loss, self._damping, self._ratio, self._predicted = loss, damping, ratio, predicted
        self._squared_norm, self._accepted = squared_norm, accepted

    @property
    def loss(self) -> Tensor:
        """f(theta) on the batch before the step, without the weight decay term."""
        return as_double(self._loss)

    @property
    def damping(self) -> Tensor:
        """lambda used."""
        return as_double(self._damping)

    @property
    def ratio(self) -> Tensor:
        """rho = actual over predicted decrease at theta + p; -inf if not finite or none predicted."""
        return as_double(self._ratio)

    @property
    def predicted(self) -> Tensor:
        """m(0) - m(p)."""
        return as_double(self._predicted)

    @property
    def step_norm(self) -> Tensor:
        """|p|; theta moved by lr p."""
        return as_double(root(self._squared_norm))

    @property
    def accepted(self) -> Tensor:
        """Whether theta moved."""
        return torch.as_tensor(self._accepted, dtype=torch.bool)

    def as_dict(self) -> dict[str, float | bool]:
        """The same as plain Python numbers."""
        return {name: getattr(self, name).item() for name in _NUMBERS}

    def __repr__(self) -> str:
        return f"StepInfo({', '.join(f'{name}={value}' for name, value in self.as_dict().items())})"


_NUMBERS = ("loss", "damping", "ratio", "predicted", "step_norm", "accepted")


@dataclass
class Piece:
    """Part of a batch as the loss saw it at theta."""

    inputs: Any
    targets: Tensor  # as the loss rule prepared them
    values: Tensor  # loss of each sample, float64
    count: Scalar  # what their mean divides by: f = sum of values / count
    capture: Capture | ChainPass


def mean_of(values: Sequence[Tensor], count: Scalar) -> Scalar:
    """sum of values / count."""
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    return scalar(joined.sum()) / count


def total_count(pieces: Sequence[Piece]) -> Scalar:
    """What the mean over all pieces divides by."""
    return check_count(sum(piece.count for piece in pieces))


@dataclass
class Objective:
    """f and its gradient g at theta, for methods that work with g itself."""

    loss: Scalar  # f(theta), float64
    gradient: Vector  # of the loss alone
    evaluate: Callable[[Displacement], Scalar]  # f(theta) - f(theta + p), float64, loss alone
    pieces: list[Piece]  # the batch, S2 first; S2 alone if f is that of a loader
    outputs: Tensor  # (N2, C) of S2, detached


@dataclass
class Proposal:
    """A step before it is taken."""

    displacement: Displacement | ChainDisplacement
    predicted: Scalar  # m(0) - m(p)
    squared_norm: Scalar  # |p|^2
    damping: Scalar  # the lambda it was computed with
    usable: Truth  # whether the small system could be solved
    loss: Scalar  # f(theta), float64
    pieces: list[Piece]  # the batch as it went through the model at theta
    center: Vector | None  # q of the damping term lambda |p - q|^2 / 2, None for zero
    evaluate: Callable[[Any], Scalar]  # f(theta) - f(theta + p) from the displacement, float64, loss alone
    memory: dict[str, Any] = field(default_factory=dict)  # what the optimizer's state gains by the step


@dataclass
class Problem:
    """Everything `_propose` may use: the trainable parameters, the batch and the current settings."""

    plan: Plan
    batch: Batch
    damping: Scalar
    hyper: Hyperparameters
    full: Batches | None
    previous: Vector | None  # q = mu p_prev, or None when zero
    is_chain: bool  # whether the model is a plain chain of Linear layers, by its structure or as it was seen
    chain: Chain | None  # what is run by hand, if that
