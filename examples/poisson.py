"""Solve the Poisson equation with a network: Gauss-Newton on the residuals of a PINN, against Adam by the clock.

-Lap u = f in the unit cube, u = g on its boundary. Each step draws new points; a residual is Lap u + f inside and
WEIGHT (u - g) on the boundary, and the loss is their mean square. Two problems:

    2 dimensions   u = sin(pi x) sin(pi y),      2-32-32-1 tanh network,          900 points inside, 120 outside
    5 dimensions   u = sum of cos(pi x_i),       5-64-64-48-48-1 tanh network,   3000 points inside, 500 outside

(the second is a test problem of the literature on second-order methods for PINNs). float64. The error is the
relative L2 error |u_network - u| / |u| on 10000 points of its own. Adam gets the same points and the same seconds
at three learning rates; all four are drawn.

    python examples/poisson.py                                  # 2 dimensions, 300 steps: about 4 minutes on a CPU
    python examples/poisson.py --dimensions 5 --device cuda     # 5 dimensions, 150 steps
    python examples/poisson.py --draw poisson-5.json            # a figure from what a run wrote
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import woodbury

WEIGHT = 10.0  # of a residual on the boundary
RATES = (1e-2, 3e-3, 1e-3)  # of Adam
Batch = tuple[Tensor, Tensor]  # points (n, d) and whether each lies inside (n,)
Curve = list[tuple[float, float]]  # (seconds, relative error) after each step


class Equation(NamedTuple):
    widths: tuple[int, ...]
    inside: int  # points a step
    boundary: int
    steps: int
    solution: Callable[[Tensor], Tensor]  # u (n, d) -> (n,)
    force: Callable[[Tensor], Tensor]  # f = -Lap u


EQUATIONS = {
    2: Equation(
        (2, 32, 32, 1),
        900,
        120,
        300,
        lambda x: torch.sin(torch.pi * x).prod(1),
        lambda x: 2 * torch.pi**2 * torch.sin(torch.pi * x).prod(1),
    ),
    5: Equation(
        (5, 64, 64, 48, 48, 1),
        3000,
        500,
        150,
        lambda x: torch.cos(torch.pi * x).sum(1),
        lambda x: torch.pi**2 * torch.cos(torch.pi * x).sum(1),
    ),
}


def network(widths: tuple[int, ...], device: str) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device, torch.float64)


def draw_points(equation: Equation, device: str) -> Batch:
    """Points inside, then points on faces drawn at random."""
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


def residuals(equation: Equation) -> Callable[[nn.Module, Batch], Tensor]:
    """What `forward=` takes: one residual a point, (n, 1). The loss is their mean square."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        points, inside = batch
        equation_holds = laplacian(model, points) + equation.force(points)
        boundary_holds = WEIGHT * (model(points).squeeze(-1) - equation.solution(points))
        return torch.where(inside, equation_holds, boundary_holds).unsqueeze(1)

    return forward


def gauss_newton(model: nn.Module, equation: Equation) -> Callable[[Batch], object]:
    damping = woodbury.LevenbergMarquardt(boost=2.0, drop=0.5, floor=1e-12)
    optimizer = woodbury.GaussNewton(
        model, nn.MSELoss(), damping=damping, forward=residuals(equation), fallback="autograd"
    )
    return lambda batch: optimizer.step(batch)


def adam(rate: float) -> Callable[[nn.Module, Equation], Callable[[Batch], object]]:
    def build(model: nn.Module, equation: Equation) -> Callable[[Batch], object]:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        forward = residuals(equation)

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            forward(model, batch).square().mean().backward()
            optimizer.step()

        return step

    return build


def solve(
    name: str,
    build: Callable[[nn.Module, Equation], Callable[[Batch], object]],
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
    step = build(model, equation)
    spent, curve, told = 0.0, [], time.perf_counter()
    while spent < seconds and (steps is None or len(curve) < steps):
        batch = draw_points(equation, device)
        started = now(device)
        step(batch)
        spent += now(device) - started
        with torch.no_grad():
            error = (model(test).squeeze(1) - truth).norm() / truth.norm()
        curve.append((spent, float(error)))
        if time.perf_counter() - told > 5:
            told = time.perf_counter()
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
            f"{name:14} {len(curve):6} steps {seconds:7.1f} s ({seconds / len(curve):.3f} s a step)   "
            f"error {error:.1e}   {record['goal']:.0e} after step {reached}"
        )


def draw(record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for index, (name, curve) in enumerate(record["curves"].items()):
        seconds, errors = zip(*curve, strict=True)
        style = {"color": f"C{index}", "label": name, "linewidth": 1.8 if index == 0 else 1.0}
        left.plot(seconds, errors, **style)
        right.plot(range(1, len(errors) + 1), errors, **style)
    for axes, label in ((left, "seconds"), (right, "steps")):
        axes.set(yscale="log", xlabel=label)
        axes.axhline(record["goal"], color="0.7", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.25)
    left.set(ylabel="relative L2 error", xlim=(0, None))
    right.set(xscale="log")
    right.legend(frameon=False)
    figure.suptitle(f"Poisson equation in {record['dimensions']} dimensions ({record['device']})")
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimensions", type=int, choices=list(EQUATIONS), default=2)
    parser.add_argument("--steps", type=int, help="of Gauss-Newton (default 300 in 2 dimensions, 150 in 5)")
    parser.add_argument("--points", type=float, default=1.0, help="factor on the number of points a step")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="learning rates of Adam")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for poisson-D.json and poisson-D.png")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what an earlier run wrote")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        record = json.loads(options.draw.read_text())
        report(record)
        draw(record, options.draw.with_suffix(".png"))
        return
    equation = EQUATIONS[options.dimensions]
    equation = equation._replace(
        inside=max(2, round(options.points * equation.inside)),
        boundary=max(2, round(options.points * equation.boundary)),
    )
    steps = options.steps or equation.steps
    where = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    curves = {
        "Gauss-Newton": solve("Gauss-Newton", gauss_newton, equation, options.device, options.seed, steps=steps)
    }
    for rate in options.rates:
        name, budget = f"Adam, lr {rate:g}", curves["Gauss-Newton"][-1][0]
        curves[name] = solve(name, adam(rate), equation, options.device, options.seed, seconds=budget)
    record = {
        "dimensions": options.dimensions,
        "device": where,
        "goal": {2: 1e-4, 5: 1e-3}[options.dimensions],
        "curves": curves,
    }
    report(record)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"poisson-{options.dimensions}.json"
    path.write_text(json.dumps(record))
    print(f"wrote {path}")
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError:
        print(f"no figure: matplotlib is not installed. Draw it elsewhere with --draw {path.name}")


if __name__ == "__main__":
    main()
