"""How deep the steps of a fit to noisy data go: as deep as the loss on other samples falls.

Steps with a search follow the samples to many digits, and with them their noise. So a fit with validation data
begins with plain Levenberg-Marquardt steps (`PLAIN`, MATLAB's trainlm in units of the trace of K): its damping is
large at first and falls while steps keep what they promise. Noise shows in a validation loss that rises, and ends
the fit.

Without noise the validation loss keeps falling, but such steps creep along the floor of a valley. Where ten of
them have taken away less than 70 % of it, the search goes on from the best point, until three of its steps in a
row pass without a lower validation loss. What it found counts if it has at least halved that loss: a little less
may be luck. After that there are plain steps again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from woodbury.fit.run import Best
from woodbury.optim import GaussNewton
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.policies.search import CurvedSearch

PLAIN = LevenbergMarquardt(initial=0.1, boost=3.0, drop=1 / 3, floor=1e-12, relative=True)
WINDOW, CREEP = 10, 0.7  # plain steps that together take away less than this of the validation loss
TRIAL, WORTH = 3, 0.5  # steps of the search without a lower validation loss; how much of it all must take away


def share_gained(before: float, after: float) -> float:
    """How much of a loss, of any sign, is gone."""
    return (before - after) / abs(before) if before else before - after


def use_search(optimizer: GaussNewton, on: bool) -> None:
    """From now on steps with a search, or plain ones that are taken if they gain."""
    search, accept = (CurvedSearch(), None) if on else (None, 0.0)
    optimizer.settings = replace(optimizer.settings, search=search, accept=accept)
    optimizer.state.pop("search", None)
    for group in optimizer.param_groups if on else ():
        group["momentum"] = 0.0  # which a search needs no more


class Descent:
    """Chooses between plain steps and those with a search, after every step."""

    def __init__(self, optimizer: GaussNewton) -> None:
        self.optimizer = optimizer
        self.course: list[float] = []  # the lowest validation losses after plain steps since the last search
        self.before: Best | None = None  # the best point when the search began, while it lasts
        use_search(optimizer, False)

    @property
    def in_search(self) -> bool:
        return self.before is not None

    def next(self, best: Best, waited: int) -> Best | None:
        """After a step; where a search is over, the best point, from which plain steps go on."""
        before = self.before
        if before is not None:
            if waited < TRIAL:
                return None
            self.before, self.course = None, []
            use_search(self.optimizer, False)
            return best if share_gained(before.judged, best.judged) >= WORTH else before
        self.course.append(best.judged)
        is_creeping = len(self.course) > WINDOW and share_gained(self.course[-1 - WINDOW], best.judged) < CREEP
        if waited == 0 and is_creeping:
            self.before = best
            use_search(self.optimizer, True)
        return None

    def state(self) -> dict[str, Any]:
        return {"course": list(self.course), "before": None if self.before is None else dict(vars(self.before))}

    def load(self, state: Mapping[str, Any]) -> None:
        self.course = list(state["course"])
        if state["before"] is not None:
            memory = self.optimizer.state.get("search")
            self.before = Best(**state["before"])
            use_search(self.optimizer, True)
            if memory is not None:
                self.optimizer.state["search"] = memory
