"""Tables, figures and a page from run folders on disk. Nothing here runs a model."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from woodbury._files import write_whole
from woodbury.runs.figure import draw, image
from woodbury.runs.medians import Group, by_dataset, ends_of, groups_of
from woodbury.runs.panels import THRESHOLDS, describe
from woodbury.runs.records import Run, load
from woodbury.runs.storage import round_numbers
from woodbury.runs.verdict import ENOUGH_SEEDS, race_of, standings, takeaway

__all__ = ["Run", "draw", "ends_tables", "html", "load", "write"]

_FILES = resources.files("woodbury.runs")
_ABSENT = "–"  # what was not measured
_COLUMNS = (
    *("train_loss", "test_loss", "test_error", "best_test_error", "seconds", "seconds_to_target"),
    *("seconds_per_step", "damping", "seeds", "epochs"),
)
_WIDE = ("best_test_error", "seconds_to_target", "seconds_per_step")  # for which a terminal has no room


def write(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write figures and page of the runs into a folder; return the paths, the page's first.

        report.html      the interactive page
        <data set>.png   one figure per data set

    No file is touched before all are ready, and none is ever half written. The same runs give the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.html": html(runs).encode()}
    for dataset, members in by_dataset(runs).items():
        stem = re.sub(r"[^\w.-]", lambda other: f"%{ord(other[0]):x}", dataset)  # other names have other stems
        files[f"{stem}.png"] = image(draw(members))
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def html(runs: Iterable[Run]) -> str:
    """The interactive page, with one section per data set."""
    sections = [_section(dataset, members) for dataset, members in by_dataset(runs).items()]
    title = "woodbury: " + ", ".join(section["title"] for section in sections)
    return fill(_FILES.joinpath("report.html").read_text(encoding="utf-8"), title, sections)


def fill(body: str, title: str, data: Any) -> str:
    """A page that asks for nothing from a network: page.html, where style and drawing are, around a body."""
    # "<" appears in JSON inside strings only, where its escape means the same and cannot end the script element.
    numbers = json.dumps(round_numbers(data), allow_nan=False).replace("<", "\\u003c")
    parts = {"title": escape(title), "data": numbers, "body": body}
    template = _FILES.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], template)


def _section(dataset: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows of one data set."""
    groups = groups_of(runs)
    drawing = describe(groups)
    drawn = {panel.quantity for panel in drawing.panels}
    low, high = THRESHOLDS
    time = "Time counts the steps of the optimizer alone; of a recorded loop all but its pauses."
    bands = "Lines are medians over the seeds, bands reach from the smallest to the largest value. "
    ratio = (
        "ρ is the decrease of the loss over the decrease that the quadratic model predicted: damping grows where "
        f"it is below {low:g} and shrinks where it is above {high:g}."
    )
    bold = (
        f"Bold where every seed lies below every seed of the others, with {ENOUGH_SEEDS} seeds or more each; "
        "smaller differences may be chance."
    )
    return {
        "title": dataset,
        "takeaway": takeaway(groups, "test_error" if "test_error" in drawn else "test_loss"),
        "facts": _facts(runs),
        "drawing": dataclasses.asdict(drawing),
        "note": (bands if any(group.seeds > 1 for group in groups) else "") + time,
        "ratio_note": ratio if "ratio" in drawn else "",
        "ends": _ends_table(groups),
        "ends_note": bold if len(groups) > 1 else "",
        "settings": _settings_tables(groups),
    }


# -- tables


def ends_tables(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Where training ended on each data set, with the columns that a terminal has room for."""
    brief = [name for name in _COLUMNS if name not in _WIDE]
    return {name: _ends_table(groups_of(members), brief) for name, members in by_dataset(runs).items()}


def _ends_table(groups: Sequence[Group], wanted: Sequence[str] = _COLUMNS) -> dict[str, Any]:
    """Headings, and for each group its label, the texts below each heading and where the group is clearly ahead.

    Of the `wanted` columns those that some group has; the test loss is there for want of an error.
    """
    race = race_of(groups)
    rows = []
    for group in groups:
        ends, ended = ends_of(group), group.ended
        if race is not None:
            ends["seconds_to_target"] = race.seconds.get(group.label, [])
        row = {name: _written(name, median(values)) for name, values in ends.items() if values}
        row["seeds"] = _out_of(len(ended), group.seeds)
        row["epochs"] = _out_of(ended[0].epochs[-1]["epoch"], group.runs[0].config.epochs)
        rows.append(row)
    needs_test_loss = any("test_loss" in row and "test_error" not in row for row in rows)
    hidden = set() if needs_test_loss else {"test_loss"}
    shown = [name for name in wanted if name not in hidden and any(name in row for row in rows)]
    titles = {name: name.replace("_", " ") for name in shown} | {"seconds_per_step": "ms / step"}
    if race is not None:
        titles["seconds_to_target"] = f"seconds to {race.target:.3g}"
    ahead = {(each.leader, name) for name, each in standings(groups).items() if each.is_clear}
    texts = [[row.get(name, _ABSENT) for name in shown] for row in rows]
    return {
        "columns": ["optimizer", *(titles[name] for name in shown)],
        "rows": [[group.label, *cells] for group, cells in zip(groups, texts, strict=True)],
        "best": [[False, *((group.label, name) in ahead for name in shown)] for group in groups],
    }


def _written(name: str, value: float) -> str:
    """Three digits; an error in percent, the time of a step in milliseconds."""
    if not math.isfinite(value):
        return "diverged"
    if name.endswith("error"):
        return f"{100 * value:.2f} %"
    value = 1000 * value if name == "seconds_per_step" else value
    if value == 0 or 1000 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


def _out_of(reached: float, planned: float) -> str:
    return f"{reached:.3g} of {planned:g}" if reached < planned else f"{reached:.3g}"


def _settings_tables(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Headings, all settings, and those that differ: each a row of its name and its value in every group."""
    tables = [group.runs[0].settings() for group in groups]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [name, *(str(table.get(name, _ABSENT)) for table in tables)] for name in names}
    differing = [name for name in names if len({table[name] for table in tables if name in table}) > 1]
    columns = ["", *(group.label for group in groups)]
    return {"columns": columns, "all": list(rows.values()), "differing": [rows[name] for name in differing]}


# -- facts


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What a reader must know of all the runs: each fact with the values it takes."""
    facts: dict[str, dict[str, None]] = {}  # by name, the values in order
    for run in runs:
        config, machine = run.config, run.config.machine
        device = machine.get("gpu" if config.device.startswith("cuda") else "processor")
        threads = f"threads {machine['threads']}" if "threads" in machine else ""
        samples = config.settings.get("curvature_samples", "")
        values = {
            "network": config.network,
            "batch": f"{config.batch_size} samples" if config.batch_size else "",
            "curvature samples": "the whole batch" if samples is None else str(samples),
            "date": run.day,
            "machine": ", ".join(filter(None, [device, threads, config.dtype])),
            "software": ", ".join(f"{name} {version}" for name, version in config.versions.items()),
        }
        for name, value in values.items():
            if value:
                facts.setdefault(name, {})[value] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]
