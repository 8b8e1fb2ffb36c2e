"""Kill training by SIGKILL again and again; it must end as if nothing had happened, bit for bit.

    python -m tests.soak.kill --kills 100 --fit-kills 40 --seed 0

Each job is the command `woodbury train` on the digits, or a call of `woodbury.fit` with validation data, with a
checkpoint after every step. It is killed at random moments, half of them while a checkpoint is being written, and
started again with --resume, or resume=, until it ends. After each kill the checkpoint is whole and equal to that
of the same step of a run that was left alone: weights, state of the optimizer (damping, momentum, random
generator). At the end weights and records, or what the fit says, are equal. Times are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and where the processes are forked

import numpy
import torch

import woodbury
from tests import processes
from woodbury.experiments import train
from woodbury.fit import checkpoint as fit_checkpoint

OPTIMIZERS = ("smw-gn", "kfac", "adam", "smw-ng", "hf", "smw-ng-bd", "sgd")
EPOCHS, BATCH = 4, 60  # 92 steps
_TIMED = ("seconds", "records")  # fields of a checkpoint that depend on the clock
_LIMIT = 300.0  # seconds for one start: more means that it hangs


def run_command(*arguments: object) -> None:
    """What `woodbury ARGUMENTS` does, with a checkpoint after every step."""
    train.CHECKPOINT_SECONDS = 0.0
    processes.command(*arguments)


def state_in(checkpoint: bytes) -> tuple[int, Any]:
    """The step of a checkpoint, and what the clock does not change, bit by bit; raises if it is not whole."""
    header, _, content = checkpoint.partition(b"\n")
    if header.split(b" ")[-1] != hashlib.sha256(content).hexdigest().encode():
        raise ValueError(f"no whole checkpoint: {header!r}")
    values = torch.load(io.BytesIO(content), weights_only=True)
    if "history" in values:  # of a fit
        values["history"] = [{**entry, "seconds": 0} for entry in values["history"]]
    step = values["steps" if "steps" in values else "step"]
    return step, _bits({key: value for key, value in values.items() if key not in _TIMED})


def _bits(value: Any) -> Any:
    """A value equal to another where all bits are: the pickles of equal values may differ."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    return [_bits(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def timeless(records: Path) -> list[dict[str, Any]]:
    """The records of a run without their times and without a line that was cut."""
    *lines, _cut = records.read_text().split("\n")
    return [{**json.loads(line), "seconds": 0} for line in lines]


def with_copies(copies: Path, function: Callable[..., None], *arguments: object) -> None:
    """The function, which keeps a copy of each checkpoint as it is written, under the number of its file."""
    for module in (train, fit_checkpoint):

        def write_and_copy(path: Path, content: bytes, *rest: Any, write: Any = module.write_whole) -> None:
            if content.startswith(b"woodbury "):
                (copies / f"{len(list(copies.iterdir()))}").write_bytes(content)
            write(path, content, *rest)

        module.write_whole = write_and_copy
    function(*arguments)


@dataclass
class Counts:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)  # by moment
    runs: Counter[str] = field(default_factory=Counter)  # that ended, by optimizer
    starts: int = 0
    checkpoints: int = 0  # compared after a kill
    leftovers: int = 0  # kills in the middle of a write: the temporary file was there
    faults: list[str] = field(default_factory=list)

    def tell(self, seconds: float) -> None:
        moments = ", ".join(f"{number} {name}" for name, number in sorted(self.kills.items()))
        print(f"{self.kills.total()} kills ({moments}) in {self.starts} starts; {seconds:.0f} s")
        print(f"kills in the middle of a write: {self.leftovers}")
        print(f"checkpoints compared after a kill: {self.checkpoints}, {'FAULTS' if self.faults else 'all equal'}")
        print("runs that ended and were compared:", self.runs.total(), dict(self.runs), *self.faults, sep="\n")


