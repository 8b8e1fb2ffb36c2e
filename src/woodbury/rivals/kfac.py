"""KFAC: natural gradient with one Kronecker product per layer in place of its block of curvature.

The rival the paper compares with (Martens & Grosse 2015), as the paper used it: block diagonal, without
re-scaling and without momentum. For a layer z = W v + b with a = (v, 1) and back-propagated factor columns h,

    B_l = (1/N2) sum_{S2} a_i a_i^T (x) sum_k h_ik h_ik^T      the exact block (row-major W)
    B_l ~ A (x) G,   A = mean a_i a_i^T,   G = mean sum_k h_ik h_ik^T

which is exact for one sample, and where h is the same for all samples (a linear network with squared error).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from woodbury._choice import BELOW_ONE, check_number, check_whole_number
from woodbury._vector import Parts, Vector
from woodbury.curvature import CURVATURES
from woodbury.device.constants import identity
from woodbury.device.scalars import Scalar, as_double, root, scalar, truth
from woodbury.layers.forms import RowForm
from woodbury.linalg import full_precision, plus_diagonal
from woodbury.optim.optimizer import SecondOrder
from woodbury.optim.settings import Common, refuse_others
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Damped, Minimizer, Quadratic, Solver

_FIRST_STEPS = 3  # the averages change fast at first: inverses are taken at each of these steps


# the two sides of a layer's Kronecker product: "inputs", A (i + 1, i + 1), and "grads", G (o, o)
Factors = dict[str, Tensor]
Inverses = dict[str, Tensor]  # of the damped factors, under the same names, and what was added to each


@dataclass(frozen=True)
class Kronecker(Solver):
    """One Kronecker product per layer in place of its block of B."""

    name = "kfac"
    has_trace = False
    keeps_state = True
    refresh: int
    decay: float

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        return _Kronecker(quadratic, damping)


class _Kronecker(Damped):
    def minimizer(self) -> Minimizer:
        quadratic, group = self.quadratic, self.quadratic.group
        forms = quadratic.all_rows.head_forms(quadratic.curvature_rows)
        with group.together():
            sides = {name: self._sides(name, form) for name, form in forms.items()}
        with full_precision():
            # h is zero where targets are ignored: D, and not n, is what the mean loss divides by
            fresh = {
                name: {"inputs": a.t() @ a / len(a), "grads": h.t() @ h / quadratic.divisor}
                for name, (a, h) in sides.items()
            }
            if group.size > 1:
                share = quadratic.passes.share_of(quadratic.batch.curvature)
                fresh = {
                    name: {"inputs": group.sum(share * factors["inputs"]), "grads": group.sum(factors["grads"])}
                    for name, factors in fresh.items()
                }
            good = torch.isfinite(as_double(quadratic.loss))
            gains, inverses, usable = self._updated(fresh, good)
            p, predicted = self._solve(forms, inverses)
        p = p.of(group.same(p.flat))
        displacement = Displacement.of(quadratic.plan, p)
        return Minimizer(displacement, predicted, scalar(p.dot(p)), truth(usable), gains=gains)

    def _updated(
        self, fresh: Mapping[str, Factors], good: Tensor
    ) -> tuple[dict[str, Any], dict[str, Inverses], Tensor]:
        """What the state gains by this batch, the inverses to use, and whether they can be.

        A batch whose loss or factors are not finite leaves the averages alone. Inverses that could not be
        computed are zero, so that a device that cannot tell yet takes no step by them; they are not kept.
        """
        for factors in fresh.values():
            # |A_ij| <= sqrt(A_ii A_jj): a finite diagonal is enough
            good = good & torch.isfinite(factors["inputs"].trace() + factors["grads"].trace())
        state, solver = self.quadratic.state, self.quadratic.solver
        assert isinstance(solver, Kronecker)
        known = truth(good)  # a tensor where asking would wait
        step = state.get("factor_steps", 0) + (1 if known is not False else 0)
        weight = min(1 - 1 / max(step, 1), solver.decay)
        averages: dict[str, dict[str, Tensor]] = dict(state.get("averages", {}))
        stored: dict[str, Inverses] = dict(state.get("inverses", {}))
        due = step <= _FIRST_STEPS or step % solver.refresh == 0
        used: dict[str, Inverses] = {}
        usable = good
        for name, new in fresh.items():
            old = averages.get(name, {})
            if old and any(old[side].shape != new[side].shape for side in new):  # one was frozen or thawed
                old = {}
                stored.pop(name, None)
            averages[name] = {side: _mixed(old.get(side), matrix, weight, good) for side, matrix in new.items()}
            if name in stored and not due:
                used[name] = stored[name] = {key: value.to(new["inputs"]) for key, value in stored[name].items()}
                continue
            used[name], ok = damped_inverses(averages[name], self.damping + self._decay_of(name))
            usable = usable & ok
            if truth(ok) is False:
                stored.pop(name, None)
            else:
                stored[name] = used[name]
        gains = {"factor_steps": step, "averages": averages, "inverses": stored}
        return gains if known is not False else {}, used, usable

    def _solve(self, forms: Mapping[str, RowForm], inverses: Mapping[str, Inverses]) -> tuple[Vector, Scalar]:
        """p and m(0) - m(p)."""
        quadratic, layers = self.quadratic, self.quadratic.plan.layer_named
        gradient = quadratic.slope()
        parts: Parts = {}
        predicted: Scalar = 0.0
        for name, form in forms.items():
            names = [layers[name].parameters[local] for local in form.parameters]  # W, b
            slopes = [gradient[parameter] for parameter in names]
            sides = [slope.unsqueeze(1) if slope.dim() == 1 else slope for slope in slopes]
            matrix = sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)  # (o, i + 1)
            step, decrease = kronecker_step(matrix, inverses[name])
            predicted = predicted + scalar(decrease)
            pieces = step.split([side.shape[1] for side in sides], dim=1)
            parts |= {key: piece.reshape(gradient[key].shape) for key, piece in zip(names, pieces, strict=True)}
        p = quadratic.space.pack(parts)
        if quadratic.decay is not None:
            predicted = predicted - 0.5 * quadratic.decay.curvature(p)
        return p, predicted

    def _decay_of(self, layer: str) -> float:
        """The largest weight decay among a layer's parameters: one lambda serves the whole Kronecker product."""
        decay = self.quadratic.decay
        names = self.quadratic.plan.layer_named[layer].parameters.values()
        return 0.0 if decay is None else max(decay.rates[name] for name in names)

    def _sides(self, name: str, form: RowForm) -> tuple[Tensor, Tensor]:
        sides = form.kronecker_sides()
        if sides is None:
            module = self.quadratic.plan.model.get_submodule(name)
            place = " on several positions of a sample" if isinstance(module, nn.Linear) else ""
            raise ValueError(
                f"KFAC covers Linear layers on one vector per sample only and {name!r} is a "
                f"{type(module).__name__}{place}; GaussNewton and NaturalGradient take it"
            )
        return sides


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
        refuse_others("KFAC", common)
        check_whole_number("refresh", refresh, least=1)
        check_number("decay", decay, most=BELOW_ONE)
        method = {"curvature": CURVATURES["gauss-newton"], "solver": Kronecker(refresh, decay)}
        super().__init__(model, loss, lr, blocks="layer", momentum=0.0, fallback=None, method=method, **common)


