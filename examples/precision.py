"""Fit a smooth function with a small network: Gauss-Newton against L-BFGS and Adam, by the clock.

200 points of sin(pi x) cos(pi y), a 2-50-50-1 tanh network, float64, full batch. Every method gets the same
time and three settings; all are printed, and the best of each (by its final loss, median over the seeds) is drawn.
Of five pairs of Levenberg-Marquardt factors, tried on seeds 0 to 2, the two furthest from 1 (4, 0.25 and 10, 0.1)
were slowest and left out; the figure uses seeds from 100 on.

    python examples/precision.py                    # about 2.5 minutes; writes precision.png
    python examples/precision.py --seconds 1 --seeds 1
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import woodbury
from harness import Build, Curve, Methods, figure, from_torch, options, plot, smallest, take_step

LOSS = nn.MSELoss()


def problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A new network and its data."""
    torch.manual_seed(seed)
    inputs = 2 * torch.rand(200, 2, dtype=torch.float64) - 1
    targets = torch.sin(torch.pi * inputs[:, :1]) * torch.cos(torch.pi * inputs[:, 1:])
    widths = (nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    return nn.Sequential(*widths).double(), inputs, targets


def gauss_newton(boost: float, drop: float) -> Build:
    rule = woodbury.LevenbergMarquardt(boost=boost, drop=drop, floor=0.0)
    return partial(woodbury.GaussNewton, loss=LOSS, damping=rule, accept=0.0)


def lbfgs(history: int) -> Build:
    settings = {"max_iter": 20, "tolerance_grad": 0, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    return from_torch(torch.optim.LBFGS, history_size=history, **settings)


METHODS: Methods = {
    "woodbury.GaussNewton": {
        f"boost {boost} drop {drop}": gauss_newton(boost, drop)
        for boost, drop in ((1.5, 0.5), (2.0, 0.5), (3.0, 0.7))
    },
    "torch L-BFGS": {f"history {history}": lbfgs(history) for history in (20, 50, 100)},
    "torch Adam": {f"lr {rate}": from_torch(torch.optim.Adam, lr=rate) for rate in (1e-3, 3e-3, 1e-2)},
}


def run(build: Build, seed: int, seconds: float) -> Curve:
    """Loss before each step against the time spent so far."""
    model, inputs, targets = problem(seed)
    optimizer = build(model)
    curve: Curve = []
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        curve.append((now, take_step(optimizer, model, LOSS, inputs, targets).item()))
    return curve


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    with figure(path, figsize=(7.5, 4.2)) as (_, ((panel,),)):
        plot(panel, curves, ("#0072b2", "#d55e00", "#555555"))
        panel.set(yscale="log", xlabel="seconds (one CPU thread)", ylabel="mean squared error")
        panel.set_title("Fitting a smooth function in float64", loc="left", fontweight="bold")
        seeds = len(next(iter(curves.values())))
        # between the bundles of curves, which leave the lower middle free
        panel.legend(frameon=False, title=f"{seeds} seed(s) each", loc="center right", bbox_to_anchor=(1, 0.36))


def main(argv: list[str] | None = None) -> dict[str, list[Curve]]:
    numbers = {"seconds": (5.0, "for each run"), "seeds": (3, "networks and data sets")}
    args = options(__doc__, "precision.png", **numbers).parse_args(argv)
    torch.set_num_threads(1)
    best: dict[str, list[Curve]] = {}
    for method, settings in METHODS.items():
        runs, losses = {}, {}
        for setting, build in settings.items():
            runs[setting] = [run(build, seed, args.seconds) for seed in range(100, 100 + args.seeds)]
            losses[setting] = median(curve[-1][1] for curve in runs[setting])
            steps = sum(map(len, runs[setting])) // args.seeds
            print(f"{method:22} {setting:18} loss {losses[setting]:8.1e}   {steps} calls of step", flush=True)
        setting = smallest(losses)
        best[f"{method}, {setting}"] = runs[setting]
    draw(best, args.out)
    return best


if __name__ == "__main__":
    main()
