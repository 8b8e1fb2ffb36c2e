"""woodbury.fit with a loader: training in mini-batches, its budget, validation data, and going on."""

import itertools
import math
import time
import types
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury
from checks import silence
from woodbury.fit import training
from woodbury.fit.limits import Limits
from woodbury.fit.sources import MiniBatches
from woodbury.optim.problems import FEWEST_ROWS, FREE, affordable_rows


def classes(count=120, seed=0):
    """Three classes that a small network can tell apart."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    return centres[labels] + 0.5 * torch.randn(count, 2, generator=draws), labels


loss_of = partial(reference.loss_of, loss=nn.CrossEntropyLoss())
network = partial(problems.network, 2, 8, 3, dtype=torch.float32)


def batches(data, size=20):
    return list(zip(*(own.split(size) for own in data), strict=True))


def fitted(model, loader, **settings):
    return woodbury.fit(model, nn.CrossEntropyLoss(), loader, **{"progress": False, "seed": 0, **settings})


def test_a_loader_is_trained_on_for_so_many_epochs():
    data, model = classes(), network()
    before = loss_of(model, data)
    fit = fitted(model, DataLoader(TensorDataset(*data), 20, shuffle=True), epochs=8)
    assert fit.reason == "epochs" and fit.steps == 48 and fit.samples == 20
    assert [record["epoch"] for record in fit.history] == list(range(1, 9))
    assert loss_of(model, data) < 0.1 * before
    assert fit.loss == pytest.approx(loss_of(model, data), rel=bounds.rounding(120, dtype=torch.float32))


def test_the_rate_falls_to_zero_over_the_budget_and_comes_back():
    rates, data, model = [], classes(), network()
    run = training.TrainingRun(
        training.training_optimizer(model, nn.CrossEntropyLoss(), curvature_samples=4),
        MiniBatches(batches(data)),
        limits=Limits(epochs=2),
        callback=lambda fit: rates.append(run.optimizer.param_groups[0]["lr"]),
    )
    run.go(None)
    expected = [training.RATE * math.sqrt(1 - step / 12) for step in range(12)]
    assert rates == pytest.approx(expected, rel=bounds.rounding(1))
    assert run.optimizer.param_groups[0]["lr"] == training.RATE


@pytest.mark.parametrize("budget", [{"steps": 7}, {"epochs": 7 / 6}, {"steps": 7, "epochs": 3}])
def test_the_first_budget_that_is_used_up_ends_it(budget):
    fit = fitted(network(), batches(classes()), **budget)
    assert fit.steps == 7 and fit.reason in budget


def test_without_a_budget_there_are_twenty_epochs_and_a_tolerance_ends_them():
    fit = fitted(network(), batches(classes(40)))
    assert fit.steps == 40 and fit.reason == "epochs"
    fit = fitted(network(), batches(classes()), epochs=50, tolerance=0.1)
    assert fit.reason == "tolerance" and fit.history[-1]["loss"] <= 0.1 < fit.history[-2]["loss"]


def test_the_best_epoch_comes_back_where_the_loss_rose():
    data, model = classes(), network()

    def spoil(fit):  # after the first epoch
        if fit.steps == 7:
            with torch.no_grad():
                model[2].weight.mul_(-30)

    fit = fitted(model, batches(data), steps=8, callback=spoil)
    assert fit.best_step == 6 and fit.loss < fit.history[0]["loss"]
    assert fit.loss == pytest.approx(loss_of(model, data), rel=bounds.rounding(120, dtype=torch.float32))


def test_tiny_batches_are_taken_together():
    """Steps on one noisy sample would run away; labels of a sequence count one by one."""
    models = [network() for _ in range(3)]
    for model, size in zip(models, (1, 3, 8), strict=True):
        fit = fitted(model, batches(classes(), size), epochs=2)
        assert (fit.steps, fit.samples) == ((28, 3) if size == 3 else (30, 8))
    assert torch.equal(reference.theta(models[0]), reference.theta(models[2]))
    sequences = MiniBatches([(torch.zeros(1, 5, 2), torch.zeros(1, 5, dtype=torch.long))] * 4, least=8)
    assert [sequences.next()[0][1].numel() for _ in range(2)] == [10, 10]
    images = MiniBatches([(torch.zeros(1, 2), torch.zeros(1, size)) for size in (2, 3, 3)], least=8)  # not to join
    assert [len(images.next()[0][1]) for _ in range(2)] == [1, 2]


def test_a_loss_that_runs_away_names_what_helps_this_call():
    inputs = classes()[0]
    rising = [(inputs[:8], torch.full((8, 1), 10.0 * size)) for size in range(40)]
    with pytest.warns(RuntimeWarning, match="the loss runs away.*Ways out: larger batches; validation="):
        woodbury.fit(nn.Linear(2, 1), nn.MSELoss(), rising, epochs=1, progress=False)
    draw, sizes = torch.Generator().manual_seed(0), itertools.count()
    with silence(message=".*runs away"):

        def rise(count):
            return torch.randn(count, 2, generator=draw), torch.full((count, 1), 10.0 * next(sizes))

        woodbury.fit(nn.Linear(2, 1), nn.MSELoss(), rise, steps=30, samples=8, progress=False)


# -- the price of curvature -----------------------------------------------------------------------------------


@pytest.mark.parametrize("widths, samples", [((784, 500, 10), 60), ((4, 64, 64, 1), 32), ((3000, 400, 10), 1000)])
def test_affordable_rows_are_the_most_within_the_budget(widths, samples):
    parameters = [torch.empty(b, a) for a, b in pairwise(widths)]
    size, width = sum(own.numel() for own in parameters), sum(sum(own.shape) for own in parameters)

    def cost(rows):
        return 4 * rows * size + 2 * rows**2 * width + rows**3 / 3

    rows, budget = affordable_rows(samples, parameters), 12 * samples * size + FREE
    assert rows >= FEWEST_ROWS and cost(rows) <= budget < cost(rows + 1)


def test_auto_takes_rows_over_columns_of_the_batch():
    model = nn.Sequential(nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 30))
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), curvature_samples="auto")
    optimizer.step(torch.randn(64, 40), torch.arange(64) % 30)
    count = partial(optimizer._problems.affordable_samples, optimizer._context())
    assert count(64) == affordable_rows(64, list(model.parameters())) // 29 and count(3) <= 3


def fit_by_clock(monkeypatch, ticks, **budget):
    """Parameters and steps of a fit whose clocks go on by these numbers in turn, at each look at them."""
    ticks = itertools.accumulate(itertools.cycle(ticks))
    for name in ("process_time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: next(ticks))
    model, generator = network(), torch.Generator().manual_seed(1)
    fit = fitted(model, DataLoader(TensorDataset(*classes(72)), 24, shuffle=True, generator=generator), **budget)
    monkeypatch.undo()
    return reference.theta(model), fit.steps


@pytest.mark.parametrize("budget", [{"steps": 30}, {"epochs": 10}, {}])
def test_nothing_follows_from_the_clock_unless_seconds_are_the_budget(budget, monkeypatch):
    (first, steps), (second, others) = (
        fit_by_clock(monkeypatch, ticks, **budget) for ticks in ([1e-3], [1e-6, 30.0, 1e-3, 2.0, 7.0])
    )
    assert steps == others and steps >= 30 and torch.equal(first, second)


@pytest.mark.parametrize("case", ["one process", "several processes", "weight decay", "chosen"])
def test_memory_and_metric_are_left_out_where_they_do_not_go(case, monkeypatch):
    settings = {"weight decay": {"weight_decay": 0.1}, "chosen": {"memory": 1, "metric": "diagonal"}}.get(case, {})
    expected = {"several processes": (0, None), "weight decay": (training.MEMORY, None), "chosen": (1, "diagonal")}
    if case == "several processes":
        monkeypatch.setattr(training, "find_group", lambda group, model: types.SimpleNamespace(size=2))
    optimizer = training.training_optimizer(network(), nn.CrossEntropyLoss(), **settings)
    assert (optimizer.memory, optimizer.metric) == expected.get(case, (training.MEMORY, training.METRIC))
