"""Who is ahead, and when that may be chance."""

import math
import time
from itertools import permutations

import pytest

import woodbury
from test_report import page_data, write_run
from woodbury.runs.medians import groups_of
from woodbury.runs.records import load
from woodbury.runs.verdict import ENOUGH_SEEDS, race_of, standing, standings, takeaway

LOW, HIGH = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    "values, leader, level, is_clear",
    [
        ({"a": LOW, "b": HIGH}, "a", [], True),
        ({"a": HIGH, "b": LOW}, "b", [], True),
        ({"a": LOW, "b": [3.0, 5.0, 6.0]}, "a", ["b"], False),  # equal values are not below
        ({"a": LOW, "b": [2.5, 5.0, 6.0], "c": HIGH}, "a", ["b"], False),
        ({"a": LOW[:2], "b": HIGH}, "a", [], False),  # too few seeds
        ({"a": LOW, "b": HIGH, "c": [9.0]}, "a", [], False),
        ({"a": [1.0, 2.0, math.inf], "b": HIGH}, "a", ["b"], False),  # one seed diverged
        ({"a": LOW, "b": [math.inf] * 3}, "a", [], True),
        ({"a": [math.inf] * 3, "b": [math.inf] * 3}, "a", ["b"], False),
        ({"a": LOW, "b": HIGH, "c": []}, "a", [], True),  # not measured: not compared
    ],
)
def test_a_group_is_ahead_where_all_its_seeds_lie_below_all_others(values, leader, level, is_clear):
    found = standing(values)
    assert found is not None and (found.leader, found.level, found.is_clear) == (leader, level, is_clear)
    assert standing({"a": LOW}) is None is standing({"a": LOW, "b": []})  # one group is not compared


def test_equal_groups_part_by_chance_once_in_twenty_times_for_each():
    """Over all orders in which the seeds of two equal groups can come."""
    orders = list(permutations(range(2 * ENOUGH_SEEDS)))
    found = [standing({"a": order[:ENOUGH_SEEDS], "b": order[ENOUGH_SEEDS:]}) for order in orders]
    first = sum(each is not None and each.is_clear and each.leader == "a" for each in found)
    assert first * math.comb(2 * ENOUGH_SEEDS, ENOUGH_SEEDS) == len(orders) and ENOUGH_SEEDS == 3


def write(folder, name, losses, errors):
    for seed, (loss, error) in enumerate(zip(losses, errors, strict=True)):
        write_run(folder / f"{name}-{seed}", name, seed, [2.0, loss], errors=[0.9, error])


def test_the_takeaway_says_who_is_lowest_and_whether_it_may_be_chance(tmp_path):
    write(tmp_path, "smw-gn", [0.01, 0.02, 0.03], [0.05, 0.06, 0.07])
    write(tmp_path, "sgd", [0.1, 0.2, 0.3], [0.06, 0.08, 0.09])
    write(tmp_path, "adam", [0.4, 0.5, None], [0.065, 0.2, 0.3])
    groups = groups_of(load([tmp_path]))
    assert takeaway(groups, "test_error")[:2] == [
        "Lowest train loss: smw-gn, 0.02, every seed below every seed of the others.",
        "Lowest test error: smw-gn, 6.00 %, within the spread of the seeds of sgd and adam.",
    ]
    found = standings(groups)
    assert found["train_loss"].is_clear and not found["test_error"].is_clear
    table = page_data(load([tmp_path]))[0]["ends"]  # bold where a lead is clear, and nowhere else
    rows = zip(table["rows"], table["best"], strict=True)
    cells = [(row[0], *cell) for row, marks in rows for cell in zip(table["columns"], marks, strict=True)]
    assert [cell[:2] for cell in cells if cell[2]] == [("smw-gn", "train loss")]
    assert takeaway(groups[:1], "test_error") == []
    write(tmp_path / "diverged", "sgd", [None], [0.5])
    write(tmp_path / "diverged", "adam", [None], [0.5])
    assert takeaway(groups_of(load([tmp_path / "diverged"])), "test_loss") == ["Every run diverged."]


def test_a_run_that_is_there_twice_is_one_seed(tmp_path):
    write(tmp_path, "sgd", [1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    for copy in range(3):
        write_run(tmp_path / f"gn-{copy}", "smw-gn", 0, [2.0, 0.01 + 0.01 * copy])
    assert not standings(groups_of(load([tmp_path])))["train_loss"].is_clear


# -- the race


def race(folder, name, losses, seconds_per_epoch):
    for seed, values in enumerate(losses):
        write_run(folder / f"{name}-{seed}", name, seed, values, seconds_per_epoch=seconds_per_epoch)


def test_the_fastest_is_first_at_the_lowest_loss_that_all_reach(tmp_path):
    race(tmp_path, "smw-gn", [[2.0, 0.3, 0.1], [2.0, 0.5, 0.1], [2.0, 0.45, 0.1]], seconds_per_epoch=4.0)
    race(tmp_path, "sgd", [[2.0, 0.9, 0.4], [2.0, 0.8, 0.38], [2.0, 0.7, 0.35]], seconds_per_epoch=1.5)
    groups = groups_of(load([tmp_path]))
    found = race_of(groups)
    assert found.absent == []
    assert found.target == 0.4  # the best loss of the run of sgd that gets least far
    assert found.seconds == {"smw-gn": [4.0, 8.0, 8.0], "sgd": [3.0] * 3}
    assert takeaway(groups, "test_error")[2] == (
        "Fastest to a train loss of 0.4, the lowest that all reach: sgd, 3 s; smw-gn takes 2.67 times as long, "
        "every seed before every seed of the others."
    )


def test_who_never_gets_below_the_start_does_not_race(tmp_path):
    race(tmp_path, "smw-gn", [[2.0, 1.0, None]], seconds_per_epoch=1.0)  # it diverges after it has been there
    race(tmp_path, "sgd", [[2.0, 1.5, 1.2]], seconds_per_epoch=1.0)
    race(tmp_path, "adam", [[2.0, 3.0, 2.0]], seconds_per_epoch=0.1)
    race(tmp_path, "hf", [[2.0, None, None]], seconds_per_epoch=0.1)
    groups = groups_of(load([tmp_path]))
    found = race_of(groups)
    assert (found.target, found.absent) == (1.2, ["hf", "adam"])
    assert found.seconds == {"smw-gn": [1.0], "sgd": [2.0]}
    assert "the lowest that all but hf and adam reach: smw-gn, 1 s" in takeaway(groups, "test_error")[2]
    assert race_of(groups[:2]).seconds == {}  # of smw-gn and hf one is left


def test_recorded_losses_may_be_below_zero_and_begin_after_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for method, losses in (("a", [1.0, -1.0, -2.0]), ("b", [-1.0, 0.5, -1.5])):
        now = [0.0]
        with woodbury.Recorder(tmp_path / method, problem="waves", method=method) as record:
            for loss in losses:
                now[0] += 1.0
                record.epoch(train_loss=loss)
    found = race_of(groups_of(load([tmp_path])))
    assert found.target == -1.5 and found.seconds == {"a": [3.0], "b": [3.0]}
