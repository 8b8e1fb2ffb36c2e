"""Fits to many digits: steps with a `CurvedSearch` on all of the data, or on fresh samples that grow in number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from woodbury import _batch, _random
from woodbury.fit.limits import Limits
from woodbury.fit.run import Callback, Run
from woodbury.fit.sources import Data, Source
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
        validation: Data | None,
        seed: int | None,
        callback: Callback | None,
        samples: int | None,
    ) -> None:
        super().__init__(optimizer, limits, callback)
        self.source, self.validation = source, validation
        parameters = [own for own in self.model.parameters() if own.requires_grad]
        self.size, device = sum(own.numel() for own in parameters), parameters[0].device
        self.fit.samples = first_count(source, samples, self.size, device)
        self.random: _random.Snapshot | None = None  # of the samples, if they have a seed
        if seed is not None:
            now = _random.snapshot(device)
            torch.manual_seed(seed)
            self.random = _random.snapshot(device)
            _random.restore(now)
        self.limited = 0  # steps in a row that the samples limited

    def reached(self) -> str | None:
        return self.limits.reached(self.fit.steps, self.fit.seconds)

    def advance(self) -> Callable[[], str | None]:
        batch, held_out = self._draw(lambda: self.source.batches(self.fit.samples))
        info = self.optimizer.step(*batch, held_out=held_out)
        return lambda: self._note(info)

    def shown(self) -> tuple[str, float]:
        record = self.fit.history[-1]
        path = "bent" if record["bent"] else "straight"
        return f"length {record['length']:.3g} ({path}), {record['samples']} samples", 0.0

    def _note(self, info: StepInfo) -> str | None:
        """Record a step, and decide whether to stop or to draw more."""
        fit, numbers = self.fit, info.as_dict()
        fit.steps += 1
        before, gained = float(numbers["loss"]), float(numbers["ratio"]) * float(numbers["predicted"])
        record = {"step": fit.steps, "seconds": fit.seconds, "loss": before, "samples": fit.samples}
        record |= {name: numbers[name] for name in ("length", "share", "bent", "accepted")}
        fit.loss = before
        if not self.source.is_fresh and numbers["accepted"]:
            fit.loss = max(0.0, before - gained)
        judged = fit.loss
        if self.validation is not None:
            record["validation"] = judged = float(self.loss_on(self.validation))
        fit.history.append(record)
        if self.best is None or judged < self.best[0]:
            self.best = judged, self.parameters()
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        is_stalled = self._is_stalled()
        agreement = self.optimizer.state.get("search", {}).get("agreement", 1.0)
        short = before < 0.01 * fit.history[0]["loss"] and float(numbers["length"]) <= SHORT
        self.limited = self.limited + 1 if agreement < LIMITED or short else 0
        if (
            self.source.is_fresh
            and self.limited >= LIMITED_STEPS
            and GROWTH * fit.samples <= MOST_ROWS * self.size
        ):
            fit.samples, self.limited = fit.samples * GROWTH, 0
        return "stalled" if is_stalled else None

    def _is_stalled(self) -> bool:
        """Whether the last steps, on as many samples each, gained next to nothing together."""
        recent = self.fit.history[-STALL_WINDOW:]
        if len(recent) < STALL_WINDOW or recent[0]["samples"] != self.fit.samples:
            return False
        if self.source.is_fresh:
            return not any(record["accepted"] for record in recent)
        return self.fit.loss >= (1 - STALL_GAIN) * float(recent[0]["loss"])

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
        """Leave the better of the last and the best parameters in the model, with the loss there."""
        fit = self.fit
        if fit.steps == 0:
            return
        data = self.validation or self._draw(lambda: self.source.draw(fit.samples))
        last, judged = self.parameters(), float(self.loss_on(data))
        if self.best is not None and (self.source.is_fresh or self.validation is not None):
            self.load_parameters(self.best[1])
            other = float(self.loss_on(data))
            if not other < judged:
                self.load_parameters(last)
            judged = other if other < judged else judged
        if self.validation is not None:
            judged = float(self.loss_on(self._draw(lambda: self.source.draw(fit.samples))))
        fit.loss = judged

    def state(self) -> dict[str, Any]:
        random = {} if self.random is None else {"random": self.random.cpu}
        return {**super().state(), "limited": self.limited, **random}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.limited = state["limited"]
        if "random" in state and self.random is not None:
            self.random = self.random._replace(cpu=state["random"])
