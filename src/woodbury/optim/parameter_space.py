"""The route to p through parameters: (B + lambda + W) p = lambda q - W theta - g, block by block.

Taken where U has more rows than columns: then the p x p system is the smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.blocks import Blocks
from woodbury.device.scalars import Scalar, Scale, Truth, compute, is_known
from woodbury.displacement import Displacement
from woodbury.linalg import (
    plus_diagonal,
    solve_cholesky,
    solve_factored,
    solve_in_parameter_space,
    sum_of_squares,
)
from woodbury.model.plan import Plan
from woodbury.optim.linearize import Linearization
from woodbury.optim.step import Answer, Problem, answer_of_vector
from woodbury.row_matrix import Rows


def is_smaller(plan: Plan, blocks: Blocks, row_count: int) -> bool:
    """Whether B, block by block, is smaller than the Gram matrix of so many factor rows."""
    return row_count > max(blocks.sizes(plan))


def answer_in_parameter_space(
    problem: Problem,
    line: Linearization,
    rows: Rows,
    blocks: Blocks,
    gram_dtype: torch.dtype | None,
    damping: Scalar,
    look: bool = False,
    factors: list[Tensor] | None = None,
    refine: bool = False,
) -> Answer:
    """p for this damping; q = mu p_prev, W the weight decay; look: at the condition of the system."""
    names = blocks.parameter_names(problem.plan)
    parameters, decays = problem.plan.parameters, problem.hyper.weight_decay
    matrices = curvature_matrices(line, rows, names, gram_dtype)
    like = next(iter(parameters.values())).detach()
    force: Vector = {}
    for name, value in line.all_of_gradient().items():
        force[name] = -value
        if decays[name]:
            force[name] = force[name] - decays[name] * parameters[name].detach()
        if problem.previous is not None:
            force[name] = force[name] + damping * problem.previous[name]
    vector: Vector = {}
    curvature: Scalar = 0.0
    usable: Truth = True
    condition = 1.0
    image: Tensor | None = None
    for block, matrix in zip(names, matrices, strict=True):
        own = {name: force[name] for name in block}
        shift = _shift(problem, block, matrix, damping)
        p, curved, solution = solve_in_parameter_space(matrix, shift, _vector.flatten(own), look, factors)
        if refine and factors and len(names) == 1:
            p, curved, image = _refined(line, rows, own, shift, p, factors[-1])
        condition = min(condition, solution.reciprocal_condition)
        vector |= _vector.unflatten(p.to(like.dtype), own)
        curvature, usable = curvature + curved, usable & solution.ok
    group = problem.passes.group
    displacement = Displacement(parameters, base={name: group.same(vector[name]) for name in parameters})
    answer = answer_of_vector(problem, displacement, damping, curvature, usable)
    return replace(answer, image=image, doubt=doubt_of_condition(condition, matrix.dtype) if look else None)


def _refined(
    line: Linearization, rows: Rows, force: Vector, shift: Scale, p: Tensor, factor: Tensor
) -> tuple[Tensor, Scalar, Tensor]:
    """p after one step of iterative refinement, p^T B p, and Z p.

    (B + shift) p = force, with the residual from U^T (U p) rather than from the rounded B: this wins back the
    digits that B loses at small damping (corrected semi-normal equations, Björck 1987).
    """

    dtype, m = next(iter(force.values())).dtype, line.curvature_rows
    image = rows.matvec(_vector.unflatten(p.to(dtype), force))
    image[m:] = 0  # the rows of samples outside S2
    curved = _vector.flatten(rows.rmatvec(image / line.divisor)).to(p.dtype)
    residual = _vector.flatten(force).to(p.dtype) - curved - shift * p
    p = p + solve_factored(factor, residual)
    image = rows.matvec(_vector.unflatten(p.to(dtype), force))
    return p, sum_of_squares(image[:m]) / line.divisor, image


def curvature_matrices(
    line: Linearization, rows: Rows, names: Sequence[tuple[str, ...]], gram_dtype: torch.dtype | None
) -> list[Tensor]:
    """B by block; another damping comes back with the same B."""
    if line.matrices is None:
        (divisor,) = compute(line.divisor)
        line.matrices = [matrix.div_(divisor) for matrix in rows.curvature(line.curvature_rows, names, gram_dtype)]
    return line.matrices


def _shift(problem: Problem, block: Sequence[str], matrix: Tensor, damping: Scalar) -> Scale:
    """lambda + W of a block: one number, or one per parameter."""
    decays, parameters = problem.hyper.weight_decay, problem.plan.parameters
    (shift,) = compute(damping)
    if any(decays[name] for name in block):
        return torch.cat([matrix.new_full((parameters[name].numel(),), decays[name]) for name in block]) + shift
    return shift


def pull_back_in_parameter_space(
    problem: Problem,
    line: Linearization,
    rows: Rows,
    blocks: Blocks,
    gram_dtype: torch.dtype | None,
    weights: Tensor,
    damping: Scalar,
    factors: Sequence[Tensor] | None = None,
    refine: bool = True,
) -> Vector:
    """(B + W + lambda I)^{-1} U^T w for w = weights / sqrt(D), with one weight per factor row."""
    names = blocks.parameter_names(problem.plan)
    matrices = curvature_matrices(line, rows, names, gram_dtype)
    padded = torch.cat([weights, weights.new_zeros(rows.row_count - line.curvature_rows)])
    force = rows.rmatvec(padded / line.divisor)
    vector: Vector = {}
    for index, (block, matrix) in enumerate(zip(names, matrices, strict=True)):
        own = {name: force[name] for name in block}
        flat = _vector.flatten(own).to(matrix.dtype)
        if factors:
            p = solve_factored(factors[index], flat)
            if refine and len(names) == 1:
                p = _refined(line, rows, own, _shift(problem, block, matrix, damping), p, factors[index])[0]
        else:
            p = solve_cholesky(plus_diagonal(matrix, _shift(problem, block, matrix, damping)), flat).x
        vector |= _vector.unflatten(p.to(padded.dtype), own)
    return {name: vector[name] for name in problem.plan.parameters}


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


def cancellation(
    problem: Problem, line: Linearization, base: Vector, answer: Answer, tolerance: float = 0.0
) -> str | None:
    """Why p = base - Z^T c cannot be trusted where g is not made of rows: too little is left by the subtraction.

    The error of p was measured at about 64 eps |base| / |p|, and at 20 tolerance |base| / |p| where the system is
    solved to a tolerance: this bound is 1 %.
    """
    if line.gradient is None or not is_known(answer.squared_norm):
        return None
    dtype = problem.plan.dtype
    least = max(6400 * torch.finfo(dtype).eps, 2000 * tolerance)
    if not answer.squared_norm < least**2 * float(_vector.dot(base, base)):
        return None  # or not a number: there is no p to trust
    return (
        "the gradient nearly lies in the rows of the batch, and at this damping p is a difference of numbers that "
        f"are equal in nearly all digits of {dtype}: it may be off by more than 1 %. A model in float64 or a "
        "larger damping avoids this"
    )
