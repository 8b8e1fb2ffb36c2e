"""The command `problems`: what the records of `benchmarks.rivals` say, as tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common import Command, positive, round_numbers, table
from benchmarks.problems import CLASSIFICATION, PROBLEMS
from benchmarks.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, METHODS, SGD, WOODBURY, Record, bench_problems
from woodbury.runs.config import installed_versions, this_machine

Entry = dict[str, Any]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """What the records say, by problem and over all of them:

        {"problems": {name: {"kind", method: entry}}, "faults": lines}

    The rate of a method is the one with the lowest training loss, a median over the seeds. Its entry has

        train_loss, seconds                      medians over the seeds
        test, test_range                         mean, smallest and largest over the seeds
        rate, edge                               the rate, and whether it is the lowest or highest tried
        ratio, seconds_ratio                     train_loss and seconds over those of tuned Adam (woodbury alone)
    """
    rows: dict[str, Entry] = {}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault(record["problem"], {"kind": record["kind"]})
        groups.setdefault((record["problem"], record["method"]), []).append(record)
    for (problem, method), runs in groups.items():
        rows[problem][method] = _entry(runs)
    for row in rows.values():
        for method in (WOODBURY, EQUAL_SECONDS):
            if method in row and ADAM in row:
                row[method]["ratio"] = row[method]["train_loss"] / row[ADAM]["train_loss"]
                row[method]["seconds_ratio"] = row[method]["seconds"] / row[ADAM]["seconds"]
    return {"problems": rows, "faults": faults(records)}


def _entry(records: Sequence[Record]) -> Entry:
    rates = sorted({record["rate"] for record in records if record["rate"] is not None})
    by_rate = {rate: [record for record in records if record["rate"] == rate] for rate in rates or [None]}
    losses = {rate: median(figure_of(run, "train_loss") for run in runs) for rate, runs in by_rate.items()}
    rate = min(losses, key=losses.__getitem__)
    runs = by_rate[rate]
    tests = [figure_of(run, "test_figure") for run in runs]
    return {
        "rate": rate,
        "edge": len(rates) > 1 and rate in (rates[0], rates[-1]),
        "train_loss": losses[rate],
        "seconds": median(run["seconds"] for run in runs),
        "test": fmean(tests),
        "test_range": (min(tests), max(tests)),
    }


def figure_of(record: Record, key: str) -> float:
    """A figure of a run, infinity if it is not a number or the run ended with an error."""
    value = record[key]
    return math.inf if value is None or math.isnan(value) or record["error"] is not None else float(value)


def faults(records: Sequence[Record]) -> list[str]:
    """One line per run of woodbury that raised, left a parameter not finite, or ended above its starting loss."""
    lines = []
    for record in records:
        start, end = record["start_loss"], figure_of(record, "train_loss")
        fault = record["error"]
        if fault is None and not record["finite"]:
            fault = "a parameter is not finite"
        elif fault is None and end > start:
            fault = f"the loss rose from {start:.4g} to {end:.4g}"
        if fault is not None and record["method"] in (WOODBURY, EQUAL_SECONDS):
            lines.append(f"{record['problem']}, {record['method']}, seed {record['seed']}: {fault}")
    return lines


# -- tables ---------------------------------------------------------------------------------------------------

_TITLES = {ADAM_CONSTANT: "Adam 1e-3", ADAM: "Adam tuned", SGD: "SGD tuned"}
_TITLES |= {WOODBURY: "woodbury, equal epochs", EQUAL_SECONDS: "woodbury, equal seconds"}


def problems_tables(summary: dict[str, Any]) -> str:
    """Training losses, test figures and, below them, the faults."""
    training, test = [], []
    for name, row in summary["problems"].items():
        losses = {"problem": name, "kind": row["kind"]}
        figures = dict(losses)
        for method, text in _TITLES.items():
            entry, heading = row.get(method, {}), text.replace(", ", "\n").replace(" ", "\n")
            losses[heading] = entry.get("train_loss")
            if method in (ADAM, SGD):
                losses[f"{heading}\nrate"] = f"{entry['rate']:g}{'*' * entry['edge']}" if entry else None
            if method in (WOODBURY, EQUAL_SECONDS):
                losses[f"{heading}\nx loss"] = entry.get("ratio")
                losses[f"{heading}\nx time"] = entry.get("seconds_ratio")
            figures[text] = _test(row["kind"], entry) if entry else None
        training.append(losses)
        test.append(figures)
    title = "Training loss, median over the seeds; *: the edge of the rates tried; x: over those of tuned Adam"
    tables = [table(title, training, left=2)]
    tables.append(table("Test error or test loss, mean (smallest to largest) over the seeds", test, left=2))
    return "\n\n".join([*tables, *summary["faults"]])


def _test(kind: str, entry: Entry) -> str:
    """2.4 % (2.2 to 2.9), or a loss without %."""
    unit, factor = (" %", 100) if kind == CLASSIFICATION else ("", 1)
    mean, low, high = (f"{factor * value:.3g}" for value in (entry["test"], *entry["test_range"]))
    return f"{mean}{unit} ({low} to {high})"


# -- the command ----------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = f"these alone (default: all but mnist-full). One or more of: {', '.join(PROBLEMS)}"
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), default=[], metavar="NAME", help=text)
    text = f"one or more of {', '.join(METHODS)} (default: all)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=text)
    text = "seeds of the initial weights and of the order of batches (default 3)"
    parser.add_argument("--seeds", type=positive, default=3, metavar="NUMBER", help=text)
    text = "processes, each with one thread (default 1)"
    parser.add_argument("--jobs", type=positive, default=1, metavar="NUMBER", help=text)
    text = "folder with MNIST and covtype (default: that of WOODBURY_DATA); without it these are left out"
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help=text)
    text = "folder for records.jsonl, a line per run (default runs/problems)"
    parser.add_argument("--out", type=Path, default=Path("runs/problems"), metavar="FOLDER", help=text)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """The summary; status 1 if a run of woodbury has a fault. The records go to a folder."""
    wanted = {"seeds": range(options.seeds), "methods": options.methods, "data_dir": options.data_dir}
    options.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    with (options.out / "records.jsonl").open("w") as file:
        for found in bench_problems(options.only, options.jobs, **wanted):
            file.writelines(json.dumps(round_numbers(record)) + "\n" for record in found)
            file.flush()
            records += found
    if not records:
        raise SystemExit("problems: the data of all these problems is absent")
    return {"machine": this_machine(), "versions": installed_versions()} | summarise(records)


COMMAND = Command(
    "training beside tuned Adam and SGD, on small problems (20 minutes)", _run, problems_tables, _add_options
)
