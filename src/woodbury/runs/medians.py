"""Groups of runs that differ in their seed alone, and their medians: where the runs ended, and curves.

A group is one curve in every figure and one line in every table. A run whose loss is not finite (null in its
records) has diverged: its loss counts as infinite.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from woodbury.runs.records import Run

_FAILED = -9.0  # in place of a ratio that is not finite: far below what is drawn
_HUGE = 1e300  # what is larger counts as infinite: no axis or mean overflows
_LONGEST = 200  # characters of a label
_POINTS = 250  # of a curve over steps, at most
_RATIO_WINDOW = 1 / 20  # of the longest run: the span of the running median


@dataclass(frozen=True)
class Look:
    """How one curve is drawn; through the gaps of a dashed one a curve below it can be seen."""

    colour: str
    marker: str  # as matplotlib names it
    dashed: bool = False  # with hollow markers


# Okabe and Ito's palette, made for every common form of colour blindness; markers help in print.
_OWN = {
    "smw-gn": Look("#0072B2", "o"),
    "smw-ng": Look("#D55E00", "s"),
    "smw-ng-bd": Look("#009E73", "^"),
    # The step of SMW-GN by another method: over epochs the two curves coincide.
    "hf": Look("#333333", "D", dashed=True),
    "kfac": Look("#CC79A7", "v"),
    "sgd": Look("#E69F00", "P"),
    "adam": Look("#56B4E9", "X"),
}


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str  # the optimizer, with the settings that tell it from another of the same name
    look: Look
    runs: list[Run]

    @property
    def seeds(self) -> int:
        """How many different seeds there are: the same run may be here twice."""
        return len({run.config.seed for run in self.runs})

    @property
    def ended(self) -> list[Run]:
        """The runs that reached the last epoch, one per seed."""
        last = max(_place(run, run.epochs[-1]) for run in self.runs)
        return list({run.config.seed: run for run in self.runs if _place(run, run.epochs[-1]) == last}.values())


def by_dataset(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs on each data set, in the order in which they first appear."""
    datasets: dict[str, list[Run]] = {}
    for run in runs:
        datasets.setdefault(run.config.dataset, []).append(run)
    return datasets


def groups_of(runs: Iterable[Run]) -> list[Group]:
    """Runs of one data set by optimizer and settings, in the order in which they first appear."""
    members: dict[str, dict[Any, list[Run]]] = {}  # by optimizer, then by settings
    for run in runs:
        settings = frozenset(run.settings().items())
        members.setdefault(run.config.optimizer, {}).setdefault(settings, []).append(run)
    groups = [group for variants in members.values() for group in variants.values()]
    labels = [label for name, variants in members.items() for label in _labels(name, list(variants.values()))]
    looks = looks_of([group[0].config.optimizer for group in groups])
    return [Group(*parts) for parts in zip(labels, looks, groups, strict=True)]


def _labels(optimizer: str, variants: list[list[Run]]) -> list[str]:
    """A label for each variant of an optimizer, with the settings in which it differs from the others."""
    tables = [group[0].settings() for group in variants]
    names = dict.fromkeys(name for table in tables for name in table)
    differing = [name for name in names if len({(name in table, table.get(name)) for table in tables}) > 1]
    parts = [[f"{name}={table[name]}" for name in differing if name in table] for table in tables]
    return [" ".join([optimizer, *part])[:_LONGEST] for part in parts]


def looks_of(optimizers: Sequence[str]) -> list[Look]:
    """One look per name: the optimizer's own where the name first appears, else the next unused one, dashed."""
    unused = [look for name, look in _OWN.items() if name not in optimizers]
    others = [replace(look, marker=marker) for marker in "Xv^PosD" for look in _OWN.values() if not look.dashed]
    spare = itertools.cycle(dict.fromkeys(replace(look, dashed=True) for look in (*unused, *others)))
    looks: list[Look] = []
    for index, name in enumerate(optimizers):
        is_first = name in _OWN and name not in optimizers[:index]
        looks.append(_OWN[name] if is_first else next(spare))
    return looks


@dataclass(frozen=True)
class Curve:
    """Median, smallest and largest value over the seeds, infinite where a run diverged."""

    epochs: list[float]
    seconds: list[float]  # of training; empty where there is nothing to draw against time
    middle: list[float]
    low: list[float]
    high: list[float]
    seeds: list[int]  # that reached this point


