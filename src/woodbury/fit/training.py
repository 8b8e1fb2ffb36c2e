"""Training in mini-batches: momentum, a rate that falls to zero over the budget, relative damping.

    p      minimises the damped model around 0.9 p_prev (momentum)
    theta  moves by alpha p, alpha = 0.3 (1 - share of the budget that is used up)^(1/2)
    lambda = (value + 0.0003) scale of K, the value 0.03 at first, by the Levenberg-Marquardt rule
    B      is that of this batch and of the three before (`woodbury.optim.memory`)
    D      the metric of damping and momentum, is Adam's (`woodbury.optim.metric`)

The same for all problems: `woodbury bench problems` measures them beside tuned Adam and SGD. On a GPU, where such
steps could not be recorded, and with several processes B is that of the batch and D = I; with weight decay D = I.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from woodbury import _batch, _random
from woodbury.damping import LevenbergMarquardt
from woodbury.fit.limits import Limits, Progress
from woodbury.fit.result import Fit
from woodbury.fit.run import Callback, Run
from woodbury.fit.sources import Data, MiniBatches, as_pair, is_batches, to_device
from woodbury.optim import GaussNewton, StepInfo
from woodbury.optim.shards import find_group
from woodbury.products import loss_of

RATE, MOMENTUM = 0.3, 0.9
DAMPING = LevenbergMarquardt(initial=0.03, floor=3e-4, relative=True, forgetting=0.98)
MEMORY, METRIC = 3, "adam"
DEFAULT_EPOCHS = 20  # where no budget is given
MOST_SGD_STEPS = 3.0  # that a step may cost
_WINDOW = 8  # steps whose median time counts
_MOST_CHANGES = 6  # of the number of curvature samples by what steps cost


class Record(Protocol):
    """What `fit(record=...)` writes to, `woodbury.Recorder` for one."""

    def step(self, info: StepInfo) -> object: ...

    def epoch(self, *, train_loss: float, test_loss: float | None = None) -> object: ...


class TrainingRun(Run):
    """Steps on the batches of a loader."""

    needed: ClassVar[set[str]] = Run.needed | {"epochs"}

    def __init__(
        self,
        optimizer: GaussNewton,
        batches: MiniBatches,
        limits: Limits,
        validation: Any,
        patience: int | None,
        callback: Callback | None,
        record: Record | None,
    ) -> None:
        super().__init__(optimizer, limits, callback)
        self.batches, self.validation, self.record = batches, _validation_batches(validation), record
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ValueError(f"fit: patience must be a whole number of epochs from 1 on, got {patience!r}")
        if patience is None:
            patience = max(5, math.ceil((limits.epochs or DEFAULT_EPOCHS) / 4))
        self.patience, self.waited = patience, 0  # epochs without a better validation loss
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.losses: list[Tensor] = []  # of the epoch under way
        self.price = Price(optimizer) if optimizer.curvature_samples == "auto" else None

    def go(self, progress: Progress | None) -> Fit:
        was_training = self.model.training
        if not was_training:
            self.model.train()
        try:
            return super().go(progress)
        finally:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate
            if not was_training:
                self.model.eval()

    def reached(self) -> str | None:
        return self.limits.reached(self.fit.steps, self.fit.seconds, self.batches.epochs)

    def advance(self) -> Callable[[], str | None]:
        batch, ended = self.batches.next()
        if ended:  # which nobody knew before
            reason = self._end_epoch() or self.reached()
            if reason is not None:
                return lambda: reason
        fit = self.fit
        share = self.limits.share(fit.steps, fit.seconds, self.batches.epoch + self._place())
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * math.sqrt(1 - share)
        started = time.process_time()  # which other programs on the machine do not disturb
        info = self.optimizer.step(*batch)
        if self.price is not None:
            self.price.note(time.process_time() - started, batch)
        fit.steps, fit.samples = fit.steps + 1, _batch.sample_count(batch[0])
        return lambda: self._note(info)

    def _place(self) -> float:
        """How much of the epoch was over before the batch just taken."""
        return (self.batches.taken - 1) / self.batches.length if self.batches.length else 0.0

    def shown(self) -> tuple[str, float]:
        rate = self.optimizer.param_groups[0]["lr"]
        last = self.fit.history[-1].get("validation") if self.fit.history else None
        validation = "" if last is None else f", validation {last:.3e}"
        return f"epoch {self.batches.epochs:.2f}{validation}, rate {rate:.2g}", self.batches.epochs

    def _note(self, info: StepInfo) -> str | None:
        self.losses.append(info.loss)
        course = self.optimizer.state.get("course")
        if course is not None:
            self.fit.loss = float(course[1])  # its level
        if self.record is not None:
            self.record.step(info)
        if not self.batches.is_over:
            return None
        self.batches.end_epoch()
        return self._end_epoch()

    def _end_epoch(self) -> str | None:
        """Record an epoch, and say why to stop, if there is a reason."""
        fit = self.fit
        mean = float(torch.stack(self.losses).mean())
        self.losses = []
        fit.loss = mean
        entry = {"epoch": self.batches.epoch, "step": fit.steps, "seconds": fit.seconds, "loss": mean}
        entry |= {"samples": fit.samples, "rate": float(self.optimizer.param_groups[0]["lr"])}
        judged = mean
        if self.validation is not None:
            entry["validation"] = judged = self._validation_loss()
        fit.history.append(entry)
        if self.record is not None:
            self.record.epoch(train_loss=mean, test_loss=entry.get("validation"))
        if self.best is None or judged < self.best[0]:
            self.best, self.waited = (judged, self.parameters()), 0
        else:
            self.waited += 1
        if self.limits.tolerance is not None and mean <= self.limits.tolerance:
            return "tolerance"
        return "validation" if self.validation is not None and self.waited >= self.patience else None

    def _validation_loss(self) -> float:
        """The mean loss over the validation batches, in evaluation mode."""
        assert self.validation is not None
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        total, count = 0.0, 0
        try:
            for batch in self.validation:
                data = to_device(as_pair(batch, "validation must give pairs"), self.batches.device)
                samples = _batch.sample_count(data[0])
                total, count = total + float(self.loss_on(data)) * samples, count + samples
        finally:
            for module, training in modes:
                module.training = training
        if not count:
            raise ValueError("fit: validation has no samples")
        return total / count

    def finish(self) -> None:
        """Leave the best parameters: those of the best epoch if there is validation data, or if the loss rose."""
        if self.losses:  # of an epoch that did not end
            self.fit.loss = float(torch.stack(self.losses).mean())
            self.losses = []
        if self.best is None:
            return
        rose = self.validation is None and self.fit.loss > 1.1 * self.best[0]
        if rose or (self.validation is not None and self.waited):
            self.load_parameters(self.best[1])
            if self.validation is None:
                self.fit.loss = self.best[0]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "epochs": self.batches.epoch, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.batches.epoch, self.waited = state["epochs"], state["waited"]


def _validation_batches(validation: Any) -> Iterable[Any] | None:
    """Validation data as batches: a loader, or one pair."""
    if validation is None or is_batches(validation):
        batches: Iterable[Any] | None = validation
        return batches
    return [as_pair(validation, "validation must be a pair")]


class Price:
    """Changes the number of curvature samples where steps are seen to cost other than three SGD steps.

    On the CPU alone. A number that was halved without a gain in time comes back, and stays. Below half of what the
    operations allow it does not fall: fewer cost more in progress than they save in time.
    """

    def __init__(self, optimizer: GaussNewton) -> None:
        self.optimizer = optimizer
        self.times: deque[float] = deque(maxlen=_WINDOW)
        self.sgd: float | None = None  # seconds of an SGD step on a batch like the others
        self.changes = 0
        self.least = 2  # samples
        self.before: tuple[int, float] | None = None  # the number before it was halved, and the time of a step

    def note(self, seconds: float, batch: Data) -> None:
        """After a step that took so long."""
        if self.changes >= _MOST_CHANGES or self.optimizer.param_groups[0]["params"][0].device.type != "cpu":
            return
        self.times.append(seconds)
        if len(self.times) < _WINDOW:
            return
        now, samples = median(self.times), _batch.sample_count(batch[0])
        count = self.optimizer.affordable_samples(samples)
        if self.sgd is None:
            self.sgd, self.least = sgd_seconds(self.optimizer, batch), max(2, count // 2)
        changed = self._changed(count, samples, now / self.sgd, now)
        if changed != count:
            self.optimizer.state["curvature_samples"] = changed
            self.changes += 1
            self.times.clear()

    def _changed(self, count: int, samples: int, ratio: float, now: float) -> int:
        if self.before is not None and now > 0.9 * self.before[1]:  # in vain
            (count, _), self.before, self.changes = self.before, None, _MOST_CHANGES
            return count
        self.before = None
        if ratio > 1.1 * MOST_SGD_STEPS and count > self.least:
            self.before = count, now
            return max(self.least, count // 2)
        return min(samples, 2 * count) if ratio < 0.5 * MOST_SGD_STEPS else count


def sgd_seconds(optimizer: GaussNewton, batch: Data) -> float:
    """The CPU time of a pass forward and back with an update, the least of three. Nothing changes."""
    model, (inputs, targets) = optimizer.model, batch
    parameters = [own for group in optimizer.param_groups for own in group["params"]]
    buffers = [(own, own.clone()) for own in model.buffers()]
    random, times = _random.snapshot(parameters[0].device), []
    for _ in range(3):
        started = time.process_time()
        with torch.enable_grad():
            outputs = optimizer.forward(model, inputs)
            loss = loss_of(optimizer.loss, outputs, targets)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        moved = [torch.add(a, b, alpha=-0.1) for a, b in zip(parameters, gradients, strict=True) if b is not None]
        times.append(time.process_time() - started)
        del moved
    _random.restore(random)
    with torch.no_grad():
        for own, value in buffers:
            own.copy_(value)
    return max(min(times), 1e-6)  # the clock may be coarse


def training_optimizer(
    model: nn.Module, loss: nn.Module, memory: int | None = None, metric: str | None = "auto", **settings: Any
) -> GaussNewton:
    """The optimizer of a training run."""
    plain = any(own.device.type != "cpu" for own in model.parameters()) or find_group(None, model).size > 1
    if memory is None:
        memory = 0 if plain else MEMORY
    if metric == "auto":
        metric = None if plain or settings.get("weight_decay") else METRIC
    settings |= {"memory": memory, "metric": metric}
    return GaussNewton(model, loss, lr=RATE, momentum=MOMENTUM, damping=DAMPING, **settings)
