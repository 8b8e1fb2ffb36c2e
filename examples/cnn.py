"""Train a small convolutional network: natural gradient and Gauss-Newton against SGD and Adam.

Three convolutions with group normalisation and a linear layer, on MNIST if a folder with its files is named
(--data-dir or WOODBURY_DATA), otherwise on the 8 x 8 digits that ship with scikit-learn. Every method gets the
same number of steps, a learning rate that falls linearly to zero, and three settings; the setting with the
smallest train loss on seed 0 is run again on seeds from 100 on, and those runs are drawn. The three rates of each
method are a factor 2 apart, around the best of an earlier search on seed 0 with a quarter of an MNIST epoch: 15
settings of the natural gradient (rates, initial damping, blocks) and 6 each of Gauss-Newton, SGD and Adam, after
eight runs of a whole epoch.

    python examples/cnn.py --data-dir data          # MNIST, one epoch each: 20 minutes
    python examples/cnn.py                          # the small digits, 10 epochs each
    python examples/cnn.py --epochs 1 --seeds 1
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import woodbury
from harness import (
    AMBER,
    BLUE,
    GREY,
    ORANGE,
    Build,
    Methods,
    Run,
    compare,
    figure,
    from_torch,
    options,
    plot_runs,
    train,
)
from woodbury.experiments.data import load_dataset

BATCH = 128
POINTS = 12  # of a curve, besides the start
LOSS = nn.CrossEntropyLoss()


@dataclass
class Images:
    """A data set of images (n, 1, side, side) with labels (n,)."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(data_dir: Path | None) -> Images:
    """MNIST where there is a data folder, else scikit-learn's digits."""
    name = "mnist" if data_dir or os.environ.get("WOODBURY_DATA") else "digits"
    data = load_dataset(name, data_dir)
    side = round(data.train_inputs.shape[1] ** 0.5)

    def square(inputs: Tensor) -> Tensor:
        # A border pixel is almost always black, so that other values are extreme: they are cut off at 3 sigma.
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


# The default initial damping, 1, is too low here: the ratio is computed on the batch that the step has fitted.
DAMPING = woodbury.LevenbergMarquardt(initial=10.0)
natural_gradient = partial(woodbury.NaturalGradient, loss=LOSS, momentum=0.9, damping=DAMPING, blocks="layer")
gauss_newton = partial(woodbury.GaussNewton, loss=LOSS, momentum=0.9, damping=DAMPING, curvature_samples=16)
METHODS: Methods = {
    "woodbury.NaturalGradient": {f"lr {lr:g}": partial(natural_gradient, lr=lr) for lr in (0.5, 1.0, 2.0)},
    "woodbury.GaussNewton": {f"lr {lr:g}": partial(gauss_newton, lr=lr) for lr in (0.5, 1.0, 2.0)},
    "SGD with momentum": {
        f"lr {lr:g}": from_torch(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.025, 0.05, 0.1)
    },
    "Adam": {f"lr {lr:g}": from_torch(torch.optim.Adam, lr=lr) for lr in (0.0025, 0.005, 0.01)},
}
TITLES = {"mnist": "MNIST", "digits": "the 8 x 8 digits"}
COLOURS = (ORANGE, BLUE, AMBER, GREY)


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean loss and the fraction of images that are classified wrongly."""
    outputs = torch.cat([model(part) for part in inputs.split(500)])
    return LOSS(outputs, targets).item(), (outputs.argmax(1) != targets).double().mean().item()


def run(build: Build, seed: int, data: Images, epochs: int) -> Run:
    """Train a new network; the seed also decides the order of the images."""
    torch.manual_seed(seed)
    inputs, targets = data.train
    model = network(inputs.shape[-1])
    optimizer = build(model)
    order = [batch for _ in range(epochs) for batch in torch.randperm(len(inputs)).split(BATCH)]
    batches = ((inputs[batch], targets[batch]) for batch in order)

    def train_loss(model: nn.Module) -> float:
        return evaluate(model, inputs[:4000], targets[:4000])[0]

    curve = train(optimizer, model, LOSS, len(order), batches, train_loss, POINTS)
    return Run(curve, score=100 * evaluate(model, *data.test)[1], model=model)


def draw(best: dict[str, list[Run]], title: str, epochs: int, path: Path) -> None:
    """Train loss by epochs and by seconds."""
    with figure(path, columns=2, figsize=(10, 4.2), sharey=True) as (_, ((left, right),)):
        from matplotlib import ticker

        plot_runs((left, right), best, COLOURS, epochs, "epochs")
        left.set(yscale="log", ylabel="train loss")
        right.set(xscale="log")
        for axis in (left.yaxis, right.xaxis):  # 0.05, 0.1, 0.2 in place of powers of ten
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(ticker.NullFormatter())
        left.set_title(title)


def main(argv: list[str] | None = None) -> dict[str, list[Run]]:
    parser = options(__doc__, "cnn.png", seeds=(2, "networks to draw"))
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/ in it (default: WOODBURY_DATA)")
    parser.add_argument("--epochs", type=int, help="of each run (default 1, on the small digits 10)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = load(args.data_dir)
    epochs = args.epochs or (1 if data.name == "mnist" else 10)
    print(f"{data.name}, {epochs} epoch(s) in batches of {BATCH}")
    line = "train loss {loss:8.2g}   test error {score:5.2f} %   {seconds:6.1f} s"
    best = compare(METHODS, partial(run, data=data, epochs=epochs), line, args.seeds)
    draw(best, f"A small CNN on {TITLES[data.name]}", epochs, args.out)
    return best


if __name__ == "__main__":
    main()
