"""Tables, figures and a page from run folders on disk. Nothing here runs a model.

A run whose loss is not finite (null in its records) has diverged: it counts as infinitely bad in medians and
bands. A run that is not finished counts as far as it came.
"""

import dataclasses
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from woodbury.damping import LevenbergMarquardt
from woodbury.experiments import page
from woodbury.experiments.config import FORMAT, RunConfig, RunFolderError
from woodbury.experiments.page import Curve, Look

_CONFIG, _RECORDS, _COMPACT = "config.json", "records.jsonl", "records.json"
# What a record must hold to be of use here.
_KEYS = {"epoch": ("epoch", "step", "seconds", "train_loss", "test_error"), "step": ("step", "damping")}
_POINTS = 250  # steps kept of a run in a compact file and in a curve

# Okabe and Ito's palette, told apart with every common form of colour blindness; markers help in print.
# The order is that of every legend and table, and an optimizer looks the same in every figure.
_LOOKS = {
    "smw-gn": Look("#0072B2", "#4C97E8", "circle"),
    "smw-ng": Look("#D55E00", "#F07C32", "square"),
    "smw-ng-bd": Look("#009E73", "#22BC92", "triangle"),
    "hf": Look("#555555", "#B4B4B4", "diamond"),
    "kfac": Look("#CC79A7", "#DE93BE", "wedge"),
    "sgd": Look("#E69F00", "#F0B429", "plus"),
    "adam": Look("#56B4E9", "#7CCBF5", "cross"),
}
_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "wedge": "v",
    "plus": "P",
    "cross": "X",
}

# Beyond this ratio of the slowest end to the fastest, a linear time axis hides the fast curves.
_LOG_TIME_ABOVE = 8.0
_RATIO_RANGE = (-0.5, 1.5)  # beyond it a ratio only says "far too low" or "far too high"
_RATIO_WINDOW = 1 / 20  # of the longest run: the span of the running median
_DECADES = 1e-30  # of the largest value: what is smaller is as good as zero on a logarithmic axis
_THRESHOLDS = (LevenbergMarquardt.threshold, 1 - LevenbergMarquardt.threshold)

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
    """The records of one run."""

    config: RunConfig
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    day: str = ""  # of its last record, as 2020-12-31


@dataclass(frozen=True)
class Summary:
    """Where the runs of one optimizer ended: medians over the seeds that came to the last epoch."""

    dataset: str
    label: str  # the optimizer, with the settings that tell it from another of the same name
    optimizer: str
    seeds: int  # that came to the last epoch
    seeds_started: int
    epochs: float  # the last one
    train_loss: float
    test_error: float  # a fraction, like all errors here
    best_test_error: float  # of any epoch
    seconds: float
    seconds_per_step: float  # NaN before the first evaluation after the start
    damping: float  # NaN for an optimizer without damping


@dataclass(frozen=True)
class _Group:
    """Runs that differ in their seed alone."""

    label: str
    look: Look
    runs: list[Run]


# -- reading ----------------------------------------------------------------------------------------------------


def load(paths: Iterable[Path]) -> list[Run]:
    """Read runs: all in the order of optimizers that figures and tables have, then by settings and seed.

    Args:
        paths: each a run folder, a folder with run folders one or two levels below it, or a file records.json
            that `write` left (or a folder with such a file and no run folders).

    Runs that have no result yet are left out. Raises RunFolderError, with one line that names the path, where
    nothing is left or something cannot be read.
    """
    paths = [Path(path) for path in paths]
    # The same folder may be named twice, by itself and by the folder it lies in.
    sources = {source.resolve(): source for path in paths for source in _sources(path)}
    runs = []
    for source in sources.values():
        runs += _load_compact(source) if source.is_file() else [_load_run(source)]
    runs = [run for run in runs if run.epochs]
    if not runs:
        raise RunFolderError(f"{', '.join(map(str, paths))}: no run has a result yet")
    return sorted(runs, key=_order)


