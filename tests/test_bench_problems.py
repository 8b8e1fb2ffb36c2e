"""`bench problems`: the problems themselves, the runs of all methods, and what is made of their records."""

import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from woodbury.bench import draw, problems, rivals, standings, tables
from woodbury.bench.__main__ import main
from woodbury.bench.problems import CLASSIFICATION, PROBLEMS, REGRESSION, Problem
from woodbury.bench.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, METHODS, SGD, WOODBURY

from woodbury.experiments.data import Dataset

FROM_FOLDER = ("mnist", "mnist-full", "covtype")
DRAWN = ("noisy", "friedman", "transformer", "lstm")  # the others need scikit-learn


def fake_dataset(name, data_dir=None):
    """Random samples in the shape of MNIST or covtype."""
    draws = torch.Generator().manual_seed(0)
    features, classes = {"mnist": (784, 10), "covtype": (54, 2)}[name]
    inputs = torch.randn(2, 8000, features, generator=draws)
    labels = torch.randint(classes, (2, 8000), generator=draws)
    if classes == 2:
        labels = labels.float().unsqueeze(2)
    return Dataset(inputs[0], labels[0], inputs[1], labels[1], classes)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """`make` of a problem by its name; with fake data instead of the folder, skipped without scikit-learn."""

    def make_task(name, seed=0):
        problem = PROBLEMS[name]
        if name in FROM_FOLDER:
            monkeypatch.setattr(problems, "load_dataset", fake_dataset)
            problem = replace(problem, data=problem.data.__wrapped__)  # nothing fake into the cache
        elif name not in DRAWN:
            pytest.importorskip("sklearn")
        return problem.make(seed, tmp_path)

    return make_task


# -- the problems ---------------------------------------------------------------------------------------------


