"""Runs as a report reads them: from their folders, or from the compact file of an earlier report.

Of an unfinished run a report shows what has been recorded.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from woodbury.optimizers import OPTIMIZERS
from woodbury.runs.config import CONFIG_FILE, UNKNOWN, RunConfig
from woodbury.runs.records import RECORDS_FILE, read_records
from woodbury.runs.storage import RunFolderError, read_checked, round_numbers, with_checksum

COMPACT = "records.json"
_ABSENT = ""  # in a row
_POINTS = 250  # steps of a run in a compact file and in a curve, at most


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    config: RunConfig
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    day: str = ""  # of its last record, as 2020-12-31

    def settings(self) -> dict[str, Any]:
        """All that two runs of an optimizer on the same data set can differ in, except the seed: {name: value}."""
        values = asdict(self.config)
        del values["dataset"], values["optimizer"], values["seed"], values["versions"], values["machine"]
        settings = {key: value for key, value in values.pop("settings").items() if key != "seed"}
        values["widths"] = self.config.network
        if self.config.recorded:
            values = {name: value for name, value in values.items() if name not in (*UNKNOWN, "evaluations")}
        flat: dict[str, Any] = {}
        for name, value in {**settings, **values}.items():
            flat[name] = value
            if isinstance(value, Mapping):  # a policy: its name, and its fields one by one
                ((flat[name], fields),) = value.items()
                flat |= {f"{name}.{key}": part for key, part in fields.items()}
        return {name: str(value) if isinstance(value, list | dict) else value for name, value in flat.items()}


def load(paths: Iterable[Path]) -> list[Run]:
    """Read runs and sort them as figures and tables show them: by optimizer, then by settings and seed.

    Args:
        paths: each a run folder, a folder with run folders one or two levels below it, a file records.json that
            a report wrote, or a folder with such a file and no run folders.

    Runs that have no result yet are left out. Raises RunFolderError, with one line that names the path, if none
    has a result or one cannot be read.
    """
    paths = [Path(path) for path in paths]
    # The same folder may be named twice, by itself and by the folder it lies in.
    sources = {source.resolve(): source for path in paths for source in _sources(path)}
    runs = []
    for source in sources.values():
        runs += _load_compact(source) if source.is_file() else [_load_run(source)]
    # The same run may also be in a compact file, with few digits: it counts once.
    different = {json.dumps([asdict(run.config), _rows(run.epochs)]): run for run in runs if run.epochs}
    if not different:
        raise RunFolderError(f"{', '.join(map(str, paths))}: no run has a result yet")
    return sorted(different.values(), key=_order)


def _sources(path: Path) -> list[Path]:
    """The run folders and compact files that a path stands for."""
    if not path.exists():
        raise RunFolderError(f"{path} does not exist")
    if path.is_file() or (path / CONFIG_FILE).exists():
        return [path]
    folders = sorted({config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/{CONFIG_FILE}")})
    if not folders and (path / COMPACT).exists():
        return [path / COMPACT]
    if not folders:
        raise RunFolderError(f"{path} holds no run folders")
    return folders


def _load_run(folder: Path) -> Run:
    """Read one run folder; a run that has only just started has no records."""
    config, records, path = RunConfig.load(folder), read_records(folder), folder / RECORDS_FILE
    day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat() if path.exists() else ""
    return Run(config, records["step"], records["epoch"], day)


def _load_compact(path: Path) -> list[Run]:
    """The runs in a file written by `compact`."""
    entries = read_checked(path).get("runs")
    if entries is None:
        raise RunFolderError(f"{path} is no {COMPACT}: it lists no runs")
    runs = []
    for entry in entries:
        steps, epochs = _from_rows(entry["steps"]), _from_rows(entry["epochs"])
        runs.append(Run(RunConfig.from_plain(entry["config"]), steps, epochs, entry["day"]))
    return runs


def _order(run: Run) -> tuple[Any, ...]:
    known, name = list(OPTIMIZERS), run.config.optimizer
    rank = known.index(name) if name in known else len(known)
    settings = []
    for key, value in sorted(run.settings().items()):
        size = value if isinstance(value, int | float) else math.inf  # numbers by size, before everything else
        settings.append((key, size, str(value)))
    return run.config.dataset, rank, name, settings, run.config.seed


def compact(runs: Sequence[Run]) -> str:
    """The runs as JSON with few steps and digits, one line per run, and the checksum of it all."""
    entries = []
    for run in runs:
        steps = [run.steps[index] for index in even_indices(len(run.steps))]
        entry = {"config": asdict(run.config), "day": run.day}
        entries.append({**entry, "epochs": _rows(run.epochs), "steps": _rows(steps)})
    text = json.dumps(with_checksum({"runs": entries}), separators=(",", ":"))
    return text.replace('{"config":', '\n{"config":') + "\n"


def _rows(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records as rows of numbers below their names; `_ABSENT` stands for what a record has not."""
    names = list(dict.fromkeys(name for record in records for name in record if name != "kind"))
    rows = [[record.get(name, _ABSENT) for name in names] for record in records]
    return {"names": names, "rows": round_numbers(rows)}


def _from_rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records that `_rows` turned into rows."""
    pairs = [zip(table["names"], row, strict=True) for row in table["rows"]]
    return [{name: value for name, value in row if value != _ABSENT} for row in pairs]


def even_indices(length: int) -> list[int]:
    """At most `_POINTS` indices into so long a list, evenly spaced, the first and the last among them."""
    if length <= _POINTS:
        return list(range(length))
    return [round(index * (length - 1) / (_POINTS - 1)) for index in range(_POINTS)]
