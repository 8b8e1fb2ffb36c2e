"""woodbury.fit with a loader: training in mini-batches, its budget, validation data, and going on."""

import itertools
import math
import time
import types
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury
from checks import silence
from woodbury.fit import growth, training
from woodbury.fit.growth import Growth, gradients_of_halves
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


@pytest.mark.parametrize("validation", [None, classes(30, 1)])
def test_the_best_epoch_comes_back_where_the_loss_rose_and_the_run_stopped_inside_one(validation):
    data, model = classes(), network()

    def spoil(fit):  # after the first epoch
        if fit.steps == 7:
            with torch.no_grad():
                model[2].weight.mul_(-30)
        return fit.steps == 8

    fit, rounding = fitted(model, batches(data), validation=validation, callback=spoil), {"dtype": torch.float32}
    assert fit.best_step == 6 and fit.loss == pytest.approx(
        loss_of(model, data), rel=bounds.rounding(120, **rounding)
    )
    if validation is None:
        assert fit.loss < fit.history[0]["loss"]
    else:
        judged = loss_of(model, validation), fit.history[0]["validation"]
        assert [fit.validation] * 2 == pytest.approx(judged, rel=bounds.rounding(30, **rounding))


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


# -- several batches of a loader in one step ------------------------------------------------------------


def test_halves_of_a_batch_show_the_variance_of_the_gradient():
    """Over all ways to halve N samples, the mean of |g_a - g_b|^2 / 4 is tr S / N, S their covariance."""
    model = network().double()
    inputs, targets = (own[:6] for own in classes())
    inputs = inputs.double()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    differences, sums = [], []
    for chosen in combinations(range(6), 3):
        order = torch.tensor([*chosen, *(set(range(6)) - set(chosen))])
        first, second = gradients_of_halves(optimizer, (inputs[order], targets[order]))
        differences.append((first - second).square().sum() / 4)
        sums.append((first + second).square().sum() / 4)
    samples = reference.per_sample(model, nn.CrossEntropyLoss(), inputs, targets)
    rows = torch.stack([J.T @ r for J, r, _ in samples])
    mean = rows.mean(0)
    covariance = (rows - mean).square().sum() / 5
    bound = bounds.rounding(rows.numel()) * rows.square().sum()  # differences and sums may cancel
    assert abs(torch.stack(differences).mean() - covariance / 6) <= bound
    assert (torch.stack(sums) - mean.square().sum()).abs().max() <= bound


def test_halves_leave_no_trace_and_one_sample_has_none():
    model = nn.Sequential(nn.Linear(2, 8), problems.Counting(nn.Identity()), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    before = [own.clone() for own in model.state_dict().values()]
    random = torch.get_rng_state()
    assert gradients_of_halves(optimizer, classes(9)) is not None and torch.equal(random, torch.get_rng_state())
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert gradients_of_halves(optimizer, classes(1)) is None


def grown(monkeypatch, seconds, noise, steps):
    """The numbers of batches of so many steps: seconds by their number, a share of noise."""
    first, second = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])  # orthogonal
    halves = first + noise**0.5 * second, first - noise**0.5 * second
    monkeypatch.setattr(growth, "gradients_of_halves", lambda optimizer, batch: halves)
    rule, counts = Growth(woodbury.GaussNewton(network(), nn.CrossEntropyLoss())), []
    for _ in range(steps):
        counts.append(rule.batches)
        rule.note(seconds(rule.batches), classes(8), rule.batches)
    return counts, rule


@pytest.mark.parametrize(
    "seconds, noise, expected",
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, 0.6, [1] * 5 + [2] * 5 + [4] * 30),
        ({1: 1.0}, 0.4, [1] * 40),
        ({1: 1.0, 2: 1.4, 4: 2.2}, 0.9, [1] * 5 + [2] * 5 + [4] * 5 + [2] * 25),  # a step gets too long
        ({1: 1.0, 2: 2.0}, 0.9, [1] * 5 + [2] * 5 + [1] * 10),
    ],
)
def test_batches_double_where_noise_is_more_than_half(seconds, noise, expected, monkeypatch):
    counts, rule = grown(monkeypatch, seconds.__getitem__, noise, len(expected))
    assert counts == expected and rule.is_over == (noise > 0.5)


def test_without_noise_it_is_looked_at_ever_more_rarely(monkeypatch):
    looks = []
    _, rule = grown(monkeypatch, lambda count: 1.0, 0.1, 1)
    monkeypatch.setattr(growth, "gradients_of_halves", lambda optimizer, batch: looks.append(1))
    for _ in range(1000):
        rule.note(1.0, classes(8), 1)
    assert 10 <= len(looks) <= 40


