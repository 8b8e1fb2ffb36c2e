"""`woodbury.posterior`: error bars, evidence and influence of a trained model, from the Gram matrix of its rows.

The loss, summed over samples, is taken for the negative log likelihood of the data, and the parameters have a
Gaussian prior of mean 0 and precision Delta, a diagonal matrix with one number per parameter tensor. Around the
parameters theta of the model the linearized Laplace approximation of the posterior is

    N(theta, P^-1),   P = sum_i J_i^T H_i J_i + Delta = U^T U + Delta

with the rows U = S_i^T J_i of the training data: exact for this Gauss-Newton matrix, with no structure assumed. By
Woodbury's identity everything about it follows from the small matrix A = I + U D U^T, D = Delta^-1:

    covariance of outputs    J P^-1 J^T = J D J^T - (J D U^T) A^-1 (U D J^T)
    with training rows       J P^-1 U^T = J D U^T A^-1
    evidence                 log p(data) = -L(theta) - theta^T Delta theta / 2 - log det(A) / 2
    a draw of the parameters theta + z - D U^T A^-1 (U z + e),   z ~ N(0, D), e ~ N(0, I)

With fewer parameters than rows, P itself is factorised instead. In sample space a variance is a difference: its
error is about 1e-16 times the variance of the prior there.

For squared error the likelihood is that of Gaussian noise of variance s, the same for all outputs:
L = |y - t|^2 / (2 s) + n C log(2 pi s) / 2, H = I / s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch
from woodbury._choice import check_number, check_whole_number
from woodbury.layers.forms import windows
from woodbury.model.compiled import written_model
from woodbury.model.fallback import Forward
from woodbury.posterior.data import TrainingData
from woodbury.posterior.systems import System
from woodbury.row_matrix import Rows, unit_columns

EVIDENCE = "evidence"
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the covariance, for probabilities of classes
_NUMBERS_AT_ONCE = 2**24  # entries of a matrix between new samples and the training data
_MOST_LEVERAGE = 1 - 1e-6  # a sample that alone determines a direction would leave none of it
_LOG_RANGE = 690.0  # exp of it is a float64 still
_NO_PRIOR = (
    "posterior: the evidence has no maximum over the prior: all parameters are zero, or the outputs do not depend "
    "on them; pass prior= as a number"
)
_NO_NOISE = (
    "posterior: the evidence has no maximum over the noise: the model fits the targets exactly; pass noise= as a "
    "variance"
)


class Posterior:
    """The Laplace approximation of `woodbury.posterior`. It holds a copy of the model and the rows of its data.

    Attributes:
        prior: the precision of the parameters, a number or a dictionary from parameter name to number.
        noise: the variance of the noise, None for losses other than squared error; of a `Fit` its own.
        log_evidence: log p(data) of the Laplace approximation, see `woodbury.posterior`.
    """

    def __init__(
        self, data: TrainingData, system: System, prior: float | dict[str, float], noise: float | None
    ) -> None:
        self.prior, self.noise = prior, noise
        self.log_evidence = data.log_evidence(system, noise)
        self._data, self._system = data, system

    def covariance(self, inputs: Any) -> Tensor:
        """J P^-1 J^T at each sample, (n, C, C): of all C numbers that the model returns for it, without noise."""
        return torch.cat([self._system.blocks(own, width) for own, width in self._output_rows(inputs)])

    def variance(self, inputs: Any) -> Tensor:
        """The diagonal of `covariance`, in the shape of the outputs: the variance of each, without noise."""
        own = self.covariance(inputs).diagonal(dim1=1, dim2=2).clamp_min(0)
        return own.reshape(len(own), *self._data.output_shape)

    def sample(self, inputs: Any, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """count draws of the outputs at the inputs, (count, n, ...), without noise.

        y(x) + J(x) (theta' - theta) with theta' from the posterior: each draw is one function, and its values at
        different inputs go together.
        """
        check_whole_number("sample: count", count, least=1)
        draws = self._system.draw(count, generator)
        moves = []
        for own, width in self._output_rows(inputs):
            moves.append(torch.stack([own.matvec(draw) for draw in draws]).reshape(count, -1, width))
        outputs = self._data.outputs(inputs)
        return outputs + torch.cat(moves, dim=1).reshape(count, *outputs.shape).to(outputs.dtype)

    def probabilities(self, inputs: Any) -> Tensor:
        """The mean of the softmax over the posterior, (n, C), for logits y of N(m, V) at each sample:

            p_k ~ 1 / sum_j exp((m_j - m_k) / sqrt(1 + pi / 8 v_jk)),   v_jk = share Var(y_j - y_k)

        and then divided by their sum. For two classes that is MacKay's mean of a sigmoid (1992), for more the one
        of Lu, Ie and Sha (2020) by pairs of classes. For `CrossEntropyLoss` on outputs (n, C).
        """
        return mean_softmax(self._data.outputs(inputs).double(), self.share * self.covariance(inputs))

    @cached_property
    def share(self) -> float:
        """Of the covariance, for `probabilities`: what would have predicted samples best that are left out."""
        data = self._data
        return share_by_left_out(
            data.outputs(data.inputs).double(), self.covariance(data.inputs), data.class_masses
        )

    def influence(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """How the loss at each of m samples depends on the weight of each of the n training samples, (m, n).

        With weights w_i in -log p(theta | data) = sum_i w_i L_i + theta^T Delta theta / 2, at w = 1 and to first
        order, for parameters that minimise it,

            d l(x_j, y_j) / d w_i = -(dl_j / dtheta)^T P^-1 (dL_i / dtheta)

        l is the term of one sample in the loss as it was given, L_i that of the likelihood (divided by twice the
        noise for squared error). Negative: more of sample i lowers the loss at sample j. Leaving sample i out
        changes l_j by about minus this number.
        """
        data, factor = self._data, self._data.factor_of(self.noise)
        influences = []
        for part, window in _parts(inputs, len(self._system.lower)):
            own = data.gradient_rows(part, None if targets is None else targets[window])
            product = self._system.with_training(own) * (math.sqrt(factor) * data.e)
            influence = product.reshape(own.row_count, data.samples, -1).sum(2)
            if data.rest is not None:
                influence = influence + self._system.between(own, data.rest) * factor
            influences.append(-influence)
        return torch.cat(influences)

    def _output_rows(self, inputs: Any) -> Iterator[tuple[Rows, int]]:
        """The rows of all outputs (S = I), for as many samples at a time as fit, and the number of outputs."""
        width = math.prod(self._data.output_shape)
        for part, _ in _parts(inputs, len(self._system.lower) * width):
            yield self._data.rows_at(part, unit_columns), width

    def __repr__(self) -> str:
        noise = "" if self.noise is None else f", noise={self.noise:.4g}"
        prior = f"{self.prior:.4g}" if isinstance(self.prior, float) else f"{len(self.prior)} numbers"
        return f"Posterior(prior={prior}{noise}, log_evidence={self.log_evidence:.6g})"


def posterior(
    model: nn.Module,
    loss: nn.Module | None = None,
    inputs: Any = None,
    targets: Tensor | None = None,
    prior: str | float | Mapping[str, float] = EVIDENCE,
    noise: str | float = EVIDENCE,
    *,
    forward: Forward | None = None,
    fallback: str | None = "autograd",
) -> Posterior:
    """The linearized Laplace posterior of a trained model, exact for the Gauss-Newton matrix of the data.

    >>> posterior = woodbury.posterior(model, torch.nn.MSELoss(), inputs, targets)
    >>> posterior.variance(new_inputs)      # of the outputs; add posterior.noise for that of new targets
    >>> posterior.sample(new_inputs, 20)    # functions from the posterior
    >>> posterior.influence(new_inputs, new_targets)    # of each training sample on the loss there
    >>> posterior.log_evidence
    >>> posterior = woodbury.posterior(woodbury.fit(model, loss, (inputs, targets), weight_decay="evidence"))

    The model should be trained: the approximation is around its parameters as they are, and those of a minimum
    with weight decay fit it best (`weight_decay` = 2 noise prior / (n C) with `MSELoss`, prior / n with
    `CrossEntropyLoss`). It is copied and set to evaluation mode, and may change afterwards. Numbers are float64
    whatever the model is. It takes a matrix with as many rows as U has, or as there are parameters, whichever is
    less.

    Args:
        model: any module; parameters without requires_grad count as known. Or a `Fit` by evidence, alone: its
            data, prior and noise are taken.
        loss: one that `GaussNewton` takes. The sum over samples is the negative log likelihood, whatever its
            reduction (up to a constant for losses that leave one out); for `MSELoss`, that of Gaussian noise.
        inputs, targets: the training data; inputs may be (inputs, targets), as in `woodbury.fit`.
        prior: the precision of the parameters: a number, a dictionary from parameter name to number, or
            "evidence" for the one number that maximises `log_evidence`.
        noise: for squared error: the variance of the noise, or "evidence" likewise (with the prior, if both are).
        forward, fallback: as in `woodbury.rows`.

    At the maximum of the evidence, with mu the eigenvalues of U D U^T and gamma = sum mu / (mu + 1) the number of
    well-determined parameters (MacKay 1992),

        prior |theta|^2 = gamma,    noise (n C - gamma) = |y - t|^2
    """
    if loss is None:
        if not callable(getattr(model, "make_posterior", None)):
            raise TypeError(
                "posterior takes a model, its loss and its data, or the Fit of weight_decay='evidence' alone; got "
                f"{type(model).__name__}"
            )
        return model.make_posterior()  # type: ignore
    model, loss = written_model(model), written_model(loss)
    is_squared = isinstance(loss, nn.MSELoss)
    _check_argument("prior", prior, what="a precision")
    _check_argument("noise", noise, what="a variance")
    if not is_squared and not isinstance(noise, str):
        raise ValueError(
            f"posterior: noise= is a variance for MSELoss, and {type(loss).__name__} has none: leave it out"
        )
    if targets is None and isinstance(inputs, tuple | list) and len(inputs) == 2:
        inputs, targets = inputs
    inputs, targets = pytree.tree_map_only(Tensor, Tensor.clone, (inputs, targets))  # which it looks at later
    model = copy.deepcopy(model).eval()
    data = TrainingData(model, loss, forward=forward, fallback=fallback, inputs=inputs, targets=targets)
    matrix = data.matrix(data.precisions(1.0 if isinstance(prior, str) else prior))
    by_evidence = isinstance(prior, str) or (is_squared and isinstance(noise, str))
    eigenvalues = torch.linalg.eigvalsh(matrix).clamp_min(0) if by_evidence else matrix.new_zeros(0)
    size, square = data.number_count, sum(data.squared_parameters.values())
    variance = None if isinstance(noise, str) else float(noise)
    if isinstance(prior, str):
        if is_squared and variance is None:
            precision, variance = both_by_evidence(eigenvalues, size, data.total, square)
        else:
            precision = prior_by_evidence(eigenvalues * data.factor_of(variance), square)
        chosen: float | dict[str, float] = precision
        matrix = matrix / precision
    else:
        chosen = dict(prior) if isinstance(prior, Mapping) else float(prior)
        if is_squared and variance is None:
            variance = noise_by_evidence(eigenvalues, size, data.total)
    return Posterior(data, data.system(data.precisions(chosen), variance, matrix), chosen, variance)


def _parts(inputs: Any, numbers_per_sample: int) -> Iterator[tuple[Any, slice]]:
    """Samples in parts for which the matrix with the training data fits, each with its place."""
    count = _batch.sample_count(inputs)
    for window in windows(count, _NUMBERS_AT_ONCE // max(1, numbers_per_sample)):
        yield _batch.part(inputs, window, count), window


def _check_argument(name: str, value: Any, what: str) -> None:
    """Raise unless it is "evidence" or positive numbers."""
    if isinstance(value, str) and value == EVIDENCE:
        return
    numbers = list(value.values()) if name == "prior" and isinstance(value, Mapping) else [value]
    for number in numbers:
        check_number(f"posterior: {name} must be {EVIDENCE!r} or {what}, which", number, above=0)


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


def mean_softmax(mean: Tensor, covariance: Tensor) -> Tensor:
    """The mean of softmax(y), (n, C), over y of N(mean, covariance), by pairs of classes."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    of_pairs = (variance.unsqueeze(1) + variance.unsqueeze(2) - 2 * covariance).clamp_min(0)
    gaps = (mean.unsqueeze(1) - mean.unsqueeze(2)) / (1 + math.pi / 8 * of_pairs).sqrt()
    return (-gaps.logsumexp(2)).softmax(1)


def left_out(mean: Tensor, covariance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """m' and V' of the logits of each sample without it, to second order and without another fit.

    With r_i and H_i the derivatives of the loss of sample i, N(m, V) of its logits becomes

        V' = (V^-1 - H_i)^-1,    m' = m + V' r_i

    Of a sample that counts several times (targets sum to this) one is left out.
    """
    mass = targets.sum(1, keepdim=True)
    p = mean.softmax(1)
    once = mass.clamp_max(1.0)
    r = once * (p - targets / mass.clamp_min(torch.finfo(p.dtype).tiny))
    H = once.unsqueeze(2) * (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))
    identity = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
    wider = torch.linalg.solve(identity - _MOST_LEVERAGE * covariance @ H, covariance)
    return mean + (wider @ r.unsqueeze(2)).squeeze(2), wider


def share_by_left_out(mean: Tensor, covariance: Tensor, targets: Tensor) -> float:
    """Of `SHARES` the one with the least cross entropy of samples that are left out.

    Where classes are nearly separable the Gaussian is far too wide: the likelihood is flat towards larger logits
    only, and P^-1 is as wide on the other side. With ten samples of one class, one logit and a prior of variance
    100 the probability of the other class is 0.010, and 0.126 by the Gaussian.
    """
    mean, covariance = left_out(mean, covariance, targets)
    losses = [-float((targets * mean_softmax(mean, share * covariance).log()).sum()) for share in SHARES]
    return SHARES[losses.index(min(losses))]
