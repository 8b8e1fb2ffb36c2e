"""Logs for TensorBoard and Weights & Biases, whose packages are imported when a log is made.

import woodbury.logs

with woodbury.logs.TensorBoard("runs/board") as log:
    woodbury.fit(model, loss, loader, epochs=10, record=log)     # tensorboard --logdir runs/board
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from woodbury.fit import Fit
from woodbury.optim import StepInfo
from woodbury.runs.recorder import Readings, read_number


class Log(ABC):
    """Hands the numbers of a training on by name: those of a step as step/loss, of an epoch as epoch/train_loss.

    It is a `callback=` of `woodbury.fit`, a `record=` of it, or is called in a loop of one's own:

        with log:
            for inputs, targets in loader:
                log.step(optimizer.step(inputs, targets))
            log.epoch(train_loss=train_loss, test_loss=test_loss)

    Numbers on a GPU are read every 100 steps and at each `epoch`, so that no step waits for the device. The end of
    the block hands on what is left; without a block call `close`.
    """

    def __init__(self) -> None:
        self.steps = 0  # the number of the last one
        self.epochs = 0
        self._readings = Readings(lambda numbers: self._hand_on("step", numbers.pop("step"), numbers))
        self._seen = 0  # entries in the history of a fit

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand on the numbers, by name, of the step with this number."""

    def step(self, info: StepInfo | None = None, **numbers: Any) -> None:
        """Log a step: what `optimizer.step` of woodbury returned, or numbers by name, or both."""
        self._readings.add({"step": self.steps + 1}, info, numbers)
        self.steps += 1
        self._readings.write_if_due()

    def epoch(self, **numbers: Any) -> None:
        """Log an evaluation at the last step, as that of the next epoch: train_loss=, test_loss=, ..."""
        self._readings.write()
        values = {name: read_number(name, value) for name, value in numbers.items() if value is not None}
        self.epochs += 1
        self._hand_on("epoch", self.steps, {"epoch": self.epochs, **values})

    def __call__(self, fit: Fit) -> None:
        """Log what is new in the history of a fit: a step, or with a loader an epoch."""
        for entry in fit.history[self._seen :]:
            self._hand_on("fit", entry["step"], {name: value for name, value in entry.items() if name != "step"})
        self._seen = len(fit.history)

    def close(self) -> None:
        """Hand on what is left."""
        self._readings.write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_on(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        self.write(step, {f"{kind}/{name}": float(value) for name, value in numbers.items() if value is not None})


class TensorBoard(Log):
    """A `Log` that writes scalars for TensorBoard. Needs the package tensorboard.

    Args:
        folder: for the event files, by default one that torch names.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard needs its package: pip install tensorboard ({error})") from None
        self.writer: Any = SummaryWriter(folder)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        super().close()
        self.writer.close()


class WandB(Log):
    """A `Log` that writes to a run of Weights & Biases. Needs the package wandb.

    Args:
        run: a run that `wandb.init` gave, which stays open; by default a new one.
        settings: of the new run, as `wandb.init` takes them: project=, config=, mode="offline", ...
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        super().__init__()
        if run is not None and settings:
            raise TypeError(f"WandB: {', '.join(settings)} are for a new run, and one was given")
        self._own = run is None
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError(f"WandB needs its package: pip install wandb ({error})") from None
            run = wandb.init(**settings)
        self.run: Any = run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        super().close()
        if self._own:
            self.run.finish()
