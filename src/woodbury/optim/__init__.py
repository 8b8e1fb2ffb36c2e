"""The optimizers and the table of their command-line names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from woodbury._batch import BadSamplesError
from woodbury.optim.base import SecondOrder
from woodbury.optim.first_order import FirstOrder, adam, sgd
from woodbury.optim.hessian_free import HessianFree
from woodbury.optim.kfac import KFAC
from woodbury.optim.passes import NonFiniteLossError
from woodbury.optim.smw import GaussNewton, NaturalGradient
from woodbury.optim.step import StepInfo

_block_diagonal = partial(NaturalGradient, blocks="layer")
_block_diagonal.__doc__ = "SMW-NG-BD: SMW-NG with a block-diagonal F, one block and one small system a layer."

# name -> (model, loss, **settings) -> optimizer
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "smw-gn": GaussNewton,
    "smw-ng": NaturalGradient,
    "smw-ng-bd": _block_diagonal,
    "hf": HessianFree,
    "kfac": KFAC,
    "sgd": sgd,
    "adam": adam,
}

__all__ = [
    "KFAC",
    "OPTIMIZERS",
    "BadSamplesError",
    "FirstOrder",
    "GaussNewton",
    "HessianFree",
    "NaturalGradient",
    "NonFiniteLossError",
    "SecondOrder",
    "StepInfo",
]