def damped_inverses(factors: Factors, damping: Scalar) -> tuple[Inverses, Tensor]:
    """(A + a I)^{-1} and (G + b I)^{-1} with a = pi sqrt(lambda) and b = sqrt(lambda) / pi, and a and b.

    pi = sqrt(mean eigenvalue of A / mean eigenvalue of G), 1 where either is zero. Also whether both could be
    computed: an inverse that could not is zero.
    """
    means = [matrix.diagonal().mean() for matrix in factors.values()]
    ratio = means[0] / means[1]
    pi = torch.where((ratio > 0) & torch.isfinite(ratio), ratio, 1.0).sqrt()
    result: Inverses = {}
    ok = torch.ones((), dtype=torch.bool, device=pi.device)
    for (side, matrix), factor in zip(factors.items(), (pi, 1 / pi), strict=True):
        shift = factor * root(damping)
        lower, info = torch.linalg.cholesky_ex(plus_diagonal(matrix, shift))
        done = info == 0
        # cholesky_inverse raises on a factor that was left unfinished
        inverse = torch.cholesky_inverse(_where(done, lower, identity(len(lower), lower.dtype, lower.device)))
        result[side] = _where(done, inverse, 0.0)
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
        return _where(good, new, 0.0)
    old = old.to(new)
    return _where(good, torch.lerp(new, old, weight), old)


def _where(condition: Tensor, value: Tensor, otherwise: Tensor | float) -> Tensor:
    """value where the condition holds; on the CPU no pass over it is made to see that."""
    return value if truth(condition) is True else torch.where(condition, value, otherwise)
