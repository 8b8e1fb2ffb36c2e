"""Solve the Poisson equation with a network: one call of `woodbury.fit`, against Adam and L-BFGS by the clock.

-Lap u = f in the unit cube, u = g on its boundary. A residual is Lap u + f inside and WEIGHT (u - g) on the
boundary, and the loss is their mean square (`fit` weighs them by itself). Two problems:

    2 dimensions   u = sin(pi x) sin(pi y),   2-32-32-1 tanh network,        900 points inside, 120 on the boundary
    5 dimensions   u = sum of cos(pi x_i),    5-64-64-48-48-1 tanh network, 3000 points inside, 500 on the boundary

(the second is a test problem of the literature on second-order methods for PINNs). float64. The error is the
relative L2 error |u_network - u| / |u| on 10000 other points. `fit` has no setting, and chooses how many points
there are. Adam draws those of the table at every step, its rate falling to zero; L-BFGS keeps 1, 2 or 4 times as
many. Both get the same seconds, with three settings each.

    python examples/poisson.py                                  # 2 dimensions: 9 minutes on one core
    python examples/poisson.py --seconds 10 --seeds 1           # a look
    python examples/poisson.py --dimensions 5 --device cuda     # 5 dimensions
    python examples/poisson.py --draw poisson-5.json            # a figure from what a run wrote
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import woodbury
from harness import Curve, descend, draw_curves, lbfgs, options, smallest, tanh_network

WEIGHT = 10.0  # of a residual on the boundary
GOALS = (1e-3, 1e-4, 1e-5, 1e-6)  # relative errors
FIRST_SEED = 100
Batch = tuple[Tensor, Tensor]  # points (n, d) and whether each lies inside (n, 1)


class Equation(NamedTuple):
    widths: tuple[int, ...]
    inside: int  # points per step of Adam; of others in the same proportion
    boundary: int
    solution: Callable[[Tensor], Tensor]  # u (n, d) -> (n, 1)
    force: Callable[[Tensor], Tensor]  # f = -Lap u

    def draw(self, count: int, device: str) -> tuple[Batch, None]:
        """Random points inside, then random points on random faces; the targets of residuals are zeros."""
        inside = round(count * self.inside / (self.inside + self.boundary))
        points = torch.cat([self.draw_inside(inside, device), self.draw_faces(count - inside, device)])
        return (points, torch.arange(count, device=device).unsqueeze(1) < inside), None

    def draw_inside(self, count: int, device: str) -> Tensor:
        return torch.rand(count, self.widths[0], device=device, dtype=torch.float64)

    def draw_faces(self, count: int, device: str) -> Tensor:
        faces = torch.randint(self.widths[0], (count, 1), device=device)
        sides = torch.randint(2, (count, 1), device=device).double()
        return self.draw_inside(count, device).scatter(1, faces, sides)

    def terms(self, device: str) -> woodbury.Equations:
        """The same for `fit`: each kind of points with its residuals."""
        return woodbury.Equations(
            inside=(
                lambda count: self.draw_inside(count, device),
                lambda model, x: woodbury.laplacian(model, x).laplacian + self.force(x),
            ),
            boundary=(
                lambda count: self.draw_faces(count, device),
                lambda model, x: model(x) - self.solution(x),
            ),
        )

    def residuals(self, model: nn.Module, batch: Batch) -> Tensor:
        """One residual per point, (n, 1)."""
        points, inside = batch
        value, _, bend = woodbury.laplacian(model, points)
        return torch.where(inside, bend + self.force(points), WEIGHT * (value - self.solution(points)))


EQUATIONS = {
    2: Equation(
        *((2, 32, 32, 1), 900, 120),
        solution=lambda x: torch.sin(torch.pi * x).prod(1, keepdim=True),
        force=lambda x: 2 * torch.pi**2 * torch.sin(torch.pi * x).prod(1, keepdim=True),
    ),
    5: Equation(
        *((5, 64, 64, 48, 48, 1), 3000, 500),
        solution=lambda x: torch.cos(torch.pi * x).sum(1, keepdim=True),
        force=lambda x: torch.pi**2 * torch.cos(torch.pi * x).sum(1, keepdim=True),
    ),
}


class Task(NamedTuple):
    """What a method gets: a network and its data, a time, and a function to call after every step."""

    equation: Equation
    model: nn.Module
    device: str
    seconds: float
    note: Callable[[], float]  # measures the error, and returns the seconds spent in steps

    @property
    def points(self) -> int:
        return self.equation.inside + self.equation.boundary

    def draw(self, count: int) -> tuple[Batch, None]:
        return self.equation.draw(count, self.device)

    def loss(self, batch: Batch) -> Tensor:
        return self.equation.residuals(self.model, batch).square().mean()


Method = Callable[[Task], Any]


def by_fit(task: Task, metric: str = "auto") -> woodbury.Fit:
    return woodbury.fit(
        task.model,
        task.equation.terms(task.device),
        seconds=task.seconds,
        metric=metric,
        callback=lambda _: task.note() >= task.seconds,
    )


def by_adam(task: Task, rate: float) -> None:
    """New points in every step, and a rate that falls linearly to zero."""
    optimizer = torch.optim.Adam(task.model.parameters(), lr=rate)
    while (spent := task.note()) < task.seconds:
        optimizer.param_groups[0]["lr"] = rate * (1 - spent / task.seconds)
        optimizer.zero_grad()
        task.loss(task.draw(task.points)[0]).backward()
        optimizer.step()


def by_lbfgs(task: Task, times: int) -> None:
    """The same points at every step, so many times as many."""
    optimizer = lbfgs(history=100, iterations=10)(task.model)
    batch, _ = task.draw(times * task.points)
    while task.note() < task.seconds:
        descend(optimizer, lambda: task.loss(batch))


RIVALS: dict[str, dict[str, Method]] = {
    "torch L-BFGS": {f"{times} x points": partial(by_lbfgs, times=times) for times in (1, 2, 4)},
    "torch Adam": {f"lr {rate:g}": partial(by_adam, rate=rate) for rate in (1e-2, 3e-3, 1e-3)},
}


def solve(method: Method, equation: Equation, device: str, seconds: float, seed: int) -> Curve:
    """(seconds in steps, relative error) after every step."""
    torch.manual_seed(seed)
    model = tanh_network(equation.widths).to(device)
    test = torch.rand(10_000, equation.widths[0], device=device, dtype=torch.float64)
    truth = equation.solution(test)
    curve: Curve = []
    started, spent = time.perf_counter(), 0.0

    def note() -> float:
        nonlocal started, spent
        if device != "cpu":
            torch.cuda.synchronize()
        spent += time.perf_counter() - started
        with torch.no_grad():
            curve.append((spent, float((model(test) - truth).norm() / truth.norm())))
        started = time.perf_counter()
        return spent

    method(Task(equation, model, device, seconds, note))
    return curve


def steps_to(curve: Curve, goal: float) -> float:
    """The first step with an error of at most the goal; inf if there is none."""
    return next((float(step) for step, (_, error) in enumerate(curve, 1) if error <= goal), float("inf"))


def report(record: dict[str, Any]) -> None:
    runs = record["runs"]
    ours = runs["woodbury.fit"]
    print(f"woodbury.fit, seeds from {FIRST_SEED} on: steps to a relative error of")
    print(f"{'':8}" + "".join(f"{goal:>9.0e}" for goal in GOALS) + "   at the end")
    rows = [[steps_to(curve, goal) for goal in GOALS] for curve in ours]
    for index, (row, curve) in enumerate(zip(rows, ours, strict=True)):
        shown = "".join(f"{step:9.0f}" for step in row)
        print(f"{FIRST_SEED + index:8}{shown}   {curve[-1][1]:.1e} after {len(curve)} steps, {curve[-1][0]:.0f} s")
    medians = "".join(f"{median(column):9.0f}" for column in zip(*rows, strict=True))
    print(f"{'median':8}{medians}   {median(curve[-1][1] for curve in ours):.1e}")
    for name, curves in runs.items():
        if curves is not ours:
            seconds, error = curves[0][-1]
            print(f"{name:26} {len(curves[0]):6} steps {seconds:6.0f} s   error {error:.1e}")


def draw(record: dict[str, Any], path: Path) -> None:
    best = {"woodbury.fit": record["runs"]["woodbury.fit"]}
    for method in RIVALS:
        own = {name: curves for name, curves in record["runs"].items() if name.startswith(method)}
        if own:
            name = smallest({name: curves[0][-1][1] for name, curves in own.items()})
            best[name] = own[name]
    title, across = f"Poisson equation in {record['dimensions']} dimensions", f"seconds ({record['device']})"
    draw_curves(path, title, best, across, "relative L2 error")


def main(argv: list[str] | None = None) -> None:
    numbers = {"seconds": (60.0, "for each run"), "seeds": (3, "networks and points, for fit")}
    parser = options(__doc__, ".", **numbers, device=("cpu", "where to compute"))
    parser.add_argument("--dimensions", type=int, choices=list(EQUATIONS), default=2)
    parser.add_argument("--alone", action="store_true", help="leave out Adam and L-BFGS")
    parser.add_argument("--metric", default="auto", help='of fit; "diagonal" for that of the diagonal of B')
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what an earlier run wrote")
    args = parser.parse_args(argv)
    if args.draw is not None:
        record = json.loads(args.draw.read_text())
        report(record)
        draw(record, args.draw.with_suffix(".png"))
        return
    if args.device == "cpu":
        torch.set_num_threads(1)
    equation = EQUATIONS[args.dimensions]
    run = partial(solve, equation=equation, device=args.device, seconds=args.seconds)
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    fit = partial(by_fit, metric=args.metric)
    runs: dict[str, list[Curve]] = {"woodbury.fit": [run(fit, seed=seed) for seed in seeds]}
    for rival, settings in ({} if args.alone else RIVALS).items():
        for setting, method in settings.items():
            runs[f"{rival}, {setting}"] = [run(method, seed=FIRST_SEED)]
    device = torch.cuda.get_device_name() if args.device != "cpu" else "one CPU core"
    record = {"dimensions": args.dimensions, "device": device, "runs": runs}
    report(record)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"poisson-{args.dimensions}.json"
    path.write_text(json.dumps(record))
    print(f"wrote {path}")
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError:
        print(f"no figure: matplotlib is not installed. Draw it elsewhere with --draw {path.name}")


if __name__ == "__main__":
    main()
