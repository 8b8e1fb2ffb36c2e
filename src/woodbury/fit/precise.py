"""Fits to data used whole: steps with a `CurvedSearch`, to many digits.

With validation data `woodbury.fit.descent` says how deep steps go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from woodbury import _batch
from woodbury.fit.descent import Descent, share_gained
from woodbury.fit.limits import Limits
from woodbury.fit.run import SEARCH, Callback, Run, Validation
from woodbury.fit.sources import Data
from woodbury.optim import GaussNewton, StepInfo

DEFAULT_STEPS = 300  # where no budget is given
STALL_WINDOW = 12  # steps that together gain less than STALL_GAIN of the loss: nothing moves any more
STALL_GAIN = 0.01
PATIENCE = 6  # steps without a lower validation loss, as in trainlm


class PreciseRun(Run):
    """Steps with a search, all on the same samples."""

    kind: ClassVar[str] = "a pair"

    def __init__(
        self,
        optimizer: GaussNewton,
        data: Data,
        limits: Limits,
        validation: Validation | None,
        callback: Callback | None,
    ) -> None:
        super().__init__(optimizer, limits, callback, validation)
        self.data = data
        self.fit.samples = _batch.check_batch(*data)
        self.descent = None if validation is None else Descent(optimizer)

    def advance(self) -> Callable[[], str | None]:
        info = self.optimizer.step(*self.data)
        self.fit.steps += 1
        return lambda: self._note(info)

    def _note(self, info: StepInfo) -> str | None:
        """Record a step, and decide whether to stop."""
        fit, numbers = self.fit, info.as_dict()
        record = self.note(float(numbers["loss"]), **{name: numbers[name] for name in SEARCH})
        fit.loss = self.evaluate([self.data])
        self.measure(record)
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        if self.validation is not None and self._is_over(record["validation"], self.validation.patience):
            return "validation"
        return "stalled" if self._is_stalled() else None

    def _is_over(self, judged: float, patience: int) -> bool:
        """Whether the validation loss has stopped falling; plain steps and searched ones may take turns."""
        self.judge(judged)
        assert self.descent is not None and self.best is not None
        was_plain = not self.descent.in_search
        back = self.descent.next(self.best, self.waited)
        if back is not None:
            self.best, self.waited = back, 0
            self.load_parameters(back.parameters)
        return was_plain and self.waited >= patience

    def _is_stalled(self) -> bool:
        """Whether the last steps gained next to nothing together."""
        recent = self.fit.history[-STALL_WINDOW:]
        if len(recent) < STALL_WINDOW:
            return False
        if self.descent is not None:
            return not any(record["accepted"] for record in recent)
        return share_gained(float(recent[0]["loss"]), self.fit.loss) <= STALL_GAIN

    def finish(self) -> None:
        self.fit.best_step = self.fit.steps
        if self.validation is not None:
            self.fit.validation = self.take_best(self.validation_loss)
        self.fit.loss = self.evaluate([self.data])

    def state(self) -> dict[str, Any]:
        return {**super().state(), **({} if self.descent is None else {"descent": self.descent.state()})}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        if self.descent is not None and "descent" in state:
            self.descent.load(state["descent"])
