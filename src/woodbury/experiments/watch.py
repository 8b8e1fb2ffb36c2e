"""A page that is written again whenever the records below it have grown."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from woodbury.experiments import report
from woodbury.experiments.config import CONFIG_FILE
from woodbury.experiments.errors import RunFolderError
from woodbury.experiments.records import RECORDS_FILE

EVERY = 5.0  # seconds between two looks, and between two of the page at itself


def watch(
    paths: Sequence[Path], folder: Path, seconds: float, wait: Callable[[float], object]
) -> Iterator[Path | RunFolderError]:
    """Look at the records again and again; yield the page whenever it was written, or why it could not be.

    wait(seconds) passes the time between two looks. The page looks at itself as often. There may be no run yet.
    """
    before, complaint = None, ""
    while True:
        now = _sizes(paths)
        if now != before:
            try:
                page = report.write_page(report.load(paths), folder, refresh=seconds)
            except RunFolderError as error:  # nothing there yet, or a line that is being written
                if str(error) != complaint:
                    complaint = str(error)
                    yield error
            else:
                before, complaint = now, ""
                yield page
        wait(seconds)


def _sizes(paths: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of the files that a report of these paths is made of."""
    sizes = {}
    for path in paths:
        for name in (CONFIG_FILE, RECORDS_FILE):
            for file in (path, *(found for depth in ("", "*/", "*/*/") for found in path.glob(f"{depth}{name}"))):
                try:
                    state = file.stat()
                except OSError:  # just removed, or not there yet
                    continue
                if file.is_file():
                    sizes[file] = (state.st_size, state.st_mtime_ns)
    return sizes
