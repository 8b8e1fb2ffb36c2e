"""One training run, from a configuration to a folder of plain files.

    config.json     everything needed to repeat the run
    records.jsonl   one JSON object a line: {"kind": "step", ...} after each step, {"kind": "epoch", ...}
                    after each epoch (or part of one), the first of these (epoch 0) before any training
    checkpoint.pt   while the run is unfinished: what it needs to go on
    model.pt        the state_dict of the trained network; its presence says that the run is complete

The key `seconds` in a record is the time spent inside `optimizer.step` so far; evaluation, records and
checkpoints are not counted.
"""

import io
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from woodbury.experiments.config import CONFIG_FILE, RECORDS_FILE, RunConfig
from woodbury.experiments.data import Dataset, load_dataset
from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.folders import check_same_run
from woodbury.experiments.models import mlp
from woodbury.experiments.storage import remove_unfinished, write_whole
from woodbury.optim import OPTIMIZERS, NonFiniteLossError

_CHECKPOINT, _MODEL = "checkpoint.pt", "model.pt"
_CHECKPOINT_SECONDS = 20.0  # between checkpoints within an epoch
_EVALUATED_AT_ONCE = 10_000  # samples


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    damping: float


class InterruptedRunError(Exception):
    """The run was asked to stop; everything done so far is in its folder and `resume=True` goes on."""


def train(
    config: RunConfig,
    folder: Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    data: Dataset | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train as `config` says and leave the results in `folder`, which must not exist yet.

    Args:
        config: the run.
        folder: where its files go.
        progress: called after every step.
        data: the data set, where it has been loaded already.
        resume: go on where a folder with the same configuration was left; on the CPU the end is bit-identical
            to that of a run never interrupted. A complete run is left alone, an absent one started.
        stop: asked after every step; true saves a checkpoint and raises `InterruptedRunError`.
    """
    if resume:
        check_same_run(config, folder)
        _tidy(folder)
        if is_complete(folder):
            return
    folder.mkdir(parents=True, exist_ok=resume)
    if not RunConfig.is_in(folder):
        config.save(folder)
    run = _Run(config, load_dataset(config.dataset) if data is None else data)
    with _opened_records(folder / RECORDS_FILE) as records:
        run.restore(folder / _CHECKPOINT, records)
        run.go(folder, records, progress, stop)
    write_whole(folder / _MODEL, _as_bytes(run.model.state_dict()))
    (folder / _CHECKPOINT).unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Remove what a kill in the middle of writing a file left behind."""
    for name in (_CHECKPOINT, _MODEL, CONFIG_FILE):
        remove_unfinished(folder / name)
    if is_complete(folder):
        (folder / _CHECKPOINT).unlink(missing_ok=True)


def is_complete(folder: Path) -> bool:
    """Whether the run in this folder has ended."""
    return (folder / _MODEL).exists()


class _Run:
    """What a run is at one moment: everything that a checkpoint holds."""

    def __init__(self, config: RunConfig, data: Dataset) -> None:
        self.config = config
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        self.train_set = _placed(data.train_inputs, data.train_targets, device, dtype)
        self.test_set = _placed(data.test_inputs, data.test_targets, device, dtype)
        self.loss = data.loss()
        self.model = mlp(config.widths, seed=config.seed).to(device, dtype)
        self.optimizer = OPTIMIZERS[config.optimizer](self.model, self.loss, **config.optimizer_settings())
        # Every optimizer sees the same batches for the same seed.
        self.order = torch.Generator().manual_seed(config.seed)
        self.order_of_epoch = self.order.get_state()  # before the epoch's permutation was drawn
        self.epoch = 0  # under way, from 1; 0 before the first evaluation
        self.done = 0  # batches of this epoch
        self.step = 0
        self.seconds = 0.0

    def go(
        self,
        folder: Path,
        records: BinaryIO,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool],
    ) -> None:
        """Train to the end from wherever the run stands."""
        config, (inputs, targets) = self.config, self.train_set
        per_epoch = math.ceil(len(inputs) / config.batch_size)
        steps = config.epochs * per_epoch
        marks = {round(part * per_epoch / config.evaluations) for part in range(1, config.evaluations + 1)}
        if self.epoch == 0:
            self._evaluate(records, per_epoch)
            self.epoch = 1
        saved = time.monotonic()
        while self.epoch <= config.epochs:
            self.order.set_state(self.order_of_epoch)
            batches = torch.randperm(len(inputs), generator=self.order).split(config.batch_size)
            for batch in batches[self.done :]:
                index = batch.to(inputs.device)
                try:
                    values = self._step(inputs[index], targets[index])
                except NonFiniteLossError:  # no step can lead back: the run ends here, with this on record
                    self._evaluate(records, per_epoch)
                    return
                record = {"kind": "step", "epoch": self.epoch, "step": self.step, "seconds": self.seconds}
                _write(records, {**record, **values})
                if progress is not None:
                    progress(Progress(self.step, steps, values["loss"], values["damping"]))
                if self.done in marks:
                    self._evaluate(records, per_epoch)
                asked = stop()
                if asked or time.monotonic() - saved > _CHECKPOINT_SECONDS:
                    self.save(folder / _CHECKPOINT, records)
                    saved = time.monotonic()
                if asked and self.step < steps:
                    raise InterruptedRunError
            self.epoch, self.done, self.order_of_epoch = self.epoch + 1, 0, self.order.get_state()

    def _step(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """One step of the optimizer, on the clock."""
        started = time.perf_counter()
        info = self.optimizer.step(inputs, targets)
        if inputs.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started
        self.step, self.done = self.step + 1, self.done + 1
        values: dict[str, Any] = info.as_dict()
        if hasattr(self.optimizer, "iterations"):
            values["iterations"] = self.optimizer.iterations
        return values

    def _evaluate(self, records: BinaryIO, per_epoch: int) -> None:
        """Record the loss and the error on both sets."""
        epoch = self.step / per_epoch
        record: dict[str, Any] = {"kind": "epoch", "epoch": int(epoch) if epoch.is_integer() else epoch}
        record |= {"step": self.step, "seconds": self.seconds}
        for name, (inputs, targets) in (("train", self.train_set), ("test", self.test_set)):
            record[f"{name}_loss"], record[f"{name}_error"] = evaluate(self.model, self.loss, inputs, targets)
        _write(records, record)

    def save(self, path: Path, records: BinaryIO) -> None:
        """Write a checkpoint in one piece."""
        records.flush()
        os.fsync(records.fileno())
        values = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order_of_epoch": self.order_of_epoch,
            "epoch": self.epoch,
            "done": self.done,
            "step": self.step,
            "seconds": self.seconds,
            "records": records.tell(),
        }
        write_whole(path, _as_bytes(values))

    def restore(self, path: Path, records: BinaryIO) -> None:
        """Go back to the checkpoint, or to the start if there is none, and forget later records."""
        if path.exists():
            try:
                values = torch.load(path, map_location="cpu", weights_only=True)
                self.model.load_state_dict(values["model"])
                self.optimizer.load_state_dict(values["optimizer"])
                self.order_of_epoch = values["order_of_epoch"]
                self.epoch, self.done, self.step = values["epoch"], values["done"], values["step"]
                self.seconds, length = values["seconds"], values["records"]
            except Exception as error:  # torch.load raises anything on a damaged file
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise RunFolderError(f"{path} is damaged ({reason}): delete it to train from the start") from None
            if records.seek(0, os.SEEK_END) < length:
                raise RunFolderError(
                    f"{path.parent / RECORDS_FILE} is shorter than its checkpoint says: it was changed"
                )
        else:
            length = 0
        records.seek(length)
        records.truncate()


