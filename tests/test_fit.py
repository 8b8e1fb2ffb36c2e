"""woodbury.fit: one call, its limits, what it returns, and going on from where it stopped."""

import copy
import math
import sys
from itertools import groupby

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury
from test_checkpoint import network
from test_checkpoint import smooth as noisy
from woodbury.fit import Fit, solving
from woodbury.fit.pace import Pace

MSE = nn.MSELoss()


def smooth_fit(seed=0):
    torch.manual_seed(seed)
    inputs = torch.rand(40, 2, dtype=torch.float64)
    return problems.mlp(2, 30, 1).double(), (inputs, surface(inputs))


def surface(inputs):
    return torch.sin(3 * inputs[:, :1]) * inputs[:, 1:]


def draw(count):
    inputs = torch.rand(count, 1, dtype=torch.float64)
    return inputs, torch.sin(3 * inputs)


def is_loss_of(value, model, data):
    """Whether this is the loss: its residuals are differences of numbers as large as the targets."""
    condition = math.sqrt(data[1].square().mean() / value)
    rounding = bounds.rounding(len(reference.theta(model)), condition)
    return value == pytest.approx(reference.loss_of(model, data), rel=rounding, abs=0)


def test_a_fit_stops_at_the_tolerance_and_says_so(capsys):
    model, data = smooth_fit()
    fit = woodbury.fit(model, nn.MSELoss(), data, tolerance=1e-12)
    assert fit.reason == "tolerance" and fit.loss <= 1e-12 and fit.steps == len(fit.history)
    assert is_loss_of(fit.loss, model, data)
    assert str(fit).endswith("the tolerance is reached") and "the tolerance is reached" in capsys.readouterr().err
    losses = [record["loss"] for record in fit.history]
    assert losses == sorted(losses, reverse=True) and fit.samples == 40
    assert set(fit.history[0]) >= {"step", "seconds", "loss", "samples", "length", "share", "bent", "accepted"}


def test_steps_seconds_a_callback_and_ctrl_c_end_it(capsys):
    model, data = smooth_fit()
    assert woodbury.fit(model, nn.MSELoss(), data, steps=3, progress=False).steps == 3
    assert capsys.readouterr() == ("", "")
    fit = woodbury.fit(model, nn.MSELoss(), data, seconds=0.0, progress=False)
    assert fit.reason == "seconds" and fit.steps == 0
    seen = []
    stop = lambda fit: seen.append(fit.steps) or fit.steps == 2  # noqa: E731
    fit = woodbury.fit(model, nn.MSELoss(), data, progress=False, callback=stop)
    assert fit.reason == "callback" and seen == [1, 2]

    def interrupt(fit):
        if fit.steps == 4:
            raise KeyboardInterrupt

    model, data = smooth_fit()
    fit = woodbury.fit(model, nn.MSELoss(), data, progress=False, callback=interrupt)
    assert fit.reason == "interrupted" and fit.steps == 4  # what was reached is given back
    assert is_loss_of(fit.loss, model, data) and fit.loss < fit.history[0]["loss"]


@pytest.mark.parametrize("samples, inside", [(40, 1), (1100, 3)])
def test_a_fit_takes_the_threads_that_its_numbers_keep_busy_and_gives_all_back(samples, inside):
    """121 parameters: 4,840 numbers, and 133,100, for 50,000 of each thread."""
    model, seen, others = smooth_fit()[0], [], []
    inputs = torch.rand(samples, 2, dtype=torch.float64)

    def forward(model, x):
        seen.append(torch.get_num_threads())
        if len(others) == 2:
            raise ZeroDivisionError
        return model(x)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(ZeroDivisionError):
            woodbury.fit(
                model,
                MSE,
                (inputs, surface(inputs)),
                forward=forward,
                progress=False,
                callback=lambda fit: others.append(torch.get_num_threads()),
            )
        assert inside in seen and set(seen) <= {inside, 4} and others == [4, 4]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_problem_that_is_solved_is_left_when_nothing_moves(decay):
    """At the solution of the linear system, weight decay included."""
    model, inputs = nn.Linear(2, 1, bias=False).double(), torch.randn(20, 2, dtype=torch.float64)
    data = inputs, torch.randn(20, 1, dtype=torch.float64)
    fit = woodbury.fit(model, nn.MSELoss(), data, weight_decay=decay, progress=False)
    assert fit.reason == "stalled" and fit.steps < 30
    matrix = 2 / 20 * inputs.T @ inputs + decay * torch.eye(2, dtype=torch.float64)
    ridge = torch.linalg.solve(matrix, 2 / 20 * inputs.T @ data[1])
    torch.testing.assert_close(reference.theta(model), ridge.flatten(), rtol=1e-6, atol=1e-8)


