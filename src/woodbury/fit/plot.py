"""The course of a fit as a figure of matplotlib, and as a page of a notebook."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import Any

# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
TITLES = {"length": "length of the step", "rate": "rate", "samples": "samples per step"}


def draw(history: Sequence[dict[str, Any]], best_step: int, title: str) -> Any:
    """Losses above, with the best step; below what of length, rate and samples changes."""
    from matplotlib.figure import Figure

    def column(name: str) -> list[float]:
        return [float(entry.get(name, math.nan)) for entry in history]

    others = [name for name in TITLES if len({own for own in column(name) if math.isfinite(own)}) > 1]
    heights = [3.2, *[1.2] * len(others)]
    figure = Figure(figsize=(7.5, 0.7 + sum(heights)), layout="constrained")
    places = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    curves = {"loss": (BLUE, "-", "o"), "validation": (ORANGE, "--", "s")}
    curves = {name: look for name, look in curves.items() if any(name in entry for entry in history)}
    marks = max(1, len(history) // 12)
    for name, (colour, line, marker) in curves.items():
        places[0].plot(
            column("step"), column(name), line, color=colour, marker=marker, markevery=marks, ms=4, label=name
        )
    values = [own for name in curves for own in column(name) if math.isfinite(own)]
    if values and min(values) > 0:
        places[0].set_yscale("log")
    places[0].set_title(title, loc="left", fontsize=9, wrap=True)
    for place, name in zip(places[1:], others, strict=True):
        place.step(column("step"), column(name), where="mid", color=GREEN)
        place.set_title(TITLES[name], loc="left", fontsize=9)
        if min(column(name)) > 0:
            place.set_yscale("log")
    for place in places:
        place.axvline(best_step, color=GREY, linestyle=":", label="best step" if place is places[0] else None)
        place.grid(color="#E4E4E4", linewidth=0.7)
        place.spines[["top", "right"]].set_visible(False)
    places[0].legend(frameon=False)
    places[-1].set_xlabel("step")
    return figure


def page(text: str, figure: Any) -> str:
    """A line of text and the figure, if there is one, as HTML."""
    shown = f"<p>{html.escape(text)}</p>"
    if figure is not None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        shown += f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    return shown
