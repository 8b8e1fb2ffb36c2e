"""Damage the files of runs and data sets byte by byte: what comes of it is right or refused, never wrong.

    python -m tests.fuzz.files --count 5000 --seed 0
    python -m tests.fuzz.files --case 1234 --seed 0      one case again, with its error in full

Outcomes of a case:

    right    the result of the undamaged file
    refused  an error of the package (RunFolderError, DataError) in one line that names the file
    open     another result from a file that no checksum covers: the records of an unfinished run, which has none
             yet, and a data set that is published without one. Nobody can know there that a value has changed:
             reading must not fail or hang, and what a report would make of the value is not looked at
    wrong    another result from a file that a checksum covers
    crashed  any other exception, more than 20 seconds of processor time, or more than 1 GiB of memory beyond what
             was there
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.run_folders import invoke
from woodbury.experiments import train as training
from woodbury.experiments.data import Dataset, read_cifar, read_covtype, read_idx, read_libsvm
from woodbury.experiments.files import DataError, DataFile, Files
from woodbury.experiments.presets import PRESETS
from woodbury.runs import report
from woodbury.runs.config import RunConfig, RunFolderError
from woodbury.runs.records import Records

SECONDS, BYTES = 20, 1 << 30  # that a case may take: of the processor, of memory
HOSTILE = (
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"null", b"true", b'"', b"{", b"}", b"\\ud800", b"\\u0000"),
    *(b"[" * 5000, b"9" * 30, b"9" * 5000, b"</script>", b"../../x", b"\n", b"\r\n", b"\0", b"\xff"),
)
VALUES = (
    *(None, True, 0, -1, 3, 0.5, 1e300, -1e-300, 2**53, 10**400, float("nan"), float("inf"), [], {}, [[]]),
    *({"a": 1}, [1, 2], "", "x", "x" * 10**5, "two\nlines", "\0", "\ud800", "[/]", "$", "../x", "</script>"),
)


class Target(NamedTuple):
    """A file to damage, and how it is read."""

    file: str  # path below the folder of the target
    read: Callable[[Path], Any]  # the result, from the folder
    weight: int = 10
    checked: bool = True  # whether a checksum covers the file, so that another result is wrong


class Outcome(NamedTuple):
    """What came of a case."""

    target: str
    damage: str
    outcome: str
    detail: str


# -- damage ----------------------------------------------------------------------------------------------------


def damaged(content, draw):
    """The content with one to three damages, and their names; it always differs."""
    while True:
        changed, names = bytearray(content), []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            name = draw.choice(list(DAMAGES))
            names.append(name)
            DAMAGES[name](changed, draw)
        if changed != content:
            return bytes(changed), "+".join(names)


def _flip(content, draw):
    for _ in range(draw.choice((1, 1, 2, 8))):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut(content, draw):
    del content[draw.choice((0, draw.randrange(len(content) + 1), max(0, len(content) - draw.randrange(1, 40)))) :]


def _replace(content, draw):
    """Put other bytes, or none, in place of a range, short ones as likely as long ones."""
    start = draw.randrange(len(content) + 1)
    length = draw.choice((0, 1, 64, int((len(content) - start + 1) ** draw.random())))
    random_bytes = draw.randbytes(draw.choice((1, 2, 16, 1000)))
    content[start : start + length] = draw.choice((b"", random_bytes, draw.choice(HOSTILE)))


def _line(content, draw):
    """Remove, repeat or exchange whole lines."""
    lines = bytes(content).splitlines(keepends=True)
    if lines:
        first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.randrange(3)
        if kind == 0:
            del lines[first]
        elif kind == 1:
            lines.insert(second, lines[first])
        else:
            lines[first], lines[second] = lines[second], lines[first]
        content[:] = b"".join(lines)


def _value(content, draw):
    """Put another value in place of one somewhere in JSON, or in one line of it."""
    lines = bytes(content).splitlines(keepends=True)
    parts = [(0, bytes(content))]
    if lines:
        index = draw.randrange(len(lines))
        parts.append((sum(map(len, lines[:index])), lines[index]))
    for start, text in parts:
        try:
            root = {"": json.loads(text)}
        except (ValueError, RecursionError):
            continue
        place = root
        while True:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inside = place[key]
            if not isinstance(inside, dict | list) or not inside or draw.random() < 0.1:
                break
            place = inside
        place[key] = draw.choice(VALUES)
        end = b"\n" if text.endswith(b"\n") else b""
        content[start : start + len(text)] = json.dumps(root[""]).encode() + end
        return


DAMAGES = {own.__name__.strip("_"): own for own in (_flip, _cut, _replace, _line, _value)}


# -- what is done with a file ----------------------------------------------------------------------------------


def tiny_data():
    """A problem of three classes whose runs take a moment."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
    return Dataset(inputs[:40], targets[:40], inputs[40:], targets[40:], classes=3)


