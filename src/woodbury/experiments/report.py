"""Tables, figures and a page from run folders on disk. Nothing here runs a model.

The page is one HTML file with its data, style and program inside: page.html draws the numbers that come from here
and asks for nothing from a network.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from woodbury.experiments.config import NOT_INSTALLED, RunConfig
from woodbury.experiments.figure import LOG_TIME_ABOVE, THRESHOLDS, draw, images
from woodbury.experiments.medians import (
    RATIO_RANGE,
    Summary,
    by_dataset,
    curves_of,
    groups_of,
    summarise,
    summary_of,
)
from woodbury.experiments.models import network_name
from woodbury.experiments.runs import COMPACT, Run, compact, load
from woodbury.experiments.storage import round_numbers, write_whole
from woodbury.experiments.verdict import ENOUGH_SEEDS, standings, takeaway

__all__ = ["Run", "Summary", "draw", "html", "load", "summarise", "write", "write_page"]

PAGE = "report.html"


def write(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write figures, page and compact records of the runs into a folder; return the paths, the page's first.

        report.html                      the interactive page
        <data set>.png, <data set>.svg   one figure per data set
        records.json                     what `load` needs to write the same report again

    No file is touched before all are ready, and none is ever half written. The same runs give the same files.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    folder.mkdir(parents=True, exist_ok=True)
    files = {PAGE: html(runs).encode()}
    for dataset, members in by_dataset(runs).items():
        stem = _file_stem(dataset, files)
        files |= {f"{stem}.{ending}": content for ending, content in images(draw(members)).items()}
    files[COMPACT] = compact(runs).encode()
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def write_page(runs: Sequence[Run], folder: Path, refresh: float | None = None) -> Path:
    """Write the page alone; with `refresh` one that looks for a newer one after so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PAGE, html(runs, refresh).encode())
    return folder / PAGE


def _file_stem(name: str, taken: Iterable[str]) -> str:
    """A name as the first part of a file name, which no file before it has."""
    stem = re.sub(r"[^\w.-]", "_", name)
    used = {path.rpartition(".")[0].casefold() for path in taken}
    number = 2
    unique = stem
    while unique.casefold() in used:
        unique, number = f"{stem}-{number}", number + 1
    return unique


def html(runs: Iterable[Run], refresh: float | None = None) -> str:
    """The interactive page, with one section per data set; with `refresh` it reloads after so many seconds."""
    sections = [_section(dataset, members) for dataset, members in by_dataset(runs).items()]
    title = "woodbury: " + ", ".join(section["title"] for section in sections)
    data = json.dumps(round_numbers(sections), allow_nan=False)
    template = resources.files("woodbury.experiments").joinpath("page.html").read_text(encoding="utf-8")
    # "<" appears in JSON inside strings only, where its escape means the same and cannot end the script element.
    page = template.replace("{{title}}", escape(title)).replace("{{refresh}}", json.dumps(refresh))
    return page.replace("{{data}}", data.replace("<", "\\u003c"))


def _section(dataset: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows of one data set."""
    groups = groups_of(runs)
    tables = [group.runs[0].settings() for group in groups]
    curves = curves_of(groups)
    hidden = () if any(curves["test_loss"]) else ("test_loss",)
    ahead = {name: each.leader for name, each in standings(groups).items() if each.is_clear}
    entries = []
    for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
        summary = dataclasses.asdict(summary_of(group))
        own = {name: curve for name, each in curves.items() if (curve := each[index]) is not None}
        entries.append(
            {
                "label": group.label,
                "look": dataclasses.asdict(group.look),
                "curves": {name: dataclasses.asdict(curve) for name, curve in own.items()},
                "figures": {
                    name: value
                    for name, value in summary.items()
                    if isinstance(value, int | float) and not math.isnan(value) and name not in hidden
                },
                "ahead": [name for name, leader in ahead.items() if leader == group.label],
                "settings": {name: str(value) for name, value in table.items()},
            }
        )
    return {
        "title": dataset,
        "takeaway": takeaway(groups, "test_error" if any(curves["test_error"]) else "test_loss"),
        "facts": _facts(runs),
        "entries": entries,
        "differing": _differing_names(tables),
        "log_time_above": LOG_TIME_ABOVE,
        "thresholds": THRESHOLDS,
        "ratio_range": RATIO_RANGE,
        "enough_seeds": ENOUGH_SEEDS,
        "time_of": _time_of(runs),
    }


def _time_of(runs: Sequence[Run]) -> str:
    """What the seconds of the runs count, in a sentence."""
    steps, loops = "the steps of the optimizer alone, not the evaluation", "all of a recorded loop but its pauses"
    kinds = {run.config.recorded for run in runs}
    return f"Time counts {steps if kinds == {False} else loops if kinds == {True} else f'{steps}; {loops}'}."


def _differing_names(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that do not have the same value in all the tables that have them."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if len({table[name] for table in tables if name in table}) > 1]


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What a reader must know of all the runs: each fact with the values it takes."""
    facts: dict[str, dict[str, None]] = {}  # by name, the values in order
    for run in runs:
        config = run.config
        samples = config.settings.get("curvature_samples", "")
        values = {
            "network": network_name(config.widths),
            "batch": f"{config.batch_size} samples" if config.batch_size else "",
            "curvature from": _part_of_batch(samples) if samples != "" else "",
            "date": run.day,
            "machine": _machine(config),
            "software": _software(config),
        }
        for name, value in values.items():
            if value:
                facts.setdefault(name, {})[value] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]


def _part_of_batch(samples: int | float | str | None) -> str:
    """Curvature samples in words: a number of samples, a fraction of the batch, or a rule by its name."""
    if samples is None:
        return "the whole batch"
    if isinstance(samples, str):
        return samples
    return f"{samples:.3g} of the batch" if isinstance(samples, float) else f"{samples} samples"


def _software(config: RunConfig) -> str:
    """Versions of the packages that the run could import; woodbury itself may not have been installed."""
    installed = {name: version for name, version in config.versions.items() if version != NOT_INSTALLED}
    return ", ".join(f"{name} {version}" for name, version in installed.items())


def _machine(config: RunConfig) -> str:
    """What the seconds depend on: processor or GPU, processes, threads, system, precision."""
    machine = config.machine
    threads, processes = machine.get("threads"), machine.get("processes", 1)
    parts = [
        machine.get("gpu") if config.device.startswith("cuda") else None,
        machine.get("processor"),
        f"{processes} processes" if processes != 1 else None,
        f"{threads} thread{'' if threads == 1 else 's'}" if threads else None,
        machine.get("system"),
        config.dtype,
    ]
    return ", ".join(str(part) for part in parts if part)
