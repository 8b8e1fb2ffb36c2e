"""What a report draws of one data set, said once: figure.py draws it by matplotlib, page.html in a browser.

Every number, limit and label comes from here. A renderer turns values into places, with the scale of an axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from woodbury.damping import LevenbergMarquardt
from woodbury.experiments.looks import MARKERS, Look
from woodbury.experiments.medians import RATIO_RANGE, Curve, Group, curves_of
from woodbury.experiments.models import network_name

THRESHOLDS = (
    LevenbergMarquardt.threshold,
    1 - LevenbergMarquardt.threshold,
)  # of the ratio: damping changes there
LOG_TIME_ABOVE = 8.0  # time of the slowest run over that of the fastest: a linear axis would hide the fast one

_NEGLIGIBLE = 1e-30  # relative to the largest value: what is smaller is drawn as zero on a logarithmic axis
_TICKS = 7  # of an axis, at most
_HUGE = 1e300  # what is larger counts as infinite
_MARGIN = 0.02  # of a horizontal axis, before the first and behind the last point
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """From values to places."""

    title: str
    scale: str  # linear, log, or asinh of value / linear_width: logarithmic in the main, and yet it has a zero
    low: float
    high: float
    ticks: list[tuple[float, str]]  # in ascending order
    least: float = -math.inf  # what lies below is drawn here: a logarithmic axis has no zero
    linear_width: float = 1.0


@dataclass(frozen=True)
class Panel:
    """One quantity of all the groups."""

    quantity: str
    title: str
    unit: str  # behind a number
    curves: list[Curve | None]  # in the order of the legend
    x: dict[str, Axis]  # epochs, and seconds where the curves have them
    y: dict[str, Axis]  # linear, and log where the values allow it
    guides: tuple[float, ...] = ()  # values with a line across the panel
    range: tuple[float, float] | None = None  # where curves are cut off


@dataclass(frozen=True)
class Entry:
    """A line of the legend."""

    label: str
    look: Look
    outline: str  # of the marker, as an SVG path within -1 and 1


@dataclass(frozen=True)
class Drawing:
    """All panels of a data set."""

    title: str
    legend: list[Entry]
    panels: list[Panel]


def describe(groups: Sequence[Group]) -> Drawing:
    """The panels that have curves: train loss, test error (test loss where there is no error), damping, ratio."""
    curves = curves_of(groups)
    curves["test_error"] = [curve and curve.map(lambda value: 100 * value) for curve in curves["test_error"]]
    panels = [
        _panel("train_loss", "Train loss", curves),
        _panel("test_error", "Test error, %", curves, unit=" %"),
        _panel("test_loss", "Test loss", curves),
        _panel("damping", "Damping", curves, whole=True),
        _ratio_panel(curves["ratio"]),
    ]
    legend = [Entry(group.label, group.look, _outline(group.look.marker)) for group in groups]
    return Drawing(_title(groups), legend, [panel for panel in panels if any(panel.curves)])


def _panel(
    quantity: str, title: str, curves: dict[str, list[Curve | None]], unit: str = "", whole: bool = False
) -> Panel:
    own = curves[quantity]
    present = [curve for curve in own if curve is not None]
    return Panel(quantity, title, unit, own, _horizontal_axes(present), _vertical_axes(present, whole))


def _ratio_panel(curves: list[Curve | None]) -> Panel:
    """Linear around [0, 1], with the ratios at which damping changes."""
    present = [curve for curve in curves if curve is not None]
    low = min([0.0, *(value for curve in present for value in curve.low)]) - 0.05
    high = max([1.0, *(value for curve in present for value in curve.high)]) + 0.05
    lowest, highest = RATIO_RANGE
    labels = {
        lowest: f"≤−{-lowest:g}",
        **{tick: f"{tick:g}" for tick in (0, *THRESHOLDS, 1)},
        highest: f"≥{highest:g}",
    }
    ticks = [(tick, label) for tick, label in labels.items() if low <= tick <= high]
    y = {"linear": Axis("", "linear", low, high, ticks)}
    title = "Reduction ratio ρ, running median"
    return Panel("ratio", title, "", curves, _horizontal_axes(present), y, THRESHOLDS, RATIO_RANGE)


def _title(groups: Sequence[Group]) -> str:
    """Data set, network and batches where they are known, number of seeds."""
    title = groups[0].runs[0].config.dataset
    known = (run.config for group in groups for run in group.runs if not run.config.recorded)
    if (config := next(known, None)) is not None:
        title += f": network {network_name(config.widths)}, batches of {config.batch_size}"
    if (seeds := max(group.seeds for group in groups)) > 1:
        title += f"; median over {seeds} seeds, bands from smallest to largest"
    return title


def _outline(marker: str) -> str:
    """The outline of matplotlib's marker as an SVG path, where y points down."""
    style = MarkerStyle(MARKERS[marker])
    path = style.get_path().transformed(style.get_transform() + Affine2D().scale(100))  # fine steps along a curve
    (corners,) = np.array(path.to_polygons()) / 50
    return "M" + "L".join(f"{x:.2f} {-y:.2f}" for x, y in corners) + "z"


