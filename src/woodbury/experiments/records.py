"""The records of a run: one JSON object per line, with a check value for each line in a file beside it.

    records.jsonl   {"kind": "step", ...} after each step, {"kind": "epoch", ...} at each evaluation
    records.crc32   line k: the CRC-32 of records.jsonl from its start to the end of its line k, in hexadecimal

Any change of a line, and lines that are lost, repeated or exchanged, are noticed when the records are read. Not
noticed are lines missing at the end of an unfinished run, which may have been killed there (`--resume` notices if
its checkpoint knows of them), and changed numbers in a folder without records.crc32, as older versions wrote it.
"""

import hashlib
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.storage import read_json, write_whole

RECORDS_FILE, CHECKS_FILE = "records.jsonl", "records.crc32"
EPOCH_KEYS = ("epoch", "step", "seconds", "train_loss", "test_error")
# What a record must hold, and what it may hold. A number that must be there is finite and not negative. Null is a
# number that is not finite; what was not measured is absent.
_KEYS = {"epoch": EPOCH_KEYS, "step": ("step", "damping")}
_OPTIONAL: dict[str, tuple[str, ...]] = {"epoch": ("test_loss",), "step": ("ratio", "seconds")}
_MEASURED = ("test_error",)  # which `woodbury train` always writes, and a recorded run may lack
_NEEDED = ("epoch", "step", "seconds")
_LARGEST = 2**53  # whole numbers up to here are exact as floats
_REMEDY = f"delete {CHECKS_FILE} to read the records as they are"
_OTHER_PROCESS = "another process is training in {}: wait until it ends, or stop it"


class Records:
    """The records of a run under way, open for appending. One process at a time has them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORDS_FILE
        self._path.touch()
        self._file = self._path.open("r+b")
        if not _lock(self._file.fileno()):
            self._file.close()
            raise RunFolderError(_OTHER_PROCESS.format(folder))
        self._checks: BinaryIO | None = None  # open from `go_back` on
        self._sha256, self._crc32, self.length = hashlib.sha256(), 0, 0

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._checks is not None:
            self._checks.close()
        self._file.close()  # which ends the lock

    def go_back(self, length: int, sha256: str | None) -> None:
        """Keep the first `length` bytes, whose checksum is this (None: not known), and go on behind them.

        Raises ValueError, and changes nothing, if they are not there or have another checksum.
        """
        if self._file.seek(0, os.SEEK_END) < length:
            raise ValueError(f"{self._path.name} is shorter than when the checkpoint was written")
        self._file.seek(0)
        content = self._file.read(length)
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{self._path.name} has changed since the checkpoint was written")
        if content and not content.endswith(b"\n"):
            raise ValueError(f"{self._path.name} has no end of a line where the checkpoint was written")
        checks = []
        self._sha256, self._crc32 = hashlib.sha256(content), 0
        for line in content.split(b"\n")[:-1]:
            self._crc32 = zlib.crc32(line + b"\n", self._crc32)
            checks.append(f"{self._crc32:08x}\n")
        self._file.truncate(length)  # before the checks: there may be too many of them, never too few
        self._file.seek(length)
        self.length = length
        path = self._path.with_name(CHECKS_FILE)
        write_whole(path, "".join(checks).encode())
        self._checks = path.open("ab")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, with null for numbers that are not finite. A run that is killed loses none."""
        assert self._checks is not None, "go_back comes first"
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._crc32 = zlib.crc32(line, self._crc32)
        self._checks.write(b"%08x\n" % self._crc32)
        self._checks.flush()
        self._file.write(line)
        self._file.flush()
        self._sha256.update(line)
        self.length += len(line)

    def sync(self) -> None:
        """Wait until everything is on disk."""
        for file in (self._checks, self._file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    @property
    def sha256(self) -> str:
        """The checksum of everything so far."""
        return self._sha256.hexdigest()


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed or the process ends; False if another process has it."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not on this file system
        return True
    return True


def read_records(folder: Path, complete: bool, recorded: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The records of a run folder by kind.

    `complete` says that the run has ended, `recorded` that a `woodbury.Recorder` wrote it.

    Raises RunFolderError that names the first line which is not a record or does not agree with its check value.
    """
    path = folder / RECORDS_FILE
    content = _read(path) or b""
    checks = _read_checks(folder)  # after the records: of a run that goes on there may be more of them
    *lines, cut = content.split(b"\n")
    if checks is None and cut and _is_json(cut):
        lines.append(cut)  # an older version, or a hand, wrote it without its end
    if checks is not None:
        _compare(lines, checks, path)
        if complete and (cut or len(lines) < len(checks)):
            raise RunFolderError(f"{path} is damaged: it ends after line {len(lines)}; train again, or {_REMEDY}")
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KEYS}
    for number, line in enumerate(lines, start=1):
        where = f"{path} is damaged: line {number}"
        try:
            record = read_json(line)
        except ValueError:
            raise RunFolderError(f"{where} is not JSON") from None
        kind = kind_of(record, where, recorded)
        check_order(records[kind][-1:], record, kind, where)
        records[kind].append(record)
    return records


def _compare(lines: list[bytes], checks: list[str], path: Path) -> None:
    """Raise RunFolderError unless each line agrees with its check value."""
    running = 0
    for number, line in enumerate(lines, start=1):
        running = zlib.crc32(line + b"\n", running)
        if number > len(checks):
            raise RunFolderError(
                f"{path.with_name(CHECKS_FILE)} is damaged: it ends before line {number}; {_REMEDY}"
            )
        if f"{running:08x}" != checks[number - 1]:
            raise RunFolderError(
                f"{path} is damaged: line {number} does not agree with {CHECKS_FILE}; train again, or {_REMEDY}"
            )


def _read_checks(folder: Path) -> list[str] | None:
    """The check values of the lines, without one that was cut off; None if there are none."""
    content = _read(folder / CHECKS_FILE)
    if content is None:
        return None
    *lines, _cut = content.decode("latin-1").split("\n")
    return lines


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None


def _is_json(line: bytes) -> bool:
    try:
        read_json(line)
    except ValueError:
        return False
    return True


def kind_of(record: Any, where: str, recorded: bool = False) -> str:
    """ "step" or "epoch", the kind of a record; raises RunFolderError if it is neither or lacks a number."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise RunFolderError(f"{where} is not the record of a step or an epoch")
    for key in _KEYS[kind]:
        if recorded and key in _MEASURED and key not in record:
            continue
        value = record.get(key, "")
        if not _is_number(value) and not (value is None and key not in _NEEDED):
            raise RunFolderError(f"{where} has no number '{key}'")
        if key in _NEEDED and value < 0:
            raise RunFolderError(f"{where} has a negative '{key}'")
    for key in _OPTIONAL[kind]:
        if record.get(key) is not None and not _is_number(record[key]):
            raise RunFolderError(f"{where} has a '{key}' that is no number")
    return kind


def check_order(before: list[dict[str, Any]], record: dict[str, Any], kind: str, where: str) -> None:
    """Raise RunFolderError if a record has an earlier step than the one before it, or the same step twice."""
    if not before:
        return
    step, last = record["step"], before[0]["step"]
    if step < last or (kind == "step" and step == last):  # a run that diverges is evaluated twice at its end
        raise RunFolderError(f"{where} has step {step} after step {last}")


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold; true and false are none."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)
