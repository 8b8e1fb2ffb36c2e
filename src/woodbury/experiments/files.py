"""Where the files of a data set come from, and the check that each is the published one.

With a data folder, named by `--data-dir` or else by the environment variable WOODBURY_DATA, files are read from it
and nothing is downloaded. Its layout is `<folder>/<data set>/<file>`, each file plain, with .gz or with .xz.
Without one, files are downloaded from their homes into a cache of the same layout.
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
from typing import IO, TypeVar

from woodbury.runs.storage import OneLineError, one_line, write_whole

ENVIRONMENT_VARIABLE = "WOODBURY_DATA"

_SUFFIXES = ("", ".gz", ".xz")  # in the order in which a folder is searched
_DAMAGED_STREAM = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError)
_CHUNK = 1 << 20  # bytes


class DataError(OneLineError):
    """A data file is absent or damaged, or cannot be downloaded."""


Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Home:
    """Where a file is published."""

    url: str
    sha256: str | None  # of the download, None if not known


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    name: str  # without .gz or .xz
    sha256: str | None  # of the uncompressed content, None if not known
    home: Home
    member: str | None = None  # its path in the archive, if the home is one


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
        path = self._fetch(file) if self.folder is None else self._find(file, self.folder)
        try:
            with _open(path) as stream:
                content = _read_checked(stream, str(path), file)
        except OSError as error:
            raise DataError(f"cannot read {path}: {one_line(error)}") from error
        try:
            return parse(content)
        except ValueError as error:
            raise DataError(f"{path} is not what {file.home.url} gives: {one_line(error)}") from error

    def _find(self, file: DataFile, folder: Path) -> Path:
        """The path of a file in the data folder."""
        path = folder / self.dataset / file.name
        for suffix in _SUFFIXES:
            candidate = path.with_name(file.name + suffix)
            if candidate.is_file():
                return candidate
        named_by = "--data-dir" if self.data_dir else ENVIRONMENT_VARIABLE
        raise DataError(
            f"{path} is absent, also with .gz and .xz: put it there from {_source(file)}, "
            f"or name another folder by --data-dir or {ENVIRONMENT_VARIABLE} ({folder} is from {named_by})"
        )

    def _fetch(self, file: DataFile) -> Path:
        """The path of a file in the cache; downloads it if it is not there."""
        folder = cache_folder() / self.dataset
        if file.member is None:
            return self._download(file, folder)
        path = folder / file.name
        if not path.is_file():
            content = _read_member(self._download(file, folder), file)
            try:
                write_whole(path, content)
            except OSError as error:
                raise DataError(f"cannot write {path}: {one_line(error)}") from error
        return path

    def _download(self, file: DataFile, folder: Path) -> Path:
        """The path in `folder` of the download from the file's home; an undamaged copy is not fetched again."""
        import pooch

        pooch.get_logger().setLevel("WARNING")  # the progress bar and the errors say enough
        url = file.home.url
        name = url.rpartition("/")[2]
        try:
            return Path(
                pooch.retrieve(url, known_hash=file.home.sha256, fname=name, path=folder, progressbar=True)
            )
        except (OSError, ValueError) as error:  # of requests and the file system, or a wrong checksum
            attempts = error.args[0] if error.args else None  # a connection error has its reason in there
            reason = one_line(getattr(attempts, "reason", error))
            raise DataError(
                f"cannot download {_source(file)}: {reason}; get it by hand as "
                f"<folder>/{self.dataset}/{file.name}, plain or with .gz or .xz, "
                f"and name <folder> by --data-dir or {ENVIRONMENT_VARIABLE}"
            ) from error


def cache_folder() -> Path:
    """The folder for downloads: the operating system's place for caches."""
    try:
        import pooch
    except ImportError as error:
        raise DataError(
            f"neither --data-dir nor {ENVIRONMENT_VARIABLE} names a data folder, and downloading needs pooch: "
            'pip install "woodbury[experiments]"'
        ) from error
    return Path(pooch.os_cache("woodbury"))


def _open(path: Path) -> io.BufferedIOBase:
    """The uncompressed content of a file as a stream."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path, format=lzma.FORMAT_XZ)  # the older .lzma has no checksum
    return path.open("rb")


def _read_checked(stream: io.BufferedIOBase | IO[bytes], where: str, file: DataFile) -> bytearray:
    """The content of a stream; raises DataError if it is not that of `file`, with `where` as its place."""
    content, digest = bytearray(), hashlib.sha256()
    fault = ""
    try:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            content += chunk
    except _DAMAGED_STREAM as error:
        fault = f" ({one_line(error)} after {len(content)} bytes)"
    sha256 = digest.hexdigest()
    if fault or file.sha256 not in (None, sha256):
        raise DataError(
            f"{where} is damaged: expected sha256 {file.sha256 or 'unknown'}, found {sha256}{fault}; "
            f"delete or replace it, its home is {file.home.url}"
        )
    return content


def _read_member(archive: Path, file: DataFile) -> bytearray:
    """The content of `file` in an archive; nothing else is read and no link is followed."""
    where = f"{file.member} in {archive}"
    try:
        with tarfile.open(archive) as members:
            member = next((member for member in members if member.name == file.member), None)
            if member is None:
                raise DataError(f"{where} is absent; delete the archive, its home is {file.home.url}")
            stream = members.extractfile(member) if member.isreg() else None
            if stream is None:
                raise DataError(f"{where} is not a plain file; delete the archive, its home is {file.home.url}")
            return _read_checked(stream, where, file)
    except (*_DAMAGED_STREAM, OSError) as error:
        raise DataError(f"cannot read {where}: {one_line(error)}; delete the archive") from error


def _source(file: DataFile) -> str:
    """The place of a file in words, for someone who downloads it by hand."""
    return file.home.url if file.member is None else f"{file.home.url} ({file.member} in it)"
