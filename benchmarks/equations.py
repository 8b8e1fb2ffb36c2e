"""The list of equations that networks are tried on, each by one default call of `woodbury.fit`.

The error is |u_network - u| / |u| in L2 on points that no step has seen; u is known, by Cole and Hopf, or by a
spectral method (Allen-Cahn). The last two measure an unknown coefficient and an eigenvalue instead. Beside it Adam
and then L-BFGS get the same terms, the same weights and as many seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import woodbury
from benchmarks.common import Command, chain, say
from woodbury._style import STYLE

PI, FIRST_SEED = math.pi, 100
GOALS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Box:
    """Points in a box, on its faces, and at its start, the lower end of the first axis (time)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    device: str

    def inside(self, count: int) -> Tensor:
        low, high = torch.tensor([self.low, self.high], dtype=torch.float64, device=self.device)
        return low + (high - low) * torch.rand(count, len(low), dtype=torch.float64, device=self.device)

    def faces(self, count: int, axes: tuple[int, ...]) -> Tensor:
        points, ends = self.inside(count), torch.tensor([self.low, self.high], dtype=torch.float64).to(self.device)
        axis = torch.tensor(axes, device=self.device)[torch.randint(len(axes), (count,), device=self.device)]
        side = torch.randint(2, (count,), device=self.device)
        return points.scatter(1, axis.unsqueeze(1), ends[side, axis].unsqueeze(1))

    def start(self, count: int) -> Tensor:
        points = self.inside(count)
        points[:, 0] = self.low[0]
        return points


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    terms: Mapping[str, tuple[Any, Any]]
    error: Callable[[nn.Module], float]


def value(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def network(device: str, *widths: int, before: nn.Module | None = None) -> nn.Module:
    model = chain(nn.Tanh, *widths)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return (model if before is None else nn.Sequential(before, model)).double().to(device)


def relative_error(points: Tensor, truth: Tensor) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def measure(model: nn.Module) -> float:
        return float((model(points) - truth).norm() / truth.norm())

    return measure


def evolution(
    box: Box, model: nn.Module, equation: Any, start: Function, error: Any, edges: Function | None
) -> Problem:
    """u_t = ... from a start on; edges are values on the faces of space, None for periodic networks."""
    terms: dict[str, tuple[Any, Any]] = {"equation": (box.inside, equation)}
    terms["start"] = (lambda count: (points := box.start(count), start(points)), value)
    if edges is not None:
        axes = tuple(range(1, len(box.low)))
        terms["edges"] = (lambda count: (points := box.faces(count, axes), edges(points)), value)
    return Problem(model, terms, error)


def known(box: Box, solution: Function) -> Callable[[nn.Module], float]:
    points = box.inside(10_000)
    return relative_error(points, solution(points))


# -- the list -------------------------------------------------------------------------------------------------


def burgers(device: str, nu: float, width: int) -> Problem:
    box = Box((0.0, -1.0), (1.0, 1.0), device)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1))
        return slopes[..., 0] + u * slopes[..., 1] - nu * bend

    def solution(points: Tensor) -> Tensor:
        """u = -int sin(pi y) g dz / int g dz,  g = exp(-cos(pi y) / (2 pi nu) - z^2),  y = x - 2 sqrt(nu t) z."""
        from numpy.polynomial.hermite import hermgauss

        z, weights = (torch.from_numpy(array).to(device) for array in hermgauss(180))
        y = PI * (points[:, 1:] - 2 * (nu * points[:, :1]).sqrt() * z)
        exponents = -torch.cos(y) / (2 * PI * nu)
        f = weights * torch.exp(exponents - exponents.amax(1, keepdim=True))
        return -(torch.sin(y) * f).sum(1, keepdim=True) / f.sum(1, keepdim=True)

    model = network(device, 2, *[width] * 4, 1)
    wave, still = lambda x: -torch.sin(PI * x[:, 1:]), lambda x: torch.zeros_like(x[:, 1:])
    return evolution(box, model, equation, wave, known(box, solution), still)


def poisson(device: str, *widths: int) -> Problem:
    """-Lap u = f in the unit cube: a wave in 2 dimensions, cosines in 5, and sum x_{2i-1} x_{2i} in 10."""
    d = widths[0]
    box = Box((0.0,) * d, (1.0,) * d, device)
    solutions: dict[int, tuple[Function, float]] = {
        2: (lambda x: torch.sin(PI * x).prod(1, keepdim=True), 2 * PI**2),
        5: (lambda x: torch.cos(PI * x).sum(1, keepdim=True), PI**2),
        10: (lambda x: (x[:, 0::2] * x[:, 1::2]).sum(1, keepdim=True), 0.0),
    }
    solution, factor = solutions[d]

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.laplacian(model, x).laplacian + factor * solution(x)

    edges = (lambda count: (points := box.faces(count, tuple(range(d))), solution(points)), value)
    model = network(device, *widths, 1)
    return Problem(model, {"equation": (box.inside, equation), "edges": edges}, known(box, solution))


