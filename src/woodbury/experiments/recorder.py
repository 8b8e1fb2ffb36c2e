"""A run folder from any training loop: `woodbury.Recorder`.

config.json     problem, method, settings, seed, versions, machine, with a checksum
records.jsonl   {"kind": "step", ...} for each call of `step`, {"kind": "epoch", ...} for each of `epoch`
records.crc32   a check value for each line of the records
complete        an empty file; where it exists the run is complete
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from woodbury.experiments.config import CONFIG_FILE, RunConfig, is_name, is_setting
from woodbury.experiments.errors import RunFolderError
from woodbury.experiments.folders import COMPLETE_FILE, MODEL_FILE, is_complete
from woodbury.experiments.readings import (
    EXACT,
    READ_EVERY,
    Clock,
    Reading,
    plain_number,
    read_number,
    wait_for_device,
)
from woodbury.experiments.records import CHECKS_FILE, RECORDS_FILE, Records, read_records
from woodbury.experiments.storage import remove_unfinished, sync_folder, write_whole
from woodbury.optim import StepInfo
from woodbury.policies import from_plain, to_plain

_LARGEST_SEED = 2**63 - 1
_FIELDS = {"problem": "dataset", "method": "optimizer"}  # of RunConfig, where they have other names there


class Recorder:
    """Writes what happens in a training loop into a folder that `woodbury report` reads.

        with woodbury.Recorder("runs/mine", problem="my data", method="GaussNewton", settings={"lr": 1}) as record:
            for epoch in range(epochs):
                for inputs, targets in loader:
                    record.step(optimizer.step(inputs, targets))
                with record.paused():
                    train_loss, test_loss = evaluate(model)
                record.epoch(train_loss=train_loss, test_loss=test_loss)

    Steps, epochs and seconds are counted here. Seconds run from the start of the `with` block, without the time in
    `paused` blocks and in the recorder itself. A process that is killed loses at most the line it was writing, and
    numbers that are on a GPU: these are read every 100 steps and at each `epoch`, so that no step waits for the
    device. The end of the block marks the run as complete; an error or Ctrl-C in it leaves a folder that can be
    read and resumed. Without a `with` block, call `close`.

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
        given = {"problem": problem, "method": method, "settings": settings, "seed": seed}
        asked = {name: _CHECKS[name](value) for name, value in given.items() if value is not None}
        self._step = 0  # of the last record
        self._epoch: float | None = None
        self._waiting: deque[Reading] = deque()  # with numbers that are still on a device
        self._clock = Clock()
        config = self._config(asked, resume, overwrite)  # before anything is touched
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RunFolderError(f"{self.folder} is in the way of a run folder: give another folder") from None
        self._records: Records | None = None
        try:
            self._records = Records(self.folder)
        except RunFolderError:
            raise RunFolderError(
                f"{self.folder} is in use, by another process or by a recorder that was not closed: close it, "
                "or give another folder"
            ) from None
        try:
            config = self._config(asked, resume, overwrite)  # another process may just have been here
            self._begin(self._records, config, resume)
        except BaseException:
            self._end()
            raise
        self._clock.restart()

    def _config(self, asked: Mapping[str, Any], resume: bool, overwrite: bool) -> RunConfig:
        """The configuration of the run, or RunFolderError if there is a run that has to stay as it is."""
        folder = self.folder
        saved = RunConfig.load(folder) if RunConfig.is_in(folder) else None
        if (saved is not None and not saved.recorded) or (folder / MODEL_FILE).exists():
            raise RunFolderError(f"{folder} holds a run of `woodbury train`: record in another folder")
        if not resume and not overwrite and _has_records(folder):
            raise RunFolderError(
                f"{folder} holds a run already: give another folder, resume=True to go on with it, "
                "or overwrite=True to remove its records"
            )
        if resume and saved is None and _has_records(folder):
            raise RunFolderError(
                f"cannot resume {folder}: it has no {CONFIG_FILE}; give another folder, "
                "or overwrite=True to remove its records"
            )
        if resume and saved is not None:
            config = dataclasses.replace(saved, **{_FIELDS.get(name, name): asked[name] for name in asked})
            for field, (there, here) in saved.differences(config).items():
                name = next((name for name, own in _FIELDS.items() if own == field), field)
                raise RunFolderError(
                    f"cannot resume {folder}: it has {name} {there}, and {here} was asked for; "
                    "give another folder, or overwrite=True to remove its records"
                )
            return saved
        for name in ("problem", "method"):
            if name not in asked:
                raise ValueError(f"a new run in {folder} needs its {name}: Recorder(folder, {name}=...)")
        return RunConfig.of_loop(
            asked["problem"], asked["method"], asked.get("settings", {}), asked.get("seed", 0)
        )

    def _begin(self, records: Records, config: RunConfig, resume: bool) -> None:
        """Get the files ready for the first new record, in steps that each leave a folder that can be read."""
        folder = self.folder
        for name in (CONFIG_FILE, CHECKS_FILE, COMPLETE_FILE):
            remove_unfinished(folder / name)
        goes_on = resume and RunConfig.is_in(folder)
        length = self._restore() if goes_on else 0
        (folder / COMPLETE_FILE).unlink(missing_ok=True)
        records.go_back(length, None)
        if not goes_on:
            config.save(folder)

    def _restore(self) -> int:
        """Take up the numbers of the last whole records; return their length in bytes."""
        kinds = read_records(self.folder, is_complete(self.folder, recorded=True), recorded=True)
        last = [records[-1] for records in kinds.values() if records]
        self._step = max((record["step"] for record in last), default=0)
        self._clock.seconds = max((record.get("seconds") or 0.0 for record in last), default=0.0)
        if kinds["epoch"]:
            self._epoch = kinds["epoch"][-1]["epoch"]
        return (self.folder / RECORDS_FILE).read_bytes().rfind(b"\n") + 1

    # -- the loop ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._step

    @property
    def epochs(self) -> float:
        """The number of the last epoch that was recorded, 0 before the first one."""
        return self._epoch or 0

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
            if info is not None and not isinstance(info, StepInfo | Mapping):
                raise TypeError(
                    f"step takes a StepInfo, a mapping, or numbers by name such as loss={info!r:.40}, "
                    f"not {type(info).__name__}"
                )
            given = {**info, **numbers} if isinstance(info, Mapping) else numbers
            values = {name: plain_number(name, value) for name, value in given.items()}
            for name in values:
                if not is_name(name) or name == "kind":
                    raise ValueError(f"{name!r:.40} cannot be the name of a number: give it another one")
            step = read_number(values.pop("step", self._step + 1))
            if not isinstance(step, int) or not self._step < step <= EXACT:
                raise ValueError(f"step must be a whole number above {self._step}, the last one, got {step!r}")
            seconds = self._set_clock(values.pop("seconds", None))
            self._step = step
            epoch = math.floor(self.epochs) + 1
            counts = {"kind": "step", "epoch": epoch, "step": step, "seconds": seconds, "damping": None}
            self._waiting.append(Reading(counts, info if isinstance(info, StepInfo) else None, values))
            if len(self._waiting) >= READ_EVERY or not self._waiting[0].is_on_device():
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
            given = {"train_loss": train_loss, "test_loss": test_loss, "test_error": test_error}
            values = {name: read_number(plain_number(name, value)) for name, value in given.items()}
            if values["train_loss"] is None:
                raise TypeError("train_loss is None: every epoch needs the train loss")
            if values["test_error"] is not None and values["test_error"] < 0:
                raise ValueError(f"test_error must be a fraction, not below zero, got {values['test_error']}")
            number = math.floor(self.epochs) + 1 if epoch is None else read_number(plain_number("epoch", epoch))
            if isinstance(number, bool) or not 0 <= number <= EXACT or not self._follows(number):
                behind = "" if self._epoch is None else f" above {self._epoch}, the last one"
                raise ValueError(f"epoch must be a number from 0 on{behind}, got {number!r}")
            at = self._set_clock(None if seconds is None else plain_number("seconds", seconds))
            self._write_waiting()
            self._epoch = number
            measured = {name: value for name, value in values.items() if value is not None}
            self._write({"kind": "epoch", "epoch": number, "step": self._step, "seconds": at, **measured})

    def _follows(self, epoch: float) -> bool:
        return self._epoch is None or epoch > self._epoch

    def _set_clock(self, seconds: Any) -> float:
        """The seconds of a record: those given, from which the clock goes on, or those of the clock."""
        if seconds is not None:
            value = read_number(seconds)
            if isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"seconds must be a finite number from 0 on, got {value!r}")
            self._clock.seconds = float(value)
        return self._clock.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count, for evaluations and the like; it may call `step` and `epoch`."""
        wait_for_device()
        with self._clock.stopped():
            yield

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left and mark the run as complete."""
        if self._records is None:
            return
        try:
            self._write_waiting()
            self._records.sync()
            write_whole(self.folder / COMPLETE_FILE, b"")
            sync_folder(self.folder)
        finally:
            self._end()

    def __enter__(self) -> "Recorder":
        self._check_open()
        self._clock.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            with suppress(Exception):  # the error on its way is the one to see; a broken device cannot be read
                self._write_waiting()
        finally:
            self._end()

    def _end(self) -> None:
        if self._records is not None:
            self._records.__exit__()
            self._records = None

    def _check_open(self) -> None:
        if self._records is None:
            raise RunFolderError(f"the recorder of {self.folder} is closed: Recorder(folder, resume=True) goes on")

    # -- writing ----------------------------------------------------------------------------------------------

    def _write_waiting(self) -> None:
        """Write the steps whose numbers have not been read yet."""
        while self._waiting:
            step = self._waiting.popleft()  # first: no line may be there twice, whenever Ctrl-C comes
            self._write(step.read())

    def _write(self, record: dict[str, Any]) -> None:
        """Append a record, all of it or, if this is interrupted, nothing."""
        assert self._records is not None
        before = self._records.length
        try:
            self._records.write(record)
        except BaseException:
            self._records.go_back(before, None)
            raise


