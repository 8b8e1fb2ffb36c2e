"""Figures from the JSON of the other commands. Imports matplotlib only when something is drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from woodbury.bench.peer_steps import GN, NG
from woodbury.bench.processes import EXTRAPOLATED, NETWORKS, QUICK, TALK, efficiency, scaled
from woodbury.bench.rivals import ADAM, ADAM_CONSTANT, EQUAL_SECONDS, SGD, WOODBURY
from woodbury.bench.scale import beyond_sgd
from woodbury.bench.standings import read_records, summarise
from woodbury.experiments.looks import MARKERS, looks_of

_COLOURS = {GN: "#0072B2", NG: "#D55E00", "": "#999999"}  # by what a peer computes
_LINES: dict[str, tuple[str, Any, str]] = {  # colour, style and name of a method of `bench problems`
    ADAM_CONSTANT: ("#999999", "-", "Adam, 1e-3"),
    ADAM: ("#56B4E9", "-", "Adam, best rate, decayed"),
    SGD: ("#E69F00", "-", "SGD, best rate, decayed"),
    WOODBURY: ("#D55E00", "-", "woodbury, equal epochs"),
    EQUAL_SECONDS: ("#D55E00", "--", "woodbury, equal seconds"),
}
_MEANING = {
    "n": "parameters n (depth 1 to 16)",
    "N1": "batch N1",
    "N2": "curvature samples N2",
    "C": "classes C",
    "width": "width",
}


def draw(files: Sequence[Path], folder: Path) -> list[Path]:
    """Draw one figure per kind of measurement among the files and return the paths of the figures.

    Several files of `bench step` give one figure with the range of the runs; of other kinds only the last counts.
    """
    by_kind: dict[str, list[Any]] = {}
    for path in files:
        try:
            content = _read(path)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        by_kind.setdefault(_kind(content, path), []).append(content)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, contents in by_kind.items():
        path = folder / f"bench-{kind}.png"
        _FIGURES[kind](contents).savefig(path, dpi=130)
        written.append(path)
    return written


def _read(path: Path) -> Any:
    """What a file holds: one JSON value, or of a file named .jsonl a list of records."""
    if path.suffix == ".jsonl":
        return read_records(path)
    return json.loads(path.read_text())


def _kind(content: Any, path: Path) -> str:
    """The command whose JSON this is."""
    if isinstance(content, list) and content and all(isinstance(row, dict) and "curve" in row for row in content):
        return "problems"
    if isinstance(content, dict) and content:
        if "problems" in content:
            return "peers"
        if "pays" in content:
            return "processes"
        rows = list(content.values())
        if all(isinstance(row, dict) and "values" in row for row in rows):
            return "scale"
        if all(isinstance(row, dict) and "sgd" in row for row in rows):
            return "step"
    raise ValueError(f"{path} is not the JSON of bench step, scale, peers, problems or processes")


def _figure(width: float, height: float, columns: int, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
        panel.grid(color="#E4E4E4", linewidth=0.7)
    return figure, panels


def draw_step(runs: Sequence[dict[str, dict[str, float]]]) -> Any:
    """A group of bars per network: medians over the runs, each with a line from the smallest to the largest."""
    figure, (panel,) = _figure(9, 3.6, 1)
    networks = list(runs[0])
    names = [name for name in runs[0][networks[0]] if name != "sgd"]
    looks = looks_of(names)
    for index, (name, look) in enumerate(zip(names, looks, strict=True)):
        places = [group + (index - (len(names) - 1) / 2) * 0.16 for group in range(len(networks))]
        values = [[run[network][name] for run in runs] for network in networks]
        middles = [median(ratios) for ratios in values]
        spread = [
            [middle - min(ratios) for middle, ratios in zip(middles, values, strict=True)],
            [max(ratios) - middle for middle, ratios in zip(middles, values, strict=True)],
        ]
        panel.bar(places, middles, 0.14, color=look.colour, label=name, yerr=spread if len(runs) > 1 else None)
        for place, middle, above in zip(places, middles, spread[1], strict=True):
            panel.text(place, (middle + above) * 1.06, f"{middle:.3g}", ha="center", va="bottom", fontsize=8)
    panel.axhline(1, color="#444444", linewidth=1)
    panel.set_yscale("log")
    panel.set_ylim(0.8, None)
    panel.grid(visible=False, axis="x")
    panel.set_xticks(range(len(networks)), networks)
    panel.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1 (SGD)", "2", "5", "10", "20", "50", "100"])
    panel.minorticks_off()
    panel.set_title(
        "CPU time of a step divided by that of torch.optim.SGD on the same batch", loc="left", fontsize=11
    )
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def draw_scale(runs: Sequence[dict[str, dict[str, Any]]]) -> Any:
    """A panel per sweep: cost beyond SGD's step, with the slope from the paper's table as a dotted line."""
    from matplotlib.lines import Line2D

    sweeps = runs[-1]
    columns = min(3, len(sweeps))
    rows = math.ceil(len(sweeps) / columns)
    figure, panels = _figure(4 * columns, 3.3 * rows + 0.4, columns, rows)
    names = [name for name, entry in next(iter(sweeps.values())).items() if isinstance(entry, dict)]
    looks = dict(zip(names, looks_of(names), strict=True))
    for panel, (sweep, row) in zip(panels, sweeps.items(), strict=False):
        values = row["values"]
        for name, look in looks.items():
            entry = row[name]
            milliseconds = [1e3 * seconds for seconds in beyond_sgd(entry["seconds"], entry["sgd"])]
            style = {"color": look.colour, "marker": MARKERS[look.marker], "markersize": 5}
            label = f"{name} {entry['exponent']:.2f} ({entry['predicted']:.2f})"
            panel.plot(values, milliseconds, label=label, **style)
            guide = [milliseconds[-1] * (value / values[-1]) ** entry["predicted"] for value in values]
            panel.plot(values, guide, color=look.colour, linewidth=1, linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(values, [_short(value) for value in values])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_title(_MEANING.get(sweep, sweep), loc="left", fontsize=11)
        panel.legend(fontsize=7.5, frameon=True, framealpha=0.8, edgecolor="none", handlelength=1.5)
    for panel in panels[: len(sweeps) : columns]:
        panel.set_ylabel("ms beyond SGD's step")
    for panel in panels[len(sweeps) :]:
        panel.set_axis_off()
        lines = [Line2D([], [], color="#444444", linestyle=style) for style in ("-", ":")]
        texts = ["measured", "slope from the paper's table,\nthrough the last point"]
        panel.legend(lines, texts, loc="center left", frameon=False)
    figure.suptitle("Growth of the cost: measured exponent (and from the paper's cost table)", x=0.01, ha="left")
    return figure


def draw_peers(runs: Sequence[dict[str, Any]]) -> Any:
    """A panel per problem: seconds of each peer's step, woodbury's on top."""
    from matplotlib.patches import Patch

    problems = runs[-1]["problems"]
    most = max(len(problem["peers"]) for problem in problems.values())
    figure, panels = _figure(6.6 * len(problems), 0.34 * most + 1.5, len(problems))
    for panel, problem in zip(panels, problems.values(), strict=True):
        entries = problem["peers"][::-1]
        timed = [entry["seconds"] for entry in entries if entry["status"] == "ok"]
        least = min(timed, default=1.0) / 2
        for place, entry in enumerate(entries):
            if entry["status"] != "ok":
                reason = entry["status"].split(":")[0]
                panel.text(least, place, f" {reason}", va="center", fontsize=8, color="#666666")
                continue
            colour = _COLOURS.get(entry["computes"], _COLOURS[""])
            panel.barh(place, entry["seconds"] - least, left=least, color=colour, height=0.7)
            text = _seconds(entry["seconds"])
            if not entry["peer"].startswith("woodbury"):
                text += f", {entry['ratio']:.3g}x"
            panel.text(entry["seconds"] * 1.1, place, text, va="center", fontsize=8)
        panel.set_xscale("log")
        panel.set_xlim(least, max(timed, default=1.0) * 8)
        panel.set_yticks(range(len(entries)), [entry["peer"] for entry in entries], fontsize=8.5)
        panel.grid(visible=False, axis="y")
        panel.set_xlabel("CPU seconds of a step")
        title = "{network}, {loss},\n{samples} samples, {parameters:,} parameters".format(**problem)
        panel.set_title(title, loc="left", fontsize=11)
    handles = [Patch(color=colour) for colour in _COLOURS.values()]
    labels = ["exact Gauss-Newton", "exact natural gradient (empirical Fisher)", "something else"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_problems(runs: Sequence[Sequence[dict[str, Any]]]) -> Any:
    """A panel per problem: training loss against CPU seconds, a line per seed, at the best rate of each method."""
    from matplotlib.lines import Line2D

    rows = summarise(runs[-1])["problems"]
    columns = min(5, len(rows))
    height = math.ceil(len(rows) / columns)
    figure, panels = _figure(3 * columns, 2.4 * height + 0.7, columns, height)
    for panel, (name, row) in zip(panels, rows.items(), strict=False):
        records = [record for record in runs[-1] if record["problem"] == name]
        losses = []
        for record in records:
            if record["rate"] != row[record["method"]]["rate"]:
                continue
            points = [
                (seconds, loss) for seconds, loss in record["curve"] if loss is not None and 0 < loss < math.inf
            ]
            losses += [loss for _, loss in points]
            colour, style, _ = _LINES[record["method"]]
            panel.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.2, alpha=0.85)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        panel.tick_params(which="both", labelsize=8)
        # What runs away above the start is cut off.
        panel.set_ylim(min(losses) / 1.3, 1.5 * max(record["start_loss"] for record in records))
        panel.set_xlim(0, None)
        panel.set_title(name, loc="left", fontsize=11)
    for place, panel in enumerate(panels):
        if place >= len(rows):
            panel.set_axis_off()
        elif place + columns >= len(rows):
            panel.set_xlabel("CPU seconds")
    for panel in panels[::columns]:
        panel.set_ylabel("training loss")
    shown = [_LINES[method] for method in _LINES if any(method in row for row in rows.values())]
    handles = [Line2D([], [], color=colour, linestyle=style) for colour, style, _ in shown]
    texts = [text for _, _, text in shown]
    if len(panels) > len(rows):
        panels[len(rows)].legend(handles, texts, loc="center left", frameon=False)
    else:
        figure.legend(handles, texts, loc="outside lower center", ncols=min(columns, 3), frameon=False)
    return figure


def draw_processes(runs: Sequence[dict[str, Any]]) -> Any:
    """Seconds by phase and bytes beside DDP's, as measured; below, how well devices are used, by the model."""
    from matplotlib.lines import Line2D

    result = runs[-1]
    entries, model = result["processes"], result["model"]
    name = list(result["networks"])[-1]
    network = {**NETWORKS, **QUICK}[name]
    figure, panels = _figure(12, 8, 2, 2)
    groups = list(dict.fromkeys((entry["network"], entry["method"]) for entry in entries))
    counts = sorted({entry["processes"] for entry in entries})
    step = {count: (index - (len(counts) - 1) / 2) * 0.27 for index, count in enumerate(counts)}
    places = [groups.index((entry["network"], entry["method"])) + step[entry["processes"]] for entry in entries]
    bottoms = [0.0] * len(entries)
    for phase, colour in _PHASE_COLOURS.items():
        heights = [1e3 * entry["phases"].get(phase, 0.0) for entry in entries]
        panels[0].bar(places, heights, 0.24, bottom=bottoms, color=colour, label=phase)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    for place, entry, top in zip(places, entries, bottoms, strict=True):
        panels[0].text(place, top, f"{entry['processes']}", ha="center", va="bottom", fontsize=8)
    panels[0].set_title(
        f"measured: ms of a step on 1, 2, 4 processes, {result['cores']} cores", loc="left", fontsize=11
    )
    panels[0].legend(fontsize=7.5, frameon=False, ncols=2)
    shared = [(place, entry) for place, entry in zip(places, entries, strict=True) if entry["processes"] > 1]
    bottoms = [0.0] * len(shared)
    for phase in ("gather rows", "gather Gram", "sum p", "agree"):
        heights = [entry["bytes"].get(phase, 0) / 1e6 for _, entry in shared]
        panels[1].bar(
            [place for place, _ in shared], heights, 0.24, bottom=bottoms, color=_PHASE_COLOURS[phase], label=phase
        )
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    for index, (place, entry) in enumerate(shared):
        panels[1].text(place, bottoms[index], f"{entry['processes']}", ha="center", va="bottom", fontsize=8)
        line = {"color": "black", "linewidth": 1.5, "label": "DDP's gradients" if index == 0 else None}
        panels[1].plot([place - 0.13, place + 0.13], [entry["ddp_bytes"] / 1e6] * 2, **line)
    panels[1].set_title("measured: MB that a process gives per step, 2 and 4 processes", loc="left", fontsize=11)
    panels[1].legend(fontsize=8, frameon=False)
    for panel in panels[:2]:
        panel.set_xticks(range(len(groups)), ["\n".join(group) for group in groups])
        panel.grid(visible=False, axis="x")
    samples = [2**power for power in range(5, 21)]
    for panel, (talk, changed) in zip(panels[2:], TALK.items(), strict=True):
        for devices, colour in zip(EXTRAPOLATED, ("#009E73", "#0072B2", "#D55E00"), strict=True):
            for method, style in (("smw-ng", "-"), ("smw-gn", "--")):
                values = [
                    efficiency(model | changed, scaled(network, method, "N2 fixed", count), devices)
                    for count in samples
                ]
                panel.plot(samples, values, color=colour, linestyle=style)
        panel.axhline(0.5, color="#444444", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("samples per step, of all devices")
        title = f"extrapolated: efficiency on {name}, N2 {network.curvature_samples}; exchange as {talk}"
        panel.set_title(title, loc="left", fontsize=11)
    colours = ("#009E73", "#0072B2", "#D55E00")
    handles = [Line2D([], [], color=colour) for colour in colours]
    handles += [Line2D([], [], color="#444444", linestyle=style) for style in ("-", "--")]
    labels = [f"{devices} devices" for devices in EXTRAPOLATED] + ["smw-ng", "smw-gn"]
    panels[2].legend(handles, labels, fontsize=8, frameon=False)
    return figure


_PHASE_COLOURS = {
    "passes and rows": "#0072B2",
    "Gram": "#56B4E9",
    "solve": "#009E73",
    "p": "#F0E442",
    "trial": "#CC79A7",
    "other": "#BBBBBB",
    "gather rows": "#D55E00",
    "gather Gram": "#E69F00",
    "sum p": "#7A3E00",
    "agree": "#555555",
}
_FIGURES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "step": draw_step,
    "scale": draw_scale,
    "peers": draw_peers,
    "problems": draw_problems,
    "processes": draw_processes,
}


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _short(value: float) -> str:
    """2.1M, 66k, 2048."""
    if value >= 1e6:
        return f"{value / 1e6:.2g}M"
    return f"{value / 1e3:.3g}k" if value >= 1e4 else f"{value:g}"
