"""The figure of one data set, drawn by matplotlib; page.html draws the same by the same rules."""

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from woodbury.damping import LevenbergMarquardt
from woodbury.experiments.looks import MARKERS, Look
from woodbury.experiments.medians import RATIO_RANGE, Curve, Group, curves_of, groups_of
from woodbury.experiments.models import network_name
from woodbury.experiments.runs import Run

LOG_TIME_ABOVE = 8.0  # time of the slowest run over that of the fastest: a linear axis would hide the fast one
THRESHOLDS = (LevenbergMarquardt.threshold, 1 - LevenbergMarquardt.threshold)  # of the ratio

_NEGLIGIBLE = 1e-30  # relative to the largest value: what is smaller is drawn as zero on a logarithmic axis

_STYLE: Any = {  # Any: matplotlib types the keys as a literal of every setting
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "svg.hashsalt": "woodbury",  # the same records give the same file
}


def draw(runs: Sequence[Run]) -> Figure:
    """The paper's panels for the runs of one data set, and panels for damping.

    Train loss and test error (test loss where there is no error) against epochs and seconds; damping and the ratio
    rho against epochs for the optimizers that have them. Lines are medians over seeds, bands run from the smallest
    to the largest value.
    """
    groups = groups_of(runs)
    curves = curves_of(groups)
    errors = [curve and curve.map(lambda value: 100 * value) for curve in curves["test_error"]]
    rows = {"Train loss": curves["train_loss"], "Test error, %": errors, "Test loss": curves["test_loss"]}
    rows = {title: own for title, own in rows.items() if any(own)}
    damped = any(curves["damping"]) or any(curves["ratio"])
    columns = 2 if not damped else 3 if len(rows) > 1 else 4
    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.04)
        figure = Figure(figsize=(1 + 4 * columns, 3.6 * len(rows)), layout=layout)
        panels = figure.subplots(len(rows), columns, squeeze=False)
        for own, (title, values) in zip(panels, rows.items(), strict=True):
            for panel, axis in zip(own, ("epochs", "seconds"), strict=False):
                _draw_panel(panel, title, groups, values, axis, _log_axis)
        if damped:
            damping, ratio, *empty = panels[:, 2:].flat
            _draw_panel(damping, "Damping", groups, curves["damping"], "epochs", partial(_log_axis, whole=True))
            title = "Reduction ratio ρ, running median"
            _draw_panel(ratio, title, groups, curves["ratio"], "epochs", _ratio_axis)
            for panel in empty:
                panel.remove()
        _draw_heading(figure, groups)
    return figure


def images(figure: Figure) -> dict[str, bytes]:
    """The figure as files, by ending."""
    files = {}
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name may have any letters; a box stands for them
        for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=ending, **options)
            files[ending] = buffer.getvalue()
            figure.set_layout_engine("none")  # both files have the same layout
    return files


