"""A step before it is taken, and the rules by which it is: rho, `accept=` and the guard."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from woodbury.device.scalars import Scalar, Truth, is_known, ratio_where
from woodbury.parallel.group import Group
from woodbury.policies.guard import Course, guard_warning
from woodbury.quadratic.metric import InMetric
from woodbury.quadratic.objective import Objective
from woodbury.quadratic.quadratic import Damped, Minimizer, Quadratic

AnyQuadratic = Quadratic | InMetric


@dataclass(kw_only=True)
class Proposal(Minimizer):
    """p, what was promised for it, and what came of it."""

    loss: Scalar  # f(theta), float64
    damping: Scalar  # the lambda it was computed with
    decrease: Scalar | None = None  # f(theta) - f(theta + p), where it is known
    length: float = 1.0  # alpha, sum of c, and whether the path is bent: of a step with a search
    share: float = 1.0
    bent: bool = False
    raised: bool = False  # whether lambda was raised within the step
    ratio: Scalar = math.nan  # rho, once judged
    accepted: Truth = False  # whether theta may move, once judged
    warnings: dict[str, str] = field(default_factory=dict)  # by kind: each is given once per optimizer


@dataclass(eq=False)
class Policy(ABC):
    """How much lambda, how far along p, when theta may move: it proposes a step, and judges what came of it."""

    accept: float | None  # eta: only if rho >= eta
    guard: float | None  # see `woodbury.policies.guard`
    precision: float  # eps of the type of the passes
    rates: Mapping[str, float | Tensor]  # alpha by parameter

    @abstractmethod
    def propose(self, quadratic: AnyQuadratic, objective: Objective, state: Mapping[str, Any]) -> Proposal:
        """A step, from the quadratic model of a batch and what earlier steps have left in the state."""

    @abstractmethod
    def solve(self, quadratic: AnyQuadratic, state: Mapping[str, Any]) -> tuple[Damped, Minimizer]:
        """One damped system and its p: what `verify` looks at."""

    def judge(self, proposal: Proposal, objective: Objective, state: Mapping[str, Any]) -> None:
        """Fill in what came of a step, whether theta may move, and what the state gains."""
        if proposal.decrease is None:
            proposal.decrease = objective.decrease(proposal.displacement)
        if objective.passes.group.size > 1:
            _agree(proposal, objective.passes.group)
        self._judge_ratio(proposal, proposal.decrease)
        if is_known(proposal.loss):  # how the loss has gone is known on the CPU alone: elsewhere one would wait
            self._judge_course(proposal, float(proposal.decrease), float(proposal.loss), state.get("course", ()))
        proposal.gains["damping"] = self.next_damping(proposal, state)

    def _judge_ratio(self, proposal: Proposal, decrease: Scalar) -> None:
        # Below the rounding of f both decreases are noise, and the model is as right as it can be: adding the
        # noise level to both makes 0/0 a good step (Conn, Gould & Toint, Trust-Region Methods, 17.4.2). Where f
        # is 0, p^T B p is still known up to a small multiple of eps^2 only.
        noise = abs(self.precision * proposal.loss) + 16 * self.precision**2
        actual, predicted = decrease + noise, proposal.predicted + noise
        finite = (abs(actual + predicted) < math.inf) & proposal.usable
        # Momentum can ask for a p that the model itself expects to raise f: there rho has no meaning.
        proposal.ratio = ratio_where(finite & (predicted > 0), actual, predicted, -math.inf)
        proposal.accepted = finite if self.accept is None else finite & (proposal.ratio >= self.accept)

    def _judge_course(self, proposal: Proposal, decrease: float, loss: float, before: Sequence[Any]) -> None:
        course = Course.read(before, loss)
        if self.guard is not None:
            rate = max(map(float, set(self.rates.values())))
            proposal.accepted = proposal.accepted & course.allows(decrease, loss, rate, self.guard)
        course = course.after(loss)
        proposal.gains["course"] = list(course)
        if course.runs_away() and proposal.accepted:
            proposal.warnings["course"] = guard_warning(course, self.guard is not None)

    @abstractmethod
    def next_damping(self, proposal: Proposal, state: Mapping[str, Any]) -> Scalar:
        """The value of the damping policy after the step."""


def _agree(proposal: Proposal, group: Group) -> None:
    """The numbers of a step as the first process has them, so that all judge alike to the last bit."""
    names = ("loss", "predicted", "squared_norm", "damping", "decrease", "usable")
    numbers = group.of_first([float(getattr(proposal, name)) for name in names])
    for name, number in zip(names, numbers, strict=True):
        setattr(proposal, name, number)
    proposal.usable = bool(proposal.usable)
