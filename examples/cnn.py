"""Train a small convolutional network: natural gradient and Gauss-Newton against SGD and Adam.

Three convolutions with group normalisation and a linear layer, on MNIST if a folder with its files is named
(--data-dir or WOODBURY_DATA), otherwise on the 8 x 8 digits that ship with scikit-learn. Every method gets the
same steps, a learning rate that falls linearly to zero, and three settings; the setting with the smallest train
loss on seed 0 is run again on seeds from 100 on, and those runs are drawn. The three rates of each method lie a
factor 2 apart around the best of those tried before on seed 0 and a quarter of an MNIST epoch: 15 settings of
the natural gradient (rates, starts of the damping, blocks), 6 of Gauss-Newton, 6 of SGD and 6 of Adam, after
eight runs of a whole epoch.

    python examples/cnn.py --data-dir data          # MNIST, one epoch each: 9 minutes
    python examples/cnn.py                          # the small digits, 10 epochs each
    python examples/cnn.py --epochs 1 --seeds 1
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import woodbury
from woodbury.experiments.data import load_dataset

BATCH = 128
POINTS = 12  # of a curve, besides the start
LOSS = nn.CrossEntropyLoss()

Curve = list[tuple[float, float, float]]  # (epochs, CPU seconds inside the steps, train loss)
Build = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Images:
    """A data set of images (n, 1, side, side) with labels (n,)."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def probe(self) -> tuple[Tensor, Tensor]:
        """The training images on which the train loss is measured."""
        return self.train[0][:4000], self.train[1][:4000]


@dataclass
class Run:
    curve: Curve
    error: float  # on the test images, a fraction


def load(data_dir: Path | None) -> Images:
    """MNIST where there is a data folder, else scikit-learn's digits."""
    name = "mnist" if data_dir or os.environ.get("WOODBURY_DATA") else "digits"
    data = load_dataset(name, data_dir)
    side = round(data.features**0.5)

    def square(inputs: Tensor) -> Tensor:
        # A pixel at the border that is almost always black is far out where it is not: it is cut off at 3 sigma.
        return inputs.clamp(-3, 3).unflatten(1, (1, side, side))

    return Images(
        name, (square(data.train_inputs), data.train_targets), (square(data.test_inputs), data.test_targets)
    )


def network(side: int) -> nn.Sequential:
    """Conv, GroupNorm, ReLU, three times at half the size each, then a linear layer for 10 classes."""
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
        channels, side = width, (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, 10))


# The default start of the damping, 1, is too low here: the ratio is taken on the batch the step has fitted.
DAMPING = woodbury.LevenbergMarquardt(initial=10.0)


