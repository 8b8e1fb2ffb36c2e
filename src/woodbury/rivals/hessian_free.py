"""Hessian-free optimization: the damped Gauss-Newton system in parameter space, by conjugate gradients.

The rival the paper starts from (Martens 2010). Products with B = (1/N2) sum_{S2} J_i^T S_i S_i^T J_i come
from autograd, so any model will do; the system is solved until progress slows, starting from the last p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from woodbury import _vector
from woodbury.curvature import CURVATURES
from woodbury.displacement import Displacement
from woodbury.linalg import minimize_quadratic
from woodbury.optim.base import SecondOrder
from woodbury.optim.passes import Objective
from woodbury.optim.settings import Common, check_number, check_whole_number, refuse_fixed
from woodbury.optim.step import Problem, Proposal
from woodbury.products import FactorProducts


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

    curvature = CURVATURES["gauss-newton"]
    _by_layers = False
    _twice_differentiated = True
    _most_momentum = 1.0  # of the last p, as a place to start from

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
        self.max_iterations = max_iterations
        self.progress = progress
        refuse_fixed("HessianFree", common)
        # the base keeps the last p, times its momentum, for us
        super().__init__(model, loss, lr, blocks="full", momentum=warm_start, fallback="autograd", **common)

    @property
    def iterations(self) -> int:
        """Of CG in the last step."""
        return int(self.state.get("iterations", 0))

    def _propose(self, problem: Problem) -> Proposal:
        parameters = problem.plan.parameters
        objective = problem.passes.objective(problem.batch, problem.full)
        gradient = objective.gradient
        decays, damping = problem.hyper.weight_decay, float(problem.damping)
        linear = _vector.flatten(
            {name: gradient[name] + decays[name] * parameter.detach() for name, parameter in parameters.items()}
        )
        curvature = self._curvature_product(problem, objective)
        start = torch.zeros_like(linear) if problem.previous is None else _vector.flatten(problem.previous)
        minimum = minimize_quadratic(
            lambda x: _add_scaled(curvature(x), x, damping, decays, parameters),
            linear,
            start,
            progress=self.progress,
            max_iterations=self.max_iterations,
        )
        minimum = minimum._replace(x=problem.passes.group.same(minimum.x))
        squared = float(minimum.x @ minimum.x)
        return Proposal(
            displacement=Displacement(parameters, base=_vector.unflatten(minimum.x, parameters)),
            predicted=0.5 * problem.damping * squared - minimum.value,  # the model without its damping term
            squared_norm=squared,
            damping=problem.damping,
            usable=True,
            loss=objective.loss,
            parts=[piece.inputs for piece in objective.pieces],
            center=None,
            evaluate=objective.evaluate,
            memory={"iterations": minimum.iterations},
        )

    def _curvature_product(self, problem: Problem, objective: Objective) -> Callable[[Tensor], Tensor]:
        """x -> B x on flat vectors."""
        parameters, piece = problem.plan.parameters, objective.pieces[0]
        passes = problem.passes
        factor = self.curvature.factor(passes.rule, passes.loss, objective.outputs, piece.targets)
        samples = problem.batch.curvature
        divisor = passes.divisor(self.curvature, piece.term_count, samples, objective.samples)
        rows = FactorProducts(piece.capture.outputs, parameters, factor, [tuple(parameters)])

        def product(x: Tensor) -> Tensor:
            image = rows.matvec(_vector.unflatten(x, parameters)) / divisor  # S^T J x / D
            return passes.group.sum(_vector.flatten(rows.rmatvec(image)))

        return product


def _add_scaled(
    image: Tensor, x: Tensor, damping: float, decays: Mapping[str, float], parameters: Mapping[str, Tensor]
) -> Tensor:
    """image + (lambda + W) x on flat vectors, in place; W is the weight decay of each parameter."""
    image.add_(x, alpha=damping)
    if any(decays.values()):
        parts = _vector.unflatten(x, parameters)
        for name, part in _vector.unflatten(image, parameters).items():
            part.add_(parts[name], alpha=decays[name])
    return image