@torch.no_grad()
def evaluate(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean loss and fraction of wrong classes."""
    was_training = model.training
    model.eval()
    total, wrong = 0.0, 0
    for x, y in zip(inputs.split(_EVALUATED_AT_ONCE), targets.split(_EVALUATED_AT_ONCE), strict=True):
        outputs = model(x)
        total += loss(outputs, y).item() * len(x)
        # one output is the logit of class 1
        predicted = outputs > 0 if outputs.shape[1] == 1 else outputs.argmax(dim=1)
        wrong += int((predicted != y).sum())
    model.train(was_training)
    return total / len(inputs), wrong / len(inputs)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only makes the function given true; the second acts at once.

    A step is never cut in two that way. In a thread other than the main one signals are left as they are.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _placed(inputs: Tensor, targets: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return inputs.to(device, dtype), targets.to(device, dtype if targets.is_floating_point() else None)


@contextmanager
def _opened_records(path: Path) -> Iterator[BinaryIO]:
    """The records for reading and writing, kept if they exist."""
    path.touch()
    with path.open("r+b") as records:
        yield records


def _write(records: BinaryIO, record: dict[str, Any]) -> None:
    """Append a record as one line of JSON, with null for what is not a finite number."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    records.write((json.dumps(finite, allow_nan=False) + "\n").encode())
    records.flush()  # what is done is on disk when a run is killed


def _as_bytes(values: Any) -> bytes:
    """The values as torch.save writes them; its own errors on a full disk are not OSErrors."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()
