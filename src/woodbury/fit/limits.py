"""Where a fit stops, and the line that shows how far it is."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace

from woodbury._choice import check_number, check_whole_number
from woodbury.fit.result import Fit


@dataclass(frozen=True)
class Limits:
    """Where to stop: whichever comes first."""

    steps: int | None = None
    seconds: float | None = None
    tolerance: float | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "seconds", "tolerance", "epochs"):
            value = getattr(self, name)
            if value is not None and value != math.inf:
                check_number(f"fit: {name}", value)
        if self.steps is not None:
            check_whole_number("fit: steps", self.steps)

    def or_else(self, **budget: float) -> Limits:
        """These, or where there is no budget at all this one as well."""
        budgets = (self.steps, self.seconds, self.epochs)
        return self if any(own is not None for own in budgets) else replace(self, **budget)  # type: ignore[arg-type]

    def reached(self, steps: int, seconds: float, epochs: float = 0.0) -> str | None:
        """The budget that is used up, if one is."""
        for name, value in (("steps", steps), ("epochs", epochs), ("seconds", seconds)):
            limit = getattr(self, name)
            if limit is not None and value >= limit:
                return name
        return None

    def share(self, steps: int, seconds: float, epochs: float) -> float:
        """How much of the budget is used up, from 0 to 1."""
        pairs = ((steps, self.steps), (seconds, self.seconds), (epochs, self.epochs))
        return min(1.0, max((value / limit if limit else 1.0) for value, limit in pairs if limit is not None))

    def seconds_left(self, steps: int, seconds: float, epochs: float = 0.0) -> float:
        """An estimate from the steps so far."""
        share = self.share(steps, seconds, epochs)
        left = [] if self.seconds is None else [self.seconds - seconds]
        if share > 0:
            left.append(seconds * (1 - share) / share)
        return max(0.0, min(left, default=math.inf))


class Progress:
    """One line on stderr: rewritten in a terminal, else a new one now and then."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._terminal = sys.stderr.isatty()
        self._shown, self._width = -math.inf, 0

    def show(self, fit: Fit, state: str, epochs: float = 0.0) -> None:
        """Show the loss, what else there is to say, and the time left, if it is time."""
        now = time.perf_counter()
        if now - self._shown < (0.2 if self._terminal else 10.0):
            return
        self._shown = now
        left = self._limits.seconds_left(fit.steps, fit.seconds, epochs)
        known = f", at most {left:.0f} s left" if math.isfinite(left) else ""
        last = fit.history[-1].get("validation") if fit.history else None
        judged = ("" if last is None else f", validation {last:.3e}") + fit.metrics_shown
        self._write(f"step {fit.steps}: loss {fit.loss:.3e}{judged}, {state}, {fit.seconds:.1f} s{known}")

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
