"""Kill training by SIGKILL again and again; it must end as if nothing had happened, bit for bit.

    python -m tests.soak.kill --kills 100 --seed 0

Each job is the command `woodbury train` on the digits, with a checkpoint after every step. It is killed at random
moments, half of them while a checkpoint is being written, and started again with --resume until it ends. After
each kill the checkpoint is whole and equal to that of the same step of a run that was left alone: weights, state
of the optimizer (damping, momentum, random generator), order of the batches. At the end weights and records are
equal. Times in the records are left out.

The runs left alone, and those to be killed while they start, are processes of their own. The others are forked
from this one, which has imported everything and run nothing: so a start takes a second instead of ten.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process with threads must not be forked

# What a run imports on its way: here once, before any fork.
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torch
import torch._dynamo

from woodbury import cli
from woodbury.experiments.checkpoint import as_bytes

OPTIMIZERS = ("smw-gn", "kfac", "adam", "smw-ng", "hf", "smw-ng-bd", "sgd")
EPOCHS, BATCH = 4, 60  # 92 steps
_TIMED = ("seconds", "records", "records_sha256")  # fields of a checkpoint that depend on the clock
_LIMIT = 300.0  # seconds for one start: more means that it hangs


def command(optimizer: str, out: Path) -> list[str]:
    """The command that trains; --resume starts a run that is not there."""
    options = ["--epochs", EPOCHS, "--batch-size", BATCH, "--seed", 3, "--checkpoint-seconds", 0, "--resume"]
    program = [sys.executable, "-m", "woodbury.cli", "train", "digits", "--optimizer", optimizer, "--out", out]
    return [str(part) for part in [*program, *options]]


class Forked:
    """The command in a process forked from this one, with the methods of subprocess.Popen."""

    def __init__(self, arguments: list[str], log: BinaryIO) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                sys.argv = ["woodbury", *arguments]
                cli.main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


Process = subprocess.Popen[bytes] | Forked


def state_in(checkpoint: bytes) -> tuple[int, bytes]:
    """The step of a checkpoint, and the bits of what the clock does not change; raises if it is not whole."""
    header, _, content = checkpoint.partition(b"\n")
    if header.split(b" ")[-1] != hashlib.sha256(content).hexdigest().encode():
        raise ValueError(f"no whole checkpoint: {header!r}")
    values = torch.load(io.BytesIO(content), weights_only=True)
    return values["step"], as_bytes({key: value for key, value in values.items() if key not in _TIMED})


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without their times."""
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


@dataclass(frozen=True)
class Whole:
    """A run that was left alone."""

    weights: bytes
    records: list[dict[str, Any]]
    states: dict[int, bytes]  # by step


# Keeps a copy of each checkpoint as it is written, under the number of its file.
_COPYING = """
import sys
from pathlib import Path
from woodbury.experiments import checkpoint
write, copies = checkpoint.write_whole, Path(sys.argv.pop(1))
def write_and_copy(path, content):
    (copies / f"{len(list(copies.iterdir()))}").write_bytes(content)
    write(path, content)
checkpoint.write_whole = write_and_copy
from woodbury.cli import main
main()
"""


def run_alone(optimizer: str, folder: Path) -> Whole:
    """The same command without a kill."""
    copies = folder / "copies"
    copies.mkdir(parents=True)
    arguments = command(optimizer, folder / "out")[3:]
    subprocess.run(
        [sys.executable, "-c", _COPYING, str(copies), *arguments],
        check=True,
        capture_output=True,
        timeout=_LIMIT,
    )
    run = folder / "out" / "digits-1" / f"{optimizer}-seed3"
    states = dict(state_in(copy.read_bytes()) for copy in copies.iterdir())
    return Whole((run / "model.pt").read_bytes(), timeless(run), states)


@dataclass
class Counts:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)  # by moment
    runs: Counter[str] = field(default_factory=Counter)  # that ended, by optimizer
    starts: int = 0
    checkpoints: int = 0  # compared after a kill
    leftovers: int = 0  # kills in the middle of a write: the temporary file was there
    faults: list[str] = field(default_factory=list)


def wait_and_kill(process: Process, moment: str, out: Path, draw: random.Random) -> bool:
    """Kill the process at a moment of this kind; False if it ended before.

    start: within its first seconds; step: after a random number of records; write: while a checkpoint is written.
    """
    deadline = time.monotonic() + _LIMIT
    if moment == "start":
        _sleep(process, draw.uniform(0, 4.0))
    else:
        grown = _size(out) + draw.randrange(1, 3000)  # bytes of records
        while process.poll() is None and _size(out) < grown and time.monotonic() < deadline:
            time.sleep(0.002)
        if moment == "write":
            while process.poll() is None and not _is_writing(out) and time.monotonic() < deadline:
                time.sleep(0.0001)
            _sleep(process, draw.choice((0.0, 0.0, 0.001 * draw.random(), 0.005 * draw.random())))
        else:
            _sleep(process, 0.02 * draw.random())
    ended = process.poll() is not None
    process.kill()
    process.wait()
    return not ended


