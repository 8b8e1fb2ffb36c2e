"""A run folder from any training loop: `woodbury.Recorder`.

It writes config.json, records.jsonl and complete, as `woodbury.experiments.train` does.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from woodbury.optim import StepInfo
from woodbury.policies.plain import from_plain, to_plain
from woodbury.runs.config import CONFIG_FILE, NAMES_IN_LOOPS, RunConfig
from woodbury.runs.readings import READ_EVERY, Clock, Reading, Waiting, read_numbers, wait_for_device
from woodbury.runs.records import COMPLETE_FILE, RECORDS_FILE, Records, mark_complete, read_records
from woodbury.runs.storage import RunFolderError, remove_unfinished


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
        resume: go on behind the last whole record of the run in `folder`, whose problem, method, settings and seed
            need not be given again; if there is none, start.
        overwrite: remove the records that another recorder left in `folder`.

    Raises RunFolderError if the folder holds a run and neither `resume` nor `overwrite` is asked for, if it holds
    a run of `woodbury train`, another run than the one to resume or damaged files, or if another process uses it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        problem: str | None = None,
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        if resume and overwrite:
            raise ValueError("resume=True goes on with the records and overwrite=True removes them: choose one")
        self.folder = Path(folder)
        asked = _asked(problem, method, settings, seed)
        self.steps = 0
        self.epochs: float = 0
        self._waiting, self._clock = Waiting(), Clock()
        self._config(asked, resume, overwrite)  # before anything is touched
        self.folder.mkdir(parents=True, exist_ok=True)
        self._records = Records(self.folder)
        try:
            self._begin(self._config(asked, resume, overwrite), resume)  # another process may just have been here
        except BaseException:
            self._records.__exit__()
            raise
        self._clock.restart()

    def _config(self, asked: Mapping[str, Any], resume: bool, overwrite: bool) -> RunConfig:
        """The configuration of the run, or RunFolderError if there is a run that has to stay as it is."""
        folder, ways_out = self.folder, "give another folder, or overwrite=True to remove its records"
        records = folder / RECORDS_FILE
        has_records = records.exists() and records.stat().st_size > 0
        saved = RunConfig.load(folder) if RunConfig.is_in(folder) else None
        if saved is not None and not saved.recorded:
            raise RunFolderError(f"{folder} holds a run of `woodbury train`: record in another folder")
        if has_records and not resume and not overwrite:
            raise RunFolderError(f"{folder} holds a run already: resume=True goes on with it; or {ways_out}")
        if has_records and resume and saved is None:
            raise RunFolderError(f"cannot resume {folder}: it has no {CONFIG_FILE}; {ways_out}")
        if resume and saved is not None:
            saved.check_same(dataclasses.replace(saved, **asked), folder, ways_out)
            return saved
        for field, name in NAMES_IN_LOOPS.items():
            if field not in asked:
                raise ValueError(f"a new run in {folder} needs its {name}: Recorder(folder, {name}=...)")
        return RunConfig.of_loop(**{"settings": {}, "seed": 0, **asked})

    def _begin(self, config: RunConfig, resume: bool) -> None:
        """Get the files ready for the first new record, in steps that each leave a folder that can be read."""
        for name in (CONFIG_FILE, COMPLETE_FILE):
            remove_unfinished(self.folder / name)
        length = 0
        if resume:
            kinds = read_records(self.folder)
            for last in (*kinds["step"][-1:], *kinds["epoch"][-1:]):
                self.steps = max(self.steps, last["step"])
                self._clock.seconds = max(self._clock.seconds, last.get("seconds") or 0.0)
            if kinds["epoch"]:
                self.epochs = kinds["epoch"][-1]["epoch"]
            length = (self.folder / RECORDS_FILE).read_bytes().rfind(b"\n") + 1  # of whole lines
        (self.folder / COMPLETE_FILE).unlink(missing_ok=True)
        self._records.go_back(length)
        config.save(self.folder)

    @property
    def seconds(self) -> float:
        """The seconds of training so far."""
        return self._clock.now()

    def step(self, info: StepInfo | Mapping[str, Any] | None = None, **numbers: Any) -> None:
        """Record a step.

        Args:
            info: what `optimizer.step` of woodbury returned, or numbers by name.
            numbers: more of them, each a number or a tensor with one element. `damping` and `ratio` are drawn;
                `step` and `seconds`, both from the start of the run, replace the recorder's own counts.
        """
        if len(self._waiting) + 1 >= READ_EVERY:
            wait_for_device()
        with self._clock.stopped():
            self._check_open()
            reading = Reading(info, numbers)
            if "kind" in reading.values:
                raise ValueError("'kind' cannot be the name of a number: give it another one")
            step, seconds = reading.take("step"), reading.take("seconds")
            if step is not None and step <= self.steps:
                raise ValueError(f"step must be above {self.steps}, the last one, got {step}")
            self.steps = self.steps + 1 if step is None else step
            reading.counts.update(
                kind="step", epoch=math.floor(self.epochs) + 1, **self._place(seconds), damping=None
            )
            self._waiting.append(reading)
            if self._waiting.are_due():
                self._write_waiting()

    def epoch(
        self,
        *,
        train_loss: Any,
        test_loss: Any = None,
        test_error: Any = None,
        epoch: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record an evaluation, by default at the end of the next epoch.

        Args:
            train_loss: a number, or a tensor with one element; one that is not finite says that the run diverged.
            test_loss: None if it was not measured.
            test_error: a fraction such as that of wrong answers, which the report shows in percent.
            epoch: its number if it is not the next whole one: 0 for an evaluation before the first step, 2.5 for
                one in the middle of epoch 3.
            seconds: the time since the start of the run, in place of the recorder's own count.
        """
        wait_for_device()  # for the steps, whose time counts; what follows does not
        with self._clock.stopped():
            self._check_open()
            counts = read_numbers(epoch=epoch, seconds=seconds)
            values = read_numbers(train_loss=train_loss, test_loss=test_loss, test_error=test_error)
            if values["train_loss"] is None:
                raise TypeError("train_loss is None: every epoch needs the train loss")
            number = math.floor(self.epochs) + 1 if epoch is None else counts["epoch"]
            if number < self.epochs or number == self.epochs > 0:
                raise ValueError(f"epoch must be above {self.epochs}, the last one, got {number}")
            self._write_waiting()
            self.epochs = number
            measured = {name: value for name, value in values.items() if value is not None}
            self._records.write({"kind": "epoch", "epoch": number, **self._place(counts["seconds"]), **measured})

    def _place(self, seconds: float | None) -> dict[str, Any]:
        """The step and the seconds of a record; the clock goes on from those that were given."""
        if seconds is not None:
            self._clock.seconds = seconds
        return {"step": self.steps, "seconds": self._clock.seconds}

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
            self._write_waiting()
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
            self._write_waiting()  # a broken device cannot be read

    def _check_open(self) -> None:
        if self._records.closed:
            raise RunFolderError(f"the recorder of {self.folder} is closed: Recorder(folder, resume=True) goes on")

    def _write_waiting(self) -> None:
        for numbers in self._waiting.read():
            self._records.write(numbers)


