"""The experiment half: configurations, presets, run folders, and runs that are interrupted and go on."""

import dataclasses
import math
import os
import signal
import time

import pytest
import torch

pytest.importorskip("sklearn")

import processes
from fuzz.files import DATA, stop_after, tiny_config
from run_folders import assert_same_end, records_of
from woodbury._process import stop_on_signal
from woodbury.experiments import train as training
from woodbury.experiments.data import DATASETS
from woodbury.experiments.presets import PAPER, PRESETS, full_settings
from woodbury.experiments.train import InterruptedRunError, evaluate, is_complete, mlp, train
from woodbury.optimizers import OPTIMIZERS
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.runs.config import RunConfig

FILES = {"config.json", "records.jsonl", "model.pt", "complete"}  # of a complete run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sgd"
    train(tiny_config("sgd"), folder, data=DATA)
    return folder


# -- configurations and presets ---------------------------------------------------------------------------------


def test_paper_presets_are_those_of_section_7():
    """Networks, batch sizes, rates, epochs and Levenberg-Marquardt constants, written out once more."""
    rule = {"initial": 1.0, "boost": 1.01, "drop": 0.99, "threshold": 0.25, "floor": 0.001}
    rule |= {"relative": False, "forgetting": 0.999}
    second = ("smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac")
    webspam = {"sgd": 0.4, "hf": 0.05, "smw-gn": 0.05, "smw-ng": 0.1, "smw-ng-bd": 0.1, "kfac": 0.1}
    expected = {
        "mnist": ((784, 500, 10), 60, 30, 10, dict.fromkeys(("sgd", *second), 0.1)),
        "cifar10": ((3072, 400, 400, 10), 100, 50, 10, dict.fromkeys(("sgd", *second), 0.01)),
        "webspam": ((254, 400, 400, 1), 60, 30, 1, webspam),
        "covtype": ((54, 400, 400, 1), 60, 30, 1, webspam),
    }
    assert PAPER.keys() == expected.keys() and PRESETS.keys() == DATASETS.keys()
    for name, (widths, batch, part, epochs, rates) in expected.items():
        for optimizer, rate in rates.items():
            config = PAPER[name].config(name, optimizer, seed=0)
            assert (config.widths, config.batch_size, config.epochs) == (widths, batch, epochs)
            assert config.settings["lr"] == rate
            if optimizer != "sgd":
                assert config.settings["curvature_samples"] == part
                assert config.settings["damping"] == {"LevenbergMarquardt": rule}
    assert PAPER["cifar10"].config("cifar10", "kfac", 0).settings["refresh"] == 20
    assert PAPER["mnist"].config("mnist", "kfac", 0).settings["refresh"] == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_configuration_has_every_setting_and_after_reloading_builds_the_optimizer(optimizer, tmp_path):
    config = PRESETS["digits"].config("digits", optimizer, seed=3)
    config.save(tmp_path)
    loaded = RunConfig.load(tmp_path)
    loaded.check_same(config, tmp_path)
    assert loaded.versions == config.versions and loaded.machine == config.machine
    assert {"python", "torch", "woodbury"} <= config.versions.keys()
    assert config.settings.keys() == full_settings(optimizer, {}).keys() > {"lr", "weight_decay"}
    model = mlp((2, 2), seed=0)
    rebuilt = OPTIMIZERS[optimizer](model, torch.nn.CrossEntropyLoss(), **loaded.optimizer_settings())
    assert rebuilt.param_groups[0]["lr"] == config.settings["lr"]
    if "damping" in config.settings:
        assert config.settings["seed"] == 3 and rebuilt.damping == LevenbergMarquardt()


def test_mlp_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = mlp((3, 4, 2), seed=7)
    state = torch.get_rng_state()
    second = mlp((3, 4, 2), seed=7)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, mlp((3, 4, 2), seed=8)[0].weight)
    assert [type(layer).__name__ for layer in first] == ["Linear", "Sigmoid", "Linear"]


# -- a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 4])
def test_evaluation_in_parts_equals_evaluation_at_once(outputs, monkeypatch):
    model, inputs = mlp((5, outputs), seed=0), torch.randn(23, 5)
    logits = model(inputs).detach()
    if outputs == 1:
        targets, loss = torch.randint(2, (23, 1)).float(), torch.nn.BCEWithLogitsLoss()
        wrong = ((torch.sigmoid(logits) > 0.5).float() != targets).float().mean()
    else:
        targets, loss = torch.randint(outputs, (23,)), torch.nn.CrossEntropyLoss()
        wrong = (logits.argmax(1) != targets).float().mean()
    monkeypatch.setattr(training, "_EVALUATION_SAMPLES", 7)
    value, error = evaluate(model, loss, inputs, targets)
    assert value == pytest.approx(loss(logits, targets).item(), rel=1e-6)
    assert error == pytest.approx(wrong.item())


