"""The checkpoint of a run: one line that says what follows, then what torch.save writes.

    woodbury checkpoint <format> <SHA-256 of what follows>

The checksum is compared before anything is unpickled, and only tensors and plain values are (`weights_only`), so
that no file can run code.
"""

import hashlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from woodbury.runs.storage import FORMAT, RunFolderError, check_format, one_line, read_file, write_whole

_HEADER = re.compile(rb"woodbury checkpoint ([0-9]{1,9}) ([0-9a-f]{64})")


def as_bytes(values: Any) -> bytes:
    """What torch.save writes, in memory: on a full disk it would raise errors that are no OSError."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def write_checkpoint(path: Path, values: Mapping[str, Any]) -> None:
    """Write a checkpoint so that at any moment the file holds the old one or the new one."""
    content = as_bytes(dict(values))
    header = f"woodbury checkpoint {FORMAT} {hashlib.sha256(content).hexdigest()}\n"
    write_whole(path, header.encode() + content)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The values in a checkpoint; raises RunFolderError with the file, the fault and the way out in one line."""
    first, _, content = read_file(path).partition(b"\n")
    header = _HEADER.fullmatch(first)
    if header is not None:
        check_format(int(header[1]), path)
    if header is None or hashlib.sha256(content).hexdigest() != header[2].decode():
        raise RunFolderError(f"{path} is damaged; delete it to train from the start")
    try:
        values: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # torch.load raises errors of any kind
        reason = one_line(error).split(". ")[0]
        raise RunFolderError(f"{path} cannot be read: {reason}; delete it to train from the start") from None
    return values
