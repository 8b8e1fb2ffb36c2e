"""TensorBoard: `woodbury.tensorboard.TensorBoard`. Needs the package tensorboard.

from woodbury.tensorboard import TensorBoard

with TensorBoard("runs/board") as log:
    woodbury.fit(model, loss, loader, epochs=10, record=log)     # tensorboard --logdir runs/board
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from woodbury.experiments.log import Log

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        f"woodbury.tensorboard needs the package tensorboard: pip install tensorboard ({error})"
    ) from None


class TensorBoard(Log):
    """A `Log` that writes scalars for TensorBoard.

    Args:
        folder: for the event files, by default one that torch names; or a `SummaryWriter`, which stays open.
    """

    def __init__(self, folder: str | Path | SummaryWriter | None = None) -> None:
        super().__init__()
        self._own = not isinstance(folder, SummaryWriter)
        self.writer: Any = folder if isinstance(folder, SummaryWriter) else SummaryWriter(folder)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        super().close()
        if self._own:
            self.writer.close()
        else:
            self.writer.flush()