class Job:
    """Something that is killed and started again until it ends.

    A kind of job has patterns of its `checkpoint` and of the `temporary` file that is being written, `call(out)`:
    a function and its arguments, `size(out)`: a number that grows as it goes on, and `result(out)`: what it leaves
    at its end, without times.
    """

    def __init__(self, name: str, root: Path) -> None:
        """Run it once without a kill."""
        self.name = name
        copies, out = root / self.name / "copies", root / self.name / "out"
        copies.mkdir(parents=True)
        out.mkdir()
        function, *arguments = self.call(out)
        done = processes.run_alone(with_copies, copies, function, *arguments)
        assert done.returncode == 0, done.stderr
        self.states = dict(state_in(copy.read_bytes()) for copy in copies.iterdir())  # by step
        self.end = self.result(out)

    def is_writing(self, out: Path) -> bool:
        return next(out.glob(self.temporary), None) is not None

    def check_after_kill(self, out: Path, counts: Counts) -> None:
        """Compare what a kill has left with the run that was left alone."""
        counts.leftovers += self.is_writing(out)
        for path in out.glob(self.checkpoint):
            step, state = state_in(path.read_bytes())
            counts.checkpoints += 1
            if state != self.states[step]:
                counts.faults.append(f"{path}: another state at step {step}")

    def check_at_end(self, out: Path, counts: Counts) -> None:
        """Compare the run that was killed with the one that was left alone."""
        counts.runs[self.name] += 1
        if self.result(out) != self.end:
            counts.faults.append(f"{out}: {self.name} ends otherwise")


class Command(Job):
    """`woodbury train`."""

    temporary = "digits-*/*-seed3/.unfinished.pt"
    checkpoint = "digits-*/*-seed3/checkpoint.pt"

    def call(self, out: Path) -> list[Any]:
        options = ["--epochs", EPOCHS, "--batch-size", BATCH, "--seed", 3, "--out", out]
        return [run_command, "train", "digits", "--optimizer", self.name, *options, "--resume"]  # or it begins

    def size(self, out: Path) -> int:
        return sum(path.stat().st_size for path in self._records(out))

    def _records(self, out: Path) -> Iterator[Path]:
        return out.glob("digits-*/*-seed3/records.jsonl")

    def check_after_kill(self, out: Path, counts: Counts) -> None:
        super().check_after_kill(out, counts)
        for path in self._records(out):
            records = timeless(path)
            if records != self.end[1][: len(records)]:
                counts.faults.append(f"{path}: other records")

    def result(self, out: Path) -> Any:
        (run,) = (path.parent for path in out.glob("digits-*/*-seed3/complete"))
        names = {path.name for path in run.iterdir()}
        return (run / "model.pt").read_bytes(), timeless(run / "records.jsonl"), names


def fit_and_save(kind: str, out: Path) -> None:
    """A call of `woodbury.fit`, taken up where there is something to take up; the result goes to a file."""
    fit_checkpoint.INTERVAL = 0.0
    draws = torch.Generator().manual_seed(0)
    inputs = 2 * torch.rand(400, 2, generator=draws, dtype=torch.float64) - 1
    targets = torch.sin(2 * inputs[:, :1]) + 0.1 * torch.randn(400, 1, generator=draws, dtype=torch.float64)
    others, settings = (inputs[300:], targets[300:]), {"steps": 90, "patience": 90}
    data: Any = inputs[:300], targets[:300]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):  # all of them are in a checkpoint
        seed(1)
    layers = [torch.nn.Linear(2, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)]
    if kind == "fit of a loader":
        layers.insert(2, torch.nn.Dropout(0.2))
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 20, shuffle=True)
        settings = {"epochs": 8, "curvature_samples": 10, "patience": 8}
    elif kind == "fit of a sampler":
        data, settings = draw_points, {"steps": 60, "samples": 60, "patience": 60}
    model = torch.nn.Sequential(*layers).double()
    path = out / "fit.ckpt"
    keep: dict[str, Any] = {"checkpoint": path, "resume": path, "progress": False}
    fit = woodbury.fit(model, torch.nn.MSELoss(), data, validation=others, **settings, **keep)
    said = {name: getattr(fit, name) for name in ("loss", "validation", "best_step", "steps", "reason")}
    torch.save({"said": said, "history": fit.history, "model": model.state_dict()}, out / "result.pt")


