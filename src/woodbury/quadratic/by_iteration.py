"""p by conjugate gradients in sample space: with the explicit matrix, or by products, no row in memory."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, Truth, scalar
from woodbury.linalg import Solution, solve_conjugate_gradient
from woodbury.model.plan import Plan
from woodbury.products import FactorProducts
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Blocks, Damped, Minimizer, Quadratic, Solver
from woodbury.quadratic.sample_space import doubt_of_cancellation, solve_through_rows


class _ByIteration(Damped):
    """Solved up to a relative residual, eps^(3/4) unless it is given."""

    def __init__(self, quadratic: Quadratic, damping: Scalar, dtype: torch.dtype) -> None:
        super().__init__(quadratic, damping)
        given = quadratic.solver.tolerance
        self._tolerance = torch.finfo(dtype).eps ** 0.75 if given is None else given

    def minimizer(self) -> Minimizer:
        displacement, images, ok = self._solve()
        p = displacement.dense()
        return Minimizer(displacement, self.quadratic.predicted(p, images), scalar(p.dot(p)), ok)

    @abstractmethod
    def _solve(self) -> tuple[Displacement, Tensor, Truth]:
        """p, Z p of each block, and whether the tolerance was reached."""

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        if found.usable is not False:
            return doubt_of_cancellation(self, found, self._tolerance)
        return (
            f"conjugate gradients did not reach a relative residual of {self._tolerance:.2g}: the step is "
            "rejected. A larger solver_tolerance, a larger damping or solver='cholesky' avoids this"
        )


class WithMatrix(_ByIteration):
    """Conjugate gradients with K + lambda I."""

    def _solve(self) -> tuple[Displacement, Tensor, Truth]:
        quadratic, rows = self.quadratic, self.quadratic.all_rows
        gram = quadratic.gram(self.damping, rows.joint)
        displacement, step = solve_through_rows(self, gram, self._solve_system, rows.joint)
        return displacement, quadratic.blocks.join(rows.layer_matvec(displacement.dense())), step.ok

    def _solve_system(self, matrix: Tensor, rhs: Tensor) -> Solution:
        def product(x: Tensor) -> Tensor:
            return torch.matmul(matrix, x.unsqueeze(-1)).squeeze(-1)  # block by block

        return solve_conjugate_gradient(product, rhs, self._tolerance, 10 * rhs.shape[-1])


class WithProducts(_ByIteration):
    """Conjugate gradients with x -> Z (D Z^T x) + lambda x: neither rows nor a Gram matrix in memory."""

    @property
    def _rows(self) -> FactorProducts:
        assert isinstance(self.quadratic.rows, FactorProducts)
        return self.quadratic.rows

    def _solve(self) -> tuple[Displacement, Tensor, Truth]:
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
        return Displacement.of(quadratic.plan, p), rows.matvec(p), solution.ok

    def _transposed(self, x: Tensor) -> Vector:
        """D Z^T x with D = lambda / (lambda + W)."""
        vector, decay = self._rows.rmatvec(x), self.quadratic.decay
        return vector if decay is None else decay.scaled(vector, self.damping)


class ConjugateGradient(Solver):
    """Conjugate gradients with the explicit matrix."""

    name = "cg"

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        return WithMatrix(quadratic, damping, quadratic.gram_dtype or quadratic.plan.dtype)


class Products(Solver):
    """Conjugate gradients through U and U^T by autograd."""

    name = "products"
    forms_rows = False
    has_trace = False
    takes_processes = False

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        return WithProducts(quadratic, damping, quadratic.plan.dtype)

    def size(self, plan: Plan, blocks: Blocks, row_count: int, others: int) -> int:
        return 0
