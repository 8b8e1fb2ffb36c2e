"""The command line, end to end."""

import functools
import os
import platform
import resource
import runpy
import signal
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import processes
import woodbury
from run_folders import assert_one_line, invoke
from woodbury import cli
from woodbury.experiments import train as training
from woodbury.experiments.data import DATASETS, Dataset, load_dataset
from woodbury.experiments.presets import PAPER
from woodbury.experiments.train import is_complete
from woodbury.optimizers import OPTIMIZERS
from woodbury.runs import report
from woodbury.runs.config import RunConfig

REPORT = {"report.html", "digits.png"}
WHOLE = load_dataset("digits")
SPLITS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@pytest.fixture
def no_report(monkeypatch):
    """Leaves out the figures, which take longer than short runs."""
    monkeypatch.setattr(cli, "_report", lambda paths, folder: None)


@functools.cache
def few_digits(files=None):
    """Digits, four batches of them."""
    return Dataset(*(getattr(WHOLE, name)[:240] for name in SPLITS), classes=10)


@pytest.fixture(autouse=True)
def _few_digits(monkeypatch):
    """And no data folder."""
    monkeypatch.setitem(DATASETS, "digits", few_digits)
    monkeypatch.delenv("WOODBURY_DATA", raising=False)


def test_compare_trains_prints_a_table_and_leaves_a_report_and_runs(tmp_path):
    names = ["smw-gn", "sgd"]
    arguments = ["--optimizers", "smw-gn,sgd", "--seeds", 2, "--epochs", 1, "--out", tmp_path]
    result = invoke("compare", "digits", *arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "digits-1"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        f"{name}-seed{seed}" for name in names for seed in range(2)
    }
    assert all(is_complete(run) for run in folder.glob("*-seed*"))
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir() if path.is_file()} == REPORT
    assert "smw-gn" in (folder / "report.html").read_text()
    for word in [*names, "train loss", "test error", "seconds", "damping", "epochs", "report.html"]:
        assert word in result.output


@pytest.mark.parametrize("preset", PAPER)
def test_reproduce_runs_the_methods_of_the_paper(preset, no_report, tmp_path, monkeypatch):
    """On one batch of random samples of the shape of the data; all six where a network is small."""
    features, *_, outputs = widths = PAPER[preset].widths
    inputs, targets = torch.randn(60, features), torch.randint(max(2, outputs), (60,))
    targets = targets.float().unsqueeze(1) if outputs == 1 else targets
    data = Dataset(inputs, targets, inputs, targets, max(2, outputs))
    monkeypatch.setitem(DATASETS, preset, lambda files: data)
    methods, chosen = ["smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac", "sgd"], []
    if preset != "covtype":
        methods, chosen = ["smw-ng"], ["--optimizers", "smw-ng"]
    result = invoke("reproduce", preset, "--epochs", 1, "--out", tmp_path, *chosen)
    assert result.exit_code == 0, result.output
    folder = tmp_path / f"{preset}-1"
    assert {path.name for path in folder.iterdir()} == {f"{method}-seed0" for method in methods}
    for run in folder.iterdir():
        config = RunConfig.load(run)
        assert (config.dataset, config.widths) == (preset, widths) and is_complete(run)


def test_train_takes_settings_overwrites_nothing_and_report_reads_several_folders(tmp_path, monkeypatch):
    for rate in (0.1, 0.3):
        with monkeypatch.context() as patch:
            patch.setattr(cli, "_report", lambda paths, folder: None)
            result = invoke(
                *("train", "digits", "--optimizer", "smw-ng", "--epochs", 1, "--set", f"lr={rate}", "--seed", 4),
                *("--batch-size", 100, "--set", "gram_dtype=null", "--set", "damping.initial=10"),
                *("--dtype", "float64", "--out", tmp_path / "runs"),
            )
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-1", "digits-2"]
    first, second = (tmp_path / "runs" / name / "smw-ng-seed4" for name in ("digits-1", "digits-2"))
    for run, rate in ((first, 0.1), (second, 0.3)):
        config = RunConfig.load(run)
        assert (config.settings["lr"], config.settings["seed"]) == (rate, 4)
        assert config.settings["damping"]["LevenbergMarquardt"]["initial"] == 10
        assert (config.batch_size, config.dtype, config.device) == (100, "float64", "cpu")
    result = invoke("report", first.parent, second, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "both").iterdir()} == REPORT
    assert "lr=0.1" in result.output and "lr=0.3" in result.output


