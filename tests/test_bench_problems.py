"""`python -m benchmarks problems`: the problems, the runs of all methods, and what their records say."""

import json
import math
import sys
import warnings
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import nn

from benchmarks import __main__ as program
from benchmarks import problems, rivals
from benchmarks.problems import CLASSIFICATION, PROBLEMS, REGRESSION, Problem
from benchmarks.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, METHODS, SGD, WOODBURY
from woodbury.experiments.data import Dataset

FROM_FOLDER = ("mnist", "mnist-full", "covtype")
DRAWN = ("noisy", "friedman", "transformer", "lstm")  # the others need scikit-learn


def fake_dataset(name, data_dir=None):
    """Random samples in the shape of MNIST or covtype."""
    draws = torch.Generator().manual_seed(0)
    features, classes = {"mnist": (784, 10), "covtype": (54, 2)}[name]
    inputs = torch.randn(2, 300, features, generator=draws)
    labels = torch.randint(classes, (2, 300), generator=draws)
    if classes == 2:
        labels = labels.float().unsqueeze(2)
    return Dataset(inputs[0], labels[0], inputs[1], labels[1], classes)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """`make` of a problem by its name; with fake data instead of the folder, skipped without scikit-learn."""
    load, fakes = problems.load_dataset, {"mnist": fake_dataset, "covtype": fake_dataset}
    monkeypatch.setattr(problems, "load_dataset", lambda name, data_dir: fakes.get(name, load)(name, data_dir))

    def make_task(name, seed=0):
        if name not in (*FROM_FOLDER, *DRAWN):
            pytest.importorskip("sklearn")
        return PROBLEMS[name].make(seed, tmp_path)

    return make_task


