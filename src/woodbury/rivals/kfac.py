"""KFAC: natural gradient with one Kronecker product per layer in place of its block of curvature.

The rival the paper compares with (Martens & Grosse 2015), as the paper used it: block diagonal, without
re-scaling and without momentum. For a layer z = W v + b with a = (v, 1) and back-propagated factor columns h,

    B_l = (1/N2) sum_{S2} a_i a_i^T (x) sum_k h_ik h_ik^T      the exact block (row-major W)
    B_l ~ A (x) G,   A = mean a_i a_i^T,   G = mean sum_k h_ik h_ik^T

which is exact for one sample, and where h is the same for all samples (a linear network with squared error).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from woodbury import _vector
from woodbury._vector import Vector
from woodbury.curvature import CURVATURES
from woodbury.device.constants import identity
from woodbury.device.scalars import Scalar, as_double, root, scalar, truth
from woodbury.displacement import Displacement
from woodbury.layers.forms import RowForm
from woodbury.linalg import full_precision
from woodbury.optim.base import SecondOrder
from woodbury.optim.settings import BELOW_ONE, Common, check_number, check_whole_number, refuse_fixed
from woodbury.optim.step import Problem, Proposal

_FIRST_STEPS = 3  # the averages change fast at first: inverses are taken at each of these steps


Inverses = dict[str, Tensor]  # of the damped factors, under "inputs" and "grads", and what was added to each


class Factors(NamedTuple):
    """The two sides of a layer's Kronecker product."""

    inputs: Tensor  # A (i + 1, i + 1)
    grads: Tensor  # G (o, o)


