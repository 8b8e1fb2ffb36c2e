"""U, the matrix behind every method here: one row S_i^T J_i / sqrt(n) per sample and factor column.

With U the damped curvature matrix is U^T U + lambda I and the Gram matrix is K = U U^T. Rows are
sample-major (row = i k + a), stored layer by layer; neither U nor any n x n object is formed unless
`dense` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._batch import check_batch
from woodbury._scalar import Scalar
from woodbury._vector import Vector
from woodbury.capture import Forward, call_model, capture, check_samples_apart
from woodbury.layers.forms import RowForm
from woodbury.linalg import full_precision
from woodbury.losses import LossRule, loss_rule
from woodbury.plan import Plan, plan_layers

CURVATURES = ("gauss-newton", "empirical")


class Rows:
    """The rows of U, layer by layer, times `scale`. See the module docstring for their order."""

    def __init__(self, plan: Plan, forms: Mapping[str, RowForm], count: int, scale: float = 1.0) -> None:
        self.plan = plan
        self.forms = dict(forms)
        self.count = count
        self.scale = scale
        self._names = plan.owned

    def gram(
        self,
        other: Rows | None = None,
        scales: Mapping[str, Scalar] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """K = U D U'^T, (r, r'), summed over layers; U' = U and D = I by default.

        scales gives D as one number per parameter name; dtype asks for accumulation in that type. With
        other = the gradient rows this is the cross-Gram whose row sums give U g without forming g.
        """
        grams = self.layer_grams(other, scales, dtype)
        total = grams[0]
        for gram in grams[1:]:
            total = total.add_(gram)
        return total

    def layer_grams(
        self,
        other: Rows | None = None,
        scales: Mapping[str, Scalar] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """The terms of `gram`, one per layer."""
        other = self if other is None else other
        factor = self.scale * other.scale
        with full_precision():
            grams = []
            for name, form in self.forms.items():
                local = None if scales is None else {own: scales[full] for own, full in self._names[name].items()}
                gram = form.gram(other.forms[name], local, dtype)
                grams.append(gram if factor == 1.0 else gram.mul_(factor))
        return grams

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        """U v, (r,), for a vector given by parameter name (the paper's J theta_1)."""
        return torch.stack(self.layer_matvec(vector)).sum(0)

    def layer_matvec(self, vector: Mapping[str, Tensor]) -> list[Tensor]:
        """The terms of `matvec`, one per layer."""
        return [
            form.matvec({own: vector[full] for own, full in self._names[name].items()}) * self.scale
            for name, form in self.forms.items()
        ]

    def rmatvec(self, coefficients: Tensor) -> Vector:
        """U^T c for coefficients (r,), or (layers, r) to give each layer its own (the paper's J^T x)."""
        result: Vector = {}
        for index, (name, form) in enumerate(self.forms.items()):
            own = coefficients[index] if coefficients.dim() == 2 else coefficients
            for local, value in form.rmatvec(own).items():
                result[self._names[name][local]] = value * self.scale
        return {
            name: result[name] if name in result else torch.zeros_like(parameter)
            for name, parameter in self.plan.parameters.items()
        }

    def dense(self) -> Tensor:
        """U itself, (r, p), columns in the order of the model's trainable parameters."""
        columns: Vector = {}
        for name, form in self.forms.items():
            for local, value in form.dense().items():
                columns[self._names[name][local]] = value.reshape(self.count, -1) * self.scale
        return torch.cat(
            [
                columns[name] if name in columns else parameter.new_zeros(self.count, parameter.numel())
                for name, parameter in self.plan.parameters.items()
            ],
            dim=1,
        ).detach()

    @property
    def shape(self) -> tuple[int, int]:
        """(r, p)."""
        return self.count, sum(parameter.numel() for parameter in self.plan.parameters.values())


def factor_columns(
    rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor, curvature: str
) -> tuple[Tensor, Tensor | None]:
    """S_i^T as columns (n, k, C), and e (n, k) with S_i e_i = r_i where there is one.

    "gauss-newton": S_i S_i^T is the Hessian of the loss. "empirical": S_i = r_i and e_i = 1, so that
    U^T U is the empirical Fisher matrix of the paper.
    """
    if curvature == "gauss-newton":
        return rule.factor(loss, outputs, targets)
    residual = rule.residual(loss, outputs, targets)
    return residual.unsqueeze(1), torch.ones_like(residual[:, :1])


def rows(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    curvature: str = "gauss-newton",
    forward: Forward | None = None,
    fallback: str | None = None,
    max_bytes: int | None = None,
) -> Rows:
    """The rows U of a batch, for use without an optimizer (neural tangent kernels, Laplace, influence).

    Args:
        model: a module; only parameters with requires_grad count.
        loss: CrossEntropyLoss, BCEWithLogitsLoss, MSELoss or a registered loss, with mean reduction.
        inputs, targets: a batch of n samples.
        curvature: "gauss-newton" (k rows a sample, U^T U = (1/n) sum J^T H J) or "empirical" (one row a
            sample, U^T U = (1/n) sum of outer products of per-sample gradients).
        forward: f(model, inputs) in place of model(inputs).
        fallback: "autograd" computes rows no layer rule covers with torch.func, or by plain autograd.
        max_bytes: what temporaries of the Gram matrix may take, beside the rows and the matrix itself.
    """
    if curvature not in CURVATURES:
        raise ValueError(f"curvature must be one of {CURVATURES}, got {curvature!r}")
    rule = loss_rule(loss)
    plan = plan_layers(model, dict(model.named_parameters()), fallback, max_bytes=max_bytes)
    captured = capture(plan, model, forward or call_model, inputs, check_batch(inputs, targets))
    check_samples_apart(captured)
    outputs = captured.outputs.detach()
    columns, _ = factor_columns(rule, loss, outputs, rule.prepare(loss, captured.raw, targets), curvature)
    n, k, _ = columns.shape
    return Rows(plan, captured.rows([columns]), n * k, scale=n**-0.5)
