"""Levenberg-Marquardt steps inside a scaled trust region, for b small problems at once (Moré 1978, MINPACK).

    minimize |f + J p|  subject to  |D p| <= radius

With J D^-1 = U diag(s) V^T and c = U^T f the solution is

    D p = -V w(damping),    w = s c / (s^2 + damping)

where damping = 0 if that is short enough, and otherwise solves the secular equation |w(damping)| = radius. Nothing
is squared before it is factorised, and changing the unit of a parameter, or that of all residuals, changes nothing
but the units of the answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

SLACK = 0.1  # the length of a step may differ from the radius by this share of it
FLATTEST = 0.01  # the least curvature that S may leave, relative to that of J^T J
_ITERATIONS = 10  # of the search for the damping; two or three are the rule


class Factors(NamedTuple):
    """The singular value decomposition J D^-1 = U diag(s) V^T, and c = U^T f."""

    s: Tensor  # (b, k), k = min(m, p)
    V: Tensor  # V^T (b, k, p)
    c: Tensor  # (b, k)


class Step(NamedTuple):
    """The step in units of D, and what the linear model says about it."""

    scaled: Tensor  # D p (b, p)
    damping: Tensor  # (b,)
    length: Tensor  # |D p| (b,)
    image: Tensor  # |J p|^2 (b,)


def factorize(J: Tensor, f: Tensor, scale: Tensor, epsilon: float) -> Factors:
    """Factors of J D^-1 for J (b, m, p), residuals f (b, m) and the diagonal of D, scale (b, p).

    A column of zeros gets a step of zero, whatever its scale. Singular values at the rounding errors of the
    largest, of which J has those of a type with this epsilon, are zero.
    """
    A = J / torch.where(scale > 0, scale, 1.0).unsqueeze(-2)
    c = f.unsqueeze(-1)
    if A.shape[-2] > A.shape[-1]:
        Q, A = torch.linalg.qr(A)
        c = Q.mT @ c
    U, s, V = torch.linalg.svd(A, full_matrices=False)
    s = torch.where(s > V.shape[-1] * epsilon * s[:, :1], s, 0.0)
    return Factors(s, V, (U.mT @ c).squeeze(-1))


def _inverse(s: Tensor) -> Tensor:
    """1 / s, and 0 for singular values at the rounding errors of the largest."""
    nonzero = s > s.shape[-1] * torch.finfo(s.dtype).eps * s[:, :1]
    return torch.where(nonzero, 1 / torch.where(nonzero, s, 1.0), 0.0)


def bend(factors: Factors, S: Tensor) -> Factors:
    """Factors of the model whose Hessian is J^T J + S, with the same gradient; S (b, p, p) is in units of D.

    With A = diag(s) V^T the Hessian is A^T (I + T) A, T = s^-1 V^T S V s^-1, and I + T = Q diag(m) Q^T gives
    A' = diag(sqrt(m)) Q^T A and c' = diag(1 / sqrt(m)) Q^T c. Nothing is squared here either. Where an m is below
    FLATTEST the point is not near a minimum, or S is wrong: it is left out.
    """
    s, V, c = factors
    half = _inverse(s).unsqueeze(-1) * V
    T, Q = torch.linalg.eigh(half @ S @ half.mT)
    steep = (1 + T >= FLATTEST).all(-1, keepdim=True)
    root = torch.where(steep, 1 + T, 1.0).sqrt()
    A = root.unsqueeze(-1) * (Q.mT @ (s.unsqueeze(-1) * V))
    c = (Q.mT @ c.unsqueeze(-1)).squeeze(-1) / root
    U, s, W = torch.linalg.svd(A, full_matrices=False)
    return Factors(s, W, (U.mT @ c.unsqueeze(-1)).squeeze(-1))


def solve(factors: Factors, radius: Tensor, damping: Tensor, free: Tensor) -> Step:
    """The step for each problem; damping (b,) is the first guess, free (b,) how many columns are not held at zero.

    The search is that of MINPACK's lmpar: Newton's iteration on 1 / |w(damping)| = 1 / radius between an upper and
    a lower bound, until |w| is within SLACK of the radius.
    """
    s, V, c = factors
    dwarf = torch.finfo(s.dtype).tiny
    inverse = _inverse(s)
    w = c * inverse  # the Gauss-Newton step
    length = vector_norm(w, dim=-1)
    excess = length - radius
    inside = excess <= SLACK * radius
    if not inside.all():
        upper = vector_norm(s * c, dim=-1) / radius
        upper = torch.where(upper > 0, upper, dwarf / radius.clamp(max=SLACK))
        slope = (vector_norm(w * inverse, dim=-1) / length) ** 2
        lower = torch.where(inverse.count_nonzero(-1) == free, excess / (radius * slope), 0.0)
        found = inside | ~torch.isfinite(length)
        lower = torch.where(found, 0.0, lower)
        damping = torch.minimum(torch.maximum(damping, lower), upper)
        damping = torch.where(damping > 0, damping, upper * radius / length)
        for iteration in range(_ITERATIONS):
            damping = torch.where(damping > 0, damping, (1e-3 * upper).clamp(min=dwarf))
            shifted = s * s + damping.unsqueeze(-1)
            trial = s * c / shifted
            norm = vector_norm(trial, dim=-1)
            before, excess = excess, norm - radius
            w = torch.where(found.unsqueeze(-1), w, trial)
            length = torch.where(found, length, norm)
            found = found | (excess.abs() <= SLACK * radius) | ((lower == 0) & (excess <= before) & (before < 0))
            if iteration == _ITERATIONS - 1 or found.all():
                break
            slope = (vector_norm(trial * shifted.rsqrt(), dim=-1) / norm) ** 2
            lower = torch.where(excess > 0, torch.maximum(lower, damping), lower)
            upper = torch.where(excess < 0, torch.minimum(upper, damping), upper)
            corrected = torch.maximum(lower, damping + excess / (radius * slope))
            damping = torch.where(found, damping, corrected)
    damping = torch.where(inside, 0.0, damping)
    scaled = -(w.unsqueeze(-2) @ V).squeeze(-2)
    return Step(scaled, damping, length, vector_norm(s * w, dim=-1) ** 2)


def judge(
    radius: Tensor, damping: Tensor, length: Tensor, actual: Tensor, predicted: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The ratio actual / predicted of each step, and the next radius and damping, by MINPACK's rule.

    actual, predicted: decrease of the cost relative to it; actual is -inf where the cost is not finite or has
    grown a hundredfold. slope: the derivative of the cost along the step, relative to twice the cost, negative.
    """
    ratio = torch.where(predicted > 0, actual / torch.where(predicted > 0, predicted, 1.0), 0.0)
    # the minimum of the parabola with this slope through both values
    shrink = torch.where(actual >= 0, 0.5, 0.5 * slope / (slope + 0.5 * actual))
    shrink = torch.where(shrink >= SLACK, shrink.clamp(max=0.5), SLACK)
    poor, good = ratio <= 0.25, (damping == 0) | (ratio >= 0.75)
    smaller = shrink * torch.minimum(radius, length / SLACK)
    next_radius = torch.where(poor, smaller, torch.where(good, 2 * length, radius))
    next_damping = torch.where(poor, damping / shrink, torch.where(good, damping / 2, damping))
    return ratio, next_radius, next_damping
