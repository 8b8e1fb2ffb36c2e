"""Fits to data used whole, or to fresh samples that grow in number: steps with a `CurvedSearch`, to many digits.

With validation data and data used whole, `woodbury.fit.descent` says how deep steps go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from woodbury import _batch, _random
from woodbury.fit.descent import Descent, share_gained
from woodbury.fit.limits import Limits
from woodbury.fit.run import Callback, Run, Validation
from woodbury.fit.sources import Source
from woodbury.optim import GaussNewton, StepInfo

DEFAULT_STEPS = 300  # where no budget is given
FIRST_ROWS = 1.5  # samples per parameter to draw at first,
FEWEST, MOST, MOST_ON_DEVICE = 256, 4096, 32768  # within these bounds
GROWTH = 4  # times the samples, where they limit the steps:
LIMITED = 0.5  # where other samples promise less than this of what the batch promises,
SHORT = 1 / 16  # or where lengths are no more than this, once 99 % of the loss are gone,
LIMITED_STEPS = 3  # so many steps in a row
MOST_ROWS = 8  # samples per parameter at most: more of them add little to the curvature
STALL_WINDOW = 12  # steps that together gain less than STALL_GAIN of the loss: nothing moves any more
STALL_GAIN = 0.01
PATIENCE = 6  # steps without a lower validation loss, as in trainlm


def first_count(source: Source, samples: int | None, size: int, device: torch.device) -> int:
    """How many samples the first step gets."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise ValueError(f"fit: samples must be a whole number from 1 on, got {samples!r}")
    if not source.is_fresh:
        if samples is not None:
            raise ValueError("fit: samples= is for a function that draws them; the data given is used whole")
        return _batch.sample_count(source.draw(0)[0])
    most = MOST if device.type == "cpu" else MOST_ON_DEVICE
    return min(max(round(FIRST_ROWS * size), FEWEST), most) if samples is None else samples


class PreciseRun(Run):
    """Steps with a search."""

    needed: ClassVar[set[str]] = Run.needed | {"limited"}

    def __init__(
        self,
        optimizer: GaussNewton,
        source: Source,
        limits: Limits,
        validation: Validation | None,
        seed: int | None,
        callback: Callback | None,
        samples: int | None,
    ) -> None:
        super().__init__(optimizer, limits, callback, validation)
        self.source = source
        self.size = sum(own.numel() for own in self.model.parameters() if own.requires_grad)
        self.count = first_count(source, samples, self.size, self.device)  # of the samples of the next step
        self.random: _random.Snapshot | None = None  # of the samples, if they have a seed
        if seed is not None:
            now = _random.snapshot(self.device)
            torch.manual_seed(seed)
            self.random = _random.snapshot(self.device)
            _random.restore(now)
        self.limited = 0  # steps in a row that the samples limited
        self.descent = None if source.is_fresh or validation is None else Descent(optimizer)

    def reached(self) -> str | None:
        return self.limits.reached(self.fit.steps, self.fit.seconds)

    def advance(self) -> Callable[[], str | None]:
        batch, held_out = self._draw(lambda: self.source.batches(self.count))
        info = self.optimizer.step(*batch, held_out=held_out)
        self.fit.steps, self.fit.samples = self.fit.steps + 1, self.count
        return lambda: self._note(info)

    def shown(self) -> tuple[str, float]:
        record = self.fit.history[-1]
        if "validation" in record:
            return f"validation {record['validation']:.3e}", 0.0
        path = "bent" if record["bent"] else "straight"
        return f"length {record['length']:.3g} ({path}), {record['samples']} samples", 0.0

    def _note(self, info: StepInfo) -> str | None:
        """Record a step, and decide whether to stop or to draw more."""
        fit, numbers = self.fit, info.as_dict()
        before = float(numbers["loss"])
        record = {"step": fit.steps, "seconds": fit.seconds, "loss": before, "samples": fit.samples}
        record |= {name: numbers[name] for name in ("length", "share", "bent", "accepted")}
        fit.history.append(record)
        fit.loss = before if self.source.is_fresh else self.evaluate([self.source.draw(0)])
        if self.validation is not None:
            record["validation"] = self.validation_loss()
        elif self.source.is_fresh:
            self.judge(fit.loss)
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        if self.validation is not None and self._is_over(record["validation"], self.validation.patience):
            return "validation"
        if self._is_stalled():
            return "stalled"
        if self.source.is_fresh:
            self._grow(before, float(numbers["length"]))
        return None

    def _is_over(self, judged: float, patience: int) -> bool:
        """Whether the validation loss has stopped falling; plain steps and searched ones may take turns."""
        self.judge(judged)
        if self.descent is None:
            return self.waited >= patience
        assert self.best is not None
        was_plain = not self.descent.in_search
        back = self.descent.next(self.best, self.waited)
        if back is not None:
            self.best, self.waited = back, 0
            self.load_parameters(back.parameters)
        return was_plain and self.waited >= patience

    def _grow(self, before: float, length: float) -> None:
        """Draw more samples from now on, where they limit the steps."""
        agreement = self.optimizer.state.get("search", {}).get("agreement", 1.0)
        is_short = length <= SHORT and share_gained(self.fit.history[0]["loss"], before) > 0.99
        self.limited = self.limited + 1 if agreement < LIMITED or is_short else 0
        if self.limited >= LIMITED_STEPS and GROWTH * self.count <= MOST_ROWS * self.size:
            self.count, self.limited = self.count * GROWTH, 0

    def _is_stalled(self) -> bool:
        """Whether the last steps, on as many samples each, gained next to nothing together."""
        recent = self.fit.history[-STALL_WINDOW:]
        if len(recent) < STALL_WINDOW or recent[0]["samples"] != self.fit.samples:
            return False
        if self.source.is_fresh or self.descent is not None:
            return not any(record["accepted"] for record in recent)
        return share_gained(float(recent[0]["loss"]), self.fit.loss) <= STALL_GAIN

    def _draw(self, function: Callable[[], Any]) -> Any:
        """function(), with the random numbers of the samples."""
        if self.random is None:
            return function()
        now = _random.snapshot(self.random.device)
        _random.restore(self.random)
        try:
            return function()
        finally:
            self.random = _random.snapshot(self.random.device)
            _random.restore(now)

    def finish(self) -> None:
        fit = self.fit
        fit.best_step = fit.steps
        data = [self._draw(lambda: self.source.draw(self.count))]
        if self.validation is not None:
            self.finish_by_validation()
            fit.loss = self.evaluate(data)
        else:
            fit.loss, last = self.evaluate(data), self.parameters()
            if self.best is not None:  # by samples of its own: compared on the same ones
                self.load_parameters(self.best.parameters)
                other = self.evaluate(data)
                if other < fit.loss:
                    fit.loss, fit.best_step = other, self.best.step
                else:
                    self.load_parameters(last)
        fit.samples = fit.history[fit.best_step - 1]["samples"] if fit.best_step else self.count

    def state(self) -> dict[str, Any]:
        random = {} if self.random is None else {"random": self.random.cpu}
        descent = {} if self.descent is None else {"descent": self.descent.state()}
        return {**super().state(), "limited": self.limited, "samples": self.count, **random, **descent}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        self.limited, self.count = state["limited"], state["samples"]
        if "random" in state and self.random is not None:
            self.random = self.random._replace(cpu=state["random"])
        if self.descent is not None and "descent" in state:
            self.descent.load(state["descent"])
