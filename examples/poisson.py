"""Solve the Poisson equation with a network: Gauss-Newton on the residuals of a PINN, against Adam by the clock.

-Lap u = f in the unit cube, u = g on its boundary. Each step draws new points; a residual is Lap u + f inside and
WEIGHT (u - g) on the boundary, and the loss is their mean square. Two problems:

    2 dimensions   u = sin(pi x) sin(pi y),   2-32-32-1 tanh network,        900 points inside, 120 on the boundary
    5 dimensions   u = sum of cos(pi x_i),    5-64-64-48-48-1 tanh network, 3000 points inside, 500 on the boundary

(the second is a test problem of the literature on second-order methods for PINNs). float64. The error is the
relative L2 error |u_network - u| / |u| on 10000 other points. Adam gets the same points and the same seconds
at three learning rates; all four are drawn.

    python examples/poisson.py                                  # 2 dimensions, 300 steps: about 4 minutes on a CPU
    python examples/poisson.py --dimensions 5 --device cuda     # 5 dimensions, 150 steps
    python examples/poisson.py --draw poisson-5.json            # a figure from what a run wrote
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import woodbury
from harness import Curve, figure, options

WEIGHT = 10.0  # of a residual on the boundary
RATES = (1e-2, 3e-3, 1e-3)  # of Adam
Batch = tuple[Tensor, Tensor]  # points (n, d) and whether each lies inside (n,)
Forward = Callable[[nn.Module, Batch], Tensor]  # what `forward=` takes
Step = Callable[[Batch], object]


class Equation(NamedTuple):
    widths: tuple[int, ...]
    inside: int  # points per step
    boundary: int
    steps: int
    goal: float  # a relative error
    solution: Callable[[Tensor], Tensor]  # u (n, d) -> (n,)
    force: Callable[[Tensor], Tensor]  # f = -Lap u


EQUATIONS = {
    2: Equation(
        *((2, 32, 32, 1), 900, 120, 300, 1e-4),
        solution=lambda x: torch.sin(torch.pi * x).prod(1),
        force=lambda x: 2 * torch.pi**2 * torch.sin(torch.pi * x).prod(1),
    ),
    5: Equation(
        *((5, 64, 64, 48, 48, 1), 3000, 500, 150, 1e-3),
        solution=lambda x: torch.cos(torch.pi * x).sum(1),
        force=lambda x: torch.pi**2 * torch.cos(torch.pi * x).sum(1),
    ),
}


def network(widths: tuple[int, ...], device: str) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device, torch.float64)


def draw_points(equation: Equation, device: str) -> Batch:
    """Random points inside, then random points on random faces."""
    dimensions = equation.widths[0]
    points = torch.rand(equation.inside + equation.boundary, dimensions, device=device, dtype=torch.float64)
    faces = torch.randint(dimensions, (equation.boundary, 1), device=device)
    sides = torch.randint(2, (equation.boundary, 1), device=device).double()
    points[equation.inside :].scatter_(1, faces, sides)
    return points, torch.arange(len(points), device=device) < equation.inside


def laplacian(model: nn.Module, points: Tensor) -> Tensor:
    """sum_i d2u/dx_i2 at each point, by two directional derivatives along each axis."""

    def value(x: Tensor) -> Tensor:
        return model(x).squeeze(-1)

    def slope(x: Tensor, axis: Tensor) -> Tensor:
        return torch.func.jvp(value, (x,), (axis,))[1]

    def bend(x: Tensor, axis: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: slope(y, axis), (x,), (axis,))[1]

    axes = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    along_all = torch.func.vmap(bend, in_dims=(None, 0))
    return torch.func.vmap(lambda x: along_all(x, axes).sum())(points)


def residuals(equation: Equation) -> Forward:
    """One residual per point, (n, 1). The loss is their mean square."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        points, inside = batch
        equation_holds = laplacian(model, points) + equation.force(points)
        boundary_holds = WEIGHT * (model(points).squeeze(-1) - equation.solution(points))
        return torch.where(inside, equation_holds, boundary_holds).unsqueeze(1)

    return forward


