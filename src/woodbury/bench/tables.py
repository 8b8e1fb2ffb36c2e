"""Tables of the measurements as aligned plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The title, the headings (which may have several lines), a rule and the rows.

    The first `left` columns are aligned left, the others right.
    """
    heads = [heading.split("\n") for heading in headings]
    height = max(map(len, heads))
    above = list(zip(*([""] * (height - len(head)) + head for head in heads), strict=True))
    widths = [max(map(len, column)) for column in zip(*above, *rows, strict=True)]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([title, "", *map(line, [*above, rule, *rows])])


def step_table(ratios: dict[str, dict[str, float]]) -> str:
    """Optimizers by networks, from {network: {optimizer: ratio}}."""
    names = dict.fromkeys(name for row in ratios.values() for name in row)
    cells = [[name, *(f"{row[name]:.2f}" if name in row else "-" for row in ratios.values())] for name in names]
    return table("CPU time of a step divided by that of torch.optim.SGD", ["optimizer", *ratios], cells)


def scale_table(sweeps: dict[str, dict[str, Any]]) -> str:
    """Optimizers by sweeps: the measured exponent, and in brackets that of the paper's cost table."""
    headings = [f"{sweep}\n{row['values'][0]:,} to {row['values'][-1]:,}" for sweep, row in sweeps.items()]
    names = [name for name, entry in next(iter(sweeps.values())).items() if isinstance(entry, dict)]
    cells = [
        [name, *("{exponent:.2f} ({predicted:.2f})".format(**row[name]) for row in sweeps.values())]
        for name in names
    ]
    title = "Exponent of the cost beyond SGD's step: measured (from the paper's cost table)"
    return table(title, ["optimizer", *headings], cells)


def laplacian_table(result: dict[str, dict[str, dict[str, float]]]) -> str:
    """Milliseconds of both methods and their ratio, problem by problem."""
    methods = list(next(iter(result.values())))
    cells = [
        [
            *(problem, what),
            *(f"{1000 * times[method][what]:.3g}" for method in methods),
            f"{times[methods[1]][what] / times[methods[0]][what]:.2f}",
        ]
        for problem, times in result.items()
        for what in times[methods[0]]
    ]
    return table("CPU milliseconds", ["network", "what", *methods, "ratio"], cells, left=2)


def model_table(result: dict[str, dict[str, float]]) -> str:
    """Milliseconds of a step of each of two optimizers, and the second in steps of the first."""
    names = list(next(iter(result.values())))
    cells = [
        [model, *(f"{1000 * times[name]:.3g}" for name in names), f"{times[names[1]] / times[names[0]]:.2f}"]
        for model, times in result.items()
    ]
    return table("CPU milliseconds of a step", ["model", *names, "ratio"], cells)


def processes_tables(result: dict[str, Any]) -> str:
    """Milliseconds by phase, kilobytes beside DDP's, and where many devices pay by the model."""
    entries = result["processes"]
    phases = list(dict.fromkeys(phase for entry in entries for phase in entry["phases"]))
    heads = [[entry[key] for key in ("network", "method")] + [str(entry["processes"])] for entry in entries]
    times = [
        [
            *head,
            *(f"{1e3 * entry['phases'].get(phase, 0.0):.3g}" for phase in phases),
            f"{1e3 * entry['seconds']:.3g}",
        ]
        for head, entry in zip(heads, entries, strict=True)
    ]
    headings = ["network", "method", "processes"]
    title = f"Milliseconds of a step by phase, one thread per process on {result['cores']} cores"
    tables = [table(title, [*headings, *(phase.replace(" ", "\n") for phase in phases), "all"], times, left=2)]
    moved = [
        [
            *head,
            *(f"{entry['bytes'].get(phase, 0) / 1e3:.4g}" for phase in _EXCHANGES),
            f"{sum(entry['bytes'].values()) / 1e3:.4g}",
            f"{entry['ddp_bytes'] / 1e3:.4g}",
            *("-" if entry[key] is None else f"{entry[key] / 1e3:.4g}" for key in ("loopback", "ddp_loopback")),
            f"{entry['messages']:g}",
        ]
        for head, entry in zip(heads, entries, strict=True)
        if entry["processes"] > 1
    ]
    columns = [*(phase.replace(" ", "\n") for phase in _EXCHANGES), "all", "DDP", "all,\nloopback"]
    title = "Kilobytes that a process puts into collectives per step, and that the loopback interface sends for it"
    tables.append(table(title, [*headings, *columns, "DDP,\nloopback", "collec-\ntives"], moved, left=2))
    devices = list(dict.fromkeys(row["devices"] for row in result["pays"]))
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in result["pays"]:
        cell = "never" if row["samples"] is None else f"{row['samples']:,}"
        cells.setdefault(tuple(row[key] for key in ("network", "method", "rule", "talk")), []).append(cell)
    title = "By the model: the smallest batch on which so many devices are half as efficient as one"
    rows = [[*key, *own] for key, own in cells.items()]
    tables.append(table(title, ["network", "method", "rule", "exchange", *map(str, devices)], rows, left=4))
    fitted = ", ".join(f"{name} {value:.3g}" for name, value in result["model"].items())
    return "\n\n".join([*tables, f"fitted: {fitted}"])


