"""How results are kept: files that are there whole or not at all, and numbers as JSON can hold them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 5  # significant digits of a number that is kept for tables and drawings


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Write a file so that at any moment either the old content or the new one is there, never a part.

    That holds when the machine stops, too. The folder must exist.
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
    """Remove what `write_whole` of this path left behind where its process was killed."""
    for unfinished in path.parent.glob(f".{path.name}.*"):
        unfinished.unlink(missing_ok=True)


def rounded(value: Any) -> Any:
    """The value as JSON can hold it: floats with few digits, None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
