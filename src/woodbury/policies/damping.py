"""Damping policies: where lambda starts, and how it changes with the reduction ratio rho.

A policy is a frozen dataclass with `initial`, `floor` and `next(value, ratio)`. The damping of a step
is value + floor; the value is state of the optimizer, the policy is not. A policy with `relative=True` gives it in
units of the scale of K: lambda = (value + floor) scale, where

    scale <- max(trace(K), forgetting scale)        forgetting = 0.999 by default

so that a loss, targets or outputs in other units leave the steps as they are. The scale forgets slowly: K of a few
curvature samples that the model is sure about may be nearly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from woodbury._choice import check_number, check_truth
from woodbury.device.scalars import Scalar, where

FORGETTING = 0.999  # of the scale of K, per step
LOWEST, HIGHEST = 1e-18, 1e18  # of the value of a policy that multiplies: their squares fit into float32


class Damping(Protocol):
    """A rule for lambda.

    `next` gets plain floats when the model is on the CPU. On another device it gets numbers of that device
    (`woodbury.device.scalars.Number`, which behave as 0-dim tensors) and must not wait for them:
    `woodbury.device.scalars.where` takes both kinds and does not wait.
    """

    @property
    def initial(self) -> float: ...

    @property
    def floor(self) -> float: ...

    def next(self, value: Scalar, ratio: Scalar) -> Scalar: ...


@dataclass(frozen=True)
class LevenbergMarquardt:
    """The paper's rule: lambda = value + floor; value rises where the model is wrong and falls where it is right.

    ratio < threshold:      value <- boost value
    ratio > 1 - threshold:  value <- drop value
    otherwise:              value unchanged

    (Ren & Goldfarb, section 2.3; a ratio that is not a number counts as a failure.) The value stays between
    `LOWEST` and `HIGHEST`, so that lambda is finite and positive in float32 after any number of steps.
    """

    initial: float = 1.0  # lambda_LM at the start
    boost: float = 1.01
    drop: float = 0.99
    threshold: float = 0.25  # epsilon
    floor: float = 1e-3  # tau
    relative: bool = False  # to the scale of K, see above
    forgetting: float = FORGETTING  # of that scale

    def __post_init__(self) -> None:
        kind = "LevenbergMarquardt"
        check_number(f"{kind}: initial", self.initial, least=LOWEST, most=HIGHEST)
        check_number(f"{kind}: floor", self.floor, most=HIGHEST)
        check_number(f"{kind}: boost", self.boost, least=1)
        check_number(f"{kind}: drop", self.drop, above=0, most=1)
        check_number(f"{kind}: threshold", self.threshold, above=0, most=math.nextafter(0.5, 0.0))
        check_number(f"{kind}: forgetting", self.forgetting, most=1)
        check_truth(f"{kind}: relative", self.relative)

    def next(self, value: Scalar, ratio: Scalar) -> Scalar:
        multiplier = where(ratio > 1 - self.threshold, self.drop, 1.0)
        changed = value * where(ratio >= self.threshold, multiplier, self.boost)  # nan is not >= anything
        if isinstance(changed, float):
            return min(max(changed, LOWEST), HIGHEST)
        return where(changed > HIGHEST, HIGHEST, where(changed < LOWEST, LOWEST, changed))


@dataclass(frozen=True)
class Constant:
    """A constant lambda."""

    initial: float
    floor: float = 0.0
    relative: bool = False  # to the scale of K, see above

    def __post_init__(self) -> None:
        check_number("damping", self.initial, above=0)
        check_number("Constant: floor", self.floor)
        check_truth("Constant: relative", self.relative)

    def next(self, value: Scalar, ratio: Scalar) -> Scalar:
        return 0 * value + self.initial


def is_relative(damping: Damping) -> bool:
    """Whether lambda is given in units of the scale of K."""
    return bool(getattr(damping, "relative", False))


def next_scale(trace: Scalar, before: Scalar | None, forgetting: float = FORGETTING) -> Scalar:
    """The scale of K at a step with this trace; 1 while K is zero."""
    if before is not None:
        trace = where(trace > forgetting * before, trace, forgetting * before)
    return where(trace > 0, trace, 1.0)


def as_damping(damping: Damping | float) -> Damping:
    """The policy itself, or a constant policy for a plain number."""
    if type(damping) is not bool and isinstance(damping, int | float | Real):
        return Constant(float(damping))
    if isinstance(damping, type | bool) or not all(
        hasattr(damping, name) for name in ("initial", "floor", "next")
    ):
        raise TypeError(f"damping must be a number or a policy with initial, floor and next, got {damping!r}")
    for name in ("initial", "floor"):
        check_number(f"damping: {name} of {type(damping).__name__}", getattr(damping, name), least=-math.inf)
    check_damping(damping.initial + damping.floor, damping)
    return damping


def check_damping(value: float, policy: Damping) -> None:
    """Raise if lambda is not a positive finite number."""
    if not 0 < value < math.inf:
        raise ValueError(f"damping must be positive and finite, and {type(policy).__name__} gives {value}")
