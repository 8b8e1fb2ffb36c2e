"""How results are stored: files that are there whole or not at all, and numbers that JSON can hold."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 5  # significant digits of a number for tables and drawings


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


def round_numbers(value: Any) -> Any:
    """The value with every float in it rounded to `DIGITS`, and None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return value
