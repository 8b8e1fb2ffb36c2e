"""One training run, from a configuration to a folder of plain files, which docs/runs.md lists.

A run that is killed at any moment resumes from its last checkpoint. The key `seconds` in a record is the time
spent inside `optimizer.step` so far, without evaluation and writing.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._files import as_bytes, one_line, sealed, unsealed, write_whole
from woodbury.experiments.data import Dataset
from woodbury.optim import NonFiniteLossError, StepInfo
from woodbury.optimizers import OPTIMIZERS
from woodbury.runs.config import FORMAT, RunConfig, RunFolderError
from woodbury.runs.records import RECORDS_FILE, Records, is_complete, mark_complete, read_checked

_CHECKPOINT, _MODEL = "checkpoint.pt", "model.pt"
CHECKPOINT_SECONDS = 20.0  # between two checkpoints
_EVALUATION_SAMPLES = 10_000  # at once


class InterruptedRunError(Exception):
    """The run was stopped; its folder holds everything so far, and `resume=True` continues."""


def train(
    config: RunConfig,
    folder: Path,
    progress: Callable[[int, int, float, float], None] = lambda *now: None,
    *,
    data: Dataset,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train as `config` says and leave the results in `folder`, which must not exist yet.

    Args:
        config: the run.
        folder: where its files go.
        progress: called after every step with its number, that of all steps, the loss and the damping.
        data: the data set that `config` names.
        resume: continue the run in `folder`, which must have the same configuration; on the CPU the result is
            bit-identical to that of a run without a break. A complete run stays as it is, an absent one starts.
        stop: called after every step; if true, a checkpoint is saved and `InterruptedRunError` raised.
    """
    folder.mkdir(parents=True, exist_ok=resume)
    checkpoint = folder / _CHECKPOINT
    with Records(folder) as records:
        if not RunConfig.is_in(folder):
            config.save(folder)
        RunConfig.load(folder).check_same(config, folder)
        if is_complete(folder):
            read_checked(folder, _MODEL)
            checkpoint.unlink(missing_ok=True)  # of a run that was killed as it ended
            return
        run = _Run(config, data, checkpoint, records)
        run.restore()
        run.finish(progress, stop)
        model = as_bytes(run.model.state_dict())
        write_whole(folder / _MODEL, model)
        records.sync()
        checksums = {RECORDS_FILE: records.sha256, _MODEL: hashlib.sha256(model).hexdigest()}
        mark_complete(folder, checksums)  # before the checkpoint goes
        checkpoint.unlink(missing_ok=True)


class _Run:
    """A run under way: everything that a checkpoint holds."""

    def __init__(self, config: RunConfig, data: Dataset, checkpoint: Path, records: Records) -> None:
        self.config, self.checkpoint, self.records = config, checkpoint, records
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        self.train_set = _to_device(data.train_inputs, data.train_targets, device, dtype)
        self.test_set = _to_device(data.test_inputs, data.test_targets, device, dtype)
        self.per_epoch = math.ceil(len(self.train_set[0]) / config.batch_size)  # steps
        self.loss = data.loss()
        self.model = mlp(config.widths, seed=config.seed).to(device, dtype)
        self.optimizer = OPTIMIZERS[config.optimizer](self.model, self.loss, **config.optimizer_settings())
        self.step = 0
        self.seconds = 0.0

    def finish(self, progress: Callable[..., None], stop: Callable[[], bool]) -> None:
        """Train from the current state to the end."""
        config, (inputs, targets) = self.config, self.train_set
        steps = config.epochs * self.per_epoch
        marks = {round(part * self.per_epoch / config.evaluations) for part in range(1, config.evaluations + 1)}
        order = torch.Generator("cpu").manual_seed(config.seed)  # the same batches for every optimizer
        if self.step == 0:
            self._evaluate()
        saved = time.monotonic()
        for epoch in range(config.epochs):
            batches = torch.randperm(len(inputs), generator=order, device="cpu").split(config.batch_size)
            done = max(0, self.step - epoch * self.per_epoch)  # of these, before the checkpoint
            for number, batch in enumerate(batches[done:], start=done + 1):
                index = batch.to(inputs.device)
                try:
                    values = self._step(inputs[index], targets[index]).as_dict()
                except NonFiniteLossError:  # no step can lead back: the run ends here, with the loss on record
                    self._evaluate()
                    return
                stopping = stop() and self.step < steps
                place = {"epoch": epoch + 1, "step": self.step, "seconds": self.seconds}
                self.records.write({"kind": "step", **place, **values})
                progress(self.step, steps, values["loss"], values["damping"])
                if number in marks:
                    self._evaluate()
                if stopping or time.monotonic() - saved >= CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if stopping:
                    raise InterruptedRunError

    def _step(self, inputs: Tensor, targets: Tensor) -> StepInfo:
        """Take one step and add its time to `seconds`."""
        started = time.perf_counter()
        info: StepInfo = self.optimizer.step(inputs, targets)
        if inputs.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started
        self.step += 1
        return info

    def _evaluate(self) -> None:
        """Record the loss and the error on both sets, at the end of an epoch or a part of one."""
        epoch = self.step / self.per_epoch
        place = {"epoch": int(epoch) if epoch.is_integer() else epoch, "step": self.step, "seconds": self.seconds}
        record: dict[str, Any] = {"kind": "epoch", **place}
        for name, (inputs, targets) in (("train", self.train_set), ("test", self.test_set)):
            record[f"{name}_loss"], record[f"{name}_error"] = evaluate(self.model, self.loss, inputs, targets)
        self.records.write(record)

    def save(self) -> None:
        """Write a checkpoint, with the records before it on disk."""
        self.records.sync()
        values = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "records": (self.records.length, self.records.sha256),
        }
        write_whole(self.checkpoint, sealed("checkpoint", FORMAT, values))

    def restore(self) -> None:
        """Go back to the checkpoint, or to the start if there is none, and remove later records.

        Raises RunFolderError, and leaves all files as they are, if it is damaged or of another run.
        """
        path = self.checkpoint
        if not path.exists():
            self.records.go_back(0)
            return
        content = path.read_bytes()
        try:
            values = unsealed(content, "checkpoint", FORMAT)
            self.model.load_state_dict(values["model"])
            self.optimizer.load_state_dict(values["optimizer"])
            self.step, self.seconds = values["step"], values["seconds"]
            self.records.go_back(*values["records"])
        except (OSError, MemoryError, torch.OutOfMemoryError):  # no fault of the checkpoint
            raise
        except Exception as error:  # damage, other records, or what torch says of a state that it cannot take
            raise RunFolderError(
                f"cannot resume from {path}: {one_line(error)}; delete {path.name} to train from the start"
            ) from None


def mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Linear layers of these widths with sigmoids between them; the weights depend on `seed` alone."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])  # the last layer gives logits


@torch.no_grad()
def evaluate(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean loss, and fraction of samples that are classified wrongly."""
    total, wrong = 0.0, 0
    for x, y in zip(inputs.split(_EVALUATION_SAMPLES), targets.split(_EVALUATION_SAMPLES), strict=True):
        outputs = model(x)
        total += loss(outputs, y).item() * len(x)
        # one output is the logit of class 1
        predicted = outputs > 0 if outputs.shape[1] == 1 else outputs.argmax(dim=1)
        wrong += int((predicted != y).sum())
    return total / len(inputs), wrong / len(inputs)


def _to_device(inputs: Tensor, targets: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return inputs.to(device, dtype), targets.to(device, dtype if targets.is_floating_point() else None)
