"""The optimizers of the paper, exact in sample space, and what every second-order optimizer shares."""

from woodbury._batch import BadSamplesError
from woodbury.optim.base import SecondOrder
from woodbury.optim.passes import NonFiniteLossError
from woodbury.optim.smw import GaussNewton, NaturalGradient
from woodbury.optim.step import StepInfo

__all__ = [
    "BadSamplesError",
    "GaussNewton",
    "NaturalGradient",
    "NonFiniteLossError",
    "SecondOrder",
    "StepInfo",
]
