"""The command line, end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from woodbury import cli
from woodbury.experiments.data import DATASETS
from woodbury.optim import OPTIMIZERS

runner = CliRunner()


def test_compare_trains_prints_a_table_and_leaves_figure_and_runs(tmp_path: Path) -> None:
    names = ["smw-gn", "smw-ng", "smw-ng-bd", "sgd"]
    arguments = ["compare", "digits", "--optimizers", ",".join(names), "--seeds", "2", "--epochs", "1"]
    result = runner.invoke(cli.app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "digits-1"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(
        f"{name}-seed{seed}" for name in names for seed in range(2)
    )
    for run in folder.glob("*-seed*"):
        assert {path.name for path in run.iterdir()} == {"config.json", "records.jsonl", "model.pt"}
    assert (folder / "comparison.png").stat().st_size > 10_000
    assert (folder / "comparison.svg").exists()
    for word in [*names, "train loss", "test error", "seconds", "final damping", "comparison.png"]:
        assert word in result.output


def test_a_second_comparison_overwrites_nothing(tmp_path: Path) -> None:
    arguments = ["compare", "digits", "--optimizers", "sgd", "--seeds", "1", "--epochs", "1"]
    for _ in range(2):
        assert runner.invoke(cli.app, [*arguments, "--out", str(tmp_path)]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-1", "digits-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "unknown data set 'digit'; did you mean 'digits'?"),
        (["digits", "--optimizers", "sgd,smw-nq"], "unknown optimizer 'smw-nq'; did you mean 'smw-ng'?"),
        (["digits", "--optimizers", "SGD"], "unknown optimizer 'SGD'; did you mean 'sgd'?"),
        (["zzzzzz"], "unknown data set 'zzzzzz'; there are: digits"),
        (["digits", "--optimizers", ","], "no optimizer given: --optimizers takes names separated by commas"),
    ],
)
def test_a_wrong_name_ends_in_one_line_and_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["compare", *arguments, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert result.output.strip() == f"woodbury: {message}"
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_folder_ends_in_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = runner.invoke(cli.app, ["compare", "digits", "--out", str(tmp_path / "file" / "runs")])
    assert result.exit_code == 2
    assert result.output.startswith("woodbury: cannot write to ")
    assert len(result.output.strip().splitlines()) == 1


def test_list_names_every_data_set_and_optimizer_with_a_description() -> None:
    result = runner.invoke(cli.app, ["list"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    for name in [*DATASETS, *OPTIMIZERS]:
        assert lines[name], f"{name} has no description"


def test_bench_step_starts_a_process_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append((command, options["env"]))
        return subprocess.CompletedProcess(command, 0, stdout='{"mnist": {"smw-ng": 1.5}}\n')

    monkeypatch.setattr("subprocess.run", fake_run)
    as_json = runner.invoke(cli.app, ["bench", "step", "--json"])
    assert json.loads(as_json.output) == {"mnist": {"smw-ng": 1.5}}
    as_table = runner.invoke(cli.app, ["bench", "step"])
    assert "smw-ng" in as_table.output and "1.50" in as_table.output
    command, environment = calls[0]
    assert command == [sys.executable, "-m", "woodbury.bench", "step", "--json"]
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"


@pytest.mark.parametrize("command", [[], ["list"], ["compare"], ["bench"], ["bench", "step"]])
def test_every_command_has_help(command: list[str]) -> None:
    result = runner.invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_without_the_extra_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from woodbury.cli import main; main()"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode != 0
    assert finished.stderr.strip() == 'The command line needs typer: pip install "woodbury[experiments]"'