def _draw_panel(
    panel: Axes,
    title: str,
    groups: Sequence[Group],
    curves: Sequence[Curve | None],
    axis: str,  # epochs or seconds
    # sets up the axis of the values; returns where it has zero and where it ends
    value_axis: Callable[[Axes, list[Curve]], tuple[float, float]],
) -> None:
    """Draw one quantity of all the groups."""
    present = [curve for curve in curves if curve is not None]
    panel.set_title(title)
    if axis == "seconds":
        _time_axis(panel, present)
    else:
        panel.set_xlabel("epochs")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    bottom, top = value_axis(panel, present)

    def inside(values: Sequence[float]) -> list[float]:
        """The values within reach of the panel: zero at its lower edge, infinity far above it."""
        return [min(max(value, bottom), 1e6 * max(top, 1)) for value in values]

    for index, (group, curve) in enumerate(zip(groups, curves, strict=True)):
        if curve is None:
            continue
        x = getattr(curve, axis)
        # Not at every point of a long curve, and not at the same points for two curves that may coincide.
        every = max(1, len(x) // 10)
        marks = (index * every // len(groups), every)
        panel.plot(x, inside(curve.middle), markevery=marks, **_line_style(group.look))
        if max(curve.seeds) > 1:
            low, high = inside(curve.low), inside(curve.high)
            panel.fill_between(x, low, high, color=group.look.colour, alpha=0.16, linewidth=0)
    panel.margins(x=0.02)


def _line_style(look: Look) -> dict[str, Any]:
    return {
        "color": look.colour,
        "linewidth": 1.4 if look.dashed else 1.7,
        "linestyle": (0, (3, 2.5)) if look.dashed else "-",
        "marker": MARKERS[look.marker],
        "markersize": 5.5 if look.dashed else 5,
        "markerfacecolor": "none" if look.dashed else look.colour,
        "markeredgecolor": look.colour if look.dashed else "white",
        "markeredgewidth": 1.1 if look.dashed else 0.5,
    }


def _log_axis(panel: Axes, curves: Sequence[Curve], whole: bool = False) -> tuple[float, float]:
    """A logarithmic axis for values from zero on; a zero is drawn, and labelled, at its lower edge.

    Unless the `whole` of the curves is wanted, the axis ends where `_highest` says. Where there are values below
    zero, the axis is linear.
    """
    values = [value for curve in curves for value in [*curve.middle, *curve.low, *curve.high]]
    if min(values, default=0) < 0:
        low, high = min(values), max(value for value in values if value < math.inf)
        room = 0.05 * (high - low) or 1
        panel.set_ylim(low - room, high + room)
        return low - room, high + room
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:  # nothing but zeros
        panel.set_ylim(-0.05, 1)
        return 0, 1
    top = max(positive) if whole else _highest(curves, max(positive))
    bottom = min(value for value in positive if value > _NEGLIGIBLE * top)
    room = max((top / bottom) ** 0.05, 1.05)
    low, high = bottom / room, top * room
    ticks = _log_ticks(low, high)
    labels = [_short(tick) for tick in ticks]
    zero = low
    if min(values) < bottom:
        gap = max((top / bottom) ** 0.12, 1.5)
        zero, low = bottom / gap, bottom / gap**1.3
        labels = ["0", *(label for tick, label in zip(ticks, labels, strict=True) if tick >= bottom)]
        ticks = [zero, *(tick for tick in ticks if tick >= bottom)]
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    panel.yaxis.set_ticks(ticks, labels=labels)
    panel.minorticks_off()
    return zero, high


def _highest(curves: Sequence[Curve], largest: float) -> float:
    """The largest value that a panel should show, so that what matters in the curves is not squeezed.

    Left out are a run on its way to infinity, and the common start where it lies far above all that follows.
    The page has the same rule.
    """
    starts = [curve.middle[0] for curve in curves if 0 < curve.middle[0] < math.inf]
    later = [value for curve in curves for value in curve.middle[1:] if 0 < value < math.inf]
    if not starts or max(len(curve.middle) for curve in curves) < 4:
        return largest
    top = min(largest, 10 * max(starts))
    if not later or max(later) >= max(starts):
        return top
    above, whole = math.log(max(starts) / max(later)), math.log(max(starts) / min(later))
    return max(later) if above > 0.4 * whole else top


def _ratio_axis(panel: Axes, curves: Sequence[Curve]) -> tuple[float, float]:
    """A linear axis around [0, 1], with the ratios at which damping changes."""
    low = min([0.0, *(value for curve in curves for value in curve.low)])
    high = max([1.0, *(value for curve in curves for value in curve.high)])
    lowest, highest = RATIO_RANGE
    labels = {tick: _short(tick) for tick in (0.0, *THRESHOLDS, 1.0)}
    labels |= {lowest: f"≤−{-lowest:g}", highest: f"≥{highest:g}"}  # the curves end there
    panel.yaxis.set_ticks(list(labels), labels=list(labels.values()))
    panel.set_ylim(low - 0.05, high + 0.05)  # after the ticks: those outside widen the axis
    for threshold in THRESHOLDS:
        panel.axhline(threshold, color="#666666", linewidth=1, linestyle=(0, (3, 2)), zorder=1)
    return low - 0.05, high + 0.05


def _log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most `most` round numbers between two bounds, about evenly spaced on a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    narrow = high < 5 * low
    for digits in ((tuple(range(1, 10)),) if narrow else ()) + ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    if len(ticks) < 3 and narrow:
        even = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        return [float(tick) for tick in even if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / most)]


def _time_axis(panel: Axes, curves: Sequence[Curve]) -> None:
    """Seconds of training; where the ends lie far apart as log(1 + t / first), which keeps the common start."""
    panel.set_xlabel("seconds of training")
    ends = [curve.seconds[-1] for curve in curves if curve.seconds[-1] > 0]
    if not ends or max(ends) <= LOG_TIME_ABOVE * min(ends):
        return
    first = min(second for curve in curves for second in curve.seconds if second > 0)
    panel.set_xscale(  # odd, which leaves room for a margin before the start
        "function",
        functions=(
            lambda t: np.sign(t) * np.log1p(np.abs(t) / first),
            lambda u: np.sign(u) * first * np.expm1(np.abs(u)),
        ),
    )
    panel.set_xlabel("seconds of training, logarithmic")
    labels = {0.0: "0"}
    for tick in _log_ticks(first, max(ends), most=9):
        (before, label), own = list(labels.items())[-1], _short(tick)
        gap = (math.log1p(tick / first) - math.log1p(before / first)) / math.log1p(max(ends) / first)
        if gap > 0.012 * (len(label) + len(own) + 2):  # a digit takes about 0.02 of the width
            labels[tick] = own
    panel.xaxis.set_ticks(list(labels), labels=list(labels.values()))


def _short(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def _literal(text: str) -> str:
    """A text that matplotlib draws as it is: a dollar begins a formula, an underscore in front hides a label."""
    return ("" if text[:1] != "_" else " ") + text.replace("$", r"\$")


def _draw_heading(figure: Figure, groups: Sequence[Group]) -> None:
    """The title above the panels and the legend below them."""
    seeds = max(group.seeds for group in groups)
    title = _literal(groups[0].runs[0].config.dataset)
    known = (run.config for group in groups for run in group.runs if not run.config.recorded)
    if (config := next(known, None)) is not None:
        title += f": network {network_name(config.widths)}, batches of {config.batch_size}"
    if seeds > 1:
        title += f"; median over {seeds} seeds, bands from smallest to largest"
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    lines = [Line2D([], [], **_line_style(group.look)) for group in groups]
    labels = [_literal(group.label) for group in groups]
    columns = max(1, int(9 * figure.get_figwidth() / (max(map(len, labels)) + 7)))
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(groups), columns), frameon=False)
