"""woodbury: exact damped Gauss-Newton and natural-gradient optimizers for PyTorch."""

from typing import TYPE_CHECKING

from woodbury._version import __version__
from woodbury.fit import Equations, Fit, fit
from woodbury.laplacian import Laplacian, derivatives, laplacian
from woodbury.layers import register_layer
from woodbury.least_squares import LeastSquaresResult, least_squares
from woodbury.losses import LossRule, register_loss
from woodbury.modules import Periodic, Scale, Sine
from woodbury.optim import GaussNewton, NaturalGradient, StepInfo
from woodbury.policies.damping import Constant, LevenbergMarquardt
from woodbury.policies.search import CurvedSearch
from woodbury.posterior import Posterior, posterior
from woodbury.rivals import KFAC, HessianFree
from woodbury.row_matrix import Rows, kernel, rows
from woodbury.runs.recorder import Recorder

if TYPE_CHECKING:
    from woodbury.sklearn import LMClassifier, LMRegressor  # noqa: F401

__all__ = [
    "KFAC",
    "Constant",
    "CurvedSearch",
    "Equations",
    "Fit",
    "GaussNewton",
    "HessianFree",
    "Laplacian",
    "LeastSquaresResult",
    "LevenbergMarquardt",
    "LossRule",
    "NaturalGradient",
    "Periodic",
    "Posterior",
    "Recorder",
    "Rows",
    "Scale",
    "Sine",
    "StepInfo",
    "__version__",
    "derivatives",
    "fit",
    "kernel",
    "laplacian",
    "least_squares",
    "posterior",
    "register_layer",
    "register_loss",
    "rows",
]


def __getattr__(name: str) -> object:
    """The estimators, for which scikit-learn is imported when one of them is asked for."""
    if name not in ("LMClassifier", "LMRegressor"):
        raise AttributeError(f"module 'woodbury' has no attribute {name!r}")
    from woodbury import sklearn

    return getattr(sklearn, name)
