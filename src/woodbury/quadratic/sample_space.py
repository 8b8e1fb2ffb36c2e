"""p through samples: the small system has one row per factor row.

With rows Z of the batch (factor rows of S2, then gradient rows of the samples outside it), U the factor
rows over sqrt(D) (D = N2 for a mean over samples; see `woodbury.curvature`), and g = U^T e + g_rest:

    (K + lambda I) a = e + U p0 - U g_rest / lambda          K = U U^T, small
    p = p0 - U^T a - g_rest / lambda                         U p = lambda a - e

which is p = -(U^T U + lambda I)^{-1} g for p0 = 0 (paper, equations (6) and (7), by the
Sherman-Morrison-Woodbury identity). Writing g through e instead of subtracting U^T K^{-1} U g from g keeps
float32 accurate at small damping. Momentum, weight decay and a gradient given from outside enter through p0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from woodbury import linalg
from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, Truth, compute, is_known, scalar
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Damped, Minimizer
from woodbury.row_matrix import SmallSolver


def solve_through_rows(
    damped: Damped, gram: Tensor, solve: SmallSolver, form: bool
) -> tuple[Displacement, linalg.SampleSpaceStep]:
    """p0 + D Z^T c with D = lambda / (lambda + W), formed unless both p0 and W are zero; and c."""
    quadratic, base, rows, projected = damped.quadratic, damped.base, damped.quadratic.all_rows, None
    if base is not None:
        projected = quadratic.blocks.join(rows.layer_matvec(base))
        if projected.shape[-1] > quadratic.curvature_rows:
            projected = projected[..., : quadratic.curvature_rows]
    step = linalg.solve_in_sample_space(
        gram,
        quadratic.curvature_rows,
        divisor=quadratic.divisor,
        term_count=quadratic.term_count,
        e=quadratic.e,
        projected_base=projected,
        damping=damped.damping,
        solve=rows.shared_out(solve),
    )
    if base is None and not rows.joint:
        return Displacement(quadratic.plan, rows, step.coefficients, form), step
    product = rows.rmatvec(step.coefficients)
    if quadratic.decay is not None:
        product = quadratic.decay.scaled(product, damped.damping)
    return Displacement.of(quadratic.plan, product if base is None else base + product), step


class InSampleSpace(Damped):
    """By a Cholesky factorisation of K + lambda I: exact."""

    _lower: Tensor | None = None  # L, (m, m), or (b, m, m) for b blocks
    _ok: Truth = True

    def minimizer(self) -> Minimizer:
        """m(0) - m(p) = lambda |p|^2 + |U p|^2 / 2 for p0 = 0."""
        quadratic, rows = self.quadratic, self.quadratic.all_rows
        if self.refine and self.base is None and quadratic.is_plain:  # all of -g is in the factor rows
            p = self.pull_back(quadratic.pull)
            image = quadratic.image(p)
            return minimizer_of(self, p, linalg.sum_of_squares(image) / quadratic.divisor, self._ok, image)
        # p itself where all that is cheaper with it: then K is needed on the factor rows alone
        plain_chain = self.base is None and quadratic.pieces[0].capture.chain is not None
        form = rows.joint or (plain_chain and rows.forming_pays(quadratic.curvature_rows))
        gram = quadratic.gram(self.damping, form)
        displacement, step = solve_through_rows(self, gram, self._factor_and_solve, form)
        if self.base is not None:
            return minimizer_of(self, displacement.dense(), step.curvature, step.ok)
        c = step.coefficients
        squared = displacement.squared_norm() if form else scalar(linalg.quadratic_form(gram, c))
        digits = 1e-6 if gram.dtype == torch.float64 else 0.05  # a bound, and in float32 forming p takes its time
        if not form and is_known(squared) and squared * digits < linalg.quadratic_form_error(gram, c):
            # where rows nearly repeat each other, c is large and c^T Z Z^T c small; p itself keeps its digits
            p = displacement.dense()
            squared = scalar(p.dot(p))
        return Minimizer(displacement, self.damping * squared + 0.5 * step.curvature, squared, step.ok)

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        cancels = doubt_of_cancellation(self, found)
        if cancels is not None or not look or self._lower is None:
            return cancels
        return doubt_of_condition(linalg.reciprocal_condition(self._lower), self._lower.dtype)

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        # s U^T (U s U^T + lambda I)^{-1} w with s = lambda / (lambda + W)
        quadratic, rows = self.quadratic, self.quadratic.all_rows
        if self._lower is None:
            (shift,) = compute(self.damping * quadratic.divisor)
            matrix = linalg.plus_diagonal(quadratic.factor_gram(self.damping), shift)
            self._lower, self._ok = linalg.factor_cholesky(matrix)
        c = self._solve(weights)
        if refine and quadratic.is_plain:  # all of p is Z^T c
            # One step of iterative refinement with the residual from Z (Z^T c), not from the rounded Gram matrix:
            # this wins back the digits that K loses at small damping (semi-normal equations, Björck 1987).
            shift = float(self.damping * quadratic.divisor)
            product = torch.add(rows.matvec(rows.rmatvec(c)), c, alpha=shift)
            c = c + self._solve(weights - product)
        p = quadratic.combine_factor_rows(c)
        return p if quadratic.decay is None else quadratic.decay.scaled(p, self.damping)

    def _factor_and_solve(self, matrix: Tensor, rhs: Tensor) -> linalg.Solution:
        self._lower, self._ok = linalg.factor_cholesky(matrix)
        return linalg.Solution(linalg.solve_factored(self._lower, rhs), self._ok)

    def _solve(self, weights: Tensor) -> Tensor:
        """c with (Z Z^T + D lambda I) c = weights (m,), in the type of the weights; (b, m) for b blocks."""
        assert self._lower is not None
        rhs = weights.to(self._lower.dtype)
        rhs = rhs.expand(self._lower.shape[:-1]) if self._lower.dim() == 3 else rhs
        return linalg.solve_factored(self._lower, rhs).to(weights.dtype)


def minimizer_of(
    damped: Damped, p: Vector, curvature: Scalar, usable: Truth, image: Tensor | None = None
) -> Minimizer:
    """A p that solves its system, with curvature = p^T B p; image: Z p.

    m(0) - m(p) = lambda p . (p - q) + p^T (B + W) p / 2
    """
    quadratic = damped.quadratic
    squared = pull = scalar(p.dot(p))
    if quadratic.center is not None:
        pull = pull - scalar(p.dot(quadratic.center))
    if quadratic.decay is not None:
        curvature = curvature + quadratic.decay.curvature(p)
    predicted = damped.damping * pull + 0.5 * curvature
    return Minimizer(Displacement.of(quadratic.plan, p), predicted, squared, usable, image=image)


def doubt_of_condition(reciprocal_condition: float, dtype: torch.dtype) -> str | None:
    """Why the solution of a system with this lmin / lmax, or less, cannot be trusted in this type, if so.

    The error of p was measured at 0.5 eps lmax / lmin where rows repeat each other: this bound is 3 %.
    """
    if not reciprocal_condition < 16 * torch.finfo(dtype).eps:
        return None  # or not a number: there is no solution to trust
    instead = "" if dtype == torch.float64 else "gram_dtype=torch.float64 or "
    return (
        f"the system of the step is nearly singular in {dtype} (lmin / lmax <= {reciprocal_condition:.1g}): p may "
        f"be off by some percent or more. {instead}a larger damping avoids this"
    )


def doubt_of_cancellation(damped: Damped, found: Minimizer, tolerance: float = 0.0) -> str | None:
    """Why p = p0 + Z^T c cannot be trusted where g is not made of rows: too little is left of the two.

    The error of p was measured at about 64 eps |p0| / |p|, and at 20 tolerance |p0| / |p| where the system is
    solved to a tolerance: this bound is 1 %.
    """
    base = damped.base
    if base is None or damped.quadratic.gradient is None or not is_known(found.squared_norm):
        return None
    dtype = base.flat.dtype
    least = max(6400 * torch.finfo(dtype).eps, 2000 * tolerance)
    if not found.squared_norm < least**2 * float(scalar(base.dot(base))):
        return None  # or not a number: there is no p to trust
    return (
        "the gradient nearly lies in the rows of the batch, and at this damping p is a difference of numbers that "
        f"are equal in nearly all digits of {dtype}: it may be off by more than 1 %. A model in float64 or a "
        "larger damping avoids this"
    )
