"""The Levenberg-Marquardt iteration of `least_squares`, for b fits at once.

It follows MINPACK's lmder (Moré 1978) but for three things. Parameters may have bounds. Near the minimum a step is
judged by derivatives: there the cost says nothing, as a parameter off by 1e-8 of its size changes it in the last
digit. So where the cost has changed, and should change, by less than sqrt(eps) of itself, its change is

    cost(x + p) - cost(x) = (g(x) + g(x + p)).p / 2 + O(|p|^3),    g = J^T f

from gradients, which are exact to rounding, and the fit goes on to the digits that they hold. The Jacobian at
x + p is the one that the next step needs.

And such steps learn from the same gradients. Where residuals stay large, J^T J is not the Hessian of the cost:
steps by it get shorter by the same factor each time, or do not converge at all without damping. What is missing,
S = sum_i f_i f_i'', is found by secants (as in NL2SOL; Dennis, Gay and Welsch 1981); with J^T J + S the last steps
converge superlinearly, without a Jacobian more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from woodbury.least_squares import trust_region
from woodbury.least_squares.residuals import Loss, Residuals

FACTOR = 100.0  # the first radius, relative to |D x|: MINPACK's
ROBUST_FACTOR = 1.0  # the same for losses that are not convex: that of scipy's trf
ACCEPTED = 1e-4  # a step whose ratio is at least this is taken: MINPACK's
CURVED = 0.1  # S is used once the ratio of a step judged by gradients is this far from 1
ORTHOGONAL = 1e-3  # |r.p| / sum |r_i p_i| below which r says nothing about p: rounding errors would
RUNNING = 99  # the status of a fit that is not finished


class Bounds(NamedTuple):
    """The lower and upper bounds of every fit, (b, p)."""

    lower: Tensor
    upper: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.lower[rows], self.upper[rows]


class Problem(NamedTuple):
    """The arguments of `least_squares`, checked."""

    residuals: Residuals
    loss: Loss
    bounds: Bounds | None
    scale: Tensor | None  # the diagonal of D (b, p); None for the norms of the columns of J
    ftol: float
    xtol: float
    gtol: float
    max_nfev: int
    callback: Callable[[Tensor], object] | None  # gets x (b, p) after every trial


@dataclass
class Fits:
    """Fits under way, or where they ended: for each its point, the linear model there, and its trust region."""

    row: Tensor  # its place in the batch
    x: Tensor  # (b, p)
    f: Tensor  # residuals (b, m)
    cost: Tensor  # (b,)
    nfev: Tensor
    njev: Tensor
    status: Tensor
    radius: Tensor
    damping: Tensor
    begun: Tensor  # whether it has moved
    scale: Tensor  # the diagonal of D (b, p)
    J: Tensor  # (b, m, p), scaled by the loss
    target: Tensor  # f, scaled by the loss
    free: Tensor  # (b, p): false at a bound beyond which the cost would fall
    rounding: Tensor  # |J p| / |f| of a step p as short as rounding errors
    S: Tensor  # (b, p, p): what the Hessian has beside J^T J, by secants; (b, 0, 0) if m < p
    s: Tensor  # the factors of J D^-1
    V: Tensor
    c: Tensor

    def take(self, mask: Tensor) -> Fits:
        return Fits(*(getattr(self, field.name)[mask] for field in fields(self)))

    def put(self, mask: Tensor, part: Fits) -> None:
        for field in fields(self):
            getattr(self, field.name)[mask] = getattr(part, field.name)


def minimize(problem: Problem, x: Tensor, f: Tensor, J: Tensor) -> Fits:
    """The ends of all fits from x (b, p), with residuals and Jacobian there, in the order of the starts."""
    fits = _begin(problem, x, f, J)
    ends = fits.take(fits.row)
    while True:
        finished = fits.status != RUNNING
        if finished.any():
            ends.put(fits.row[finished], fits.take(finished))
            if finished.all():
                return ends
            fits = fits.take(~finished)
        fits = _advance(problem, fits)
        if problem.callback is not None:
            ends.x[fits.row] = fits.x
            problem.callback(ends.x.clone())


def _begin(problem: Problem, x: Tensor, f: Tensor, J: Tensor) -> Fits:
    number, count = x.new_zeros(len(x)), x.new_zeros(len(x), dtype=torch.int64)
    scale = torch.zeros_like(x) if problem.scale is None else problem.scale
    cost = problem.loss.cost(f)
    size = x.shape[1] if f.shape[1] >= x.shape[1] else 0
    S = number.new_zeros(len(x), size, size)
    later = [number] * 4  # `_linearize` fills these, and three more
    fits = Fits(
        *(torch.arange(len(x), device=x.device), x, f, cost, count + 1, count + 1, count + RUNNING),
        *(number, number, number > 0, scale, *later, S, *later[:3]),
    )
    fits = _linearize(problem, fits, J)
    size = vector_norm(fits.scale * x, dim=-1)
    # from zero: D x is measured in units of f, or of x_scale
    instead = (2 * cost).sqrt() if problem.scale is None else torch.ones_like(cost)
    fits.radius = (FACTOR if problem.loss.is_linear else ROBUST_FACTOR) * torch.where(size > 0, size, instead)
    if problem.max_nfev == 1:
        fits.status = torch.where(fits.status == RUNNING, 0, fits.status)
    return fits


def _linearize(problem: Problem, fits: Fits, J: Tensor) -> Fits:
    """The fits with the linear model of J at their points; ends those whose gradient is zero."""
    finite = torch.isfinite(J).flatten(1).all(1)
    if not finite.all():
        J = torch.where(finite[:, None, None], J, 0.0)
    target, J = problem.loss.gauss_newton(fits.f, J)
    norms = vector_norm(J, dim=1)
    scale = torch.maximum(fits.scale, norms) if problem.scale is None else fits.scale
    g = gradient(J, target)
    free = torch.ones_like(g, dtype=torch.bool)
    if problem.bounds is not None:
        lower, upper = problem.bounds.of(fits.row)
        free = ~(((fits.x <= lower) & (g >= 0)) | ((fits.x >= upper) & (g <= 0)))
    size = (2 * fits.cost).sqrt()  # |f|
    cosine = g.abs() / torch.where(norms > 0, norms, 1.0)
    flat = ((cosine <= problem.gtol * size.unsqueeze(-1)) | ~free).all(1)
    rounding = 4 * problem.residuals.epsilon * (1 + vector_norm(norms * fits.x, dim=-1) / size)
    status = torch.where(finite, torch.where(flat, 1, fits.status), -1)
    factors = trust_region.factorize(J * free.unsqueeze(1), target, scale, problem.residuals.epsilon)
    model = {"scale": scale, "J": J, "target": target, "free": free, "rounding": rounding}
    return replace(fits, status=status, **model, **factors._asdict())


def _advance(problem: Problem, fits: Fits) -> Fits:
    """The fits after one trial each: those that get better move, those that meet a tolerance end."""
    p, damping, length, predicted, slope, held = _propose(problem, fits)
    # until it moves, the radius is no more than the first step that was tried
    fits.radius = torch.where(fits.begun | held, fits.radius, torch.minimum(fits.radius, length))
    x = problem.residuals.rounded(fits.x + p)
    if problem.bounds is not None:
        x = torch.clamp(x, *problem.bounds.of(fits.row))
    f = problem.residuals(x, fits.row)
    cost = problem.loss.cost(f)
    fits.nfev = fits.nfev + 1
    actual = torch.where(cost < 100 * fits.cost, 1 - cost / fits.cost, -math.inf)  # for NaN too
    last = (predicted >= 0) & (predicted <= problem.ftol)
    noise = math.sqrt(problem.residuals.epsilon)
    blind = (predicted > 0) & (predicted <= noise) & (actual.abs() <= noise)
    if problem.ftol >= 4 * problem.residuals.epsilon:  # the cost shows all that was asked for
        blind = blind & ~(last & (actual.abs() <= problem.ftol))
    J = fits.J
    if blind.any():
        J = _jacobians(problem, x, fits.row, blind)
        target, scaled = problem.loss.gauss_newton(f, J)
        by_slopes = -slope - (target * times(scaled, p)).sum(-1) / (2 * fits.cost)
        actual = torch.where(blind, torch.where(by_slopes.isfinite(), by_slopes, -math.inf), actual)
    ratio, radius, fits.damping = trust_region.judge(fits.radius, damping, length, actual, predicted, slope)
    if blind.any():
        fits.S = _with_secant(fits, p, gradient(scaled, target), ratio, blind)
    fits.radius = torch.where(held & (ratio > 0.25), torch.maximum(radius, fits.radius), radius)
    accepted = ratio >= ACCEPTED
    fits.x = torch.where(accepted.unsqueeze(-1), x, fits.x)
    fits.f = torch.where(accepted.unsqueeze(-1), f, fits.f)
    fits.cost, fits.begun = torch.where(accepted, cost, fits.cost), fits.begun | accepted

    small = last & (actual.abs() <= problem.ftol) & (ratio <= 2)
    small = small | ((predicted >= 0) & (predicted <= fits.rounding**2))
    short = fits.radius <= problem.xtol * vector_norm(fits.scale * fits.x, dim=-1)
    status = torch.where(fits.nfev >= problem.max_nfev, 0, RUNNING)
    fits.status = torch.where(small, torch.where(short, 4, 2), torch.where(short, 3, status))

    moved = accepted & (fits.status == RUNNING)
    unknown = moved & ~blind
    if unknown.any():
        J = torch.where(unknown[:, None, None], _jacobians(problem, x, fits.row, unknown), J)
    fits.njev = fits.njev + (blind | unknown)
    if moved.all():
        return _linearize(problem, fits, J)
    if moved.any():
        fits.put(moved, _linearize(problem, fits.take(moved), J[moved]))
    return fits


def _with_secant(fits: Fits, p: Tensor, g: Tensor, ratio: Tensor, blind: Tensor) -> Tensor:
    """S after a trial with the gradient g at x + p, for the fits of a mask that J^T J does not describe.

    With r = g(x + p) - g(x) - J^T J p - S p the symmetric update of rank one

        S + r r^T / (r.p)

    has S p = g(x + p) - g(x) - J^T J p. Without an update if r is nearly orthogonal to p.
    """
    wanted = blind & (((ratio - 1).abs() > CURVED) | fits.S.flatten(1).any(1))
    if fits.S.numel() == 0 or not wanted.any():
        return fits.S
    r = g - gradient(fits.J, fits.target) - gradient(fits.J, times(fits.J, p)) - times(fits.S, p)
    terms = r * p
    wanted = wanted & (terms.sum(-1).abs() > ORTHOGONAL * terms.abs().sum(-1))
    update = r.unsqueeze(-1) * r.unsqueeze(-2) / torch.where(wanted, terms.sum(-1), 1.0)[:, None, None]
    return torch.where(wanted[:, None, None], fits.S + update, fits.S)


def _jacobians(problem: Problem, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """J at x (b, p) for the fits of a mask (b,); zero for the others."""
    if mask.all():
        return problem.residuals.jacobian(x, rows)
    some = problem.residuals.jacobian(x[mask], rows[mask])
    return some.new_zeros(len(x), *some.shape[1:]).index_put_((mask,), some)


class _Proposal(NamedTuple):
    """The step p of each fit, and what the linear model says about it."""

    p: Tensor  # (b, p)
    damping: Tensor
    length: Tensor  # |D p|
    predicted: Tensor  # decrease of the cost, relative to it
    slope: Tensor  # of the cost along p, relative to twice the cost
    held: Tensor  # whether a bound is in the way


def _propose(problem: Problem, fits: Fits) -> _Proposal:
    """The step of each fit. Parameters that it carries past a bound are put there, and the rest is solved again.

    With p = a + q, a the steps to the bounds and q the solution for residuals f + J a,

        |f|^2 - |f + J p|^2 = -2 f.Ja - |Ja|^2 + |Jq|^2 + 2 damping |D q|^2
        f.Jp                = f.Ja - Ja.Jq - |Jq|^2 - damping |D q|^2
    """
    units = torch.where(fits.scale > 0, fits.scale, 1.0)
    factors, free = trust_region.Factors(fits.s, fits.V, fits.c), fits.free
    curved = fits.S.flatten(1).any(1)
    if curved.any():
        weights = (free / units)[curved]
        S = fits.S[curved] * weights.unsqueeze(-1) * weights.unsqueeze(-2)
        bent = trust_region.bend(trust_region.Factors(*(own[curved] for own in factors)), S)
        factors = _put(factors, curved, bent)
    step = trust_region.solve(factors, fits.radius, fits.damping, free.sum(-1))
    p = step.scaled / units
    held = torch.zeros_like(fits.begun)
    a = torch.zeros_like(p)
    if problem.bounds is not None:
        lower, upper = problem.bounds.of(fits.row)
        while True:
            end = fits.x + p
            past = free & ((end < lower) | (end > upper))
            if not past.any():
                break
            a = torch.where(past, torch.clamp(end, lower, upper) - fits.x, a)
            free, held = free & ~past, held | past.any(-1)
            J, target = fits.J[held], (fits.target + times(fits.J, a))[held]
            rest = trust_region.factorize(
                J * free[held].unsqueeze(1), target, fits.scale[held], problem.residuals.epsilon
            )
            factors = _put(factors, held, rest)  # the others keep theirs, with S
            step = trust_region.solve(factors, fits.radius, fits.damping, free.sum(-1))
            p = torch.where(free, step.scaled / units, a)
    damped = step.damping * step.length**2
    decrease, slope, length = step.image + 2 * damped, -step.image - damped, step.length
    if held.any():
        Ja, Jq = times(fits.J, a), times(fits.J, p - a)
        along = (fits.target * Ja).sum(-1)
        decrease = decrease - 2 * along - (Ja * Ja).sum(-1)
        slope = slope + along - (Ja * Jq).sum(-1)
        length = torch.where(held, vector_norm(units * p, dim=-1), length)
    return _Proposal(p, step.damping, length, decrease / (2 * fits.cost), slope / (2 * fits.cost), held)


def _put(factors: trust_region.Factors, mask: Tensor, some: trust_region.Factors) -> trust_region.Factors:
    """The factors with those of some fits in their places."""
    pairs = zip(factors, some, strict=True)
    return trust_region.Factors(*(own.index_put((mask,), new) for own, new in pairs))


def gradient(J: Tensor, target: Tensor) -> Tensor:
    """J^T f for every fit, (b, p)."""
    return (target.unsqueeze(-2) @ J).squeeze(-2)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A v for every fit."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
