"""Medians over the seeds of a group, with the smallest and the largest value: where its runs ended, and curves.

A run whose loss is not finite (null in its records) has diverged: it counts as infinitely bad.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from woodbury.experiments.groups import Group, by_dataset, grouped
from woodbury.experiments.runs import Run, evenly

RATIO_RANGE = (-0.5, 1.5)  # beyond it a ratio only says "far too low" or "far too high"
_RATIO_WINDOW = 1 / 20  # of the longest run: the span of the running median

_Series = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]  # step numbers in ascending order, values


@dataclass(frozen=True)
class Summary:
    """Where the runs of one group ended: medians over the seeds that came to the last epoch."""

    dataset: str
    label: str  # of the group
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
class Curve:
    """Median, smallest and largest value over the seeds, infinite where a run diverged."""

    epochs: list[float]
    seconds: list[float]  # of training; empty where there is nothing to draw against time
    middle: list[float]
    low: list[float]
    high: list[float]
    seeds: list[int]  # that came as far as this point

    def changed(self, change: Callable[[float], float]) -> "Curve":
        """The curve with every value of the quantity changed."""
        middle, low, high = (list(map(change, values)) for values in (self.middle, self.low, self.high))
        return dataclasses.replace(self, middle=middle, low=low, high=high)


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """One line per data set and optimizer."""
    return [summary_of(group) for members in by_dataset(runs).values() for group in grouped(members)]


def summary_of(group: Group) -> Summary:
    """Where the runs of a group ended."""
    last = max(run.epochs[-1]["step"] for run in group.runs)
    runs = [run for run in group.runs if run.epochs[-1]["step"] == last]
    ends = [run.epochs[-1] for run in runs]
    damped = any(_has(run, "damping") for run in runs)
    return Summary(
        dataset=runs[0].config.dataset,
        label=group.label,
        optimizer=runs[0].config.optimizer,
        seeds=dataclasses.replace(group, runs=runs).seeds,
        seeds_started=group.seeds,
        epochs=ends[0]["epoch"],
        train_loss=median(_number(end["train_loss"]) for end in ends),
        test_error=median(_number(end["test_error"]) for end in ends),
        best_test_error=median(min(_number(record["test_error"]) for record in run.epochs) for run in runs),
        seconds=median(end["seconds"] for end in ends),
        seconds_per_step=median(end["seconds"] / end["step"] for end in ends) if last > 0 else math.nan,
        damping=median(_damping(run, last) for run in runs if run.steps) if damped else math.nan,
    )


def _damping(run: Run, at: int) -> float:
    """The damping of the last step recorded before an evaluation; an interrupted run has later ones."""
    before = [step for step in run.steps if step["step"] <= at] or run.steps
    return _number(before[-1]["damping"])


def curves_of(groups: Sequence[Group]) -> dict[str, list[Curve | None]]:
    """What the figure and the page draw, by quantity and in the order of the groups; None where one has it not."""
    # A run killed in its first epoch does not tell how many steps an epoch has; another one may.
    ends = [(run.config.batch_size, run.epochs[-1]) for group in groups for run in group.runs]
    per_epoch = {batch_size: end["step"] / end["epoch"] for batch_size, end in ends if end["epoch"] > 0}
    lowest, highest = RATIO_RANGE
    curves: dict[str, list[Curve | None]] = {"train_loss": [], "test_error": [], "damping": [], "ratio": []}
    for runs in (group.runs for group in groups):
        length = per_epoch.get(runs[0].config.batch_size)
        curves["train_loss"].append(_epoch_curve(runs, "train_loss"))
        curves["test_error"].append(_epoch_curve(runs, "test_error"))
        curves["damping"].append(_step_curve(runs, "damping", math.inf, _nearest, length))
        ratio = _step_curve(runs, "ratio", -math.inf, _running_median, length)  # not finite: the step failed
        curves["ratio"].append(ratio and ratio.changed(lambda value: min(max(value, lowest), highest)))
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


def _step_curve(
    runs: Sequence[Run],
    key: str,
    worst: float,  # stands for what is not finite
    read: Callable[[_Series, float, float], float],  # the value of a run at a step, given a span of steps
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
    grid = [float(longest[index]) for index in evenly(len(longest))]
    points = [[read(one, at, span) for one in series if at <= one[0][-1]] for at in grid]
    return _curve([at / per_epoch for at in grid], [], points)


def _nearest(series: _Series, at: float, span: float) -> float:
    """The value recorded nearest to a step."""
    steps, values = series
    return float(values[np.abs(steps - at).argmin()])


def _running_median(series: _Series, at: float, span: float) -> float:
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


def _number(value: float | None, otherwise: float = math.inf) -> float:
    """A recorded value; null stands for what was not finite."""
    return float(value) if value is not None and math.isfinite(value) else otherwise


def _has(run: Run, key: str) -> bool:
    """Whether the optimizer of this run has the quantity at all."""
    return any(record.get(key) is not None for record in run.steps)
