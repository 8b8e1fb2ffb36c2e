"""What the records of `woodbury.bench.rivals` say: medians, ratios to tuned Adam, and which bars are reached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from woodbury.bench.problems import CLASSIFICATION, PROBLEMS, REGRESSION
from woodbury.bench.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, WOODBURY, Record

WITHIN = 1.5  # times the training loss of tuned Adam: the bar on every problem

Entry = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records of a file with one JSON object per line, in the order of `PROBLEMS`."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    places = {name: place for place, name in enumerate(PROBLEMS)}
    return sorted(records, key=lambda record: places.get(record["problem"], len(places)))


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """{"problems": {name: {"kind", method: entry}}, "bars": {bar: (problems that reach it, problems asked)}}.

    The rate of a method is the one with the lowest training loss, a median over the seeds. Its entry has

        train_loss, seconds, steps               medians over the seeds
        test, test_range, test_variance          mean, smallest and largest, variance over the seeds
        rate, edge                               the rate, and whether it is the lowest or highest tried
        ratio, seconds_ratio                     train_loss and seconds over those of tuned Adam (woodbury alone)
    """
    names = dict.fromkeys(record["problem"] for record in records)
    rows = {name: _row([record for record in records if record["problem"] == name]) for name in names}
    return {"problems": rows, "bars": _bars(rows)}


def _row(records: Sequence[Record]) -> Entry:
    row: Entry = {"kind": records[0]["kind"]}
    for method in dict.fromkeys(record["method"] for record in records):
        row[method] = _entry([record for record in records if record["method"] == method])
    for method in (WOODBURY, EQUAL_SECONDS):
        if method in row and ADAM in row:
            row[method]["ratio"] = row[method]["train_loss"] / row[ADAM]["train_loss"]
            row[method]["seconds_ratio"] = row[method]["seconds"] / row[ADAM]["seconds"]
    return row


def _entry(records: Sequence[Record]) -> Entry:
    rates = sorted({record["rate"] for record in records if record["rate"] is not None})
    by_rate = {rate: [record for record in records if record["rate"] == rate] for rate in rates or [None]}
    losses = {rate: median(figure(run, "train_loss") for run in runs) for rate, runs in by_rate.items()}
    rate = min(losses, key=losses.__getitem__)
    runs = by_rate[rate]
    tests = [figure(run, "test_figure") for run in runs]
    return {
        "rate": rate,
        "edge": len(rates) > 1 and rate in (rates[0], rates[-1]),
        "train_loss": losses[rate],
        "seconds": median(run["seconds"] for run in runs),
        "steps": median(run["steps"] for run in runs),
        "test": fmean(tests),
        "test_range": (min(tests), max(tests)),
        "test_variance": variance(tests) if len(tests) > 1 and max(tests) < math.inf else 0.0,
        "test_samples": runs[0]["test_samples"],
        "seeds": len(runs),
    }


def figure(record: Record, key: str) -> float:
    """A figure of a run, infinity if it is not a number or the run ended with an error."""
    value = record[key]
    return math.inf if value is None or math.isnan(value) or record["error"] is not None else float(value)


def _bars(rows: dict[str, Entry]) -> dict[str, tuple[int, int]]:
    tuned = [row for row in rows.values() if "ratio" in row.get(WOODBURY, {})]
    timed = [row for row in rows.values() if "ratio" in row.get(EQUAL_SECONDS, {})]
    untuned = [row for row in rows.values() if ADAM_CONSTANT in row and WOODBURY in row]
    return {
        "equal epochs: training loss not above that of tuned Adam": _share(
            row[WOODBURY]["ratio"] <= 1 for row in tuned
        ),
        f"equal epochs: training loss within {WITHIN} times that of tuned Adam": _share(
            row[WOODBURY]["ratio"] <= WITHIN for row in tuned
        ),
        "equal seconds, regressions: training loss not above that of tuned Adam": _share(
            row[EQUAL_SECONDS]["ratio"] <= 1 for row in timed if row["kind"] == REGRESSION
        ),
        "equal seconds, classifications: test error not above that of tuned Adam beyond noise": _share(
            not is_above(row[EQUAL_SECONDS], row[ADAM]) for row in timed if row["kind"] == CLASSIFICATION
        ),
        "equal epochs: training loss below that of Adam at 1e-3": _share(
            row[WOODBURY]["train_loss"] < row[ADAM_CONSTANT]["train_loss"] for row in untuned
        ),
        "equal seconds: training loss below that of Adam at 1e-3": _share(
            row[EQUAL_SECONDS]["train_loss"] < row[ADAM_CONSTANT]["train_loss"]
            for row in untuned
            if EQUAL_SECONDS in row
        ),
    }


def _share(answers: Iterable[bool]) -> tuple[int, int]:
    values = list(answers)
    return sum(values), len(values)


def noise(entry: Entry, reference: Entry) -> float:
    """Two standard errors of the difference of two mean test errors: 2 sqrt(v / n + v' / n' + q (1 - q) / N).

    v and n: variance over n seeds of each; q: error of the reference on the N test samples that both share.
    """
    seeds = sum(part["test_variance"] / part["seeds"] for part in (entry, reference))
    return 2 * math.sqrt(seeds + reference["test"] * (1 - reference["test"]) / reference["test_samples"])


def is_above(entry: Entry, reference: Entry) -> bool:
    """Whether the mean test error lies above that of the reference by more than `noise`."""
    return bool(entry["test"] > reference["test"] + noise(entry, reference))


def faults(records: Sequence[Record]) -> list[str]:
    """One line per run that raised, left a parameter that is not finite, or ended above its starting loss."""
    lines = []
    for record in records:
        run = f"{record['problem']}, {record['method']}, seed {record['seed']}"
        start, end = record["start_loss"], figure(record, "train_loss")
        if record["error"] is not None:
            lines.append(f"{run}: {record['error']}")
        elif not record["finite"]:
            lines.append(f"{run}: a parameter is not finite")
        elif end > start:
            lines.append(f"{run}: the loss rose from {start:.4g} to {end:.4g}")
    return lines