def helmholtz(device: str) -> Problem:
    """Lap u + u = f with u = sin(pi x) sin(4 pi y)."""
    box = Box((-1.0, -1.0), (1.0, 1.0), device)

    def solution(x: Tensor) -> Tensor:
        return torch.sin(PI * x[:, :1]) * torch.sin(4 * PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, _, bend = woodbury.laplacian(model, x)
        return bend + u - (1 - 17 * PI**2) * solution(x)

    model = network(device, 4, 30, 30, 30, 30, 1, before=woodbury.Periodic(0, 1))
    terms = {"equation": (box.inside, equation), "edges": (lambda count: box.faces(count, (0, 1)), value)}
    return Problem(model, terms, known(box, solution))


def heat(device: str) -> Problem:
    """u_t = Lap u / 4 in four dimensions."""
    box = Box((0.0,) * 5, (1.0,) * 5, device)

    def solution(x: Tensor) -> Tensor:
        return torch.exp(-(PI**2) * x[:, :1] / 4) * torch.cos(PI * x[:, 1:]).sum(1, keepdim=True)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        _, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1, 1, 1, 1))
        return slopes[..., 0] - bend / 4

    model = network(device, 5, 64, 64, 48, 48, 1)
    return evolution(box, model, equation, solution, known(box, solution), solution)


def allen_cahn(device: str) -> Problem:
    """u_t = 1e-4 u_xx + 5 (u - u^3), periodic, from x^2 cos(pi x)."""
    box = Box((0.0, -1.0), (1.0, 1.0), device)

    def start(x: Tensor) -> Tensor:
        return x[:, 1:].square() * torch.cos(PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1))
        return slopes[..., 0] - 1e-4 * bend - 5 * (u - u**3)

    model = network(device, 3, 40, 40, 40, 40, 1, before=woodbury.Periodic(1))
    points, truth = _allen_cahn_reference()
    return evolution(box, model, equation, start, relative_error(points.to(device), truth.to(device)), None)


