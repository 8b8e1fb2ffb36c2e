"""The checkpoint of a run (`woodbury._files` says how it is sealed)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from woodbury._files import sealed, unsealed, write_whole
from woodbury.runs.storage import FORMAT, RunFolderError, read_file


def write_checkpoint(path: Path, values: Mapping[str, Any]) -> None:
    """Write a checkpoint so that at any moment the file holds the old one or the new one."""
    write_whole(path, sealed("checkpoint", FORMAT, values))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The values in a checkpoint; raises RunFolderError with the file, the fault and the way out in one line."""
    try:
        return unsealed(read_file(path), "checkpoint", FORMAT)
    except ValueError as error:
        raise RunFolderError(f"{path} {error}; delete it to train from the start") from None
