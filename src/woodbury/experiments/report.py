"""Tables and figures from run folders on disk. Nothing here runs a model."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from woodbury.experiments.config import RunConfig

# Okabe and Ito's palette, told apart with every common form of colour blindness; markers help in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#555555", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: Any = {  # Any: matplotlib types the keys as a literal of every setting
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "svg.hashsalt": "woodbury",  # the same records give the same file
}


@dataclass(frozen=True)
class Run:
    """The records of one run folder."""

    config: RunConfig
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]


@dataclass(frozen=True)
class Summary:
    """Where the runs of one optimizer ended: medians over seeds."""

    optimizer: str
    seeds: int
    train_loss: float
    test_error: float
    seconds: float
    damping: float  # NaN for an optimizer without damping


def load_run(folder: Path) -> Run:
    """Read a run folder."""
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return Run(
        config=RunConfig.load(folder / "config.json"),
        steps=[record for record in records if record["kind"] == "step"],
        epochs=[record for record in records if record["kind"] == "epoch"],
    )


def load_runs(folder: Path) -> list[Run]:
    """Read every run folder inside `folder`, in the order in which they were made."""
    configs = sorted(folder.glob("*/config.json"), key=lambda path: (path.stat().st_mtime_ns, path))
    return [load_run(config.parent) for config in configs]


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """One line per optimizer, in the order in which they first appear."""
    summaries = []
    for optimizer, group in _by_optimizer(runs).items():
        ends = [run.epochs[-1] for run in group]
        summaries.append(
            Summary(
                optimizer=optimizer,
                seeds=len(group),
                train_loss=median(_number(end["train_loss"]) for end in ends),
                test_error=median(_number(end["test_error"]) for end in ends),
                seconds=median(_number(end["seconds"]) for end in ends),
                damping=median(_number(run.steps[-1]["damping"]) for run in group),
            )
        )
    return summaries


def draw(runs: Sequence[Run]) -> Figure:
    """The paper's panels: train loss and test error against epochs and seconds, damping against epochs.

    Lines are medians over seeds, bands run from the smallest to the largest value.
    """
    groups = _by_optimizer(runs)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 6.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        (loss_epochs, loss_time, damping), (error_epochs, error_time, key) = figure.subplots(2, 3)
        figure.suptitle(_title(runs[0].config), x=0.012, ha="left", fontsize=13)

        for index, group in enumerate(groups.values()):
            look = {
                "color": _COLOURS[index % len(_COLOURS)],
                "marker": _MARKERS[index % len(_MARKERS)],
                "linestyle": "-" if index < len(_COLOURS) else "--",
            }
            epochs = [float(record["epoch"]) for record in group[0].epochs]
            seconds, _, _ = _spread([[record["seconds"] for record in run.epochs] for run in group])
            losses = [[record["train_loss"] for record in run.epochs] for run in group]
            errors = [[_percent(record["test_error"]) for record in run.epochs] for run in group]
            _curve(loss_epochs, epochs, losses, look)
            _curve(loss_time, seconds, losses, look)
            _curve(error_epochs, epochs, errors, look)
            _curve(error_time, seconds, errors, look)

            steps_per_epoch = group[0].epochs[-1]["step"] / max(1, group[0].epochs[-1]["epoch"])
            at = [record["step"] / steps_per_epoch for record in group[0].steps]
            values = [[record["damping"] for record in run.steps] for run in group]
            if any(value is not None for value in values[0]):
                _curve(damping, at, values, {**look, "marker": ""})

        _finish(loss_epochs, "Train loss", "epochs")
        _finish(loss_time, "Train loss", "seconds of training")
        _finish(error_epochs, "Test error, %", "epochs")
        _finish(error_time, "Test error, %", "seconds of training")
        _finish(damping, "Damping", "epochs")
        for panel in (loss_epochs, error_epochs, damping):
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if not damping.lines:
            damping.text(0.5, 0.5, "no optimizer with damping", transform=damping.transAxes, ha="center")
        _draw_key(key, loss_epochs, groups)
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure as PNG and SVG and return the two paths; `stem` is the path without its ending."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with matplotlib.rc_context(_STYLE):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _by_optimizer(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.optimizer, []).append(run)
    return groups


def _number(value: float | None) -> float:
    """A recorded value as a float; null stands for what was not finite."""
    return math.nan if value is None else float(value)


def _percent(fraction: float | None) -> float:
    return 100 * _number(fraction)


def _spread(series: Sequence[Sequence[float | None]]) -> tuple[list[float], list[float], list[float]]:
    """Median, smallest and largest value over the seeds at each point."""
    points = [[_number(value) for value in point] for point in zip(*series, strict=False)]
    return [median(p) for p in points], [min(p) for p in points], [max(p) for p in points]


def _curve(
    panel: Axes, x: Sequence[float], series: Sequence[Sequence[float | None]], look: dict[str, Any]
) -> None:
    middle, low, high = _spread(series)
    x = x[: len(middle)]
    # A marker at every point would hide the curve where points are many.
    every = max(1, len(x) // 10)
    panel.plot(x, middle, linewidth=1.8, markersize=4.5, markevery=every, **look)
    if len(series) > 1:
        panel.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _finish(panel: Axes, title: str, x_label: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(x_label)
    drawn = [value for line in panel.lines for value in np.asarray(line.get_ydata(), dtype=float).tolist()]
    drawn = [value for value in drawn if math.isfinite(value)]
    # A logarithmic axis cannot show a zero (no test sample wrong).
    if drawn and min(drawn) > 0:
        panel.set_yscale("log")
        if max(drawn) < 100 * min(drawn):
            # Less than two decades hold too few powers of ten to read a value from: label 2 and 5 as well.
            panel.yaxis.set_minor_formatter(_Sparse())
        panel.yaxis.set_major_formatter(_Plain())
    panel.margins(x=0.02)


class _Plain(ScalarFormatter):
    """Tick labels as short decimal numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}"


class _Sparse(_Plain):
    """Labels at 2 and 5 times a power of ten only."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        leading = round(x / 10 ** math.floor(math.log10(x)), 6)
        return f"{x:g}" if leading in (2, 5) else ""


def _draw_key(panel: Axes, source: Axes, groups: dict[str, list[Run]]) -> None:
    """The legend, in the panel that is left over."""
    panel.axis("off")
    seeds = max(len(group) for group in groups.values())
    lines = [f"{name}\n{_settings(group[0].config)}" for name, group in groups.items()]
    panel.legend(source.lines, lines, loc="upper left", frameon=False, labelspacing=0.9, borderaxespad=0)
    if seeds > 1:
        note = f"line: median over {seeds} seeds; band: smallest to largest value"
        panel.text(0.02, 0.0, note, transform=panel.transAxes, color="#444444", fontsize=9)


def _title(config: RunConfig) -> str:
    """What all the runs have in common."""
    network = "-".join(str(width) for width in config.widths)
    return f"{config.dataset}: network {network}, batches of {config.batch_size}"


def _settings(config: RunConfig) -> str:
    """The optimizer's settings in a few words, without the seed that differs between runs."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in config.settings.items() if name != "seed"
    )
