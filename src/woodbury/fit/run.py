"""What all fits share: the loop, its clock, validation, the parameters kept, and going on from a state."""

from __future__ import annotations

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from woodbury import _batch, _random
from woodbury._process import stop_on_signal
from woodbury.fit.checkpoint import Checkpoint, Where, read_checkpoint
from woodbury.fit.columns import warn_of_columns
from woodbury.fit.limits import Limits, Progress
from woodbury.fit.result import Fit
from woodbury.fit.sources import Conversion, Data, as_pair, check_finite
from woodbury.losses.rules import loss_rule, prepare
from woodbury.model.capture import call_model
from woodbury.optim import GaussNewton
from woodbury.optim.shards import find_group
from woodbury.parallel.group import of_all
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.policies.search import CurvedSearch
from woodbury.products import loss_of

PLAIN = LevenbergMarquardt(initial=0.1, boost=3.0, drop=1 / 3, floor=1e-12, relative=True)  # of plain steps
Callback = Callable[[Fit], Any]
Resume = Fit | Mapping[str, Any] | Where | None
SEARCH = ("length", "share", "bent", "accepted")  # what the history has of steps with a search
Metric = Callable[[Tensor, "Tensor | None"], Any]  # (outputs, targets) -> a number
PER_THREAD = 50_000  # numbers in the rows of a step: with fewer, threads take longer to meet than to compute
_NEEDED = {"kind", "end", "random", "parameters", "optimizer", "best", "steps", "seconds", "samples", "history"}
_FOUND = ("tolerance", "validation", "stalled")  # ends of a fit that are no budget


@dataclass(frozen=True)
class Best:
    """The parameters with the lowest loss seen, and the step that led to them."""

    judged: float  # on the validation data, if there is any
    step: int
    parameters: dict[str, Tensor]


def share_gained(before: float, after: float) -> float:
    """How much of a loss, of any sign, is gone."""
    return (before - after) / abs(before) if before else before - after


def use_search(optimizer: GaussNewton, on: bool, memory: Any = None) -> None:
    """From now on steps with a search, and what it remembers, or plain ones that are taken if they gain."""
    search, accept = (CurvedSearch(), None) if on else (None, 0.0)
    optimizer.settings = replace(optimizer.settings, search=search, accept=accept)
    optimizer.state.pop("search", None)
    if memory is not None:
        optimizer.state["search"] = memory
    for group in optimizer.param_groups if on else ():
        group["momentum"] = 0.0  # which a search does not take


@dataclass(frozen=True)
class Validation:
    """Samples that a fit does not train on, and how long to wait for a lower loss there."""

    batches: Iterable[Any]
    patience: int  # steps, with a loader epochs


