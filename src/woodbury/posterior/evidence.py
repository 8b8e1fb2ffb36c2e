"""The prior and the noise that maximise the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

_LOG_RANGE = 690.0  # exp of it is a float64 still


def _root(function: Callable[[float], float], otherwise: str) -> float:
    """x > 0 where a falling function of it changes its sign; raises where it has one sign only."""
    low, high = -_LOG_RANGE, _LOG_RANGE
    if not function(math.exp(low)) > 0 > function(math.exp(high)):
        raise ValueError(otherwise)
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return math.exp(middle)
        if function(math.exp(middle)) > 0:
            low = middle
        else:
            high = middle


def _determined(eigenvalues: Tensor, shift: float) -> float:
    """gamma = sum mu / (mu + shift)."""
    return float((eigenvalues / (eigenvalues + shift)).sum())


def prior_by_evidence(eigenvalues: Tensor, square: float) -> float:
    """delta with delta |theta|^2 = gamma(delta), for the eigenvalues of the likelihood's U U^T."""
    return _root(lambda delta: _determined(eigenvalues, delta) - delta * square, _NO_PRIOR)


def noise_by_evidence(eigenvalues: Tensor, count: float, error: float) -> float:
    """s with s (n C - gamma(s)) = |y - t|^2, for the eigenvalues of U D U^T with noise 1/2."""
    mu = eigenvalues / 2  # of J D J^T
    return _root(lambda s: error - s * (count - _determined(mu, s)), _NO_NOISE)


def both_by_evidence(eigenvalues: Tensor, count: float, error: float, square: float) -> tuple[float, float]:
    """delta and s: with a = delta s the evidence is largest for s = (|y - t|^2 + a |theta|^2) / (n C), and for

    gamma(a) = n C a |theta|^2 / (|y - t|^2 + a |theta|^2), of which one side falls and the other one rises.
    """
    if not error > 0:
        raise ValueError(_NO_NOISE)
    mu = eigenvalues / 2  # of J J^T
    a = _root(lambda a: _determined(mu, a) - count * a * square / (error + a * square), _NO_PRIOR)
    noise = (error + a * square) / count
    return a / noise, noise


_NO_PRIOR = (
    "posterior: the evidence has no maximum over the prior: all parameters are zero, or the outputs do not depend "
    "on them; pass prior= as a number"
)
_NO_NOISE = (
    "posterior: the evidence has no maximum over the noise: the model fits the targets exactly; pass noise= as a "
    "variance"
)
