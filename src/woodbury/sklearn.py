"""`woodbury.LMRegressor` and `woodbury.LMClassifier`: small networks with error bars.

What MATLAB users know as `trainlm` and `trainbr`, as scikit-learn estimators: exact damped Gauss-Newton steps on
all of the data in float64, and between them MacKay's iteration for the weight decay of each parameter tensor and,
with numbers to predict, for the noise (`woodbury.posterior`): nothing has to be tuned on held-out data. They need
scikit-learn, and are imported only when asked for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from woodbury._choice import check_number, check_whole_number
from woodbury.fit.evidence import EvidenceRun, Start
from woodbury.fit.limits import Limits

# Precision and noise at the start of each restart, in units of standardised data: from nearly linear to flexible.
# From a stiff start noisy data are not memorised first; a flexible one finds functions without noise sooner.
PRIORS = ((10.0, 1.0), (3.0, 1.0), (0.1, 0.1), (0.01, 0.01))


class LMEstimator(BaseEstimator):
    """What regressor and classifier share: their parameters, standardised inputs, and the fit by evidence."""

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (20,),
        *,
        restarts: int = 4,
        max_iter: int = 150,
        tol: float = 1e-3,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.restarts = restarts
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def _counted(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """The samples that count, two at least, and their weights: None if all count the same."""
        if sample_weight is None:
            return X, y, None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        used = weights > 0
        if (count := np.count_nonzero(used)) < 2:
            raise ValueError(f"{type(self).__name__}: sample_weight is zero for all but {count} samples; give 2")
        return X[used], y[used], weights[used]

    def _inputs(self, X: Any) -> Tensor:
        """Standardised, for a fitted network."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return torch.from_numpy((X - self._x_mean) / self._x_scale)

    def _standardise(self, X: np.ndarray, weights: np.ndarray | None) -> Tensor:
        self._x_mean, self._x_scale = _location_and_scale(X, weights)
        return torch.from_numpy((X - self._x_mean) / self._x_scale)

    def _fit_network(self, outputs: int, loss: nn.Module, data: Any, **settings: Any) -> None:
        random = check_random_state(self.random_state)
        widths = (len(self._x_mean), *np.atleast_1d(self.hidden_layer_sizes).tolist(), outputs)
        networks = [_network(widths, int(random.randint(2**31))) for _ in range(self.restarts)]
        starts = [Start(*PRIORS[index % len(PRIORS)], own.state_dict()) for index, own in enumerate(networks)]
        settings |= {"starts": starts, "most_steps": self.max_iter, "tolerance": self.tol}
        self.model_ = _network(widths, 0)
        run = EvidenceRun(self.model_, loss, data, limits=Limits(), **settings)
        if run.go(None).reason != "evidence":
            text = f"{type(self).__name__}: the evidence still rises after {run.steps} steps; raise max_iter"
            warnings.warn(text, ConvergenceWarning, stacklevel=4)  # where fit was called
        self.posterior_, self.n_iter_ = run.posterior(), run.steps
        self.log_evidence_ = self.posterior_.log_evidence

    def _check_parameters(self) -> None:
        name = type(self).__name__
        for size in np.atleast_1d(self.hidden_layer_sizes).tolist():
            check_whole_number(f"{name}: hidden_layer_sizes", size, least=1)
        check_whole_number(f"{name}: restarts", self.restarts, least=1)
        check_whole_number(f"{name}: max_iter", self.max_iter, least=1)
        check_number(f"{name}: tol", self.tol)


