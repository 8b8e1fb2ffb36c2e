"""Runs as a report reads them: from their folders, or from the compact file of an earlier report.

Of an unfinished run a report shows what has been recorded.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from woodbury.experiments.config import CONFIG_FILE, FORMAT, UNKNOWN, RunConfig, check_format, check_seal
from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.folders import is_complete
from woodbury.experiments.models import network_name
from woodbury.experiments.records import EPOCH_KEYS, RECORDS_FILE, check_order, kind_of, read_records
from woodbury.experiments.storage import SEAL, read_json, round_numbers, seal
from woodbury.optimizers import OPTIMIZERS

COMPACT = "records.json"
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_ABSENT = ""  # in a column
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
        values = dataclasses.asdict(self.config)
        for name in ("dataset", "optimizer", "seed", "versions", "machine", "format"):
            del values[name]
        settings = {key: value for key, value in values.pop("settings").items() if key != "seed"}
        values["widths"] = network_name(self.config.widths)
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
    # The same run may also be in a compact file: it counts once.
    runs = list({_identity(run): run for run in runs if run.epochs}.values())
    if not runs:
        raise RunFolderError(f"{', '.join(map(str, paths))}: no run has a result yet")
    return sorted(runs, key=_order)


def _identity(run: Run) -> str:
    """A key that two copies of a run share, even if one of them has the few digits of a compact file."""
    epochs = [[record.get(key) for key in EPOCH_KEYS] for record in run.epochs]
    return json.dumps(round_numbers([dataclasses.asdict(run.config), epochs]), sort_keys=True)


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
    path = folder / RECORDS_FILE
    config = RunConfig.load(folder)
    records = read_records(folder, is_complete(folder, config.recorded), config.recorded)
    try:
        day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat()
    except (OSError, ValueError, OverflowError):
        day = ""
    return Run(config, records["step"], records["epoch"], day)


def _load_compact(path: Path) -> list[Run]:
    """The runs in a file written by `compact`."""
    try:
        content = read_json(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None
    except ValueError:
        raise RunFolderError(f"{path} is neither a run folder nor a {COMPACT}: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
        raise RunFolderError(f"{path} is neither a run folder nor a {COMPACT}: it lists no runs")
    check_format(content.get("format", 2), str(path))
    runs = []
    for number, entry in enumerate(content["runs"], start=1):
        config = RunConfig.from_dict(entry.get("config") if isinstance(entry, dict) else None, where=str(path))
        where = f"{path} is damaged: run {number}"
        try:
            steps, epochs = _from_columns(entry["steps"]), _from_columns(entry["epochs"])
            day = entry["day"]
            if not isinstance(day, str) or not (day == "" or _DAY.fullmatch(day)):
                raise ValueError(day)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RunFolderError(f"{where} has no proper records") from None
        for kind, records in (("step", steps), ("epoch", epochs)):
            for index, record in enumerate(records):
                kind_of({**record, "kind": kind}, where, config.recorded)
                check_order(records[max(index - 1, 0) : index], record, kind, where)
        runs.append(Run(config, steps, epochs, day))
    check_seal({"format": 2, **content}, str(path))
    return runs


def _order(run: Run) -> tuple[Any, ...]:
    known = list(OPTIMIZERS)
    name = run.config.optimizer
    rank = known.index(name) if name in known else len(known)
    settings = [(key, _sortable(value)) for key, value in sorted(run.settings().items())]
    return run.config.dataset, rank, name, settings, run.config.seed


def _sortable(value: Any) -> tuple[bool, float, str]:
    """A key that sorts numbers by size and before everything else."""
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)


def compact(runs: Sequence[Run]) -> str:
    """The runs as JSON with few steps and digits, one line per run, and the checksum of it all."""
    entries = []
    for run in runs:
        steps = [run.steps[index] for index in even_indices(len(run.steps))]
        entry = {
            "config": dataclasses.asdict(run.config),
            "day": run.day,
            "epochs": _columns(round_numbers(run.epochs)),
            "steps": _columns(round_numbers(steps)),
        }
        entries.append(json.loads(json.dumps(entry, allow_nan=False)))
    sealed = seal({"format": FORMAT, "runs": entries})
    lines = [json.dumps(entry, separators=(",", ":")) for entry in entries]
    return f'{{"format":{FORMAT},"{SEAL}":"{sealed}","runs":[\n' + ",\n".join(lines) + "\n]}\n"


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records as one list per key, or as one value for a key whose value never changes.

    `_ABSENT` stands for what a record has not, while others have it.
    """
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    columns: dict[str, Any] = {"count": len(records)}
    for name in names:
        column = [record.get(name, _ABSENT) for record in records]
        columns[name] = column[0] if all(value == column[0] for value in column) else column
    return columns


def _from_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records that `_columns` turned into columns; raises ValueError if these have not the same length."""
    count = columns["count"]
    lengths = {len(column) for column in columns.values() if isinstance(column, list)} or {min(count, _POINTS)}
    if type(count) is not int or count < 0 or lengths != {count}:  # before a list of that length is made
        raise ValueError(f"columns of {lengths} values for {count} records")
    lists = {
        name: column if isinstance(column, list) else [column] * count
        for name, column in columns.items()
        if name != "count"
    }
    return [
        {name: value for name, value in zip(lists, values, strict=True) if value != _ABSENT}
        for values in zip(*lists.values(), strict=True)
    ]


def even_indices(length: int) -> list[int]:
    """At most `_POINTS` indices into so long a list, evenly spaced, the first and the last among them."""
    if length <= _POINTS:
        return list(range(length))
    return [round(index * (length - 1) / (_POINTS - 1)) for index in range(_POINTS)]
