"""A list of equations that networks are tried on, each by one default call of `woodbury.fit`.

Beside it Adam and then L-BFGS, SOAP (of `pytorch_optimizer`), and Adam and then SSBroyden (of `scimba`) get the
same terms, the same weights and as many seconds.
"""

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import woodbury
from benchmarks.common import Command, say
from benchmarks.equation_list import PROBLEMS, Problem
from woodbury._style import STYLE

FIRST_SEED = 100
POINTS, RATE = 2048, 3e-3  # of the rivals
GOALS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


def by_fit(
    problem: Problem, seconds: float, note: Callable[[float], None], weight: float | None = None
) -> dict[str, float]:
    """With this weight of all terms but the first, or with balanced ones."""
    terms: dict[str, Any] = dict(problem.terms)
    if weight is not None:
        terms |= {name: (*term, weight) for name, term in list(terms.items())[1:]}
    fit = woodbury.fit(
        problem.model,
        woodbury.Equations(**terms),
        seconds=seconds,
        progress=False,
        callback=lambda fit: note(fit.seconds),
    )
    return {"steps": fit.steps, "points": fit.samples}


@dataclass(frozen=True)
class Descent:
    """Half of the time `first` with new points in every step, its rate falling to 0, then `second` on fixed ones.

    Without `second` all of the time is that of `first`.
    """

    first: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    second: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None

    def __call__(self, problem: Problem, seconds: float, note: Callable[[float], None]) -> dict[str, float]:
        from woodbury.fit.equations import TermSource

        source = TermSource(problem.model, woodbury.Equations(**problem.terms).terms, by_residual=False)
        parameters = list(problem.model.parameters())
        first, second = self.first(parameters), self.second and self.second(parameters)
        turn = seconds if second is None else seconds / 2
        batch, started, spent, steps = source.draw(POINTS)[0], time.perf_counter(), 0.0, 0

        def closure() -> Any:
            problem.model.zero_grad()
            loss = source.forward(problem.model, batch).square().mean()
            loss.backward()
            return loss

        while spent < seconds:
            if second is None or spent < turn:
                batch = source.draw(POINTS)[0]
                first.param_groups[0]["lr"] = RATE * (1 - spent / turn)
                closure()
                first.step()
            else:
                second.step(closure)
            steps += 1
            spent = time.perf_counter() - started
            if steps % 20 == 0 or spent >= seconds:
                note(spent)
                started = time.perf_counter() - spent
        return {"steps": steps, "points": POINTS}


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE)


def lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=20, history_size=50, line_search_fn="strong_wolfe")


def soap(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    optimizer: torch.optim.Optimizer = SOAP(parameters, lr=RATE, weight_decay=0.0)
    return optimizer


def ssbroyden(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Of scimba, which sets torch's default device and type when it is imported, and makes its matrix by them."""
    dtype = torch.get_default_dtype()
    from scimba_torch.optimizers.ssbroyden import SSBroyden

    torch.set_default_device(None)
    torch.set_default_dtype(torch.float64)
    with parameters[0].device:
        optimizer: torch.optim.Optimizer = SSBroyden(parameters, method="ssbroyden")
    torch.set_default_dtype(dtype)
    return optimizer


Method = Callable[[Problem, float, Callable[[float], None]], dict[str, float]]
RIVALS: dict[str, Method] = {
    "adam + l-bfgs": Descent(adam, lbfgs),
    "soap": Descent(soap, None),
    "adam + ssbroyden": Descent(adam, ssbroyden),
}
WEIGHTED: dict[str, Method] = {f"weight {w:g}": partial(by_fit, weight=w) for w in (1.0, 10.0, 100.0)}
METHODS: dict[str, Method] = {"fit": by_fit, **WEIGHTED, **RIVALS}
PACKAGES = {"soap": "pytorch_optimizer", "adam + ssbroyden": "scimba_torch"}


def solve(name: str, method: str, device: str, seconds: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    problem = PROBLEMS[name](device)
    reached: dict[str, float] = {}

    def note(spent: float) -> None:
        error = problem.error(problem.model)
        for goal in GOALS:
            if error <= goal:
                reached.setdefault(f"{goal:g}", spent)

    counts = METHODS[method](problem, seconds, note)
    return {"seed": seed, "error": problem.error(problem.model), "reached": reached, **counts}


def _methods(options: argparse.Namespace) -> list[str]:
    """Those asked for whose packages are installed."""
    missing = {method for method, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    asked = ["fit", *(WEIGHTED if options.weights else ()), *(RIVALS if options.rivals else ())]
    return [method for method in asked if method not in missing]


def run(options: argparse.Namespace) -> dict[str, Any]:
    results = json.loads(Path(options.read).read_text()) if options.read else solve_all(options)
    if options.figure is not None:
        draw(results, options)
    return results


def solve_all(options: argparse.Namespace) -> dict[str, Any]:
    """{problem: {method: what `solve` returns for each seed}}."""
    chosen = [name for name in PROBLEMS if any(word in name for word in options.only)] or list(PROBLEMS)
    results: dict[str, Any] = {}
    for name in chosen:
        for method in _methods(options):
            seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
            runs = [solve(name, method, options.device, options.seconds, seed) for seed in seeds]
            results.setdefault(name, {})[method] = runs
            error = median(own["error"] for own in runs)
            reached = ", ".join(f"{goal} {own:.1f}" for goal, own in runs[0]["reached"].items())
            say(f"{name}, {method}: {error:.1e} ({runs[0]['steps']} steps; seconds to {reached or 'none'})")
    return results


LOOKS = {  # Okabe and Ito's colours, which the colour-blind can tell apart
    "fit": ("woodbury.fit", "o", "#0072B2"),
    "adam + l-bfgs": ("Adam, then L-BFGS", "s", "#555555"),
    "adam + ssbroyden": ("Adam, then SSBroyden", "D", "#E69F00"),
    "soap": ("SOAP", "^", "#D55E00"),
}


def draw(results: dict[str, Any], options: argparse.Namespace) -> None:
    """The errors as a figure, a line for each problem, the median of the seeds with their range."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 0.6 + 0.36 * len(results)), layout="constrained")
        panel = figure.subplots()
        for place, methods in enumerate(results.values()):
            for method, (label, marker, colour) in LOOKS.items():
                if method not in methods:
                    continue
                errors = [run["error"] for run in methods[method]]
                panel.plot([min(errors), max(errors)], [place, place], color=colour, linewidth=1.5, alpha=0.5)
                size = 9 if method == "fit" else 6
                panel.plot(median(errors), place, marker, color=colour, markersize=size, label=label)
        handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
        panel.set_yticks(range(len(results)), list(results))
        panel.set(xscale="log", ylim=(len(results) - 0.5, -0.5))
        panel.set_title(f"Relative error after {options.seconds:g} seconds")
        figure.savefig(options.figure, dpi=150)


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
    parser.add_argument(
        "--rivals", action="store_true", help="Adam and L-BFGS beside it, SOAP and SSBroyden where installed"
    )
    parser.add_argument(
        "--weights", action="store_true", help="conditions with the weights 1, 10 and 100 beside it"
    )
    parser.add_argument("--figure", metavar="PNG", help="draw the errors into this file (matplotlib)")
    parser.add_argument("--read", metavar="JSON", help="results of --json, in place of new runs")


COMMAND = Command("Solve a list of equations, by default for a minute each.", run, table, add_options)