class Run(ABC):
    """A fit under way."""

    kind: ClassVar[str]  # of its data
    data: Any = None  # a pair that is used whole, if it is
    smallest_targets: ClassVar[float] = 0.0  # below which root mean square a column of them is warned of
    ways_out: ClassVar[str | None] = None  # if the loss runs away: other samples and weights make it rise too

    def __init__(
        self,
        optimizer: GaussNewton,
        limits: Limits,
        callback: Callback | None = None,
        validation: Validation | None = None,
    ) -> None:
        self.optimizer, self.model = optimizer, optimizer.model
        optimizer.settings = replace(optimizer.settings, advice=self.ways_out)
        self.limits, self.callback, self.validation = limits, callback, validation
        self.device = next(iter(self.model.parameters())).device
        self.size = sum(own.numel() for own in self.model.parameters() if own.requires_grad)
        self.convert = Conversion.to(self.model)
        self.metrics: Mapping[str, Metric] = {}
        self.group = find_group(optimizer.process_group, self.model)
        self.fit = Fit()
        self.best: Best | None = None
        self.waited = 0  # steps, or epochs, since the best
        self.begun = _random.snapshot(self.device)
        self.random: Mapping[str, Any] | None = None  # the numbers of the fit that is taken up
        self.over: str | None = None  # why that fit had ended, if the same holds for this one

    def reached(self) -> str | None:
        """The limit that is reached, if one is."""
        return self.limits.reached(self.fit.steps, self.fit.seconds)

    @abstractmethod
    def advance(self) -> Callable[[], str | None]:
        """Take a step; the function returned, outside the clock's sight, notes it and says why to stop, if so."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the best parameters in the model, and what is true of them in the `Fit`."""

    def some_data(self) -> Iterable[Any]:
        """A batch of what is trained on, or all of it."""
        return [self.data]

    def asks_to_stop(self) -> bool:
        """Call back after a step."""
        return self.callback is not None and bool(self.callback(self.fit))

    def shown(self) -> tuple[str, float]:
        """What the progress line says beside losses and metrics, and the epochs so far."""
        record = self.fit.history[-1]
        return f"length {record['length']:.3g} ({'bent' if record['bent'] else 'straight'})", 0.0

    def go(self, progress: Progress | None, checkpoint: Where | None = None, resume: Resume = None) -> Fit:
        """Take steps until there is a reason to stop; processes stop together, by the clock of the first."""
        file = self._open(checkpoint, resume)
        if self.data is not None:
            self.warn_of_columns(*self.data)
        late = [signal.SIGINT] if self.group.size > 1 else []  # one alone stops inside a step too
        try:
            with stop_on_signal(*late) as told:
                return self._go(progress if self.group.rank == 0 else None, file, told)
        except Exception as error:
            raise of_all(error) from error.__cause__

    def _open(self, checkpoint: Where | None, resume: Resume) -> Checkpoint | None:
        """Take up what there is, read by the first process; errors of one process are those of all."""
        resume = resume.state_dict() if isinstance(resume, Fit) else resume
        group, has_path = self.group, not (resume is None or isinstance(resume, Mapping))
        asked = {**vars(self.limits), **self._end(), "checkpoint": checkpoint is not None, "resume": has_path}
        group.check_same({name: repr(value) for name, value in asked.items()})
        with group.before_meeting():
            file = None if checkpoint is None else Checkpoint(checkpoint, writes=group.rank == 0)
            begins = file is not None and not file.path.exists() and str(resume) == str(checkpoint)
            if has_path and group.rank == 0:
                resume = None if begins else read_checkpoint(resume)  # type: ignore[arg-type]
        group.check_same({})
        if has_path:
            resume = group.object_of_first(resume)
        with group.before_meeting():
            if resume is not None:
                self.load(resume)  # type: ignore[arg-type]
        group.check_same({"steps so far": repr(self.fit.steps)})
        return file

    def _go(self, progress: Progress | None, file: Checkpoint | None, told: Callable[[], bool]) -> Fit:
        fit, group = self.fit, self.group
        now = time.perf_counter()
        fit.reason = "running"
        try:
            try:
                self.check_validation()
            finally:
                if self.random is not None:  # go on with those of the fit that is taken up
                    _random.restore(_random.from_plain(self.random, self.device))
            started = time.perf_counter() - fit.seconds
            while fit.reason == "running":
                reason = self.over or self.reached()
                if reason is not None:
                    fit.reason = reason
                    break
                with self._busy_threads():
                    note = self.advance()
                    fit.seconds, now = group.of_first([time.perf_counter() - started, time.perf_counter()])
                    fit.reason = note() or "running"
                with group.together():
                    if progress is not None:
                        progress.show(fit, *self.shown())
                    asked = self.asks_to_stop()
                stops = group.sums(told(), asked)  # asked of one, all of them stop
                if fit.reason == "running" and any(stops):
                    fit.reason = "interrupted" if stops[0] else "callback"
                if file is not None and fit.reason == "running" and file.is_due(now):
                    self.keep(file, now)
                started = time.perf_counter() - fit.seconds
        except KeyboardInterrupt:
            fit.reason = "interrupted"
        try:
            self.keep(file, now)
            self.finish()
        except KeyboardInterrupt:  # while losses were measured anew: then those that are known count
            fit.reason = "interrupted"
            if self.validation is not None and self.best is not None:
                self.load_parameters(self.best.parameters)
                fit.validation, fit.best_step = self.best.judged, self.best.step
        if self.metrics:
            with suppress(KeyboardInterrupt):
                self.measure({})
        if progress is not None:
            progress.end(fit)
        return fit

    @contextmanager
    def _busy_threads(self) -> Iterator[None]:
        """Inside, torch has no more threads than the rows of a step keep busy."""
        threads, numbers = torch.get_num_threads(), self.fit.samples * self.size
        if numbers:  # known from the first step on
            torch.set_num_threads(max(1, min(threads, round(numbers / PER_THREAD))))
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    # -- losses -----------------------------------------------------------------------------------------

    def check_validation(self) -> None:
        """Raise before the first step if the model cannot be judged by the validation data, or by a metric."""
        seen: dict[str, Any] = {}
        try:
            self.measure(seen)
        except (RuntimeError, ValueError, IndexError) as error:
            try:
                if self.group.size == 1:  # others may have had another error, and not come here
                    self.evaluate(self.some_data())
            except (RuntimeError, ValueError, IndexError) as of_data:
                raise ValueError(f"fit: the data does not go with model and loss: {of_data}") from of_data
            raise ValueError(f"fit: the validation data does not go with model and loss: {error}") from error
        if self.validation is not None and not math.isfinite(seen["validation"]):
            check_finite(self.validation.batches)
            raise ValueError(f"fit: the loss on the validation data is {seen['validation']} before the first step")

    def validation_loss(self) -> float:
        assert self.validation is not None
        return self.evaluate(self.validation.batches)

    def measure(self, record: dict[str, Any]) -> None:
        """Add the validation loss, if there is one, and the metrics, there or on data that is used whole."""
        seen: list[Data] | None = [] if self.metrics else None
        if self.validation is not None:
            record["validation"] = self.evaluate(self.validation.batches, seen)
        elif self.metrics:
            self.evaluate([self.data], seen)
        if seen is not None:
            self.fit.metrics = self._measure_metrics(seen)
            record |= self.fit.metrics

    def _measure_metrics(self, seen: list[Data]) -> dict[str, float]:
        """Of all samples at once; over processes the mean by samples."""
        samples, values = sum(len(outputs) for outputs, _ in seen), {}
        parts: Any = zip(*seen, strict=True)  # outputs, and targets
        columns: Any = [None if part[0] is None else torch.cat(part) for part in parts]
        for name, metric in self.metrics.items():
            with self.group.together():
                try:
                    value = float(metric(*columns)) if samples else 0.0
                except Exception as error:
                    raise TypeError(
                        f"fit: metric {name!r} of (outputs, targets) gives no number: {error}"
                    ) from error
            total, count = self.group.sums(value * samples, float(samples))
            values[name] = total / count
        return values

    def evaluate(self, batches: Iterable[Any], seen: list[Data] | None = None) -> float:
        """The loss over all samples of the batches of all processes, in evaluation mode; `seen` gets outputs."""
        rule, loss = loss_rule(self.optimizer.loss), self.optimizer.loss
        total, count = 0.0, 0.0
        with self.group.together(), self.in_mode(training=False):
            for batch in batches:
                inputs, targets = self.convert(as_pair(batch, "validation must give pairs"))
                with torch.set_grad_enabled(self.optimizer.forward is not call_model):
                    outputs = self._outputs(inputs)
                prepared = prepare(rule, loss, outputs, targets)  # which raises for bad shapes
                size = float(rule.count(loss, prepared))
                value = float(loss_of(loss, outputs, targets))
                total, count = total + (value if rule.is_sum(loss) else value * size), count + size
                if seen is not None:
                    seen.append((outputs, targets))
        total, count = self.group.sums(total, count)
        if not count:
            raise ValueError("there are no samples")
        return total if rule.is_sum(loss) else total / count

    def _outputs(self, inputs: Any) -> Tensor:
        try:
            outputs: Tensor = self.optimizer.forward(self.model, inputs).detach()
        except RuntimeError as error:
            dtype = next(iter(self.model.parameters())).dtype
            fault = _batch.fault_of_types(error, inputs, dtype)
            if fault is None:
                raise
            raise ValueError(fault) from error
        return outputs

    def warn_of_columns(self, inputs: Any, targets: Tensor | None = None) -> None:
        """Before the first step: warn of columns far from (-1, 1)."""
        if not self.fit.steps and self.group.size == 1:
            with self.in_mode(training=False):
                warn_of_columns(self.optimizer, inputs, targets, self.smallest_targets)

    def note(self, loss: float, **others: Any) -> dict[str, Any]:
        """Begin the record of a step, or an epoch, in the history."""
        fit = self.fit
        record = {"step": fit.steps, "seconds": fit.seconds, "loss": loss, "samples": fit.samples, **others}
        fit.history.append(record)  # before the validation pass, which may be interrupted
        return record

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """The model in training or in evaluation mode; the flags of all its parts come back as they were.

        Norms over the batch, which no step can take in training mode, stay as they are there.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(training)
        for module, was_training in modes:
            if training and isinstance(module, _NormBase):
                module.training = was_training
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training

    # -- parameters -------------------------------------------------------------------------------------

    def judge(self, judged: float) -> bool:
        """Whether the parameters are the best so far: then they are kept."""
        if self.best is None or judged < self.best.judged:
            self.best, self.waited = Best(judged, self.fit.steps, self.parameters()), 0
            return True
        self.waited += 1
        return False

    def take_best(self, judge: Callable[[], float], has_judged: bool = True) -> float:
        """Leave the last parameters, or the best if judge() now finds them better; what it found."""
        fit, last, value = self.fit, self.parameters(), judge()
        fit.best_step = fit.steps
        if self.best is None or (has_judged and value < self.best.judged):
            return value
        self.load_parameters(self.best.parameters)
        other = judge()
        if other <= value:
            fit.best_step = self.best.step
            return other
        self.load_parameters(last)
        return value

    def parameters(self) -> dict[str, Tensor]:
        """A copy of the parameters and buffers of the model."""
        return {name: own.detach().clone() for name, own in _tensors(self.model).items()}

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in _tensors(self.model).items():
                own.copy_(values[name])

    # -- going on ---------------------------------------------------------------------------------------

    def keep(self, file: Checkpoint | None, now: float) -> None:
        """The state, in the `Fit` and in a file."""
        self.fit.state = self.state()
        if file is not None:
            file.write(self.fit.state_dict(), now)

    def of_rank(self, everyone: Sequence[Any]) -> Any:
        """What this process had; None where there were fewer of them."""
        return everyone[self.group.rank] if self.group.rank < len(everyone) else None

    def state(self) -> dict[str, Any]:
        """What `load` needs beside what the `Fit` holds."""
        best = {} if self.best is None else dict(vars(self.best))
        random = _random.as_plain(_random.snapshot(self.device)) if _random.drawn_since(self.begun) else None
        return {
            "kind": self.kind,
            "end": self._end(),
            "random": self.group.gather_objects(random),
            "parameters": self.parameters(),
            "optimizer": self.optimizer.state_dict(),
            "best": best,
            "waited": self.waited,
        }

    def _end(self) -> dict[str, Any]:
        """Why it has ended, if it has, and the limits that led to it."""
        patience = None if self.validation is None else self.validation.patience
        return {"reason": self.fit.reason, "tolerance": self.limits.tolerance, "patience": patience}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `Fit.state_dict`; the model changes last, when nothing can fail any more."""
        if not isinstance(state, Mapping) or not set(state) >= _NEEDED:
            raise ValueError(
                "fit: resume must be the state_dict() of an earlier Fit, or a file that checkpoint= wrote"
            )
        if state["kind"] != self.kind:
            raise ValueError(f"fit: resume is of a fit to {state['kind']}, and this is one to {self.kind}")
        best = state["best"]
        for values in (state["parameters"], *([best["parameters"]] if best else [])):
            _check_same_model(_tensors(self.model), values)
        self.optimizer.load_state_dict(state["optimizer"])
        fit = self.fit
        fit.steps, fit.seconds, fit.samples = state["steps"], state["seconds"], state["samples"]
        fit.history = [dict(record) for record in state["history"]]
        self.best, self.waited = Best(**best) if best else None, state["waited"]
        self.random = self.of_rank(state["random"])
        fit.reason = state["end"]["reason"]
        self.over = fit.reason if fit.reason in _FOUND and self._end() == state["end"] else None
        self.load_rest(state)
        self.load_parameters(state["parameters"])

    @abstractmethod
    def load_rest(self, state: Mapping[str, Any]) -> None:
        """What one kind of fits needs beside."""


def _check_same_model(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    if odd := sorted(set(own) ^ set(values)):
        raise ValueError(f"fit: resume is of another model: parameter {odd[0]!r} is not in both")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"fit: resume is of another model: {name!r} has the shape {tuple(value.shape)} there, and "
                f"{tuple(own[name].shape)} here"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
