"""The optimizers of the paper, exact in sample space, and what every second-order optimizer shares."""

from woodbury._batch import BadSamplesError
from woodbury.optim.info import StepInfo
from woodbury.optim.optimizer import SecondOrder
from woodbury.optim.smw import GaussNewton, NaturalGradient
from woodbury.quadratic.passes import NonFiniteLossError

__all__ = ["BadSamplesError", "GaussNewton", "NaturalGradient", "NonFiniteLossError", "SecondOrder", "StepInfo"]
