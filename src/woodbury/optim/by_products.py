"""The route to p through products alone: the system in sample space by CG with Z and Z^T, no row in memory."""

from __future__ import annotations

from torch import Tensor

from woodbury._vector import Vector
from woodbury.device.scalars import Scalar
from woodbury.displacement import Displacement
from woodbury.linalg import solve_conjugate_gradient, sum_of_squares
from woodbury.optim.linearize import Linearization
from woodbury.optim.sample_space import Solver, System, base_point, metric_scales, with_doubts_of_iteration
from woodbury.optim.step import Answer, Problem, answer_of_inexact
from woodbury.products import FactorProducts


class Products(Solver):
    """Conjugate gradients through U and U^T by autograd: neither rows nor a Gram matrix in memory."""

    name = "products"
    forms_rows = False

    def answer(self, problem: Problem, line: Linearization, system: System, damping: Scalar) -> Answer:
        """CG with products Z (D Z^T x); the system is that of `woodbury.linalg.solve_in_sample_space`."""
        rows = line.rows
        assert isinstance(rows, FactorProducts)
        scales = metric_scales(problem, damping)
        base = base_point(problem, line, scales, damping)
        like = next(iter(problem.plan.parameters.values())).detach()
        e = line.factor_weights(like) * (line.divisor / line.term_count)
        shift = line.divisor * damping

        def transposed(x: Tensor) -> Vector:
            vector = rows.rmatvec(x)
            return vector if scales is None else {name: value * scales[name] for name, value in vector.items()}

        rhs = e.expand(len(rows.blocks), -1) if base is None else e + rows.matvec(base)
        solution = solve_conjugate_gradient(
            lambda x: rows.matvec(transposed(x)) + shift * x,
            rhs,
            system.tolerance_in(rhs.dtype),
            max_iterations=10 * line.curvature_rows,
        )
        change = transposed(solution.x)
        vector = {name: -value if base is None else base[name] - value for name, value in change.items()}
        displacement = Displacement(problem.plan.parameters, base=vector)
        images = rows.matvec(vector)
        slope, curvature = line.slope(vector, images.sum(0)), sum_of_squares(images) / line.divisor
        answer = answer_of_inexact(problem, displacement, vector, slope, curvature, solution.ok)
        return with_doubts_of_iteration(problem, line, system, answer, base, rhs.dtype)

    def size(self, problem: Problem, system: System, row_count: int) -> int:
        return 0
