"""Runs as a report reads them from their folders; of an unfinished run what has been recorded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from woodbury.optimizers import OPTIMIZERS
from woodbury.runs.config import CONFIG_FILE, RunConfig
from woodbury.runs.records import RECORDS_FILE, read_records
from woodbury.runs.storage import RunFolderError


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    config: RunConfig
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    day: str = ""  # of its last record, as 2020-12-31

    def settings(self) -> dict[str, Any]:
        """All that two runs of an optimizer on the same data set can differ in, except the seed: {name: value}."""
        config = self.config
        values = {name: value for name, value in config.settings.items() if name != "seed"}
        values["device"] = config.device
        if not config.recorded:
            values |= {"widths": config.network, "batch_size": config.batch_size, "epochs": config.epochs}
            values |= {"evaluations": config.evaluations, "dtype": config.dtype}
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat[name] = value
            if isinstance(value, Mapping):  # a policy: its name, and its fields one by one
                ((flat[name], fields),) = value.items()
                flat |= {f"{name}.{key}": part for key, part in fields.items()}
        return {name: str(value) if isinstance(value, list | dict) else value for name, value in flat.items()}


def load(paths: Iterable[Path]) -> list[Run]:
    """Read runs and sort them as figures and tables show them: by optimizer, then by seed.

    Args:
        paths: each a run folder, or a folder with run folders one or two levels below it.

    Runs that have no result yet are left out. Raises RunFolderError, with one line that names the path, if none
    has a result or one cannot be read.
    """
    paths = [Path(path) for path in paths]
    # The same folder may be named twice, by itself and by the folder it lies in.
    folders = {folder.resolve(): folder for path in paths for folder in _run_folders(path)}
    runs = [run for run in map(_load_run, folders.values()) if run.epochs]
    if not runs:
        raise RunFolderError(f"{', '.join(map(str, paths))}: no run has a result yet")
    return sorted(runs, key=_order)


def _run_folders(path: Path) -> list[Path]:
    """The run folders that a path stands for."""
    if (path / CONFIG_FILE).exists():
        return [path]
    folders = sorted({config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/{CONFIG_FILE}")})
    if not folders:
        raise RunFolderError(f"{path} holds no run folders" if path.exists() else f"{path} does not exist")
    return folders


def _load_run(folder: Path) -> Run:
    """Read one run folder; a run that has only just started has no records."""
    config, records, path = RunConfig.load(folder), read_records(folder), folder / RECORDS_FILE
    day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat() if path.exists() else ""
    return Run(config, records["step"], records["epoch"], day)


def _order(run: Run) -> tuple[Any, ...]:
    known, name = list(OPTIMIZERS), run.config.optimizer
    rank = known.index(name) if name in known else len(known)
    return run.config.dataset, rank, name, run.config.seed