def gauss_newton(model: nn.Module, forward: Forward) -> Step:
    damping = woodbury.LevenbergMarquardt(boost=2.0, drop=0.5, floor=1e-12)
    return woodbury.GaussNewton(model, nn.MSELoss(), damping=damping, forward=forward, fallback="autograd").step


def adam(model: nn.Module, forward: Forward, rate: float) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        forward(model, batch).square().mean().backward()
        optimizer.step()

    return step


def solve(
    name: str,
    build: Callable[[nn.Module, Forward], Step],
    equation: Equation,
    device: str,
    seed: int,
    steps: int | None = None,
    seconds: float = float("inf"),
) -> Curve:
    """Relative error against the seconds spent in steps alone, until there are enough of either."""
    torch.manual_seed(seed)
    model = network(equation.widths, device)
    test = torch.rand(10_000, equation.widths[0], device=device, dtype=torch.float64)
    truth = equation.solution(test)
    step = build(model, residuals(equation))
    spent, curve, printed = 0.0, [], time.perf_counter()
    while spent < seconds and (steps is None or len(curve) < steps):
        batch = draw_points(equation, device)
        started = now(device)
        step(batch)
        spent += now(device) - started
        with torch.no_grad():
            error = (model(test).squeeze(1) - truth).norm() / truth.norm()
        curve.append((spent, float(error)))
        if time.perf_counter() - printed > 5:
            printed = time.perf_counter()
            print(f"  {name}: step {len(curve)}, {spent:.0f} s, error {float(error):.1e}", flush=True)
    return curve


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def report(record: dict) -> None:
    for name, curve in record["curves"].items():
        seconds, error = curve[-1]
        reached = next((str(index + 1) for index, (_, e) in enumerate(curve) if e <= record["goal"]), "never")
        print(
            f"{name:14} {len(curve):6} steps {seconds:7.1f} s ({seconds / len(curve):.3f} s per step)   "
            f"error {error:.1e}   {record['goal']:.0e} after step {reached}"
        )


def draw(record: dict, path: Path) -> None:
    with figure(path, columns=2, dpi=110, figsize=(9, 3.6), sharey=True) as (picture, ((left, right),)):
        for index, (name, curve) in enumerate(record["curves"].items()):
            seconds, errors = zip(*curve, strict=True)
            style = {"color": f"C{index}", "label": name, "linewidth": 1.8 if index == 0 else 1.0}
            left.plot(seconds, errors, **style)
            right.plot(range(1, len(errors) + 1), errors, **style)
        for panel in (left, right):
            panel.axhline(record["goal"], color="0.7", linewidth=0.8, linestyle="--")
        left.set(yscale="log", xlabel="seconds", ylabel="relative L2 error", xlim=(0, None))
        right.set(xscale="log", xlabel="steps")
        right.legend(frameon=False)
        picture.suptitle(f"Poisson equation in {record['dimensions']} dimensions ({record['device']})")


def main(argv: list[str] | None = None) -> None:
    numbers = {"points": (1.0, "factor on the number of points per step"), "seed": (0, "of network and points")}
    parser = options(__doc__, ".", **numbers, device=("cpu", "where to compute"))
    parser.add_argument("--dimensions", type=int, choices=list(EQUATIONS), default=2)
    parser.add_argument("--steps", type=int, help="of Gauss-Newton (default 300 in 2 dimensions, 150 in 5)")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="learning rates of Adam")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what an earlier run wrote")
    args = parser.parse_args(argv)
    if args.draw is not None:
        record = json.loads(args.draw.read_text())
        report(record)
        draw(record, args.draw.with_suffix(".png"))
        return
    equation = EQUATIONS[args.dimensions]
    equation = equation._replace(
        inside=max(2, round(args.points * equation.inside)),
        boundary=max(2, round(args.points * equation.boundary)),
    )
    run = partial(solve, equation=equation, device=args.device, seed=args.seed)
    curves = {"Gauss-Newton": run("Gauss-Newton", gauss_newton, steps=args.steps or equation.steps)}
    budget = curves["Gauss-Newton"][-1][0]
    for rate in args.rates:
        name = f"Adam, lr {rate:g}"
        curves[name] = run(name, partial(adam, rate=rate), seconds=budget)
    record = {
        "dimensions": args.dimensions,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "CPU",
        "goal": equation.goal,
        "curves": curves,
    }
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