# -- horizontal axes


def _horizontal_axes(curves: Sequence[Curve]) -> dict[str, Axis]:
    axes = {"epochs": _linear_axis("epochs", [curve.epochs[-1] for curve in curves])}
    if any(curve.seconds for curve in curves):
        axes["seconds"] = _time_axis(curves)
    return axes


def _linear_axis(title: str, ends: Sequence[float]) -> Axis:
    end = max(ends, default=0) or 1.0
    ticks = _even_ticks(0, end, whole=title == "epochs" and end >= 2)
    return Axis(title, "linear", -_MARGIN * end, (1 + _MARGIN) * end, ticks)


def _time_axis(curves: Sequence[Curve]) -> Axis:
    """Seconds of training; where the ends lie far apart by asinh(t / first), which keeps the common start."""
    ends = [curve.seconds[-1] for curve in curves if curve.seconds[-1] > 0]
    if not ends or max(ends) <= LOG_TIME_ABOVE * min(ends):
        return _linear_axis("seconds of training", ends)
    first = min(second for curve in curves for second in curve.seconds if second > 1e-9 * max(ends))
    end = math.asinh(max(ends) / first)
    ticks = [(0.0, "0"), *_log_ticks(first, max(ends))]
    low, high = first * math.sinh(-_MARGIN * end), first * math.sinh((1 + _MARGIN) * end)
    return Axis("seconds of training, logarithmic", "asinh", low, high, ticks, linear_width=first)


# -- vertical axes


def _vertical_axes(curves: Sequence[Curve], whole: bool) -> dict[str, Axis]:
    """A linear axis and, unless there are values below zero or nothing else than zeros, a logarithmic one.

    Unless the `whole` of the curves is wanted, an axis ends where `_highest` says.
    """
    values = [value for curve in curves for value in [*curve.middle, *curve.low, *curve.high]]
    finite = [value for value in values if abs(value) < _HUGE]
    largest, smallest = max(finite, default=0), min(finite, default=0)
    if smallest < 0:
        room = 0.05 * (largest - smallest) or 1
        low, high = smallest - room, largest + room
        return {"linear": Axis("", "linear", low, high, _even_ticks(low, high))}
    if largest == 0:
        return {"linear": Axis("", "linear", 0, 1, _even_ticks(0, 1))}
    top = largest if whole else _highest(curves, largest)
    return {
        "log": _log_axis(top, [value for value in finite if value <= top]),
        "linear": Axis("", "linear", 0, 1.04 * top, _even_ticks(0, 1.04 * top)),
    }


def _log_axis(top: float, values: Sequence[float]) -> Axis:
    """Logarithmic; a zero among the values is drawn, and labelled, near the lower edge."""
    bottom = min(value for value in values if value > _NEGLIGIBLE * top)
    room = max((top / bottom) ** 0.05, 1.05)
    if min(values) == bottom:
        low, high = bottom / room, top * room
        return Axis("", "log", low, high, _log_ticks(low, high), least=low)
    gap = max((top / bottom) ** 0.12, 1.5)
    zero = bottom / gap
    ticks = [(zero, "0"), *_log_ticks(bottom, top * room)]
    return Axis("", "log", bottom / gap**1.3, top * room, ticks, least=zero)


def _highest(curves: Sequence[Curve], largest: float) -> float:
    """The largest value that a panel should show, so that what matters in the curves is not squeezed.

    Left out are a run on its way to infinity, and the common start where it lies far above all that follows.
    """
    starts = [curve.middle[0] for curve in curves if 0 < curve.middle[0] < _HUGE]
    later = [value for curve in curves for value in curve.middle[1:] if 0 < value < _HUGE]
    if not starts or max(len(curve.middle) for curve in curves) < 4:
        return largest
    start = max(starts)
    if not later or max(later) >= start:
        return min(largest, 10 * start)
    above, whole = math.log(start / max(later)), math.log(start / min(later))
    return max(later) if above > 0.4 * whole else min(largest, 10 * start)


# -- ticks


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """A few round numbers between two bounds, about evenly spaced on a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in (range(1, 10) if high < 5 * low else (), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if 0 < len(ticks) <= _TICKS:
            break
    if len(ticks) < 3:
        return _even_ticks(low, high)
    return [(tick, _tick_label(tick)) for tick in ticks[:: math.ceil(len(ticks) / _TICKS)]]


def _even_ticks(low: float, high: float, whole: bool = False) -> list[tuple[float, str]]:
    """A few round numbers between two bounds, evenly spaced."""
    ticks = MaxNLocator(_TICKS, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    return [(float(tick), _tick_label(float(tick))) for tick in ticks if low <= tick <= high]


def _tick_label(value: float) -> str:
    """The number, with a power of ten where digits would be many."""
    digits, _, power = f"{value:g}".partition("e")
    if not power:
        return digits
    return ("" if digits == "1" else f"{digits}·") + "10" + str(int(power)).translate(_SUPERSCRIPTS)
