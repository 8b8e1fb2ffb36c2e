"""Choose the settings of the `digits` preset: the same grid for every optimizer, smallest train loss wins.

The grid runs on seeds of its own, so that the seeds `woodbury compare` shows took no part in the choice;
the test set takes no part either. A cell counts by its worst seed: the median of a few seeds prefers
settings that are fast on most seeds and diverge on the others. Takes about fifteen minutes:

    .venv/bin/python examples/digits_grid.py
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path

from woodbury.experiments.data import Dataset, load_dataset
from woodbury.experiments.presets import PRESETS, default_settings
from woodbury.experiments.train import train
from woodbury.runs import report

OPTIMIZERS = ("smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac", "sgd")
RATES = (0.1, 0.3, 1.0, 2.0)
MOMENTA = (0.0, 0.9)
SEEDS = (100, 101, 102, 103, 104)


def worst_loss(optimizer: str, lr: float, momentum: float, folder: Path, data: Dataset) -> float | None:
    """The largest train loss after the last epoch over the seeds; None if it has no momentum to set."""
    settings = {"lr": lr}
    if "momentum" in default_settings(optimizer):
        settings["momentum"] = momentum
    elif momentum:
        return None
    losses = []
    for seed in SEEDS:
        run = folder / f"{optimizer}-{lr}-{momentum}-{seed}"
        train(PRESETS["digits"].config("digits", optimizer, seed, settings=settings), run, data=data)
        losses.append(report.load([run])[0].epochs[-1]["train_loss"])
    # A loss that is not finite is recorded as null and ranks last.
    return max(float("inf") if loss is None else loss for loss in losses)


def main() -> None:
    """Print the grid as a Markdown table, the best cell of each row in bold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("optimizers", nargs="*", help=f"some of {', '.join(OPTIMIZERS)} (default: all)")
    chosen = parser.parse_args().optimizers or OPTIMIZERS
    if unknown := set(chosen).difference(OPTIMIZERS):
        parser.error(f"no such optimizer: {', '.join(sorted(unknown))}")
    cells = list(product(MOMENTA, RATES))
    data = load_dataset("digits")
    print("| optimizer |", " | ".join(f"lr {lr:g}, momentum {momentum:g}" for momentum, lr in cells), "|")
    print("| --- |" + " --- |" * len(cells))
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in chosen:
            losses = [worst_loss(optimizer, lr, momentum, Path(folder), data) for momentum, lr in cells]
            best = min(loss for loss in losses if loss is not None)
            shown = ["-" if x is None else f"**{x:.2g}**" if x == best else f"{x:.2g}" for x in losses]
            print(f"| {optimizer} |", " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
