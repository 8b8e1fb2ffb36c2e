"""Fit a smooth function with a small network: one call of `woodbury.fit` against L-BFGS and Adam, by the clock.

200 points of sin(pi x) cos(pi y), a 2-50-50-1 tanh network, float64, full batch. `fit` has no setting; L-BFGS and
Adam have three each. All are printed, and the best of each (by its final loss, median over the seeds) is drawn.
The constants of `fit` were chosen on seeds 0 to 7; the figure uses seeds from 100 on.

    python examples/precision.py                    # about 1.5 minutes; writes precision.png
    python examples/precision.py --seconds 1 --seeds 1
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import woodbury
from harness import (
    Build,
    Curve,
    Methods,
    draw_curves,
    from_torch,
    lbfgs,
    options,
    smallest,
    take_step,
    tanh_network,
)

LOSS = nn.MSELoss()


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A new network and its data."""
    torch.manual_seed(seed)
    inputs = 2 * torch.rand(200, 2, dtype=torch.float64) - 1
    targets = torch.sin(torch.pi * inputs[:, :1]) * torch.cos(torch.pi * inputs[:, 1:])
    return tanh_network((2, 50, 50, 1)), inputs, targets


RIVALS: Methods = {
    "torch L-BFGS": {f"history {history}": lbfgs(history, iterations=20) for history in (20, 50, 100)},
    "torch Adam": {f"lr {rate}": from_torch(torch.optim.Adam, lr=rate) for rate in (1e-3, 3e-3, 1e-2)},
}


def run_fit(seed: int, seconds: float, metric: str = "auto") -> Curve:
    """Loss after each step against the time spent so far."""
    model, inputs, targets = problem(seed)
    curve: Curve = []
    woodbury.fit(
        model,
        LOSS,
        (inputs, targets),
        seconds=seconds,
        metric=metric,
        progress=False,
        callback=lambda fit: curve.append((fit.seconds, fit.loss)),
    )
    return curve


def run_rival(build: Build, seed: int, seconds: float) -> Curve:
    """Loss before each step against the time spent so far."""
    model, inputs, targets = problem(seed)
    optimizer = build(model)
    curve: Curve = []
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        curve.append((now, take_step(optimizer, model, LOSS, inputs, targets).item()))
    return curve


def first_below(curve: Curve, goal: float) -> str:
    """The step and the time at which the loss is at most the goal."""
    for step, (seconds, loss) in enumerate(curve, 1):
        if loss <= goal:
            return f"step {step}, {seconds:.2f} s"
    return "never"


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    title = "Fitting a smooth function in float64"
    draw_curves(path, title, curves, "seconds (one CPU thread)", "mean squared error")


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    numbers = {"seconds": (5.0, "for each run"), "seeds": (3, "networks and data sets")}
    parser = options(__doc__, "precision.png", **numbers)
    parser.add_argument("--metric", default="auto", help='of fit; "diagonal" for that of the diagonal of B')
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seeds = range(100, 100 + args.seeds)
    best: dict[str, list[Curve]] = {"woodbury.fit": [run_fit(seed, args.seconds, args.metric) for seed in seeds]}
    for seed, curve in zip(seeds, best["woodbury.fit"], strict=True):
        goals = ", ".join(f"{goal:.0e} at {first_below(curve, goal)}" for goal in (1e-6, 1e-10, 1e-12))
        print(f"woodbury.fit           seed {seed}: {goals}; {curve[-1][1]:.1e} at the end", flush=True)
    for method, settings in RIVALS.items():
        runs, losses = {}, {}
        for setting, build in settings.items():
            runs[setting] = [run_rival(build, seed, args.seconds) for seed in seeds]
            losses[setting] = median(curve[-1][1] for curve in runs[setting])
            steps = sum(map(len, runs[setting])) // args.seeds
            print(f"{method:22} {setting:18} loss {losses[setting]:8.1e}   {steps} calls of step", flush=True)
        setting = smallest(losses)
        best[f"{method}, {setting}"] = runs[setting]
    draw(best, args.out)
    return best


if __name__ == "__main__":
    main()
