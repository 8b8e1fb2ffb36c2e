"""Second-order optimizers for PyTorch: fits and differential equations to many digits, with nothing to tune.

Fit a model to data; float64 has the digits:

    x = torch.linspace(-1, 1, 400, dtype=torch.float64).unsqueeze(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()
    fit = woodbury.fit(model, torch.nn.MSELoss(), (x, torch.sin(4 * x)), tolerance=1e-10)

Solve a differential equation, here u'' = u with u(-1) = u(1) = 1:

    ends = torch.tensor([[-1.0], [1.0]]).double()
    equation = (x, lambda model, x: woodbury.laplacian(model, x).laplacian - model(x))
    terms = woodbury.Equations(inside=equation, ends=(ends, lambda model, x: model(x) - 1))
    fit = woodbury.fit(model, terms, tolerance=1e-8)

Train in a loop of your own:

    optimizer = woodbury.GaussNewton(model, torch.nn.MSELoss(), lr=0.3, momentum=0.9)
    for batch in torch.randperm(400).split(50):
        info = optimizer.step(x[batch], torch.sin(4 * x[batch]))  # no zero_grad, no backward

The names, each with its own help:

    fit, Equations, Fit                         one call for data, loaders, samplers and equations, and its result
    least_squares, LeastSquaresResult           curves with a few parameters, as in scipy
    GaussNewton, NaturalGradient, StepInfo      optimizers (HessianFree, KFAC: to compare with), a step's report
    LevenbergMarquardt, Constant, CurvedSearch  their damping, and a search
    laplacian, derivatives, Laplacian           derivatives of a network in its inputs
    Scale, Sine, Periodic                       layers: units, a sine, a period
    posterior, Posterior                        error bars of any trained model
    rows, kernel, Rows                          the curvature itself
    LMRegressor, LMClassifier                   for scikit-learn, where that is installed
    Recorder                                    runs of any loop, for `woodbury report`
    register_layer, register_loss, LossRule     rules of your own

Modules for other libraries: woodbury.deepxde, lightning, logs, pina, sklearn, skorch. Pages: docs/index.md.
"""

import importlib.util
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

__all__ = ["Equations", "Fit", "LeastSquaresResult", "__version__", "fit", "least_squares"]
__all__ += ["Constant", "CurvedSearch", "GaussNewton", "LevenbergMarquardt", "NaturalGradient", "StepInfo"]
__all__ += ["KFAC", "HessianFree", "Posterior", "Recorder", "Rows", "kernel", "posterior", "rows"]
__all__ += ["Laplacian", "LossRule", "Periodic", "Scale", "Sine", "derivatives", "laplacian"]
__all__ += ["register_layer", "register_loss"]

_ESTIMATORS = ["LMClassifier", "LMRegressor"]
_DOORS = ["deepxde", "lightning", "logs", "pina", "sklearn", "skorch"]


def __getattr__(name: str) -> object:
    """Estimators and modules for other libraries, which are imported when one of them is asked for."""
    if name in _DOORS:
        return importlib.import_module(f"woodbury.{name}")
    if name not in _ESTIMATORS:
        raise AttributeError(f"module 'woodbury' has no attribute {name!r}")
    return getattr(importlib.import_module("woodbury.sklearn"), name)


def __dir__() -> list[str]:
    """The public names, with the estimators where there is scikit-learn."""
    return sorted(__all__ + (_ESTIMATORS if importlib.util.find_spec("sklearn") else []))
