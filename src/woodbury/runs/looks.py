"""Colours and markers of the optimizers, the same in every figure and on the page."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Look:
    """How one curve is drawn; through the gaps of a dashed one a curve below it can be seen."""

    colour: str
    dark: str  # the same colour on a dark page
    marker: str  # as matplotlib names it
    dashed: bool = False  # with hollow markers


# Okabe and Ito's palette, made for every common form of colour blindness; markers help in print.
_OWN = {
    "smw-gn": Look("#0072B2", "#4C97E8", "o"),
    "smw-ng": Look("#D55E00", "#F07C32", "s"),
    "smw-ng-bd": Look("#009E73", "#22BC92", "^"),
    # The step of SMW-GN by another method: over epochs the two curves coincide.
    "hf": Look("#333333", "#D0D0D0", "D", dashed=True),
    "kfac": Look("#CC79A7", "#DE93BE", "v"),
    "sgd": Look("#E69F00", "#F0B429", "P"),
    "adam": Look("#56B4E9", "#7CCBF5", "X"),
}


def looks_of(optimizers: Sequence[str]) -> list[Look]:
    """One look per name: the optimizer's own where the name first appears, else the next unused one, dashed."""
    unused = [look for name, look in _OWN.items() if name not in optimizers]
    others = [replace(look, marker=marker) for marker in "Xv^PosD" for look in _OWN.values() if not look.dashed]
    spare = itertools.cycle(dict.fromkeys(replace(look, dashed=True) for look in (*unused, *others)))
    looks: list[Look] = []
    for index, name in enumerate(optimizers):
        is_first = name in _OWN and name not in optimizers[:index]
        looks.append(_OWN[name] if is_first else next(spare))
    return looks
