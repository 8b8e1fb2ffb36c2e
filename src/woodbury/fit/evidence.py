"""Fits whose weight decay, and for squared error the noise, follow from the evidence: trainbr, for any loss.

Levenberg-Marquardt steps on all of the data, and between them MacKay's iteration (`TrainingData.update`) for the
noise and for one precision per parameter tensor, delta, which is the weight decay 2 s delta / (n C) of `MSELoss`
and delta / n of `CrossEntropyLoss`. It ends when the evidence rises no more: nothing has to be held out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import nn

from woodbury import _batch
from woodbury.fit.limits import Limits
from woodbury.fit.run import Callback, Run, Validation
from woodbury.fit.sources import Data
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward
from woodbury.optim import GaussNewton, StepInfo
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.posterior import Posterior, TrainingData

FIRST_STEPS, STEPS = 8, 3  # before the first update of the prior, and between two
UPDATES = 2  # of prior and noise, at the same parameters
WINDOW = 3  # updates over which the evidence must rise
TOLERANCE = 1e-3  # by this for every number that is predicted
DAMPING = LevenbergMarquardt(initial=1e-3, boost=3.0, drop=0.3, floor=1e-15, relative=True)
LEAST_RATIO = 1e-4  # to move at all
LEAST, MOST = 1e-4, 1e8  # bounds of precisions
LEAST_NOISE = 1e-8  # of the variance of the targets: below, rounding would decide about the prior


class Start(NamedTuple):
    """Where the iteration begins. From a stiff start noisy data is not memorised first."""

    precision: float = 3.0
    noise: float = 1.0  # variance, over that of the targets


class EvidenceRun(Run):
    """Levenberg-Marquardt steps, and updates of prior and noise between them."""

    needed: ClassVar[set[str]] = Run.needed | {"precisions", "noise", "evidence", "updated"}

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Data,
        limits: Limits,
        *,
        forward: Forward | None = None,
        fallback: str | None = None,
        callback: Callback | None = None,
        validation: Validation | None = None,
        start: Start = Start(),  # noqa: B008  (immutable)
        tolerance: float = TOLERANCE,
        number_count: float | None = None,  # of numbers that are predicted, where samples have weights
    ) -> None:
        named = {name: own for name, own in model.named_parameters() if own.requires_grad}
        groups = [{"params": [own]} for own in named.values()]
        settings: dict[str, Any] = {"params": groups, "damping": DAMPING, "accept": LEAST_RATIO}
        optimizer = GaussNewton(model, loss, forward=forward, fallback=fallback, **settings)
        super().__init__(optimizer, limits, callback, validation)
        self.data, self.fallback, self.tolerance = data, fallback, tolerance
        self.fit.samples = _batch.sample_count(data[0])
        self.precisions = dict.fromkeys(named, start.precision)
        self.noise: float | None = None  # variance, for squared error
        self.least_noise = 0.0
        rows = self._rows()
        self.number_count = rows.number_count if number_count is None else number_count
        value = self.evaluate([data])
        self.divisor = rows.total / value if value else self.number_count  # of the sum, to get the loss
        if isinstance(loss, nn.MSELoss) and data[1] is not None:
            centre = data[1].mean(0) if number_count is None else 0.0  # which weighted targets have lost already
            variance = float((data[1] - centre).double().square().sum()) / self.number_count or 1.0
            self.noise, self.least_noise = start.noise * variance, LEAST_NOISE * variance
        self.evidence: list[float] = []
        self.updated = 0  # the step of the last update
        self._set_decay()

    def _rows(self, model: nn.Module | None = None) -> TrainingData:
        forward = self.optimizer.forward
        with self.in_mode(training=False):
            return TrainingData(
                self.model if model is None else model,
                self.optimizer.loss,
                forward=None if forward is call_model else forward,
                fallback=self.fallback,
                max_bytes=None,
                inputs=self.data[0],
                targets=self.data[1],
                check=False,
            )

    def _set_decay(self) -> None:
        """delta of the posterior as weight decay of the loss."""
        factor = 1.0 if self.noise is None else 1 / (2 * self.noise)
        for group, precision in zip(self.optimizer.param_groups, self.precisions.values(), strict=True):
            group["weight_decay"] = precision / (factor * self.divisor)

    def reached(self) -> str | None:
        rises = self.evidence[-1 - WINDOW :]
        if len(rises) > WINDOW and rises[-1] - rises[0] < self.tolerance * self.number_count:
            return "evidence"
        return self.limits.reached(self.fit.steps, self.fit.seconds)

    def advance(self) -> Callable[[], str | None]:
        info = self.optimizer.step(*self.data)
        self.fit.steps += 1
        if self.fit.steps - self.updated >= (STEPS if self.updated else FIRST_STEPS):
            self._update()
        return lambda: self._note(info)

    def _update(self) -> None:
        rows = self._rows()
        rows.number_count = self.number_count
        for _ in range(UPDATES):
            update = rows.update(self.precisions, self.noise)
            self.precisions = {name: min(max(own, LEAST), MOST) for name, own in update.precisions.items()}
            self.noise = None if update.noise is None else max(update.noise, self.least_noise)
        self.evidence.append(update.log_evidence)
        self.fit.effective_parameters, self.fit.log_evidence = update.determined, update.log_evidence
        self.updated = self.fit.steps
        self._set_decay()

    def _note(self, info: StepInfo) -> str | None:
        fit, numbers = self.fit, info.as_dict()
        record: dict[str, Any] = {
            "step": fit.steps,
            "seconds": fit.seconds,
            "loss": float(numbers["loss"]),
            "samples": fit.samples,
        }
        record |= {"accepted": numbers["accepted"], "noise": self.noise, "log_evidence": fit.log_evidence}
        fit.history.append(record)
        fit.loss = self.evaluate([self.data])
        if self.validation is not None:
            record["validation"] = self.validation_loss()
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        return None

    def shown(self) -> tuple[str, float]:
        effective = self.fit.effective_parameters
        return "" if effective is None else f"{effective:.0f} effective parameters", 0.0

    def finish(self) -> None:
        fit = self.fit
        if fit.steps > self.updated:
            self._update()
        fit.best_step, fit.noise, fit.loss = fit.steps, self.noise, self.evaluate([self.data])
        if self.validation is not None:
            fit.validation = self.validation_loss()
        fit.make_posterior = self.posterior

    def posterior(self) -> Posterior:
        """That of the model as it is."""
        rows = self._rows(copy.deepcopy(self.model).eval())
        rows.number_count = self.number_count
        return Posterior(rows, rows.system(self.precisions, self.noise), dict(self.precisions), self.noise)

    def state(self) -> dict[str, Any]:
        own = {"precisions": dict(self.precisions), "noise": self.noise, "evidence": list(self.evidence)}
        return {**super().state(), **own, "updated": self.updated, "samples": self.fit.samples}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        self.precisions, self.noise = dict(state["precisions"]), state["noise"]
        self.evidence, self.updated = list(state["evidence"]), state["updated"]
