"""Parts of the examples of differential equations: points, and `woodbury.fit` beside Adam and L-BFGS."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

import woodbury
from harness import Curve, descend, draw_curves, lbfgs, options, smallest, tanh_network

STEP_POINTS = 500  # of Adam, new ones in every step
RATES = (1e-1, 3e-2, 1e-2)  # of Adam, falling to zero by the end
FIXED_POINTS = (500, 1000, 2000)  # of L-BFGS, which must keep its points
TEST_POINTS = 4000
# points (n, d), whether each is inside (n, 1), known values elsewhere (n, 1)
Batch = tuple[Tensor, Tensor, Tensor]


class Equation(NamedTuple):
    """A problem to solve: u(points) with residuals that should vanish."""

    title: str
    widths: tuple[int, ...]
    draw: Callable[[int], tuple[Batch, None]]  # a number of new points; the targets of residuals are zeros
    residuals: Callable[[nn.Module, Batch], Tensor]  # (n, 1)
    solution: Callable[[Tensor], Tensor]  # points (n, d) -> (n, 1), to measure the error alone
    low: Sequence[float]  # corners of the box of all points
    high: Sequence[float]


def points_in(count: int, low: Sequence[float], high: Sequence[float]) -> Tensor:
    """Random points in a box, (count, d)."""
    bottom, top = torch.tensor([low, high], dtype=torch.float64)
    return bottom + (top - bottom) * torch.rand(count, len(low), dtype=torch.float64)


def onto_faces(points: Tensor, axes: Sequence[int], low: Sequence[float], high: Sequence[float]) -> Tensor:
    """The same points, each moved along a random one of these axes to one of its two ends."""
    choice = torch.tensor(axes)[torch.randint(len(axes), (len(points), 1))]
    ends = torch.tensor([low, high], dtype=torch.float64)
    return points.scatter(1, choice, ends[torch.randint(2, (len(points),)), choice.squeeze(1)].unsqueeze(1))


def residual(batch: Batch, value: Tensor, equation: Tensor, weight: float = 10.0) -> Tensor:
    """The equation inside, weight (u - known value) elsewhere."""
    _, inside, known = batch
    return torch.where(inside, equation, weight * (value - known))


# -- the methods: each trains a model for some seconds and calls note() from time to time -----------------------

Method = Callable[[Equation, nn.Module, float, Callable[[], float]], None]


def by_fit(equation: Equation, model: nn.Module, seconds: float, note: Callable[[], float]) -> None:
    """One call. It is stopped from outside, by CPU time, where `seconds=seconds` would count those on the wall."""
    woodbury.fit(
        *(model, nn.MSELoss(), equation.draw),
        forward=equation.residuals,
        steps=10**6,
        progress=False,
        callback=lambda _: note() >= seconds,
    )


def by_adam(rate: float) -> Method:
    """New points in every step, and a rate that falls linearly to zero."""

    def train(equation: Equation, model: nn.Module, seconds: float, note: Callable[[], float]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        spent = 0.0
        while spent < seconds:
            optimizer.param_groups[0]["lr"] = rate * (1 - spent / seconds)
            optimizer.zero_grad()
            equation.residuals(model, equation.draw(STEP_POINTS)[0]).square().mean().backward()
            optimizer.step()
            spent = note()

    return train


def by_lbfgs(count: int) -> Method:
    """The same points all the time."""

    def train(equation: Equation, model: nn.Module, seconds: float, note: Callable[[], float]) -> None:
        optimizer = lbfgs(history=100, iterations=10)(model)
        batch, _ = equation.draw(count)
        while note() < seconds:
            descend(optimizer, lambda: equation.residuals(model, batch).square().mean())

    return train


METHODS: dict[str, dict[str, Method]] = {
    "woodbury.fit": {"": by_fit},
    "torch L-BFGS": {f"{count} points": by_lbfgs(count) for count in FIXED_POINTS},
    "torch Adam": {f"lr {rate:g}": by_adam(rate) for rate in RATES},
}


class Stopwatch:
    """Notes the error against the CPU seconds spent outside of measuring it."""

    def __init__(self, measure: Callable[[], float], pause: float) -> None:
        self.measure, self.pause = measure, pause  # seconds between two points of the curve
        self.curve: Curve = []
        self.start = time.process_time()

    def note(self, last: bool = False) -> float:
        spent = time.process_time() - self.start
        if last or not self.curve or spent - self.curve[-1][0] >= self.pause:
            self.curve.append((spent, self.measure()))
            self.start = time.process_time() - spent
        return spent


def run(method: Method, equation: Equation, seconds: float, seed: int) -> Curve:
    """(CPU seconds, relative L2 error |u_network - u| / |u|) along a run."""
    torch.manual_seed(seed)
    model = tanh_network(equation.widths)
    test = points_in(TEST_POINTS, equation.low, equation.high)
    truth = equation.solution(test)

    @torch.no_grad()
    def measure() -> float:
        return float((model(test) - truth).norm() / truth.norm())

    watch = Stopwatch(measure, seconds / 200)
    method(equation, model, seconds, watch.note)
    watch.note(last=True)
    return watch.curve


def compare(
    equation: Equation, description: str | None, out: str, seconds: float, argv: list[str] | None
) -> dict[str, list[Curve]]:
    """Run every method with every setting, print them all, and draw the best setting of each."""
    numbers = {"seconds": (seconds, "of CPU time for each run"), "seeds": (2, "networks and points")}
    args = options(description, out, **numbers).parse_args(argv)
    torch.set_num_threads(1)
    best: dict[str, list[Curve]] = {}
    for method, settings in METHODS.items():
        runs, errors = {}, {}
        for setting, train in settings.items():
            seeds = range(100, 100 + args.seeds)
            runs[setting] = [run(train, equation, args.seconds, seed) for seed in seeds]
            errors[setting] = median(curve[-1][-1] for curve in runs[setting])
            each = ", ".join(f"{curve[-1][-1]:.1e}" for curve in runs[setting])
            print(f"{method:13} {setting:12} relative error {errors[setting]:.1e}   ({each})", flush=True)
        setting = smallest(errors)
        best[", ".join(filter(None, (method, setting)))] = runs[setting]
    draw_curves(args.out, equation.title, best, "CPU seconds, one thread", "relative L2 error")
    return best
