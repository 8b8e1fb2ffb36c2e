"""Tables, figures and a page from run folders on disk. Nothing here runs a model."""

import io
import json
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from woodbury._files import write_whole
from woodbury._style import STYLE
from woodbury.runs.medians import Group, Look, by_dataset, ends_of, groups_of
from woodbury.runs.panels import THRESHOLDS, Axis, Panel, panels_of, title_of
from woodbury.runs.records import Run, load
from woodbury.runs.verdict import ENOUGH_SEEDS, race_of, standings, takeaway

__all__ = ["Run", "charts", "draw", "ends_tables", "html", "load", "write"]

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
    texts = json.dumps(data).replace("<", "\\u003c")
    parts = {"title": escape(title), "data": texts, "body": body}
    template = _FILES.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], template)


def _section(dataset: str, runs: Sequence[Run]) -> dict[str, Any]:
    groups = groups_of(runs)
    panels = panels_of(groups)
    drawn = {panel.quantity for panel in panels}
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
        "drawing": charts(groups, panels),
        "note": (bands if any(group.seeds > 1 for group in groups) else "") + time,
        "ratio_note": ratio if "ratio" in drawn else "",
        "ends": _ends_table(groups),
        "ends_note": bold if len(groups) > 1 else "",
        "settings": _settings_tables(groups),
    }


# -- the drawing of a data set by matplotlib: all of it as a figure, and panel by panel for the page


def draw(runs: Sequence[Run]) -> Figure:
    """The paper's panels for the runs of one data set, against epochs and seconds, and panels for damping.

    Lines are medians over seeds, bands run from the smallest to the largest value.
    """
    groups = groups_of(runs)
    panels = panels_of(groups)
    rows = [panel for panel in panels if "seconds" in panel.x]
    others = [panel for panel in panels if "seconds" not in panel.x]  # damping and ratio
    columns = 2 if not others else 3 if len(rows) > 1 else 4
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.04)
        figure = Figure(figsize=(1 + 4 * columns, 3.6 * len(rows)), layout=layout)
        places = figure.subplots(len(rows), columns, squeeze=False)
        for panel, row in zip(rows, places, strict=True):
            _draw_panel(row[0], groups, panel, "epochs")
            _draw_panel(row[1], groups, panel, "seconds")
        free = list(places[:, 2:].flat)
        for panel, place in zip(others, free, strict=False):
            _draw_panel(place, groups, panel, "epochs")
        for place in free[len(others) :]:
            place.remove()
        figure.suptitle(_literal(title_of(groups)), x=0.012, ha="left", fontsize=12)
        _draw_legend(figure, groups)
    return figure


def image(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name may have any letters; a box stands for them
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def charts(groups: Sequence[Group], panels: Sequence[Panel]) -> dict[str, Any]:
    """The lines of the legend, and each panel against every horizontal axis that it has, as SVG for a page."""
    legend = [{"label": group.label, "swatch": _swatch(group.look)} for group in groups]
    drawn = []
    for panel in panels:
        figures = {horizontal: _chart(groups, panel, horizontal) for horizontal in panel.x}
        drawn.append({"quantity": panel.quantity, "title": panel.title, "figures": figures})
    return {"legend": legend, "panels": drawn}


def _chart(groups: Sequence[Group], panel: Panel, horizontal: str) -> str:
    # a layout that matplotlib works out takes longer than the drawing
    left = 0.05 + 0.0145 * max((len(label) for _, label in panel.y.ticks), default=0)
    margins = {"left": left, "right": 0.97, "bottom": 0.16, "top": 0.9}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.2))
        _draw_panel(figure.subplots(gridspec_kw=margins), groups, panel, horizontal)
    return _svg(figure)


