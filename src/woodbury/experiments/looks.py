"""Colours and markers of the optimizers, the same in every figure and on the page."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How one curve is drawn; through the gaps of a dashed one a curve below it can be seen."""

    colour: str
    dark: str  # the same colour on a dark page
    marker: str  # circle, square, triangle, diamond, wedge, plus or cross
    dashed: bool = False  # with hollow markers


MARKERS = {  # as matplotlib names them
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "wedge": "v",
    "plus": "P",
    "cross": "X",
}

# Okabe and Ito's palette, made for every common form of colour blindness; markers help in print.
_OWN = {
    "smw-gn": Look("#0072B2", "#4C97E8", "circle"),
    "smw-ng": Look("#D55E00", "#F07C32", "square"),
    "smw-ng-bd": Look("#009E73", "#22BC92", "triangle"),
    # The step of SMW-GN by another method: over epochs the two curves coincide.
    "hf": Look("#333333", "#D0D0D0", "diamond", dashed=True),
    "kfac": Look("#CC79A7", "#DE93BE", "wedge"),
    "sgd": Look("#E69F00", "#F0B429", "plus"),
    "adam": Look("#56B4E9", "#7CCBF5", "cross"),
}


def looks_of(optimizers: Sequence[str]) -> list[Look]:
    """One look per name: the optimizer's own where the name first appears, else the next unused one, dashed.

    After all colours come the same with other markers.
    """
    markers = list(MARKERS)
    unused = [look for name, look in _OWN.items() if name not in optimizers]
    others = [
        dataclasses.replace(look, marker=markers[(markers.index(look.marker) + shift) % len(markers)])
        for shift in range(len(markers))
        for look in _OWN.values()
        if not look.dashed
    ]
    spare = itertools.cycle(dict.fromkeys(dataclasses.replace(look, dashed=True) for look in [*unused, *others]))
    looks: list[Look] = []
    for index, name in enumerate(optimizers):
        own = name in _OWN and name not in optimizers[:index]
        looks.append(_OWN[name] if own else next(spare))
    return looks