def test_a_sampler_gets_fresh_samples_and_more_of_them_where_they_limit_the_steps():
    counts = []

    def counting(count):
        counts.append(count)
        inputs = torch.rand(count, 2, dtype=torch.float64)
        return inputs, surface(inputs)

    model = problems.mlp(2, 12, 1).double()  # 49 parameters: 8 samples do not determine them
    fit = woodbury.fit(model, nn.MSELoss(), counting, steps=30, samples=8, points="as drawn", progress=False)
    assert counts[:2] == [8, 8] and max(counts) == fit.samples > 8
    assert fit.samples <= 8 * sum(own.numel() for own in model.parameters())
    inputs = torch.rand(50, 2, dtype=torch.float64)
    loss = max(reference.loss_of(model, (inputs, surface(inputs))), fit.loss)
    assert loss < 1e-3 * surface(inputs).square().mean()


@pytest.mark.parametrize(
    ("size", "on_cpu", "expected"),
    [
        *[(5, True, 64), (100, True, 256), (1000, True, 1500), (9000, True, 4096)],
        *[(100, False, 800), (1000, False, 2048), (5000, False, 7500), (5461, False, 8192), (5462, False, 4096)],
    ],
)
def test_a_step_has_one_sample_and_a_half_per_parameter_at_first(size, on_cpu, expected):
    assert solving.samples_at_first(size, on_cpu) == expected


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (12, [(12, 2), (24, 2), (48, 8)]),  # up to 32, and once beyond
        (32, [(32, 8), (64, 8), (32, 8), (64, 12)]),  # a trial that does not pay, a rest, one that does
    ],
)
def test_more_samples_than_usual_stay_only_if_their_steps_gain_half_as_much_again(samples, sizes, monkeypatch):
    gains = {8: 1.0, 16: 1.4, 24: 1.0, 32: 1.6}  # before trials and after them
    monkeypatch.setattr(solving, "REST", 8)
    monkeypatch.setattr(solving.SolvingRun, "_gained", lambda self, steps: gains[self.fit.steps])
    monkeypatch.setattr(solving, "LIMITED", math.inf)  # every step seems to be limited by the samples
    usual = property(lambda self: 32, lambda self, value: None)  # as on a device
    monkeypatch.setattr(solving.SolvingRun, "usual", usual, raising=False)
    settings = {"steps": sum(steps for _, steps in sizes), "samples": samples, "points": "as drawn"}
    fit = woodbury.fit(problems.network(1, 6, 1), nn.MSELoss(), draw, progress=False, **settings)
    runs = groupby(record["samples"] for record in fit.history)
    assert [(size, len(list(steps))) for size, steps in runs] == sizes


def test_the_number_of_samples_follows_the_model():
    counts = []
    for model in (problems.network(1, 6, 1), problems.mlp(1, 100, 1).double()):
        sample = lambda count: counts.append(count) or draw(count)  # noqa: E731
        woodbury.fit(model, nn.MSELoss(), sample, steps=1, points="as drawn", progress=False)
    few = sum(own.numel() for own in problems.network(1, 6, 1).parameters())
    assert counts[0] == 8 * few < counts[-1] == round(1.5 * 301)


