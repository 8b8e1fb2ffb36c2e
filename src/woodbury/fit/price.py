"""Curvature at a price: how many samples it comes from, by what steps are seen to cost, where seconds are all."""

from __future__ import annotations

from collections import deque
from statistics import median

from woodbury import _batch
from woodbury.fit.measured import sgd_seconds
from woodbury.fit.sources import Data
from woodbury.optim import GaussNewton

MOST_SGD_STEPS = 3.0  # that a step may cost
_WINDOW = 8  # steps whose median time counts
_MOST_CHANGES = 6  # of the number of curvature samples


class Price:
    """Changes the number of curvature samples where steps are seen to cost other than three SGD steps.

    On the CPU alone. A number that was halved without a gain in time comes back, and stays. Below half of what the
    operations allow it does not fall: fewer cost more in progress than they save in time.
    """

    def __init__(self, optimizer: GaussNewton) -> None:
        self.optimizer = optimizer
        self.times: deque[float] = deque(maxlen=_WINDOW)
        self.sgd: float | None = None  # seconds of an SGD step on a batch like the others
        self.changes = 0
        self.least = 2  # samples
        self.before: tuple[int, float] | None = None  # the number before it was halved, and the time of a step

    def note(self, seconds: float, batch: Data) -> None:
        """After a step that took so long."""
        if self.changes >= _MOST_CHANGES or self.optimizer.param_groups[0]["params"][0].device.type != "cpu":
            return
        self.times.append(seconds)
        if len(self.times) < _WINDOW:
            return
        now, samples = median(self.times), _batch.sample_count(batch[0])
        count = self.optimizer.affordable_samples(samples)
        if self.sgd is None:
            self.sgd, self.least = sgd_seconds(self.optimizer, batch), max(2, count // 2)
        changed = self._changed(count, samples, now / self.sgd, now)
        if changed != count:
            self.optimizer.state["curvature_samples"] = changed
            self.changes += 1
            self.times.clear()

    def _changed(self, count: int, samples: int, ratio: float, now: float) -> int:
        if self.before is not None and now > 0.9 * self.before[1]:  # in vain
            (count, _), self.before, self.changes = self.before, None, _MOST_CHANGES
            return count
        self.before = None
        if ratio > 1.1 * MOST_SGD_STEPS and count > self.least:
            self.before = count, now
            return max(self.least, count // 2)
        return min(samples, 2 * count) if ratio < 0.5 * MOST_SGD_STEPS else count
