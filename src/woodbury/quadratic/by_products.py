"""p through products alone: the system in sample space by CG with Z and Z^T, no row in memory."""

from __future__ import annotations

from torch import Tensor

from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, scalar
from woodbury.linalg import solve_conjugate_gradient
from woodbury.model.plan import Plan
from woodbury.products import FactorProducts
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Blocks, Damped, Minimizer, Quadratic, Solver
from woodbury.quadratic.sample_space import doubt_of_iteration, tolerance_in


class ByProducts(Damped):
    """Conjugate gradients through U and U^T by autograd: neither rows nor a Gram matrix in memory."""

    @property
    def _rows(self) -> FactorProducts:
        assert isinstance(self.quadratic.rows, FactorProducts)
        return self.quadratic.rows

    @property
    def _tolerance(self) -> float:
        return tolerance_in(self.quadratic.plan.dtype, self.quadratic.solver.tolerance)

    def minimizer(self) -> Minimizer:
        """CG with products Z (D Z^T x); the system is that of `woodbury.linalg.solve_in_sample_space`."""
        quadratic, rows, base = self.quadratic, self._rows, self.base
        shift = quadratic.divisor * self.damping
        rhs = -quadratic.pull.expand(len(rows.blocks), -1)
        rhs = rhs if base is None else rhs + rows.matvec(base)
        solution = solve_conjugate_gradient(
            lambda x: rows.matvec(self._transposed(x)) + shift * x,
            rhs,
            self._tolerance,
            max_iterations=10 * quadratic.curvature_rows,
        )
        change = self._transposed(solution.x)
        p = -change if base is None else base - change
        predicted = quadratic.predicted(p, rows.matvec(p))
        displacement = Displacement.of(quadratic.plan, p)
        return Minimizer(displacement, predicted, scalar(p.dot(p)), solution.ok)

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        return doubt_of_iteration(self, found, self._tolerance)

    def _transposed(self, x: Tensor) -> Vector:
        """D Z^T x with D = lambda / (lambda + W)."""
        vector, decay = self.quadratic.space.pack(self._rows.rmatvec(x)), self.quadratic.decay
        return vector if decay is None else decay.scaled(vector, self.damping)


class Products(Solver):
    """Conjugate gradients through U and U^T by autograd."""

    name = "products"
    forms_rows = False
    has_trace = False
    takes_processes = False

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        return ByProducts(quadratic, damping)

    def size(self, plan: Plan, blocks: Blocks, row_count: int, others: int) -> int:
        return 0