def _load_run(folder: Path) -> Run:
    """Read one run folder; a run that was only just started has no records."""
    path = folder / _RECORDS
    try:
        config = RunConfig.load(folder)
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat() if lines else ""
    except OSError as error:
        raise RunFolderError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    records: dict[str, list[dict[str, Any]]] = {"step": [], "epoch": []}
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:  # what follows the end of the last line
            break
        try:
            record = json.loads(line)
        except ValueError:
            if last:  # the run was killed while it wrote this line
                break
            raise RunFolderError(f"{path} is damaged: line {number} is not JSON") from None
        records[_kind(record, f"{path} is damaged: line {number}")].append(record)
    return Run(config, records["step"], records["epoch"], day)


def _sources(path: Path) -> list[Path]:
    """The run folders and compact files that a path stands for."""
    if not path.exists():
        raise RunFolderError(f"{path} does not exist")
    if path.is_file() or (path / _CONFIG).exists():
        return [path]
    folders = sorted({config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/{_CONFIG}")})
    if not folders and (path / _COMPACT).exists():
        return [path / _COMPACT]
    if not folders:
        raise RunFolderError(f"{path} holds no run folders")
    return folders


def _load_compact(path: Path) -> list[Run]:
    """The runs in a file that `write` left."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise RunFolderError(f"{path} is neither a run folder nor a {_COMPACT}: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
        raise RunFolderError(f"{path} is neither a run folder nor a {_COMPACT}: it lists no runs")
    runs = []
    for number, entry in enumerate(content["runs"], start=1):
        config = RunConfig.from_dict(entry.get("config") if isinstance(entry, dict) else None, where=str(path))
        where = f"{path} is damaged: run {number}"
        try:
            steps, epochs = _from_columns(entry["steps"]), _from_columns(entry["epochs"])
            day = str(entry["day"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RunFolderError(f"{where} has no proper records") from None
        for kind, records in (("step", steps), ("epoch", epochs)):
            for record in records:
                _kind({"kind": kind, **record}, where)
        runs.append(Run(config, steps, epochs, day))
    return runs


def _kind(record: Any, where: str) -> str:
    """Whether this is the record of a step or of an epoch; RunFolderError if it is neither."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise RunFolderError(f"{where} is not the record of a step or an epoch")
    for key in _KEYS[kind]:
        value = record.get(key, "")
        needed = key in ("epoch", "step", "seconds")
        if not isinstance(value, int | float) and not (value is None and not needed):
            raise RunFolderError(f"{where} has no number '{key}'")
    return kind


def _order(run: Run) -> tuple[Any, ...]:
    known = list(_LOOKS)
    name = run.config.optimizer
    rank = known.index(name) if name in known else len(known)
    settings = [(key, _sortable(value)) for key, value in sorted(_settings(run.config).items())]
    return run.config.dataset, rank, name, settings, run.config.seed


def _sortable(value: Any) -> tuple[bool, float, str]:
    """A key that sorts numbers by size and before everything else."""
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)


# -- groups -----------------------------------------------------------------------------------------------------


def _settings(config: RunConfig) -> dict[str, Any]:
    """Everything that tells one run from another on the same data set, without the seed, in one flat table."""
    values = dataclasses.asdict(config)
    for name in ("dataset", "optimizer", "seed", "versions", "machine", "format"):
        del values[name]
    settings = {key: value for key, value in values.pop("settings").items() if key != "seed"}
    values["widths"] = "-".join(str(width) for width in config.widths)
    flat: dict[str, Any] = {}
    for name, value in {**settings, **values}.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            flat[name] = value
    return {name: str(value) if isinstance(value, list | dict) else value for name, value in flat.items()}


def _differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that do not have the same value in all the tables that have them."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if len({table[name] for table in tables if name in table}) > 1]


def _by_dataset(runs: Iterable[Run]) -> dict[str, list[Run]]:
    datasets: dict[str, list[Run]] = {}
    for run in runs:
        datasets.setdefault(run.config.dataset, []).append(run)
    return datasets


def _groups(runs: Iterable[Run]) -> list[_Group]:
    """Runs of one data set by optimizer and settings, in the order in which they first appear."""
    members: dict[str, dict[Any, list[Run]]] = {}  # by optimizer, then by settings
    for run in runs:
        settings = frozenset(_settings(run.config).items())
        members.setdefault(run.config.optimizer, {}).setdefault(settings, []).append(run)
    labels = {
        label: group
        for name, variants in members.items()
        for label, group in _labelled(name, list(variants.values()))
    }
    looks = _looks([group[0].config.optimizer for group in labels.values()])
    return [_Group(label, look, group) for (label, group), look in zip(labels.items(), looks, strict=True)]


def _labelled(optimizer: str, variants: list[list[Run]]) -> Iterable[tuple[str, list[Run]]]:
    """Each variant of an optimizer with a name that says what sets it apart."""
    tables = [_settings(group[0].config) for group in variants]
    names = dict.fromkeys(name for table in tables for name in table)
    apart = [name for name in names if len({(name in table, table.get(name)) for table in tables}) > 1]
    for table, group in zip(tables, variants, strict=True):
        yield " ".join([optimizer, *(f"{name}={table[name]}" for name in apart if name in table)]), group


def _looks(optimizers: Sequence[str]) -> list[Look]:
    """A look for each: the optimizer's own at its first appearance, for others one that is free, dashed."""
    free = [look for name, look in _LOOKS.items() if name not in optimizers]
    spare = itertools.chain(free, itertools.cycle(_LOOKS.values()))
    looks: list[Look] = []
    for index, name in enumerate(optimizers):
        own = name in _LOOKS and name not in optimizers[:index]
        looks.append(_LOOKS[name] if own else dataclasses.replace(next(spare), dashed=True))
    return looks


# -- numbers ----------------------------------------------------------------------------------------------------


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """One line per data set and optimizer."""
    return [
        _summary(dataset, group) for dataset, members in _by_dataset(runs).items() for group in _groups(members)
    ]


def _summary(dataset: str, group: _Group) -> Summary:
    last = max(run.epochs[-1]["step"] for run in group.runs)
    runs = [run for run in group.runs if run.epochs[-1]["step"] == last]
    ends = [run.epochs[-1] for run in runs]
    damped = any(_has(run, "damping") for run in runs)
    return Summary(
        dataset=dataset,
        label=group.label,
        optimizer=runs[0].config.optimizer,
        seeds=_seeds(runs),
        seeds_started=_seeds(group.runs),
        epochs=ends[0]["epoch"],
        train_loss=median(_number(end["train_loss"]) for end in ends),
        test_error=median(_number(end["test_error"]) for end in ends),
        best_test_error=median(min(_number(record["test_error"]) for record in run.epochs) for run in runs),
        seconds=median(end["seconds"] for end in ends),
        seconds_per_step=median(end["seconds"] / end["step"] for end in ends) if last > 0 else math.nan,
        damping=median(_number(run.steps[-1]["damping"]) for run in runs if run.steps) if damped else math.nan,
    )


def _seeds(runs: Iterable[Run]) -> int:
    """How many different ones there are: the same run may have been made twice."""
    return len({run.config.seed for run in runs})


def _number(value: float | None, otherwise: float = math.inf) -> float:
    """A recorded value; null stands for what was not finite."""
    return float(value) if value is not None and math.isfinite(value) else otherwise


def _has(run: Run, key: str) -> bool:
    """Whether the optimizer of this run has the quantity at all."""
    return any(record.get(key) is not None for record in run.steps)


def _curves(groups: Sequence[_Group]) -> dict[str, list[Curve | None]]:
    """What the figure and the page draw, by quantity and in the order of the groups; None where one has it not."""
    # A run killed in its first epoch does not tell how many steps an epoch has; another one may.
    ends = [(run.config.batch_size, run.epochs[-1]) for group in groups for run in group.runs]
    per_epoch = {batch_size: end["step"] / end["epoch"] for batch_size, end in ends if end["epoch"] > 0}
    curves: dict[str, list[Curve | None]] = {"train_loss": [], "test_error": [], "damping": [], "ratio": []}
    for runs in (group.runs for group in groups):
        length = per_epoch.get(runs[0].config.batch_size)
        curves["train_loss"].append(_epoch_curve(runs, "train_loss"))
        curves["test_error"].append(_epoch_curve(runs, "test_error"))
        curves["damping"].append(_step_curve(runs, "damping", math.inf, _nearest, length))
        ratio = _step_curve(runs, "ratio", -math.inf, _running_median, length)  # not finite: the step failed
        curves["ratio"].append(ratio and _clipped(ratio, *_RATIO_RANGE))
    return curves


def _epoch_curve(runs: Sequence[Run], key: str) -> Curve:
    """A quantity of the evaluations."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for record in run.epochs:
            by_step.setdefault(record["step"], []).append(record)
    points = [by_step[step] for step in sorted(by_step)]
    epochs = [records[0]["epoch"] for records in points]
    seconds = [median(record["seconds"] for record in records) for records in points]
    return _curve(epochs, seconds, [[_number(record[key]) for record in records] for records in points])


Series = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]  # step numbers in ascending order, values


def _step_curve(
    runs: Sequence[Run],
    key: str,
    worst: float,  # stands for what is not finite
    read: Callable[[Series, float, float], float],  # the value of a run at a step, given a span of steps
    per_epoch: float | None,
) -> Curve | None:
    """A quantity of the steps, at evenly spaced ones."""
    runs = [run for run in runs if run.steps]
    if per_epoch is None or not any(_has(run, key) for run in runs):
        return None
    series = []
    for run in runs:
        records = sorted(run.steps, key=lambda record: record["step"])
        steps = np.array([record["step"] for record in records], dtype=float)
        series.append((steps, np.array([_number(record.get(key), worst) for record in records])))
    longest = max((steps for steps, _ in series), key=lambda steps: steps[-1])
    span = _RATIO_WINDOW * longest[-1]
    grid = [float(longest[index]) for index in _evenly(len(longest))]
    points = [[read(one, at, span) for one in series if at <= one[0][-1]] for at in grid]
    return _curve([at / per_epoch for at in grid], [], points)


def _nearest(series: Series, at: float, span: float) -> float:
    """The value recorded nearest to a step."""
    steps, values = series
    return float(values[np.abs(steps - at).argmin()])


def _running_median(series: Series, at: float, span: float) -> float:
    """The median of the values recorded within half a span of a step, or nearest to it."""
    steps, values = series
    first = np.searchsorted(steps, at - span / 2, side="left")
    last = np.searchsorted(steps, at + span / 2, side="right")
    return float(median(values[first:last].tolist())) if last > first else _nearest(series, at, span)


def _curve(epochs: list[float], seconds: list[float], points: list[list[float]]) -> Curve:
    return Curve(
        epochs=epochs,
        seconds=seconds,
        middle=[median(values) for values in points],
        low=[min(values) for values in points],
        high=[max(values) for values in points],
        seeds=[len(values) for values in points],
    )


def _clipped(curve: Curve, lowest: float, highest: float) -> Curve:
    clipped = {name: np.clip(getattr(curve, name), lowest, highest).tolist() for name in ("middle", "low", "high")}
    return dataclasses.replace(curve, **clipped)


def _evenly(count: int) -> list[int]:
    """At most `_POINTS` indices into `count` records, evenly spaced, the first and the last among them."""
    if count <= _POINTS:
        return list(range(count))
    return [round(index * (count - 1) / (_POINTS - 1)) for index in range(_POINTS)]


# -- figures ----------------------------------------------------------------------------------------------------


def draw(runs: Sequence[Run]) -> Figure:
    """The paper's panels for the runs of one data set, and how damping went.

    Train loss and test error against epochs and seconds; damping and the ratio rho against epochs for the
    optimizers that have them. Lines are medians over seeds, bands run from the smallest to the largest value.
    """
    groups = _groups(runs)
    curves = _curves(groups)
    errors = [_scaled(curve, 100) for curve in curves["test_error"]]
    damped = any(curves["damping"])
    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.04)
        figure = Figure(figsize=(13 if damped else 9, 7.2), layout=layout)
        panels = figure.subplots(2, 3 if damped else 2)
        for column, axis in enumerate(("epochs", "seconds")):
            _draw_panel(panels[0, column], "Train loss", groups, curves["train_loss"], axis, _log_axis)
            _draw_panel(panels[1, column], "Test error, %", groups, errors, axis, _log_axis)
        if damped:
            _draw_panel(
                panels[0, 2], "Damping", groups, curves["damping"], "epochs", partial(_log_axis, whole=True)
            )
            title = "Reduction ratio ρ, running median"
            _draw_panel(panels[1, 2], title, groups, curves["ratio"], "epochs", _ratio_axis)
        _draw_heading(figure, groups)
    return figure


def _scaled(curve: Curve | None, factor: float) -> Curve | None:
    if curve is None:
        return None
    values = {name: [factor * value for value in getattr(curve, name)] for name in ("middle", "low", "high")}
    return dataclasses.replace(curve, **values)


def _draw_panel(
    panel: Axes,
    title: str,
    groups: Sequence[_Group],
    curves: Sequence[Curve | None],
    axis: str,  # epochs or seconds
    value_axis: Callable[
        [Axes, list[Curve]], tuple[float, float]
    ],  # sets it up, returns where zero and the top are
) -> None:
    """One quantity of all the groups."""
    present = [curve for curve in curves if curve is not None]
    panel.set_title(title)
    if axis == "seconds":
        _time_axis(panel, present)
    else:
        panel.set_xlabel("epochs")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    bottom, top = value_axis(panel, present)

    def inside(values: Sequence[float]) -> list[float]:
        """The values as the panel can show them: zero at its lower edge, what is infinite far above it."""
        return [min(max(value, bottom), 1e6 * max(top, 1)) for value in values]

    for index, (group, curve) in enumerate(zip(groups, curves, strict=True)):
        if curve is None:
            continue
        x = getattr(curve, axis)
        # Not at every point of a long curve, and not at the same points for two curves that may coincide.
        every = max(1, len(x) // 10)
        marks = (index * every // len(groups), every)
        panel.plot(x, inside(curve.middle), markevery=marks, **_line_style(group.look))
        if max(curve.seeds) > 1:
            low, high = inside(curve.low), inside(curve.high)
            panel.fill_between(x, low, high, color=group.look.colour, alpha=0.16, linewidth=0)
    panel.margins(x=0.02)


def _line_style(look: Look) -> dict[str, Any]:
    return {
        "color": look.colour,
        "linewidth": 1.7,
        "linestyle": (0, (4, 1.5)) if look.dashed else "-",
        "marker": _MARKERS[look.marker],
        "markersize": 5,
        "markerfacecolor": "white" if look.dashed else look.colour,
        "markeredgecolor": look.colour if look.dashed else "white",
        "markeredgewidth": 1.2 if look.dashed else 0.5,
    }


def _log_axis(panel: Axes, curves: Sequence[Curve], whole: bool = False) -> tuple[float, float]:
    """A logarithmic axis for values from zero on; a zero is drawn, and labelled, at its lower edge.

    Unless the `whole` of the curves is wanted, the axis ends where `_highest` says.
    """
    drawn = [value for curve in curves for value in [*curve.middle, *curve.low, *curve.high]]
    positive = [value for value in drawn if 0 < value < math.inf]
    if not positive:  # nothing but zeros
        panel.set_ylim(-0.05, 1)
        return 0, 1
    top = max(positive) if whole else _highest(curves, max(positive))
    bottom = min(value for value in positive if value > _DECADES * top)
    room = max((top / bottom) ** 0.05, 1.05)
    low, high = bottom / room, top * room
    ticks = _log_ticks(low, high)
    labels = [_short(tick) for tick in ticks]
    zero = low
    if min(drawn) < bottom:
        gap = max((top / bottom) ** 0.12, 1.5)
        zero, low = bottom / gap, bottom / gap**1.3
        labels = ["0", *(label for tick, label in zip(ticks, labels, strict=True) if tick >= bottom)]
        ticks = [zero, *(tick for tick in ticks if tick >= bottom)]
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    panel.yaxis.set_ticks(ticks, labels=labels)
    panel.minorticks_off()
    return zero, high


def _highest(curves: Sequence[Curve], largest: float) -> float:
    """The largest value that a panel should show, so that what matters in the curves is not squeezed.

    Left out are a run on its way to infinity, and the common start where it lies far above all that follows.
    The page has the same rule.
    """
    starts = [curve.middle[0] for curve in curves if 0 < curve.middle[0] < math.inf]
    later = [value for curve in curves for value in curve.middle[1:] if 0 < value < math.inf]
    if not starts or max(len(curve.middle) for curve in curves) < 4:
        return largest
    top = min(largest, 10 * max(starts))
    if not later or max(later) >= max(starts):
        return top
    above, whole = math.log(max(starts) / max(later)), math.log(max(starts) / min(later))
    return max(later) if above > 0.4 * whole else top


def _ratio_axis(panel: Axes, curves: Sequence[Curve]) -> tuple[float, float]:
    """A linear axis around [0, 1], with the ratios at which damping changes."""
    low = min([0.0, *(value for curve in curves for value in curve.low)])
    high = max([1.0, *(value for curve in curves for value in curve.high)])
    panel.set_ylim(low - 0.05, high + 0.05)
    panel.yaxis.set_ticks([-0.5, 0, *_THRESHOLDS, 1, 1.5])
    panel.set_ylim(low - 0.05, high + 0.05)  # once more: ticks outside widen the axis
    for threshold in _THRESHOLDS:
        panel.axhline(threshold, color="#666666", linewidth=1, linestyle=(0, (3, 2)), zorder=1)
    return low - 0.05, high + 0.05


def _log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most so many round numbers between two bounds, as evenly as they come on a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    narrow = high < 5 * low
    for digits in ((tuple(range(1, 10)),) if narrow else ()) + ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    if len(ticks) < 3 and narrow:
        return [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / most)]


def _time_axis(panel: Axes, curves: Sequence[Curve]) -> None:
    """Seconds of training; where the ends lie far apart as log(1 + t / first), which keeps the common start."""
    panel.set_xlabel("seconds of training")
    ends = [curve.seconds[-1] for curve in curves if curve.seconds[-1] > 0]
    if not ends or max(ends) <= _LOG_TIME_ABOVE * min(ends):
        return
    first = min(second for curve in curves for second in curve.seconds if second > 0)
    panel.set_xscale(
        "function", functions=(lambda t: np.log1p(np.maximum(t, 0) / first), lambda u: first * np.expm1(u))
    )
    panel.set_xlabel("seconds of training, logarithmic")
    ticks = [0.0]
    for tick in _log_ticks(first, max(ends), most=9):
        if math.log1p(tick / first) - math.log1p(ticks[-1] / first) > 0.09 * math.log1p(max(ends) / first):
            ticks.append(tick)  # its label does not run into the one before
    panel.xaxis.set_ticks(ticks, labels=[_short(tick) for tick in ticks])


def _short(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def _draw_heading(figure: Figure, groups: Sequence[_Group]) -> None:
    """The title above the panels and the legend below them."""
    config, seeds = groups[0].runs[0].config, max(_seeds(group.runs) for group in groups)
    title = f"{config.dataset}: network {_settings(config)['widths']}, batches of {config.batch_size}"
    if seeds > 1:
        title += f"; median over {seeds} seeds, bands from smallest to largest"
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    lines = [Line2D([], [], **_line_style(group.look)) for group in groups]
    labels = [group.label for group in groups]
    columns = max(1, int(9 * figure.get_figwidth() / (max(map(len, labels)) + 7)))
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(groups), columns), frameon=False)


# -- writing ----------------------------------------------------------------------------------------------------


def write(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write figures, page and compact records of the runs into a folder; return the paths, the page's first.

        report.html                      the interactive page
        <data set>.png, <data set>.svg   one figure per data set
        records.json                     what `load` needs to make all this again

    Each file is replaced in one piece, and only after all were made. The same runs give the same files.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.html": html(runs).encode()}
    for dataset, members in _by_dataset(runs).items():
        stem = re.sub(r"[^\w.-]", "_", dataset)
        files |= {f"{stem}.{ending}": content for ending, content in _images(draw(members)).items()}
    files[_COMPACT] = _compact(runs).encode()
    for name, content in files.items():
        _replace(folder / name, content)
    return [folder / name for name in files]


def html(runs: Iterable[Run]) -> str:
    """The interactive page, a section for each data set."""
    return page.render([_section(dataset, members) for dataset, members in _by_dataset(runs).items()])


def _images(figure: Figure) -> dict[str, bytes]:
    """The figure as files, by ending."""
    images = {}
    with matplotlib.rc_context(_STYLE):
        for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=ending, **options)
            images[ending] = buffer.getvalue()
            figure.set_layout_engine("none")  # what was laid out once stays in its place
    return images


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old content or the new one is there, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _compact(runs: Sequence[Run]) -> str:
    """The runs as JSON with few steps and digits, one line a run."""
    lines = []
    for run in runs:
        steps = [run.steps[index] for index in _evenly(len(run.steps))]
        entry = {
            "config": dataclasses.asdict(run.config),
            "day": run.day,
            "epochs": _columns(page.rounded(run.epochs)),
            "steps": _columns(page.rounded(steps)),
        }
        lines.append(json.dumps(entry, separators=(",", ":"), allow_nan=False))
    return f'{{"format":{FORMAT},"runs":[\n' + ",\n".join(lines) + "\n]}\n"


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records as one list per key; a value that never changes stands for its whole list."""
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    columns: dict[str, Any] = {"count": len(records)}
    for name in names:
        column = [record.get(name) for record in records]
        columns[name] = column[0] if all(value == column[0] for value in column) else column
    return columns


def _from_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records that `_columns` took apart."""
    count = int(columns["count"])
    lists = {
        name: column if isinstance(column, list) else [column] * count
        for name, column in columns.items()
        if name != "count"
    }
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _section(dataset: str, runs: Sequence[Run]) -> page.Section:
    """What the page shows of one data set."""
    groups = _groups(runs)
    tables = [_settings(group.runs[0].config) for group in groups]
    curves = _curves(groups)
    entries = []
    for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
        summary = dataclasses.asdict(_summary(dataset, group))
        entries.append(
            page.Entry(
                label=group.label,
                look=group.look,
                curves={name: curve for name, each in curves.items() if (curve := each[index]) is not None},
                figures={name: value for name, value in summary.items() if isinstance(value, int | float)},
                settings={name: str(value) for name, value in table.items()},
            )
        )
    return page.Section(dataset, _facts(runs), entries, _differing(tables), _LOG_TIME_ABOVE, _THRESHOLDS)


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What a reader must know of all the runs: each fact with the values it takes."""
    facts: dict[str, dict[str, None]] = {}  # by name, the values in order
    for run in runs:
        config = run.config
        samples = config.settings.get("curvature_samples", "")
        found = {
            "network": "-".join(str(width) for width in config.widths),
            "batch": f"{config.batch_size} samples",
            "curvature from": _of_batch(samples) if samples != "" else "",
            "date": run.day,
            "machine": _machine(config),
            "software": ", ".join(f"{name} {version}" for name, version in config.versions.items()),
        }
        for name, value in found.items():
            if value:
                facts.setdefault(name, {})[value] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]


def _of_batch(samples: int | float | None) -> str:
    """Curvature samples in words: a number, or a part of the batch."""
    if samples is None:
        return "the whole batch"
    return f"{samples} samples" if isinstance(samples, int) else f"{samples:.3g} of the batch"


def _machine(config: RunConfig) -> str:
    """Where the run took place, as far as it bears on the seconds."""
    machine = config.machine
    threads = machine.get("threads")
    parts = [
        machine.get("gpu") if config.device.startswith("cuda") else None,
        machine.get("processor"),
        f"{threads} thread{'' if threads == 1 else 's'}" if threads else None,
        machine.get("system"),
        config.dtype,
    ]
    return ", ".join(str(part) for part in parts if part)