_EXCHANGES = ("gather rows", "gather Gram", "sum p", "agree")


def peer_tables(result: dict[str, Any]) -> str:
    """One table per problem, and below it one line per peer that was not timed."""
    return "\n\n".join(_peer_table(problem) for problem in result["problems"].values())


def _peer_table(problem: dict[str, Any]) -> str:
    timed = [entry for entry in problem["peers"] if entry["status"] == "ok"]
    others = [f"{entry['peer']}: {entry['status']}" for entry in problem["peers"] if entry["status"] != "ok"]
    cells = [
        [
            entry["peer"],
            entry["computes"],
            f"{entry['seconds']:.4g}",
            f"{entry['ratio']:.3g}",
            "-" if entry["memory"] is None else f"{entry['memory'] / 2**20:.0f}",
            "-" if entry["difference"] is None else f"{entry['difference']:.0e}",
        ]
        for entry in timed
    ]
    title = "{network}, {loss}, {samples} samples, {parameters:,} parameters".format(**problem)
    headings = ["step", "computes", "seconds", "x woodbury", "MiB", "p differs"]
    return "\n".join([table(title, headings, cells, left=2), *others])


def problems_tables(summary: dict[str, Any]) -> str:
    """Training losses, test figures and, below them, on how many problems each bar is reached."""
    training, test = [], []
    for name, row in summary["problems"].items():
        constant, adam, sgd, epochs, seconds = (row.get(method) for method in _METHODS)
        training.append(
            [
                *(name, row["kind"], _number(constant, "train_loss"), *_rated(adam), *_rated(sgd)),
                *(_number(epochs, key) for key in ("train_loss", "ratio", "seconds_ratio")),
                *(_number(seconds, key) for key in ("train_loss", "ratio", "seconds_ratio")),
            ]
        )
        test.append([name, row["kind"], *(_test(row["kind"], row.get(method)) for method in _METHODS)])
    headings = [
        *("problem", "kind", "Adam\n1e-3", "Adam\ntuned", "\nrate", "SGD\ntuned", "\nrate"),
        *("equal\nepochs", "\nx loss", "\nx time", "equal\nseconds", "\nx loss", "\nx time"),
    ]
    title = (
        "Training loss, median over the seeds; *: the edge of the rates tried\n"
        "woodbury in equal epochs and in equal seconds; x loss, x time: over those of tuned Adam"
    )
    tables = [table(title, headings, training, left=2)]
    headings = ["problem", "kind", "Adam 1e-3", "Adam tuned", "SGD tuned", "woodbury, equal epochs"]
    title = "Test error or test loss, mean (smallest to largest) over the seeds"
    tables.append(table(title, [*headings, "woodbury, equal seconds"], test, left=2))
    bars = [f"{reached} of {asked}: {bar}" for bar, (reached, asked) in summary["bars"].items() if asked]
    return "\n\n".join([*tables, "\n".join(bars)])


_METHODS = ("adam-1e-3", "adam", "sgd", "woodbury", "woodbury-seconds")  # in the order of the columns


def _number(entry: dict[str, Any] | None, key: str) -> str:
    if entry is None or key not in entry:
        return "-"
    return "inf" if entry[key] is None else f"{entry[key]:.3g}"


def _rated(entry: dict[str, Any] | None) -> list[str]:
    """The training loss and the rate, with * at the edge of the rates tried."""
    return [_number(entry, "train_loss"), _number(entry, "rate") + ("*" if entry and entry["edge"] else "")]


def _test(kind: str, entry: dict[str, Any] | None) -> str:
    """2.4 % (2.2 to 2.9), or a loss without %."""
    if entry is None:
        return "-"
    unit, factor = (" %", 100) if kind == "classification" else ("", 1)
    values = (entry["test"], *entry["test_range"])
    mean, low, high = ("inf" if value is None else f"{factor * value:.3g}" for value in values)
    return f"{mean}{unit} ({low} to {high})"


def guard_table(records: Sequence[dict[str, Any]], faults: Sequence[str]) -> str:
    """Per problem what is left of the loss, and below it the faults."""
    cells = []
    for name in dict.fromkeys(record["problem"] for record in records):
        runs = [record for record in records if record["problem"] == name]
        shares = [math.inf if run["train_loss"] is None else run["train_loss"] / run["start_loss"] for run in runs]
        warned = sum(bool(run["warnings"]) for run in runs)
        cells.append([name, str(len(runs)), f"{min(shares):.3g}", f"{max(shares):.3g}", str(warned)])
    title = "Training loss at the end over that at the start, woodbury's defaults"
    headings = ["problem", "seeds", "smallest", "largest", "with a warning"]
    lines = faults or ["no run raised, left a parameter that is not finite or ended above its start"]
    return "\n\n".join([table(title, headings, cells), "\n".join(lines)])
