"""Tables of the measurements as aligned plain text."""

from __future__ import annotations

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


def problems_table(summary: dict[str, Any]) -> str:
    """One row per problem, and below it on how many problems each bar is reached."""
    headings = [
        *(
            "problem",
            "kind",
            "Adam 1e-3\ntrain loss",
            "Adam tuned\ntrain loss (rate)",
            "SGD tuned\ntrain loss (rate)",
        ),
        *("woodbury\ntrain loss", "equal epochs\nx Adam tuned", "\nx seconds"),
        *("equal seconds\nx Adam tuned", "\nx seconds", "test: Adam tuned", "test: woodbury\nequal epochs"),
        "test: woodbury\nequal seconds",
    ]
    cells = []
    for name, row in summary["problems"].items():
        adam, sgd = row.get("adam"), row.get("sgd")
        epochs, seconds = row.get("woodbury"), row.get("woodbury-seconds")
        cells.append(
            [
                *(name, row["kind"], _number(row.get("adam-1e-3"), "train_loss")),
                *(_rated(adam), _rated(sgd), _number(epochs, "train_loss")),
                *(_number(epochs, "ratio"), _number(epochs, "seconds_ratio")),
                *(_number(seconds, "ratio"), _number(seconds, "seconds_ratio")),
                *(_spread(row["kind"], adam), _spread(row["kind"], epochs), _spread(row["kind"], seconds)),
            ]
        )
    title = "Training loss: median over the seeds; * edge of the grid. Test: mean, smallest and largest"
    lines = [f"{reached} of {asked}: {bar}" for bar, (reached, asked) in summary["counts"].items() if asked]
    return "\n".join([table(title, headings, cells, left=2), "", *lines])


def _number(entry: dict[str, Any] | None, key: str) -> str:
    value = (entry or {}).get(key)
    return "-" if value is None else f"{value:.3g}"


def _rated(entry: dict[str, Any] | None) -> str:
    """0.0124 (0.01), with * behind a rate at the edge of the grid."""
    if entry is None:
        return "-"
    return f"{_number(entry, 'train_loss')} ({entry['rate']:g}{'*' if entry['edge'] else ' '})"


def _spread(kind: str, entry: dict[str, Any] | None) -> str:
    """2.4 % (2.2 to 2.9), or without % for a loss."""
    if entry is None:
        return "-"
    unit, factor = (" %", 100) if kind == "classification" else ("", 1)
    values = (entry["test"], *entry["test_spread"])
    middle, low, high = ("-" if value is None else f"{factor * value:.3g}" for value in values)
    return f"{middle}{unit} ({low} to {high})"


def guard_table(records: Sequence[dict[str, Any]], faults: Sequence[str]) -> str:
    """Per problem the seeds, the losses at the start and the range at the end; then the faults, if any."""
    cells = []
    for name in dict.fromkeys(record["problem"] for record in records):
        runs = [record for record in records if record["problem"] == name]
        ratios = [run["train_loss"] / run["start_loss"] for run in runs]
        cells.append([name, str(len(runs)), f"{min(ratios):.3g}", f"{max(ratios):.3g}"])
    title = "woodbury's defaults: training loss at the end over that at the start"
    lines = faults or ["no run raised, ended above its start or left a parameter that is not finite"]
    return "\n".join([table(title, ["problem", "seeds", "smallest", "largest"], cells), "", *lines])
