"""The route to p through parameters: (B + lambda + W) p = lambda q - W theta - g, block by block.

Taken where U has more rows than columns: then the p x p system is the smaller one.
"""

from __future__ import annotations

import torch

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.blocks import Blocks
from woodbury.device.scalars import Scalar, Truth, compute
from woodbury.displacement import Displacement
from woodbury.linalg import solve_in_parameter_space
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
) -> Answer:
    """p for this damping; q = mu p_prev, W the weight decay."""
    names = blocks.parameter_names(problem.plan)
    parameters, decays = problem.plan.parameters, problem.hyper.weight_decay
    if line.matrices is None:  # a raised damping comes back with the same B
        (divisor,) = compute(line.divisor)
        line.matrices = [matrix.div_(divisor) for matrix in rows.curvature(line.curvature_rows, names, gram_dtype)]
    like = next(iter(parameters.values())).detach()
    inside = line.factor_weights(like)
    weights = torch.cat([inside, inside.new_ones(rows.row_count - line.curvature_rows)]) / line.term_count
    force: Vector = {}
    for name, value in rows.rmatvec(weights).items():
        force[name] = -value if line.gradient is None else -value - line.gradient[name]
        if decays[name]:
            force[name] = force[name] - decays[name] * parameters[name].detach()
        if problem.previous is not None:
            force[name] = force[name] + damping * problem.previous[name]
    vector: Vector = {}
    curvature: Scalar = 0.0
    usable: Truth = True
    for block, matrix in zip(names, line.matrices, strict=True):
        own = {name: force[name] for name in block}
        (shift,) = compute(damping)
        if any(decays[name] for name in block):
            shift = torch.cat([matrix.new_full((own[name].numel(),), decays[name]) for name in block]) + shift
        p, curved, solution = solve_in_parameter_space(matrix, shift, _vector.flatten(own))
        vector |= _vector.unflatten(p.to(like.dtype), own)
        curvature, usable = curvature + curved, usable & solution.ok
    displacement = Displacement(parameters, base={name: vector[name] for name in parameters})
    return answer_of_vector(problem, displacement, damping, curvature, usable)
