"""Where the runs of a command go: `out/<data set>-<number>/<optimizer>-seed<seed>`."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from woodbury.experiments.config import RunConfig
from woodbury.experiments.errors import RunFolderError


def run_folder(folder: Path, config: RunConfig) -> Path:
    """The folder of one run inside the folder of a command."""
    return folder / f"{config.optimizer}-seed{config.seed}"


def new_folder(out: Path, dataset: str) -> Path:
    """Create and return the first of `out/dataset-1`, `out/dataset-2`, ... that does not exist."""
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = out / f"{dataset}-{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def folder_to_resume(out: Path, configs: Sequence[RunConfig]) -> Path | None:
    """The newest of `out/dataset-1`, `out/dataset-2`, ... in which one of these runs was begun, if any.

    Raises RunFolderError if runs of these names were begun, but all of them with other settings.
    """
    dataset = configs[0].dataset
    numbers = [path.name.removeprefix(f"{dataset}-") for path in out.glob(f"{dataset}-*") if path.is_dir()]
    mismatch: RunFolderError | None = None  # in the newest folder with runs of these names
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        folder = out / f"{dataset}-{number}"
        try:
            begun = [check_same_run(config, run_folder(folder, config)) for config in configs]
            if any(begun):
                return folder
        except RunFolderError as error:  # another experiment with the same optimizer; try an older folder
            mismatch = mismatch or error
    if mismatch is not None:
        raise mismatch
    return None


def check_same_run(config: RunConfig, folder: Path) -> bool:
    """Whether the folder holds a run; raises RunFolderError if that is another one than this."""
    if not RunConfig.is_in(folder):
        return False
    RunConfig.load(folder).check_same(config, folder, "without --resume the run gets a new folder")
    return True
