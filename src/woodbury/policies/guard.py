"""The guard: a step that runs away is not taken.

A step is judged at theta + p and moves theta by alpha p. Where f is convex along the way, the loss of the batch
rises by at most

    rise = min(alpha, 1) (f(theta + p) - f(theta))

A step is rejected if rise > guard max(|level|, |f(theta)|), where the level is the loss smoothed over about 20
steps. In training that works this hardly ever happens. Where it does not work, the level itself climbs: while it
lies more than 4 times the best level above that (1 % of the first loss at least), a step is taken only if
f(theta + p) <= f(theta). The first ten steps are free: they show what losses there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

SMOOTHING = 0.05  # share of the last loss in the level
RUNAWAY = 4.0  # times the best level above it
WARM_UP = 10  # steps
LEAST = 0.01  # of the first loss: below, losses of single batches differ by more than that
ADVICE = (
    "a smaller lr, or one that decays to zero; momentum=0.9 with lr=0.3; larger batches; or woodbury.fit(model, "
    "loss, loader, epochs=...), which chooses for you"
)


class Course(NamedTuple):
    """How the loss has gone so far."""

    first: float
    level: float  # smoothed
    best: float  # the lowest level
    steps: int = 0

    @classmethod
    def read(cls, state: Sequence[Any], loss: float) -> Course:
        """What a step left behind, or the start of a course."""
        return cls(*state) if state else cls(loss, loss, loss)

    def runs_away(self) -> bool:
        """Whether the level lies far above its best."""
        if self.steps < WARM_UP:
            return False
        return self.level - self.best > RUNAWAY * max(abs(self.best), LEAST * abs(self.first))

    def allows(self, decrease: float, loss: float, rate: float, guard: float) -> bool:
        """Whether a step with f(theta) - f(theta + p) = decrease may be taken."""
        if self.steps < WARM_UP:
            return True
        limit = 0.0 if self.runs_away() else guard * max(abs(self.level), abs(loss))
        return min(rate, 1.0) * decrease >= -limit

    def after(self, loss: float) -> Course:
        """With the loss of one more batch."""
        level = self.level + SMOOTHING * (loss - self.level)
        return Course(self.first, level, min(level, self.best), self.steps + 1)


def guard_warning(course: Course, guarded: bool) -> str:
    """What to say where the loss runs away."""
    then = ". From now on a step is taken only if it lowers the loss of its batch, until the level is down again"
    return (
        f"the loss runs away: smoothed over 20 steps it has risen from {float(course.best):.3g} to "
        f"{float(course.level):.3g}{then if guarded else ''}"
    )