def _swatch(look: Look) -> str:
    figure = Figure(figsize=(0.4, 0.18))
    figure.add_artist(Line2D([0.05, 0.5, 0.95], [0.5] * 3, markevery=[1], **_line_style(look)))
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """The figure as an element of HTML, without the addresses that a file of its own needs."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "woodbury"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    _, start, rest = buffer.getvalue().partition("<svg")
    return re.sub(r' xmlns(:xlink)?="[^"]*"', "", start + rest)


def _draw_panel(place: Axes, groups: Sequence[Group], panel: Panel, horizontal: str) -> None:
    """Draw a panel; line and band of a curve have the name `curve-<number>`, by which the page hides them."""
    x, y = panel.x[horizontal], panel.y
    place.set(title=panel.title, xlabel=x.title, xscale=x.scale, yscale=y.scale)
    for axis, ticks in ((place.xaxis, x.ticks), (place.yaxis, y.ticks)):
        axis.set_ticks([value for value, _ in ticks], labels=[label for _, label in ticks])
    place.minorticks_off()
    place.set(xlim=(x.low, x.high), ylim=(y.low, y.high))  # after the ticks: those outside widen an axis
    for guide in y.guides:
        place.axhline(guide, color="#666666", linewidth=1, linestyle=(0, (3, 2)), zorder=1)
    for index, (group, curve) in enumerate(zip(groups, panel.curves, strict=True)):
        if curve is None:
            continue
        along = _inside(x, getattr(curve, horizontal))
        # Not at every point of a long curve, and not at the same points for two curves that may coincide.
        every = max(1, len(along) // 10)
        name, marks = f"curve-{index}", (index * every // len(groups), every)
        place.plot(along, _inside(y, curve.middle), gid=name, markevery=marks, **_line_style(group.look))
        if max(curve.seeds) > 1:
            low, high = _inside(y, curve.low), _inside(y, curve.high)
            place.fill_between(along, low, high, gid=name, color=group.look.colour, alpha=0.16, linewidth=0)


def _inside(axis: Axis, values: Sequence[float]) -> list[float]:
    """The values within reach of the axis: infinity lies far above it."""
    return [min(max(value, axis.least), 1e6 * max(axis.high, 1)) for value in values]


def _line_style(look: Look) -> dict[str, Any]:
    return {
        "color": look.colour,
        "linewidth": 1.4 if look.dashed else 1.7,
        "linestyle": (0, (3, 2.5)) if look.dashed else "-",
        "marker": look.marker,
        "markersize": 5.5 if look.dashed else 5,
        "markerfacecolor": "none" if look.dashed else look.colour,
        "markeredgecolor": look.colour if look.dashed else "white",
        "markeredgewidth": 1.1 if look.dashed else 0.5,
    }


def _draw_legend(figure: Figure, groups: Sequence[Group]) -> None:
    """The legend below the panels, in as many columns as there is room for."""
    lines = [Line2D([], [], **_line_style(group.look)) for group in groups]
    labels = [_literal(group.label) for group in groups]
    columns = max(1, int(9 * figure.get_figwidth() / (max(map(len, labels)) + 7)))
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(lines), columns))


def _literal(text: str) -> str:
    """A text that matplotlib draws as it is: a dollar begins a formula, an underscore in front hides a label."""
    return ("" if text[:1] != "_" else " ") + text.replace("$", r"\$")


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
        ends["seconds_to_target"] = race.seconds.get(group.label, [])
        row = {name: _written(name, median(values)) for name, values in ends.items() if values}
        row["seeds"] = _out_of(len(ended), group.seeds)
        row["epochs"] = _out_of(ended[0].epochs[-1]["epoch"], group.runs[0].config.epochs)
        rows.append(row)
    needs_test_loss = any("test_loss" in row and "test_error" not in row for row in rows)
    hidden = set() if needs_test_loss else {"test_loss"}
    shown = [name for name in wanted if name not in hidden and any(name in row for row in rows)]
    titles = {name: name.replace("_", " ") for name in shown}
    titles |= {"seconds_per_step": "ms / step", "seconds_to_target": f"seconds to {race.target:.3g}"}
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
