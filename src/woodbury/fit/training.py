"""Training in mini-batches: momentum, a rate that falls to zero over the budget, relative damping.

    p      minimises the damped model around 0.9 p_prev (momentum)
    theta  moves by alpha p, alpha = rate (1 - share of the budget that is used up)^(1/2)
    lambda = (value + 0.0003) scale of K, the value 0.03 at first, by the Levenberg-Marquardt rule
    B      is that of this batch and of the three before (`woodbury.quadratic.memory`)
    D      the metric of damping and momentum, is Adam's (`woodbury.quadratic.metric`)

In steps on one or two noisy samples momentum adds up more noise than damping takes away, and the loss runs away:
batches that predict less than 8 labels, or rows of targets, are taken together.

What counts is what the budget is made of. With epochs or steps the rate is 0.3 and a step has one batch of the
loader. With seconds alone the rate is 0.5, after a rise over the first tenth; a step has as many batches as
`woodbury.fit.growth` finds, and B is that of the step: larger steps make more of a second, and less of a sample.

The same for all problems: `python -m benchmarks problems` measures them beside tuned Adam and SGD. On a GPU, where
such steps could not be recorded, and with several processes B is that of the batch, D = I, and seconds are a
budget like the others; with weight decay D = I.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from woodbury.fit.checkpoint import Checkpoint
from woodbury.fit.growth import MOST_BATCHES, Growth
from woodbury.fit.limits import Limits, Progress
from woodbury.fit.result import Fit
from woodbury.fit.run import Callback, Run, share_gained
from woodbury.fit.sources import MiniBatches
from woodbury.optim import GaussNewton, StepInfo
from woodbury.optim.shards import find_group
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.products import is_sum

RATE, RATE_BY_TIME, MOMENTUM = 0.3, 0.5, 0.9
RISE, LEAST = 0.1, 0.2  # by time: the rate rises over this share of the budget, from this share of itself
DAMPING = LevenbergMarquardt(initial=0.03, floor=3e-4, relative=True, forgetting=0.98)
MEMORY, METRIC = 3, "adam"
DEFAULT_EPOCHS = 20  # where no budget is given
LEAST_PREDICTIONS = 8  # of a step
WAYS_OUT = (  # where the loss runs away
    "larger batches; validation=, which keeps the best epoch; or all samples at once, fit(model, loss, (inputs, "
    "targets), validation=0.2)"
)


class TrainingRun(Run):
    """Steps on the batches of a loader."""

    kind: ClassVar[str] = "a loader"
    ways_out: ClassVar[str | None] = WAYS_OUT

    def __init__(
        self,
        optimizer: GaussNewton,
        batches: MiniBatches,
        record: Any = None,  # with the methods `step` and `epoch` of `woodbury.Recorder`
        epoch_callback: Callback | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(optimizer, **shared)
        self.batches, self.record, self.epoch_callback = batches, record, epoch_callback
        self.convert = batches.convert
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.losses: list[Tensor] = []  # of the epoch under way
        self.used = 0  # batches of that epoch, in steps that were taken
        self.by_time = is_by_time(self.limits, self.model)  # only then anything may follow from what steps cost
        self.growth: Growth | None = None
        if not is_sum(optimizer.loss):  # a sum grows with the samples
            batches.least = math.ceil(LEAST_PREDICTIONS / self.group.size)
            if self.by_time:
                self.growth = Growth(optimizer, min(MOST_BATCHES, batches.length or MOST_BATCHES))

    @property
    def batches_per_step(self) -> int:
        return 1 if self.growth is None else self.growth.batches

    def _go(self, progress: Progress | None, file: Checkpoint | None, told: Callable[[], bool]) -> Fit:
        with nullcontext() if self.model.training else self.in_mode(training=True):
            try:
                return super()._go(progress, file, told)
            finally:
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate

    def some_data(self) -> Iterable[Any]:
        return islice(self.batches.loader, 1)

    def reached(self) -> str | None:
        return self.limits.reached(self.fit.steps, self.fit.seconds, self.batches.epochs)

    def advance(self) -> Callable[[], str | None]:
        fit = self.fit
        share = self.limits.share(fit.steps, fit.seconds, self.batches.epochs)
        with self.group.together():
            batch, count = self.batches.next(self.batches_per_step)
            self.warn_of_columns(*batch)
        samples = self.batches.agree(self.group, batch)
        if not samples and self.batches.is_over and self.losses:  # taken up where an epoch ended
            return self._close_epoch
        risen = min(1.0, LEAST + (1 - LEAST) * share / RISE) if self.by_time else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * risen * math.sqrt(1 - share)
        started = time.process_time()  # which other programs on the machine do not disturb
        info = self.optimizer.step(*batch)
        if self.growth is not None:
            self.growth.note(time.process_time() - started, batch, count)
        fit.steps, fit.samples = fit.steps + 1, samples
        self.losses.append(info.loss)
        self.used = self.batches.taken
        return lambda: self._note(info)

    def asks_to_stop(self) -> bool:
        asked, history = super().asks_to_stop(), self.fit.history
        if self.epoch_callback is None or not history or history[-1]["step"] != self.fit.steps:
            return asked
        return bool(self.epoch_callback(self.fit)) or asked

    def shown(self) -> tuple[str, float]:
        rate = self.optimizer.param_groups[0]["lr"]
        return f"epoch {self.batches.epochs:.2f}, rate {rate:.2g}", self.batches.epochs

    def _note(self, info: StepInfo) -> str | None:
        course = self.optimizer.state.get("course")
        if course is not None:
            self.fit.loss = float(course[1])  # its level
        with self.group.together():
            if self.record is not None:
                self.record.step(info)
        return self._close_epoch() if self.batches.is_over else None

    def _close_epoch(self) -> str | None:
        """Record an epoch, and say why to stop, if there is a reason."""
        fit, self.used = self.fit, 0
        self.batches.end_epoch()
        fit.loss = mean = float(torch.stack(self.losses).mean())
        self.losses = []
        rate = float(self.optimizer.param_groups[0]["lr"])
        entry = self.note(mean, epoch=self.batches.epoch, rate=rate)
        self.measure(entry)
        with self.group.together():
            if self.record is not None:
                self.record.epoch(train_loss=mean, test_loss=entry.get("validation"))
        self.judge(entry.get("validation", mean))
        if self.limits.tolerance is not None and mean <= self.limits.tolerance:
            return "tolerance"
        return "validation" if self.validation is not None and self.waited >= self.validation.patience else None

    def finish(self) -> None:
        """Leave the best parameters: by validation, or of the best epoch if the loss rose."""
        fit = self.fit
        fit.best_step = fit.steps
        if not fit.steps:
            return
        if self.losses:  # of an epoch that did not end
            fit.loss = float(torch.stack(self.losses).mean())
        if self.validation is not None:
            fit.validation = self.take_best(self.validation_loss)
        elif self.best is not None and share_gained(self.best.judged, fit.loss) < -0.1:
            self.load_parameters(self.best.parameters)
            fit.loss, fit.best_step = self.best.judged, self.best.step
        ended = [entry for entry in fit.history if entry["step"] == fit.best_step]
        fit.samples = ended[0]["samples"] if ended else fit.samples
        fit.loss = self.evaluate(self.batches.all())

    def state(self) -> dict[str, Any]:
        place = {"epochs": self.batches.epoch, "used": self.used, "length": self.batches.length}
        losses = torch.stack(self.losses).cpu() if self.losses else torch.empty(0, device="cpu")
        order = self.group.gather_objects(self.batches.state())
        own = {"batches_per_step": self.batches_per_step, "losses": losses, "order": order}
        return {**super().state(), **place, **own}

    def load_rest(self, state: Mapping[str, Any]) -> None:
        self.used, self.losses = state["used"], list(state["losses"].to(self.device).unbind())
        self.batches.take_up(state["epochs"], self.used, state["length"], self.of_rank(state["order"]))
        if self.growth is not None:
            self.growth.batches = state.get("batches_per_step", 1)


def _is_plain(model: nn.Module) -> bool:
    """Whether steps are to be plain ones: on a GPU, and with several processes."""
    return any(own.device.type != "cpu" for own in model.parameters()) or find_group(None, model).size > 1


def is_by_time(limits: Limits, model: nn.Module) -> bool:
    """Whether time is all that is limited, where settings for that are known."""
    return limits.seconds is not None and limits.steps is None and limits.epochs is None and not _is_plain(model)


def training_optimizer(
    model: nn.Module,
    loss: nn.Module,
    by_time: bool = False,
    memory: int | None = None,
    metric: str | None = "auto",
    **settings: Any,
) -> GaussNewton:
    plain = _is_plain(model)
    if memory is None:
        memory = 0 if by_time or plain else MEMORY
    if metric == "auto":
        metric = None if plain or settings.get("weight_decay") else METRIC
    settings |= {"memory": memory, "metric": metric}
    rate = RATE_BY_TIME if by_time else RATE
    return GaussNewton(model, loss, lr=rate, momentum=MOMENTUM, damping=DAMPING, **settings)