def natural_gradient(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return woodbury.NaturalGradient(model, LOSS, lr=lr, momentum=0.9, damping=DAMPING, blocks="layer")


def gauss_newton(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return woodbury.GaussNewton(model, LOSS, lr=lr, momentum=0.9, damping=DAMPING, curvature_samples=16)


def sgd(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


METHODS: dict[str, dict[str, Build]] = {
    "woodbury.NaturalGradient": {f"lr {lr:g}": partial(natural_gradient, lr) for lr in (0.5, 1.0, 2.0)},
    "woodbury.GaussNewton": {f"lr {lr:g}": partial(gauss_newton, lr) for lr in (0.5, 1.0, 2.0)},
    "SGD with momentum": {f"lr {lr:g}": partial(sgd, lr) for lr in (0.025, 0.05, 0.1)},
    "Adam": {f"lr {lr:g}": partial(adam, lr) for lr in (0.0025, 0.005, 0.01)},
}
TITLES = {"mnist": "MNIST", "digits": "the 8 x 8 digits"}
COLOURS = ("#D55E00", "#0072B2", "#E69F00", "#555555")


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    if isinstance(optimizer, woodbury.NaturalGradient | woodbury.GaussNewton):
        optimizer.step(inputs, targets)
    else:
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, images: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean loss and the fraction of images that are classified wrongly."""
    outputs = torch.cat([model(inputs) for inputs in images[0].split(500)])
    return LOSS(outputs, images[1]).item(), (outputs.argmax(1) != images[1]).double().mean().item()


def run(build: Build, data: Images, epochs: int, seed: int) -> Run:
    """Train a fresh network; the order of the images follows the seed as well."""
    torch.manual_seed(seed)
    inputs, targets = data.train
    model = network(inputs.shape[-1])
    optimizer = build(model)
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(inputs)).split(BATCH)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    marks = {round(len(batches) * point / POINTS) for point in range(1, POINTS + 1)}
    curve, seconds = [(0.0, 0.0, evaluate(model, data.probe)[0])], 0.0
    for count, batch in enumerate(batches, start=1):
        start = time.process_time()
        take_step(optimizer, model, inputs[batch], targets[batch])
        schedule.step()
        seconds += time.process_time() - start
        if count in marks:
            curve.append((epochs * count / len(batches), seconds, evaluate(model, data.probe)[0]))
    return Run(curve, evaluate(model, data.test)[1])


def summary(runs: list[Run]) -> str:
    """The median over the runs of what a run ends with."""
    loss = median(run.curve[-1][2] for run in runs)
    error = median(run.error for run in runs)
    seconds = median(run.curve[-1][1] for run in runs)
    return f"train loss {loss:8.2g}   test error {100 * error:5.2f} %   {seconds:6.1f} s"


def compare(data: Images, epochs: int, seeds: int) -> dict[str, list[Run]]:
    """The runs to draw, by method and its best setting."""
    best: dict[str, list[Run]] = {}
    print(f"{data.name}, {epochs} epoch(s) in batches of {BATCH}\nseed 0, to choose a setting:")
    for method, settings in METHODS.items():
        losses = {}
        for setting, build in settings.items():
            trial = run(build, data, epochs, seed=0)
            losses[setting] = trial.curve[-1][2]
            print(f"  {method:25} {setting:9} {summary([trial])}", flush=True)
        # a loss that is not a number ranks last
        chosen = min(losses, key=lambda setting: (losses[setting] != losses[setting], losses[setting]))
        best[f"{method}, {chosen}"] = [
            run(settings[chosen], data, epochs, seed) for seed in range(100, 100 + seeds)
        ]
    print(f"the chosen settings, median over {seeds} other seed(s):")
    for label, runs in best.items():
        print(f"  {label:35} {summary(runs)}")
    return best


def draw(best: dict[str, list[Run]], title: str, path: Path) -> None:
    """Train loss by epochs and by seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axes, column, unit in zip(panels, (0, 1), ("epochs", "CPU seconds, one thread"), strict=True):
        for (label, runs), colour in zip(best.items(), COLOURS, strict=True):
            for index, trained in enumerate(runs):
                points = trained.curve[1:]  # the start would stretch the axis
                across, losses = [point[column] for point in points], [point[2] for point in points]
                axes.plot(across, losses, color=colour, alpha=0.85, label=label if index == 0 else None)
        axes.set(yscale="log", xlabel=unit)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xscale("log")
    for axis in (panels[0].yaxis, panels[1].xaxis):  # 0.05, 0.1, 0.2 in place of powers of ten
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    panels[0].set_ylabel("train loss")
    panels[0].set_title(title, loc="left", fontweight="bold")
    count = len(next(iter(best.values())))
    panels[0].legend(frameon=False, title=f"{count} seed{'s' * (count > 1)} each", alignment="left")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> dict[str, list[Run]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/ in it (default: WOODBURY_DATA)")
    parser.add_argument("--epochs", type=int, help="of each run (default 1, on the small digits 10)")
    parser.add_argument("--seeds", type=int, default=2, help="networks to draw (default 2)")
    parser.add_argument("--out", type=Path, default=Path("cnn.png"), help="the figure")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = load(chosen.data_dir)
    epochs = chosen.epochs or (1 if data.name == "mnist" else 10)
    best = compare(data, epochs, chosen.seeds)
    draw(best, f"A small CNN on {TITLES[data.name]}", chosen.out)
    print(f"figure: {chosen.out}")
    return best


if __name__ == "__main__":
    main()
