"""`woodbury.fit`: data or a sampler in, a fitted model out, with nothing to tune.

The steps are those of `GaussNewton` with a `CurvedSearch`. What is decided here is which samples they get, when to
draw more of them, and when to stop.
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _batch, _random
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward
from woodbury.optim import GaussNewton, StepInfo
from woodbury.products import loss_of
from woodbury.search import CurvedSearch

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

Data = tuple[Any, "Tensor | None"]
Draw = Callable[[int], Any]


@dataclass
class Fit:
    """What `woodbury.fit` reached. The model holds the best parameters."""

    loss: float = math.inf  # of the model as it is; with a sampler on samples drawn at the end
    steps: int = 0
    seconds: float = 0.0  # without those of the callback
    samples: int = 0  # per step, at the end
    reason: str = "running"  # or why it stopped: tolerance, steps, seconds, stalled, callback, interrupted
    history: list[dict[str, Any]] = field(default_factory=list)  # per step: loss before it, length, samples, ...
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def state_dict(self) -> dict[str, Any]:
        """What `fit(..., resume=...)` needs to go on: plain numbers, lists and tensors, for torch.save."""
        return {**self.state, "steps": self.steps, "seconds": self.seconds, "samples": self.samples} | {
            "history": [dict(record) for record in self.history]
        }

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3g} after {self.steps} steps, {self.seconds:.1f} s, {self.samples} samples per "
            f"step: {_REASONS.get(self.reason, self.reason)}"
        )


_REASONS = {
    "tolerance": "the tolerance is reached",
    "steps": "all steps are taken",
    "seconds": "the time is up",
    "stalled": "nothing moves any more",
    "callback": "the callback asked to stop",
    "interrupted": "interrupted",
}


class Source(ABC):
    """Where the samples of a step come from."""

    @abstractmethod
    def batches(self, count: int) -> tuple[Data, Data | None]:
        """The batch of a step, and the samples held out to judge it, if others than the batch."""

    @abstractmethod
    def final(self, count: int) -> Data:
        """Samples to measure the loss on at the end."""

    grows: bool = False  # whether it can give more samples
    exact: bool = False  # whether the loss of a batch is the loss itself


@dataclass
class FullBatch(Source):
    """The same samples at every step, which judge it as well."""

    data: Data
    exact = True

    def batches(self, count: int) -> tuple[Data, Data | None]:
        return self.data, None

    def final(self, count: int) -> Data:
        return self.data


@dataclass
class Sampler(Source):
    """Fresh samples at every step, and as many others to judge it."""

    draw: Draw
    grows = True

    def batches(self, count: int) -> tuple[Data, Data | None]:
        return self.final(count), self.final(count)

    def final(self, count: int) -> Data:
        drawn = self.draw(count)
        if isinstance(drawn, Tensor):
            return drawn, None
        if not isinstance(drawn, tuple | list) or len(drawn) != 2:
            raise TypeError(
                f"fit: draw({count}) must return a pair (inputs, targets), targets None for zeros, got "
                f"{type(drawn).__name__}"
            )
        return drawn[0], drawn[1]


def fit(
    model: nn.Module,
    loss: nn.Module,
    data: Data | Draw,
    *,
    forward: Forward | None = None,
    fallback: str | None = "autograd",
    weight_decay: float = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    seconds: float | None = None,
    tolerance: float | None = None,
    samples: int | None = None,
    validation: Data | None = None,
    progress: bool = True,
    seed: int | None = None,
    callback: Callable[[Fit], Any] | None = None,
    resume: Mapping[str, Any] | None = None,
) -> Fit:
    """Fit a model to data, or to the samples that a function draws, to as many digits as there are.

    >>> fit = woodbury.fit(model, torch.nn.MSELoss(), (inputs, targets), tolerance=1e-12)
    >>> print(fit)
    loss 7.07e-13 after 23 steps, 0.6 s, 200 samples per step: the tolerance is reached

    Every step is one of `GaussNewton(model, loss, search=CurvedSearch())` on all of the data, or on fresh samples
    with as many others to judge it. It stops at whichever limit comes first, or when nothing moves any more;
    Ctrl-C stops it too, and what was reached is returned. Use float64 (`model.double()`) for many digits.

    Args:
        model: any module; it is trained in place and ends with the best parameters.
        loss: one that `GaussNewton` takes, or one added by `register_loss`.
        data: (inputs, targets), used whole at every step; or a function draw(count) that returns as many fresh
            samples, (inputs, targets), with targets None for zeros (the residuals of a differential equation).
        forward: f(model, inputs) in place of model(inputs).
        fallback: as in `GaussNewton`; None refuses parameters that no layer rule covers.
        weight_decay: adds weight_decay |theta|^2 / 2 to the loss.
        steps, seconds, tolerance: where to stop: a number of steps, a time, or a loss (300 steps if neither of the
            first two is given). After `resume` steps and seconds count from the very first.
        epochs: for mini-batches from a loader, which `fit` does not take yet.
        samples: how many to draw at first; by default 1.5 per parameter, at least 256 and at most 4096 (32768 on a
            GPU). There are four times as many, up to 8 per parameter, after three steps in a row that the samples
            limit: other samples promise less than half of what the batch promises, or lengths are 1/16 or less.
        validation: (inputs, targets); then the best parameters are those with the lowest loss on them.
        progress: show loss, length, samples and the time left on stderr.
        seed: of the samples drawn; by default they follow torch.manual_seed.
        callback: called with the `Fit` so far after every step; a true result stops. Its time does not count.
        resume: the `state_dict()` of an earlier `Fit` of the same model, to go on from there.

    Returns:
        a `Fit`: loss, steps, seconds, samples, reason, history.
    """
    source = _source_of(data, epochs)
    limits = Limits(steps, seconds, tolerance)
    parameters = [own for own in model.parameters() if own.requires_grad]
    dtype = parameters[0].dtype if parameters else torch.float64
    optimizer = GaussNewton(
        model,
        loss,
        forward=forward,
        fallback=fallback,
        weight_decay=weight_decay,
        search=CurvedSearch(),
        gram_dtype=torch.float64 if dtype == torch.float32 else None,
        seed=seed,
    )
    size = sum(own.numel() for own in parameters)
    count = _first_count(source, samples, size, parameters[0].device if parameters else torch.device("cpu"))
    run = _Run(optimizer, source, limits, validation, seed, callback, count)
    if resume is not None:
        run.load(resume)
    return run.go(_Progress(limits) if progress else None)


@dataclass(frozen=True)
class Limits:
    """Where to stop."""

    steps: int | None
    seconds: float | None
    tolerance: float | None

    def __post_init__(self) -> None:
        for name in ("steps", "seconds", "tolerance"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"fit: {name} must be a number, got {value!r}")
            if not value >= 0:
                raise ValueError(f"fit: {name} must not be negative, got {value}")
        if self.steps is not None and not isinstance(self.steps, int):
            raise TypeError(f"fit: steps must be a whole number, got {self.steps!r}")
        if self.steps is None and self.seconds is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)

    def reached(self, steps: int, seconds: float) -> str | None:
        """The budget that is used up, if one is."""
        if self.steps is not None and steps >= self.steps:
            return "steps"
        return "seconds" if self.seconds is not None and seconds >= self.seconds else None

    def seconds_left(self, steps: int, seconds: float) -> float:
        """An estimate from the steps so far."""
        left = [] if self.seconds is None else [self.seconds - seconds]
        if self.steps is not None:
            left.append((self.steps - steps) * seconds / max(1, steps))
        return max(0.0, min(left))


def _source_of(data: Any, epochs: float | None) -> Source:
    """The kind of data, by what it is."""
    if isinstance(data, tuple | list) and len(data) == 2 and not callable(data):
        _batch.check_batch(data[0], data[1])
        source: Source = FullBatch((data[0], data[1]))
    elif callable(data):
        source = Sampler(data)
    elif isinstance(data, Iterable) and not isinstance(data, Tensor):
        raise TypeError(
            f"fit: {type(data).__name__} gives mini-batches, which fit does not take yet: pass (inputs, targets), "
            "or a function draw(count)"
        )
    else:
        raise TypeError(
            f"fit: data must be a pair (inputs, targets) or a function draw(count), got {type(data).__name__}"
        )
    if epochs is not None:
        raise ValueError("fit: epochs= is for mini-batches, which fit does not take yet: use steps= or seconds=")
    return source


def _first_count(source: Source, samples: int | None, size: int, device: torch.device) -> int:
    """How many samples the first step gets."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise ValueError(f"fit: samples must be a whole number from 1 on, got {samples!r}")
    if not source.grows:
        if samples is not None:
            raise ValueError("fit: samples= is for a function that draws them; the data given is used whole")
        return _batch.sample_count(source.final(0)[0])
    most = MOST if device.type == "cpu" else MOST_ON_DEVICE
    return min(max(round(FIRST_ROWS * size), FEWEST), most) if samples is None else samples