def test_a_seed_fixes_the_samples_and_leaves_the_global_numbers_alone():
    results = []
    for _ in range(2):
        model = problems.network(1, 6, 1)
        torch.manual_seed(len(results))  # what others draw must not matter
        state = torch.get_rng_state()
        woodbury.fit(model, nn.MSELoss(), draw, steps=3, samples=50, seed=7, progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(reference.theta(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_classifier_is_fitted_too(dtype):
    problem = problems.make("softmax", dtype)
    fit = woodbury.fit(problem.model, problem.loss, (problem.inputs, problem.targets), steps=15, progress=False)
    assert fit.loss < 1e-3


# -- what a fit gives back to look at: figure, page, metrics, callbacks ---------------------------------


def loader():
    return DataLoader(TensorDataset(*noisy()), 20)


def largest_error(outputs, targets):
    return (outputs - targets).abs().max()


METRICS = {"largest": largest_error}
KINDS = {
    "pair": (noisy(), {"steps": 6}),
    "validation": (noisy(), {"steps": 6, "validation": noisy(30, 1)}),
    "split": (noisy(), {"steps": 6, "validation": 0.2}),
    "evidence": (noisy(), {"steps": 6, "weight_decay": "evidence", "validation": noisy(30, 1)}),
    "loader": (loader(), {"epochs": 3, "validation": [noisy(7, 2), noisy(20, 1)]}),
}


def fitted(kind, model=None, **settings):
    data, own = KINDS[kind]
    settings = {"progress": False, "metrics": METRICS, **own, **settings}
    return woodbury.fit(model or network(), MSE, data, **settings)


def judged_on(kind, fit):
    """The samples that the metrics are about."""
    data, own = KINDS[kind]
    if kind == "split":
        return tuple(part[fit.split[1]] for part in data)
    batches = own.get("validation", data)
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True)) if kind == "loader" else batches


def largest_of(model, data):
    with torch.no_grad():
        return max(abs(float(model(x[None])) - float(y)) for x, y in zip(*data, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_all_samples_and_the_figure_has_the_numbers_of_the_history(kind):
    model, seen = network(), {}
    others = None if kind == "split" else judged_on(kind, None)  # there it is known at the end

    def note(fit):
        if fit.history and fit.history[-1]["step"] == fit.steps and others is not None:
            seen[fit.steps] = largest_of(model, others)
            assert fit.metrics["largest"] == fit.history[-1]["largest"]

    fit = fitted(kind, model, callback=note)
    measured = {entry["step"]: entry["largest"] for entry in fit.history}
    assert len(measured) == (3 if kind == "loader" else 6)
    assert kind == "split" or measured == pytest.approx(seen, rel=bounds.rounding(60))
    by_hand = largest_of(model, judged_on(kind, fit))
    assert fit.metrics["largest"] == pytest.approx(by_hand, rel=bounds.rounding(60))
    assert f"largest {fit.metrics['largest']:.4g}" in str(fit)
    pytest.importorskip("matplotlib")
    first, *others = fit.plot().axes
    lines, steps = {line.get_label(): line for line in first.get_lines()}, list(measured)
    for name in ("loss", "validation") if "validation" in fit.history[0] else ("loss",):
        np.testing.assert_array_equal(lines[name].get_xdata(), steps)
        np.testing.assert_array_equal(lines[name].get_ydata(), [entry[name] for entry in fit.history])
    assert ("validation" in lines) == ("validation" in fit.history[0]) and first.get_yscale() == "log"
    assert list(lines[f"best step, {fit.best_step}"].get_xdata()) == [fit.best_step] * 2
    shown = {place.get_title(loc="left"): place.get_lines()[0].get_ydata() for place in others}
    np.testing.assert_array_equal(shown["largest"], list(measured.values()))
    assert ("rate" in shown) == (kind == "loader") and first.get_title(loc="left") == str(fit)
    lengths = {entry.get("length") for entry in fit.history}
    assert ("length of the step" in shown) == (len(lengths) > 1)


def test_metrics_and_validation_are_shown(capsys):
    fitted("loader", progress=True)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "largest" in first and "largest" in last and "validation" in last


def test_an_epoch_callback_comes_after_every_epoch_and_can_stop():
    steps, epochs = [], []

    def on_epoch(fit):
        epochs.append((fit.steps, fit.history[-1]["epoch"], "validation" in fit.history[-1]))
        return len(epochs) == 2

    fit = fitted("loader", epochs=9, callback=lambda fit: steps.append(fit.steps), epoch_callback=on_epoch)
    assert fit.reason == "callback" and steps == [1, 2, 3, 4, 5, 6] and epochs == [(3, 1, True), (6, 2, True)]
    assert fitted("loader", epochs=9, callback=lambda fit: fit.steps == 2, epoch_callback=print).steps == 2


# -- figure and page ------------------------------------------------------------------------------------------


def test_samples_are_drawn_where_they_change_and_losses_below_zero_have_a_linear_axis():
    pytest.importorskip("matplotlib")
    entries = [{"step": step, "loss": 1.0 - step, "samples": 8 * step} for step in range(1, 4)]
    first, second = Fit(history=entries, best_step=3).plot().axes
    assert first.get_yscale() == "linear" and second.get_title(loc="left") == "samples per step"
    assert list(second.get_lines()[0].get_ydata()) == [8, 16, 24]


@pytest.mark.parametrize("history", [[], [{"step": 1, "loss": float("nan"), "samples": 3}]])
def test_a_fit_without_numbers_is_drawn_too(history):
    pytest.importorskip("matplotlib")
    assert Fit(history=history).plot().axes


def test_a_notebook_shows_a_page_with_or_without_matplotlib(monkeypatch):
    pytest.importorskip("matplotlib")
    fit = fitted("pair", metrics={"a < b": largest_error})
    page = fit._repr_html_()
    assert page.startswith("<p>loss ") and "a &lt; b" in page and 'src="data:image/png;base64,' in page
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert fit._repr_html_() == page.partition("<img")[0]
    with pytest.raises(ImportError, match="matplotlib"):
        fit.plot()


@pytest.mark.parametrize("validation", [None, 0.2])
def test_where_no_step_on_everything_fits_in_the_time_steps_take_a_part(validation, monkeypatch):
    monkeypatch.setattr(Pace, "operations_per_second", lambda self: 1e9)  # of whatever machine
    torch.manual_seed(0)
    inputs = torch.randn(2000, 10)
    data = inputs, torch.sin(inputs[:, :1]) + inputs[:, 1:2]
    model = problems.mlp(10, 24, 24, 1)
    with pytest.warns(UserWarning, match="a step on all .* samples would take about"):
        fit = woodbury.fit(model, nn.MSELoss(), data, steps=12, seconds=9, validation=validation, progress=False)
    assert fit.steps and fit.samples == fit.history[-1]["samples"] < 500
    assert fit.loss < 0.9 * data[1].square().mean()
    if validation is None:
        assert fit.loss == pytest.approx(reference.loss_of(model, data), rel=1e-4)
        state = fit.state_dict()
        with pytest.warns(UserWarning, match="would take about"):
            more = woodbury.fit(model, nn.MSELoss(), data, steps=15, seconds=fit.seconds + 3, resume=state)
        assert more.steps > fit.steps and more.loss <= fit.loss
    with pytest.warns(UserWarning, match="'evidence' needs 8 of them and more: seconds=0.001 are too few"):
        woodbury.fit(model, nn.MSELoss(), (inputs[:200], data[1][:200]), weight_decay="evidence", seconds=0.001)


def test_seconds_that_suffice_change_nothing(recwarn):
    losses = []
    for seconds in (None, 1e4):
        model, data = smooth_fit()
        fit = woodbury.fit(model, nn.MSELoss(), data, steps=4, seconds=seconds, progress=False)
        losses.append([record["loss"] for record in fit.history])
    assert losses[0] == losses[1] and not recwarn


def some_batches(inputs, targets):
    return DataLoader(TensorDataset(inputs, targets), 16)


def some_draws(inputs, targets):
    return lambda count: (inputs.repeat(count, 1)[:count], targets.repeat(count, 1)[:count])


@pytest.mark.parametrize("of", [some_batches, lambda *pair: pair, some_draws])
def test_an_error_of_types_blames_the_data_that_has_them_and_says_what_to_write(of):
    good, whole = (torch.rand(48, 2), torch.rand(48, 1)), torch.randint(0, 3, (48, 2))
    network, write = problems.mlp(2, 5, 1), r"inputs of torch.int64 .* write inputs.to\(torch.float32\)"
    for bad, validation, blamed in [
        (good, (whole, good[1]), "the validation data does not go"),
        ((whole, good[1]), (whole, good[1]), "the data does not go|term 'samples'"),
    ]:
        with pytest.raises(ValueError, match=f"({blamed}).*{write}"):
            woodbury.fit(network, nn.MSELoss(), of(*bad), validation=validation, steps=1)
    labels = (good[1] > 0.5).long()  # 0 and 1 of another type
    assert woodbury.fit(network, nn.BCEWithLogitsLoss(), of(good[0], labels), steps=1).steps == 1
    with pytest.warns(UserWarning, match="data of torch.float16 is converted to torch.float32"):
        woodbury.fit(network, nn.MSELoss(), of(good[0].half(), good[1]), steps=1)


def test_what_cannot_be_fitted_is_said_in_words():
    inputs, targets = torch.rand(30, 2), torch.rand(30, 1)
    words, evidence = np.array(["a", "b"] * 15), {"weight_decay": "evidence"}
    plain, classes, entropy = problems.mlp(2, 5, 1), problems.mlp(2, 5, 2), nn.CrossEntropyLoss()
    frozen, half = copy.deepcopy(plain).requires_grad_(False), copy.deepcopy(plain).half()
    for model, loss, data, settings, message in [
        (frozen, MSE, (inputs, targets), evidence, "fit: the model has no trainable parameter"),
        (half, MSE, (inputs, targets), {}, r"fit: torch.float16 .* use model.float\(\)"),
        (classes, entropy, (inputs, words), {}, "must be numbers .*return_inverse"),
        (classes, entropy, (inputs, words.tolist()), {}, "must be numbers .*return_inverse"),
        (plain, MSE, (inputs[:1], targets[:1]), evidence, "one sample alone"),
        (plain, MSE, draw, {"validation": (inputs[:0], targets[:0])}, "fit: validation: empty batch"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            woodbury.fit(model, loss, data, steps=1, **settings)


def test_arrays_are_taken_from_loaders_and_samplers():
    """From pairs: `test_noise.py`; whole numbers and truths as targets: `test_losses.py`."""
    inputs, labels = np.random.default_rng(0).random((30, 2), dtype=np.float32), np.arange(30, dtype=np.int32) % 3
    batches = [(inputs[:15], labels[:15]), (inputs[15:], labels[15:])]
    assert woodbury.fit(problems.mlp(2, 5, 3), nn.CrossEntropyLoss(), batches, steps=2).steps == 2
    drawn = lambda count: (np.ones((count, 2), np.float32), np.zeros((count, 1)))  # noqa: E731
    assert woodbury.fit(problems.mlp(2, 5, 1), MSE, drawn, steps=1).steps == 1
    truths = torch.rand(30, 1) > 0.5
    assert woodbury.fit(problems.mlp(2, 5, 1), MSE, (inputs, truths), weight_decay="evidence", steps=9).noise > 0
