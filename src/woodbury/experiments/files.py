"""The files of a data set, each checked to be the published one.

They are read from a data folder, named by `--data-dir` or else by the environment variable WOODBURY_DATA. Its
layout is `<folder>/<data set>/<file>`, each file plain, with .gz or with .xz. Nothing is downloaded.
"""

import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from woodbury.runs.storage import OneLineError, one_line

ENVIRONMENT_VARIABLE = "WOODBURY_DATA"


class DataError(OneLineError):
    """A data file is absent or damaged."""


Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    name: str  # without .gz or .xz
    sha256: str | None  # of the uncompressed content, None if not known
    home: str  # where to get it, in words


@dataclass(frozen=True)
class Files:
    """The files of the data set `dataset`; `data_dir` takes precedence over the environment variable."""

    dataset: str
    data_dir: Path | None = None

    def read(self, file: DataFile, parse: Callable[[bytearray], Parsed]) -> Parsed:
        """What `parse` returns for the uncompressed content of a file, after the content was checked.

        Raises DataError for a file that is absent or differs from the published one, or for which `parse` raises
        ValueError.
        """
        path = self._find(file)
        way_out = f"delete or replace it, its home is {file.home}"
        try:
            with _open(path) as stream:
                content = bytearray(stream.read())
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"cannot read {path}: {one_line(error)}; {way_out}") from error
        found = hashlib.sha256(content).hexdigest()
        if file.sha256 not in (None, found):
            raise DataError(f"{path} is damaged: expected sha256 {file.sha256}, found {found}; {way_out}")
        try:
            return parse(content)
        except ValueError as error:
            raise DataError(f"{path} is damaged: {one_line(error)}; {way_out}") from error

    def _find(self, file: DataFile) -> Path:
        """The path of a file in the data folder."""
        folder = self.data_dir or os.environ.get(ENVIRONMENT_VARIABLE) or "<folder>"
        path = Path(folder) / self.dataset / file.name
        for candidate in (path, path.with_name(f"{file.name}.gz"), path.with_name(f"{file.name}.xz")):
            if candidate.is_file():
                return candidate
        raise DataError(
            f"{path} is absent, also with .gz and .xz: put it there from {file.home}, "
            f"and name the folder by --data-dir or {ENVIRONMENT_VARIABLE}"
        )


def _open(path: Path) -> io.BufferedIOBase:
    """The uncompressed content of a file as a stream."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path, format=lzma.FORMAT_XZ)  # the older .lzma has no checksum
    return path.open("rb")
