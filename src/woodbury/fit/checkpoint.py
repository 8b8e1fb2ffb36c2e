"""The file of a fit under way, from which `resume=` goes on after a kill."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from woodbury._files import sealed, unsealed, write_whole

KIND, FORMAT = "fit", 1
INTERVAL = 30.0  # seconds between two writes
Where = str | os.PathLike[str]


class Checkpoint:
    """Writes the state of a fit now and then, one of several processes; at any moment the file is whole."""

    def __init__(self, path: Where, writes: bool) -> None:
        self.path, self.writes = Path(path), writes
        self._written = -math.inf
        if not writes:
            return
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"fit: checkpoint={str(path)!r}: there is no folder {str(self.path.parent)!r}")
        if self.path.exists():
            with self.path.open("rb") as file:
                is_ours = file.read(64).startswith(f"woodbury {KIND} ".encode())
            if not is_ours:
                raise ValueError(f"fit: checkpoint={str(path)!r} is a file of another kind: choose another name")

    def is_due(self, now: float) -> bool:
        return now - self._written >= INTERVAL

    def write(self, state: Mapping[str, Any], now: float) -> None:
        """Write the state; where that fails the fit goes on, and says so."""
        self._written = now
        if not self.writes:
            return
        try:
            temporary = self.path.with_name(f".{self.path.name}.unfinished")
            write_whole(self.path, sealed(KIND, FORMAT, state), temporary)
        except OSError as error:
            message = f"fit: checkpoint={str(self.path)!r} cannot be written ({error}); the fit goes on without"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def read_checkpoint(path: Where) -> dict[str, Any]:
    """The state in a file; an error that names it where it holds none."""
    try:
        return unsealed(Path(path).read_bytes(), KIND, FORMAT)
    except ValueError as error:
        raise ValueError(f"fit: resume={str(path)!r} {error}") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"fit: resume={str(path)!r}: there is no such file") from None
