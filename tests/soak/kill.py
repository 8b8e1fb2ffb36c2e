"""Kill training by SIGKILL again and again; it must end as if nothing had happened, bit for bit.

    python -m tests.soak.kill --kills 100 --fit-kills 40 --seed 0

Each job is the command `woodbury train` on the digits, or a call of `woodbury.fit` with validation data, with a
checkpoint after every step. It is killed at random moments, half of them while a checkpoint is being written, and
started again with --resume, or resume=, until it ends. After each kill the checkpoint is whole and equal to that
of the same step of a run that was left alone: weights, state of the optimizer (damping, momentum, random
generator). At the end weights and records, or what the fit says, are equal. Times are left out.
"""

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
from functools import cache, partial
from itertools import cycle
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and where the processes are forked

import numpy
import torch

import woodbury
from tests import processes
from woodbury.experiments import train
from woodbury.fit import checkpoint as fit_checkpoint

OPTIMIZERS = ("smw-gn", "kfac", "adam", "smw-ng", "hf", "smw-ng-bd", "sgd")
EPOCHS, BATCH = 4, 60  # 92 steps
LIMIT = 300.0  # seconds for one start: more means that it hangs


def without_times(entries):
    return [{**entry, "seconds": 0} for entry in entries]


def state_in(checkpoint):
    """The step of a checkpoint, and what the clock does not change, bit by bit; raises if it is not whole."""
    header, _, content = checkpoint.partition(b"\n")
    if header.split(b" ")[-1] != hashlib.sha256(content).hexdigest().encode():
        raise ValueError(f"no whole checkpoint: {header!r}")
    values = torch.load(io.BytesIO(content), weights_only=True)
    if "history" in values:  # of a fit
        values["history"] = without_times(values["history"])
    step = values["steps" if "steps" in values else "step"]
    return step, bits({key: value for key, value in values.items() if key not in ("seconds", "records")})