class KFAC(SecondOrder):
    """KFAC (Martens & Grosse 2015): p = -(G + sqrt(lambda) / pi I)^{-1} g (A + pi sqrt(lambda) I)^{-1} by layer.

    A and G are running averages over the steps, pi = sqrt(mean eigenvalue of A / mean eigenvalue of G): the
    factored Tikhonov damping of Martens & Grosse, section 6.3. G holds the loss Hessian's own factor, which is
    the expectation over labels drawn from the model, taken exactly. The model behind rho, and with it lambda, is
    KFAC's own: m(0) - m(p) = -g . p - p^T (A (x) G) p / 2 with the A and G that were inverted. `verify` tells how
    far p is from solving the exact block-diagonal system: it is not small. Layers must be Linear, on one vector
    per sample. Steps are never recorded.

    Args:
        model, loss, lr, damping, curvature_samples, weight_decay, accept, forward, seed, params:
            as for `GaussNewton`. With weight decay, lambda above is lambda + the layer's largest weight decay.
        refresh: the inverses are computed at every so many steps (and at the first three).
        decay: of the running averages of A and G: step t (from 1) uses the weight min(1 - 1/t, decay).
    """

    curvature = CURVATURES["gauss-newton"]

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None = None,
        lr: float = 1.0,  # alpha
        *,
        refresh: int = 1,  # T3
        decay: float = 0.95,  # epsilon
        **common: Unpack[Common],
    ) -> None:
        refuse_fixed("KFAC", common)
        check_whole_number("refresh", refresh, least=1)
        check_number("decay", decay, most=BELOW_ONE)
        self.refresh = refresh
        self.decay = decay
        super().__init__(model, loss, lr, blocks="layer", momentum=0.0, fallback=None, **common)

    def _propose(self, problem: Problem) -> Proposal:
        passes, group = problem.passes, problem.passes.group
        objective = passes.objective(problem.batch, problem.full)
        piece, outputs = objective.pieces[0], objective.outputs
        samples = problem.batch.curvature
        with group.together():
            factor = self.curvature.factor(passes.rule, passes.loss, outputs, piece.targets)
            forms = piece.capture.rows([factor.columns()])
            sides = {name: self._sides(name, form) for name, form in forms.items()}
        divisor = passes.divisor(self.curvature, piece.term_count, samples, objective.samples)
        with full_precision():
            fresh = {name: kronecker_factors(*own, divisor) for name, own in sides.items()}
            if group.size > 1:
                share = passes.share_of(samples)
                fresh = {name: Factors(group.sum(share * a), group.sum(g)) for name, (a, g) in fresh.items()}
            memory, inverses, usable = self._updated(problem, fresh, torch.isfinite(as_double(objective.loss)))
            vector, predicted = self._solve(problem, forms, objective.gradient, inverses)
            vector = {name: group.same(value) for name, value in vector.items()}
        return Proposal(
            displacement=Displacement(problem.plan.parameters, base=vector),
            predicted=predicted,
            squared_norm=scalar(_vector.dot(vector, vector)),
            damping=problem.damping,
            usable=truth(usable),
            loss=objective.loss,
            parts=[piece.inputs for piece in objective.pieces],
            center=None,
            evaluate=objective.evaluate,
            memory=memory,
        )

    def _updated(
        self, problem: Problem, fresh: Mapping[str, Factors], good: Tensor
    ) -> tuple[dict[str, Any], dict[str, Inverses], Tensor]:
        """What the state gains by this batch, the inverses to use, and whether they can be.

        A batch whose loss or factors are not finite leaves the averages alone. Inverses that could not be
        computed are zero, so that a device that cannot tell yet takes no step by them; they are not kept.
        """
        for factors in fresh.values():
            # |A_ij| <= sqrt(A_ii A_jj): a finite diagonal is enough
            good = good & torch.isfinite(factors.inputs.trace() + factors.grads.trace())
        known = truth(good)  # a tensor where asking would wait
        step = self.state.get("factor_steps", 0) + (1 if known is not False else 0)
        weight = min(1 - 1 / max(step, 1), self.decay)
        averages: dict[str, dict[str, Tensor]] = dict(self.state.get("averages", {}))
        stored: dict[str, Inverses] = dict(self.state.get("inverses", {}))
        due = step <= _FIRST_STEPS or step % self.refresh == 0
        used: dict[str, Inverses] = {}
        usable = good
        for name, new in fresh.items():
            old = averages.get(name, {})
            if old and not _same_shapes(old, new):  # a parameter was frozen or thawed since
                old = {}
                stored.pop(name, None)
            factors = Factors(*(_mixed(old.get(side), x, weight, good) for side, x in new._asdict().items()))
            averages[name] = factors._asdict()
            if name in stored and not due:
                used[name] = stored[name] = {key: value.to(new.inputs) for key, value in stored[name].items()}
                continue
            used[name], ok = damped_inverses(factors, problem.damping + _decay_of(problem, name))
            usable = usable & ok
            if truth(ok) is False:
                stored.pop(name, None)
            else:
                stored[name] = used[name]
        memory = {"factor_steps": step, "averages": averages, "inverses": stored}
        return memory if known is not False else {}, used, usable

    def _solve(
        self,
        problem: Problem,
        forms: Mapping[str, RowForm],
        gradient: Vector,
        inverses: Mapping[str, Inverses],
    ) -> tuple[Vector, Scalar]:
        """p and m(0) - m(p)."""
        hyper, parameters = problem.hyper, problem.plan.parameters
        vector = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        predicted: Scalar = 0.0
        for name, form in forms.items():
            own = [problem.plan.layer_named[name].parameters[local] for local in form.parameters]  # W, b
            sides = []
            for parameter in own:
                side, decay = gradient[parameter], hyper.weight_decay[parameter]
                side = side + decay * parameters[parameter].detach() if decay else side
                sides.append(side.unsqueeze(1) if side.dim() == 1 else side)
            matrix = sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)  # (o, i + 1)
            step, decrease = kronecker_step(matrix, inverses[name])
            predicted = predicted + scalar(decrease)
            for parameter, part in zip(own, step.split([side.shape[1] for side in sides], dim=1), strict=True):
                vector[parameter] = part.reshape(parameters[parameter].shape)
                if hyper.weight_decay[parameter]:
                    square = part.square().sum()
                    predicted = predicted - 0.5 * hyper.weight_decay[parameter] * scalar(square)
        return vector, predicted

    def _sides(self, name: str, form: RowForm) -> tuple[Tensor, Tensor]:
        sides = form.kronecker_sides()
        if sides is None:
            place = " on several positions of a sample" if form.has_positions else ""
            raise ValueError(
                f"KFAC covers Linear layers on one vector per sample only and {name!r} is a "
                f"{type(self.model.get_submodule(name)).__name__}{place}; GaussNewton and NaturalGradient take it"
            )
        return sides


