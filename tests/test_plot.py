"""What a fit gives back to look at: figure, page, metrics, callbacks."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import woodbury
from test_checkpoint import network
from test_checkpoint import smooth as noisy
from woodbury.fit import Fit

MSE = nn.MSELoss()


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
