"""How results are stored: files that are there whole or not at all, JSON that is checked when it is read."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

DIGITS = 5  # significant digits of a number for tables and drawings
SEAL = "sha256"  # the key of a checksum inside a JSON object


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Write a file so that at any moment, even after a power cut, it has the old content or the new one.

    The folder must exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # another process may write the same file
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, so that what follows cannot get there first.

    A system that cannot do this for folders orders the changes itself, or not at all.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files that a killed `write_whole` of this path left behind."""
    for unfinished in path.parent.glob(f".{path.name}.*"):
        unfinished.unlink(missing_ok=True)


def read_json(content: bytes) -> Any:
    """The value that JSON text describes; raises ValueError for anything that `json.dumps` cannot write.

    Python's own reader also takes NaN and Infinity, and may raise errors of other kinds.
    """
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # half a character may be written as an escape, and cannot be printed
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("too many brackets inside one another") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def seal(values: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object without its own key `SEAL`, the same for any spacing and order."""
    rest = {key: value for key, value in values.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def round_numbers(value: Any) -> Any:
    """The value with every float in it rounded to `DIGITS`, and None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return value
