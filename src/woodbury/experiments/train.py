"""One training run, from a configuration to a folder of plain files.

    config.json     everything needed to repeat the run
    records.jsonl   one JSON object a line: {"kind": "step", ...} after each step, {"kind": "epoch", ...}
                    after each epoch, the first of these (epoch 0) before any training
    model.pt        the state_dict of the trained network

The key `seconds` in a record is the time spent inside `optimizer.step` so far; evaluation is not counted.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from woodbury.experiments.config import RunConfig
from woodbury.experiments.data import DATASETS
from woodbury.experiments.models import mlp
from woodbury.optim import OPTIMIZERS


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    damping: float


def train(config: RunConfig, folder: Path, progress: Callable[[Progress], None] | None = None) -> None:
    """Train as `config` says and leave the results in `folder`, which must not exist yet."""
    folder.mkdir(parents=True)
    config.save(folder / "config.json")

    data = DATASETS[config.dataset]()
    model = mlp(config.widths, seed=config.seed)
    loss = nn.CrossEntropyLoss()
    optimizer = OPTIMIZERS[config.optimizer](model, loss, **config.settings)

    def epoch_record() -> dict[str, Any]:
        train_loss, train_error = evaluate(model, loss, data.train_inputs, data.train_targets)
        test_loss, test_error = evaluate(model, loss, data.test_inputs, data.test_targets)
        return {
            "train_loss": train_loss,
            "train_error": train_error,
            "test_loss": test_loss,
            "test_error": test_error,
        }

    # Every optimizer sees the same batches for the same seed.
    order = torch.Generator().manual_seed(config.seed)
    steps = config.epochs * math.ceil(len(data.train_inputs) / config.batch_size)
    step, seconds = 0, 0.0

    with (folder / "records.jsonl").open("w", encoding="utf-8") as records:
        _write(records, kind="epoch", epoch=0, step=step, seconds=seconds, **epoch_record())
        for epoch in range(1, config.epochs + 1):
            for batch in _batches(len(data.train_inputs), config.batch_size, order):
                inputs, targets = data.train_inputs[batch], data.train_targets[batch]
                started = time.perf_counter()
                info = optimizer.step(inputs, targets)
                seconds += time.perf_counter() - started
                step += 1
                values = info.as_dict()
                _write(records, kind="step", epoch=epoch, step=step, seconds=seconds, **values)
                if progress is not None:
                    progress(Progress(step, steps, values["loss"], values["damping"]))
            _write(records, kind="epoch", epoch=epoch, step=step, seconds=seconds, **epoch_record())

    torch.save(model.state_dict(), folder / "model.pt")


@torch.no_grad()
def evaluate(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean loss and fraction of wrong classes."""
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    wrong = outputs.argmax(dim=1) != targets
    return loss(outputs, targets).item(), wrong.double().mean().item()


def _batches(samples: int, batch_size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Indices of the batches of one epoch in random order; the last one may be smaller."""
    yield from torch.randperm(samples, generator=order).split(batch_size)


def _write(records: TextIO, **record: Any) -> None:
    """Append a record as one line of JSON, with null for what is not a finite number."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    records.write(json.dumps(finite, allow_nan=False) + "\n")
    records.flush()  # what is done is on disk when a run is interrupted
