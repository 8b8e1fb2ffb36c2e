"""Whole files, JSON with a checksum inside it, and errors of one line."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 6  # of all files of a run; raised whenever another version would misread one of them
DIGITS = 5  # significant digits of a number for tables and drawings
_CHECKSUM = "sha256"  # its key in a JSON object
_REMEDY = "put back a whole copy, or train again in a new folder"
_LONGEST = 2000  # characters of a message; a file may hold a name of any length


# -- errors that a user can resolve: a command ends with their message -----------------------------------------


class OneLineError(Exception):
    """An error whose message is one line whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST))


class RunFolderError(OneLineError):
    """A run folder cannot be read, or holds another run."""


def printable(text: str, longest: int) -> str:
    """The text on one line: control characters as their escapes, the middle of a long text left out."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in _shortened(text, longest))
    return _shortened(shown, longest)


def one_line(error: BaseException) -> str:
    """The message of an error on one line (an OSError: without its path), or its type if it has none."""
    message = getattr(error, "strerror", None) or str(error)
    return printable(" ".join(message.split()), _LONGEST) or type(error).__name__


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


# -- whole files -----------------------------------------------------------------------------------------------


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


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files that a killed `write_whole` of this path left behind."""
    for unfinished in path.parent.glob(f".{path.name}.*"):
        unfinished.unlink(missing_ok=True)


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


def read_file(path: Path) -> bytes:
    """The content of a file of a run; raises RunFolderError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None


# -- JSON ------------------------------------------------------------------------------------------------------


def checksum(values: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object without its checksum, the same for any spacing and order."""
    rest = {key: value for key, value in values.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back, with the format in front and the checksum of it all."""
    plain = json.loads(json.dumps({"format": FORMAT, **values}, allow_nan=False))
    return {**plain, _CHECKSUM: checksum(plain)}


def read_checked(path: Path) -> dict[str, Any]:
    """The values that `with_checksum` was given, from a JSON file; raises RunFolderError if they have changed."""
    try:
        values = json.loads(read_file(path))
        version = values.pop("format")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):  # a list or a number has no such key
        raise RunFolderError(f"{path} is damaged, or no file of a run; {_REMEDY}") from None
    check_format(version, path)
    if values.pop(_CHECKSUM, None) != checksum({"format": version, **values}):
        raise RunFolderError(f"{path} is damaged: it has changed since it was written; {_REMEDY}")
    return dict(values)


def check_format(version: Any, path: Path) -> None:
    """Raise RunFolderError unless a file of this format can be read."""
    if version != FORMAT:
        raise RunFolderError(
            f"{path} was written by another version of woodbury (format {version}, this one reads {FORMAT})"
        )


def round_numbers(value: Any) -> Any:
    """The value with every float in it rounded to `DIGITS`, and None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return value
