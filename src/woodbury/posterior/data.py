"""The rows of the training data, and what the likelihood needs beside them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from woodbury import _batch
from woodbury._bytes import available_bytes, in_words
from woodbury.curvature import GaussNewtonMatrix
from woodbury.linalg import factor_cholesky, plus_diagonal
from woodbury.losses.rules import loss_rule, prepare
from woodbury.model.capture import GraphCapture, call_model
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan
from woodbury.posterior.systems import InParameterSpace, InSampleSpace, System, root_of_scales
from woodbury.row_matrix import Rows, capture_rows

_WORTH_ASKING = 2**28  # bytes from which on memory is looked at
_LEAST_FREEDOM = 1e-3  # of n C that n C - gamma is taken for at least: at first all may seem determined


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
        inputs: Any,
        targets: Tensor | None,
        check: bool = True,
    ) -> None:
        self._model, self._loss, self._rule = model, copy.deepcopy(loss), loss_rule(loss)
        self.inputs, self.targets = inputs, targets
        self._options: dict[str, Any] = {"forward": forward, "fallback": fallback}
        summed = copy.copy(self._loss)
        if self._rule.takes_sum:  # or its values do not depend on the reduction
            summed.reduction = "sum"  # type: ignore[assignment]

        def columns_of(captured: GraphCapture) -> Tensor:
            outputs = captured.outputs.detach()
            self.output_shape = captured.raw.shape[1:]
            prepared = prepare(self._rule, summed, captured.raw, targets)
            factor = GaussNewtonMatrix().factor(self._rule, summed, outputs, prepared)
            self.total = float(self._rule.terms(summed, outputs, prepared).double().sum())
            self.e, self._rest_columns = factor.e.flatten().double(), factor.rest
            _check_room(captured.plan, len(self.e))
            return factor.columns()

        self.rows = capture_rows(model, inputs, targets, columns_of, check=check, **self._options)
        self.samples = _batch.sample_count(inputs)
        self.rest = None  # rows of what of the gradients the factor rows do not hold
        if self._rest_columns is not None:
            columns = self._rest_columns.unsqueeze(1)
            self.rest = self.rows_at(inputs, lambda _: columns)
        self.number_count: float = self.samples * math.prod(self.output_shape)  # n C, or a sum of weights

    def rows_at(self, inputs: Any, columns_of: Callable[[GraphCapture], Tensor]) -> Rows:
        return capture_rows(self._model, inputs, None, columns_of, check=False, **self._options)

    def gradient_rows(self, inputs: Any, targets: Tensor | None) -> Rows:
        """dl_j / dtheta of each sample, for the loss as it was given."""

        def columns_of(captured: GraphCapture) -> Tensor:
            prepared = prepare(self._rule, self._loss, captured.raw, targets)
            return self._rule.residual(self._loss, captured.outputs.detach(), prepared).unsqueeze(1)

        return self.rows_at(inputs, columns_of)

    def outputs(self, inputs: Any) -> Tensor:
        forward: Forward = self._options["forward"] or call_model
        with torch.no_grad():
            return forward(self._model, inputs)

    @property
    def class_masses(self) -> Tensor:
        """The targets of a cross entropy as weights of the classes, (n, C); zeros where the target is ignored."""
        outputs, loss = self.outputs(self.inputs).double(), self._loss
        if not isinstance(loss, nn.CrossEntropyLoss) or outputs.dim() != 2:
            raise ValueError("posterior: probabilities are for CrossEntropyLoss and outputs (n, C)")
        assert self.targets is not None
        if self.targets.is_floating_point():
            return self._rule.prepare(loss, outputs, self.targets)
        is_used = self.targets != loss.ignore_index
        one_hot = nn.functional.one_hot(self.targets.long() * is_used, outputs.shape[1])
        return self._rule.prepare(loss, outputs, one_hot.double()) * is_used.unsqueeze(1)

    def factor_of(self, noise: float | None) -> float:
        """What the sum of the loss is multiplied by in the likelihood; noise: see `Fit.noise`."""
        return 1.0 if noise is None else 1 / (2 * noise)

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
    def _kind(self) -> type[InSampleSpace] | type[InParameterSpace]:
        return InSampleSpace if self.rows.row_count <= self.rows.plan.size else InParameterSpace

    def matrix(self, precisions: Mapping[str, float]) -> Tensor:
        """U D U^T, or D^1/2 U^T U D^1/2, which has the same eigenvalues up to zeros: the smaller one.

        For the sum of the loss, which is the likelihood of squared error for noise 1/2.
        """
        if self._kind is InSampleSpace:
            return self.rows.gram(scales={name: 1 / own for name, own in precisions.items()}, dtype=torch.float64)
        root = root_of_scales(self.rows, precisions)
        return root.unsqueeze(1) * self._curvature * root

    def system(self, precisions: Mapping[str, float], noise: float | None, matrix: Tensor | None = None) -> System:
        """P^-1; matrix is that of these precisions, if it is known."""
        factor = self.factor_of(noise)
        matrix = self.matrix(precisions) if matrix is None else matrix
        lower, ok = factor_cholesky(plus_diagonal(matrix * factor, 1.0))
        if not ok:
            raise ValueError(
                "posterior: the matrix of the posterior is not positive definite: rows that are not finite, or a "
                "prior too small for float64; pass a larger prior="
            )
        return self._kind(self.rows, math.sqrt(factor), dict(precisions), lower)

    def log_evidence(self, system: System, noise: float | None) -> float:
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


def _check_room(plan: Plan, row_count: int) -> None:
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