class LMRegressor(MultiOutputMixin, RegressorMixin, LMEstimator):
    """A regressor with error bars for small and medium data: n samples, p parameters, n p^2 operations per step.

    A network of tanh units is fitted to standardised inputs and targets by Levenberg-Marquardt steps, with weight
    decay and noise by the evidence. It starts a few times, from stiff to flexible; the start with the largest
    evidence after some steps goes on until the evidence rises no more. No data are held out. Several targets share
    the hidden units and, in units of their standard deviations, the noise.

    Args:
        hidden_layer_sizes: the numbers of tanh units in the hidden layers; one number for one layer.
        restarts: how many starts are tried, and one more where a constant beats them.
        max_iter: the most Levenberg-Marquardt steps of the start that is chosen; a ConvergenceWarning says that
            they were not enough.
        tol: it stops where the log evidence per sample has risen by less than this over nine steps.
        random_state: of the starts; a number, a RandomState or None. The same number gives the same fit.

    Attributes:
        model_: the network (torch.nn.Sequential), for standardised inputs and targets.
        posterior_: its `woodbury.Posterior`, in the same units.
        noise_std_: the standard deviation of the noise in the units of y, a number or one for each output.
        log_evidence_: of the standardised data; larger is better, for hidden layers of different sizes as well.
        n_iter_: steps of the start that was chosen.
    """

    @torch.random.fork_rng(devices=[])  # layers and optimizers draw from torch's generator when they are made
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LMRegressor:
        """Fit to X (n, features) and y (n,) or (n, outputs), n at least 2.

        A sample of weight w counts as w samples; one of weight 0 is left out.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        y = np.asarray(y, dtype=np.float64)
        self._is_flat = y.ndim == 1
        X, y, weights = self._counted(X, y.reshape(len(y), -1), sample_weight)
        inputs = self._standardise(X, weights)
        self._y_mean, self._y_scale = _location_and_scale(y, weights)
        targets = torch.from_numpy((y - self._y_mean) / self._y_scale)
        self._is_weighted = weights is not None
        if weights is None:
            self._fit_network(targets.shape[1], nn.MSELoss(), (inputs, targets))
        else:  # of which the squared error is sum_i w_i |y_i - t_i|^2
            root = torch.from_numpy(weights).sqrt().unsqueeze(1)
            settings = {"forward": _weighted_outputs, "number_count": weights.sum() * targets.shape[1]}
            data = (inputs, root), root * targets
            self._fit_network(targets.shape[1], nn.MSELoss(reduction="sum"), data, **settings)
        assert self.posterior_.noise is not None
        noise_std = math.sqrt(self.posterior_.noise) * self._y_scale
        self.noise_std_ = float(noise_std[0]) if self._is_flat else noise_std
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean at X; with return_std also the standard deviation of a new observation, noise included.

        Both (n,) or (n, outputs), as y was. The standard deviation is that of the linearized Laplace posterior.
        """
        inputs = self._inputs(X)
        with torch.no_grad():
            mean = self.model_(inputs).numpy() * self._y_scale + self._y_mean
        mean = mean[:, 0] if self._is_flat else mean
        if not return_std:
            return mean
        ones = inputs.new_ones(len(inputs), 1)
        variance = self.posterior_.variance((inputs, ones) if self._is_weighted else inputs)
        std = (variance + (self.posterior_.noise or 0.0)).sqrt().numpy() * self._y_scale
        return mean, std[:, 0] if self._is_flat else std


class LMClassifier(ClassifierMixin, LMEstimator):
    """A classifier with calibrated probabilities for small data: the same network and evidence, with a softmax.

    With C classes a step costs n (C - 1) p^2 operations. Probabilities are means over the Laplace posterior
    (`Posterior.probabilities`): far from the data they are less sure than those of the network alone.

    Args:
        hidden_layer_sizes, restarts, max_iter, tol, random_state: those of `LMRegressor`.

    Attributes:
        classes_: the labels, sorted; the columns of `predict_proba`.
        model_: the network (torch.nn.Sequential) from standardised inputs to logits.
        posterior_: its `woodbury.Posterior`.
        log_evidence_, n_iter_: those of `LMRegressor`.
    """

    @torch.random.fork_rng(devices=[])
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LMClassifier:
        """Fit to X (n, features) and labels y (n,), of two classes at least.

        A sample of weight w counts as w samples; one of weight 0 is left out.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        if None in y.tolist():
            raise ValueError("LMClassifier: labels hold None: leave out the samples without a label")
        check_classification_targets(y)
        X, y, weights = self._counted(X, y, sample_weight)
        weights = np.ones(len(X)) if weights is None else weights
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            (only,) = self.classes_.tolist()
            raise ValueError(f"LMClassifier needs two classes at least, and all labels are {only!r}")
        # the cross entropy of targets that sum to w is w times that of one label
        targets = torch.from_numpy(np.eye(len(self.classes_))[labels] * weights[:, None])
        data = self._standardise(X, weights), targets
        loss = nn.CrossEntropyLoss(reduction="sum")
        self._fit_network(len(self.classes_), loss, data, number_count=float(weights.sum()))
        return self

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class at X, (n, classes): the mean of the softmax over the posterior."""
        inputs = self._inputs(X)
        return self.posterior_.probabilities(inputs).numpy()

    def predict_log_proba(self, X: Any) -> Any:
        """The logarithm of `predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Any:
        """The most probable labels at X, (n,)."""
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]


def _weighted_outputs(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return model(inputs[0]) * inputs[1]


def _network(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Layers of tanh units, with weights of variance 1 / inputs and a last layer near zero."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    kind: Any = {"dtype": torch.float64, "device": "cpu"}
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layer, last = nn.Linear(fan_in, fan_out, **kind), len(layers) == 2 * (len(widths) - 2)
        with torch.no_grad():
            scale = (0.1 if last else 1.0) / math.sqrt(fan_in)
            layer.weight.copy_(scale * torch.randn(fan_out, fan_in, generator=generator, **kind))
            layer.bias.copy_((0.0 if last else 0.3) * torch.randn(fan_out, generator=generator, **kind))
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _location_and_scale(values: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation of each column; a number of its size if it is constant to rounding."""
    size = np.exp2(np.frexp(np.abs(values).max(axis=0))[1] - 1.0)
    values = values / size  # squares of these do not overflow
    mean = np.average(values, axis=0, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    return mean * size, np.where(deviation > 10 * np.finfo(np.float64).eps, deviation, 1.0) * size
