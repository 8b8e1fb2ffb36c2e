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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from woodbury import _batch
from woodbury._memory import available_bytes, in_words
from woodbury._vector import Vector
from woodbury.curvature import GaussNewtonMatrix
from woodbury.linalg import plus_diagonal
from woodbury.losses.rules import LossRule, loss_rule, prepare
from woodbury.model.capture import GraphCapture
from woodbury.model.compiled import written_model
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan
from woodbury.row_matrix import Rows, capture_rows, unit_columns

EVIDENCE = "evidence"
_WORTH_ASKING = 2**28  # bytes from which on memory is looked at
_NUMBERS_AT_ONCE = 2**24  # entries of a matrix between new samples and the training data
_LEAST_FREEDOM = 1e-3  # of n C that n C - gamma is taken for at least: at first all may seem determined
_LOG_RANGE = 690.0  # exp of it is a float64 still


class Posterior:
    """The Laplace approximation of `woodbury.posterior`. It holds a copy of the model and the rows of its data.

    Attributes:
        prior: the precision of the parameters, a number or a dictionary from parameter name to number.
        noise: the variance of the noise, None for losses other than squared error.
        log_evidence: log p(data) of the Laplace approximation, see `woodbury.posterior`.
    """

    def __init__(
        self,
        data: TrainingData,
        system: _System,
        prior: float | dict[str, float],
        noise: float | None,
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
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"sample: count must be a whole number from 1 on, got {count!r}")
        draws = self._system.draw(count, generator)
        moves = []
        for own, width in self._output_rows(inputs):
            moves.append(torch.stack([own.matvec(draw) for draw in draws]).reshape(count, -1, width))
        outputs = self._data.outputs(inputs)
        return outputs + torch.cat(moves, dim=1).reshape(count, *outputs.shape).to(outputs.dtype)

    def influence(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """How the loss at each of m samples depends on the weight of each of the n training samples, (m, n).

        With weights w_i in -log p(theta | data) = sum_i w_i L_i + theta^T Delta theta / 2, at w = 1 and to first
        order, for parameters that minimise it,

            d l(x_j, y_j) / d w_i = -(dl_j / dtheta)^T P^-1 (dL_i / dtheta)

        l is the term of one sample in the loss as it was given, L_i that of the likelihood (divided by twice the
        noise for squared error). Negative: more of sample i lowers the loss at sample j. Leaving sample i out
        changes l_j by about minus this number.
        """
        data = self._data
        factor = data.factor_of(self.noise)
        parts = []
        for window in _windows(inputs, len(self._system)):
            own = data.gradient_rows(_at(inputs, window), None if targets is None else targets[window])
            product = self._system.with_training(own) * (math.sqrt(factor) * data.e)
            part = product.reshape(own.row_count, data.samples, -1).sum(2)
            if data.rest is not None:
                part = part + self._system.between(own, data.rest) * factor
            parts.append(-part)
        return torch.cat(parts)

    def _output_rows(self, inputs: Any) -> Iterator[tuple[Rows, int]]:
        """The rows of all outputs (S = I), for as many samples at a time as fit, and the number of outputs."""
        width = math.prod(self._data.output_shape)
        for window in _windows(inputs, len(self._system) * width):
            yield self._data.rows_at(_at(inputs, window), lambda captured: (unit_columns(captured), 1.0)), width

    def __repr__(self) -> str:
        noise = "" if self.noise is None else f", noise={self.noise:.4g}"
        prior = f"{self.prior:.4g}" if isinstance(self.prior, float) else f"{len(self.prior)} numbers"
        return f"Posterior(prior={prior}{noise}, log_evidence={self.log_evidence:.6g})"


def posterior(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    prior: str | float | Mapping[str, float] = EVIDENCE,
    noise: str | float = EVIDENCE,
    *,
    forward: Forward | None = None,
    fallback: str | None = "autograd",
    max_bytes: int | None = None,
) -> Posterior:
    """The linearized Laplace posterior of a trained model, exact for the Gauss-Newton matrix of the data.

    >>> posterior = woodbury.posterior(model, torch.nn.MSELoss(), inputs, targets)
    >>> posterior.variance(new_inputs)      # of the outputs; add posterior.noise for that of new targets
    >>> posterior.sample(new_inputs, 20)    # functions from the posterior
    >>> posterior.influence(new_inputs, new_targets)    # of each training sample on the loss there
    >>> posterior.log_evidence

    The model should be trained: the approximation is around its parameters as they are, and those of a minimum
    with weight decay fit it best (`weight_decay` = 2 noise prior / (n C) with `MSELoss`, prior / n with
    `CrossEntropyLoss`). It is copied and set to evaluation mode, and may change afterwards. Numbers are float64
    whatever the model is. It takes a matrix with as many rows as U has, or as there are parameters, whichever is
    less.

    Args:
        model: any module; parameters without requires_grad count as known.
        loss: one that `GaussNewton` takes. The sum over samples is the negative log likelihood, whatever its
            reduction (up to a constant for losses that leave one out); for `MSELoss`, that of Gaussian noise.
        inputs, targets: the training data.
        prior: the precision of the parameters: a number, a dictionary from parameter name to number, or
            "evidence" for the one number that maximises `log_evidence`.
        noise: for squared error: the variance of the noise, or "evidence" likewise (with the prior, if both are).
        forward, fallback, max_bytes: as in `woodbury.rows`.

    At the maximum of the evidence, with mu the eigenvalues of U D U^T and gamma = sum mu / (mu + 1) the number of
    well-determined parameters (MacKay 1992),

        prior |theta|^2 = gamma,    noise (n C - gamma) = |y - t|^2
    """
    model, loss = written_model(model), written_model(loss)
    is_squared = isinstance(loss, nn.MSELoss)
    _check_argument("prior", prior, what="a precision")
    _check_argument("noise", noise, what="a variance")
    if not is_squared and not isinstance(noise, str):
        raise ValueError(
            f"posterior: noise= is a variance for MSELoss, and {type(loss).__name__} has none: leave it out"
        )
    data = TrainingData(copy.deepcopy(model).eval(), loss, forward, fallback, max_bytes, inputs, targets)
    matrix = data.matrix(data.precisions(1.0 if isinstance(prior, str) else prior))
    by_evidence = isinstance(prior, str) or (is_squared and isinstance(noise, str))
    eigenvalues = torch.linalg.eigvalsh(matrix).clamp_min(0) if by_evidence else matrix.new_zeros(0)
    size, square = data.number_count, sum(data.squared_parameters.values())
    variance = None if not is_squared or isinstance(noise, str) else float(noise)
    if isinstance(prior, str):
        if is_squared and variance is None:
            precision, variance = _both_by_evidence(eigenvalues, size, data.total, square)
        else:
            precision = _prior_by_evidence(eigenvalues * data.factor_of(variance), square)
        chosen: float | dict[str, float] = precision
        matrix = matrix / precision
    else:
        chosen = dict(prior) if isinstance(prior, Mapping) else float(prior)
        if is_squared and variance is None:
            variance = _noise_by_evidence(eigenvalues, size, data.total)
    return Posterior(data, data.system(data.precisions(chosen), variance, matrix), chosen, variance)


class Update(NamedTuple):
    """The prior and the noise after one step of MacKay's iteration, and the evidence before it."""

    precisions: dict[str, float]
    noise: float | None
    determined: float  # gamma, the number of well-determined parameters
    log_evidence: float


class TrainingData:
    """The rows of the training data, U = S^T J of the loss as a sum, and what the likelihood needs beside them."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        forward: Forward | None,
        fallback: str | None,
        max_bytes: int | None,
        inputs: Any,
        targets: Tensor | None,
        check: bool = True,
    ) -> None:
        self._model, self._loss, self._rule = model, loss, loss_rule(loss)
        self._options = {"forward": forward, "fallback": fallback, "max_bytes": max_bytes}
        summed = _as_sum(loss, self._rule)
        self._is_squared = isinstance(loss, nn.MSELoss)

        def columns_of(captured: GraphCapture) -> tuple[Tensor, float]:
            outputs = captured.outputs.detach()
            self.output_shape = captured.raw.shape[1:]
            prepared = prepare(self._rule, summed, captured.raw, targets)
            factor = GaussNewtonMatrix().factor(self._rule, summed, outputs, prepared)
            assert factor.e is not None
            self.total = float(self._rule.terms(summed, outputs, prepared).double().sum())
            self.e, self._rest_columns = factor.e.flatten().double(), factor.rest
            _check_memory(captured.plan, len(self.e))
            return factor.columns(), 1.0

        options: dict[str, Any] = self._options
        self.rows = capture_rows(model, inputs, targets, columns_of, check=check, **options)
        self.samples = _batch.sample_count(inputs)
        self.number_count: float = self.samples * math.prod(self.output_shape)  # n C, or a sum of weights
        self.rest = None  # rows of what of the gradients the factor rows do not hold
        if self._rest_columns is not None:
            columns = self._rest_columns.unsqueeze(1)
            self.rest = self.rows_at(inputs, lambda _: (columns, 1.0))

    def rows_at(self, inputs: Any, columns_of: Callable[[GraphCapture], tuple[Tensor, float]]) -> Rows:
        return capture_rows(self._model, inputs, None, columns_of, check=False, **self._options)  # type: ignore

    def gradient_rows(self, inputs: Any, targets: Tensor | None) -> Rows:
        """dl_j / dtheta of each sample, for the loss as it was given."""

        def columns_of(captured: GraphCapture) -> tuple[Tensor, float]:
            prepared = prepare(self._rule, self._loss, captured.raw, targets)
            return self._rule.residual(self._loss, captured.outputs.detach(), prepared).unsqueeze(1), 1.0

        return self.rows_at(inputs, columns_of)

    def outputs(self, inputs: Any) -> Tensor:
        forward = self._options["forward"]
        with torch.no_grad():
            outputs: Tensor = self._model(inputs) if forward is None else forward(self._model, inputs)  # type: ignore
        return outputs

    def factor_of(self, noise: float | None) -> float:
        """What the sum of the loss is multiplied by in the likelihood."""
        return 1 / (2 * noise) if self._is_squared and noise is not None else 1.0

    @property
    def squared_parameters(self) -> dict[str, float]:
        """|theta|^2 by parameter name."""
        return {
            name: float(own.detach().double().square().sum()) for name, own in self.rows.plan.parameters.items()
        }

    def precisions(self, prior: float | Mapping[str, float]) -> dict[str, float]:
        """Delta by parameter name."""
        names = list(self.rows.plan.parameters)
        if not isinstance(prior, Mapping):
            return dict.fromkeys(names, float(prior))
        if set(prior) != set(names):
            differing = sorted(set(prior) ^ set(names))
            raise ValueError(
                f"posterior: prior must have one precision for each trainable parameter; {differing[0]!r} is "
                f"{'missing' if differing[0] in names else 'no such parameter'}"
            )
        return {name: float(prior[name]) for name in names}

    @cached_property
    def _curvature(self) -> Tensor:
        """U^T U."""
        (B,) = self.rows.curvature(self.rows.row_count, [list(self.rows.plan.parameters)], dtype=torch.float64)
        return B

    @property
    def in_sample_space(self) -> bool:
        return self.rows.row_count <= self.rows.plan.size

    def matrix(self, precisions: Mapping[str, float]) -> Tensor:
        """U D U^T, or D^1/2 U^T U D^1/2, which has the same eigenvalues up to zeros: the smaller one.

        For the sum of the loss, which is the likelihood of squared error for noise 1/2.
        """
        if self.in_sample_space:
            return self.rows.gram(scales={name: 1 / own for name, own in precisions.items()}, dtype=torch.float64)
        root = _root_of_scales(self.rows, precisions)
        return root.unsqueeze(1) * self._curvature * root

    def system(
        self, precisions: Mapping[str, float], noise: float | None, matrix: Tensor | None = None
    ) -> _System:
        """P^-1; matrix is that of these precisions, if it is known."""
        rows, factor = self.rows, self.factor_of(noise)
        matrix = self.matrix(precisions) if matrix is None else matrix
        lower, info = torch.linalg.cholesky_ex(plus_diagonal(matrix * factor, 1.0))
        if int(info) != 0:
            raise ValueError(
                "posterior: the matrix of the posterior is not positive definite: rows that are not finite, or a "
                "prior too small for float64; pass a larger prior="
            )
        scaled = Rows(rows.plan, rows.forms, rows.row_count, rows.scale * math.sqrt(factor))
        return (_SampleSpace if self.in_sample_space else _ParameterSpace)(scaled, dict(precisions), lower)

    def log_evidence(self, system: _System, noise: float | None) -> float:
        """-L(theta) - theta^T Delta theta / 2 - log det(A) / 2."""
        squares = self.squared_parameters
        value = -self.factor_of(noise) * self.total - float(system.lower.diagonal().log().sum())
        value -= 0.5 * sum(own * squares[name] for name, own in system.precisions.items())
        return value if noise is None else value - 0.5 * self.number_count * math.log(2 * math.pi * noise)

    def update(self, precisions: Mapping[str, float], noise: float | None) -> Update:
        """One step of MacKay's iteration for a precision per parameter tensor and, with squared error, the noise.

        delta_t <- gamma_t / |theta_t|^2 and s <- |y - t|^2 / (n C - gamma); gamma_t = p_t - delta_t tr(P^-1)_t
        is the number of well-determined parameters of a tensor of p_t, and gamma their sum.
        """
        system = self.system(precisions, noise)
        determined, squares = system.determined(), self.squared_parameters
        total = sum(determined.values())
        smallest = torch.finfo(torch.float64).tiny
        after = {name: own / max(squares[name], smallest) for name, own in determined.items()}
        error = None
        if noise is not None:
            error = self.total / max(self.number_count - total, _LEAST_FREEDOM * self.number_count)
        return Update(after, error, total, self.log_evidence(system, noise))


def _root_of_scales(rows: Rows, precisions: Mapping[str, float]) -> Tensor:
    """The diagonal of D^1/2, (p,)."""
    parts = [
        torch.full((own.numel(),), precisions[name] ** -0.5, dtype=torch.float64, device=own.device)
        for name, own in rows.plan.parameters.items()
    ]
    return torch.cat(parts)


@dataclass
class _System(ABC):
    """P^-1, by the factorisation of a small matrix I + M = L L^T."""

    rows: Rows  # U, with the noise
    precisions: dict[str, float]
    lower: Tensor

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def scales(self) -> dict[str, float]:
        """D by parameter name."""
        return {name: 1 / own for name, own in self.precisions.items()}

    @abstractmethod
    def blocks(self, rows: Rows, width: int) -> Tensor:
        """The width x width blocks along the diagonal of R P^-1 R^T for rows R, (r / width, width, width)."""

    @abstractmethod
    def between(self, a: Rows, b: Rows) -> Tensor:
        """A P^-1 B^T."""

    @abstractmethod
    def with_training(self, rows: Rows) -> Tensor:
        """R P^-1 U^T."""

    @abstractmethod
    def determined(self) -> dict[str, float]:
        """gamma_t = p_t - delta_t tr(P^-1)_t of each parameter tensor."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        """theta' - theta for draws theta' from the posterior."""

    def normal(self, *sizes: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers in float64."""
        device = self.lower.device if generator is None else generator.device
        return torch.randn(*sizes, dtype=torch.float64, generator=generator, device=device).to(self.lower.device)

    def as_vector(self, flat: Tensor) -> Vector:
        plan = self.rows.plan
        return Vector(plan.space, flat.to(plan.dtype))


class _SampleSpace(_System):
    """With A = I + U D U^T = L L^T."""

    def _half(self, rows: Rows) -> Tensor:
        """L^-1 U D R^T."""
        return torch.linalg.solve_triangular(self.lower, self._with_rows(rows).mT, upper=False)

    def _with_rows(self, rows: Rows) -> Tensor:
        """R D U^T."""
        return rows.gram(self.rows, self.scales, torch.float64)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        prior = rows.diagonal(width, self.scales, torch.float64).reshape(-1, width, width)
        half = self._half(rows).reshape(len(self), -1, width).permute(1, 2, 0)
        return prior - torch.bmm(half, half.mT)

    def between(self, a: Rows, b: Rows) -> Tensor:
        return a.gram(b, self.scales, torch.float64) - self._half(a).mT @ self._half(b)

    def with_training(self, rows: Rows) -> Tensor:
        return torch.cholesky_solve(self._with_rows(rows).mT, self.lower).mT

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        root, draws = _root_of_scales(self.rows, self.precisions), []
        for _ in range(count):
            z = self.as_vector(self.normal(len(root), generator=generator) * root)
            e = self.normal(len(self), generator=generator)
            weights = torch.cholesky_solve((self.rows.matvec(z).double() + e).unsqueeze(1), self.lower).squeeze(1)
            pulled = self.rows.rmatvec(weights)
            scales = root.square().to(pulled.flat.dtype)
            draws.append(z - pulled * scales)
        return draws

    def determined(self) -> dict[str, float]:
        # delta_t tr(P^-1)_t = p_t - tr(A^-1 U D_t U^T)
        inverse = torch.cholesky_inverse(self.lower)
        gammas = dict.fromkeys(self.precisions, 0.0)
        for layer, form in self.rows.forms.items():
            names = self.rows.plan.owned[layer]
            for own in form.parameters:
                alone = {other: self.scales[names[own]] * float(other == own) for other in form.parameters}
                gram = form.gram(form, alone, torch.float64)
                gammas[names[own]] = float((gram * inverse).sum()) * self.rows.scale**2
        return gammas


class _ParameterSpace(_System):
    """With D^1/2 P D^1/2 = I + D^1/2 U^T U D^1/2 = L L^T."""

    def _half(self, rows: Rows) -> Tensor:
        """L^-1 D^1/2 R^T."""
        scaled = rows.dense().double() * _root_of_scales(self.rows, self.precisions)
        return torch.linalg.solve_triangular(self.lower, scaled.mT, upper=False)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        half = self._half(rows).reshape(len(self), -1, width).permute(1, 2, 0)
        return torch.bmm(half, half.mT)

    def between(self, a: Rows, b: Rows) -> Tensor:
        return self._half(a).mT @ self._half(b)

    def with_training(self, rows: Rows) -> Tensor:
        # P^-1 R^T = D^1/2 L^-T (L^-1 D^1/2 R^T), sent through U one row of R at a time
        solved = torch.linalg.solve_triangular(self.lower.mT, self._half(rows), upper=True)
        solved = solved * _root_of_scales(self.rows, self.precisions).unsqueeze(1)
        return torch.stack([self.rows.matvec(self.as_vector(own)).double() for own in solved.mT])

    def determined(self) -> dict[str, float]:
        inverse = torch.cholesky_inverse(self.lower).diagonal()
        parts = inverse.split([own.numel() for own in self.rows.plan.parameters.values()])
        return {name: len(part) - float(part.sum()) for name, part in zip(self.precisions, parts, strict=True)}

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        draws = self.normal(count, len(self), generator=generator)
        solved = torch.linalg.solve_triangular(self.lower.mT, draws.mT, upper=True)
        solved = solved * _root_of_scales(self.rows, self.precisions).unsqueeze(1)
        return [self.as_vector(own) for own in solved.mT]


def _as_sum(loss: nn.Module, rule: LossRule) -> nn.Module:
    """The loss as a sum over samples and outputs, where the values of its rule depend on the reduction."""
    if not rule.takes_sum:
        return loss
    summed = copy.copy(loss)
    summed.reduction = "sum"  # type: ignore[assignment]
    return summed


def _check_memory(plan: Plan, row_count: int) -> None:
    """Raise before the matrix is formed if it cannot fit: with its copies and its factor, four of them."""
    needed = 4 * 8 * min(row_count, plan.size) ** 2
    if needed < _WORTH_ASKING:
        return
    available = available_bytes(plan.device)
    if available is not None and needed > available:
        raise MemoryError(
            f"posterior: {row_count} rows of the data and {plan.size} parameters need about {in_words(needed)}, "
            f"and {in_words(available)} are available. Ways out: fewer samples, or requires_grad_(False) on "
            "layers whose parameters may count as known"
        )


def _windows(inputs: Any, numbers_per_sample: int) -> Iterator[slice]:
    """Samples in pieces for which the matrix with the training data fits."""
    count = _batch.sample_count(inputs)
    length = max(1, min(count, _NUMBERS_AT_ONCE // max(1, numbers_per_sample)))
    return (slice(start, min(start + length, count)) for start in range(0, count, length))


def _at(inputs: Any, window: slice) -> Any:
    return _batch.part(inputs, window, _batch.sample_count(inputs))


def _check_argument(name: str, value: Any, what: str) -> None:
    """Raise unless it is "evidence" or positive numbers."""
    if isinstance(value, str) and value == EVIDENCE:
        return
    numbers = list(value.values()) if name == "prior" and isinstance(value, Mapping) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"posterior: {name} must be {EVIDENCE!r} or {what}, a positive number; got {value!r}")


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


def _prior_by_evidence(eigenvalues: Tensor, square: float) -> float:
    """delta with delta |theta|^2 = gamma(delta), for the eigenvalues of the likelihood's U U^T."""
    return _root(lambda delta: _determined(eigenvalues, delta) - delta * square, _NO_PRIOR)


def _noise_by_evidence(eigenvalues: Tensor, count: float, error: float) -> float:
    """s with s (n C - gamma(s)) = |y - t|^2, for the eigenvalues of U D U^T with noise 1/2."""
    mu = eigenvalues / 2  # of J D J^T
    return _root(lambda s: error - s * (count - _determined(mu, s)), _NO_NOISE)


def _both_by_evidence(eigenvalues: Tensor, count: float, error: float, square: float) -> tuple[float, float]:
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