def _asked(problem: Any, method: Any, settings: Any, seed: Any) -> dict[str, Any]:
    """The arguments that were given, by the names of a RunConfig and as JSON gives them back."""
    asked = {"dataset": problem, "optimizer": method, "settings": settings, "seed": seed}
    asked = {field: value for field, value in asked.items() if value is not None}
    for field, name in NAMES_IN_LOOPS.items():
        if not isinstance(asked.get(field, ""), str):
            raise TypeError(f"{name} must be a text, got {asked[field]!r:.80}")
    if "seed" in asked:
        asked["seed"] = operator.index(asked["seed"])
    if "settings" in asked:
        asked["settings"] = {str(name): _setting(name, value) for name, value in asked["settings"].items()}
    return asked


def _setting(name: str, value: Any) -> Any:
    """A setting as a saved run has it, for comparison."""

    def number(item: Any) -> Any:  # one that json does not know, such as numpy's
        return read_numbers(**{name: item})[name]

    try:
        return json.loads(json.dumps(to_plain(from_plain(value)), allow_nan=False, default=number))
    except (TypeError, ValueError):
        raise ValueError(
            f"settings: {name} must be a finite number, a text, true, false, None, a list of these or a "
            f"damping policy, got {value!r:.80}; its str() would do"
        ) from None
