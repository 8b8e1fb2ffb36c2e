"""Weights & Biases: `woodbury.wandb.WandB`. Needs the package wandb.

from woodbury.wandb import WandB

with WandB(project="fits", config={"lr": 1}) as log:
    woodbury.fit(model, loss, (inputs, targets), callback=log)
"""

from collections.abc import Mapping
from typing import Any

from woodbury.experiments.log import Log

try:
    import wandb
except ImportError as error:
    raise ImportError(f"woodbury.wandb needs the package wandb: pip install wandb ({error})") from None


class WandB(Log):
    """A `Log` that writes to a run of Weights & Biases.

    Args:
        run: a run that `wandb.init` gave, which stays open; by default a new one.
        settings: of the new run, as `wandb.init` takes them: project=, config=, mode="offline", ...
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        super().__init__()
        if run is not None and settings:
            raise TypeError(f"WandB: {', '.join(settings)} are for a new run, and one was given")
        self._own = run is None
        self.run: Any = wandb.init(**settings) if run is None else run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        super().close()
        if self._own:
            self.run.finish()
