"""Which group of runs is ahead of the others by more than their seeds differ, and one line that says so.

A group is clearly ahead in a quantity if every one of its seeds lies below every seed of every other group, with
three seeds or more in each: if two groups did not differ, 3 + 3 seeds would part like this, in favour of a given
one, once in 20 times. With fewer seeds nothing is known of chance, and nothing is called ahead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from woodbury.experiments.medians import Group, ends_of

ENOUGH_SEEDS = 3
COMPARED = ("train_loss", "test_loss", "test_error", "best_test_error", "seconds_per_step")


@dataclass(frozen=True)
class Standing:
    """How groups stand in one quantity, where less is better."""

    leader: str  # the label with the lowest median
    value: float  # that median
    level: tuple[str, ...]  # labels of groups that are not clearly behind
    enough_seeds: bool

    @property
    def is_clear(self) -> bool:
        return self.enough_seeds and not self.level


def standing(values: Mapping[str, Sequence[float]]) -> Standing | None:
    """The standing of groups by their values, one per seed; None where there are not two groups to compare."""
    values = {label: own for label, own in values.items() if own}
    if len(values) < 2:
        return None
    leader = min(values, key=lambda label: median(values[label]))
    worst = max(values[leader])
    level = tuple(label for label, own in values.items() if label != leader and not worst < min(own))
    return Standing(
        leader, median(values[leader]), level, all(len(own) >= ENOUGH_SEEDS for own in values.values())
    )


def standings(groups: Sequence[Group]) -> dict[str, Standing]:
    """The standing in every quantity that at least two groups have."""
    ends = {group.label: ends_of(group) for group in groups}
    found = {name: standing({label: own[name] for label, own in ends.items()}) for name in COMPARED}
    return {name: each for name, each in found.items() if each is not None}


def takeaway(groups: Sequence[Group], tested: str) -> str:
    """One line: who ends lowest in train loss and in the tested quantity, and whether that may be chance."""
    found = standings(groups)
    shown = [name for name in ("train_loss", tested) if name in found]
    finite = [name for name in shown if math.isfinite(found[name].value)]
    if shown and not finite:
        return "Every run diverged."
    epochs = [max(run.epochs[-1]["epoch"] for run in group.runs) for group in groups]
    unequal = f"They have trained for {min(epochs):g} to {max(epochs):g} epochs." if len(set(epochs)) > 1 else ""
    return " ".join([*(_sentence(name, found[name]) for name in finite), unequal]).strip()


def _sentence(quantity: str, standing: Standing) -> str:
    name = quantity.replace("_", " ")
    lowest = f"Lowest {name}: {standing.leader}, {_WRITE.get(quantity, _short)(standing.value)}"
    if standing.is_clear:
        return f"{lowest}, every seed below every seed of the others."
    if not standing.enough_seeds:
        return f"{lowest}; with fewer than {ENOUGH_SEEDS} seeds each this may be chance."
    return f"{lowest}, within the spread of the seeds of {_in_words(standing.level)}."


def _in_words(labels: Sequence[str]) -> str:
    *first, last = labels
    return f"{', '.join(first)} and {last}" if first else last


def _short(value: float) -> str:
    return f"{value:.3g}"


_WRITE: dict[str, Callable[[float], str]] = {"test_error": lambda value: f"{100 * value:.2f} %"}
