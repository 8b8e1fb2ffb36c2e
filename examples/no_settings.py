"""One table: what `woodbury.fit` and `woodbury.least_squares` reach with no settings at all.

    precision   200 points of sin(pi x) cos(pi y), 2-50-50-1 tanh network (examples/precision.py)
    sinc        1000 points of sin(10 x) / (10 x), 1-20-1 tanh network, 61 parameters
    poisson     the Poisson equation in 2 dimensions (examples/poisson.py); with --device cuda in 5 as well
    curves      18 classical least-squares problems beside scipy (examples/curve_fit.py)

Seeds from 100 on; the constants of `fit` were chosen on seeds 0 to 7. float64, one CPU thread, wall seconds. A
table for Markdown, one line per problem and seed.

    python examples/no_settings.py                       # about 7 minutes
    python examples/no_settings.py --problems sinc,precision
    python examples/no_settings.py --parts               # what each part of the search is worth, seeds 0 to 7
"""

from __future__ import annotations

import sys
import time
from math import inf
from statistics import median

import torch
from torch import Tensor, nn

import curve_fit
import poisson
import precision
import woodbury
from harness import Curve, options, tanh_network

BAR = "agree with scipy to 1e-8 in at most twice its Jacobians"
GOALS = {"precision": (1e-6, 1e-10, 1e-12), "sinc": (1e-4, 3.3e-7, 1e-10)}


def sinc(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    inputs = torch.linspace(-1, 1, 1000, dtype=torch.float64).unsqueeze(1)
    targets = torch.sinc(10 * inputs / torch.pi)
    return tanh_network((1, 20, 1)), inputs, targets


PROBLEMS = {"precision": precision.problem, "sinc": sinc}


def fit_curve(name: str, seed: int, seconds: float) -> Curve:
    """(seconds, loss) after every step of a fit that stops at the last goal."""
    model, inputs, targets = PROBLEMS[name](seed)
    curve: Curve = []

    def note(fit: woodbury.Fit) -> None:
        curve.append((fit.seconds, fit.loss))

    settings = {"tolerance": GOALS[name][-1], "seconds": seconds, "progress": False}
    woodbury.fit(model, nn.MSELoss(), (inputs, targets), callback=note, **settings)
    return curve


def show(name: str, seed: int, curve: Curve, goals: tuple[float, ...], what: str) -> None:
    reached = []
    for goal in goals:
        step = next((index for index, (_, value) in enumerate(curve) if value <= goal), None)
        when = "never" if step is None else f"{step + 1} steps, {curve[step][0]:.2f} s"
        reached.append(f"{goal:g}: {when}")
    seconds, value = curve[-1]
    print(f"| {name} | {seed} | {what} {'; '.join(reached)} | {value:.1e} after {seconds:.1f} s |", flush=True)


SEARCHES = {
    "all parts": {"search": woodbury.CurvedSearch()},
    "without the bend": {"search": woodbury.CurvedSearch(bend=None)},
    "dampings down to 1e-15 only": {"search": woodbury.CurvedSearch(deep=None)},
    "dampings down to 1e-12 only": {"search": woodbury.CurvedSearch((1e-3, 1e-6, 1e-9, 1e-12), deep=None)},
    "dampings down to 1e-9 only": {"search": woodbury.CurvedSearch((1e-3, 1e-6, 1e-9), bend=1e-9, deep=None)},
    'all parts, metric="diagonal"': {"search": woodbury.CurvedSearch(), "metric": "diagonal"},
    "no search: plain steps": {},
}


def show_parts(seeds: int = 8, most: int = 120) -> None:
    """Median steps to 1e-10 and 1e-12 on the first problem, inf for never, and milliseconds of a step."""
    print("| search | 1e-10 | 1e-12 | ms per step |\n| --- | ---: | ---: | ---: |")
    for name, settings in SEARCHES.items():
        reached, seconds = [], []
        for seed in range(seeds):
            model, inputs, targets = precision.problem(seed)
            optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **settings)
            losses = []  # before each step
            for _ in range(most + 1):
                start = time.perf_counter()
                losses.append(optimizer.step(inputs, targets).loss.item())
                seconds.append(time.perf_counter() - start)
            reached.append([next((k for k, own in enumerate(losses) if own <= g), inf) for g in (1e-10, 1e-12)])
        columns = [f"{median(own):g}" for own in zip(*reached, strict=True)]
        print(f"| {name} | {' | '.join(columns)} | {1000 * median(seconds):.1f} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    numbers = {"seeds": (5, "networks"), "seconds": (60.0, "for each at most")}
    parser = options(__doc__, ".", **numbers, device=("cpu", "cuda adds the equation in 5 dimensions"))
    names = (*PROBLEMS, "poisson", "curves")
    parser.add_argument("--problems", default=",".join(names), help="names, separated by commas (default: all)")
    parser.add_argument("--parts", action="store_true", help="what each part of the search is worth instead")
    args = parser.parse_args(argv)
    if args.parts:
        torch.set_num_threads(1)
        show_parts()
        return
    chosen = args.problems.split(",")
    for name in chosen:
        if name not in names:
            parser.error(f"no problem {name!r}; there are {', '.join(names)}")
    torch.set_num_threads(1)
    seeds = range(100, 100 + args.seeds)
    print("| problem | seed | steps and seconds to | at the end |\n| --- | --- | --- | --- |")
    for name in (name for name in PROBLEMS if name in chosen):
        for seed in seeds:
            curve = fit_curve(name, seed, args.seconds)
            show(name, seed, curve, GOALS[name], "mean squared error")
    if "poisson" in chosen:
        for dimensions, device in ((2, "cpu"), (5, "cuda"))[: 1 if args.device == "cpu" else 2]:
            for seed in seeds:
                curve = poisson.solve(poisson.by_fit, poisson.EQUATIONS[dimensions], device, args.seconds, seed)
                show(f"poisson, {dimensions} dimensions", seed, curve, poisson.GOALS, "relative error")
    if "curves" in chosen:
        try:
            rows = [curve_fit.compare(name, len(curve_fit.PROBLEMS[name].starts)) for name in curve_fit.PROBLEMS]
        except ImportError:
            sys.exit("the curves need scipy")
        print(f"| curves | | {BAR} | with its end {sum(row.is_good for row in rows)} of {len(rows)} |")
        least = sum(row.is_good_at_the_minimum for row in rows)
        print(f"| curves | | {BAR} | with the minimum near its end {least} of {len(rows)} |")


if __name__ == "__main__":
    main()
