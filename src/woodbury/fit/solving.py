"""Fits of residuals on points that are drawn: steps with a search on more and more points, and plain ones before.

Far from a solution a searched step may be dear and short. Where the first ones creep, Levenberg-Marquardt steps
follow, taken if they gain, as long as they gain enough, and then searched steps for good. There are twice as many
points after two searched steps in a row that the points limit: where other points promise less than half of what
the batch promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from woodbury import _random
from woodbury.fit.equations import TermSource
from woodbury.fit.limits import Limits
from woodbury.fit.run import Callback, Run
from woodbury.optim import GaussNewton, StepInfo
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.policies.search import CurvedSearch

PLAIN = LevenbergMarquardt(initial=1e-2, boost=3.0, drop=1 / 3, floor=1e-10)
LOOKED_AT = 24  # searched steps at first, of which
SHORT, SHORT_STEPS = 1 / 8, 3  # if so many in a row are shorter than this, and
FEW, LITTLE = 8, 1.0  # so many take less than this off the logarithm of the loss, plain steps follow:
WINDOW = 32  # twice as many at least, and on as long as this many
WORTH = 1.0  # take so much off the logarithm of the loss
FIRST, FIRST_ON_DEVICE = 512, 8192  # points of a step at first
GROWTH = 2  # times the points, after a step that they limit:
LIMITED = 0.5  # where other points promise less than this of what the batch promises
LIMITED_STEPS = 2  # so many steps in a row
MOST_ROWS = 8  # points per parameter at most: more of them add little to the curvature
BALANCED_AT = frozenset(2**power for power in range(3, 20))  # steps before which weights balance themselves anew
STALLED = 12  # searched steps in a row that were rejected: nothing moves any more


_COURSE = ("phase", "since", "rejected", "limited", "weights")  # what `resume` needs


class SolvingRun(Run):
    """Plain steps, then steps with a search."""

    needed: ClassVar[set[str]] = Run.needed | {"plain", "course"}

    def __init__(
        self,
        source: TermSource,
        limits: Limits,
        callback: Callback | None,
        seed: int | None,
        samples: int | None,
        **settings: Any,
    ) -> None:
        model, loss = source.model, nn.MSELoss()
        wide = torch.float64 if source.like.dtype == torch.float32 else None
        settings = {**settings, "forward": source.forward, "gram_dtype": wide, "seed": seed}
        super().__init__(GaussNewton(model, loss, search=CurvedSearch(), **settings), limits, callback)
        self.plain = GaussNewton(model, loss, damping=PLAIN, accept=0.0, guard=None, **settings)
        self.source = source
        self.size = sum(own.numel() for own in model.parameters() if own.requires_grad)
        first = FIRST if source.like.device.type == "cpu" else FIRST_ON_DEVICE
        self.fit.samples = min(first, max(64, MOST_ROWS * self.size)) if samples is None else samples
        self.random: _random.Snapshot | None = None  # of the points, if they have a seed
        if seed is not None:
            now = _random.snapshot(source.like.device)
            torch.manual_seed(seed)
            self.random = _random.snapshot(source.like.device)
            _random.restore(now)
        self.phase, self.since = "look" if source.is_fresh else "search", 0  # the steps before a phase
        self.rejected = self.limited = 0  # steps in a row

    @property
    def weights(self) -> dict[str, float]:
        return self.source.weights

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        self.source.weights = dict(weights)

    def reached(self) -> str | None:
        return self.limits.reached(self.fit.steps, self.fit.seconds)

    def advance(self) -> Callable[[], str | None]:
        if self.fit.steps in BALANCED_AT:
            self._draw(self.source.balance)
        batch = self._draw(lambda: self.source.batch(self.fit.samples))
        loss = self.source.loss()
        self._decide(loss)
        if self.phase == "plain":
            info = self.plain.step(*batch)
        else:
            others = self._draw(lambda: self.source.batch(self.fit.samples)) if self.source.is_fresh else None
            info = self.optimizer.step(*batch, held_out=others)
        return lambda: self._note(info, loss)

    def _decide(self, loss: float) -> None:
        """Whether the next step is a plain one."""
        history, begun = self.fit.history, len(self.fit.history) - self.since
        if self.phase == "look" and begun >= FEW:
            is_short = all(float(record["length"]) < SHORT for record in history[-SHORT_STEPS:])
            if is_short and math.log(history[-FEW]["loss"] / loss) < LITTLE:
                self.phase, self.since = "plain", len(history)
            elif begun >= LOOKED_AT:
                self.phase = "search"
        elif self.phase == "plain" and begun >= 2 * WINDOW and math.log(history[-WINDOW]["loss"] / loss) < WORTH:
            self.phase = "search"

    def shown(self) -> tuple[str, float]:
        record = self.fit.history[-1]
        return f"{record['kind']} step, {record['samples']} points", 0.0

    def _note(self, info: StepInfo, loss: float) -> str | None:
        fit, numbers, is_plain = self.fit, info.as_dict(), self.phase == "plain"
        fit.steps += 1
        fit.loss = loss
        record = {"step": fit.steps, "seconds": fit.seconds, "loss": loss, "samples": fit.samples}
        record |= {"kind": "plain" if is_plain else "searched", "terms": self.source.mean_squares()}
        record |= {name: numbers.get(name) for name in ("length", "share", "bent", "accepted")}
        fit.history.append(record)
        if self.best is None or loss < self.best[0]:
            self.best = loss, self.parameters()
        if self.limits.tolerance is not None and loss <= self.limits.tolerance:
            return "tolerance"
        if is_plain:
            return None
        self.rejected = 0 if numbers["accepted"] else self.rejected + 1
        agreement = self.optimizer.state.get("search", {}).get("agreement", 1.0)
        self.limited = self.limited + 1 if agreement < LIMITED else 0
        if (
            self.source.is_fresh
            and self.limited >= LIMITED_STEPS
            and GROWTH * fit.samples <= MOST_ROWS * self.size
        ):
            fit.samples, self.rejected, self.limited = fit.samples * GROWTH, 0, 0
        return "stalled" if self.rejected >= STALLED else None

    def finish(self) -> None:
        """Leave the better of the last and the best parameters in the model, with the loss there."""
        if self.fit.steps == 0:
            return
        data = self._draw(lambda: self.source.draw(self.fit.samples))
        last, judged = self.parameters(), float(self.loss_on(data))
        if self.best is not None:
            self.load_parameters(self.best[1])
            other = float(self.loss_on(data))
            if not other < judged:
                self.load_parameters(last)
            judged = min(other, judged)
        self.fit.loss = judged

    def _draw(self, function: Callable[[], Any]) -> Any:
        """function(), with the random numbers of the points."""
        if self.random is None:
            return function()
        now = _random.snapshot(self.random.device)
        _random.restore(self.random)
        try:
            return function()
        finally:
            self.random = _random.snapshot(self.random.device)
            _random.restore(now)

    def state(self) -> dict[str, Any]:
        course = {name: getattr(self, name) for name in _COURSE}
        random = {} if self.random is None else {"random": self.random.cpu}
        return {**super().state(), "plain": self.plain.state_dict(), "course": course, **random}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.plain.load_state_dict(state["plain"])
        for name in _COURSE:
            setattr(self, name, state["course"][name])
        if "random" in state and self.random is not None:
            self.random = self.random._replace(cpu=state["random"])
