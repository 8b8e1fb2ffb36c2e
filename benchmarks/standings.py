"""The command `problems`: what the records of `benchmarks.rivals` say, as tables, a figure and files."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from benchmarks.common import Command, figure, positive, say, table
from benchmarks.problems import CLASSIFICATION, PROBLEMS, REGRESSION
from benchmarks.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, METHODS, SGD, WOODBURY, Record, bench_problems
from woodbury.experiments.config import installed_versions, this_machine
from woodbury.experiments.storage import round_numbers

WITHIN = 1.5  # times the training loss of tuned Adam: the bar on every problem

Entry = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """{"problems": {name: {"kind", method: entry}}, "bars": {bar: (problems that reach it, problems asked)}}.

    The rate of a method is the one with the lowest training loss, a median over the seeds. Its entry has

        train_loss, seconds, steps               medians over the seeds
        test, test_range, test_variance          mean, smallest and largest, variance over the seeds
        rate, edge                               the rate, and whether it is the lowest or highest tried
        ratio, seconds_ratio                     train_loss and seconds over those of tuned Adam (woodbury alone)
    """
    rows: dict[str, Entry] = {}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault(record["problem"], {"kind": record["kind"]})
        groups.setdefault((record["problem"], record["method"]), []).append(record)
    for (problem, method), own in groups.items():
        rows[problem][method] = _entry(own)
    for row in rows.values():
        for method in (WOODBURY, EQUAL_SECONDS):
            if method in row and ADAM in row:
                row[method]["ratio"] = row[method]["train_loss"] / row[ADAM]["train_loss"]
                row[method]["seconds_ratio"] = row[method]["seconds"] / row[ADAM]["seconds"]
    return {"problems": rows, "bars": _bars(list(rows.values()))}


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
        "steps": median(run["steps"] for run in runs),
        "test": fmean(tests),
        "test_range": (min(tests), max(tests)),
        "test_variance": variance(tests) if len(tests) > 1 and max(tests) < math.inf else 0.0,
        "test_samples": runs[0]["test_samples"],
        "seeds": len(runs),
    }


def figure_of(record: Record, key: str) -> float:
    """A figure of a run, infinity if it is not a number or the run ended with an error."""
    value = record[key]
    return math.inf if value is None or math.isnan(value) or record["error"] is not None else float(value)


def _bars(rows: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    tuned = [(row[WOODBURY], row) for row in rows if "ratio" in row.get(WOODBURY, {})]
    timed = [(row[EQUAL_SECONDS], row) for row in rows if "ratio" in row.get(EQUAL_SECONDS, {})]
    untuned = [row for row in rows if ADAM_CONSTANT in row]

    def below_constant(method: str) -> tuple[int, int]:
        asked = [row for row in untuned if method in row]
        return _share(row[method]["train_loss"] < row[ADAM_CONSTANT]["train_loss"] for row in asked)

    return {
        "equal epochs: training loss not above that of tuned Adam": _share(own["ratio"] <= 1 for own, _ in tuned),
        f"equal epochs: training loss within {WITHIN} times that of tuned Adam": _share(
            own["ratio"] <= WITHIN for own, _ in tuned
        ),
        "equal seconds, regressions: training loss not above that of tuned Adam": _share(
            own["ratio"] <= 1 for own, row in timed if row["kind"] == REGRESSION
        ),
        "equal seconds, classifications: test error not above that of tuned Adam beyond noise": _share(
            not is_above(own, row[ADAM]) for own, row in timed if row["kind"] == CLASSIFICATION
        ),
        "equal epochs: training loss below that of Adam at 1e-3": below_constant(WOODBURY),
        "equal seconds: training loss below that of Adam at 1e-3": below_constant(EQUAL_SECONDS),
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
        start, end = record["start_loss"], figure_of(record, "train_loss")
        if record["error"] is not None:
            lines.append(f"{run}: {record['error']}")
        elif not record["finite"]:
            lines.append(f"{run}: a parameter is not finite")
        elif end > start:
            lines.append(f"{run}: the loss rose from {start:.4g} to {end:.4g}")
    return lines


# -- tables and the figure ------------------------------------------------------------------------------------

# method: its name in tables, and colour and style of its line
_LOOKS = {
    ADAM_CONSTANT: ("Adam 1e-3", "#999999", "-"),
    ADAM: ("Adam tuned", "#56B4E9", "-"),
    SGD: ("SGD tuned", "#E69F00", "-"),
    WOODBURY: ("woodbury, equal epochs", "#D55E00", "-"),
    EQUAL_SECONDS: ("woodbury, equal seconds", "#D55E00", "--"),
}


def problems_tables(summary: dict[str, Any]) -> str:
    """Training losses, test figures and, below them, on how many problems each bar is reached."""
    training, test = [], []
    for name, row in summary["problems"].items():
        losses, figures = {"problem": name, "kind": row["kind"]}, {"problem": name, "kind": row["kind"]}
        for method, (text, _, _) in _LOOKS.items():
            entry, heading = row.get(method, {}), text.replace(", ", "\n").replace(" ", "\n")
            losses[heading] = entry.get("train_loss")
            if method in (ADAM, SGD):
                losses[f"{heading}\nrate"] = f"{entry['rate']:g}{'*' * entry['edge']}" if entry else None
            if method in (WOODBURY, EQUAL_SECONDS):
                losses[f"{heading}\nx loss"], losses[f"{heading}\nx time"] = (
                    entry.get(key) for key in ("ratio", "seconds_ratio")
                )
            figures[text] = _test(row["kind"], entry) if entry else None
        training.append(losses)
        test.append(figures)
    title = "Training loss, median over the seeds; *: the edge of the rates tried; x: over those of tuned Adam"
    tables = [table(title, training, left=2)]
    tables.append(table("Test error or test loss, mean (smallest to largest) over the seeds", test, left=2))
    bars = [f"{reached} of {asked}: {bar}" for bar, (reached, asked) in summary["bars"].items() if asked]
    return "\n\n".join([*tables, "\n".join(bars)])


def _test(kind: str, entry: Entry) -> str:
    """2.4 % (2.2 to 2.9), or a loss without %."""
    unit, factor = (" %", 100) if kind == CLASSIFICATION else ("", 1)
    mean, low, high = (f"{factor * value:.3g}" for value in (entry["test"], *entry["test_range"]))
    return f"{mean}{unit} ({low} to {high})"


def guard_table(result: dict[str, Any]) -> str:
    """Per problem what is left of the loss, and below it the faults."""
    title = "Training loss at the end over that at the start, woodbury's defaults"
    lines = result["faults"] or ["no run raised, left a parameter that is not finite or ended above its start"]
    return "\n\n".join([table(title, result["problems"]), "\n".join(lines)])


def draw_problems(runs: Sequence[Sequence[Record]]) -> Any:
    """A panel per problem: training loss against CPU seconds, a line per seed, at the best rate of each method."""
    rows = summarise(runs[-1])["problems"]
    columns = min(5, len(rows))
    height = math.ceil(len(rows) / columns)
    whole, panels = figure(3 * columns, 2.4 * height + 0.7, columns, height)
    drawn = {}
    for panel, (name, row) in zip(panels, rows.items(), strict=False):
        records = [record for record in runs[-1] if record["problem"] == name]
        losses = []
        for record in records:
            if record["rate"] != row[record["method"]]["rate"]:
                continue
            text, colour, style = _LOOKS[record["method"]]
            points = [(seconds, loss) for seconds, loss in record["curve"] if loss is not None and loss > 0]
            losses += [loss for _, loss in points]
            (drawn[text],) = panel.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.2)
        panel.set_yscale("log")
        # What runs away above the start is cut off.
        panel.set_ylim(min(losses) / 1.3, 1.5 * max(record["start_loss"] for record in records))
        panel.set_xlim(0, None)
        panel.set_title(f"{name}: training loss, CPU seconds", loc="left", fontsize=9)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    whole.legend(drawn.values(), drawn, loc="outside lower center", ncols=min(columns, 5), frameon=False)
    return whole


# -- the command ----------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = f"these alone (default: all but mnist-full). One or more of: {', '.join(PROBLEMS)}"
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), default=[], metavar="NAME", help=text)
    text = f"one or more of {', '.join(METHODS)} (default: all)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=text)
    text = "seeds of the initial weights and of the order of batches (default 3, with --guard 10)"
    parser.add_argument("--seeds", type=positive, metavar="NUMBER", help=text)
    text = "processes, each with one thread (default 1)"
    parser.add_argument("--jobs", type=positive, default=1, metavar="NUMBER", help=text)
    text = "folder with MNIST and covtype (default: that of WOODBURY_DATA); without it these are left out"
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help=text)
    text = "folder for records.jsonl, summary.json, table.txt, bench-problems.png (default runs/problems)"
    parser.add_argument("--out", type=Path, default=Path("runs/problems"), metavar="FOLDER", help=text)
    text = "run woodbury alone; status 1 if a run raises, ends above its start or leaves a parameter not finite"
    parser.add_argument("--guard", action="store_true", help=text)
    text = "the records.jsonl of an earlier run: its runs of Adam and SGD are not made again"
    parser.add_argument("--rivals", type=Path, metavar="FILE", help=text)
    text = "other settings in place of woodbury's defaults, such as benchmarks.rivals:growing"
    parser.add_argument("--woodbury", dest="train", metavar="MODULE:FUNCTION", help=text)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    earlier = read_records(options.rivals) if options.rivals else []
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("guard.jsonl" if options.guard else "records.jsonl")
    with path.open("w") as file:
        for records in bench_problems(
            names=options.only,
            seeds=options.seeds or (10 if options.guard else 3),
            methods=[WOODBURY] if options.guard else options.methods,
            jobs=options.jobs,
            data_dir=options.data_dir,
            train=options.train,
            earlier=earlier,
        ):
            file.writelines(json.dumps(round_numbers(record)) + "\n" for record in records)
            file.flush()
    records = read_records(path)
    if not records:
        raise SystemExit("problems: the data of all these problems is absent")
    return _guard_result(records) if options.guard else _write_summary(records, options.out)


def _write_summary(records: Sequence[Record], folder: Path) -> dict[str, Any]:
    """The summary, written beside the records with its table and figure."""
    summary = {"machine": this_machine(), "versions": installed_versions()} | summarise(records)
    (folder / "table.txt").write_text(problems_tables(summary) + "\n")
    (folder / "summary.json").write_text(json.dumps(round_numbers(summary)) + "\n")
    try:
        draw_problems([records]).savefig(folder / "bench-problems.png", dpi=130)
    except ModuleNotFoundError as error:
        say(f'no figure: that needs {error.name}: pip install "woodbury[experiments]"')
    return summary


def _guard_result(records: Sequence[Record]) -> dict[str, Any]:
    rows = []
    for name in dict.fromkeys(record["problem"] for record in records):
        runs = [record for record in records if record["problem"] == name]
        shares = [figure_of(run, "train_loss") / run["start_loss"] for run in runs]
        warned = sum(bool(run["warnings"]) for run in runs)
        row = {"problem": name, "seeds": len(runs), "smallest": min(shares), "largest": max(shares)}
        rows.append(row | {"with a warning": warned})
    return {"runs": len(records), "problems": rows, "faults": faults(records)}


COMMAND = Command(
    "training with woodbury beside Adam and SGD, untuned and tuned, on small problems (20 minutes)",
    _run,
    lambda result: guard_table(result) if "faults" in result else problems_tables(result),
    _add_options,
    draw_problems,
)
