"""A run folder from any training loop: `woodbury.Recorder`.

It writes config.json, records.jsonl and complete, as `woodbury.experiments.train` does.
"""

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodbury.optim import StepInfo
from woodbury.policies.plain import to_plain
from woodbury.runs.config import RunConfig, RunFolderError
from woodbury.runs.records import COMPLETE_FILE, RECORDS_FILE, Records, mark_complete, read_records

READ_EVERY = 100  # steps whose numbers are on a device: to read them is to wait for it


class Recorder:
    """Writes what happens in a training loop into a folder that `woodbury report` reads.

        with woodbury.Recorder("runs/mine", problem="my data", method="GaussNewton", settings={"lr": 1}) as record:
            for epoch in range(epochs):
                for inputs, targets in loader:
                    record.step(optimizer.step(inputs, targets))
                with record.paused():
                    train_loss, test_loss = evaluate(model)
                record.epoch(train_loss=train_loss, test_loss=test_loss)

    The attributes `steps`, `epochs` and `seconds` say how far the run is. Seconds run from the start of the `with`
    block, without the time in `paused` blocks and in the recorder itself. A process that is killed loses at most
    the line it was writing, and numbers that are on a GPU: these are read every 100 steps and at each `epoch`, so
    that no step waits for the device. The end of the block marks the run as complete; an error or Ctrl-C in it
    leaves a folder that can be read and resumed. Without a `with` block, call `close`.

    Args:
        folder: where the files go; it is created.
        problem: the data set in the report: runs of one problem share figures and tables.
        method: the name of the curve.
        settings: what tells runs of one method apart, by name: numbers, strings, true, false, None, lists of
            these, or damping policies.
        seed: runs that differ in it alone are drawn as one curve, their median.
        resume: go on behind the last whole record of the run in `folder`, which has the same problem, method,
            settings and seed; if there is none, start.

    Raises RunFolderError if the folder holds a run and `resume` is not asked for, another run than the one to
    resume or damaged files, or if another process uses it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        problem: str,
        method: str,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        resume: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.steps = 0
        self.epochs: float = 0
        self._clock = Clock()
        plain = {str(name): to_plain(value) for name, value in (settings or {}).items()}
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        config = RunConfig(problem, method, plain, operator.index(seed), device=device, dtype="")
        config.plain()  # raises an error for a setting that JSON cannot hold, before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        self._records = Records(self.folder)
        self._readings = Readings(self._records.write)
        try:
            self._begin(config, resume)
        except BaseException:
            self._records.__exit__()
            raise
        self._clock.restart()

    def _begin(self, config: RunConfig, resume: bool) -> None:
        """Get the files ready for the first new record, in steps that each leave a folder that can be read."""
        folder, kinds = self.folder, read_records(self.folder)
        has_records = any(kinds.values())
        if has_records and not resume:
            raise RunFolderError(
                f"{folder} holds a run already: resume=True goes on with it; or delete it, or give another folder"
            )
        if has_records or (RunConfig.is_in(folder) and not RunConfig.load(folder).recorded):
            RunConfig.load(folder).check_same(config, folder)
        for last in (*kinds["step"][-1:], *kinds["epoch"][-1:]):
            self.steps = max(self.steps, last["step"])
            self._clock.seconds = max(self._clock.seconds, last.get("seconds") or 0.0)
        if kinds["epoch"]:
            self.epochs = kinds["epoch"][-1]["epoch"]
        (folder / COMPLETE_FILE).unlink(missing_ok=True)
        self._records.go_back((folder / RECORDS_FILE).read_bytes().rfind(b"\n") + 1)  # to the last whole line
        config.save(folder)

    @property
    def seconds(self) -> float:
        """The seconds of training so far."""
        return self._clock.now()

    def step(self, info: StepInfo | None = None, **numbers: Any) -> None:
        """Record a step.

        Args:
            info: what `optimizer.step` of woodbury returned.
            numbers: others by name, each a number or a tensor with one element. `damping` and `ratio` are drawn.
        """
        if len(self._readings) + 1 >= READ_EVERY:
            wait_for_device()
        with self._clock.stopped():
            self._check_open()
            place = {"epoch": math.floor(self.epochs) + 1, "step": self.steps + 1, "seconds": self._clock.seconds}
            self._readings.add({"kind": "step", **place}, info, numbers)
            self.steps += 1
            self._readings.write_if_due()

    def epoch(
        self, *, train_loss: Any, test_loss: Any = None, test_error: Any = None, epoch: float | None = None
    ) -> None:
        """Record an evaluation, by default at the end of the next epoch.

        Args:
            train_loss: as the others a number or a tensor with one element.
            test_loss: if there is one.
            test_error: the fraction of test samples with a wrong answer, for classification.
            epoch: the number of epochs since the start, 0 before training; it may be a fraction.
        """
        with self.paused():
            self._check_open()
            number = math.floor(self.epochs) + 1 if epoch is None else read_number("epoch", epoch)
            if number < self.epochs or number == self.epochs > 0:
                raise ValueError(f"epoch must be above {self.epochs}, the last one, got {number}")
            measured = {"train_loss": read_number("train_loss", train_loss)}
            for name, value in (("test_loss", test_loss), ("test_error", test_error)):
                if value is not None:
                    measured[name] = read_number(name, value)
            self._readings.write()
            self.epochs = number
            place = {"epoch": number, "step": self.steps, "seconds": self._clock.seconds}
            self._records.write({"kind": "epoch", **place, **measured})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count, for evaluations and the like; it may call `step` and `epoch`."""
        wait_for_device()
        with self._clock.stopped():
            yield

    def close(self) -> None:
        """Write what is left and mark the run as complete."""
        if self._records.closed:
            return
        with self._records:
            self._readings.write()
            self._records.sync()
            mark_complete(self.folder, {RECORDS_FILE: self._records.sha256})

    def __enter__(self) -> "Recorder":
        self._check_open()
        self._clock.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.close()
            return
        with self._records, suppress(Exception):  # the error on its way is the one to see
            self._readings.write()  # a broken device cannot be read

    def _check_open(self) -> None:
        if self._records.closed:
            raise RunFolderError(f"the recorder of {self.folder} is closed: another with resume=True goes on")


