"""The optimizers and the table of their command-line names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from woodbury.optim.base import SecondOrder
from woodbury.optim.first_order import FirstOrder, adam, sgd
from woodbury.optim.hessian_free import HessianFree
from woodbury.optim.smw import GaussNewton, NaturalGradient
from woodbury.optim.step import StepInfo

# name -> (model, loss, **settings) -> optimizer
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "smw-gn": GaussNewton,
    "smw-ng": NaturalGradient,
    "smw-ng-bd": partial(NaturalGradient, blocks="layer"),
    "hf": HessianFree,
    "sgd": sgd,
    "adam": adam,
}

__all__ = [
    "OPTIMIZERS",
    "FirstOrder",
    "GaussNewton",
    "HessianFree",
    "NaturalGradient",
    "SecondOrder",
    "StepInfo",
]
