"""`woodbury train` in several processes: the run of one process, from any of them stopped, killed and gone on."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import bounds
import processes
from fuzz.files import DATA, stop_after
from woodbury.experiments import train as training
from woodbury.experiments.presets import PRESETS
from woodbury.experiments.train import InterruptedRunError, train
from woodbury.parallel.group import LostProcessError
from woodbury.runs.config import RunConfig
from woodbury.runs.records import read_records

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform == "win32", reason="needs torch.distributed and signals"
)

# The sums over samples have another order in several processes. The systems, 43 parameters and 39 rows, have a
# condition of at most about 1e4 at these dampings, and a run has 12 steps.
CLOSE = bounds.rounding(43 + 39, condition=1e4, steps=12)
OPTIMIZERS = {
    "smw-gn": {"curvature_samples": None},
    "smw-ng-bd": {"curvature_samples": None},
    "kfac": {"curvature_samples": None},
    "sgd": {"momentum": 0.5},
    "adam": {},
}


def tiny_run(optimizer: str, **settings: Any) -> RunConfig:
    """A run of 12 steps on batches of 13, 13, 13 and 1 samples: of 2 processes one has none of the last."""
    preset = PRESETS["digits"]
    config = preset.config("digits", optimizer, seed=1, epochs=3, batch_size=13, settings=settings)
    return dataclasses.replace(config, widths=(6, 4, 3), dtype="float64")


def assert_close(one: Path, other: Path) -> None:
    """The same records, seconds apart, and the same network up to rounding."""
    records = [read_records(folder) for folder in (one, other)]
    assert records[0].keys() == records[1].keys()
    for kind, ours in records[0].items():
        assert len(ours) == len(records[1][kind]) > 0
        for own, theirs in zip(ours, records[1][kind], strict=True):
            assert own.keys() == theirs.keys()
            for key in own.keys() - {"kind", "seconds"}:
                other_value = theirs[key]
                expected = None if other_value is None else pytest.approx(other_value, rel=CLOSE, abs=1e-12)
                assert own[key] == expected, (kind, own["step"], key)
    models = [torch.load(folder / "model.pt", weights_only=True) for folder in (one, other)]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=CLOSE, atol=CLOSE)


def train_all(rank: int, world: int, folder: Path) -> list[tuple[int, float]]:
    """A run of each optimizer; then what the first of them showed."""
    shown: list[tuple[int, float]] = []
    for name, settings in OPTIMIZERS.items():
        train(tiny_run(name, **settings), folder / name, lambda now: shown.append((now.step, now.loss)), data=DATA)
    return shown


def test_two_processes_write_the_run_of_one(tmp_path):
    shown = processes.run(train_all, 2, tmp_path / "two")
    assert len(shown[0]) == 12 * len(OPTIMIZERS) and not shown[1]  # the first alone shows progress
    train_all(0, 1, tmp_path / "one")
    for name in OPTIMIZERS:
        assert_close(tmp_path / "one" / name, tmp_path / "two" / name)
        assert RunConfig.load(tmp_path / "two" / name).machine["processes"] == 2
        assert sorted(path.name for path in (tmp_path / "two" / name).iterdir()) == sorted(
            path.name for path in (tmp_path / "one" / name).iterdir()
        )


def stop_and_go_on(rank: int, world: int, folder: Path) -> list[int]:
    """Stops two runs, one of them by the second process alone, and goes on with two that one process has begun."""
    seen = []
    told = stop_after(7) if rank == 1 else lambda: False
    try:
        train(tiny_run("smw-gn", curvature_samples=None), folder / "gn", data=DATA, stop=told)
    except InterruptedRunError:
        seen.append(len(read_records(folder / "gn")["step"]))
    try:
        train(tiny_run("smw-gn", curvature_samples=8), folder / "subset", data=DATA, stop=stop_after(3))
    except InterruptedRunError:
        seen.append(len(read_records(folder / "subset")["step"]))
    for name in ("kfac", "adam"):
        train(tiny_run(name, **OPTIMIZERS[name]), folder / name, data=DATA, resume=True)
    return seen


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for name in ("kfac", "adam"):
        with pytest.raises(InterruptedRunError):
            train(tiny_run(name, **OPTIMIZERS[name]), cut / name, data=DATA, stop=stop_after(5))
    # a stop that one process is told of ends both after the same step
    assert processes.run(stop_and_go_on, 2, cut) == [[7, 3], [7, 3]]
    train(tiny_run("smw-gn", curvature_samples=None), cut / "gn", data=DATA, resume=True)
    train(tiny_run("smw-gn", curvature_samples=None), whole / "gn", data=DATA)
    assert_close(whole / "gn", cut / "gn")
    for name in ("kfac", "adam"):
        train(tiny_run(name, **OPTIMIZERS[name]), whole / name, data=DATA)
        assert_close(whole / name, cut / name)
    # The next batch has 1 sample, fewer than the 8 curvature samples: the batches before had more.
    train(tiny_run("smw-gn", curvature_samples=8), cut / "subset", data=DATA, resume=True)
    assert len(read_records(cut / "subset")["step"]) == 12


def fail_to_write(rank: int, world: int, folder: Path) -> str:
    def progress(now: Any) -> None:
        if now.step == 2:
            raise OSError("the disk is full")

    try:
        train(tiny_run("smw-gn"), folder / "run", progress, data=DATA)
    except (OSError, LostProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_of_the_process_that_writes_is_told_to_the_others(tmp_path):
    first, second = processes.run(fail_to_write, 2, tmp_path)
    assert first == "OSError: the disk is full"
    assert second == "LostProcessError: process 0 of 2 failed: OSError: the disk is full"


# -- the command -------------------------------------------------------------------------------------------------

COMMAND = ["train", "digits", "--epochs", "1", "--dtype", "float64", "--set", "curvature_samples=null"]


def command_until_killed(*arguments: object) -> None:
    """The second process is killed in its fifth step."""
    step = training._Run._step

    def step_or_die(run: Any, *batch: Any) -> Any:
        if (run.group.rank, run.step) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(run, *batch)

    training._Run._step = step_or_die  # type: ignore[method-assign]
    processes.command(*arguments)


def run_ranks(function: Any, *arguments: object) -> list[Any]:
    """Two processes with the variables that torchrun sets; torchrun itself would end one with the other."""
    launched = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": processes.free_port()}
    ranks = [processes.Started(function, *arguments, RANK=rank, LOCAL_RANK=rank, **launched) for rank in range(2)]
    return [rank.wait() for rank in ranks]


def test_a_killed_process_ends_the_others_and_the_run_goes_on_with_another_number(tmp_path):
    """The second of two is killed in step 5."""
    arguments = [*COMMAND, "--checkpoint-seconds", "0", "--out", str(tmp_path / "cut")]
    first, second = run_ranks(command_until_killed, *arguments)
    survivor = first.stdout + first.stderr
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1, survivor
    assert "Traceback" not in survivor
    assert "process 0 of 2 waited for the others in vain" in survivor.replace("\n", " ")
    assert "Start again from the last checkpoint" in survivor.replace("\n", " ")
    cut = tmp_path / "cut" / "digits-1" / "smw-gn-seed0"
    assert len(read_records(cut)["step"]) == 4
    done = processes.run_alone(processes.command, *arguments, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    train(RunConfig.load(cut), tmp_path / "whole")
    assert_close(tmp_path / "whole", cut)


def run_python(*arguments: object, **environment: object) -> Any:
    """A new interpreter that imports what this one does."""
    more = {"OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}
    whole = {**os.environ, **{name: str(value) for name, value in more.items()}}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=whole)


@pytest.mark.slow
def test_torchrun_trains_compares_and_shows_once(tmp_path):
    torchrun = ["torch.distributed.run", "--nproc-per-node", 2, "--master-port", processes.free_port()]
    command = ["compare", "digits", "--optimizers", "smw-ng,sgd", "--seeds", 1, "--epochs", 1, "--out", tmp_path]
    done = run_python("-m", *torchrun, "-m", "woodbury", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("medians over seeds") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["digits-1"]
    for name in ("smw-ng", "sgd"):
        assert (tmp_path / "digits-1" / f"{name}-seed0" / "model.pt").exists()


ENDS = """
import os
from pathlib import Path

import torch
import woodbury

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = woodbury.NaturalGradient(model, torch.nn.MSELoss())  # imports torch._dynamo, and that much else
torch.distributed.all_reduce(torch.ones(1))
threads = lambda: [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
assert any("gloo" in name for name in threads()), threads()
torch.distributed.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at its threads in /proc")
def test_no_thread_of_a_destroyed_group_is_left_to_abort_the_end_of_the_process():
    alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": processes.free_port()}
    done = run_python("-c", ENDS, **alone)
    assert done.returncode == 0, done.stderr


def test_a_model_of_each_process_own_is_refused_under_torchrun(tmp_path):
    command = ["train", "digits", "--set", "process_group=self", "--out", tmp_path]
    for done in run_ranks(processes.command, *command):
        assert done.returncode == 2 and "process_group is for one process" in done.stderr
    assert not list(tmp_path.iterdir())
