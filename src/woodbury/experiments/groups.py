"""Groups of runs that differ in their seed alone: the unit of every curve and of every line in a table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from woodbury.experiments.looks import Look, looks_of
from woodbury.experiments.runs import Run


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str  # the optimizer, with the settings that tell it from another of the same name
    look: Look
    runs: list[Run]

    @property
    def seeds(self) -> int:
        """How many different ones there are: the same run may have been made twice."""
        return len({run.config.seed for run in self.runs})


def by_dataset(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs on each data set, in the order in which they first appear."""
    datasets: dict[str, list[Run]] = {}
    for run in runs:
        datasets.setdefault(run.config.dataset, []).append(run)
    return datasets


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Runs of one data set by optimizer and settings, in the order in which they first appear."""
    members: dict[str, dict[Any, list[Run]]] = {}  # by optimizer, then by settings
    for run in runs:
        settings = frozenset(run.settings().items())
        members.setdefault(run.config.optimizer, {}).setdefault(settings, []).append(run)
    labels = {
        label: group
        for name, variants in members.items()
        for label, group in _labelled(name, list(variants.values()))
    }
    looks = looks_of([group[0].config.optimizer for group in labels.values()])
    return [Group(label, look, group) for (label, group), look in zip(labels.items(), looks, strict=True)]


def _labelled(optimizer: str, variants: list[list[Run]]) -> Iterable[tuple[str, list[Run]]]:
    """Each variant of an optimizer with a name that says what sets it apart."""
    tables = [group[0].settings() for group in variants]
    names = dict.fromkeys(name for table in tables for name in table)
    apart = [name for name in names if len({(name in table, table.get(name)) for table in tables}) > 1]
    for table, group in zip(tables, variants, strict=True):
        yield " ".join([optimizer, *(f"{name}={table[name]}" for name in apart if name in table)]), group
