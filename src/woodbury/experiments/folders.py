"""Where the runs of a command go: `out/<data set>-<number>/<optimizer>-seed<seed>`."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from woodbury.experiments.config import RunConfig
from woodbury.experiments.errors import RunFolderError

MODEL_FILE = "model.pt"  # the trained network; where it exists the run is complete
COMPLETE_FILE = "complete"  # the same of a run that a `woodbury.Recorder` wrote, which has no network


def run_folder(folder: Path, config: RunConfig) -> Path:
    """The folder of one run inside the folder of a command."""
    return folder / f"{config.optimizer}-seed{config.seed}"


def is_complete(folder: Path, recorded: bool = False) -> bool:
    """Whether the run in this folder has finished; `recorded` says that a `woodbury.Recorder` writes it."""
    return (folder / (COMPLETE_FILE if recorded else MODEL_FILE)).exists()


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
        runs = {run_folder(folder, config): config for config in configs}
        present = {run: config for run, config in runs.items() if RunConfig.is_in(run)}
        try:
            for run, config in present.items():
                check_same_run(config, run)
        except RunFolderError as error:  # another experiment with the same optimizer; try an older folder
            mismatch = mismatch or error
            continue
        if present:
            return folder
    if mismatch is not None:
        raise mismatch
    return None


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Raise RunFolderError if the folder holds another run than this one."""
    if not RunConfig.is_in(folder):
        return
    saved = RunConfig.load(folder).with_all_settings(where=str(folder))
    for name, (there, here) in saved.differences(config).items():
        raise RunFolderError(
            f"cannot resume {folder}: it has {name} {there}, and {here} was asked for; "
            "without --resume the run gets a new folder"
        )