def _sleep(process: Process, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(min(0.0005, max(0.0, until - time.monotonic())))


def _files(out: Path, pattern: str) -> Iterator[Path]:
    return out.glob(f"digits-*/*-seed3/{pattern}")


def _size(out: Path) -> int:
    return sum(path.stat().st_size for path in _files(out, "records.jsonl"))


def _is_writing(out: Path) -> bool:
    return next(_files(out, ".checkpoint.pt.*"), None) is not None


def check_after_kill(out: Path, whole: Whole, counts: Counts) -> None:
    """Compare what a kill has left with the run that was left alone."""
    counts.leftovers += _is_writing(out)
    for path in _files(out, "checkpoint.pt"):
        step, state = state_in(path.read_bytes())
        counts.checkpoints += 1
        if state != whole.states[step]:
            counts.faults.append(f"{path}: another state at step {step}")
    for path in _files(out, "records.jsonl"):
        *lines, _cut = path.read_text().split("\n")
        for number, line in enumerate(lines):
            record = {key: value for key, value in json.loads(line).items() if key != "seconds"}
            if record != whole.records[number]:
                counts.faults.append(f"{path}: another record in line {number + 1}")
                break


def check_at_end(out: Path, optimizer: str, whole: Whole, counts: Counts) -> None:
    """Compare the run that was killed with the one that was left alone."""
    (run,) = (path.parent for path in _files(out, "complete"))
    counts.runs[optimizer] += 1
    if (run / "model.pt").read_bytes() != whole.weights:
        counts.faults.append(f"{run}: other weights")
    if timeless(run) != whole.records:
        counts.faults.append(f"{run}: other records")
    names = {path.name for path in run.iterdir()}
    if names != {"config.json", "records.jsonl", "model.pt", "complete"}:
        counts.faults.append(f"{run}: it holds {sorted(names)}")


def soak(kills: int, seed: int, root: Path, show: bool = False) -> Counts:
    """Kill so many times, over jobs of all optimizers in turn, and let the last job end."""
    draw, counts = random.Random(seed), Counts()
    wholes: dict[str, Whole] = {}
    for job, optimizer in enumerate(cycle(OPTIMIZERS)):
        if sum(counts.kills.values()) >= kills or counts.faults:
            return counts
        if optimizer not in wholes:
            wholes[optimizer] = run_alone(optimizer, root / optimizer)
        out, whole = root / f"job{job}", wholes[optimizer]
        ended = False
        while not ended:
            with (root / "log").open("w+b") as log:
                moment = draw.choices(("start", "step", "write"), (1, 4, 5))[0]
                arguments = command(optimizer, out)
                process: Process = (
                    subprocess.Popen(arguments, stdout=log, stderr=log)
                    if moment == "start"
                    else Forked(arguments[3:], log)
                )
                counts.starts += 1
                killed = sum(counts.kills.values()) < kills and wait_and_kill(process, moment, out, draw)
                process.wait(_LIMIT)
                log.seek(0)
                said = log.read().decode(errors="replace")
            if killed:
                counts.kills[moment] += 1
                check_after_kill(out, whole, counts)
            elif process.returncode == 0:
                ended = True
                check_at_end(out, optimizer, whole, counts)
            else:
                counts.faults.append(f"{optimizer}: status {process.returncode}: {said[-500:]}")
            if show:
                print(f"\r{sum(counts.kills.values())} of {kills} kills, {optimizer}  ", end="", file=sys.stderr)
            if counts.faults:
                break
        shutil.rmtree(out, ignore_errors=not counts.faults)
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how often to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        counts = soak(options.kills, options.seed, Path(root), show=True)
    print(file=sys.stderr)
    moments = ", ".join(f"{number} {name}" for name, number in sorted(counts.kills.items()))
    kills, seconds = sum(counts.kills.values()), time.monotonic() - started
    print(f"{kills} kills ({moments}) in {counts.starts} starts; {seconds:.0f} s")
    print(f"kills in the middle of a write: {counts.leftovers}")
    print(f"checkpoints compared after a kill: {counts.checkpoints}, all equal" if not counts.faults else "FAULTS")
    print(f"runs that ended and were compared: {sum(counts.runs.values())} {dict(counts.runs)}")
    for fault in counts.faults:
        print(fault)
    return 1 if counts.faults else 0


if __name__ == "__main__":
    sys.exit(main())
