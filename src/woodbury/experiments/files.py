"""Where the files of a data set come from, and the check that each is the published one.

With a data folder, named by `--data-dir` or else by the environment variable WOODBURY_DATA, files are read from it
and nothing is downloaded. Its layout is `<folder>/<data set>/<file>`, each file plain, with .gz or with .xz.
Without one, files are downloaded from their homes into a cache.
"""

import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from woodbury._files import OneLineError, one_line

ENVIRONMENT_VARIABLE = "WOODBURY_DATA"


class DataError(OneLineError):
    """A data file is absent or damaged, or cannot be downloaded."""


Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    name: str  # without .gz or .xz
    sha256: str | None  # of the uncompressed content, None if not known
    url: str  # its home
    member: str | None = None  # its path in the archive, if the home is one
    archive_sha256: str | None = None  # of the archive, compared before it is unpacked

    def __str__(self) -> str:
        """Its home in words, for someone who downloads it by hand."""
        return self.url if self.member is None else f"{self.url} ({self.member} in it)"


@dataclass(frozen=True)
class Files:
    """The files of the data set `dataset`; `data_dir` takes precedence over the environment variable."""

    dataset: str
    data_dir: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The data folder, None if files are downloaded."""
        path = self.data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
        return Path(path) if path else None

    def read(self, file: DataFile, parse: Callable[[bytearray], Parsed]) -> Parsed:
        """What `parse` returns for the uncompressed content of a file, after the content was checked.

        Raises DataError for a file that is absent or cannot be downloaded, that differs from the published one, or
        for which `parse` raises ValueError.
        """
        path = self._download(file) if self.folder is None else self._find(file, self.folder)
        way_out = f"delete or replace it, its home is {file}"
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

    def _find(self, file: DataFile, folder: Path) -> Path:
        path = folder / self.dataset / file.name
        for candidate in (path, path.with_name(f"{file.name}.gz"), path.with_name(f"{file.name}.xz")):
            if candidate.is_file():
                return candidate
        raise DataError(
            f"{path} is absent, also with .gz and .xz: put it there from {file}, "
            f"or name another folder by --data-dir or {ENVIRONMENT_VARIABLE}"
        )

    def _download(self, file: DataFile) -> Path:
        """The path of a file in the cache; downloads it if it is not there."""
        by_hand = (
            f"get it by hand as <folder>/{self.dataset}/{file.name}, plain or with .gz or .xz, "
            f"and name <folder> by --data-dir or {ENVIRONMENT_VARIABLE}"
        )
        try:
            import pooch
        except ImportError as error:
            install = 'downloading needs pooch: pip install "woodbury[experiments]"'
            raise DataError(f"cannot download {file}: {install}; or {by_hand}") from error
        pooch.get_logger().setLevel("WARNING")  # the progress bar and the errors say enough
        folder = Path(pooch.os_cache("woodbury")) / self.dataset
        name = file.url.rpartition("/")[2]
        unpack = pooch.Untar(members=[file.member]) if file.member is not None else None
        try:
            pooch.retrieve(file.url, file.archive_sha256, name, folder, processor=unpack, progressbar=True)
        except (OSError, ValueError, EOFError, zlib.error, tarfile.TarError) as error:  # or a wrong checksum
            raise DataError(f"cannot download {file}: {one_line(error)}; {by_hand}") from error
        return folder / name if file.member is None else folder / f"{name}.untar" / file.member


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path, format=lzma.FORMAT_XZ)  # the older .lzma has no checksum
    return path.open("rb")