def bits(value):
    """A value equal to another where all bits are: the pickles of equal values may differ."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def with_copies(copies, function, *arguments):
    """The function, which keeps a copy of each checkpoint as it is written, under the number of its file."""
    for module in (train, fit_checkpoint):

        def write_and_copy(path, content, *rest, write=module.write_whole):
            if content.startswith(b"woodbury "):
                (copies / f"{len(list(copies.iterdir()))}").write_bytes(content)
            write(path, content, *rest)

        module.write_whole = write_and_copy
    function(*arguments)


class Job:
    """Something that is killed and started again until it ends.

    A kind of job has patterns of its `checkpoint`, of the `temporary` file that is being written and of the files
    that grow as it goes on; `call(out)`, a function and its arguments; `result(out)`, what it leaves at its end,
    without times.
    """

    def __init__(self, name, root):
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

    def size(self, out):
        return sum(path.stat().st_size for path in out.glob(self.growing))

    def is_writing(self, out):
        return next(out.glob(self.temporary), None) is not None

    def faults_after_kill(self, out):
        """How what a kill has left differs from the run that was left alone."""
        states = {path: state_in(path.read_bytes()) for path in out.glob(self.checkpoint)}
        return [f"{path}: other at {step}" for path, (step, own) in states.items() if own != self.states[step]]


class Command(Job):
    """`woodbury train`."""

    temporary = "digits-*/*-seed3/.unfinished.pt"
    checkpoint = "digits-*/*-seed3/checkpoint.pt"
    growing = "digits-*/*-seed3/records.jsonl"

    def call(self, out):
        options = ["--epochs", EPOCHS, "--batch-size", BATCH, "--seed", 3, "--out", out, "--resume"]
        return [train_by_command, "train", "digits", "--optimizer", self.name, *options]

    def faults_after_kill(self, out):
        records = {path: self.records(path) for path in out.glob(self.growing)}
        others = [f"{path}: other records" for path, own in records.items() if own != self.end[1][: len(own)]]
        return super().faults_after_kill(out) + others

    def records(self, path):
        """Without a line that was cut."""
        return without_times(json.loads(line) for line in path.read_text().split("\n")[:-1])

    def result(self, out):
        (run,) = (path.parent for path in out.glob("digits-*/*-seed3/complete"))
        names = {path.name for path in run.iterdir()}
        return (run / "model.pt").read_bytes(), self.records(run / "records.jsonl"), names


def train_by_command(*arguments):
    """What `woodbury ARGUMENTS` does, with a checkpoint after every step."""
    train.CHECKPOINT_SECONDS = 0.0
    processes.command(*arguments)


class Fit(Job):
    """`woodbury.fit` with validation data; its checkpoint grows by some 100 bytes in each step."""

    temporary, checkpoint, growing = ".fit.ckpt.unfinished", "fit.ckpt", "fit.ckpt"

    def call(self, out):
        return [fit_and_save, self.name, out]

    def result(self, out):
        values = torch.load(out / "result.pt", weights_only=True)
        values["history"] = without_times(values["history"])
        return bits(values), {path.name for path in out.iterdir()}


def fit_and_save(kind, out):
    """A call of `woodbury.fit`, taken up where there is something to take up; the result goes to a file."""
    fit_checkpoint.INTERVAL = 0.0
    draws = torch.Generator().manual_seed(0)
    inputs = 2 * torch.rand(400, 2, generator=draws, dtype=torch.float64) - 1
    targets = torch.sin(2 * inputs[:, :1]) + 0.1 * torch.randn(400, 1, generator=draws, dtype=torch.float64)
    others, settings = (inputs[300:], targets[300:]), {"steps": 90, "patience": 90}
    data = inputs[:300], targets[:300]
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
    keep = {"checkpoint": out / "fit.ckpt", "resume": out / "fit.ckpt", "progress": False}
    fit = woodbury.fit(model, torch.nn.MSELoss(), data, validation=others, **settings, **keep)
    said = {name: getattr(fit, name) for name in ("loss", "validation", "best_step", "steps", "reason")}
    torch.save({"said": said, "history": fit.history, "model": model.state_dict()}, out / "result.pt")


def draw_points(count):
    inputs = 2 * torch.rand(count, 2, dtype=torch.float64) - 1
    return inputs, torch.sin(2 * inputs[:, :1])


def wait_and_kill(job, process, moment, out, draw):
    """Kill the process at a moment of this kind; False if it ended before.

    start: within its first seconds; step: after it has gone on for a while; write: while a checkpoint is written.
    """

    def wait(condition, seconds=LIMIT):
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


def soak(kills, makes, draw, root):
    """Kill so many times, over all jobs in turn, and let the last one end; what happened, and the faults."""
    counts, make_once = Counter(), cache(lambda make: make(root))
    for number, make in enumerate(cycle(makes)):
        if counts["kills"] >= kills:
            return counts, []
        job, out, ended = make_once(make), root / f"job{number}", False
        out.mkdir()
        while not ended:
            moment = draw.choices(("start", "step", "write"), (1, 4, 5))[0]
            process = processes.Started(*job.call(out))
            killed = counts["kills"] < kills and wait_and_kill(job, process, moment, out, draw)
            done, faults = process.wait(LIMIT), []
            if killed:
                there = any(out.glob(job.checkpoint))
                counts.update({"kills": 1, "in the middle of a write": job.is_writing(out), "checkpoints": there})
                faults = job.faults_after_kill(out)
            elif done.returncode == 0:
                ended, counts["ends"] = True, counts["ends"] + 1
                faults = [] if job.result(out) == job.end else [f"{out}: {job.name} ends otherwise"]
            else:
                faults = [f"{job.name}: status {done.returncode}: {done.stderr[-500:]}"]
            print(f"\r{counts['kills']} of {kills} kills, {job.name}  ", end="", file=sys.stderr)
            if faults:
                return counts, faults
        shutil.rmtree(out)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of commands (default: %(default)s)")
    parser.add_argument("--fit-kills", type=int, default=40, help="of fits (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args(arguments)
    draw, status = random.Random(options.seed), 0
    commands = [partial(Command, optimizer) for optimizer in OPTIMIZERS]
    fits = [partial(Fit, f"fit of a {data}") for data in ("pair", "loader", "sampler")]
    for kills, makes in ((options.kills, commands), (options.fit_kills, fits)):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            counts, faults = soak(kills, makes, draw, Path(root))
        print(file=sys.stderr)
        shown = ", ".join(f"{number} {name}" for name, number in counts.items())
        seconds = time.monotonic() - started
        print(f"{shown}; {seconds:.0f} s: {'FAULTS' if faults else 'all equal'}", *faults, sep="\n")
        status = 1 if faults else status
    return status


if __name__ == "__main__":
    sys.exit(main())
