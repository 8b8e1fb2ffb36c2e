"""The experiment half: data, models, run folders and what the report reads from them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from woodbury.experiments import report
from woodbury.experiments.config import PRESETS, RunConfig
from woodbury.experiments.data import DATASETS, standardise
from woodbury.experiments.models import mlp
from woodbury.experiments.train import evaluate, train


def small_run(optimizer: str = "sgd", seed: int = 0, epochs: int = 1) -> RunConfig:
    """A run on the digits with a network that trains in a moment."""
    config = PRESETS["digits"].run("digits", optimizer, seed, epochs)
    return dataclasses.replace(config, widths=(64, 8, 10))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sgd-seed0"
    train(small_run(epochs=2), folder)
    return folder


@pytest.mark.parametrize("name", DATASETS)
def test_training_features_have_zero_mean_and_unit_variance_or_are_zero(name: str) -> None:
    data = DATASETS[name]()
    inputs = data.train_inputs.double()
    assert inputs.mean(dim=0).abs().max() < 1e-5
    deviation = inputs.std(dim=0, correction=0)
    constant = deviation == 0
    assert torch.allclose(deviation[~constant], torch.ones_like(deviation[~constant]), atol=1e-5)
    assert torch.isfinite(data.test_inputs).all()


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_has_a_preset_whose_network_fits(name: str) -> None:
    data = DATASETS[name]()
    assert PRESETS[name].widths[0] == data.train_inputs.shape[1] == data.test_inputs.shape[1]
    assert PRESETS[name].widths[-1] == data.classes
    assert data.train_targets.unique().tolist() == list(range(data.classes))


def test_digits_split_is_fixed_stratified_and_complete() -> None:
    first, second = DATASETS["digits"](), DATASETS["digits"]()
    assert torch.equal(first.train_inputs, second.train_inputs)
    assert (len(first.train_inputs), len(first.test_inputs)) == (1347, 450)
    share = torch.bincount(first.train_targets) / torch.bincount(
        torch.cat([first.train_targets, first.test_targets])
    )
    assert (share - 1347 / 1797).abs().max() < 0.01


def test_standardise_centres_a_constant_feature_without_dividing() -> None:
    train_features = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    test_features = torch.tensor([[2.0, 7.0]])
    train_out, test_out = standardise(train_features, test_features)
    assert train_out.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert test_out.tolist() == [[0.0, 2.0]]


def test_mlp_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = mlp((3, 4, 2), seed=7)
    state = torch.get_rng_state()
    second = mlp((3, 4, 2), seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, mlp((3, 4, 2), seed=8)[0].weight)
    assert [type(layer).__name__ for layer in first] == ["Linear", "Sigmoid", "Linear"]


def test_config_survives_the_file(tmp_path: Path) -> None:
    config = small_run("smw-ng", seed=3)
    config.save(tmp_path / "config.json")
    assert RunConfig.load(tmp_path / "config.json") == config
    assert config.settings["seed"] == 3
    assert {"python", "torch", "woodbury"} <= config.versions.keys()


def test_run_folder_holds_config_records_and_the_trained_model(run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "records.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert [line["step"] for line in steps] == list(range(1, 2 * math.ceil(1347 / 60) + 1))
    assert all(line["damping"] is None for line in steps)  # SGD has none, and NaN is not JSON
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)

    model = mlp(RunConfig.load(run_folder / "config.json").widths, seed=99)
    model.load_state_dict(torch.load(run_folder / "model.pt", weights_only=True))
    data = DATASETS["digits"]()
    loss, error = evaluate(model, torch.nn.CrossEntropyLoss(), data.test_inputs, data.test_targets)
    assert loss == pytest.approx(epochs[-1]["test_loss"], rel=1e-6)
    assert error == epochs[-1]["test_error"]


def test_evaluation_is_not_counted_in_the_training_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])

    def slow_evaluate(*arguments: object) -> tuple[float, float]:
        clock["now"] += 1000.0
        return 1.0, 1.0

    monkeypatch.setattr("woodbury.experiments.train.evaluate", slow_evaluate)
    train(small_run(), tmp_path / "run")
    assert report.load_run(tmp_path / "run").epochs[-1]["seconds"] == 0.0


@pytest.mark.parametrize("optimizer", ["smw-gn", "smw-ng"])
def test_the_same_seed_gives_the_same_run(tmp_path: Path, optimizer: str) -> None:
    for name in ("first", "second"):
        train(small_run(optimizer), tmp_path / name)
    first, second = (report.load_run(tmp_path / name) for name in ("first", "second"))
    assert [s["loss"] for s in first.steps] == [s["loss"] for s in second.steps]
    assert first.epochs[-1]["train_loss"] < first.epochs[0]["train_loss"]


def test_train_refuses_a_folder_that_exists(run_folder: Path) -> None:
    before = (run_folder / "records.jsonl").read_bytes()
    with pytest.raises(FileExistsError):
        train(small_run(), run_folder)
    assert (run_folder / "records.jsonl").read_bytes() == before


def write_run(folder: Path, optimizer: str, seed: int, losses: list[float], damping: float | None) -> None:
    """A run folder written by hand."""
    folder.mkdir()
    dataclasses.replace(small_run(optimizer, seed), epochs=len(losses) - 1).save(folder / "config.json")
    records = []
    for epoch, loss in enumerate(losses):
        if epoch:
            records.append({"kind": "step", "step": epoch, "damping": damping})
        records.append(
            {
                "kind": "epoch",
                "epoch": epoch,
                "step": epoch,
                "seconds": 0.5 * epoch,
                "train_loss": loss,
                "test_error": loss / 10,
            }
        )
    (folder / "records.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n")


def test_summary_is_the_median_over_seeds(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.3, 0.1, 0.2)):
        write_run(tmp_path / f"a{seed}", "smw-gn", seed, [1.0, loss], damping=0.5 + seed)
    write_run(tmp_path / "b0", "sgd", 0, [1.0, 0.7], damping=None)
    newton, sgd = report.summarise(report.load_runs(tmp_path))
    assert (newton.optimizer, newton.seeds, sgd.optimizer) == ("smw-gn", 3, "sgd")
    assert (newton.train_loss, newton.seconds, newton.damping) == (0.2, 0.5, 1.5)
    assert newton.test_error == pytest.approx(0.02)
    assert math.isnan(sgd.damping)


def test_figure_shows_every_panel_and_optimizer(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", "smw-gn", seed, [2.0, 0.5, 0.01], damping=0.5)
    # A loss of zero cannot be drawn on a logarithmic axis.
    write_run(tmp_path / "b0", "sgd", 0, [2.0, 1.0, 0.0], damping=None)
    figure = report.draw(report.load_runs(tmp_path))
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles[:5] == ["Train loss", "Train loss", "Damping", "Test error, %", "Test error, %"]
    assert [len(panel.lines) for panel in figure.axes[:5]] == [2, 2, 1, 2, 2]
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[2].get_yscale() == "log"
    png, svg = report.save(figure, tmp_path / "comparison")
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    report.save(report.draw(report.load_runs(tmp_path)), tmp_path / "comparison")
    assert svg.read_bytes() == first  # the same records give the same file