# -- the problems ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_samples_fit_the_model_and_a_seed_chooses_the_weights_and_nothing_else(make, name):
    problem = PROBLEMS[name]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tasks = [make(name, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)  # torch's own numbers go on as if nothing had been drawn
    for ours, *others in zip(*((*task.train, *task.test) for task in tasks), strict=True):
        assert all(torch.equal(ours, other) for other in others)
    first, same, other = (nn.utils.parameters_to_vector(task.model.parameters()) for task in tasks)
    assert torch.equal(first, same) and not torch.equal(first, other)
    for inputs, targets in (tasks[0].train, tasks[0].test):
        assert len(inputs) == len(targets) > problem.batch
        assert inputs.isfinite().all() and targets.isfinite().all()
        outputs = tasks[0].model(inputs[: problem.batch])
        assert tasks[0].loss(outputs, targets[: problem.batch]).isfinite()
        if problem.loss is nn.CrossEntropyLoss:
            assert targets.min() >= 0 and targets.max() < outputs.shape[1]
        else:
            assert outputs.shape == targets[: problem.batch].shape  # no broadcasting
    for rates in (problem.adam_rates, problem.sgd_rates):
        assert len(rates) == 4 and list(rates) == sorted(set(rates))


def test_what_is_absent_is_left_out_and_never_downloaded(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("WOODBURY_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    bare = replace(PROBLEMS["diabetes"], data=lambda _: problems._scikit("diabetes"))
    monkeypatch.setitem(PROBLEMS, "bare", bare)
    with pytest.raises(SystemExit, match="the data of all these problems is absent"):
        program.main(["problems", "--only", "mnist", "covtype", "bare", "--out", str(tmp_path)])
    assert capsys.readouterr().err.splitlines() == [
        "mnist is left out: neither --data-dir nor WOODBURY_DATA names a folder with mnist",
        "covtype is left out: neither --data-dir nor WOODBURY_DATA names a folder with covtype",
        'bare is left out: it needs sklearn: pip install "woodbury[experiments]"',
    ]


# -- batches, figures, time -----------------------------------------------------------------------------------

TINY = Problem(
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
    nn.MSELoss,
    lambda data_dir: tuple(
        (torch.linspace(-1, 1, 3 * rows).view(rows, 3), torch.linspace(0, 1, rows).view(rows, 1))
        for rows in (10, 4)
    ),
    batch=4,
    epochs=2,
    adam_rates=(1e-3, 1e-2),
    sgd_rates=(1e-2, 1e-1),
)


# -- the runs -------------------------------------------------------------------------------------------------


def standing_still(model, loss, loader, *, seed, progress, epochs=None, seconds=None):
    """In place of `woodbury.fit`: a warning, and no step."""
    warnings.warn(f"{epochs}, {seconds}, {seed}", RuntimeWarning, stacklevel=1)


def broken(model, loss, loader, **settings):
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    raise ArithmeticError("it does\nnot work")


def test_all_methods_run_with_the_same_start_epochs_and_batches():
    records = rivals.run_problem(TINY, seeds=(0, 1))
    expected = [(ADAM_CONSTANT, 1e-3), (ADAM, 1e-3), (ADAM, 1e-2), (SGD, 1e-2), (SGD, 1e-1)]
    expected += [(WOODBURY, None), (EQUAL_SECONDS, None)]
    for seed in (0, 1):
        runs = [record for record in records if record["seed"] == seed]
        assert [(record["method"], record["rate"]) for record in runs] == expected
        assert len({record["start_loss"] for record in runs}) == 1
    for record in records:
        assert record["kind"] == REGRESSION
        assert record["error"] is None and record["finite"] and record["seconds"] > 0
        assert record["test_figure"] == record["test_loss"]
        if record["method"] != EQUAL_SECONDS:
            assert record["train_loss"] < record["start_loss"]


def test_fit_gets_the_epochs_or_the_seconds_of_adams_median_run_and_the_seed(monkeypatch):
    monkeypatch.setattr(rivals, "fit", standing_still)
    three_rates = replace(TINY, adam_rates=(1e-3, 3e-3, 1e-2))
    *adam, epochs, seconds = rivals.run_problem(three_rates, (5,), (ADAM, WOODBURY))
    assert [record["method"] for record in adam] == [ADAM] * 3 and adam[0]["warnings"] == []
    assert epochs["warnings"] == ["2, None, 5"]
    assert seconds["warnings"] == [f"None, {median(record['seconds'] for record in adam)}, 5"]
    assert epochs["train_loss"] == epochs["start_loss"]


# -- what the records say -------------------------------------------------------------------------------------


def record(method, train, seed=0, rate=None, test=0.1, seconds=1.0, problem="one", kind=CLASSIFICATION, **more):
    entry = {"problem": problem, "kind": kind, "method": method, "rate": rate, "seed": seed}
    entry |= {"seconds": seconds, "start_loss": 2.0, "train_loss": train, "test_loss": test, "test_figure": test}
    return entry | {"finite": True, "error": None, "warnings": []} | more


def test_a_summary_takes_medians_the_best_rate_and_ratios():
    records = [record(ADAM, loss, seed, 0.1, test=0.2) for seed, loss in enumerate((0.5, 0.4, None))]
    records += [record(ADAM, loss, seed, 0.2) for seed, loss in enumerate((0.1, 0.9, 0.9))]
    records += [record(ADAM, 0.6, seed, 0.01) for seed in range(3)]
    records += [record(SGD, loss, 0, rate) for rate, loss in ((0.1, 0.3), (0.2, math.nan), (0.3, 0.2))]
    records += [record(WOODBURY, loss, seed, seconds=3.0) for seed, loss in enumerate((0.2, 0.3, 0.9))]
    records += [record(EQUAL_SECONDS, loss, seed, seconds=1.1) for seed, loss in enumerate((0.6, 0.7, 0.5))]
    row = rivals.summarise(records)["problems"]["one"]
    # medians over the seeds: 0.5 at a rate of 0.1, where one run overflowed, 0.9 at 0.2 and 0.6 at 0.01
    assert (row[ADAM]["rate"], row[ADAM]["train_loss"], row[ADAM]["edge"]) == (0.1, 0.5, False)
    assert (row[SGD]["rate"], row[SGD]["train_loss"], row[SGD]["edge"]) == (0.3, 0.2, True)
    assert row[WOODBURY]["ratio"] == pytest.approx(0.6) and row[WOODBURY]["seconds_ratio"] == pytest.approx(3.0)
    assert row[EQUAL_SECONDS]["ratio"] == pytest.approx(1.2) and not row[WOODBURY]["edge"]
    assert row[ADAM]["test"] == pytest.approx(0.2) and row[ADAM]["test_range"] == (0.2, 0.2)
    assert "one classification - 0.5 0.1 0.2 0.3*" in " ".join(
        rivals.problems_tables(rivals.summarise(records)).split()
    )
    records = [record(ADAM, 0.5, 0, 0.1), record(WOODBURY, 0.01, error="ValueError: no", test=0.0)]
    summary = rivals.summarise(records)  # a run that failed counts as the worst
    entry = summary["problems"]["one"][WOODBURY]
    assert entry["train_loss"] == entry["ratio"] == entry["test"] == math.inf
    records = [record(ADAM, 9.0, rate=0.1)]  # not ours
    records += [record(WOODBURY, loss, seed) for seed, loss in enumerate((2.0, 2.5, None))]
    records += [record(WOODBURY, 0.1, 3, finite=False), record(WOODBURY, 0.1, 4, error="ValueError: no")]
    assert rivals.faults(records) == [
        "one, woodbury, seed 1: the loss rose from 2 to 2.5",
        "one, woodbury, seed 2: the loss rose from 2 to inf",
        "one, woodbury, seed 3: a parameter is not finite",
        "one, woodbury, seed 4: ValueError: no",
    ]


# -- the command ----------------------------------------------------------------------------------------------


def test_the_command_writes_records_and_ends_with_status_1_at_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(PROBLEMS, "tiny", TINY)
    command = ["problems", "--only", "tiny", "--seeds", "2", "--json", "--out", str(tmp_path / "new")]
    assert program.main(command) == 0
    printed = capsys.readouterr()
    assert "tiny: 14 runs" in printed.err
    result = json.loads(printed.out.splitlines()[-1])
    assert set(result) == {"machine", "versions", "problems", "faults"} and result["faults"] == []
    assert set(result["problems"]["tiny"]) == {"kind", *METHODS, EQUAL_SECONDS}
    monkeypatch.setattr(rivals, "fit", broken)
    assert program.main(command) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    runs = [f"tiny, {method}, seed {seed}" for seed in (0, 1) for method in (WOODBURY, EQUAL_SECONDS)]
    assert result["faults"] == [f"{run}: ArithmeticError: it does not work" for run in runs]
    records = [json.loads(line) for line in (tmp_path / "new" / "records.jsonl").read_text().splitlines()]
    assert len(records) == 14 and not records[-1]["finite"] and records[-1]["train_loss"] is None
