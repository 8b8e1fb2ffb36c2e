"""Several batches of a loader in one step: how many, by the noise of the gradient and the time of a step."""

import types
from itertools import combinations

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from test_training import batches, classes, fitted, network
from woodbury.fit import growth, training
from woodbury.fit.growth import Growth, gradients_of_halves
from woodbury.fit.limits import Limits
from woodbury.fit.sources import MiniBatches


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
