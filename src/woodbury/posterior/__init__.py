"""`woodbury.posterior`: error bars, evidence and influence of a trained model."""

from woodbury.posterior.data import TrainingData
from woodbury.posterior.laplace import Posterior, posterior

__all__ = ["Posterior", "TrainingData", "posterior"]
