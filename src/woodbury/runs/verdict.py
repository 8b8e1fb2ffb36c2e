"""Which group of runs is ahead of the others by more than their seeds differ, and a few sentences that say so.

A group is clearly ahead in a quantity if every one of its seeds lies below every seed of every other group, with
three seeds or more in each: if two groups did not differ, 3 + 3 seeds would part like this, in favour of a given
one, once in 20 times. With fewer seeds nothing is known of chance, and nothing is called ahead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from woodbury.runs.medians import Group, ends_of, number
from woodbury.runs.records import Run

ENOUGH_SEEDS = 3
COMPARED = ("train_loss", "test_loss", "test_error", "best_test_error", "seconds_per_step")


@dataclass(frozen=True)
class Standing:
    """How groups stand in one quantity, where less is better."""

    medians: list[tuple[float, str]]  # with the labels, in ascending order
    level: list[str]  # labels of groups that are not clearly behind the first one
    enough_seeds: bool

    @property
    def leader(self) -> str:
        return self.medians[0][1]

    @property
    def is_clear(self) -> bool:
        return self.enough_seeds and not self.level


@dataclass(frozen=True)
class Race:
    """Who is first at the lowest train loss that all reach."""

    target: float  # that loss: the best one of the run whose best one is the highest
    seconds: dict[str, list[float]]  # by label, of each seed: training up to the target; empty if one group races
    absent: list[str]  # labels of groups with a seed that never got below its start: they do not race


def standing(values: Mapping[str, Sequence[float]]) -> Standing | None:
    """The standing of groups by their values, one per seed; None where there are not two groups to compare."""
    values = {label: seeds for label, seeds in values.items() if seeds}
    if len(values) < 2:
        return None
    medians = sorted(((median(seeds), label) for label, seeds in values.items()), key=lambda entry: entry[0])
    leader = medians[0][1]
    worst = max(values[leader])
    level = [label for label, seeds in values.items() if label != leader and not worst < min(seeds)]
    return Standing(medians, level, all(len(seeds) >= ENOUGH_SEEDS for seeds in values.values()))


def standings(groups: Sequence[Group]) -> dict[str, Standing]:
    """The standing in every quantity that at least two groups have, with the race as `seconds_to_target`."""
    ends = {group.label: ends_of(group) for group in groups}
    found = {name: standing({label: quantities[name] for label, quantities in ends.items()}) for name in COMPARED}
    found["seconds_to_target"] = standing(race_of(groups).seconds)
    return {name: each for name, each in found.items() if each is not None}


def race_of(groups: Sequence[Group]) -> Race:
    """The seconds that each seed takes to the lowest train loss that all reach."""
    losses = {group.label: [_below_start(run) for run in group.ended] for group in groups}
    racing = {label: seeds for label, seeds in losses.items() if all(seeds)}
    if len(racing) < 2:
        return Race(math.inf, {}, [])
    target = max(min(loss for _, loss in seed) for seeds in racing.values() for seed in seeds)
    seconds = {
        label: [next(time for time, loss in seed if loss <= target) for seed in seeds]
        for label, seeds in racing.items()
    }
    return Race(target, seconds, [label for label in losses if label not in racing])


def _below_start(run: Run) -> list[tuple[float, float]]:
    """Seconds and train loss at the evaluations of a run that lie below the one before training."""
    points = [(record["seconds"], number(record["train_loss"])) for record in run.epochs]
    start = min((loss for seconds, loss in points if seconds == 0), default=math.inf)
    return [(seconds, loss) for seconds, loss in points if seconds > 0 and loss < start]


def takeaway(groups: Sequence[Group], tested: str) -> list[str]:
    """Sentences: who ends lowest in train loss and in the tested quantity, who is fastest, what may be chance."""
    found, race = standings(groups), race_of(groups)
    sentences = []
    lowest = {name: found[name] for name in ("train_loss", tested) if name in found}
    for name, each in lowest.items():
        value, leader = each.medians[0]
        written = f"{100 * value:.2f} %" if name == "test_error" else f"{value:.3g}"
        if math.isfinite(value):
            sentences.append(f"Lowest {name.replace('_', ' ')}: {leader}, {written}{_chance(each, 'below')}")
    if lowest and not sentences:
        return ["Every run diverged."]
    if race.seconds:
        first = found["seconds_to_target"]
        (time, leader), (next_time, follower), *_ = first.medians
        racing = f"all but {_in_words(race.absent)}" if race.absent else "all"
        sentences.append(
            f"Fastest to a train loss of {race.target:.3g}, the lowest that {racing} reach: {leader}, {time:.3g} s"
            f"; {follower} takes {next_time / time:.3g} times as long{_chance(first, 'before')}"
        )
    return sentences


def _chance(standing: Standing, ahead: str) -> str:
    """The end of a sentence about a leader: whether its lead may be chance."""
    if standing.is_clear:
        return f", every seed {ahead} every seed of the others."
    if not standing.enough_seeds:
        return f"; with fewer than {ENOUGH_SEEDS} seeds each this may be chance."
    return f", within the spread of the seeds of {_in_words(standing.level)}."


def _in_words(labels: Sequence[str]) -> str:
    *first, last = labels
    return f"{', '.join(first)} and {last}" if first else last
