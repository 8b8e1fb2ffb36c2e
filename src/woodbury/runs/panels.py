"""What a report draws of one data set: its panels with their curves, limits and ticks. report.py draws them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import LogLocator, MaxNLocator

from woodbury.policies.damping import LevenbergMarquardt
from woodbury.runs.medians import Curve, Group, curves_of

_LOW_RATIO = LevenbergMarquardt.threshold
THRESHOLDS = (_LOW_RATIO, 1 - _LOW_RATIO)  # of the ratio: damping changes there
LOG_TIME_ABOVE = 8.0  # time of the slowest run over that of the fastest: a linear axis would hide the fast one

_NEGLIGIBLE = 1e-30  # relative to the largest value: what is smaller is drawn as zero on a logarithmic axis
_TICKS = 7  # of an axis, at most
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """From values to places."""

    title: str
    scale: str  # linear or log
    low: float
    high: float
    ticks: list[tuple[float, str]]  # in ascending order
    least: float = -math.inf  # what lies below is drawn here: a logarithmic axis has no zero
    guides: tuple[float, ...] = ()  # values with a line across the panel


# A ratio beyond it only says "far too low" or "far too high".
_RATIO_TICKS = [(tick, f"{tick:g}") for tick in (-0.5, 0, *THRESHOLDS, 1, 1.5)]
RATIO_AXIS = Axis("", "linear", -0.5, 1.5, _RATIO_TICKS, guides=THRESHOLDS)


@dataclass(frozen=True)
class Panel:
    """One quantity of all the groups."""

    quantity: str
    title: str
    curves: list[Curve | None]  # in the order of the groups
    x: dict[str, Axis]  # epochs, and seconds where the curves have them
    y: Axis


def panels_of(groups: Sequence[Group]) -> list[Panel]:
    """The panels that have curves: train loss, test error (test loss where there is no error), damping, ratio."""
    curves = curves_of(groups)
    titles = {"train_loss": "Train loss", "test_error": "Test error, %", "test_loss": "Test loss"}
    titles |= {"damping": "Damping", "ratio": "Reduction ratio ρ, running median"}
    return [_panel(name, title, curves[name]) for name, title in titles.items() if any(curves[name])]


def _panel(quantity: str, title: str, curves: list[Curve | None]) -> Panel:
    present = [curve for curve in curves if curve is not None]
    x = {"epochs": _linear_axis("epochs", [curve.epochs[-1] for curve in present])}
    if present[0].seconds:
        x["seconds"] = _time_axis(present)
    y = RATIO_AXIS if quantity == "ratio" else _vertical_axis(present, whole=quantity == "damping")
    return Panel(quantity, title, curves, x, y)


def title_of(groups: Sequence[Group]) -> str:
    """Data set, network and batches where they are known, number of seeds."""
    title = groups[0].runs[0].config.dataset
    known = (run.config for group in groups for run in group.runs if not run.config.recorded)
    if (config := next(known, None)) is not None:
        title += f": network {config.network}, batches of {config.batch_size}"
    if (seeds := max(group.seeds for group in groups)) > 1:
        title += f"; median over {seeds} seeds, bands from smallest to largest"
    return title


# -- axes


def _linear_axis(title: str, ends: Sequence[float]) -> Axis:
    end = max(ends, default=0) or 1.0
    ticks = _even_ticks(0, end, whole=title == "epochs" and end >= 2)
    return Axis(title, "linear", -0.02 * end, 1.02 * end, ticks)


def _time_axis(curves: Sequence[Curve]) -> Axis:
    """Seconds of training, logarithmic where the ends lie far apart."""
    ends = [curve.seconds[-1] for curve in curves if curve.seconds[-1] > 0]
    if not ends or max(ends) <= LOG_TIME_ABOVE * min(ends):
        return _linear_axis("seconds of training", ends)
    seconds = [second for curve in curves for second in curve.seconds]
    return _log_axis("seconds of training, logarithmic", max(ends), seconds)


def _vertical_axis(curves: Sequence[Curve], whole: bool) -> Axis:
    """A logarithmic axis, or a linear one if there are values below zero or nothing else than zeros.

    Unless the `whole` of the curves is wanted, it ends where `_highest` says.
    """
    values = [value for curve in curves for value in [*curve.middle, *curve.low, *curve.high]]
    finite = [value for value in values if math.isfinite(value)]
    largest, smallest = max(finite, default=0), min(finite, default=0)
    if smallest < 0:
        room = 0.05 * (largest - smallest) or 1
        low, high = smallest - room, largest + room
        return Axis("", "linear", low, high, _even_ticks(low, high))
    top = largest if whole else _highest(curves, largest)
    if top == 0:
        return Axis("", "linear", 0, 1, _even_ticks(0, 1))
    return _log_axis("", top, [value for value in finite if value <= top])


def _log_axis(title: str, top: float, values: Sequence[float]) -> Axis:
    """Logarithmic; a zero among the values is drawn, and labelled, near the lower edge."""
    bottom = min(value for value in values if value > _NEGLIGIBLE * top)
    room = max((top / bottom) ** 0.05, 1.05)
    if min(values) == bottom:
        low, high = bottom / room, top * room
        return Axis(title, "log", low, high, _log_ticks(low, high), least=low)
    gap = max((top / bottom) ** 0.12, 1.5)
    zero = bottom / gap
    ticks = [(zero, "0"), *_log_ticks(bottom, top * room)]
    return Axis(title, "log", bottom / gap**1.3, top * room, ticks, least=zero)


def _highest(curves: Sequence[Curve], largest: float) -> float:
    """The largest value that a panel should show, so that what matters in the curves is not squeezed.

    Left out are a run on its way to infinity, and the common start where it lies far above all that follows.
    """
    starts = [curve.middle[0] for curve in curves if 0 < curve.middle[0] < math.inf]
    later = [value for curve in curves for value in curve.middle[1:] if 0 < value < math.inf]
    if not starts or not later or max(len(curve.middle) for curve in curves) < 4:
        return largest
    start, end = max(starts), max(later)
    is_far_above = math.log(start / end) > 0.4 * math.log(start / min(later))
    return end if is_far_above else min(largest, 10 * start)


# -- ticks


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """A few round numbers between two bounds, about evenly spaced on a logarithmic axis."""
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = _labelled(LogLocator(subs=digits, numticks=_TICKS).tick_values(low, high), low, high)
        if 3 <= len(ticks) <= _TICKS:
            return ticks
    return _even_ticks(low, high)


def _even_ticks(low: float, high: float, whole: bool = False) -> list[tuple[float, str]]:
    """A few round numbers between two bounds, evenly spaced."""
    return _labelled(MaxNLocator(_TICKS, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high), low, high)


def _labelled(ticks: Sequence[float], low: float, high: float) -> list[tuple[float, str]]:
    """The ticks between two bounds, each with its number: by a power of ten where digits would be many."""
    labelled = []
    for tick in ticks:
        digits, _, power = f"{tick:g}".partition("e")
        if power:
            digits = ("" if digits == "1" else f"{digits}·") + "10" + str(int(power)).translate(_SUPERSCRIPTS)
        if low <= tick <= high:
            labelled.append((float(tick), digits))
    return labelled
