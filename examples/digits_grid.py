"""Choose the settings of the `digits` preset: the same grid for every optimizer, smallest train loss wins.

The grid runs on seeds of its own, so that the seeds `woodbury compare` shows took no part in the choice;
the test set takes no part either. A cell counts by its worst seed: the median of a few seeds prefers
settings that are fast on most seeds and diverge on the others. Takes about ten minutes:

    .venv/bin/python examples/digits_grid.py
"""

import dataclasses
import tempfile
from itertools import product
from pathlib import Path

from woodbury.experiments import report
from woodbury.experiments.config import PRESETS
from woodbury.experiments.train import train

OPTIMIZERS = ("smw-gn", "smw-ng", "smw-ng-bd", "sgd")
RATES = (0.1, 0.3, 1.0, 2.0)
MOMENTA = (0.0, 0.9)
SEEDS = (100, 101, 102, 103, 104)


def worst_loss(optimizer: str, lr: float, momentum: float, folder: Path) -> float:
    """The largest train loss after the last epoch over the seeds."""
    losses = []
    for seed in SEEDS:
        config = PRESETS["digits"].run("digits", optimizer, seed)
        settings = {**config.settings, "lr": lr, "momentum": momentum}
        run = folder / f"{optimizer}-{lr}-{momentum}-{seed}"
        train(dataclasses.replace(config, settings=settings), run)
        losses.append(report.load_run(run).epochs[-1]["train_loss"])
    # A loss that is not finite is recorded as null and ranks last.
    return max(float("inf") if loss is None else loss for loss in losses)


def main() -> None:
    """Print the grid as a Markdown table, the best cell of each row in bold."""
    cells = list(product(MOMENTA, RATES))
    print("| optimizer |", " | ".join(f"lr {lr:g}, momentum {momentum:g}" for momentum, lr in cells), "|")
    print("| --- |" + " --- |" * len(cells))
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in OPTIMIZERS:
            losses = [worst_loss(optimizer, lr, momentum, Path(folder)) for momentum, lr in cells]
            shown = [f"**{loss:.2g}**" if loss == min(losses) else f"{loss:.2g}" for loss in losses]
            print(f"| {optimizer} |", " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
