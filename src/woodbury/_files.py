"""Whole files, errors of one line, and checkpoints: a line that says what follows, then what torch.save writes.

    woodbury <kind> <format> <SHA-256 of what follows>

The checksum is compared before anything is unpickled, and only tensors and plain values are (`weights_only`), so
that no file can run code.
"""

import hashlib
import io
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_LONGEST = 2000  # characters of a message; a file may hold a name of any length
_HEADER = re.compile(rb"woodbury (\w{1,20}) ([0-9]{1,9}) ([0-9a-f]{64})")


class OneLineError(Exception):
    """An error that a user can resolve: a command ends with its message, one line whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text on one line of bounded length, with spaces for control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:_LONGEST])


def one_line(error: BaseException) -> str:
    """The message of an error on one line (an OSError: without its path), or its type if it has none."""
    message = getattr(error, "strerror", None) or str(error)
    return printable(" ".join(message.split())) or type(error).__name__


def write_whole(path: Path, content: bytes | bytearray, temporary: Path | None = None) -> None:
    """Write a file so that at any moment, even after a power cut, it has the old content or the new one.

    The folder must exist, and one process at a time may write files of this ending there, unless another name is
    given: what a kill leaves behind has one name, and the next of them takes it.
    """
    temporary = temporary or path.with_name(f".unfinished{path.suffix}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # a system that cannot do this for folders orders the changes itself, or not at all
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # what follows cannot get to the disk first
        finally:
            os.close(folder)


def as_bytes(values: Any) -> bytes:
    """What torch.save writes, in memory: on a full disk it would raise errors that are no OSError."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def sealed(kind: str, version: int, values: Mapping[str, Any]) -> bytes:
    """A checkpoint as it is in its file."""
    content = as_bytes(dict(values))
    return f"woodbury {kind} {version} {hashlib.sha256(content).hexdigest()}\n".encode() + content


def unsealed(file: bytes, kind: str, version: int) -> dict[str, Any]:
    """The values in a checkpoint; raises a ValueError that says what the file is instead."""
    first, _, content = file.partition(b"\n")
    header = _HEADER.fullmatch(first)
    if header is None:
        raise ValueError("is damaged, or no checkpoint")
    if header[1] != kind.encode():
        raise ValueError(f"is a file of another kind ({header[1].decode()})")
    if int(header[2]) != version:
        written = f"format {int(header[2])}, this one reads {version}"
        raise ValueError(f"was written by another version of woodbury ({written})")
    if hashlib.sha256(content).hexdigest() != header[3].decode():
        raise ValueError("is damaged")
    try:
        values: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # torch.load raises errors of any kind
        raise ValueError(f"cannot be read: {one_line(error).split('. ')[0]}") from None
    return values
