"""Parts of the examples: options, training by the clock, the choice of a setting, and figures."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import woodbury
from woodbury._style import STYLE

Build = Callable[[nn.Module], torch.optim.Optimizer]
Methods = dict[str, dict[str, Build]]  # method -> setting -> how to build the optimizer
Curve = list[tuple[float, ...]]  # points (seconds or the like, ..., loss)


@dataclass
class Run:
    """A trained network and how its loss fell."""

    curve: Curve  # (fraction of the steps, CPU seconds inside them, train loss), from the start on
    score: float  # on test data
    model: nn.Module


def options(description: str | None, out: str, **more: tuple[Any, str]) -> argparse.ArgumentParser:
    """A parser with --out, --NAME for every NAME=(default, help), and the docstring as its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default {default})")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"where to write (default {out})")
    return parser


def tanh_network(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with tanh between them, in float64."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def from_torch(kind: type[torch.optim.Optimizer], **settings: Any) -> Build:
    """A function that builds an optimizer of torch with these settings."""
    return lambda model: kind(model.parameters(), **settings)


def lbfgs(history: int, iterations: int) -> Build:
    """A function that builds torch's L-BFGS, with so many iterations per step and no tolerance at which to end."""
    settings: dict[str, Any] = {"tolerance_grad": 0, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    return from_torch(torch.optim.LBFGS, history_size=history, max_iter=iterations, **settings)


def descend(optimizer: torch.optim.Optimizer, compute: Callable[[], Tensor]) -> Tensor:
    """Take a step of an optimizer of torch on the loss that `compute` returns; returns that before the step."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute()
        loss.backward()
        return loss

    return optimizer.step(closure)


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, loss: nn.Module, *batch: Tensor) -> Tensor:
    """Take one step on (inputs, targets) and return the loss before it."""
    if isinstance(optimizer, woodbury.NaturalGradient | woodbury.GaussNewton):
        return optimizer.step(*batch).loss
    return descend(optimizer, lambda: loss(model(batch[0]), batch[1]))


def train(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    loss: nn.Module,
    steps: int,
    batches: Iterator[tuple[Tensor, Tensor]],
    measure: Callable[[nn.Module], float],
    points: int,
) -> Curve:
    """Train with a rate that falls linearly to zero; measure at the start and at `points` more points."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    marks = {round(steps * point / points) for point in range(1, points + 1)}
    curve, seconds = [(0.0, 0.0, measure(model))], 0.0
    for step in range(1, steps + 1):
        batch = next(batches)
        start = time.process_time()
        take_step(optimizer, model, loss, *batch)
        schedule.step()
        seconds += time.process_time() - start
        if step in marks:
            curve.append((step / steps, seconds, measure(model)))
    return curve


def compare(methods: Methods, run: Callable[[Build, int], Run], line: str, seeds: int) -> dict[str, list[Run]]:
    """Choose the best setting of each method on seed 0; return runs with it on seeds from 100 on. Prints all runs.

    line: a format of the median loss, score and seconds, such as "loss {loss:.2g}, {seconds:.1f} s".
    """

    def print_medians(*label: str, runs: Sequence[Run]) -> None:
        loss, seconds = (median(run.curve[-1][column] for run in runs) for column in (2, 1))
        numbers = line.format(loss=loss, score=median(run.score for run in runs), seconds=seconds)
        print("  " + " ".join(label), numbers, flush=True)

    print("seed 0, to choose a setting:")
    chosen = {}
    for method, settings in methods.items():
        losses = {}
        for setting, build in settings.items():
            trial = run(build, 0)
            losses[setting] = trial.curve[-1][2]
            print_medians(f"{method:25}", f"{setting:12}", runs=[trial])
        chosen[method] = smallest(losses)
    print(f"the chosen settings, median over {seeds} other seed(s):")
    best = {}
    for method, setting in chosen.items():
        label = f"{method}, {setting}"
        best[label] = [run(methods[method][setting], seed) for seed in range(100, 100 + seeds)]
        print_medians(f"{label:38}", runs=best[label])
    return best


def smallest(losses: dict[str, float]) -> str:
    """The name with the smallest loss; NaN ranks last."""
    return min(losses, key=lambda name: (math.isnan(losses[name]), losses[name]))


# Of Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, AMBER, GREY = "#0072B2", "#D55E00", "#E69F00", "#555555"


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, dpi: int = 150, **settings: Any) -> Iterator[Any]:
    """Yield a figure and its panels, an array (rows, columns); write it to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        picture, panels = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **settings)
        yield picture, panels
        picture.savefig(path, dpi=dpi)
    pyplot.close(picture)
    print(f"wrote {path}")


def plot(panel: Any, curves: dict[str, list[Curve]], colours: Sequence[str], column: int = 0) -> None:
    """Draw the loss of every run against another column of its curve: one colour per label, woodbury's wider."""
    for (label, runs), colour in zip(curves.items(), colours, strict=True):
        width = 2.0 if label.startswith("woodbury") else 1.2
        for index, curve in enumerate(runs):
            across, losses = [point[column] for point in curve], [point[-1] for point in curve]
            panel.plot(across, losses, color=colour, linewidth=width, label=label if index == 0 else None)


def add_legend(picture: Any, panel: Any, runs: dict[str, list[Any]]) -> None:
    """The names of a panel's lines below the figure, where they cover none."""
    picture.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))


def draw_curves(path: Path, title: str, curves: dict[str, list[Curve]], xlabel: str, ylabel: str) -> None:
    """Write a figure of losses or errors, on a logarithmic scale, of `woodbury.fit` and one or two others."""
    with figure(path, figsize=(7.5, 4.2)) as (picture, ((panel,),)):
        plot(panel, curves, (BLUE, ORANGE, GREY)[: len(curves)])
        panel.set(yscale="log", xlabel=xlabel, ylabel=ylabel, xlim=(0, None))
        panel.set_title(", ".join(filter(None, (title, seeds_each(curves)))))
        add_legend(picture, panel, curves)


def seeds_each(runs: dict[str, list[Any]]) -> str | None:
    """How many runs each method has, for a title; None if not all have the same number."""
    first, *others = {len(own) for own in runs.values()}
    return None if others else f"{first} seed{'s' * (first > 1)} each"


def plot_runs(panels: Any, best: dict[str, list[Run]], colours: Sequence[str], whole: float, unit: str) -> None:
    """Draw train loss against steps (`whole` of them in all, in this unit) and against seconds, in two panels."""
    curves = {
        label: [[(whole * part, seconds, loss) for part, seconds, loss in run.curve[1:]] for run in runs]
        for label, runs in best.items()  # without the start, which would stretch the axis
    }
    for column, name in enumerate((unit, "CPU seconds, one thread")):
        plot(panels[column], curves, colours, column)
        panels[column].set(xlabel=name)
    add_legend(panels[0].figure, panels[0], best)