def test_there_are_problems_of_both_kinds_and_long_ones_are_run_by_name_only():
    kinds = [problem.kind for problem in PROBLEMS.values() if not problem.by_name_only]
    assert len(kinds) >= 10 and kinds.count(REGRESSION) >= 5 and kinds.count(CLASSIFICATION) >= 5
    assert [name for name, problem in PROBLEMS.items() if problem.by_name_only] == ["mnist-full"]
    assert all(name == problem.name for name, problem in PROBLEMS.items())


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_has_samples_that_fit_its_model_and_loss(make, name):
    problem, task = PROBLEMS[name], make(name)
    for inputs, targets in (task.train, task.test):
        assert len(inputs) == len(targets) > problem.batch
        assert inputs.isfinite().all() and targets.isfinite().all()
        outputs = task.model(inputs[: problem.batch])
        value = task.loss(outputs, targets[: problem.batch])
        assert outputs.shape[0] == problem.batch and value.dim() == 0 and value.isfinite()
        if isinstance(task.loss, nn.CrossEntropyLoss):
            assert targets.min() >= 0 and targets.max() < outputs.shape[1]
        else:
            assert outputs.shape == targets[: problem.batch].shape  # no broadcasting
    assert len(problem.adam_rates) == len(problem.sgd_rates) == 4
    assert all(list(rates) == sorted(set(rates)) for rates in (problem.adam_rates, problem.sgd_rates))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_seed_chooses_the_weights_and_nothing_else(make, name):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tasks = [make(name, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)  # torch's own numbers go on as if nothing had been drawn
    for task in tasks[1:]:
        for ours, theirs in zip((*tasks[0].train, *tasks[0].test), (*task.train, *task.test), strict=True):
            assert torch.equal(ours, theirs)
    first, same, other = (nn.utils.parameters_to_vector(task.model.parameters()) for task in tasks)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_the_noisy_regression_is_the_published_one(make):
    torch.manual_seed(1)
    X = torch.randn(2400, 4)
    y = X[:, :1].sin() + X[:, 1:2] * X[:, 2:3] + 0.5 * torch.randn(2400, 1)
    y = (y - y.mean()) / y.std()
    task, problem = make("noisy"), PROBLEMS["noisy"]
    assert torch.equal(task.train[0], X) and torch.equal(task.train[1], y)
    assert (problem.batch, problem.epochs) == (32, 24)
    shapes = [tuple(layer.weight.shape) for layer in task.model if isinstance(layer, nn.Linear)]
    assert shapes == [(64, 4), (64, 64), (1, 64)] and isinstance(task.model[1], nn.Tanh)


def test_targets_of_sequences_are_what_the_docstrings_say(make):
    inputs, targets = make("lstm").train
    for sequence, target in zip(inputs[:20].tolist(), targets[:20, 0].tolist(), strict=True):
        marked = [value for value, mark in sequence if mark == 1]
        assert len(marked) == 2 and len(sequence) == 10
        assert target == pytest.approx(sum(marked), abs=4 * torch.finfo(torch.float32).eps)  # a sum below 2
    sequences, classes = make("transformer").train
    for sequence, count in zip(sequences[:200].tolist(), classes[:200].tolist(), strict=True):
        assert count == min(7, sequence[1:].count(sequence[0]))


def test_letters_follow_their_contexts_and_no_test_letter_was_trained_on(make):
    task = make("letters")
    contexts, following = (values.tolist() for values in task.train)
    for before, letter, after in zip(contexts, following, contexts[1:], strict=False):
        assert [*before[1:], letter] == after
    words = "".join(problems._LETTERS[code] for code in contexts[0] + following).split()
    assert {"data", "the", "of", "classes"} <= set(words)
    trained = len(contexts) + len(contexts[0])  # letters of the training text
    text = contexts[0] + following + task.test[0][0].tolist()
    assert len(text) == trained + 8  # the first test context starts where the training text ends
    assert 0.08 < len(task.test[0]) / trained < 0.12


def test_raw_targets_are_those_of_diabetes_before_standardisation(make):
    raw, scaled = make("raw-scale"), make("diabetes")
    assert torch.equal(raw.train[0], scaled.train[0]) and raw.train[1].min() == 25
    # one pass of rounding: of numbers up to 346 over a deviation of 77
    again = (raw.train[1].double() - raw.train[1].double().mean()) / raw.train[1].double().std(correction=0)
    torch.testing.assert_close(again.float(), scaled.train[1], rtol=1e-5, atol=1e-6)


def test_mnist_and_covtype_are_left_out_without_a_folder_and_never_downloaded(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("WOODBURY_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        main(["problems", "--only", "mnist", "covtype", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "mnist is left out: neither --data-dir nor WOODBURY_DATA names a folder with mnist" in said
    assert "covtype is left out" in said and "the data of all these problems is absent" in said


def test_a_problem_that_needs_scikit_learn_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(
        PROBLEMS, "bare", replace(PROBLEMS["diabetes"], data=PROBLEMS["diabetes"].data.__wrapped__)
    )
    said = []
    assert list(rivals.bench_problems(["bare"], say=said.append)) == []
    assert said == ['bare is left out: it needs sklearn: pip install "woodbury[experiments]"']


# -- batches, figures, time -----------------------------------------------------------------------------------

TINY = Problem(
    "tiny",
    REGRESSION,
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
    nn.MSELoss,
    lambda data_dir: (
        (torch.linspace(-1, 1, 30).view(10, 3), torch.linspace(0, 1, 10).view(10, 1)),
        (torch.linspace(-0.9, 0.9, 12).view(4, 3), torch.linspace(0, 1, 4).view(4, 1)),
    ),
    batch=4,
    epochs=2,
    adam_rates=(1e-3, 1e-2),
    sgd_rates=(1e-2, 1e-1),
)


def test_batches_visit_every_sample_once_in_an_order_of_their_seed():
    inputs = torch.arange(10.0).unsqueeze(1)
    rounds = []
    for seed in (0, 0, 1):
        loader = rivals.batches((inputs, 2 * inputs), 4, seed)
        epoch = list(loader)
        assert [len(x) for x, _ in epoch] == [4, 4, 2] and len(loader) == 3 and loader.batch_size == 4
        assert all(torch.equal(y, 2 * x) for x, y in epoch)
        rounds.append(torch.cat([x for x, _ in epoch]).flatten().tolist())
        assert sorted(rounds[-1]) == list(range(10))
        assert torch.cat([x for x, _ in loader]).flatten().tolist() != rounds[-1]  # another order in each epoch
    assert rounds[0] == rounds[1] != rounds[2]
    assert rivals._Samples((inputs, inputs))[3] == (inputs[3], inputs[3])


@pytest.mark.parametrize("loss, outputs", [(nn.CrossEntropyLoss(), 3), (nn.BCEWithLogitsLoss(), 1)])
def test_figures_are_those_of_a_loop_over_samples(loss, outputs):
    torch.manual_seed(0)
    count = 2001  # one more than are evaluated at once
    model = nn.Sequential(nn.Linear(2, outputs), nn.Dropout(0.5)).double()
    inputs = torch.randn(count, 2).double()
    targets = torch.randint(3, (count,)) if outputs == 3 else torch.randint(2, (count, 1)).double()
    value, error = rivals.evaluate(model, loss, (inputs, targets), CLASSIFICATION)
    assert model.training  # as it was
    model.eval()
    total, wrong = 0.0, 0
    for x, y in zip(inputs, targets, strict=True):
        z = model(x)
        total += loss(z.unsqueeze(0), y.unsqueeze(0)).item()
        wrong += (z.argmax() != y).item() if outputs == 3 else ((z > 0) != (y == 1)).item()
    assert value == pytest.approx(total / count, rel=count * torch.finfo(torch.float64).eps)
    assert error == wrong / count and 0 < error < 1
    assert rivals.evaluate(model, loss, (inputs, targets), REGRESSION) == (value, value)


def test_a_watch_leaves_out_the_time_of_its_evaluations(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rivals.time, "process_time", lambda: now[0])

    def evaluate_loss():
        now[0] += 100.0
        return 0.5

    watch = rivals.Watch(evaluate_loss, every=2)
    now[0] = 7.0
    watch.start()
    for _ in range(5):
        now[0] += 1.0
        assert watch("whatever a callback gets") is None  # a true answer would stop woodbury.fit
    assert watch.steps == 5 and watch.seconds == 5.0 and watch.curve == [[2.0, 0.5], [4.0, 0.5]]


@pytest.mark.parametrize("method, rate", [(ADAM, 1e-2), (SGD, 1e-1), (ADAM_CONSTANT, 1e-3)])
def test_first_order_runs_are_those_of_a_torch_scheduler(method, rate):
    record = rivals.run_first_order(TINY, method, rate, seed=3)
    task = TINY.make(3)
    if method == SGD:
        optimizer = torch.optim.SGD(task.model.parameters(), lr=rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(task.model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 if method == ADAM_CONSTANT else 1 - step / 6
    )
    order = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*task.train), batch_size=4, shuffle=True, generator=order
    )
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            task.loss(task.model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
    expected = task.loss(task.model(task.train[0]), task.train[1]).item()
    # the same operations; only the mean over 10 samples in pieces may round once more
    assert record["train_loss"] == pytest.approx(expected, rel=2 * torch.finfo(torch.float32).eps)
    assert record["train_loss"] != pytest.approx(record["start_loss"], rel=1e-3)
    assert (record["method"], record["rate"], record["seed"], record["steps"]) == (method, rate, 3, 6)


def test_batches_are_counted_over_as_many_rounds_as_they_take():
    loader = rivals.batches((torch.zeros(10, 1), torch.zeros(10, 1)), 4, 0)
    assert [len(x) for x, _ in rivals._first(loader, 5)] == [4, 4, 2, 4, 4]
    assert list(rivals._first(loader, 0)) == []


# -- the runs -------------------------------------------------------------------------------------------------

CALLS = []


def variant(model, loss, loader, *, seed, callback, epochs=None, seconds=None):
    """Settings to try in place of woodbury's defaults: here, nothing but the count of steps."""
    CALLS.append((epochs, seconds, seed))
    warnings.warn("a word of the optimizer", RuntimeWarning, stacklevel=1)
    for _ in range(3 if epochs is None else epochs * len(loader)):
        sum(x * x for x in range(20000))  # takes time
        callback()


def broken(model, loss, loader, *, seed, callback, epochs=None, seconds=None):
    callback()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    raise ArithmeticError("it does\nnot work")


def test_all_methods_run_on_a_tiny_problem():
    records = rivals.run_problem(TINY, seeds=(0, 1))
    for seed in (0, 1):
        runs = [(record["method"], record["rate"]) for record in records if record["seed"] == seed]
        assert runs == [
            *((ADAM_CONSTANT, 1e-3), (ADAM, 1e-3), (ADAM, 1e-2), (SGD, 1e-2), (SGD, 1e-1)),
            *((WOODBURY, None), (EQUAL_SECONDS, None)),
        ]
    for record in records:
        assert record["problem"] == "tiny" and record["kind"] == REGRESSION and record["test_samples"] == 4
        assert record["error"] is None and record["finite"] and record["seconds"] > 0
        assert record["start_loss"] == record["curve"][0][1]
        assert record["test_figure"] == record["test_loss"]
        if record["method"] != EQUAL_SECONDS:
            assert record["steps"] == 6 and record["epochs"] == 2 and record["train_loss"] < record["start_loss"]
            assert record["curve"][-1][1] == record["train_loss"] and len(record["curve"]) == 7
        assert [seconds for seconds, _ in record["curve"]] == sorted(seconds for seconds, _ in record["curve"])
    starts = {record["seed"]: record["start_loss"] for record in records}
    assert starts[0] != starts[1]


def test_equal_seconds_are_those_of_the_median_run_of_adam():
    adam = [{"seconds": seconds} for seconds in (1.0, 3.0, 2.0, 100.0)]
    assert rivals.equal_seconds(adam) == 2.5


def test_another_setting_gets_the_epochs_the_seconds_and_the_seed():
    CALLS.clear()
    records = rivals.run_problem(
        TINY, (5,), (ADAM, WOODBURY), train=rivals.load_train("test_bench_problems:variant")
    )
    (_, warm_up, epochs, seconds) = [None, *CALLS]
    assert warm_up == (1, None, 0) and epochs == (2, None, 5)
    adam = [record for record in records if record["method"] == ADAM]
    own = next(record for record in records if record["method"] == WOODBURY)
    assert seconds == (None, rivals.equal_seconds(adam), 5)
    assert own["warnings"] == ["a word of the optimizer"] and adam[0]["warnings"] == []
    assert own["train_loss"] == own["start_loss"] and own["steps"] == 6
    assert rivals.load_train(None) is rivals.train_default


def test_an_error_of_a_run_becomes_part_of_its_record():
    first, *_ = rivals.run_problem(TINY, (0,), (WOODBURY,), train=broken)
    assert first["error"] == "ArithmeticError: it does not work" and first["steps"] == 1 and not first["finite"]
    assert math.isnan(first["train_loss"]) and standings.figure(first, "train_loss") == math.inf


def test_earlier_runs_of_rivals_are_taken_over_if_they_have_the_same_length():
    records = rivals.run_problem(TINY, (0,), (ADAM, SGD))
    marked = [record | {"train_loss": 123.0} for record in records]
    again = rivals.run_problem(TINY, (0,), (ADAM_CONSTANT, ADAM, WOODBURY), earlier=marked)
    assert [record["method"] for record in again] == [ADAM_CONSTANT, ADAM, ADAM, WOODBURY, EQUAL_SECONDS]
    assert [record["train_loss"] == 123.0 for record in again] == [False, True, True, False, False]
    longer = rivals.run_problem(replace(TINY, epochs=3), (0,), (ADAM,), earlier=marked)
    assert [record["steps"] for record in longer] == [9, 9]


def test_the_default_training_is_that_of_fit():
    own = rivals.train_with_woodbury(TINY, 0, seconds=0.2)
    assert own["method"] == EQUAL_SECONDS and own["error"] is None and own["steps"] > 0
    assert own["epochs"] >= own["steps"] / 3  # three batches an epoch, and one or more a step


# -- what the records say -------------------------------------------------------------------------------------


def record(method, train, seed=0, rate=None, test=0.1, seconds=1.0, problem="one", kind=CLASSIFICATION, **more):
    entry = {"problem": problem, "kind": kind, "method": method, "rate": rate, "seed": seed, "steps": 10}
    entry |= {"seconds": seconds, "start_loss": 2.0, "train_loss": train, "test_loss": test, "test_figure": test}
    entry |= {"test_samples": 100, "finite": True, "error": None, "warnings": []}
    return entry | {"curve": [[0.0, 2.0], [seconds, train]]} | more


def test_a_summary_takes_medians_the_best_rate_and_ratios():
    records = [record(ADAM, loss, seed, 0.1, test=0.2) for seed, loss in enumerate((0.5, 0.4, None))]
    records += [record(ADAM, loss, seed, 0.2) for seed, loss in enumerate((0.1, 0.9, 0.9))]
    records += [record(ADAM, 0.6, seed, 0.01) for seed in range(3)]
    records += [record(SGD, loss, 0, rate) for rate, loss in ((0.1, 0.3), (0.2, math.nan), (0.3, 0.2))]
    records += [record(WOODBURY, loss, seed, seconds=3.0) for seed, loss in enumerate((0.2, 0.3, 0.9))]
    records += [record(EQUAL_SECONDS, loss, seed, seconds=1.1) for seed, loss in enumerate((0.6, 0.7, 0.5))]
    row = standings.summarise(records)["problems"]["one"]
    # medians over the seeds: 0.5 at a rate of 0.1, where one run overflowed, 0.9 at 0.2 and 0.6 at 0.01
    assert (row[ADAM]["rate"], row[ADAM]["train_loss"], row[ADAM]["edge"]) == (0.1, 0.5, False)
    assert (row[SGD]["rate"], row[SGD]["train_loss"], row[SGD]["edge"]) == (0.3, 0.2, True)
    assert row[WOODBURY]["ratio"] == pytest.approx(0.6) and row[WOODBURY]["seconds_ratio"] == pytest.approx(3.0)
    assert row[EQUAL_SECONDS]["ratio"] == pytest.approx(1.2) and not row[WOODBURY]["edge"]
    assert row[ADAM]["test"] == pytest.approx(0.2) and row[ADAM]["test_range"] == (0.2, 0.2)


def test_a_run_that_failed_counts_as_the_worst():
    records = [record(ADAM, 0.5, 0, 0.1), record(WOODBURY, 0.01, error="ValueError: no", test=0.0)]
    summary = standings.summarise(records)
    entry = summary["problems"]["one"][WOODBURY]
    assert entry["train_loss"] == entry["ratio"] == entry["test"] == math.inf
    assert summary["bars"]["equal epochs: training loss not above that of tuned Adam"] == (0, 1)


def test_bars_count_the_problems_that_reach_them():
    records = []
    #         kind, Adam 1e-3, Adam, woodbury, in equal seconds: losses; then test errors of the last and of Adam
    cases = {
        "a": (REGRESSION, 0.5, 0.2, 0.2, 0.3, 0.1, 0.1),
        "b": (REGRESSION, 0.5, 0.2, 0.29, 0.19, 0.1, 0.1),
        "c": (CLASSIFICATION, 0.5, 0.2, 0.31, 0.9, 0.15, 0.1),
        "d": (CLASSIFICATION, 0.3, 0.2, 0.35, 0.9, 0.17, 0.1),
    }
    for name, (kind, constant, adam, epochs, seconds, own_test, test) in cases.items():
        common = {"problem": name, "kind": kind}
        for seed in range(3):
            records += [
                record(ADAM_CONSTANT, constant, seed, 1e-3, **common),
                record(ADAM, adam, seed, 0.1, test=test, **common),
                record(WOODBURY, epochs, seed, **common),
                record(EQUAL_SECONDS, seconds, seed, test=own_test, **common),
            ]
    assert list(standings.summarise(records)["bars"].values()) == [
        (1, 4),  # not above: a
        (2, 4),  # within 1.5 times: a, b
        (1, 2),  # equal seconds, regressions: b
        (1, 2),  # test error: c, as two standard errors of 0.1 on 100 samples are 0.06
        (3, 4),  # below Adam at 1e-3: a, b, c
        (2, 4),  # in equal seconds: a, b
    ]
    bars = standings.summarise([record(ADAM, 0.1, rate=0.1)])["bars"]
    assert set(bars.values()) == {(0, 0)}


def test_noise_is_two_standard_errors():
    """Written out: variances 1e-4 and 4e-4 over 2 and 4 seeds, 10 % wrong of 100."""
    ours = {"test": 0.2, "test_variance": 1e-4, "seeds": 2}
    reference = {"test": 0.1, "test_variance": 4e-4, "seeds": 4, "test_samples": 100}
    assert standings.noise(ours, reference) == pytest.approx(2 * math.sqrt(5e-5 + 1e-4 + 9e-4))
    assert standings.is_above(ours, reference)
    assert not standings.is_above(ours | {"test": 0.16}, reference)
    records = [record(ADAM, 0.1, seed, test=test) for seed, test in enumerate((0.1, 0.2, 0.6))]
    assert standings.summarise(records)["problems"]["one"][ADAM]["test_variance"] == pytest.approx(0.07)


def test_faults_name_the_run_and_what_is_wrong():
    records = [
        record(WOODBURY, 2.0, 0),
        record(WOODBURY, 2.5, 1),
        record(WOODBURY, None, 2),
        record(WOODBURY, 0.1, 3, finite=False),
        record(WOODBURY, 0.1, 4, error="ValueError: no"),
    ]
    assert standings.faults(records) == [
        "one, woodbury, seed 1: the loss rose from 2 to 2.5",
        "one, woodbury, seed 2: the loss rose from 2 to inf",
        "one, woodbury, seed 3: a parameter is not finite",
        "one, woodbury, seed 4: ValueError: no",
    ]
    assert tables.guard_table([records[0], records[2] | {"warnings": ["one"]}], ["a fault"]) == (
        """
Training loss at the end over that at the start, woodbury's defaults

problem  seeds  smallest  largest  with a warning
-------  -----  --------  -------  --------------
one          2         1      inf               1

a fault
""".strip("\n")
    )


def test_tables_of_problems_are_aligned_plain_text():
    records = [record(ADAM, loss, 0, rate, test=0.025) for rate, loss in ((0.1, 0.4), (0.2, 0.5))]
    records += [record(WOODBURY, 0.2, 0, test=0.02, seconds=2.5), record(EQUAL_SECONDS, None, test=0.03)]
    records += [record(WOODBURY, 30.0, seed, test=seed, problem="two", kind=REGRESSION) for seed in (1, 4)]
    shown = tables.problems_tables(main_rounding(standings.summarise(records)))
    assert shown == (
        """
Training loss, median over the seeds; *: the edge of the rates tried
woodbury in equal epochs and in equal seconds; x loss, x time: over those of tuned Adam

                         Adam   Adam          SGD         equal                    equal
problem  kind            1e-3  tuned  rate  tuned  rate  epochs  x loss  x time  seconds  x loss  x time
-------  --------------  ----  -----  ----  -----  ----  ------  ------  ------  -------  ------  ------
one      classification     -    0.4  0.1*      -     -     0.2     0.5     2.5      inf     inf       1
two      regression         -      -     -      -     -      30       -       -        -       -       -

Test error or test loss, mean (smallest to largest) over the seeds

problem  kind            Adam 1e-3          Adam tuned  SGD tuned  woodbury, equal epochs  woodbury, equal seconds
-------  --------------  ---------  ------------------  ---------  ----------------------  -----------------------
one      classification          -  2.5 % (2.5 to 2.5)          -            2 % (2 to 2)             3 % (3 to 3)
two      regression              -                   -          -            2.5 (1 to 4)                        -

1 of 1: equal epochs: training loss not above that of tuned Adam
1 of 1: equal epochs: training loss within 1.5 times that of tuned Adam
1 of 1: equal seconds, classifications: test error not above that of tuned Adam beyond noise
""".strip("\n")
    )


def main_rounding(summary):
    from woodbury.experiments.storage import round_numbers

    return round_numbers(summary)


# -- the command ----------------------------------------------------------------------------------------------


def test_the_command_writes_records_a_table_and_a_figure(tmp_path, monkeypatch, capsys):
    """Two processes; then the figure again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["problems", "--only", "noisy", "friedman", "--epochs", "1", "--seeds", "1", "--jobs", "2"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "noisy: 11 runs" in shown.err and "friedman: 11 runs" in shown.err
    assert shown.out.index("noisy") < shown.out.index("friedman")  # the order of the list, not that of the end
    assert (tmp_path / "table.txt").read_text() == shown.out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == 22 and {record["method"] for record in records} == {*METHODS, EQUAL_SECONDS}
    if pytest.importorskip("matplotlib"):
        figure = (tmp_path / "bench-problems.png").read_bytes()
        assert figure.startswith(b"\x89PNG")
        assert draw.draw([tmp_path / "records.jsonl"], tmp_path / "again") == [
            tmp_path / "again/bench-problems.png"
        ]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(PROBLEMS, "tiny", TINY)


def test_json_rivals_and_another_setting(tiny, tmp_path, capsys):
    command = ["problems", "--only", "tiny", "--seeds", "2", "--out", str(tmp_path / "a"), "--json"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "a" / "summary.json").read_text() == printed
    result = json.loads(printed)
    assert set(result) == {"machine", "versions", "problems", "bars"}
    assert set(result["problems"]["tiny"]) == {"kind", *METHODS, EQUAL_SECONDS}
    command[5:] = ["--out", str(tmp_path / "b"), "--rivals", str(tmp_path / "a" / "records.jsonl")]
    CALLS.clear()
    assert main([*command, "--seeds", "2", "--woodbury", "test_bench_problems:variant"]) == 0
    assert len(CALLS) == 5  # to warm up, and twice per seed
    first, second = (
        {
            (record["method"], record["rate"], record["seed"]): (record["train_loss"], record["seconds"])
            for record in map(json.loads, (tmp_path / folder / "records.jsonl").read_text().splitlines())
        }
        for folder in ("a", "b")
    )
    assert first.keys() == second.keys()
    for key in first:  # the variant does not move
        assert (first[key] == second[key]) == (key[0] in (ADAM_CONSTANT, ADAM, SGD))


def test_guard_runs_woodbury_alone_and_ends_with_status_1_at_a_fault(tiny, tmp_path, capsys):
    command = ["problems", "--only", "tiny", "--guard", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "no run raised" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "guard.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == [WOODBURY] * 10
    assert [record["seed"] for record in records] == list(range(10))
    with pytest.raises(SystemExit) as caught:
        main([*command, "--seeds", "2", "--json", "--woodbury", "test_bench_problems:broken"])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["faults"] == [
        f"tiny, woodbury, seed {seed}: ArithmeticError: it does not work" for seed in (0, 1)
    ]
    assert "tiny, woodbury, seed 1: ArithmeticError" in printed.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "none"], "argument --only: invalid choice: 'none'"),
        (["--methods", "lbfgs"], "argument --methods: invalid choice: 'lbfgs'"),
        (["--jobs", "0"], "--jobs: must be a whole number from 1 on, got '0'"),
        (["--rivals", "absent.jsonl"], "absent.jsonl: No such file or directory"),
        (["--rivals", __file__], "holds no records"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_status_2(arguments, message, tiny, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["problems", *arguments, "--out", str(tmp_path)])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_the_figure_cuts_off_what_runs_away(tmp_path):
    pytest.importorskip("matplotlib")
    curve = [[0.0, 2.0], [1.0, None], [2.0, 1e30], [3.0, 0.5]]
    lines = [record(WOODBURY, 0.5, curve=curve), record(WOODBURY, 0.5, problem="two"), record(ADAM, 0.1, rate=0.1)]
    path = Path(tmp_path / "records.jsonl")
    path.write_text("\n".join(json.dumps(line) for line in lines))
    figure = draw.draw_problems([standings.read_records(path)])
    panels = [panel for panel in figure.axes if panel.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in panels] == ["one", "two"]
    assert panels[0].get_ylim() == pytest.approx((0.1 / 1.3, 3.0)) and len(panels[0].lines) == 2