# -- interrupting and going on -----------------------------------------------------------------------------------


def command_with_a_signal(*arguments):
    """Ctrl-C arrives in the third step of smw-gn."""
    DATASETS["digits"] = few_digits
    report.draw, report.image = (lambda runs: None), (lambda figure: b"")  # which take longer than the runs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background starts without it
    step = training._Run._step

    def step_with_a_signal(run, *batch):
        if (run.config.optimizer, run.step) == ("smw-gn", 2):
            os.kill(os.getpid(), signal.SIGINT)
        return step(run, *batch)

    training._Run._step = step_with_a_signal  # type: ignore[method-assign]
    processes.command(*arguments)


def test_ctrl_c_keeps_what_was_done_and_resume_finishes_it_in_its_folder(no_report, tmp_path):
    """The signal comes in the second of two runs; the newest folder belongs to another experiment."""
    arguments = ["compare", "digits", "--optimizers", "sgd,smw-gn", "--seeds", "1", "--out", str(tmp_path)]
    done = processes.run_alone(command_with_a_signal, *arguments, "--epochs", "1")
    folder, output = tmp_path / "digits-1", done.stdout + done.stderr
    assert done.returncode == 130, output
    assert "Traceback" not in output
    assert f"interrupted: the same command with --resume continues in {folder}" in output.replace("\n", " ")
    assert is_complete(folder / "sgd-seed0") and not is_complete(folder / "smw-gn-seed0")
    assert (folder / "report.html").exists()
    finished = (folder / "sgd-seed0" / "records.jsonl").stat().st_mtime_ns
    other = invoke("train", "digits", "--optimizer", "adam", "--epochs", 1, "--out", tmp_path, "--resume")
    assert other.exit_code == 0, other.output  # nothing to resume: it begins
    result = invoke(*arguments, "--epochs", 1, "--resume")
    assert result.exit_code == 0, result.output
    assert is_complete(folder / "smw-gn-seed0")
    assert (folder / "sgd-seed0" / "records.jsonl").stat().st_mtime_ns == finished
    asked_otherwise = invoke(*arguments, "--epochs", 2, "--resume")
    assert_one_line(asked_otherwise, "sgd-seed0: it has epochs 1, and 2 was asked for")
    runs = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("*/*/complete")}
    assert runs == {"digits-1/sgd-seed0", "digits-1/smw-gn-seed0", "digits-2/adam-seed0"}


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "digit"], f"unknown data set 'digit'; there are: {', '.join(DATASETS)}"),
        (["reproduce", "digits"], "unknown data set 'digits'; there are: mnist, cifar10, webspam, covtype"),
        (["train", "digits", "--optimizer", "kf"], f"unknown optimizer 'kf'; there are: {', '.join(OPTIMIZERS)}"),
        (["compare", "digits", "--optimizers", "sgd,SGD"], "unknown optimizer 'SGD'; there are: smw-gn, "),
        (["compare", "digits", "--optimizers", ","], "no optimizer given: --optimizers takes names separated by"),
        (["train", "digits", "--set", "momentum"], "--set takes NAME=VALUE, got 'momentum'"),
        (["train", "digits", "--set", "refresh=2"], "smw-gn: there is no setting 'refresh', only "),
        (["train", "digits", "--set", "momentum=-1"], "smw-gn: momentum must not be negative, got -1"),
        (["train", "digits", "--set", "curvature_samples=2000"], "smw-gn: curvature_samples=2000 is more than"),
        (["train", "covtype", "--batch-size", "20"], "smw-gn: curvature_samples=30 is more than the 20 samples"),
        (["train", "digits", "--set", "damping.bost=2"], "smw-gn: LevenbergMarquardt has no field 'bost', only"),
        (["train", "digits", "--set", "damping=" + "[" * 100_000], "smw-gn: "),
        (["train", "digits", "--set", "momentum=1e999"], "smw-gn: momentum must be finite, got inf"),
        (["train", "digits", "--set", "accept=x"], "smw-gn: "),
        (["train", "digits", "--set", "seed=abc"], "smw-gn: "),
        (["train", "digits", "--optimizer", "adam", "--set", "betas=[0.9]"], "adam: "),
        (["train", "digits", "--optimizer", "adam", "--set", "betas=[0.9,NaN]"], "adam: "),
    ],
)
def test_a_wrong_name_or_setting_ends_in_one_line_and_status_2(arguments, message, tmp_path):
    result = invoke(*arguments, "--out", tmp_path / "runs")
    assert_one_line(result, f"woodbury: {message}")
    assert not (tmp_path / "runs").exists()