def test_evaluations_are_spread_over_an_epoch_and_not_counted_in_the_training_clock(tmp_path, monkeypatch):
    clock = {"now": 0.0}

    def slow_evaluate(*arguments):
        clock["now"] += 1000.0
        return 1.0, 1.0

    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr(training, "evaluate", slow_evaluate)
    train(dataclasses.replace(tiny_config("sgd"), epochs=2, evaluations=2), tmp_path / "run", data=DATA)
    records = records_of(tmp_path / "run", "epoch")
    assert [record["epoch"] for record in records] == [0, 0.4, 1, 1.4, 2]  # of five steps the second and the last
    assert clock["now"] == 10_000 and records[-1]["seconds"] == 0.0


def test_a_run_whose_loss_is_not_finite_ends_there_and_records_it(tmp_path, monkeypatch):
    model = mlp((6, 4, 3), seed=0)
    torch.nn.init.constant_(model[0].weight, math.nan)
    monkeypatch.setattr(training, "mlp", lambda widths, seed: model)
    train(tiny_config("smw-ng"), tmp_path / "run", data=DATA)
    assert is_complete(tmp_path / "run") and records_of(tmp_path / "run", "step") == []
    assert records_of(tmp_path / "run", "epoch")[-1]["train_loss"] is None


# -- a run that is interrupted ----------------------------------------------------------------------------------


# a whole number as damping becomes a fraction on the way
SETTINGS = {
    "kfac": {"refresh": 3},
    "smw-gn": {"damping": {"LevenbergMarquardt": {"initial": 10}}},
    "smw-ng": {"damping": {"Constant": {"initial": 2}}},
    "hf": {"damping": 3},
}


@pytest.mark.parametrize(
    "optimizer, dtype", [(name, ("float32", "float64")[index % 2]) for index, name in enumerate(OPTIMIZERS)]
)
def test_every_optimizer_trains_and_an_interrupted_run_ends_like_one_without_a_break(optimizer, dtype, tmp_path):
    config = dataclasses.replace(tiny_config(optimizer, **SETTINGS.get(optimizer, {})), dtype=dtype)
    train(config, tmp_path / "whole", data=DATA)
    # 5 steps per epoch: stopped in the middle of the first epoch, at its end, and in the middle of the third
    for steps in (2, 3, 7):
        with pytest.raises(InterruptedRunError):
            train(config, tmp_path / "cut", data=DATA, resume=True, stop=stop_after(steps))
        assert not is_complete(tmp_path / "cut")
    assert len(records_of(tmp_path / "cut", "step")) == 12
    train(config, tmp_path / "cut", data=DATA, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    assert {path.name for path in (tmp_path / "cut").iterdir()} == FILES
    seconds = [record["seconds"] for record in records_of(tmp_path / "cut", "step")]
    assert seconds == sorted(seconds)  # the clock went on where it was
    epochs = records_of(tmp_path / "cut", "epoch")
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"] and [line["epoch"] for line in epochs] == [*range(5)]
    weights = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert all(value.dtype is getattr(torch, dtype) for value in weights.values())
    model = mlp(RunConfig.load(tmp_path / "cut").widths, seed=99).to(getattr(torch, dtype))
    model.load_state_dict(weights)
    inputs = DATA.test_inputs.to(getattr(torch, dtype))
    loss, error = evaluate(model, torch.nn.CrossEntropyLoss(), inputs, DATA.test_targets)
    assert loss == pytest.approx(epochs[-1]["test_loss"], rel=1e-6) and error == epochs[-1]["test_error"]
    if optimizer == "sgd":  # it has no damping, and NaN is not JSON
        assert all(line["damping"] is None for line in records_of(tmp_path / "cut", "step"))


def train_until_killed(whole, cut):
    def progress(step, *more):
        if step == 11:
            training.write_whole = lambda path, content: None
        if step == 13:
            os.kill(os.getpid(), signal.SIGKILL)

    training.CHECKPOINT_SECONDS = 0.0
    train(RunConfig.load(whole), cut, progress, data=DATA)


def test_a_run_killed_in_the_middle_of_an_epoch_resumes_to_the_same_parameters(tmp_path):
    """Killed after step 13 of 20, with the checkpoint of step 10."""
    config = tiny_config("kfac")  # the one with most state
    train(config, tmp_path / "whole", data=DATA)
    cut = tmp_path / "cut"
    killed = processes.run_alone(train_until_killed, tmp_path / "whole", cut)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(records_of(cut, "step")) == 13 and not is_complete(cut) and (cut / "checkpoint.pt").exists()
    with (cut / "records.jsonl").open("ab") as records_file:
        records_file.write(b'{"kind": "step", "epo')  # a line cut in two by the kill
    (cut / ".unfinished.pt").write_bytes(b"half a checkpoint")
    train(config, cut, data=DATA, resume=True)
    assert_same_end(tmp_path / "whole", cut)
    (cut / "checkpoint.pt").write_bytes(b"killed just before it was deleted")
    train(config, cut, data=DATA, resume=True)
    assert {path.name for path in cut.iterdir()} == FILES


def test_a_complete_run_is_left_alone(run_folder):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_folder.iterdir()}
    train(tiny_config("sgd"), run_folder, data=DATA, resume=True)
    with pytest.raises(FileExistsError):
        train(tiny_config("sgd"), run_folder, data=DATA)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_folder.iterdir()} == before


def test_a_signal_does_not_cut_a_step_in_two():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background starts without it
    with stop_on_signal(signal.SIGINT) as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):  # the second time it acts at once
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
