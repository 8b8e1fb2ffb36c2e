"""Hessian-free optimization: the damped Gauss-Newton system in parameter space, by conjugate gradients.

The rival the paper starts from (Martens 2010). Products with B = (1/N2) sum_{S2} J_i^T S_i S_i^T J_i come
from autograd, so any model will do; the system is solved until progress slows, starting from the last p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from woodbury._choice import check_number, check_whole_number
from woodbury.curvature import CURVATURES
from woodbury.device.scalars import Scalar
from woodbury.linalg import minimize_quadratic
from woodbury.optim.optimizer import SecondOrder
from woodbury.optim.settings import Common, refuse_others
from woodbury.products import FactorProducts
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Damped, Minimizer, Quadratic, Solver


@dataclass(frozen=True)
class EarlyStopped(Solver):
    """Conjugate gradients in parameter space that end early, from the last p on."""

    name = "hessian-free"
    forms_rows = False
    has_trace = False
    max_iterations: int
    progress: float

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        return _EarlyStopped(quadratic, damping)


class _EarlyStopped(Damped):
    @property
    def center(self) -> None:
        """Zero: the last p is a place to start from."""
        return

    def minimizer(self) -> Minimizer:
        quadratic, damping = self.quadratic, float(self.damping)
        solver, rows = quadratic.solver, quadratic.rows
        assert isinstance(solver, EarlyStopped) and isinstance(rows, FactorProducts)
        linear = quadratic.slope()
        # the optimizer keeps the last p, times its momentum: a place to start from
        start = torch.zeros_like(linear.flat) if quadratic.center is None else quadratic.center.flat

        def product(x: Tensor) -> Tensor:
            p = linear.of(x)
            curvature = rows.rmatvec(rows.matvec(p) / quadratic.divisor)  # Z^T (Z p) / D
            image = quadratic.group.sum_vector(curvature).flat.add_(x, alpha=damping)
            return image if quadratic.decay is None else image.add_(quadratic.decay.times(p).flat)

        minimum = minimize_quadratic(
            product, linear.flat, start, progress=solver.progress, max_iterations=solver.max_iterations
        )
        p = linear.of(quadratic.group.same(minimum.x))
        squared = float(p.dot(p))
        return Minimizer(
            Displacement.of(quadratic.plan, p),
            predicted=0.5 * damping * squared - minimum.value,  # the model without its damping term
            squared_norm=squared,
            usable=True,
            gains={"iterations": minimum.iterations},
        )


class HessianFree(SecondOrder):
    """Hessian-free optimization (Martens 2010): p close to -(B + lambda I)^{-1} g, by CG that ends early.

    CG lowers phi(p) = p^T (B + lambda I) p / 2 + g . p from warm_start times the last p and stops by relative
    progress (see `woodbury.linalg.minimize_quadratic`). With progress=0 and enough iterations it is the step
    of `GaussNewton`.

    Args:
        model, loss, lr, damping, curvature_samples, weight_decay, accept, forward, seed, params:
            as for `GaussNewton`; the layers of the model may be of any kind. Steps are never recorded.
        warm_start: the part of the last p that CG starts from, 0 for none.
        max_iterations: of CG, each about the cost of two gradients over S2.
        progress: CG stops after iteration i when (phi_i - phi_{i-k}) / phi_i < k progress, k = max(10, i / 10).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None = None,
        lr: float = 1.0,  # alpha
        *,
        warm_start: float = 0.95,
        max_iterations: int = 250,
        progress: float = 5e-4,
        **common: Unpack[Common],
    ) -> None:
        check_number("warm_start", warm_start, most=1.0)
        check_whole_number("max_iterations", max_iterations, least=1)
        check_number("progress", progress)
        refuse_others("HessianFree", common)
        solver = EarlyStopped(max_iterations, progress)
        method = {"curvature": CURVATURES["gauss-newton"], "solver": solver, "most_momentum": 1.0}
        super().__init__(
            model, loss, lr, blocks="full", momentum=warm_start, fallback="autograd", method=method, **common
        )

    @property
    def iterations(self) -> int:
        """Of CG in the last step."""
        return int(self.state.get("iterations", 0))
