"""The interactive page of a report: one HTML file with its data, style and program inside.

The numbers come ready to draw; page.html holds the drawing, and asks for nothing from a network.
"""

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from woodbury.experiments.looks import Look
from woodbury.experiments.medians import Curve
from woodbury.experiments.storage import rounded


@dataclass(frozen=True)
class Entry:
    """One optimizer with its settings."""

    label: str
    look: Look
    curves: Mapping[str, Curve]  # train_loss, test_error and, if it has damping, damping and ratio
    figures: Mapping[str, float]  # where it ended: the columns of the table
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Section:
    """The comparison on one data set."""

    title: str
    facts: Sequence[tuple[str, str]]  # what holds for all entries: network, batches, machine
    entries: Sequence[Entry]
    differing: Sequence[str]  # names of the settings that are not the same wherever they occur
    log_time_above: float  # ratio of the slowest end to the fastest above which the time axis is logarithmic
    thresholds: tuple[float, float]  # of the ratio: damping grows below the first, shrinks above the second
    ratio_range: tuple[float, float]  # where its curves are cut off


def render(sections: Sequence[Section]) -> str:
    """The whole page."""
    title = "woodbury: " + ", ".join(section.title for section in sections)
    data = json.dumps(rounded([dataclasses.asdict(section) for section in sections]), allow_nan=False)
    template = resources.files("woodbury.experiments").joinpath("page.html").read_text(encoding="utf-8")
    # "<" appears in JSON inside strings only, where its escape means the same and cannot end the script element.
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", data.replace("<", "\\u003c"))
