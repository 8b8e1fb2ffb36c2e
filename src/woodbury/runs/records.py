"""The records of a run, one JSON object per line, and the mark of its end.

    records.jsonl   {"kind": "step", ...} after each step, {"kind": "epoch", ...} at each evaluation
    complete        the SHA-256 of each file of a run that has ended, as `sha256sum` writes and checks them

The records of a complete run are compared with their checksum whenever they are read, those before a checkpoint
when a run goes on from it. Of an unfinished run each line must be JSON of a known kind: a value that has changed
is not noticed there, nor are lines missing at the end, where the run may have been killed.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from woodbury._files import write_whole
from woodbury.optimizers import OPTIMIZERS
from woodbury.runs.config import CONFIG_FILE, RunConfig, RunFolderError

RECORDS_FILE, COMPLETE_FILE = "records.jsonl", "complete"


class Records:
    """The records of a run under way, open for appending. One process at a time has them."""

    def __init__(self, folder: Path) -> None:
        self._file = os.fdopen(os.open(folder / RECORDS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+b")
        if not _lock(self._file.fileno()):
            self._file.close()
            raise RunFolderError(f"{folder} is in use, by another process or a recorder that was not closed")
        self._sha256, self.length = hashlib.sha256(), 0

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()  # which ends the lock

    @property
    def closed(self) -> bool:
        return self._file.closed

    def go_back(self, length: int, sha256: str | None = None) -> None:
        """Keep the first `length` bytes, whose checksum is this (None: not known), and go on behind them.

        Raises ValueError, and changes nothing, if they are not there or have another checksum.
        """
        self._file.seek(0)
        content = self._file.read(length)
        if len(content) < length or sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{RECORDS_FILE} has changed since the checkpoint was written")
        self._file.truncate(length)
        self._sha256, self.length = hashlib.sha256(content), length

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, with null for numbers that are not finite: all of it or, if interrupted, nothing."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            self._file.write(line)
            self._file.flush()  # a process that is killed later has not lost it
        except BaseException:
            self.go_back(self.length)
            raise
        self._sha256.update(line)
        self.length += len(line)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def sha256(self) -> str:
        """The checksum of everything so far, as it was written."""
        return self._sha256.hexdigest()


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed or the process ends; False if another process has it."""
    with suppress(ImportError, OSError):  # not on this system, or not on this file system
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def mark_complete(folder: Path, checksums: Mapping[str, str]) -> None:
    """Say that the run in a folder has ended, with the SHA-256 of its files by name; they are on disk before."""
    lines = [f"{sha256}  {name}\n" for name, sha256 in checksums.items()]
    write_whole(folder / COMPLETE_FILE, "".join(lines).encode())


def is_complete(folder: Path) -> bool:
    """Whether the run in this folder has ended."""
    return (folder / COMPLETE_FILE).exists()


def read_checked(folder: Path, name: str) -> bytes:
    """A file of a run, empty if it is not there; raises RunFolderError if it changed since the run ended."""
    path, mark = folder / name, folder / COMPLETE_FILE
    content = path.read_bytes() if path.exists() else b""
    line = f"{hashlib.sha256(content).hexdigest()}  {name}"
    if is_complete(folder) and line.encode() not in mark.read_bytes().split(b"\n"):
        raise RunFolderError(
            f"{path} is damaged: its SHA-256 does not agree with {mark}; put back a whole copy, "
            f"or delete {COMPLETE_FILE}, and the run counts as unfinished"
        )
    return content


def read_records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a run folder by kind, without a last line that was cut off.

    Raises RunFolderError that names the first line which is no record.
    """
    *lines, _cut = read_checked(folder, RECORDS_FILE).split(b"\n")
    records: dict[str, list[dict[str, Any]]] = {"step": [], "epoch": []}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[record["kind"]].append(record)
        except (ValueError, RecursionError, TypeError, KeyError):
            path = folder / RECORDS_FILE
            raise RunFolderError(
                f"{path} is damaged: line {number} is not the record of a step or an epoch"
            ) from None
    return records


# -- runs as a report reads them from their folders; of an unfinished run what has been recorded


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    config: RunConfig
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    day: str = ""  # of its last record, as 2020-12-31

    def settings(self) -> dict[str, Any]:
        """All that two runs of an optimizer on the same data set can differ in, except the seed: {name: value}."""
        config = self.config
        values = {name: value for name, value in config.settings.items() if name != "seed"}
        values["device"] = config.device
        if not config.recorded:
            values |= {"widths": config.network, "batch_size": config.batch_size, "epochs": config.epochs}
            values |= {"evaluations": config.evaluations, "dtype": config.dtype}
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat[name] = value
            if isinstance(value, Mapping):  # a policy: its name, and its fields one by one
                ((flat[name], fields),) = value.items()
                flat |= {f"{name}.{key}": part for key, part in fields.items()}
        return {name: str(value) if isinstance(value, list | dict) else value for name, value in flat.items()}


def load(paths: Iterable[Path]) -> list[Run]:
    """Read runs and sort them as figures and tables show them: by optimizer, then by seed.

    Args:
        paths: each a run folder, or a folder with run folders one or two levels below it.

    Runs that have no result yet are left out. Raises RunFolderError, with one line that names the path, if none
    has a result or one is damaged.
    """
    paths = [Path(path) for path in paths]
    # The same folder may be named twice, by itself and by the folder it lies in.
    folders = {folder.resolve(): folder for path in paths for folder in _run_folders(path)}
    runs = [run for run in map(_load_run, folders.values()) if run.epochs]
    if not runs:
        raise RunFolderError(f"{', '.join(map(str, paths))}: no run has a result yet")
    rank = {name: place for place, name in enumerate(OPTIMIZERS)}

    def order(run: Run) -> tuple[Any, ...]:
        name = run.config.optimizer
        return run.config.dataset, rank.get(name, len(rank)), name, run.config.seed

    return sorted(runs, key=order)


def _run_folders(path: Path) -> list[Path]:
    if RunConfig.is_in(path):
        return [path]
    folders = sorted({config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/{CONFIG_FILE}")})
    if not folders:
        raise RunFolderError(f"{path} holds no run folders" if path.exists() else f"{path} does not exist")
    return folders


def _load_run(folder: Path) -> Run:
    """Read one run folder; a run that has only just started has no records."""
    config, records, path = RunConfig.load(folder), read_records(folder), folder / RECORDS_FILE
    day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat() if path.exists() else ""
    return Run(config, records["step"], records["epoch"], day)
