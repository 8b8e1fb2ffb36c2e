"""Fits to data used whole: steps with a `CurvedSearch`, to many digits.

With validation data steps go as deep as the loss on it falls. Steps with a search follow the samples to many
digits, and with them their noise. So such a fit begins with plain Levenberg-Marquardt steps (`PLAIN`, MATLAB's
trainlm in units of the trace of K): its damping is large at first and falls while steps keep what they promise.
Noise shows in a validation loss that rises, and ends the fit.

Without noise the validation loss keeps falling, but such steps creep along the floor of a valley. Where ten of
them have taken away less than 70 % of it, the search goes on from the best point, until three of its steps in a
row pass without a lower validation loss. What it found counts if it has at least halved that loss: a little less
may be luck. After that there are plain steps again.

Where seconds are given in which hardly a step on all samples fits (`woodbury.fit.pace`), a step is a searched one
on some of them, drawn anew, and judged on as many others, as with a sampler. What is fitted best are all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from woodbury import _batch
from woodbury._process import level_of_caller
from woodbury.fit.pace import FEWEST_STEPS, STEPS, Pace
from woodbury.fit.run import SEARCH, Best, Run, share_gained, use_search
from woodbury.fit.sources import Data
from woodbury.optim import GaussNewton, StepInfo

DEFAULT_STEPS = 300  # where no budget is given
STALL_WINDOW = 12  # steps that together gain less than STALL_GAIN of the loss: nothing moves any more
STALL_GAIN = 0.01
PATIENCE = 6  # steps without a lower validation loss, as in trainlm
WINDOW, CREEP = 10, 0.7  # plain steps that together take away less than this of the validation loss
TRIAL, WORTH = 3, 0.5  # steps of the search without a lower validation loss; how much of it all must take away


class PreciseRun(Run):
    """Steps with a search, all on the same samples; with validation data plain ones as well."""

    kind: ClassVar[str] = "a pair"

    def __init__(self, optimizer: GaussNewton, data: Data, seed: int = 0, **shared: Any) -> None:
        super().__init__(optimizer, **shared)
        self.data, self.seed = data, seed
        self.fit.samples = self.samples = _batch.check_batch(*data)
        self.part = self._part_in_time()  # samples of a step, None for all of them
        self.course: list[float] = []  # the lowest validation losses after plain steps since the last search
        self.before: Best | None = None  # the best point when the search began, while it lasts
        if self.validation is not None and self.part is None:
            use_search(optimizer, False)

    def _part_in_time(self) -> int | None:
        """Samples of a step where hardly a step on all of them fits in the time: then many steps do."""
        if self.samples < 2:
            return None
        pace = Pace(self.optimizer, self.data, self.samples)
        fewest = min(FEWEST_STEPS, self.limits.steps or FEWEST_STEPS)
        needed = pace.seconds_beyond(self.limits.seconds, fewest)
        if needed is None or self.limits.seconds is None:
            if not self.limits.seconds:
                pace.factorisations = 1 if self.validation is not None else pace.factorisations
                pace.warn_of_slow_steps()
            return None
        part = self.fit.samples = pace.samples_for(self.limits.seconds / STEPS / needed)
        warnings.warn(
            f"fit: a step on all {self.samples} samples would take about {needed:.2g} s, and seconds="
            f"{self.limits.seconds:g}: each step takes {part} of them, drawn anew, and others judge it. Ways out: "
            "more seconds, a smaller model, or a loader",
            stacklevel=level_of_caller(),
        )
        return part

    def advance(self) -> Callable[[], str | None]:
        if self.part is None:
            info = self.optimizer.step(*self.data)
        else:
            batch, others = self._draw(self.part)
            info = self.optimizer.step(*batch, held_out=others)
        self.fit.steps += 1
        return lambda: self._note(info)

    def _draw(self, count: int) -> list[Data]:
        """So many samples for a step, and as many others to judge it; the same after `resume`."""
        generator = torch.Generator("cpu").manual_seed(self.seed + self.fit.steps)
        order = torch.randperm(self.samples, generator=generator, device="cpu")[: 2 * count].to(self.device)
        return [_batch.take(self.data, own, self.samples) for own in order.split(count)]

    def _note(self, info: StepInfo) -> str | None:
        """Record a step, and decide whether to stop."""
        fit, numbers = self.fit, info.as_dict()
        record = self.note(float(numbers["loss"]), **{name: numbers[name] for name in SEARCH})
        fit.loss = self.evaluate([self.data])
        self.measure(record)
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        if self.part is not None:
            self.judge(record.get("validation", fit.loss))
            if self.validation is not None and self.waited >= self.validation.patience:
                return "validation"
        elif self.validation is not None:
            self.judge(record["validation"])
            was_plain = self.before is None
            self.choose_steps()
            if was_plain and self.waited >= self.validation.patience:
                return "validation"
        return "stalled" if self._is_stalled() else None

    def choose_steps(self) -> None:
        """Go on with plain steps or with the search; where a search is over, from the point that counts."""
        best, before = self.best, self.before
        assert best is not None
        if before is None:
            self.course.append(best.judged)
            creeps = len(self.course) > WINDOW and share_gained(self.course[-1 - WINDOW], best.judged) < CREEP
            if self.waited == 0 and creeps:
                self.before = best
                use_search(self.optimizer, True)
        elif self.waited >= TRIAL:
            self.before, self.course, self.waited = None, [], 0
            use_search(self.optimizer, False)
            self.best = best if share_gained(before.judged, best.judged) >= WORTH else before
            self.load_parameters(self.best.parameters)

    def _is_stalled(self) -> bool:
        """Whether the last steps gained next to nothing together."""
        recent = self.fit.history[-STALL_WINDOW:]
        if len(recent) < STALL_WINDOW:
            return False
        if self.validation is not None or self.part is not None:
            return not any(record["accepted"] for record in recent)
        return share_gained(float(recent[0]["loss"]), self.fit.loss) <= STALL_GAIN

    def finish(self) -> None:
        self.fit.best_step = self.fit.steps
        if self.validation is not None:
            self.fit.validation = self.take_best(self.validation_loss)
        elif self.part is not None:
            self.take_best(lambda: self.evaluate([self.data]))
        self.fit.loss = self.evaluate([self.data])

    def state(self) -> dict[str, Any]:
        before = None if self.before is None else dict(vars(self.before))
        return {**super().state(), "descent": {"course": list(self.course), "before": before}}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        descent = state["descent"]
        self.course = list(descent["course"])
        if self.validation is not None and descent["before"] is not None:
            self.before = Best(**descent["before"])
            use_search(self.optimizer, True, self.optimizer.state.get("search"))