# -- numbers of a loop before they are read: on a device they wait, so that no step waits for them


class Readings:
    """The numbers of steps until they are read, in order, and handed to `write`."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._waiting: deque[tuple[Mapping[str, Any], StepInfo | None, dict[str, Any]]] = deque()

    def add(self, counts: Mapping[str, Any], info: StepInfo | None, numbers: Mapping[str, Any]) -> None:
        """Add a step: its own counts, what `optimizer.step` returned, and numbers by name."""
        if info is not None and not isinstance(info, StepInfo):
            raise TypeError(
                f"step takes a StepInfo, or numbers by name such as loss=0.5, not {type(info).__name__}"
            )
        if taken := counts.keys() & numbers.keys():
            raise ValueError(f"{taken.pop()!r} is counted here: give the number another name")
        plain = {name: plain_number(name, value) for name, value in numbers.items() if value is not None}
        self._waiting.append((counts, info, plain))

    def __len__(self) -> int:
        return len(self._waiting)

    def write_if_due(self) -> None:
        """Read and write them if there are many, or if nobody has to wait."""
        _, info, numbers = self._waiting[0]
        is_told_later = info is not None and on_device(info.loss)
        must_wait = is_told_later or any(isinstance(value, Tensor) for value in numbers.values())
        if len(self) >= READ_EVERY or not must_wait:
            self.write()

    def write(self) -> None:
        """Read and write all of them; each is left out first: none may be there twice, whenever Ctrl-C comes."""
        while self._waiting:
            counts, info, numbers = self._waiting.popleft()
            told = {} if info is None else info.as_dict()
            self._write({**counts, **told, **{name: read_number(name, value) for name, value in numbers.items()}})


class Clock:
    """Seconds that run except in `stopped` blocks, which may lie inside one another."""

    def __init__(self) -> None:
        self.seconds = 0.0  # until it was last stopped
        self._stops = 0
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the clock was last stopped."""
        self._since = time.perf_counter()

    def now(self) -> float:
        return self.seconds if self._stops else self.seconds + time.perf_counter() - self._since

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.seconds = self.now()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            self.restart()


def on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def wait_for_device() -> None:
    """Wait for the work that a loop has handed to a GPU, which is part of the time it takes."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def plain_number(name: str, value: Any) -> Any:
    """The value as a plain number; a tensor on a device as a copy of its own, to be read later."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # without its graph, and whatever the loop adds to it later
        return value.detach().clone() if on_device(value) else value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r:.80}")


def read_number(name: str, value: Any) -> Any:
    """The same, read at once."""
    plain = plain_number(name, value)
    return plain.item() if isinstance(plain, Tensor) else plain
