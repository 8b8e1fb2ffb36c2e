"""The table of optimizers by their names on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from woodbury.optim import GaussNewton, NaturalGradient, SecondOrder
from woodbury.rivals import KFAC, SGD, Adam, HessianFree

_block_diagonal = partial(NaturalGradient, blocks="layer")
_block_diagonal.__doc__ = "SMW-NG-BD: SMW-NG with a block-diagonal F, one block and one small system a layer."

# name -> (model, loss, **settings) -> optimizer
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "smw-gn": GaussNewton,
    "smw-ng": NaturalGradient,
    "smw-ng-bd": _block_diagonal,
    "hf": HessianFree,
    "kfac": KFAC,
    "sgd": SGD,
    "adam": Adam,
}


def default_arguments(name: str) -> dict[str, Any]:
    """The optional arguments of an optimizer with their defaults.

    A constructor hands those that all second-order optimizers have on to `SecondOrder`; both are read.
    """
    make: Any = OPTIMIZERS[name]
    constructors = [make] if make in (SGD, Adam) else [SecondOrder, make]
    parameters = [own for each in constructors for own in inspect.signature(each).parameters.values()]
    return {own.name: own.default for own in parameters if own.default is not inspect.Parameter.empty}
