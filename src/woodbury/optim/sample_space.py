"""The route to p through samples, and the solvers of its small system.

With rows Z of the batch (factor rows of S2, then gradient rows of the samples outside it), U the factor
rows over sqrt(D) (D = N2 for a mean over samples; see `woodbury.curvature`), and g = U^T e + g_rest:

    (K + lambda I) a = e + U p0 - U g_rest / lambda          K = U U^T, small
    p = p0 - U^T a - g_rest / lambda                         U p = lambda a - e

which is p = -(U^T U + lambda I)^{-1} g for p0 = 0 (paper, equations (6) and (7), by the
Sherman-Morrison-Woodbury identity). Writing g through e instead of subtracting U^T K^{-1} U g from g keeps
float32 accurate at small damping. Momentum, weight decay and a gradient given from outside enter through p0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.blocks import Blocks
from woodbury.device.scalars import Scalar, Scale, compute, is_known, scalar
from woodbury.displacement import Displacement
from woodbury.linalg import (
    SampleSpaceStep,
    Solution,
    plus_diagonal,
    quadratic_form,
    quadratic_form_error,
    solve_cholesky,
    solve_conjugate_gradient,
    solve_factored,
    solve_in_sample_space,
    sum_of_squares,
)
from woodbury.optim.linearize import Linearization
from woodbury.optim.parameter_space import (
    answer_in_parameter_space,
    cancellation,
    curvature_matrices,
    doubt_of_condition,
    is_smaller,
    pull_back_in_parameter_space,
)
from woodbury.optim.step import Answer, Problem, answer_of_inexact, answer_of_vector
from woodbury.row_matrix import Rows


class System(NamedTuple):
    """What is asked of a solver beside the problem."""

    blocks: Blocks
    gram_dtype: torch.dtype | None
    tolerance: float | None  # relative residual of the iterative solvers; None: eps^(3/4)
    look: bool = False  # at the condition of the system, on the CPU
    factors: dict[Scalar, list[Tensor]] | None = None  # by lambda: Cholesky factors to keep for `pull_back`
    refine_below: float = 0.0  # dampings whose systems are refined

    def factors_at(self, damping: Scalar) -> list[Tensor] | None:
        """Where the Cholesky factors of this damping go, None if they are not kept."""
        return None if self.factors is None else self.factors.setdefault(damping, [])

    def refines(self, damping: Scalar) -> bool:
        """Whether the system of this damping is refined; without a search none is, and lambda is not looked at."""
        return self.refine_below > 0 and bool(damping < self.refine_below)

    def tolerance_in(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps ** 0.75 if self.tolerance is None else self.tolerance


class Solver(ABC):
    """A way to solve the system of a step."""

    name: ClassVar[str]
    forms_rows: ClassVar[bool] = True  # else it takes products alone, and needs no layer rules
    exact: ClassVar[bool] = False  # fails only where the matrix is not definite, and looks at no number meanwhile

    @abstractmethod
    def answer(self, problem: Problem, line: Linearization, system: System, damping: Scalar) -> Answer:
        """p for this damping."""

    def trace(self, problem: Problem, line: Linearization, system: System) -> Scalar:
        """The trace of K, which is that of B. What it needs is kept for the solves that follow."""
        assert isinstance(line.rows, Rows)
        m, gram = line.curvature_rows, gram_of(problem, line, line.rows, system, None)
        return scalar(gram.narrow(-1, 0, m).narrow(-2, 0, m).diagonal(dim1=-2, dim2=-1).sum()) / line.divisor

    def size(self, problem: Problem, system: System, row_count: int) -> int:
        """Rows of each matrix to be factored, or 0 for none, for so many factor rows."""
        return row_count + problem.batch.samples - problem.batch.curvature


class Cholesky(Solver):
    """Exact: in sample space, or in parameter space where there are more rows than parameters."""

    name = "cholesky"
    exact = True

    def answer(self, problem: Problem, line: Linearization, system: System, damping: Scalar) -> Answer:
        assert isinstance(line.rows, Rows)
        if is_smaller(problem.plan, system.blocks, line.curvature_rows):
            return answer_in_parameter_space(
                *(problem, line, line.rows, system.blocks, system.gram_dtype, damping, system.look),
                system.factors_at(damping),
                system.refines(damping),
            )
        return answer_in_sample_space(problem, line, line.rows, system, damping, self)

    def size(self, problem: Problem, system: System, row_count: int) -> int:
        if is_smaller(problem.plan, system.blocks, row_count):
            return max(system.blocks.sizes(problem.plan))
        return super().size(problem, system, row_count)

    def small_solver(self, system: System, damping: Scalar) -> Callable[[Tensor, Tensor], Solution]:
        if system.factors is not None:
            return partial(solve_cholesky, look=system.look, factors=system.factors_at(damping))
        return partial(solve_cholesky, look=True) if system.look else solve_cholesky

    def trace(self, problem: Problem, line: Linearization, system: System) -> Scalar:
        assert isinstance(line.rows, Rows)
        if is_smaller(problem.plan, system.blocks, line.curvature_rows):
            names = system.blocks.parameter_names(problem.plan)
            matrices = curvature_matrices(line, line.rows, names, system.gram_dtype)
            return scalar(torch.stack([matrix.diagonal().sum() for matrix in matrices]).sum())
        return super().trace(problem, line, system)

    def pull_back(
        self,
        problem: Problem,
        line: Linearization,
        system: System,
        weights: Tensor,
        damping: Scalar,
        refine: bool = True,
    ) -> Vector:
        """(B + W + lambda I)^{-1} U^T w for w = weights / sqrt(D), with one weight per factor row, (m,).

        refine: by one step where Cholesky factors were kept. Without it the matrix is symmetric to rounding.
        """
        rows = line.rows
        assert isinstance(rows, Rows)
        factors = system.factors_at(damping)
        if is_smaller(problem.plan, system.blocks, line.curvature_rows):
            return pull_back_in_parameter_space(
                *(problem, line, rows, system.blocks, system.gram_dtype, weights, damping), factors, refine
            )
        # s U^T (U s U^T + lambda I)^{-1} w with s = lambda / (lambda + W)
        m, scales = line.curvature_rows, metric_scales(problem, damping)
        gram = gram_of(problem, line, rows, system, scales)
        rhs = weights.to(gram.dtype).expand(*gram.shape[:-2], m)
        if factors:
            solution = solve_factored(factors[0], rhs)
            if refine and scales is None and gram.dim() == 2 and rows.row_count == m:
                residual = weights - _with_gram(line, rows, solution.to(weights.dtype), damping)
                solution = solution + solve_factored(factors[0], residual.to(gram.dtype))
        else:
            (shift,) = compute(damping * line.divisor)
            square = gram.narrow(-1, 0, m).narrow(-2, 0, m)
            solution = solve_cholesky(plus_diagonal(square, shift), rhs).x
        outside = solution.new_zeros(*solution.shape[:-1], rows.row_count - m)
        vector = rows.rmatvec(torch.cat([solution, outside], dim=-1).to(weights.dtype))
        return vector if scales is None else {name: value * scales[name] for name, value in vector.items()}


class ConjugateGradient(Solver):
    """Conjugate gradients with the explicit matrix."""

    name = "cg"

    def answer(self, problem: Problem, line: Linearization, system: System, damping: Scalar) -> Answer:
        assert isinstance(line.rows, Rows)
        return answer_in_sample_space(problem, line, line.rows, system, damping, self)

    def small_solver(self, system: System, damping: Scalar) -> Callable[[Tensor, Tensor], Solution]:
        def solve(matrix: Tensor, rhs: Tensor) -> Solution:
            tolerance, most = system.tolerance_in(rhs.dtype), 10 * rhs.shape[-1]
            product = partial(_matrix_product, matrix)
            return solve_conjugate_gradient(product, rhs, tolerance, most)

        return solve


def _matrix_product(matrix: Tensor, x: Tensor) -> Tensor:
    """A x, block by block."""
    return torch.matmul(matrix, x.unsqueeze(-1)).squeeze(-1)


def answer_in_sample_space(
    problem: Problem,
    line: Linearization,
    rows: Rows,
    system: System,
    damping: Scalar,
    solver: Cholesky | ConjugateGradient,
) -> Answer:
    """p for this damping, with its norm and predicted decrease.

    m(0) - m(p) = lambda |p|^2 + |U p|^2 / 2 for p0 = 0.
    """
    scales = metric_scales(problem, damping)
    base = base_point(problem, line, scales, damping)
    # p itself where all that is cheaper with it: then K is needed on the factor rows alone
    plain_chain = base is None and scales is None and problem.is_chain
    form = rows.joint or (plain_chain and rows.forming_pays(line.curvature_rows))
    gram = gram_of(problem, line, rows, system, scales, form)
    projected = None
    if base is not None:
        projected = system.blocks.join([own[: line.curvature_rows] for own in rows.layer_matvec(base)])
    step = solve_in_sample_space(
        gram,
        line.curvature_rows,
        line.divisor,
        line.term_count,
        line.e,
        projected,
        damping,
        rows.shared_out(solver.small_solver(system, damping)),
    )
    plain = base is None and gram.dim() == 2 and rows.row_count == line.curvature_rows
    if plain and system.refines(damping):
        return _refined(problem, line, rows, system, damping, step, gram)
    displacement = Displacement(problem.plan.parameters, rows, step.coefficients, base, scales, form)
    if not solver.exact:
        vector = displacement.dense()
        images = rows.layer_matvec(vector)
        slope = line.slope(vector, torch.stack(images).sum(0))
        curvature = sum_of_squares(system.blocks.join([own[: line.curvature_rows] for own in images]))
        answer = answer_of_inexact(problem, displacement, vector, slope, curvature / line.divisor, step.ok)
        return with_doubts_of_iteration(problem, line, system, answer, base, gram.dtype)
    if base is not None:
        answer = answer_of_vector(problem, displacement, damping, step.curvature, step.ok)
        doubt = doubt_of_condition(step.reciprocal_condition, gram.dtype) if system.look else None
        return replace(answer, doubt=cancellation(problem, line, base, answer) or doubt)
    squared = displacement.squared_norm() if form else scalar(quadratic_form(gram, step.coefficients))
    digits = 1e-6 if gram.dtype == torch.float64 else 0.05  # a bound, and in float32 forming p takes its time
    if not form and is_known(squared) and squared * digits < quadratic_form_error(gram, step.coefficients):
        # where rows nearly repeat each other, c is large and c^T Z Z^T c small; p itself keeps its digits
        squared = scalar(_vector.dot(vector := displacement.dense(), vector))
    doubt = doubt_of_condition(step.reciprocal_condition, gram.dtype) if system.look else None
    return Answer(displacement, damping * squared + 0.5 * step.curvature, squared, step.ok, doubt=doubt)


def _with_gram(line: Linearization, rows: Rows, c: Tensor, damping: Scalar) -> Tensor:
    """(Z Z^T + D lambda I) c by products with Z."""
    return rows.matvec(rows.rmatvec(c)) + (line.divisor * damping) * c


def _refined(
    problem: Problem,
    line: Linearization,
    rows: Rows,
    system: System,
    damping: Scalar,
    step: SampleSpaceStep,
    gram: Tensor,
) -> Answer:
    """The answer after one step of iterative refinement, for g = Z^T e / M.

    (Z Z^T + D lambda I) c = D e / M, with the residual from Z (Z^T c) rather than from the rounded Gram matrix:
    this wins back the digits that K loses at small damping (corrected semi-normal equations, Björck 1987).
    """
    factors = system.factors_at(damping)
    assert factors is not None
    c = step.coefficients.to(problem.plan.dtype)
    goal = line.factor_weights(c) * (line.divisor / line.term_count)
    residual = goal - _with_gram(line, rows, c, damping)
    c = c + solve_factored(factors[-1], residual.to(gram.dtype)).to(c.dtype)
    vector = {name: -value for name, value in rows.rmatvec(c).items()}
    displacement = Displacement(problem.plan.parameters, base=vector)
    image = rows.matvec(vector)
    answer = answer_of_vector(problem, displacement, damping, sum_of_squares(image) / line.divisor, step.ok)
    return replace(answer, image=image)


def gram_of(
    problem: Problem,
    line: Linearization,
    rows: Rows,
    system: System,
    scales: Mapping[str, Scale] | None,
    form: bool = False,
) -> Tensor:
    """Z D Z^T, or with `form` its first rows, for the scales D; another damping comes back with the same Z Z^T."""
    alike = scales is None or len(set(problem.hyper.weight_decay.values())) == 1
    if not alike:
        return system.blocks.gram(rows, scales, system.gram_dtype)
    if line.gram is None:
        if form:
            line.gram = rows.joined(system.blocks.join(rows.gram_head(line.curvature_rows, system.gram_dtype)))
        else:
            line.gram = system.blocks.gram(rows, None, system.gram_dtype)
    return line.gram if scales is None else line.gram * next(iter(scales.values()))


def with_doubts_of_iteration(
    problem: Problem, line: Linearization, system: System, answer: Answer, base: Vector | None, dtype: torch.dtype
) -> Answer:
    """The answer of conjugate gradients, with why it cannot be trusted if they stopped short."""
    tolerance = system.tolerance_in(dtype)
    if answer.usable is False:
        doubt: str | None = (
            f"conjugate gradients did not reach a relative residual of {tolerance:.2g}: the step is rejected. A "
            "larger solver_tolerance, a larger damping or solver='cholesky' avoids this"
        )
    else:
        doubt = None if base is None else cancellation(problem, line, base, answer, tolerance)
    return replace(answer, doubt=doubt)


def metric_scales(problem: Problem, damping: Scalar) -> dict[str, Scale] | None:
    """lambda / (lambda + weight decay) by parameter: the metric of the damped model relative to lambda I."""
    if not problem.hyper.any_decay:
        return None
    (known,) = compute(damping)
    return {name: known / (known + decay) for name, decay in problem.hyper.weight_decay.items()}


def base_point(
    problem: Problem, line: Linearization, scales: dict[str, Scale] | None, damping: Scalar
) -> Vector | None:
    """p0 = (lambda q - W theta - g') / (lambda + W): p without any row; None if zero.

    q = mu p_prev, W the weight decay, g' the part of the gradient that is not in the rows.
    """
    if scales is None and problem.previous is None and line.gradient is None:
        return None
    base = {}
    for name, parameter in problem.plan.parameters.items():
        force = torch.zeros_like(parameter) if line.gradient is None else line.gradient[name]
        if problem.hyper.weight_decay[name]:
            force = force + problem.hyper.weight_decay[name] * parameter.detach()
        value = -force / damping
        if problem.previous is not None:
            value = value + problem.previous[name]
        base[name] = value if scales is None else value * scales[name]
    return base
