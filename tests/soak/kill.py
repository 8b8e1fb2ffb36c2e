"""Kill training by SIGKILL again and again; it must end as if nothing had happened, bit for bit.

    python -m tests.soak.kill --kills 100 --seed 0

Each job is the command `woodbury train` on the digits, with a checkpoint after every step. It is killed at random
moments, half of them while a checkpoint is being written, and started again with --resume until it ends. After
each kill the checkpoint is whole and equal to that of the same step of a run that was left alone: weights, state
of the optimizer (damping, momentum, random generator). At the end weights and records are
equal. Times in the records are left out.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and where the processes are forked

import torch

from tests import processes
from woodbury.runs import checkpoint

OPTIMIZERS = ("smw-gn", "kfac", "adam", "smw-ng", "hf", "smw-ng-bd", "sgd")
EPOCHS, BATCH = 4, 60  # 92 steps
_TIMED = ("seconds", "records")  # fields of a checkpoint that depend on the clock
_LIMIT = 300.0  # seconds for one start: more means that it hangs


def arguments_of(optimizer: str, out: Path) -> list[object]:
    """The command that trains; --resume starts a run that is not there."""
    options = ["--epochs", EPOCHS, "--batch-size", BATCH, "--seed", 3, "--checkpoint-seconds", 0, "--resume"]
    return ["train", "digits", "--optimizer", optimizer, "--out", out, *options]


def state_in(checkpoint: bytes) -> tuple[int, Any]:
    """The step of a checkpoint, and what the clock does not change, bit by bit; raises if it is not whole."""
    header, _, content = checkpoint.partition(b"\n")
    if header.split(b" ")[-1] != hashlib.sha256(content).hexdigest().encode():
        raise ValueError(f"no whole checkpoint: {header!r}")
    values = torch.load(io.BytesIO(content), weights_only=True)
    return values["step"], _bits({key: value for key, value in values.items() if key not in _TIMED})


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


@dataclass(frozen=True)
class Whole:
    """A run that was left alone."""

    weights: bytes
    records: list[dict[str, Any]]
    states: dict[int, Any]  # by step


def command_with_copies(copies: Path, *arguments: object) -> None:
    """The command, which keeps a copy of each checkpoint as it is written, under the number of its file."""
    write = checkpoint.write_whole

    def write_and_copy(path: Path, content: bytes) -> None:
        (copies / f"{len(list(copies.iterdir()))}").write_bytes(content)
        write(path, content)

    checkpoint.write_whole = write_and_copy
    processes.command(*arguments)


def run_alone(optimizer: str, folder: Path) -> Whole:
    """The same command without a kill."""
    copies = folder / "copies"
    copies.mkdir(parents=True)
    done = processes.run_alone(command_with_copies, copies, *arguments_of(optimizer, folder / "out"))
    assert done.returncode == 0, done.stderr
    run = folder / "out" / "digits-1" / f"{optimizer}-seed3"
    states = dict(state_in(copy.read_bytes()) for copy in copies.iterdir())
    return Whole((run / "model.pt").read_bytes(), timeless(run / "records.jsonl"), states)


@dataclass
class Counts:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)  # by moment
    runs: Counter[str] = field(default_factory=Counter)  # that ended, by optimizer
    starts: int = 0
    checkpoints: int = 0  # compared after a kill
    leftovers: int = 0  # kills in the middle of a write: the temporary file was there
    faults: list[str] = field(default_factory=list)


def wait_and_kill(process: processes.Started, moment: str, out: Path, draw: random.Random) -> bool:
    """Kill the process at a moment of this kind; False if it ended before.

    start: within its first seconds; step: after a random number of records; write: while a checkpoint is written.
    """

    def wait(condition: Callable[[], bool], seconds: float = _LIMIT) -> None:
        until = time.monotonic() + seconds
        while process.is_running() and not condition() and time.monotonic() < until:
            time.sleep(0.0001)

    pause = draw.uniform(0, 2.0)
    if moment != "start":
        grown = _size(out) + draw.randrange(1, 3000)  # bytes of records
        wait(lambda: _size(out) >= grown)
        pause = 0.02 * draw.random()
    if moment == "write":
        wait(lambda: _is_writing(out))
        pause = draw.choice((0.0, 0.0, 0.001 * draw.random(), 0.005 * draw.random()))
    wait(lambda: False, pause)
    running = process.is_running()
    process.kill()
    return running


def _files(out: Path, pattern: str) -> Iterator[Path]:
    return out.glob(f"digits-*/*-seed3/{pattern}")


def _size(out: Path) -> int:
    return sum(path.stat().st_size for path in _files(out, "records.jsonl"))


def _is_writing(out: Path) -> bool:
    return next(_files(out, ".unfinished.pt"), None) is not None


def check_after_kill(out: Path, whole: Whole, counts: Counts) -> None:
    """Compare what a kill has left with the run that was left alone."""
    counts.leftovers += _is_writing(out)
    for path in _files(out, "checkpoint.pt"):
        step, state = state_in(path.read_bytes())
        counts.checkpoints += 1
        if state != whole.states[step]:
            counts.faults.append(f"{path}: another state at step {step}")
    for path in _files(out, "records.jsonl"):
        records = timeless(path)
        if records != whole.records[: len(records)]:
            counts.faults.append(f"{path}: other records")


def check_at_end(out: Path, optimizer: str, whole: Whole, counts: Counts) -> None:
    """Compare the run that was killed with the one that was left alone."""
    (run,) = (path.parent for path in _files(out, "complete"))
    counts.runs[optimizer] += 1
    if (run / "model.pt").read_bytes() != whole.weights:
        counts.faults.append(f"{run}: other weights")
    if timeless(run / "records.jsonl") != whole.records:
        counts.faults.append(f"{run}: other records")
    names = {path.name for path in run.iterdir()}
    if names != {"config.json", "records.jsonl", "model.pt", "complete"}:
        counts.faults.append(f"{run}: it holds {sorted(names)}")


def soak(kills: int, seed: int, root: Path) -> Counts:
    """Kill so many times, over jobs of all optimizers in turn, and let the last job end."""
    draw, counts = random.Random(seed), Counts()
    wholes: dict[str, Whole] = {}
    for job, optimizer in enumerate(cycle(OPTIMIZERS)):
        if counts.kills.total() >= kills:
            return counts
        if optimizer not in wholes:
            wholes[optimizer] = run_alone(optimizer, root / optimizer)
        out, whole, ended = root / f"job{job}", wholes[optimizer], False
        while not ended:
            moment = draw.choices(("start", "step", "write"), (1, 4, 5))[0]
            process = processes.Started(processes.command, *arguments_of(optimizer, out))
            counts.starts += 1
            killed = counts.kills.total() < kills and wait_and_kill(process, moment, out, draw)
            done = process.wait(_LIMIT)
            if killed:
                counts.kills[moment] += 1
                check_after_kill(out, whole, counts)
            elif done.returncode == 0:
                ended = True
                check_at_end(out, optimizer, whole, counts)
            else:
                counts.faults.append(f"{optimizer}: status {done.returncode}: {done.stderr[-500:]}")
            print(f"\r{counts.kills.total()} of {kills} kills, {optimizer}  ", end="", file=sys.stderr)
            if counts.faults:
                return counts
        shutil.rmtree(out)
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how often to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        counts = soak(options.kills, options.seed, Path(root))
    print(file=sys.stderr)
    moments = ", ".join(f"{number} {name}" for name, number in sorted(counts.kills.items()))
    seconds = time.monotonic() - started
    print(f"{counts.kills.total()} kills ({moments}) in {counts.starts} starts; {seconds:.0f} s")
    print(f"kills in the middle of a write: {counts.leftovers}")
    print(f"checkpoints compared after a kill: {counts.checkpoints}, all equal" if not counts.faults else "FAULTS")
    print(
        f"runs that ended and were compared: {counts.runs.total()} {dict(counts.runs)}", *counts.faults, sep="\n"
    )
    return 1 if counts.faults else 0


if __name__ == "__main__":
    sys.exit(main())
