"""Who is ahead, and when that may be chance."""

import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from test_report import write_run
from woodbury.experiments.medians import groups_of
from woodbury.experiments.runs import load
from woodbury.experiments.verdict import ENOUGH_SEEDS, standing, standings, takeaway

LOW, HIGH = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    "values, leader, level, is_clear",
    [
        ({"a": LOW, "b": HIGH}, "a", (), True),
        ({"a": HIGH, "b": LOW}, "b", (), True),
        ({"a": LOW, "b": [3.0, 5.0, 6.0]}, "a", ("b",), False),  # equal values are not below
        ({"a": LOW, "b": [2.5, 5.0, 6.0], "c": HIGH}, "a", ("b",), False),
        ({"a": LOW[:2], "b": HIGH}, "a", (), False),  # too few seeds
        ({"a": LOW, "b": HIGH, "c": [9.0]}, "a", (), False),
        ({"a": [1.0, 2.0, math.inf], "b": HIGH}, "a", ("b",), False),  # one seed diverged
        ({"a": LOW, "b": [math.inf] * 3}, "a", (), True),
        ({"a": [math.inf] * 3, "b": [math.inf] * 3}, "a", ("b",), False),
        ({"a": LOW, "b": HIGH, "c": []}, "a", (), True),  # not measured: not compared
    ],
)
def test_a_group_is_ahead_where_all_its_seeds_lie_below_all_others(
    values: dict[str, list[float]], leader: str, level: tuple[str, ...], is_clear: bool
) -> None:
    found = standing(values)
    assert found is not None
    assert (found.leader, found.level, found.is_clear) == (leader, level, is_clear)


def test_one_group_is_not_compared() -> None:
    assert standing({"a": LOW}) is None
    assert standing({"a": LOW, "b": []}) is None


def test_equal_groups_part_by_chance_once_in_twenty_times_for_each() -> None:
    """Over all orders in which the seeds of two equal groups can come."""
    orders = list(permutations(range(2 * ENOUGH_SEEDS)))
    found = [standing({"a": order[:ENOUGH_SEEDS], "b": order[ENOUGH_SEEDS:]}) for order in orders]
    first = sum(each is not None and each.is_clear and each.leader == "a" for each in found)
    assert first * math.comb(2 * ENOUGH_SEEDS, ENOUGH_SEEDS) == len(orders) and ENOUGH_SEEDS == 3


def write(folder: Path, name: str, losses: Sequence[float | None], errors: Sequence[float]) -> None:
    for seed, (loss, error) in enumerate(zip(losses, errors, strict=True)):
        write_run(folder / f"{name}-{seed}", name, seed, [2.0, loss], errors=[0.9, error])


def test_the_takeaway_says_who_is_lowest_and_whether_it_may_be_chance(tmp_path: Path) -> None:
    write(tmp_path, "smw-gn", [0.01, 0.02, 0.03], [0.05, 0.06, 0.07])
    write(tmp_path, "sgd", [0.1, 0.2, 0.3], [0.06, 0.08, 0.09])
    write(tmp_path, "adam", [0.4, 0.5, None], [0.065, 0.2, 0.3])
    groups = groups_of(load([tmp_path]))
    assert takeaway(groups, "test_error") == (
        "Lowest train loss: smw-gn, 0.02, every seed below every seed of the others. "
        "Lowest test error: smw-gn, 6.00 %, within the spread of the seeds of sgd and adam."
    )
    found = standings(groups)
    assert found["train_loss"].is_clear and not found["test_error"].is_clear
    assert takeaway(groups[:1], "test_error") == ""


def test_the_takeaway_of_single_seeds_calls_nobody_ahead(tmp_path: Path) -> None:
    write(tmp_path, "smw-gn", [0.01], [0.05])
    write(tmp_path, "sgd", [None], [0.5])
    line = takeaway(groups_of(load([tmp_path])), "test_error")
    assert line == (
        "Lowest train loss: smw-gn, 0.01; with fewer than 3 seeds each this may be chance. "
        "Lowest test error: smw-gn, 5.00 %; with fewer than 3 seeds each this may be chance."
    )


def test_the_takeaway_of_runs_that_go_on_says_how_far_they_are(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "smw-gn", 0, [2.0, 0.5, 0.25], errors=[0.9, 0.2, 0.1])
    write_run(tmp_path / "b", "sgd", 0, [2.0, 0.5], errors=[0.9, 0.2])
    groups = groups_of(load([tmp_path]))
    assert takeaway(groups, "test_error").endswith("may be chance. They have trained for 1 to 2 epochs.")


def test_the_takeaway_where_all_diverged(tmp_path: Path) -> None:
    write(tmp_path, "smw-gn", [None], [0.9])
    write(tmp_path, "sgd", [None], [0.9])
    assert takeaway(groups_of(load([tmp_path])), "test_loss") == "Every run diverged."


def test_a_run_that_is_there_twice_is_one_seed(tmp_path: Path) -> None:
    write(tmp_path, "sgd", [1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    for copy in range(3):
        write_run(tmp_path / f"gn-{copy}", "smw-gn", 0, [2.0, 0.01 + 0.01 * copy])
    assert not standings(groups_of(load([tmp_path])))["train_loss"].is_clear
