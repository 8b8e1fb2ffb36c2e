"""Runs as a report reads them: from their folders, or from the compact file of an earlier report.

Of an unfinished run a report shows what has been recorded.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from woodbury.experiments.config import CONFIG_FILE, FORMAT, RECORDS_FILE, RunConfig
from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.models import network_name
from woodbury.experiments.storage import round_numbers
from woodbury.optim import OPTIMIZERS

COMPACT = "records.json"
# What a record must hold.
_KEYS = {"epoch": ("epoch", "step", "seconds", "train_loss", "test_error"), "step": ("step", "damping")}
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
    epochs = [[record[key] for key in _KEYS["epoch"]] for record in run.epochs]
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
    try:
        config = RunConfig.load(folder)
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat() if lines else ""
    except OSError as error:
        raise RunFolderError(f"{error.filename or path} cannot be read: {one_line(error)}") from None
    records: dict[str, list[dict[str, Any]]] = {"step": [], "epoch": []}
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:  # behind the last line end
            break
        try:
            record = json.loads(line)
        except ValueError:
            if last:  # the run was killed while it wrote this line
                break
            raise RunFolderError(f"{path} is damaged: line {number} is not JSON") from None
        records[_kind(record, f"{path} is damaged: line {number}")].append(record)
    return Run(config, records["step"], records["epoch"], day)


def _load_compact(path: Path) -> list[Run]:
    """The runs in a file written by `compact`."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None
    except ValueError:
        raise RunFolderError(f"{path} is neither a run folder nor a {COMPACT}: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
        raise RunFolderError(f"{path} is neither a run folder nor a {COMPACT}: it lists no runs")
    runs = []
    for number, entry in enumerate(content["runs"], start=1):
        config = RunConfig.from_dict(entry.get("config") if isinstance(entry, dict) else None, where=str(path))
        where = f"{path} is damaged: run {number}"
        try:
            steps, epochs = _from_columns(entry["steps"]), _from_columns(entry["epochs"])
            day = str(entry["day"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RunFolderError(f"{where} has no proper records") from None
        for kind, records in (("step", steps), ("epoch", epochs)):
            for record in records:
                _kind({"kind": kind, **record}, where)
        runs.append(Run(config, steps, epochs, day))
    return runs


def _kind(record: Any, where: str) -> str:
    """ "step" or "epoch", the kind of a record; raises RunFolderError if it is neither or lacks a number."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise RunFolderError(f"{where} is not the record of a step or an epoch")
    for key in _KEYS[kind]:
        value = record.get(key, "")
        needed = key in ("epoch", "step", "seconds")
        if not isinstance(value, int | float) and not (value is None and not needed):
            raise RunFolderError(f"{where} has no number '{key}'")
    return kind


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
    """The runs as JSON with few steps and digits, one line per run."""
    lines = []
    for run in runs:
        steps = [run.steps[index] for index in even_indices(len(run.steps))]
        entry = {
            "config": dataclasses.asdict(run.config),
            "day": run.day,
            "epochs": _columns(round_numbers(run.epochs)),
            "steps": _columns(round_numbers(steps)),
        }
        lines.append(json.dumps(entry, separators=(",", ":"), allow_nan=False))
    return f'{{"format":{FORMAT},"runs":[\n' + ",\n".join(lines) + "\n]}\n"


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records as one list per key, or as one value for a key whose value never changes."""
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    columns: dict[str, Any] = {"count": len(records)}
    for name in names:
        column = [record.get(name) for record in records]
        columns[name] = column[0] if all(value == column[0] for value in column) else column
    return columns


def _from_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records that `_columns` turned into columns."""
    lists = {
        name: column if isinstance(column, list) else [column] * int(columns["count"])
        for name, column in columns.items()
        if name != "count"
    }
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def even_indices(length: int) -> list[int]:
    """At most `_POINTS` indices into so long a list, evenly spaced, the first and the last among them."""
    if length <= _POINTS:
        return list(range(length))
    return [round(index * (length - 1) / (_POINTS - 1)) for index in range(_POINTS)]
