"""Fits whose weight decay, and for squared error the noise, follow from the evidence: trainbr, for any loss.

Levenberg-Marquardt steps on all of the data, and between them MacKay's iteration (`TrainingData.update`) for the
noise and for one precision per parameter tensor, delta, which is the weight decay 2 s delta / (n C) of `MSELoss`
and delta / n of `CrossEntropyLoss`. It ends when the evidence rises no more: nothing has to be held out. A robust
loss has a scale, found as if it were half a squared error: right for small residuals, else up to twice too large.

The iteration has several ends: from a stiff prior all parameters may vanish, from a flexible one noise may be
memorised. So it begins a few times, from priors of different stiffness, for some steps each; the one with the
largest evidence goes on. Where a constant has a larger one in the end, a last start follows, from a stiffer prior.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch
from woodbury._process import level_of_caller
from woodbury.fit.pace import Pace
from woodbury.fit.run import Run
from woodbury.fit.sources import Data
from woodbury.model.fallback import Forward
from woodbury.optim import GaussNewton, StepInfo
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.posterior import Posterior, TrainingData
from woodbury.products import is_sum

FIRST_STEPS, STEPS = 8, 3  # before the first update of the prior, and between two
UPDATES = 2  # of prior and noise, at the same parameters
WINDOW = 3  # updates over which the evidence must rise
TOLERANCE = 1e-3  # by this for every number that is predicted
DAMPING = LevenbergMarquardt(initial=1e-3, boost=3.0, drop=0.3, floor=1e-15, relative=True)
LEAST_RATIO = 1e-4  # to move at all
LEAST, MOST = 1e-4, 1e8  # bounds of precisions
SMALLEST_TARGETS = 0.01
LEAST_NOISE = 1e-8  # of the variance of the targets: below, rounding would decide about the prior
WITH_SCALE = nn.MSELoss | nn.HuberLoss | nn.SmoothL1Loss | nn.L1Loss  # which follows from the data as noise does
NOT_DEFINITE = (
    "by weight_decay='evidence' prior and noise came to a posterior that is not positive definite in float64: "
    "targets are far from (-1, 1), or without noise. Ways out: woodbury.Scale.targets(y) as the last layer of the "
    "model, a number in place of 'evidence', or validation=0.2 with it"
)


class Start(NamedTuple):
    """Where the iteration begins."""

    precision: float
    noise: float  # variance, over that of the targets
    parameters: Mapping[str, Tensor] | None = None  # by default those of the model


STARTS = (Start(1.0, 0.3), Start(3.0, 1.0), Start(0.1, 0.1), Start(0.01, 0.01))
STIFF = 1000.0  # precision of a last start, for many columns and weak signals: the others end in noise there
NOTHING = 1e-4  # of the variance of the targets, or where they have no noise of 1: what differs less is constant
TRIAL_STEPS = 50  # of each, unless its evidence rises no more before
LEAST_TRIAL = 40  # steps in all for each start, or there are fewer


class EvidenceRun(Run):
    """Levenberg-Marquardt steps, and updates of prior and noise between them."""

    kind: ClassVar[str] = "a pair, by the evidence"
    smallest_targets: ClassVar[float] = SMALLEST_TARGETS

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Data,
        *,
        forward: Forward | None = None,
        fallback: str | None = None,
        starts: Sequence[Start] = STARTS,
        most_steps: float = math.inf,  # of one start
        tolerance: float = TOLERANCE,
        number_count: float | None = None,  # of numbers that are predicted, where samples have weights
        **shared: Any,
    ) -> None:
        self.names = [name for name, own in model.named_parameters() if own.requires_grad]
        groups = [{"params": [own]} for own in model.parameters() if own.requires_grad]
        settings: dict[str, Any] = {"params": groups, "damping": DAMPING, "accept": LEAST_RATIO}
        optimizer = GaussNewton(model, loss, forward=forward, fallback=fallback, **settings)
        super().__init__(optimizer, **shared)
        if self.group.size > 1:
            raise ValueError("fit: weight_decay='evidence' is for one process: pass a number, and a loader")
        self.data, self.fallback, self.tolerance, self.most_steps = data, fallback, tolerance, most_steps
        self.fit.samples = _batch.sample_count(data[0])
        rows, value = self._rows(), self.evaluate([data])
        self.number_count = rows.number_count if number_count is None else number_count
        self.divisor = rows.total / value if value else self.number_count  # of the sum, to get the loss
        self.variance: float | None = None  # of the targets, or the loss of their mean: for losses with a scale
        self.of_constant = math.inf  # the log likelihood of the best one, where it is known
        if isinstance(loss, WITH_SCALE) and data[1] is not None:
            targets = data[1].double()
            centre = targets.mean(0) * float(number_count is None)  # which weighted targets have lost already
            value = float(loss(centre.expand_as(targets), targets))
            self.variance = value / (self.number_count if is_sum(loss) else 1.0) or 1.0
            self.of_constant = -0.5 * self.number_count * (1 + math.log(2 * math.pi * self.variance))
        elif isinstance(loss, nn.CrossEntropyLoss) and len(rows.output_shape) == 1:
            masses = rows.class_masses.sum(0)
            self.of_constant = float(torch.special.xlogy(masses, masses / masses.sum()).sum())
        self._warn_of_time()
        if self.limits.steps is not None:
            starts = starts[: max(1, self.limits.steps // LEAST_TRIAL)]
        self.first = self.parameters(), copy.deepcopy(optimizer.state_dict())
        self.trials: list[dict[str, Any]] = []  # the starts that were tried
        self.waiting = [*starts[1:], Start(STIFF, 1.0, starts[0].parameters)]
        self._begin(starts[0])

    def _warn_of_time(self) -> None:
        """Before the first step: say how long steps take where the time ends before the first update."""
        pace = Pace(self.optimizer, self.data, self.fit.samples)
        needed = pace.seconds_beyond(self.limits.seconds, FIRST_STEPS)
        if needed is not None:
            warnings.warn(
                f"fit: a step on all {self.fit.samples} samples takes about {needed:.2g} s, and weight_decay="
                f"'evidence' needs {FIRST_STEPS} of them and more: seconds={self.limits.seconds:g} are too few. "
                "Ways out: more seconds, fewer samples, a smaller model, or a number in place of 'evidence'",
                stacklevel=level_of_caller(),
            )
        elif not self.limits.seconds:
            pace.warn_of_slow_steps()

    def _begin(self, start: Start) -> None:
        parameters, optimizer = self.first
        self.load_parameters(parameters if start.parameters is None else start.parameters)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        self.precisions = dict.fromkeys(self.names, start.precision)
        self.noise = None if self.variance is None else start.noise * self.variance
        self.steps, self.updated = 0, 0  # steps of this start, and before the last update
        self.evidence: list[float] = []
        self.effective, self.at = 0.0, 0  # gamma; the last step in the count of all
        self._set_decay()

    def _rows(self, model: nn.Module | None = None) -> TrainingData:
        with self.in_mode(training=False):
            return TrainingData(
                self.model if model is None else model,
                self.optimizer.loss,
                forward=self.optimizer.forward,
                fallback=self.fallback,
                inputs=self.data[0],
                targets=self.data[1],
                check=False,
            )

    def _set_decay(self) -> None:
        """delta of the posterior as weight decay of the loss."""
        factor = 1.0 if self.noise is None else 1 / (2 * self.noise)
        for group, precision in zip(self.optimizer.param_groups, self.precisions.values(), strict=True):
            group["weight_decay"] = precision / (factor * self.divisor)

    @property
    def has_settled(self) -> bool:
        """Whether the evidence rises no more."""
        rises = self.evidence[-1 - WINDOW :]
        return len(rises) > WINDOW and rises[-1] - rises[0] < self.tolerance * self.number_count

    def reached(self) -> str | None:
        if self.has_settled:
            return "evidence"
        return "steps" if self.steps >= self.most_steps else super().reached()

    def advance(self) -> Callable[[], str | None]:
        info = self.optimizer.step(*self.data)
        self.fit.steps, self.steps = self.fit.steps + 1, self.steps + 1
        self.at = self.fit.steps
        due = self.steps - self.updated >= (STEPS if self.updated else FIRST_STEPS)
        if due or self.steps >= self.most_steps:
            self._update()
        return lambda: self._note(info)

    @property
    def _goes_on(self) -> bool:
        """Whether this is the best start, and the stiff one waits for its end."""
        return len(self.waiting) == 1 and not self.trials

    def _next_start(self) -> None:
        """Where the trial of a start is over: the next one, or the best; the stiff one if a constant is better."""
        if not (self.waiting or self.trials) or not self.evidence:
            return
        goes_on = self._goes_on
        if goes_on:
            is_over = self.has_settled and self.evidence[-1] <= self.of_constant
        else:
            is_over = self.has_settled or self.steps >= min(TRIAL_STEPS, self.most_steps)
        if is_over:
            self.trials.append(self._start_state())
            if goes_on or len(self.waiting) > 1:
                self._begin(self.waiting.pop(0))
            else:
                self._take_best()
                self._next_start()

    def _take_best(self) -> None:
        best = max(self.trials, key=lambda trial: trial["evidence"][-1])
        self.trials = []
        self._load_start(best)
        self.load_parameters(best["parameters"])

    def _update(self) -> None:
        rows = self._rows()
        rows.number_count = self.number_count
        for _ in range(UPDATES):
            try:
                update = rows.update(self.precisions, self.noise)
            except ValueError as error:
                raise ValueError(f"fit: {NOT_DEFINITE}") from error
            self.precisions = {name: min(max(own, LEAST), MOST) for name, own in update.precisions.items()}
            if update.noise is not None and self.variance is not None:
                self.noise = max(update.noise, LEAST_NOISE * self.variance)
        self.evidence.append(update.log_evidence)
        self.effective, self.updated = update.determined, self.steps
        self._set_decay()

    def _note(self, info: StepInfo) -> str | None:
        fit, numbers = self.fit, info.as_dict()
        log_evidence = self.evidence[-1] if self.evidence else None
        own = {"accepted": numbers["accepted"], "noise": self.noise, "log_evidence": log_evidence}
        record = self.note(float(numbers["loss"]), **own)
        fit.loss = self.evaluate([self.data])
        self.measure(record)
        if self.limits.tolerance is not None and fit.loss <= self.limits.tolerance:
            return "tolerance"
        self._next_start()
        return None

    def shown(self) -> tuple[str, float]:
        is_trial = (self.trials or self.waiting) and not self._goes_on
        return f"start {len(self.trials) + 1}" if is_trial else "the best start", 0.0

    def finish(self) -> None:
        fit = self.fit
        if self.steps > self.updated:
            self._update()
        if self.trials and self.evidence:
            self.trials.append(self._start_state())
        if self.trials:
            self._take_best()
        seen: list[Data] = []
        fit.best_step, fit.loss = self.at if self.steps else 0, self.evaluate([self.data], seen)
        if self.evidence:
            fit.noise, fit.effective_parameters, fit.log_evidence = self.noise, self.effective, self.evidence[-1]
            self._warn_of_constant(seen[0][0])
        if self.validation is not None:
            fit.validation = self.validation_loss()
        kept = copy.deepcopy(self.model).eval()  # the caller may change model and data before a posterior is made
        self.data = pytree.tree_map_only(Tensor, Tensor.clone, self.data)
        fit.make_posterior = lambda: self.posterior(kept)

    def _warn_of_constant(self, outputs: Tensor) -> None:
        """After the fit: say where it is a constant."""
        spread, targets = (own.double().var(0, correction=0).max() for own in (outputs, self.data[1]))
        if spread < NOTHING * (1.0 if self.variance is None else targets):
            warnings.warn(
                "fit: the evidence finds nothing but the mean in these data: predictions hardly differ. Ways out: "
                "more samples, fewer columns, another seed, or validation=0.2 in place of 'evidence'",
                stacklevel=level_of_caller(),
            )

    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """That of the model as it is, or of a copy of it."""
        rows = self._rows(copy.deepcopy(self.model).eval() if model is None else model)
        rows.number_count = self.number_count
        return Posterior(rows, rows.system(self.precisions, self.noise), dict(self.precisions), self.noise)

    def _start_state(self) -> dict[str, Any]:
        """All about the start under way."""
        names = ("precisions", "noise", "steps", "updated", "evidence", "effective", "at")
        own = {name: copy.copy(getattr(self, name)) for name in names}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return {**own, "parameters": self.parameters(), "optimizer": optimizer}

    def _load_start(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name in set(state) - {"parameters", "optimizer"}:
            setattr(self, name, copy.copy(state[name]))

    def state(self) -> dict[str, Any]:
        waiting = [tuple(own) for own in self.waiting]
        own = {"first": self.first, "start": self._start_state(), "trials": list(self.trials), "waiting": waiting}
        return {**super().state(), **own, "divisor": self.divisor}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        self._load_start(state["start"])
        self.first, self.divisor = state["first"], state["divisor"]
        self.trials, self.waiting = list(state["trials"]), [Start(*own) for own in state["waiting"]]
