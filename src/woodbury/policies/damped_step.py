"""A step at one damping, which a damping policy changes from step to step: the steps of the paper."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from woodbury.device.scalars import Scalar, as_number, compute, is_known
from woodbury.policies.damping import FORGETTING, Damping, check_damping, is_relative, next_scale
from woodbury.policies.proposal import AnyQuadratic, Policy, Proposal
from woodbury.quadratic.objective import Objective
from woodbury.quadratic.quadratic import Damped, Minimizer

# by how much lambda may be raised within a step, time after time, to make K + lambda I definite
_RAISES = (*[10.0] * 12, *[1000.0] * 6)


@dataclass(eq=False)
class DampedStep(Policy):
    """p of one damping: that of a damping policy, raised within the step where the system cannot be solved."""

    damping: Damping
    look: bool  # at the condition of the system

    def propose(self, quadratic: AnyQuadratic, objective: Objective, state: Mapping[str, Any]) -> Proposal:
        wanted, gains = self._wanted(quadratic, state)
        damped, found = _solve(quadratic, wanted)
        raised, doubt = damped.damping is not wanted, None
        if not raised and (found.usable is not False or not quadratic.solver.exact):
            doubt = damped.doubt(found, self.look)
        found.gains |= gains
        doubts = {} if doubt is None else {"doubt": doubt}
        return Proposal(**vars(found), loss=objective.loss, damping=damped.damping, raised=raised, warnings=doubts)

    def solve(self, quadratic: AnyQuadratic, state: Mapping[str, Any]) -> tuple[Damped, Minimizer]:
        return _solve(quadratic, self._wanted(quadratic, state)[0])

    def _wanted(self, quadratic: AnyQuadratic, state: Mapping[str, Any]) -> tuple[Scalar, dict[str, Any]]:
        """lambda as the policy has it, and what the state gains where it is relative to the scale of K."""
        damping = as_number(state["damping"]) + self.damping.floor
        if not is_relative(self.damping):
            return damping, {}
        before = as_number(state["scale"]) if "scale" in state else None
        scale = next_scale(quadratic.trace(), before, getattr(self.damping, "forgetting", FORGETTING))
        return damping * scale, {"scale": compute(scale)[0]}

    def next_damping(self, proposal: Proposal, state: Mapping[str, Any]) -> Scalar:
        value = as_number(state["damping"])
        if proposal.raised:
            value = proposal.damping / proposal.gains.get("scale", 1.0) - self.damping.floor
        value = self.damping.next(value, proposal.ratio)
        if is_known(value) and not 0 < value < math.inf:  # 0 may do, with a floor
            check_damping(value + self.damping.floor, self.damping)
        return value


def _solve(quadratic: AnyQuadratic, damping: Scalar) -> tuple[Damped, Minimizer]:
    """The damped model and its minimizer; lambda is raised, tenfold at first, until the system can be solved.

    Where no lambda helps (the Gram matrix overflowed, say) the failed step stands and will be rejected.
    """
    damped = quadratic.at(damping)
    found = damped.minimizer()
    if found.usable is not False or not quadratic.solver.exact or not is_known(damping):
        return damped, found
    raised = damping
    for factor in _RAISES:
        raised = raised * factor
        other = quadratic.at(raised)
        better = other.minimizer()
        if better.usable:
            warnings.warn(
                f"the system to solve at damping {damping:.3g} is not numerically positive definite in "
                f"{quadratic.gram_dtype or quadratic.plan.dtype}: damping raised to {raised:.3g} for this step. "
                "gram_dtype=torch.float64 or a larger damping avoids this",
                RuntimeWarning,
                stacklevel=4,
            )
            return other, better
    found.predicted = math.nan
    return damped, found
