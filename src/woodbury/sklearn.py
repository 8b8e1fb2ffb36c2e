"""`woodbury.sklearn.LMRegressor`: a small network fitted by Levenberg-Marquardt with Bayesian regularisation.

What MATLAB users know as `trainlm` and `trainbr`, as a scikit-learn estimator: exact damped Gauss-Newton steps on
all of the data in float64, and between them MacKay's iteration for the noise and for the weight decay of each
parameter tensor (`woodbury.posterior`): nothing has to be tuned on held-out data. It needs scikit-learn, and is
imported only when asked for: `import woodbury.sklearn`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from woodbury.optim import GaussNewton
from woodbury.policies.damping import LevenbergMarquardt
from woodbury.posterior import Posterior, TrainingData

# Precision and noise at the start of each restart, in units of standardised data: from nearly linear to flexible.
# From a stiff start noisy data are not memorised first; a flexible one finds functions without noise sooner.
STARTS = ((10.0, 1.0), (3.0, 1.0), (0.1, 0.1), (0.01, 0.01))
FIRST_STEPS, STEPS = 8, 3  # Levenberg-Marquardt steps before the first update of the prior, and between two
TRIAL_STEPS = 50  # after which the starts are compared, or once the evidence of each rises no more
LATE_UPDATES = 2  # of prior and noise, at the same parameters
WINDOW = 3  # rounds over which the evidence must rise by tol
DAMPING = LevenbergMarquardt(initial=1e-3, boost=3.0, drop=0.3, floor=1e-15, relative=True)
LEAST_RATIO = 1e-4  # to move at all
LEAST, MOST = 1e-4, 1e8  # bounds of precisions
LEAST_NOISE = 1e-8  # variance, where that of the targets is 1: below, rounding would decide about the prior


class LMRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """A regressor with error bars for small and medium data: n samples, p parameters, n p^2 operations per step.

    A network of tanh units is fitted to standardised inputs and targets by Levenberg-Marquardt steps, with weight
    decay and noise by the evidence. It starts a few times, from stiff to flexible; the start with the largest
    evidence after some steps goes on until the evidence rises no more. No data are held out. Several targets share
    the hidden units and, in units of their standard deviations, the noise.

    Args:
        hidden_layer_sizes: the numbers of tanh units in the hidden layers.
        restarts: how many starts are tried.
        max_iter: the most Levenberg-Marquardt steps of the start that is chosen.
        tol: it stops where the log evidence per sample has risen by less than this over nine steps.
        random_state: of the starts; a number, a RandomState or None. The same number gives the same fit.

    Attributes:
        model_: the network (torch.nn.Sequential), for standardised inputs and targets.
        posterior_: its `woodbury.Posterior`, in the same units.
        noise_std_: the standard deviation of the noise in the units of y, a number or one for each output.
        log_evidence_: of the standardised data; larger is better, for hidden layers of different sizes as well.
        n_iter_: steps of the start that was chosen.
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (20,),
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LMRegressor:
        """Fit to X (n, features) and y (n,) or (n, outputs).

        A sample of weight w counts as w samples; one of weight 0 is left out.
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._is_flat = y.ndim == 1
        targets = y.reshape(len(y), -1)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            used = weights > 0
            if not used.any():
                raise ValueError("LMRegressor: sample_weight is zero for every sample")
            X, targets, weights = X[used], targets[used], weights[used]
        self._x_mean, self._x_scale = _location_and_scale(X, weights)
        self._y_mean, self._y_scale = _location_and_scale(targets, weights)
        data = _Data(
            torch.from_numpy((X - self._x_mean) / self._x_scale),
            torch.from_numpy((targets - self._y_mean) / self._y_scale),
            None if weights is None else torch.from_numpy(weights),
        )
        random = check_random_state(self.random_state)
        widths = (X.shape[1], *self.hidden_layer_sizes, targets.shape[1])
        fits = []
        for index in range(self.restarts):
            seed, (precision, noise) = int(random.randint(2**31)), STARTS[index % len(STARTS)]
            fits.append(_Fit(_network(widths, seed), data, precision, noise))
        for fit in fits:
            fit.run(min(self.max_iter, TRIAL_STEPS), self.tol)
        best = max(fits, key=lambda fit: fit.log_evidence)
        best.run(self.max_iter, self.tol)
        self.model_, self.posterior_, self.n_iter_ = best.model, best.posterior(), best.steps
        self.log_evidence_ = self.posterior_.log_evidence
        assert self.posterior_.noise is not None
        noise_std = math.sqrt(self.posterior_.noise) * self._y_scale
        self.noise_std_ = float(noise_std[0]) if self._is_flat else noise_std
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean at X; with return_std also the standard deviation of a new observation, noise included.

        Both (n,) or (n, outputs), as y was. The standard deviation is that of the linearized Laplace posterior.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        inputs = torch.from_numpy((X - self._x_mean) / self._x_scale)
        with torch.no_grad():
            mean = self.model_(inputs).numpy() * self._y_scale + self._y_mean
        mean = mean[:, 0] if self._is_flat else mean
        if not return_std:
            return mean
        variance = self.posterior_.variance((inputs, inputs.new_ones(len(inputs), 1)))
        std = (variance + (self.posterior_.noise or 0.0)).sqrt().numpy() * self._y_scale
        return mean, std[:, 0] if self._is_flat else std

    def _check_parameters(self) -> None:
        sizes = self.hidden_layer_sizes
        is_sequence = isinstance(sizes, Sequence | np.ndarray) and not isinstance(sizes, str)
        if not is_sequence or not all(_is_whole(size) for size in sizes):
            raise ValueError(f"LMRegressor: hidden_layer_sizes must be whole numbers from 1 on, got {sizes!r}")
        for name in ("restarts", "max_iter"):
            if not _is_whole(getattr(self, name)):
                raise ValueError(
                    f"LMRegressor: {name} must be a whole number from 1 on, got {getattr(self, name)!r}"
                )
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float) or not 0 <= self.tol < math.inf:
            raise ValueError(f"LMRegressor: tol must be a number from 0 on, got {self.tol!r}")


class _Data:
    """Standardised data: as a plain batch, or with the square root of a weight for each sample."""

    def __init__(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> None:
        self.is_weighted = weights is not None
        root = inputs.new_ones(len(inputs), 1) if weights is None else weights.sqrt().unsqueeze(1)
        self.number_count = float(root.square().sum()) * targets.shape[1]
        self.weighted = (inputs, root), root * targets  # of which the squared error is sum_i w_i |y_i - t_i|^2
        if weights is None:
            self.batch: Any = inputs, targets
        else:
            share = root / math.sqrt(self.number_count)
            self.batch = (inputs, share), share * targets

    def optimizer(self, model: nn.Module) -> GaussNewton:
        """Steps on the mean of the squared errors, with a weight decay for each parameter tensor."""
        return GaussNewton(
            model,
            nn.MSELoss(reduction="sum" if self.is_weighted else "mean"),
            params=[{"params": [own]} for own in model.parameters()],
            damping=DAMPING,
            accept=LEAST_RATIO,
            forward=_weighted_outputs if self.is_weighted else None,
        )


def _weighted_outputs(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    outputs: Tensor = model(inputs[0]) * inputs[1]
    return outputs


class _Fit:
    """One start: Levenberg-Marquardt steps, and updates of prior and noise between them."""

    def __init__(self, model: nn.Sequential, data: _Data, precision: float, noise: float) -> None:
        self.model, self._data = model, data
        self._precisions = {name: precision for name, _ in model.named_parameters()}
        self._noise = noise
        self._optimizer = data.optimizer(model)
        self.steps = 0
        self._evidence: list[float] = []

    @property
    def log_evidence(self) -> float:
        return self._evidence[-1]

    def run(self, max_steps: int, tol: float) -> None:
        """Steps up to this number in all, or until the evidence rises no more."""
        while self.steps < max_steps and not self._has_settled(tol):
            count = min(max_steps - self.steps, STEPS if self.steps else FIRST_STEPS)
            for group, precision in zip(self._optimizer.param_groups, self._precisions.values(), strict=True):
                group["weight_decay"] = 2 * precision * self._noise / self._data.number_count
            for _ in range(count):
                self._optimizer.step(*self._data.batch)
            self.steps += count
            self._update()

    def _has_settled(self, tol: float) -> bool:
        if len(self._evidence) <= WINDOW:
            return False
        return self._evidence[-1] - self._evidence[-1 - WINDOW] < tol * self._data.number_count

    def _update(self) -> None:
        rows = self._rows()
        for _ in range(LATE_UPDATES):
            update = rows.update(self._precisions, self._noise)
            self._precisions = {name: min(max(own, LEAST), MOST) for name, own in update.precisions.items()}
            assert update.noise is not None
            self._noise = max(update.noise, LEAST_NOISE)
        self._evidence.append(update.log_evidence)

    def _rows(self) -> TrainingData:
        options = (_weighted_outputs, None, None)
        data = TrainingData(self.model, nn.MSELoss(reduction="sum"), *options, *self._data.weighted, check=False)
        data.number_count = self._data.number_count
        return data

    def posterior(self) -> Posterior:
        rows = self._rows()
        return Posterior(rows, rows.system(self._precisions, self._noise), self._precisions, self._noise)


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
    """The mean and the standard deviation of each column; 1 for a column that is constant to rounding."""
    mean = np.average(values, axis=0, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    rounding = 10 * np.finfo(np.float64).eps * np.abs(values).max(axis=0)
    return mean, np.where(deviation > rounding, deviation, 1.0)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1