DATA = tiny_data()


def tiny_config(optimizer="smw-gn", **settings):
    """A run of 20 steps on it, 5 to an epoch; the same bytes on every machine."""
    config = PRESETS["digits"].config("digits", optimizer, seed=1, epochs=4, batch_size=8, settings=settings)
    return dataclasses.replace(config, widths=(6, 4, 3), versions={"torch": "0"}, machine={"threads": 1})


def stop_after(steps):
    """A `stop` of `train` that is true from that call on."""
    calls = iter(range(1, 10**9))
    return lambda: next(calls) >= steps


def resumed(optimizer):
    """The state that a run in a folder goes on from, and the records it keeps."""

    def use(folder):
        with Records(folder) as records:
            run = training._Run(tiny_config(optimizer), DATA, folder / "checkpoint.pt", records)
            run.restore()
            kept = records.length, records.sha256
        values = run.model.state_dict(), run.optimizer.state_dict(), run.step, run.seconds, kept
        return training.as_bytes(values), (folder / "records.jsonl").read_bytes()

    return use


def finished(folder):
    """The network that a complete run has left."""
    training.train(tiny_config(), folder, data=DATA, resume=True)
    return (folder / "model.pt").read_bytes()


def reported(folder):
    """The runs that a report reads; its tables and its page are made from them as well."""
    runs = report.load([folder])
    report.ends_tables(runs)
    report.html(runs)
    return runs


def commanded(folder):
    """What `woodbury report` prints; its errors are one line and status 2."""
    done = invoke("report", folder, "--out", folder / "out")
    if done.exit_code == 2:
        raise RunFolderError(done.output) if done.output.count("\n") == 1 else AssertionError(done.output)
    if done.exception is not None:
        raise done.exception
    return done.output


def read_by(parse, sha256):
    """What a reader of data sets makes of a file `set/file`, plain or compressed."""

    def use(folder):
        file = DataFile("file", sha256, "https://example.org/file")
        return training.as_bytes(Files("set", folder).read(file, parse))

    return use


# -- the files -------------------------------------------------------------------------------------------------


@contextmanager
def _even_clock():
    """Inside, each look at the clock is 1/1024 second after the one before, so that the records do not vary."""
    looks = iter(range(1, 10**9))
    clock, time.perf_counter = time.perf_counter, lambda: next(looks) / 1024
    try:
        yield
    finally:
        time.perf_counter = clock


def make_targets(root):
    """Write the undamaged files of each target into a folder of its name."""
    targets = {}
    with _even_clock():
        for optimizer in ("smw-gn", "kfac", "adam"):
            folder = root / f"checkpoint {optimizer}"
            with suppress(training.InterruptedRunError):
                training.train(tiny_config(optimizer), folder, data=DATA, stop=stop_after(12))
            targets[folder.name] = Target("checkpoint.pt", resumed(optimizer))
        training.train(tiny_config(), root / "complete", data=DATA)
    for records in root.glob("*/records.jsonl"):
        os.utime(records, (0, 0))  # the day in a report
    others = {
        "records at resume": Target("records.jsonl", resumed("smw-gn")),
        "unfinished records": Target("records.jsonl", lambda folder: report.load([folder]), checked=False),
        "model": Target("model.pt", finished),
        "mark of a model": Target("complete", finished, 5),
        "config": Target("config.json", RunConfig.load),
        "config by command": Target("config.json", commanded, 1),
        "records": Target("records.jsonl", reported),
        "records by command": Target("records.jsonl", commanded, 1),
        "mark of records": Target("complete", reported, 5),
    }
    for name in others:
        is_unfinished = name in ("records at resume", "unfinished records")
        shutil.copytree(root / ("checkpoint smw-gn" if is_unfinished else "complete"), root / name)
    targets |= others
    _data_targets(root, targets)
    return targets


