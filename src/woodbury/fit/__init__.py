"""`woodbury.fit`: data, a sampler or a loader in, a fitted model out, with nothing to tune."""

from woodbury.fit.door import fit
from woodbury.fit.equations import Equations
from woodbury.fit.result import Fit

__all__ = ["Equations", "Fit", "fit"]
