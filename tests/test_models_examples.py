"""The examples that train a network, in a small form: the loss falls and the figure is written.

And the scripts for loops that users have already run as they are printed.
"""

import time

import pytest
import torch

pytest.importorskip("matplotlib")

import cnn
import language_model
import precision


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer points and settings; the number of threads, which the examples set to one, is restored."""
    for module, table, last in ((cnn, "METHODS", 2), (language_model, "METHODS", 3), (precision, "RIVALS", 3)):
        monkeypatch.setattr(module, "POINTS", 2, raising=False)  # measuring would take longer than training
        methods = getattr(module, table)
        fewer = {method: dict(list(settings.items())[1:last]) for method, settings in methods.items()}
        monkeypatch.setattr(module, table, fewer)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def first_and_last(runs):
    """The loss at the start and at the end of every run."""
    return [(run.curve[0][2], run.curve[-1][2]) for run in runs]


def test_cnn_learns_the_digits_with_every_method(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.delenv("WOODBURY_DATA", raising=False)
    figure = tmp_path / "cnn.png"
    best = cnn.main(["--epochs", "1", "--seeds", "1", "--out", str(figure)])
    assert len(best) == 4
    for label, runs in best.items():
        assert all(last < 0.5 * first for first, last in first_and_last(runs)), label
    assert figure.stat().st_size > 0


def test_language_model_learns_with_both_methods(tmp_path, capsys):
    figure = tmp_path / "language_model.png"
    sizes = ["--context", "16", "--width", "16", "--layers", "1", "--batch", "8", "--steps", "15"]
    best = language_model.main([*sizes, "--seeds", "1", "--out", str(figure)])
    assert len(best) == 2
    for label, runs in best.items():
        assert all(last < 0.9 * first for first, last in first_and_last(runs)), label
    assert capsys.readouterr().out.count("def ") >= 2  # both texts start with it
    assert figure.stat().st_size > 0


def test_precision_draws_the_best_setting_of_every_method(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # other programs do not shorten the run
    figure = tmp_path / "precision.png"
    best = precision.main(["--seconds", "0.6", "--seeds", "1", "--out", str(figure)])
    assert len(best) == 3 and all(curve[-1][1] < curve[0][1] for (curve,) in best.values())
    assert "woodbury.fit           seed 100: 1e-06 at" in capsys.readouterr().out and figure.stat().st_size > 0


def test_the_unchanged_loop_learns():
    pytest.importorskip("sklearn")
    import unchanged_loop

    assert unchanged_loop.main(epochs=2) > 0.85


def test_the_closure_learns():
    import closure

    assert closure.main(steps=20) < 0.25  # a constant has 0.4


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_accelerate_learns():
    pytest.importorskip("sklearn")
    accelerate = pytest.importorskip("accelerate")
    import accelerate_digits

    try:
        assert accelerate_digits.main(epochs=2) < 1.0
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
