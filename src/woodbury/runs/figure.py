"""The drawing of one data set as a figure of matplotlib."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from woodbury._style import STYLE
from woodbury.runs.medians import Look, groups_of
from woodbury.runs.panels import Axis, Drawing, Panel, describe
from woodbury.runs.records import Run


def draw(runs: Sequence[Run]) -> Figure:
    """The paper's panels for the runs of one data set, against epochs and seconds, and panels for damping.

    Lines are medians over seeds, bands run from the smallest to the largest value.
    """
    drawing = describe(groups_of(runs))
    rows = [panel for panel in drawing.panels if "seconds" in panel.x]
    others = [panel for panel in drawing.panels if "seconds" not in panel.x]  # damping and ratio
    columns = 2 if not others else 3 if len(rows) > 1 else 4
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.04)
        figure = Figure(figsize=(1 + 4 * columns, 3.6 * len(rows)), layout=layout)
        places = figure.subplots(len(rows), columns, squeeze=False)
        for panel, row in zip(rows, places, strict=True):
            _draw_panel(row[0], drawing, panel, "epochs")
            _draw_panel(row[1], drawing, panel, "seconds")
        free = list(places[:, 2:].flat)
        for panel, place in zip(others, free, strict=False):
            _draw_panel(place, drawing, panel, "epochs")
        for place in free[len(others) :]:
            place.remove()
        figure.suptitle(_literal(drawing.title), x=0.012, ha="left", fontsize=12)
        _draw_legend(figure, drawing)
    return figure


def image(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name may have any letters; a box stands for them
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_panel(place: Axes, drawing: Drawing, panel: Panel, horizontal: str) -> None:
    """Draw one quantity of all the groups against epochs or seconds."""
    x, y = panel.x[horizontal], panel.y.get("log", panel.y["linear"])
    place.set(title=panel.title, xlabel=x.title, xscale=x.scale, yscale=y.scale)
    for axis, ticks in ((place.xaxis, x.ticks), (place.yaxis, y.ticks)):
        axis.set_ticks([value for value, _ in ticks], labels=[label for _, label in ticks])
    place.minorticks_off()
    place.set(xlim=(x.low, x.high), ylim=(y.low, y.high))  # after the ticks: those outside widen an axis
    for guide in panel.guides:
        place.axhline(guide, color="#666666", linewidth=1, linestyle=(0, (3, 2)), zorder=1)
    for index, (entry, curve) in enumerate(zip(drawing.legend, panel.curves, strict=True)):
        if curve is None:
            continue
        along = _inside(x, getattr(curve, horizontal))
        # Not at every point of a long curve, and not at the same points for two curves that may coincide.
        every = max(1, len(along) // 10)
        marks = (index * every // len(drawing.legend), every)
        place.plot(along, _inside(y, curve.middle), markevery=marks, **_line_style(entry.look))
        if max(curve.seeds) > 1:
            low, high = _inside(y, curve.low), _inside(y, curve.high)
            place.fill_between(along, low, high, color=entry.look.colour, alpha=0.16, linewidth=0)


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


def _draw_legend(figure: Figure, drawing: Drawing) -> None:
    """The legend below the panels, in as many columns as there is room for."""
    lines = [Line2D([], [], **_line_style(entry.look)) for entry in drawing.legend]
    labels = [_literal(entry.label) for entry in drawing.legend]
    columns = max(1, int(9 * figure.get_figwidth() / (max(map(len, labels)) + 7)))
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(lines), columns))


def _literal(text: str) -> str:
    """A text that matplotlib draws as it is: a dollar begins a formula, an underscore in front hides a label."""
    return ("" if text[:1] != "_" else " ") + text.replace("$", r"\$")