_STATE = {"parameters", "optimizer", "limited", "steps", "seconds", "samples", "history"}


class _Run:
    """The loop of `fit`, and what it must remember."""

    def __init__(
        self,
        optimizer: GaussNewton,
        source: Source,
        limits: Limits,
        validation: Data | None,
        seed: int | None,
        callback: Callable[[Fit], Any] | None,
        count: int,
    ) -> None:
        self.optimizer, self.model, self.source, self.limits = optimizer, optimizer.model, source, limits
        self.validation, self.callback = validation, callback
        self.fit = Fit(samples=count)
        self.random: _random.Snapshot | None = None  # of the samples, if they have a seed
        if seed is not None:
            device = next(self.model.parameters()).device
            now = _random.snapshot(device)
            torch.manual_seed(seed)
            self.random = _random.snapshot(device)
            _random.restore(now)
        self.size = sum(own.numel() for own in self.model.parameters() if own.requires_grad)
        self.limited = 0  # steps in a row that the samples limited
        self.best: tuple[float, dict[str, Tensor]] | None = None  # the lowest loss seen, and where

    def go(self, progress: _Progress | None) -> Fit:
        """Take steps until there is a reason to stop."""
        fit, started = self.fit, time.perf_counter() - self.fit.seconds
        fit.reason = "running"
        try:
            while fit.reason == "running":
                reason = self.limits.reached(fit.steps, fit.seconds)
                if reason is not None:
                    fit.reason = reason
                    break
                batch, held_out = self._draw(lambda: self.source.batches(fit.samples))
                info = self.optimizer.step(*batch, held_out=held_out)
                fit.seconds = time.perf_counter() - started
                self._note(info, held_out)
                if progress is not None:
                    progress.show(fit)
                if self.callback is not None and self.callback(fit):
                    fit.reason = "callback"
                started = time.perf_counter() - fit.seconds
        except KeyboardInterrupt:
            fit.reason = "interrupted"
        self._finish()
        if progress is not None:
            progress.end(fit)
        return fit

    def _note(self, info: StepInfo, held_out: Data | None) -> None:
        """Record a step, and decide whether to stop or to draw more."""
        fit, numbers = self.fit, info.as_dict()
        fit.steps += 1
        before, gained = float(numbers["loss"]), float(numbers["ratio"]) * float(numbers["predicted"])
        record = {"step": fit.steps, "seconds": fit.seconds, "loss": before, "samples": fit.samples}
        record |= {name: numbers[name] for name in ("length", "share", "bent", "accepted")}
        fit.loss = before
        if self.source.exact and numbers["accepted"]:
            fit.loss = max(0.0, before - gained)
        judged = fit.loss
        if self.validation is not None:
            record["validation"] = judged = self._loss_on(self.validation)
        fit.history.append(record)
        if self.best is None or judged < self.best[0]:
            self.best = judged, self._parameters()
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            fit.reason = "tolerance"
        elif self._is_stalled():
            fit.reason = "stalled"
        agreement = self.optimizer.state.get("search", {}).get("agreement", 1.0)
        short = before < 0.01 * fit.history[0]["loss"] and float(numbers["length"]) <= SHORT
        self.limited = self.limited + 1 if agreement < LIMITED or short else 0
        if self.source.grows and self.limited >= LIMITED_STEPS and GROWTH * fit.samples <= MOST_ROWS * self.size:
            fit.samples, self.limited = fit.samples * GROWTH, 0

    def _is_stalled(self) -> bool:
        """Whether the last steps, on as many samples each, gained next to nothing together."""
        recent = self.fit.history[-STALL_WINDOW:]
        if len(recent) < STALL_WINDOW or recent[0]["samples"] != self.fit.samples:
            return False
        if not self.source.exact:
            return not any(record["accepted"] for record in recent)
        return self.fit.loss >= (1 - STALL_GAIN) * recent[0]["loss"]

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

    def _parameters(self) -> dict[str, Tensor]:
        return {name: own.detach().clone() for name, own in self.model.named_parameters()}

    def _load_parameters(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.model.named_parameters():
                own.copy_(values[name])

    def _loss_on(self, data: Data) -> float:
        """The loss itself, by a pass through the model without gradients where that is possible."""
        optimizer = self.optimizer
        inputs, targets = data
        with torch.set_grad_enabled(optimizer.forward is not call_model):
            outputs = optimizer.forward(self.model, inputs)
            value = loss_of(optimizer.loss, outputs, targets)
        return float(value.detach())

    def _finish(self) -> None:
        """Leave the better of the last and the best parameters in the model, with the loss there."""
        fit = self.fit
        fit.state = self._state()
        if fit.steps == 0:
            return
        data = self.validation or self._draw(lambda: self.source.final(fit.samples))
        last, judged = self._parameters(), self._loss_on(data)
        if self.best is not None and (self.source.grows or self.validation is not None):
            self._load_parameters(self.best[1])
            other = self._loss_on(data)
            if not other < judged:
                self._load_parameters(last)
            judged = other if other < judged else judged
        if self.validation is not None:
            judged = self._loss_on(self._draw(lambda: self.source.final(fit.samples)))
        fit.loss = judged

    def _state(self) -> dict[str, Any]:
        best = {} if self.best is None else {"best_loss": self.best[0], "best": self.best[1]}
        random = {} if self.random is None else {"random": self.random.cpu}
        own = {"parameters": self._parameters(), "optimizer": self.optimizer.state_dict()}
        return {**own, "limited": self.limited, **best, **random}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `Fit.state_dict`."""
        names = {name for name, _ in self.model.named_parameters()}
        if not isinstance(state, Mapping) or not set(state) >= _STATE:
            raise ValueError("fit: resume must be the state_dict() of an earlier Fit")
        if set(state["parameters"]) != names:
            odd = sorted(names ^ set(state["parameters"]))[0]
            raise ValueError(f"fit: resume is of another model: parameter {odd!r} is not in both")
        self._load_parameters(state["parameters"])
        self.optimizer.load_state_dict(state["optimizer"])
        fit = self.fit
        fit.steps, fit.seconds, fit.samples = state["steps"], state["seconds"], state["samples"]
        fit.history = [dict(record) for record in state["history"]]
        self.limited = state["limited"]
        if "best" in state:
            self.best = state["best_loss"], dict(state["best"])
        if "random" in state and self.random is not None:
            self.random = self.random._replace(cpu=state["random"])


class _Progress:
    """One line on stderr: rewritten in a terminal, else a new one now and then."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._terminal = sys.stderr.isatty()
        self._shown, self._width = -math.inf, 0

    def show(self, fit: Fit) -> None:
        now = time.perf_counter()
        if now - self._shown < (0.2 if self._terminal else 10.0):
            return
        self._shown = now
        record = fit.history[-1]
        left = self._limits.seconds_left(fit.steps, fit.seconds)
        path = "bent" if record["bent"] else "straight"
        self._write(
            f"step {fit.steps}: loss {fit.loss:.3e}, length {record['length']:.3g} ({path}), "
            f"{record['samples']} samples, {fit.seconds:.1f} s, at most {left:.0f} s left"
        )

    def _write(self, line: str) -> None:
        if self._terminal:  # over the line before
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._width = len(line)

    def end(self, fit: Fit) -> None:
        self._write(str(fit))
        if self._terminal:
            print(file=sys.stderr, flush=True)