def test_a_step_of_two_batches_is_that_of_a_batch_of_both(monkeypatch):
    data, first, second = classes(), network(), network()
    settings = {"epochs": 3, "curvature_samples": 0.5, "memory": 1}
    with monkeypatch.context() as patched:
        patched.setattr(training.TrainingRun, "batches_per_step", 2)
        one = fitted(first, batches(data, 10), **settings)
    other = fitted(second, batches(data, 20), **settings)
    assert one.steps == other.steps == 18 and one.samples == 20
    assert torch.equal(reference.theta(first), reference.theta(second))
    assert [record["loss"] for record in one.history] == [record["loss"] for record in other.history]


@pytest.mark.parametrize(
    "said, together, ends",
    [(None, 1, [3, 8, 10, 14]), (2, 1, [3, 8, 10, 14]), (9, 1, [3, 8, 10, 14]), (None, 2, [2, 5, 6, 8])],
)
def test_an_epoch_lasts_as_long_as_there_are_batches(said, together, ends, monkeypatch):
    """For streams without a length, and loaders that say a wrong one; a step ends where its epoch does."""

    class Stream:
        lengths = iter([3, 5, 2, 4, 4])  # the last one for the loss at the end

        def __iter__(self):
            return iter(batches(classes(10 * next(self.lengths)), 10))

    if said is not None:
        Stream.__len__ = lambda self: said
    monkeypatch.setattr(training.TrainingRun, "batches_per_step", together)
    fit = fitted(network(), Stream(), epochs=4)
    assert [entry["step"] for entry in fit.history] == ends


def test_batches_that_do_not_fit_together_are_steps_of_their_own():
    lengths = [3, 3, 5, 5, 5, 3]
    sequences = [({"x": torch.zeros(2, length), "scale": 2.0}, torch.zeros(2)) for length in lengths]
    source = MiniBatches(sequences)
    seen = []
    while not (seen and source.is_over):
        (inputs, targets), count = source.next(4)
        assert len(inputs["x"]) == len(targets) == 2 * count and inputs["scale"] == 2.0
        seen.append((count, inputs["x"].shape[1]))
    assert seen == [(2, 3), (3, 5), (1, 3)]
    (inputs, targets), count = MiniBatches([(torch.ones(2, 3), None), (torch.zeros(1, 3), None)]).next(2)
    assert targets is None and count == 2 and inputs.shape == (3, 3)


def run_by(limits, loader=None, loss=None, **settings):
    model, loss = network(), loss or nn.CrossEntropyLoss()
    optimizer = training.training_optimizer(model, loss, training.is_by_time(limits, model), **settings)
    source = MiniBatches(batches(classes()) if loader is None else loader)
    return training.TrainingRun(optimizer, source, limits=limits)


def test_seconds_alone_choose_other_settings(monkeypatch):
    run = run_by(Limits(seconds=10))
    assert run.by_time and run.growth.most == growth.MOST_BATCHES and run.optimizer.memory == 0
    assert run.rates == [training.RATE_BY_TIME]
    assert run_by(Limits(seconds=10), loader=batches(classes(), 60)).growth.most == 2  # an epoch has no more
    assert run_by(Limits(seconds=10), loss=nn.CrossEntropyLoss(reduction="sum")).growth is None
    for limits in (Limits(seconds=10, epochs=3), Limits(seconds=10, steps=3), Limits(epochs=3)):
        run = run_by(limits)
        assert not run.by_time and run.growth is None and run.batches_per_step == 1
        assert run.optimizer.memory == training.MEMORY and run.rates == [training.RATE]
    assert run_by(Limits(seconds=10), memory=2).optimizer.memory == 2
    monkeypatch.setattr(training, "find_group", lambda group, model: types.SimpleNamespace(size=2))
    run = run_by(Limits(seconds=10))  # several processes, which must not grow apart
    assert run.growth is None and not run.by_time and run.rates == [training.RATE]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.2), (0.05, 0.6), (0.1, 1.0), (0.75, 1.0)])
def test_the_rate_rises_over_the_first_tenth_of_the_time(share, expected):
    run = run_by(Limits(seconds=100))
    run.fit.seconds = 100 * share
    run.advance()
    rate = run.optimizer.param_groups[0]["lr"]
    expected *= training.RATE_BY_TIME * (1 - share) ** 0.5
    assert rate == pytest.approx(expected, rel=bounds.rounding(1))


def test_seconds_are_kept_and_the_number_of_batches_goes_on():
    model = network()
    first = fitted(model, batches(classes()), seconds=600, callback=lambda fit: len(fit.history) >= 10)
    assert first.reason == "callback" and first.history[-1]["loss"] < first.history[0]["loss"]
    state = first.state_dict()
    state["batches_per_step"] = 4
    again = fitted(model, batches(classes()), seconds=first.seconds + 0.05, resume=state)
    assert again.reason == "seconds" and again.seconds >= first.seconds + 0.05
    assert again.samples >= 40  # of 120, in sixes: four of them, or the two at the end of an epoch
