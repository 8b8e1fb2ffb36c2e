"""Fits to samples that are drawn: steps with a search on more and more of them, and plain ones before.

Far from a solution a searched step may be dear and short. Where the first ones creep, Levenberg-Marquardt steps
follow (for terms), taken if they gain, until they creep or the loss is below 1e-6 of the first one, and then
searched steps for good: close to a solution one of these takes off more than ten plain ones.
There are twice as many samples after two searched steps in a row that the samples limit: where other samples
promise less than half of what the batch promises. On a device more than 1.5 per parameter stay only if the next
steps gain half as much again as the last ones did; otherwise there are as many as before, for a while.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, ClassVar

import torch

from woodbury import _random
from woodbury._bytes import available_bytes
from woodbury.fit.equations import TermSource
from woodbury.fit.run import SEARCH, Run, use_search
from woodbury.fit.sources import Drawn
from woodbury.optim import GaussNewton, StepInfo

FEW_STEPS = 8  # on few samples, at the very start
# After so many searched steps, if the median length of the last four is no more than this, plain ones; later on a
# device, where a searched step takes the time of few plain ones.
LOOKS = {FEW_STEPS: 1 / 128, 12: 1 / 32, **dict.fromkeys(range(16, 50, 4), 1 / 16)}
LOOKS_ON_DEVICE = dict.fromkeys(range(48, 100, 16), 3 / 128)
# Shares of the first loss: where they may follow, where they end, and where the weights of conditions are larger.
FAR, CLOSE, NEAR = 1e-4, 1e-6, 1e-8
WINDOW = 96  # otherwise twice as many at least, and on as long as this many
WORTH = 0.5  # take so much off the logarithm of the loss
# Samples of a step at first: 1.5 per parameter within these bounds. On a device MOST where these were more than
# MOST_ON_DEVICE: the parameters outnumber the samples in any case, and steps on half of them take half the time.
LEAST, MOST, MOST_ON_DEVICE = 256, 4096, 8192
FEW = 256  # samples of terms on a CPU in the first steps, and in plain ones; twice as many in searched ones
FEW_ON_DEVICE = 512  # on a device, where searched ones have 1.5 per parameter
FEWEST = 64  # of a system: its points have a row for each equation, and rows are what a step costs
GROWTH = 2  # times the samples, where they limit the steps:
LIMITED = 0.5  # where other samples promise less than this of what the batch promises,
LIMITED_STEPS = 2  # so many steps in a row
TRIAL = 8  # steps with more samples, which stay
PAYS = 1.5  # if these steps take so many times as much off the logarithm of the loss as the ones before;
REST = 32  # steps until the next trial where they do not, and twice as many each time
STEPS_LEFT = 2  # with more samples that the time must still hold, each of them
LONGER = 4  # times as long
MOST_ROWS, MOST_ROWS_ON_CPU = 8, 4  # samples per parameter at most: more add little to the curvature
MOST_SAMPLES = 32768  # of a step: more take longer than they are worth
COPIES = 6  # of the rows that a step holds at once, at most
AVAILABLE = 0.5  # of the memory that is left: a step takes no more than this by itself
BALANCED_AT = frozenset(2**power for power in range(20))  # steps before which weights balance themselves anew
DECLINE, EARLY = 6.0, 0.6  # of the weights of early times: at first, and the part of the budget that has them
STALLED = 12  # searched steps in a row that were rejected: nothing moves any more
# what `resume` needs
_COURSE = ("phase", "since", "is_near", "rejected", "limited", "width", "count", "most", "before", "wait", "rest")


def samples_at_first(size: int, on_cpu: bool) -> int:
    """How many for so many parameters, unless they do not fit into memory, or are the few of terms."""
    wanted, fewest = round(1.5 * size), LEAST if on_cpu else 8 * LEAST
    most = MOST if on_cpu or wanted > MOST_ON_DEVICE else MOST_ON_DEVICE
    return min(max(wanted, fewest), most, max(64, MOST_ROWS * size))


class SolvingRun(Run):
    """Plain steps, then steps with a search."""

    kind: ClassVar[str] = "samples that are drawn"

    def __init__(
        self,
        optimizer: GaussNewton,
        source: TermSource | Drawn,
        seed: int | None,
        samples: int | None,
        **shared: Any,
    ) -> None:
        super().__init__(optimizer, **shared)
        self.source = source
        self.given = samples  # as the user has them
        self.width = 1  # rows of a point, where terms have few points: known from the first batch on
        self._choose_counts()
        self.looks = LOOKS if self.device.type == "cpu" else LOOKS_ON_DEVICE
        # the steps before this phase
        self.phase, self.since = "look" if source.is_fresh and source.has_terms else "search", 0
        self.is_near = False  # a solution, so that weights are other ones
        self.rejected = self.limited = 0  # steps in a row
        self.before = math.nan  # what steps gained before more samples were tried, while these are on trial
        self.wait, self.rest = 0, REST  # no decision before this step, and how long the next rest is
        self.most_plain = 0  # samples of plain steps, where more than the first ones
        self.drawn: _random.Snapshot | None = None  # random numbers of the samples, if they have a seed
        if seed is not None:
            now = _random.snapshot(self.device)
            torch.manual_seed(seed)
            self.drawn = _random.snapshot(self.device)
            _random.restore(now)

    def _choose_counts(self) -> None:
        """How many samples there are at first (and in plain steps), in searched steps after looks, and at most."""
        on_cpu, width = self.device.type == "cpu", self.width
        usual = max(samples_at_first(self.size, on_cpu) // width, FEWEST)
        self.most = min((MOST_ROWS_ON_CPU if on_cpu else MOST_ROWS) * self.size, MOST_SAMPLES) // width
        while usual > LEAST and not self._fits(usual):
            usual //= 2
        self.usual = math.inf if on_cpu else usual  # more have to pay; on a CPU there are too few steps for trials
        if self.given is not None:
            self.first = self.searched = self.given
        elif self.source.has_terms:  # each has points of its own, and few are enough at first
            self.first = min(max((FEW if on_cpu else FEW_ON_DEVICE) // width, FEWEST), usual)
            self.searched = min(2 * self.first, self.most) if on_cpu else usual
        else:
            self.first = self.searched = usual
        self.count = self.first

    def advance(self) -> Callable[[], str | None]:
        self._decide()
        if isinstance(self.source, TermSource) and self.source.time is not None:
            share = self.limits.share(self.fit.steps, self.fit.seconds, 0.0)
            self.source.decline = DECLINE * max(0.0, 1 - share / EARLY)
        comes_near = not self.is_near and self._share() < NEAR
        self.is_near = self.is_near or comes_near
        if comes_near or self.fit.steps in BALANCED_AT:
            self._draw(lambda: self.source.balance(self.is_near))
        while True:
            batch = self._draw(lambda: self.source.batch(self.count))
            if self.given is None and self.source.width > self.width:  # a system: the first batch is drawn anew
                self.width = self.source.width
                self._choose_counts()
                continue
            loss = self.source.loss()
            self.warn_of_columns(batch[0])
            try:
                info = self._step(batch)
                break
            except (torch.OutOfMemoryError, MemoryError):
                if self.count < 2 * LEAST:
                    raise
                self.count, self.limited = self.count // 2, 0
                self.most, self.before = self.count, math.nan
                message = f"fit: memory has run out: from now on a step has {self.count} samples"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.fit.steps += 1
        self.fit.samples = self.count if self.source.points is None else self.source.points
        return lambda: self._note(info, loss)

    def _step(self, batch: Any) -> StepInfo:
        if self.phase == "plain":
            return self.optimizer.step(*batch)
        others = self._draw(lambda: self.source.batch(self.count)) if self.source.is_fresh else None
        return self.optimizer.step(*batch, held_out=others)

    def _decide(self) -> None:
        """Whether the next step is a plain one."""
        fit = self.fit
        if self.phase == "look" and fit.steps in self.looks:
            length = median(float(record["length"]) for record in fit.history[-4:])
            if length <= self.looks[fit.steps] and self._share() > FAR:
                self.begin_plain()
        if self.phase == "look" and fit.steps == FEW_STEPS:
            self.count = max(self.count, self.searched)
        elif self.phase == "plain" and self.device.type == "cpu" and self._share() < CLOSE:
            self._begin_search()  # whose steps gain more here; on a device they did not
        elif self.phase == "plain" and fit.steps - self.since >= 2 * WINDOW and self._gained(WINDOW) < WORTH:
            if GROWTH * self.count <= self.most_plain and self._fits(GROWTH * self.count):
                self.count, self.since = GROWTH * self.count, fit.steps - WINDOW
            else:
                self._begin_search()

    def _share(self) -> float:
        """The loss over the first one."""
        losses = [self.fit.history[place]["loss"] for place in (0, -1) if self.fit.history]
        return float(losses[1] / losses[0]) if losses and losses[0] > 0 else 1.0

    def begin_plain(self, most: int = 0) -> None:
        """Plain steps as long as they gain enough, and where they do not, on twice the samples up to `most`."""
        self.phase, self.since = "plain", self.fit.steps
        self.count, self.most_plain = self.first, most
        use_search(self.optimizer, False)

    def _begin_search(self) -> None:
        self.phase, self.count = "search", max(self.count, min(self.searched, self.most))
        use_search(self.optimizer, True)

    def _gained(self, steps: int) -> float:
        """What the last steps took off the logarithm of the loss; not a number where the loss is no square."""
        before, now = (self.fit.history[place]["loss"] for place in (-steps, -1))
        return math.log(before / now) if before > 0 and now > 0 else math.nan

    def shown(self) -> tuple[str, float]:
        kind = "plain step" if self.phase == "plain" else super().shown()[0]
        return f"{kind}, {self.fit.history[-1]['samples']} samples", 0.0

    def _note(self, info: StepInfo, loss: float) -> str | None:
        """Record a step, and decide whether to stop or to draw more."""
        fit, numbers = self.fit, info.as_dict()
        fit.loss = float(numbers["loss"]) if math.isnan(loss) else loss
        record = self.note(fit.loss, **{name: numbers[name] for name in SEARCH})
        if terms := self.source.mean_squares():
            record["terms"] = terms
        self.measure(record)
        self.judge(record.get("validation", fit.loss))
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        if self.validation is not None and self.waited >= self.validation.patience:
            return "validation"
        if self.phase == "plain":
            return None
        self.rejected = 0 if numbers["accepted"] else self.rejected + 1
        if self.source.is_fresh:
            self._grow()
        return "stalled" if self.rejected >= STALLED else None

    def _grow(self) -> None:
        """Draw more samples from now on, where they limit the steps, pay, and their rows fit into memory."""
        agreement, now = self.optimizer.state.get("search", {}).get("agreement", 1.0), self.fit.steps
        self.limited = self.limited + 1 if agreement < LIMITED else 0
        if now < self.wait:
            return
        on_trial = not math.isnan(self.before)
        if on_trial and self._gained(TRIAL) < PAYS * self.before:
            self.count, self.rejected, self.limited = self.count // GROWTH, 0, 0
            self.wait, self.rest = now + self.rest, 2 * self.rest
        self.before = math.nan
        must_pay = self.count >= self.usual
        is_early = must_pay and now < TRIAL
        if is_early or self.limited < LIMITED_STEPS or GROWTH * self.count > self.most:
            return
        if self._fits(GROWTH * self.count) and self._is_time_left():
            self.count, self.rejected, self.limited = GROWTH * self.count, 0, 0
            if must_pay:
                self.before, self.wait = self._gained(TRIAL), now + TRIAL

    def _fits(self, count: int) -> bool:
        """Whether the rows of so many samples fit into what memory is left, as far as that is known."""
        number = next(iter(self.model.parameters())).element_size()
        available = available_bytes(self.device)
        return available is None or COPIES * count * self.width * self.size * number < AVAILABLE * available

    def _is_time_left(self) -> bool:
        """Whether steps with more samples end in time, as the last step lets one expect."""
        if self.limits.seconds is None:
            return True
        before, now = (record["seconds"] for record in self.fit.history[-2:])
        return bool(STEPS_LEFT * LONGER * (now - before) <= self.limits.seconds - now)

    def _draw(self, function: Callable[[], Any]) -> Any:
        """function(), with the random numbers of the samples."""
        if self.drawn is None:
            return function()
        now = _random.snapshot(self.device)
        _random.restore(self.drawn)
        try:
            return function()
        finally:
            self.drawn = _random.snapshot(self.device)
            _random.restore(now)

    def some_data(self) -> Iterable[Any]:
        return [self._draw(lambda: self.source.draw(self.count))]

    def finish(self) -> None:
        fit, data = self.fit, self.some_data()
        if self.validation is not None:
            fit.validation = self.take_best(self.validation_loss)
            fit.loss = self.evaluate(data)
        else:  # the best was judged by samples of its own: compared on the same ones
            fit.loss = self.take_best(lambda: self.evaluate(data), has_judged=False)
        fit.samples = fit.history[fit.best_step - 1]["samples"] if fit.best_step else self.count

    def state(self) -> dict[str, Any]:
        course = {name: getattr(self, name) for name in _COURSE}
        drawn = None if self.drawn is None else _random.as_plain(self.drawn)
        return {**super().state(), "course": course, "weights": dict(self.source.weights), "drawn": drawn}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        names = list(self.source.sources) if isinstance(self.source, TermSource) else []
        if state["weights"] and set(state["weights"]) != set(names):
            raise ValueError(f"fit: resume is of the terms {list(state['weights'])}, and here are {names}")
        self.width = state["course"]["width"]
        self._choose_counts()
        for name in _COURSE:
            setattr(self, name, state["course"][name])
        self.source.weights.update(state["weights"])
        if self.phase == "plain":
            use_search(self.optimizer, False)
        if state["drawn"] is not None and self.drawn is not None:
            self.drawn = _random.from_plain(state["drawn"], self.device)