def _allen_cahn_reference(modes: int = 1024, steps: int = 4000) -> tuple[Tensor, Tensor]:
    """By Fourier series in x and fourth-order exponential steps in t (Cox and Matthews 2002)."""
    import numpy as np

    x, h = -1 + 2 * np.arange(modes) / modes, 1 / steps
    linear = -1e-4 * (PI * np.fft.fftfreq(modes, 1 / modes)) ** 2 + 5
    roots = h * linear[:, None] + np.exp(1j * PI * (np.arange(1, 33) - 0.5) / 32)

    def mean(function: Callable[[Any], Any]) -> Any:  # over a circle, where the quotients are stable
        return h * np.real(function(roots).mean(1))

    half = mean(lambda z: (np.exp(z / 2) - 1) / z)
    f1 = mean(lambda z: (-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    f2 = mean(lambda z: (2 + z + np.exp(z) * (-2 + z)) / z**3)
    f3 = mean(lambda z: (-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)

    def cubic(v: Any) -> Any:
        return np.fft.fft(-5 * np.real(np.fft.ifft(v)) ** 3)

    v, rows = np.fft.fft(x**2 * np.cos(PI * x)), []
    whole, part = np.exp(h * linear), np.exp(h * linear / 2)
    for step in range(1, steps + 1):
        n = cubic(v)
        a = part * v + half * n
        na = cubic(a)
        nb = cubic(part * v + half * na)
        nc = cubic(part * a + half * (2 * nb - n))
        v = whole * v + n * f1 + 2 * (na + nb) * f2 + nc * f3
        if step % 100 == 0:
            rows.append((step * h, np.real(np.fft.ifft(v))[::8]))
    points = np.array([[t, place] for t, _ in rows for place in x[::8]])
    return torch.from_numpy(points), torch.from_numpy(np.concatenate([row for _, row in rows])).unsqueeze(1)


def wave(device: str) -> Problem:
    """u_tt = u_xx, from two waves at rest."""
    box = Box((0.0, 0.0), (1.0, 1.0), device)

    def solution(x: Tensor) -> Tensor:
        t, place = (PI * x).split(1, 1)
        return torch.sin(place) * torch.cos(t) + 0.5 * torch.sin(3 * place) * torch.cos(3 * t)

    def rest(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.derivatives(model, x, [(0,)])[0]

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.laplacian(model, x, weights=(1, -1)).laplacian

    model = network(device, 2, 30, 30, 30, 1)
    problem = evolution(box, model, equation, solution, known(box, solution), solution)
    return Problem(model, {**problem.terms, "rest": (box.start, rest)}, problem.error)


def korteweg_de_vries(device: str) -> Problem:
    """u_t + 6 u u_x + u_xxx = 0: a soliton of speed 4."""
    box = Box((0.0, -4.0), (0.5, 6.0), device)

    def solution(x: Tensor) -> Tensor:
        return 2 / torch.cosh(x[:, 1:] - 4 * x[:, :1]).square()

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, u_t, u_x, u_xxx = woodbury.derivatives(model, x, [(), (0,), (1,), (1, 1, 1)])
        return u_t + 6 * u * u_x + u_xxx

    model = network(device, 2, 30, 30, 30, 1)
    return evolution(box, model, equation, solution, known(box, solution), solution)


class _WithNumber(nn.Module):
    """A network, and a number to find."""

    def __init__(self, net: nn.Module, first: float) -> None:
        super().__init__()
        self.net, self.number = net, nn.Parameter(torch.tensor(first, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def inverse(device: str) -> Problem:
    """c of u_t = c u_xx from 200 measurements; the error is that of c."""
    box, c = Box((0.0, 0.0), (1.0, 1.0), device), 0.1

    def solution(x: Tensor) -> Tensor:
        return torch.exp(-c * PI**2 * x[:, :1]) * torch.sin(PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        _, slopes, bend = woodbury.laplacian(find.net, x, weights=(0, 1))
        return slopes[..., 0] - find.number * bend

    find = _WithNumber(network(device, 2, 20, 20, 1), 1.0).to(device)
    places = box.inside(200)
    terms = {"equation": (box.inside, equation), "data": ((places, solution(places)), value)}
    return Problem(find, terms, lambda model: abs(float(find.number) / c - 1))


def eigenvalue(device: str) -> Problem:
    """The smallest E of -u'' / 2 + x^2 u / 2 = E u; the error is that of E = 1/2."""
    box = Box((-6.0,), (6.0,), device)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, _, bend = woodbury.laplacian(find.net, x)
        return -bend / 2 + x.square() * u / 2 - find.number * u

    find = _WithNumber(network(device, 1, 20, 20, 1), 0.3).to(device)
    middle, ends = torch.zeros(1, 1, dtype=torch.float64, device=device), box.faces(2, (0,))
    terms = {
        "equation": (box.inside, equation),
        "scale": ((middle, torch.ones_like(middle)), value),
        "ends": (torch.tensor([[-6.0], [6.0]], dtype=torch.float64).to(ends), value),
    }
    return Problem(find, terms, lambda model: abs(float(find.number) / 0.5 - 1))


PROBLEMS: dict[str, Callable[[str], Problem]] = {
    "burgers, nu 0.01/pi, 4x20": lambda device: burgers(device, 0.01 / PI, 20),
    "burgers, nu 0.01/pi, 4x40": lambda device: burgers(device, 0.01 / PI, 40),
    "burgers, nu 0.01, 4x20": lambda device: burgers(device, 0.01, 20),
    "allen-cahn": allen_cahn,
    "helmholtz": helmholtz,
    "heat 4+1-d": heat,
    "poisson 2-d": lambda device: poisson(device, 2, 32, 32),
    "poisson 5-d": lambda device: poisson(device, 5, 64, 64, 48, 48),
    "poisson 10-d": lambda device: poisson(device, 10, 256, 256, 128, 128),
    "kdv": korteweg_de_vries,
    "wave": wave,
    "inverse": inverse,
    "eigenvalue": eigenvalue,
}


# -- runs -----------------------------------------------------------------------------------------------------


def by_fit(problem: Problem, seconds: float, note: Callable[[float], None]) -> dict[str, float]:
    fit = woodbury.fit(
        problem.model,
        woodbury.Equations(**problem.terms),
        seconds=seconds,
        progress=False,
        callback=lambda fit: note(fit.seconds),
    )
    return {"steps": fit.steps, "points": fit.samples}


def by_descent(problem: Problem, seconds: float, note: Callable[[float], None]) -> dict[str, float]:
    """Half of the time Adam with new points in every step, then L-BFGS on as many that stay."""
    from woodbury.fit.equations import TermSource

    source = TermSource(problem.model, woodbury.Equations(**problem.terms).terms, by_residual=False)
    adam = torch.optim.Adam(problem.model.parameters(), lr=3e-3)
    lbfgs = torch.optim.LBFGS(
        problem.model.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe"
    )
    batch, started, spent, steps = source.draw(2048)[0], time.perf_counter(), 0.0, 0

    def closure() -> Tensor:
        problem.model.zero_grad()
        loss = source.forward(problem.model, batch).square().mean()
        loss.backward()
        return loss

    while spent < seconds:
        if spent < seconds / 2:
            batch = source.draw(2048)[0]
            closure()
            adam.step()
        else:
            lbfgs.step(closure)
        steps += 1
        spent = time.perf_counter() - started
        if steps % 20 == 0 or spent >= seconds:
            note(spent)
            started = time.perf_counter() - spent
    return {"steps": steps, "points": 2048}


# the best results on such networks: error, seconds (None where not said), source
PUBLISHED: dict[str, tuple[float, float | None, str]] = {
    "burgers, nu 0.01/pi, 4x40": (1.6e-8, 2878, "SSBroyden"),
    "burgers, nu 0.01, 4x20": (3.9e-7, 16, "DSGNAR, float32"),
    "allen-cahn": (1.9e-6, None, "vRBA + SSBroyden"),
    "helmholtz": (2.0e-9, 540, "SPRING"),
    "heat 4+1-d": (1.3e-6, 3000, "KFAC"),
    "poisson 5-d": (2.6e-7, 7000, "SPRING"),
    "poisson 10-d": (1.5e-5, 7000, "SPRING"),
}
METHODS = {"fit": by_fit, "adam + l-bfgs": by_descent}


def solve(name: str, method: str, device: str, seconds: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    problem = PROBLEMS[name](device)
    reached: dict[str, float] = {}
    course: list[tuple[float, float]] = []  # (seconds, error)

    def note(spent: float) -> None:
        error = problem.error(problem.model)
        course.append((spent, error))
        for goal in GOALS:
            if error <= goal:
                reached.setdefault(f"{goal:g}", spent)

    counts = METHODS[method](problem, seconds, note)
    return {"error": problem.error(problem.model), "reached": reached, **counts, "course": course}


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = options.device
    if options.read:
        read = [json.loads(Path(name).read_text().splitlines()[-1]) for name in options.read]
        return _with_figure({name: own for result in read for name, own in result.items()}, options.figure)
    chosen = [name for name in PROBLEMS if any(word in name for word in options.only)] or list(PROBLEMS)
    results: dict[str, Any] = {}
    for name in chosen:
        for method in METHODS if options.rivals else ["fit"]:
            seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
            runs = [solve(name, method, device, options.seconds, seed) for seed in seeds]
            results.setdefault(name, {})[method] = runs
            error = median(own["error"] for own in runs)
            reached = ", ".join(f"{goal} {own:.1f}" for goal, own in runs[0]["reached"].items())
            say(f"{name}, {method}: {error:.1e} ({runs[0]['steps']} steps; seconds to {reached or 'none'})")
    return _with_figure(results, options.figure)


def _with_figure(results: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Draw error against seconds, a panel for each problem, with what is published."""
    if path is None:
        return results
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.5 * rows), squeeze=False, sharey=True)
    for panel in panels.flat[len(results) :]:
        panel.axis("off")
    for panel, (name, methods) in zip(panels.flat, results.items(), strict=False):
        colours = {"fit": "#0072B2", "adam + l-bfgs": "#999999"}
        for method, runs in methods.items():
            for index, own in enumerate(runs):
                label = f"woodbury.{method}" if method == "fit" else method
                seconds, errors = zip(*own["course"], strict=True)
                panel.semilogy(seconds, errors, color=colours[method], label=None if index else label)
        if name in PUBLISHED:
            error, after, source = PUBLISHED[name]
            panel.axhline(error, color="#d55e00", linestyle="--", linewidth=1)
            when = "" if after is None else f" in {after:,} s"
            panel.text(
                0.98, error * 1.5, source + when, transform=panel.get_yaxis_transform(), ha="right", fontsize=8
            )
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("seconds", fontsize=9)
    for row in panels:
        row[0].set_ylabel("relative error", fontsize=9)
    panels.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return results


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{'':28}{'method':16}{'error':>9}   seconds to {'   '.join(f'{goal:g}' for goal in GOALS)}"]
    for name, methods in result.items():
        for method, runs in methods.items():
            times = [[own["reached"].get(f"{goal:g}", math.inf) for own in runs] for goal in GOALS]
            shown = "".join(f"{median(own):7.1f}" if median(own) < math.inf else f"{'-':>7}" for own in times)
            lines.append(f"{name:28}{method:16}{median(own['error'] for own in runs):9.1e}{'':8}{shown}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("only", nargs="*", help="parts of the names of problems")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="networks and points (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: %(default)s)")
    parser.add_argument("--rivals", action="store_true", help="Adam and L-BFGS beside it")
    parser.add_argument("--figure", metavar="PNG", help="draw error against seconds into this file (matplotlib)")
    parser.add_argument("--read", nargs="+", metavar="JSON", help="results of --json, in place of new runs")


COMMAND = Command("Solve a list of equations, by default for a minute each.", run, table, add_options)