def draw_points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = 2 * torch.rand(count, 2, dtype=torch.float64) - 1
    return inputs, torch.sin(2 * inputs[:, :1])


class Fit(Job):
    """`woodbury.fit` with validation data."""

    temporary, checkpoint = ".fit.ckpt.unfinished", "fit.ckpt"

    def call(self, out: Path) -> list[Any]:
        return [fit_and_save, self.name, out]

    def size(self, out: Path) -> int:
        """Some 100 bytes for each step in the history."""
        return sum(path.stat().st_size for path in out.glob(self.checkpoint))

    def result(self, out: Path) -> Any:
        values = torch.load(out / "result.pt", weights_only=True)
        values["history"] = [{**entry, "seconds": 0} for entry in values["history"]]
        return _bits(values), {path.name for path in out.iterdir()}


def wait_and_kill(job: Job, process: processes.Started, moment: str, out: Path, draw: random.Random) -> bool:
    """Kill the process at a moment of this kind; False if it ended before.

    start: within its first seconds; step: after it has gone on for a while; write: while a checkpoint is written.
    """

    def wait(condition: Callable[[], bool], seconds: float = _LIMIT) -> None:
        until = time.monotonic() + seconds
        while process.is_running() and not condition() and time.monotonic() < until:
            time.sleep(0.0001)

    pause = draw.uniform(0, 2.0)
    if moment != "start":
        grown = job.size(out) + draw.randrange(1, 3000)
        wait(lambda: job.size(out) >= grown)
        pause = 0.02 * draw.random()
    if moment == "write":
        wait(lambda: job.is_writing(out))
        pause = draw.choice((0.0, 0.0, 0.001 * draw.random(), 0.005 * draw.random()))
    wait(lambda: False, pause)
    running = process.is_running()
    process.kill()
    return running


def soak(kills: int, makes: Sequence[Callable[[Path], Job]], draw: random.Random, root: Path) -> Counts:
    """Kill so many times, over all jobs in turn, and let the last one end."""
    counts, make_once = Counts(), cache(lambda make: make(root))
    for number, make in enumerate(cycle(makes)):
        if counts.kills.total() >= kills:
            return counts
        job, out, ended = make_once(make), root / f"job{number}", False
        out.mkdir()
        while not ended:
            moment = draw.choices(("start", "step", "write"), (1, 4, 5))[0]
            process = processes.Started(*job.call(out))
            counts.starts += 1
            killed = counts.kills.total() < kills and wait_and_kill(job, process, moment, out, draw)
            done = process.wait(_LIMIT)
            if killed:
                counts.kills[moment] += 1
                job.check_after_kill(out, counts)
            elif done.returncode == 0:
                ended = True
                job.check_at_end(out, counts)
            else:
                counts.faults.append(f"{job.name}: status {done.returncode}: {done.stderr[-500:]}")
            print(f"\r{counts.kills.total()} of {kills} kills, {job.name}  ", end="", file=sys.stderr)
            if counts.faults:
                return counts
        shutil.rmtree(out)
    raise AssertionError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of commands (default: %(default)s)")
    parser.add_argument("--fit-kills", type=int, default=40, help="of fits (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args(arguments)
    draw, faults = random.Random(options.seed), 0
    commands = [partial(Command, optimizer) for optimizer in OPTIMIZERS]
    fits = [partial(Fit, f"fit of a {data}") for data in ("pair", "loader", "sampler")]
    for kills, makes in ((options.kills, commands), (options.fit_kills, fits)):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            counts = soak(kills, makes, draw, Path(root))
        print(file=sys.stderr)
        counts.tell(time.monotonic() - started)
        faults += len(counts.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