def kronecker_factors(inputs: Tensor, grads: Tensor, divisor: Scalar) -> Factors:
    """A = (1/n) sum a_i a_i^T and G = (1/D) sum_i sum_k h_ik h_ik^T for inputs a = (v, 1) and grads h of a layer.

    D is what the mean loss divides by: n, or fewer where targets are ignored, whose h are zero.
    """
    return Factors(inputs.t() @ inputs / len(inputs), grads.t() @ grads / divisor)


def damped_inverses(factors: Factors, damping: Scalar) -> tuple[Inverses, Tensor]:
    """(A + a I)^{-1} and (G + b I)^{-1} with a = pi sqrt(lambda) and b = sqrt(lambda) / pi, and a and b.

    pi = sqrt(mean eigenvalue of A / mean eigenvalue of G), 1 where either is zero. Also whether both could be
    computed: an inverse that could not is zero.
    """
    means = [matrix.diagonal().mean() for matrix in factors]
    ratio = means[0] / means[1]
    pi = torch.where((ratio > 0) & torch.isfinite(ratio), ratio, 1.0).sqrt()
    result: Inverses = {}
    ok = torch.ones((), dtype=torch.bool, device=pi.device)
    for (side, matrix), factor in zip(factors._asdict().items(), (pi, 1 / pi), strict=True):
        shift = factor * root(damping)
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        lower, info = torch.linalg.cholesky_ex(damped)
        done = info == 0
        # cholesky_inverse raises on a factor that was left unfinished
        inverse = torch.cholesky_inverse(
            _where(done, lower, partial(identity, len(lower), lower.dtype, lower.device))
        )
        result[side] = _where(done, inverse, partial(torch.zeros_like, inverse))
        result[f"{side}_shift"] = shift
        ok = ok & done
    return result, ok


def kronecker_step(gradient: Tensor, inverses: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """P = -(G + b I)^{-1} M (A + a I)^{-1} for a gradient M (o, i), and -<M, P> - <G P A, P> / 2.

    A and G are not needed for the second: with X = (G + b I)^{-1} M and Y = M (A + a I)^{-1},
    G P A = -M + a Y + b X + a b P.
    """
    left, right, a, b = (inverses[key] for key in ("grads", "inputs", "inputs_shift", "grads_shift"))
    y = gradient @ right
    step = -(left @ y)
    image = (left @ gradient).mul_(b).add_(a * y).add_(a * b * step).sub_(gradient)
    return step, -(gradient * step).sum() - 0.5 * (image * step).sum()


def _mixed(old: Tensor | None, new: Tensor, weight: float, good: Tensor) -> Tensor:
    """weight old + (1 - weight) new; old alone (zero where there is none) if the batch was not good."""
    if old is None:
        return _where(good, new, partial(torch.zeros_like, new))
    old = old.to(new)
    return _where(good, torch.lerp(new, old, weight), lambda: old)


def _where(condition: Tensor, value: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """value where the condition holds; on the CPU no pass over it is made to see that."""
    return value if truth(condition) is True else torch.where(condition, value, otherwise())


def _same_shapes(old: Mapping[str, Tensor], new: Factors) -> bool:
    return all(old[side].shape == matrix.shape for side, matrix in new._asdict().items())


def _decay_of(problem: Problem, layer: str) -> float:
    """The largest weight decay among a layer's parameters: one lambda serves the whole Kronecker product."""
    own = next(entry for entry in problem.plan.layers if entry.name == layer)
    return max(problem.hyper.weight_decay[name] for name in own.parameters.values())