def ends_of(group: Group) -> dict[str, list[float]]:
    """Where each seed that reached the last epoch ended, by quantity: no values where it was not measured."""
    runs = group.ended
    ends = [run.epochs[-1] for run in runs]
    losses, errors = ([_measured(run, key) for run in runs] for key in ("test_loss", "test_error"))
    return {
        "train_loss": [number(end["train_loss"]) for end in ends],
        "test_loss": [values[-1] for values in losses if values],
        "test_error": [values[-1] for values in errors if values],
        "best_test_error": [min(values) for values in errors if values],
        "seconds": [end["seconds"] for end in ends],
        "seconds_per_step": [end["seconds"] / end["step"] for end in ends if end["step"] > 0],
        "damping": [_damping(run) for run in runs if _has_quantity(run, "damping")],
    }


def _measured(run: Run, key: str) -> list[float]:
    """The values of a quantity at the evaluations that measured it."""
    return [number(record[key]) for record in run.epochs if key in record]


def _damping(run: Run) -> float:
    """The damping at the last evaluation, or at the nearest step before it; an interrupted run has later ones."""
    before = [step for step in run.steps if step["step"] <= run.epochs[-1]["step"]] or run.steps
    return number(before[-1].get("damping"))


def curves_of(groups: Sequence[Group]) -> dict[str, list[Curve | None]]:
    """One curve per quantity and group, as figure and page draw them; None if the group lacks the quantity.

    The test loss is for problems without a test error: no group has it if each that could have it has an error.
    """
    evaluated, stepped = ("train_loss", "test_error", "test_loss"), ("damping", "ratio")
    curves = {name: [_epoch_curve(group.runs, name) for group in groups] for name in evaluated}
    curves |= {name: [_step_curve(group.runs, name) for group in groups] for name in stepped}
    pairs = zip(curves["test_loss"], curves["test_error"], strict=True)
    if not any(loss is not None and error is None for loss, error in pairs):
        curves["test_loss"] = [None] * len(groups)
    return curves


def _place(run: Run, record: dict[str, Any]) -> float:
    """What evaluations of several seeds share if they were made at the same place.

    The step; of a recorded run the epoch, as its loop may record no steps.
    """
    return float(record["epoch" if run.config.recorded else "step"])


def _epoch_curve(runs: Sequence[Run], key: str) -> Curve | None:
    """A quantity measured at evaluations, an error in percent."""
    scale = 100 if key == "test_error" else 1
    by_place: dict[float, list[dict[str, Any]]] = {}
    for run in runs:
        for record in run.epochs:
            if key in record:
                by_place.setdefault(_place(run, record), []).append(record)
    if not by_place:
        return None
    points = [by_place[place] for place in sorted(by_place)]
    epochs = [records[0]["epoch"] for records in points]
    seconds = [median(record["seconds"] for record in records) for records in points]
    return _curve(epochs, seconds, [[scale * number(record[key]) for record in records] for records in points])


def _step_curve(runs: Sequence[Run], key: str) -> Curve | None:
    """A quantity recorded after each step, at evenly spaced steps; of the ratio a running median.

    None before the first epoch has ended: how many steps it has is not known.
    """
    ends = [run.epochs[-1] for run in runs]
    per_epoch = next((end["step"] / end["epoch"] for end in ends if end["epoch"] > 0 and end["step"] > 0), None)
    if per_epoch is None or not any(_has_quantity(run, key) for run in runs):
        return None
    worst = _FAILED if key == "ratio" else math.inf
    series = [[number(record.get(key), worst) for record in run.steps] for run in runs]
    longest = max(map(len, series))
    half = int(_RATIO_WINDOW / 2 * longest) if key == "ratio" else 0
    places = np.linspace(0, longest - 1, min(_POINTS, longest)).round().astype(int).tolist()
    points = []
    for at in places:
        around = slice(max(0, at - half), at + half + 1)
        points.append([median(values[around]) for values in series if at < len(values)])
    return _curve([(at + 1) / per_epoch for at in places], [], points)


def _curve(epochs: list[float], seconds: list[float], points: list[list[float]]) -> Curve:
    return Curve(
        epochs=epochs,
        seconds=seconds,
        middle=[median(values) for values in points],
        low=[min(values) for values in points],
        high=[max(values) for values in points],
        seeds=[len(values) for values in points],
    )


def number(value: float | None, default: float = math.inf) -> float:
    """A recorded value, or the default for one that was not finite, which records hold as null."""
    return float(value) if value is not None and abs(value) < _HUGE else default


def _has_quantity(run: Run, key: str) -> bool:
    return any(record.get(key) is not None for record in run.steps)