def _data_targets(root, targets):
    draw = random.Random(0)
    images = b"\0\0\x08\x03" + bytes((0, 0, 0, 9, 0, 0, 0, 4, 0, 0, 0, 5)) + draw.randbytes(180)
    cifar = b"".join(bytes([draw.randrange(10)]) + draw.randbytes(3072) for _ in range(3))
    rows = ([draw.randrange(3000) for _ in range(54)] + [k % 7 + 1] for k in range(9))
    table = b"".join(b",".join(b"%d" % value for value in row) + b"\n" for row in rows)
    lines = b"".join(
        b"%+d %s\n" % (draw.choice((-1, 1)), b" ".join(b"%d:%.3f" % (k, draw.random()) for k in range(1, 9)))
        for _ in range(9)
    )

    def read_lines(content):
        return read_libsvm(content, rows=9, features=8)

    for name, content, parse in (
        ("idx", images, read_idx),
        ("cifar", cifar, read_cifar),
        ("covtype", table, read_covtype),
        ("libsvm", lines, read_lines),
    ):
        sha256 = hashlib.sha256(content).hexdigest()
        packings = {"": content, ".gz": gzip.compress(content, mtime=0), ".xz": lzma.compress(content)}
        # the one reader of a file that is published without a checksum
        checksums = (sha256, None) if name == "libsvm" else (sha256,)
        for (ending, packed), known in product(packings.items(), checksums):
            target = f"{name}{ending}" if known else f"{name}{ending} without checksum"
            (root / target / "set").mkdir(parents=True)
            (root / target / "set" / f"file{ending}").write_bytes(packed)
            checked = known is not None or ending != ""  # the CRC of gzip and xz is a checksum as well
            targets[target] = Target(f"set/file{ending}", read_by(parse, known), 2 if known else 4, checked)


# -- cases -----------------------------------------------------------------------------------------------------


class _TooLongError(BaseException):
    """A case took too long; no code under test catches it."""


@contextmanager
def _limits():
    """Inside, time and memory are bounded."""

    def end(number, frame):
        raise _TooLongError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = Path("/proc/self/statm")
    if used.exists():
        pages = int(used.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Fuzzer:
    """The files, and a folder to damage them in."""

    def __init__(self, root):
        self.root = root / "whole"
        self.work = root / "work"
        self.root.mkdir(parents=True)
        self.targets = make_targets(self.root)
        self._whole = {}

    def whole(self, name):
        """The result of a target while its file is undamaged."""
        if name not in self._whole:
            self._whole[name] = self._use(name, None)
        return self._whole[name]

    def case(self, seed, number, only=None):
        draw = random.Random(f"{seed}:{number}")
        names = [only] if only else list(self.targets)
        name = draw.choices(names, [self.targets[name].weight for name in names])[0]
        content, damage = damaged((self.root / name / self.targets[name].file).read_bytes(), draw)
        return Outcome(name, damage, *self.judge(name, content))

    def judge(self, name, content):
        """The outcome of a target with this content in its file, and details."""
        target, whole = self.targets[name], self.whole(name)
        try:
            with _limits():
                result = self._use(name, content)
        except (RunFolderError, DataError) as error:
            message = str(error)
            return "refused" if message.isprintable() and len(message) <= 2000 else "crashed", message
        except (Exception, _TooLongError):
            return "crashed", traceback.format_exc()
        if result == whole:
            return "right", ""
        return "wrong" if target.checked else "open", f"got {str(result)[:2000]}, expected {str(whole)[:2000]}"

    def _use(self, name, content):
        """The result of a target with this content in its file, in a fresh copy of its folder."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.root / name, self.work)
        if content is not None:
            path = self.work / self.targets[name].file
            path.write_bytes(content)
            os.utime(path, (0, 0))
        return self.targets[name].read(self.work)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="number of cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: %(default)s)")
    parser.add_argument("--case", type=int, help="run this case alone and show what it did")
    parser.add_argument("--target", help="damage files of this kind alone")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    numbers = range(options.count) if options.case is None else [options.case]
    with tempfile.TemporaryDirectory() as root:
        fuzzer = Fuzzer(Path(root))
        found = {number: fuzzer.case(options.seed, number, options.target) for number in numbers}
    for name in (*fuzzer.targets, ""):
        counts = Counter(case.outcome for case in found.values() if name in ("", case.target))
        print(f"{name or 'all'}:", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"{len(numbers)} cases, seed {options.seed}, {time.monotonic() - started:.0f} s")
    failed = {number: case for number, case in found.items() if case.outcome in ("wrong", "crashed")}
    for number, case in (failed if options.case is None else found).items():
        detail = case.detail if options.case is not None else case.detail[:300]
        print(f"--case {number}: {case.target}, {case.damage}: {case.outcome}, {detail}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