def _has_records(folder: Path) -> bool:
    path = folder / RECORDS_FILE
    return path.exists() and path.stat().st_size > 0


def _check_name(what: str, name: Any) -> str:
    if not is_name(name):
        raise ValueError(f"{what} must be a short line of printable text, got {name!r:.80}")
    return str(name)


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) <= _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0 on, got {seed!r:.80}")
    return int(seed)


def _check_settings(settings: Any) -> dict[str, Any]:
    """The settings as JSON gives them back, so that a saved run can be compared with the one asked for."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a mapping of names to values, got {type(settings).__name__}")
    return {_check_name("the name of a setting", name): _setting(name, value) for name, value in settings.items()}


def _setting(name: str, value: Any) -> Any:
    plain = _plain(value)
    if not is_setting(plain):
        raise ValueError(
            f"settings: {name} must be a finite number, a short text, true, false, None, a list of these or a "
            f"damping policy, got {value!r:.80}; its str() would do"
        )
    try:
        return to_plain(from_plain(plain))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"settings: {name} is a mapping that is no policy ({error}); give its entries one by one"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return to_plain(value)
    return int(value) if isinstance(value, Integral) else float(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "problem": partial(_check_name, "problem"),
    "method": partial(_check_name, "method"),
    "settings": _check_settings,
    "seed": _check_seed,
}
