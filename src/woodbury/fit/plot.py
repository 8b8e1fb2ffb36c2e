"""The course of a fit as a figure of matplotlib."""

from __future__ import annotations

import math
from typing import Any

from woodbury._style import STYLE

# of Okabe and Ito's colours, which the colour-blind can tell apart
LOSSES = {"loss": ("#0072B2", "-", "o"), "validation": ("#D55E00", "--", "s")}
OTHERS = {"length": "length of the step", "rate": "rate", "samples": "samples per step"}


def draw(fit: Any) -> Any:
    """Losses and the best step of a `Fit`; below them metrics, and length, rate and samples where they change."""
    import matplotlib

    style: Any = {**STYLE, "axes.titlesize": 9, "axes.titleweight": "normal"}
    with matplotlib.rc_context(style):
        return _draw(fit)


def _draw(fit: Any) -> Any:
    from matplotlib.figure import Figure

    names = ("step", *LOSSES, *fit.metrics, *OTHERS)
    columns = {name: [float(entry.get(name, math.nan)) for entry in fit.history] for name in names}
    below = [*fit.metrics, *(name for name in OTHERS if len(_known(columns[name])) > 1)]
    heights = [3.2, *[1.2] * len(below)]
    figure = Figure(figsize=(7.5, 0.7 + sum(heights)), layout="constrained")
    places = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for name, (colour, line, marker) in LOSSES.items():
        if _known(columns[name]):
            look = {"color": colour, "marker": marker, "markevery": max(1, len(fit.history) // 12)}
            places[0].plot(columns["step"], columns[name], line, markersize=4, label=name, **look)
    _set_scale(places[0], _known(columns["loss"]) | _known(columns["validation"]))
    places[0].set_title(str(fit), wrap=True)
    for place, name in zip(places[1:], below, strict=True):
        place.step(columns["step"], columns[name], where="mid", color="#009E73")
        place.set_title(OTHERS.get(name, name))
        if name == "length":
            _set_scale(place, _known(columns[name]))
    for place in places:
        place.axvline(fit.best_step, color="#666666", linestyle=":", label=f"best step, {fit.best_step}")
    places[0].legend()
    places[-1].set_xlabel("step")
    places[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _known(values: list[float]) -> set[float]:
    return {own for own in values if math.isfinite(own)}


def _set_scale(place: Any, values: set[float]) -> None:
    """A logarithmic axis where it can be, with 2, 3 and 5 between powers of ten where there are few of these."""
    if min(values, default=0.0) > 0:
        place.set_yscale("log")
        digits = "235" if max(values) < 30 * min(values) else ""
        place.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in digits else "")
        if digits:
            place.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
