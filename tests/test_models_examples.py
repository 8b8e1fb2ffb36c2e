"""The examples that train a network, in a small form: the loss falls and the figure is written."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    """The module of an example; it is not part of the package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    module.POINTS = 2  # measuring would take longer than training
    for settings in module.METHODS.values():
        del settings[next(iter(settings))]  # two to choose from are enough
    return module


@pytest.fixture(autouse=True)
def kept_threads():
    """The examples run on one thread; the other tests keep what they had."""
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
    best = load("cnn").main(["--epochs", "1", "--seeds", "1", "--out", str(figure)])
    assert len(best) == 4
    for label, runs in best.items():
        assert all(last < 0.5 * first for first, last in first_and_last(runs)), label
    assert figure.stat().st_size > 0


def test_language_model_learns_with_both_methods(tmp_path, capsys):
    figure = tmp_path / "language_model.png"
    sizes = ["--context", "16", "--width", "16", "--layers", "1", "--batch", "8", "--steps", "25"]
    best = load("language_model").main([*sizes, "--seeds", "1", "--out", str(figure)])
    assert len(best) == 2
    for label, runs in best.items():
        assert all(last < 0.9 * first for first, last in first_and_last(runs)), label
    assert capsys.readouterr().out.count("def ") >= 2  # both go on with this beginning
    assert figure.stat().st_size > 0


def test_language_model_gives_every_position_its_own_past_only():
    language_model = load("language_model")
    model = language_model.LanguageModel(characters=11, context=8, width=8, layers=2)
    indices = torch.randint(11, (3, 8))
    changed = indices.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    outputs = model(indices)
    assert outputs.shape == (3, 11, 8)
    torch.testing.assert_close(model(changed)[..., :5], outputs[..., :5])