def test_what_is_absent_or_cannot_be_written_to_ends_in_one_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    if not torch.cuda.is_available():
        result = invoke("train", "digits", "--device", "cuda", "--out", tmp_path / "runs")
        assert_one_line(result, "no CUDA device")
    assert_one_line(invoke("compare", "digits", "--out", tmp_path / "file" / "runs"), "cannot read or write ")
    reproduce = invoke("reproduce", "mnist", "--out", tmp_path / "runs", "--data-dir", tmp_path)
    assert_one_line(reproduce, str(tmp_path / "mnist"), "train-images-idx3-ubyte")
    for folder in ("empty", "absent"):
        assert_one_line(invoke("report", tmp_path / folder), str(tmp_path / folder))
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "empty"}


def command_with_small_files(limit, *arguments):
    DATASETS["digits"] = few_digits
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    processes.command(*arguments)


@pytest.mark.parametrize("limit", [500, 20_000])
def test_a_full_disk_ends_in_one_line_and_status_2(limit, tmp_path):
    """Files may not grow beyond the limit: the system call fails as on a full disk, in records or model."""
    arguments = ["train", "digits", "--optimizer", "sgd", "--epochs", "1", "--out", tmp_path]
    done = processes.run_alone(command_with_small_files, limit, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"woodbury: cannot read or write {tmp_path}")
    assert len(done.stderr.strip().splitlines()) == 1


# -- the rest --------------------------------------------------------------------------------------------------


def test_list_names_every_data_set_and_optimizer_with_a_description():
    result = invoke("list")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines() if line.strip()]
    described = {words[0] for words in lines if len(words) > 2}
    assert {*DATASETS, *OPTIMIZERS} <= described
    commands = invoke("--help").output.lower()
    for command in ("list", "train", "compare", "reproduce", "report"):
        assert command in commands and "usage:" in invoke(command, "--help").output.lower()


def run_module(*arguments):
    sys.argv = ["", *arguments]
    runpy.run_module("woodbury", run_name="__main__", alter_sys=True)


def test_the_module_and_the_command_are_one_program_which_shows_its_version():
    expected = f"woodbury {woodbury.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    assert invoke("--version").output == processes.run_alone(run_module, "--version").stdout == expected


def start_without_typer():
    for name in [name for name in sys.modules if name.split(".")[0] == "woodbury"]:
        del sys.modules[name]
    sys.modules["typer"] = None  # type: ignore[assignment]
    runpy.run_module("woodbury")


def test_without_the_extra_the_command_says_what_to_install():
    done = processes.run_alone(start_without_typer)
    assert done.returncode != 0
    assert done.stderr.strip() == 'The command line needs typer: pip install "woodbury[experiments]"'
