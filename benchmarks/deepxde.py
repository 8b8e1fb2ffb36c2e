"""DeepXDE's documented problems: `woodbury.deepxde.fit` beside Adam and then L-BFGS, for as long.

The problems are written from their definitions in DeepXDE's documentation: equation, network, points, learning
rate. The recipe is Adam for half of the time, at most the documented number of iterations, and then L-BFGS. The
error is |u_network - u| / |u| in L2 on points that nobody trains on (for the Lorenz system that of its three
coefficients), with u known, by Cole and Hopf, or by a method of another kind. With `--polish` both go on after
2,000 steps of Adam. On several cores, one process each: every run is a line of a file as soon as it is over, and
tables are made of such files. On a machine that others use too, `--cpu` counts the seconds of the process.

    python -m benchmarks deepxde burgers --method fit --seeds 1 --seed 101 --save burgers-fit-101.jsonl
    python -m benchmarks deepxde --read *.jsonl
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Command, say
from benchmarks.equation_list import cole_hopf

PI, FIRST_SEED, ADAM_FIRST = math.pi, 100, 2000


@dataclass(frozen=True)
class Problem:
    data: Any
    net: Any
    error: Callable[[Any], float]  # of a dde.Model
    iterations: int  # of Adam, as documented
    unknowns: tuple[Any, ...] = ()


def l2_error(points: Any, truth: Any) -> Callable[[Any], float]:
    import numpy as np

    return lambda model: float(np.linalg.norm(model.predict(points) - truth) / np.linalg.norm(truth))


def burgers(dde: Any, np: Any) -> Problem:
    """u_t + u u_x = 0.01 / pi u_xx, from -sin(pi x)."""
    geometry = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 0.99))
    nu = 0.01 / PI

    def pde(x: Any, y: Any) -> Any:
        y_x, y_t = dde.grad.jacobian(y, x, i=0, j=0), dde.grad.jacobian(y, x, i=0, j=1)
        return y_t + y * y_x - nu * dde.grad.hessian(y, x, i=0, j=0)

    edge = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda _, on_boundary: on_boundary)
    start = dde.icbc.IC(geometry, lambda x: -np.sin(PI * x[:, 0:1]), lambda _, on_initial: on_initial)
    data = dde.data.TimePDE(geometry, pde, [edge, start], num_domain=2540, num_boundary=80, num_initial=160)
    points = geometry.random_points(5000)
    truth = cole_hopf(nu, torch.from_numpy(points[:, ::-1].astype(np.float64))).numpy()
    return Problem(data, dde.nn.FNN([2] + [20] * 3 + [1], "tanh", "Glorot normal"), l2_error(points, truth), 15000)


def allen_cahn(dde: Any, np: Any) -> Problem:
    """u_t = 1e-3 u_xx + 5 (u - u^3) from x^2 cos(pi x), u = -1 at the ends, by the form of the network."""
    from scipy.integrate import solve_ivp

    geometry = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 1))

    def pde(x: Any, y: Any) -> Any:
        bend = dde.grad.hessian(y, x, i=0, j=0)
        return dde.grad.jacobian(y, x, i=0, j=1) - 1e-3 * bend - 5 * (y - y**3)

    data = dde.data.TimePDE(geometry, pde, [], num_domain=8000, num_boundary=400, num_initial=800)
    net = dde.nn.FNN([2] + [20] * 3 + [1], "tanh", "Glorot normal")
    net.apply_output_transform(
        lambda x, y: x[:, :1] ** 2 * torch.cos(PI * x[:, :1]) + x[:, 1:] * (1 - x[:, :1] ** 2) * y
    )
    # a Chebyshev series in x
    modes = 200
    x = np.cos(PI * np.arange(modes + 1) / modes)
    ends = np.r_[2, np.ones(modes - 1), 2] * (-1) ** np.arange(modes + 1)
    derivative = np.outer(ends, 1 / ends) / (x[:, None] - x + np.eye(modes + 1))
    derivative -= np.diag(derivative.sum(1))
    bend = (derivative @ derivative)[1:-1]

    def slope(t: float, u: Any) -> Any:
        return 1e-3 * bend @ np.r_[-1, u, -1] + 5 * (u - u**3)

    times = np.linspace(0.02, 1, 50)
    first = (x**2 * np.cos(PI * x))[1:-1]
    solved = solve_ivp(slope, (0, 1), first, "BDF", times, rtol=1e-9, atol=1e-9).y  # (x, t)
    points = np.stack([np.repeat(x[1:-1], len(times)), np.tile(times, modes - 1)], 1)
    return Problem(data, net, l2_error(points, solved.reshape(-1, 1)), 40000)


def diffusion_reaction(dde: Any, np: Any) -> Problem:
    """u_t = u_xx + f with u = exp(-t) sum_k sin(k x) / k, k = 1, 2, 3, 4, 8."""
    geometry = dde.geometry.GeometryXTime(dde.geometry.Interval(-PI, PI), dde.geometry.TimeDomain(0, 1))
    waves = (1, 2, 3, 4, 8)

    def pde(x: Any, y: Any) -> Any:
        f = torch.exp(-x[:, 1:]) * sum((k * k - 1) / k * torch.sin(k * x[:, :1]) for k in waves)
        return dde.grad.jacobian(y, x, i=0, j=1) - dde.grad.hessian(y, x, i=0, j=0) - f

    def solution(x: Any) -> Any:
        return np.exp(-x[:, 1:]) * sum(np.sin(k * x[:, :1]) / k for k in waves)

    def transform(x: Any, y: Any) -> Any:
        return x[:, 1:] * (PI**2 - x[:, :1] ** 2) * y + sum(torch.sin(k * x[:, :1]) / k for k in waves)

    data = dde.data.TimePDE(geometry, pde, [], num_domain=320, solution=solution)
    net = dde.nn.FNN([2] + [30] * 6 + [1], "tanh", "Glorot uniform")
    net.apply_output_transform(transform)
    points = geometry.random_points(5000)
    return Problem(data, net, l2_error(points, solution(points)), 20000)


def helmholtz(dde: Any, np: Any) -> Problem:
    """-Lap u - k^2 u = f with u = sin(k x) sin(k y), k = 4 pi, zero at the edge by the form of the network."""
    geometry, k = dde.geometry.Rectangle([0, 0], [1, 1]), 4 * PI

    def pde(x: Any, y: Any) -> Any:
        bends = dde.grad.hessian(y, x, i=0, j=0) + dde.grad.hessian(y, x, i=1, j=1)
        return -bends - k**2 * y - k**2 * torch.sin(k * x[:, :1]) * torch.sin(k * x[:, 1:])

    data = dde.data.PDE(geometry, pde, [], num_domain=400, num_boundary=80)
    net = dde.nn.FNN([2] + [150] * 3 + [1], "sin", "Glorot uniform")
    net.apply_output_transform(lambda x, y: (x * (1 - x)).prod(1, keepdim=True) * y)
    points = geometry.random_points(5000)
    return Problem(data, net, l2_error(points, np.sin(k * points).prod(1, keepdims=True)), 5000)


def lorenz(dde: Any, np: Any) -> Problem:
    """Three coefficients of the Lorenz system from 25 measurements of a path; the error is theirs."""
    from scipy.integrate import solve_ivp

    true = np.array([10.0, 15.0, 8 / 3])
    unknowns = tuple(dde.Variable(1.0) for _ in true)

    def system(u: Any, v: Any, w: Any, a: Any, b: Any, c: Any) -> list[Any]:
        return [a * (v - u), u * (b - w) - v, u * v - c * w]

    def pde(x: Any, y: Any) -> list[Any]:
        slopes = [dde.grad.jacobian(y, x, i=i) for i in range(3)]
        return [own - other for own, other in zip(slopes, system(*y.split(1, 1), *unknowns), strict=True)]

    first = [-8.0, 7.0, 27.0]
    times = np.sort(np.r_[0, 3 * np.random.rand(23), 3])
    path = solve_ivp(lambda t, y: system(*y, *true), (0, 3), first, "DOP853", times, rtol=1e-11, atol=1e-11).y.T
    geometry, times = dde.geometry.TimeDomain(0, 3), times[:, None]

    def start(i: int) -> Any:
        return dde.icbc.IC(geometry, lambda x: first[i], lambda _, on_initial: on_initial, component=i)

    conditions = [start(i) for i in range(3)]
    conditions += [dde.icbc.PointSetBC(times, path[:, i : i + 1], component=i) for i in range(3)]
    data = dde.data.PDE(geometry, pde, conditions, num_domain=400, num_boundary=2, anchors=times)
    net = dde.nn.FNN([1] + [40] * 3 + [3], "tanh", "Glorot uniform")

    def error(model: Any) -> float:
        return float(np.linalg.norm([own.item() for own in unknowns] - true) / np.linalg.norm(true))

    return Problem(data, net, error, 20000, unknowns)


def lotka_volterra(dde: Any, np: Any) -> Problem:
    """r' = 2 r - 0.04 r p, p' = 0.02 r p - 1.06 p for 20 units of time, scaled to 1; populations by 200."""
    from scipy.integrate import solve_ivp

    def system(r: Any, p: Any) -> list[Any]:
        return [20 * (2 * r - 8 * r * p), 20 * (4 * r * p - 1.06 * p)]

    def pde(x: Any, y: Any) -> list[Any]:
        slopes = [dde.grad.jacobian(y, x, i=i) for i in range(2)]
        return [own - other for own, other in zip(slopes, system(*y.split(1, 1)), strict=True)]

    first = (100 / 200, 15 / 200)
    data = dde.data.PDE(dde.geometry.TimeDomain(0, 1), pde, [], 3000, 2)
    net = dde.nn.FNN([7] + [64] * 6 + [2], "tanh", "Glorot normal")
    net.apply_feature_transform(lambda t: torch.cat([t, *(torch.sin(k * t) for k in range(1, 7))], 1))
    net.apply_output_transform(lambda t, y: y * torch.tanh(t) + torch.tensor(first))
    times = np.linspace(0, 1, 1001)
    truth = solve_ivp(lambda t, y: system(*y), (0, 1), first, "DOP853", times, rtol=1e-11, atol=1e-11).y.T
    return Problem(data, net, l2_error(times[:, None], truth), 50000)


def laplace_disk(dde: Any, np: Any) -> Problem:
    """r u_r + r^2 u_rr + u_tt = 0 in polar coordinates, u = cos(t) at r = 1; u = r cos(t)."""
    geometry = dde.geometry.Rectangle([0, 0], [1, 2 * PI])

    def pde(x: Any, y: Any) -> Any:
        r, bends = x[:, :1], [dde.grad.hessian(y, x, i=i, j=i) for i in range(2)]
        return r * dde.grad.jacobian(y, x, i=0, j=0) + r**2 * bends[0] + bends[1]

    edge = dde.icbc.DirichletBC(
        geometry, lambda x: np.cos(x[:, 1:]), lambda x, on_boundary: on_boundary and dde.utils.isclose(x[0], 1)
    )
    data = dde.data.PDE(geometry, pde, edge, num_domain=2540, num_boundary=80)
    net = dde.nn.FNN([2] + [20] * 3 + [1], "tanh", "Glorot normal")
    net.apply_feature_transform(lambda x: x[:, :1] * torch.cat([torch.sin(x[:, 1:]), torch.cos(x[:, 1:])], 1))
    points = geometry.random_points(5000)
    return Problem(data, net, l2_error(points, points[:, :1] * np.cos(points[:, 1:])), 15000)


PROBLEMS: dict[str, Callable[[Any, Any], Problem]] = {
    "burgers": burgers,
    "allen-cahn": allen_cahn,
    "diffusion-reaction": diffusion_reaction,
    "helmholtz": helmholtz,
    "lorenz": lorenz,
    "lotka-volterra": lotka_volterra,
    "laplace-disk": laplace_disk,
}


# -- runs -----------------------------------------------------------------------------------------------------


def by_recipe(dde: Any, model: Any, problem: Problem, seconds: float, adam: bool) -> None:
    """Adam for half of the time, unless it came before, and L-BFGS, 20 iterations at a time."""
    started = time.perf_counter()

    class Clock(dde.callbacks.Callback):
        until = seconds / 2

        def on_epoch_end(self) -> None:
            self.model.stop_training = time.perf_counter() - started >= self.until

    clock = Clock()
    if adam:
        model.train(iterations=problem.iterations, callbacks=[clock], verbose=0, display_every=1000)
    clock.until = seconds
    dde.optimizers.config.LBFGS_options |= {"iter_per_step": 20, "fun_per_step": 25, "maxiter": 10**9}
    model.compile("L-BFGS", external_trainable_variables=list(problem.unknowns), verbose=0)
    model.train(callbacks=[clock], verbose=0)


def solve(name: str, method: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    os.environ.setdefault("DDE_BACKEND", "pytorch")
    import deepxde as dde
    import numpy as np

    import woodbury.deepxde

    if options.cpu:
        time.perf_counter = time.process_time  # for all that this process measures
    dde.config.set_random_seed(seed)
    problem = PROBLEMS[name](dde, np)
    model = dde.Model(problem.data, problem.net)
    model.compile("adam", lr=1e-3, external_trainable_variables=list(problem.unknowns), verbose=0)
    before = math.nan
    if options.polish:
        model.train(iterations=ADAM_FIRST, verbose=0)
        before = problem.error(model)
    started = time.perf_counter()
    if method == "fit":
        woodbury.deepxde.fit(model, options.seconds, verbose=0)
    else:
        by_recipe(dde, model, problem, options.seconds, adam=not options.polish)
    spent, steps = time.perf_counter() - started, model.train_state.step
    found = {"before": before, "error": problem.error(model), "steps": steps, "seconds": spent, "seed": seed}
    return {"problem": name, "method": method, **found}


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.read:
        lines = [line for name in options.read for line in Path(name).read_text().splitlines()]
        return {"runs": [json.loads(line) for line in lines]}
    chosen = [name for name in PROBLEMS if any(word in name for word in options.only)] or list(PROBLEMS)
    methods = ("fit", "recipe") if options.method == "both" else (options.method,)
    runs = []
    for name, method, place in product(chosen, methods, range(options.seeds)):
        found = solve(name, method, options, options.seed + place)
        runs.append(found)
        say(f"{name}, {method}, seed {found['seed']}: {found['error']:.1e} ({found['steps']} steps)")
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps(found) + "\n")
    return {"runs": runs}


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{'':20}{'method':10}{'runs':>5}{'before':>9}{'median':>9}{'worst':>9}{'steps':>8}"]
    for name, method in product(PROBLEMS, ("fit", "recipe")):
        runs = [own for own in result["runs"] if (own["problem"], own["method"]) == (name, method)]
        if runs:
            before, error, steps = (median(own[key] for own in runs) for key in ("before", "error", "steps"))
            worst = max(own["error"] for own in runs)
            errors = f"{before:9.1e}{error:9.1e}{worst:9.1e}"
            lines.append(f"{name:20}{method:10}{len(runs):5}{errors}{steps:8.0f}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("only", nargs="*", help="parts of the names of problems")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="networks and points (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="the first of them (default: %(default)s)")
    parser.add_argument("--polish", action="store_true", help=f"go on after {ADAM_FIRST} steps of Adam")
    parser.add_argument("--method", choices=("both", "fit", "recipe"), default="both", help="which of the two")
    parser.add_argument("--cpu", action="store_true", help="seconds of the process, not of the clock")
    parser.add_argument("--save", metavar="FILE", help="append each run, once it is over, as a line of JSON")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="run nothing: the table of what such files hold")


COMMAND = Command("Solve DeepXDE's documented problems, a minute each.", run, table, add_options)
