"""Nonlinear least squares: `least_squares`, Levenberg-Marquardt as in MINPACK for functions written in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from woodbury import trust_region
from woodbury.linalg import full_precision
from woodbury.residuals import Loss, Residuals

FACTOR = 100.0  # the first radius, relative to |D x|: MINPACK's
ACCEPTED = 1e-4  # a step whose ratio is at least this is taken: MINPACK's

MESSAGES = {
    -1: "The Jacobian is not finite.",
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
}


@dataclass
class LeastSquaresResult:
    """What `least_squares` found; `result.x` and `result["x"]` are the same.

    With batched=True everything has a leading axis b: the numbers are tensors (b,), `message` is a list.
    """

    x: Tensor  # in the shape of the start
    cost: Any  # 1/2 sum of rho(f^2): a float
    fun: Tensor  # residuals at x, as the function gave them
    jac: Tensor  # (m, p) at x; with a robust loss scaled so that J^T J approximates the Hessian of the cost
    grad: Tensor  # of the cost, in the shape of x
    optimality: (
        Any  # largest entry of the gradient; with bounds, each times the distance to the bound it points to
    )
    active_mask: Tensor  # -1, 0, 1: at the lower bound, at none, at the upper bound
    nfev: Any  # points at which the function was computed
    njev: Any  # Jacobians from which steps were computed
    status: Any  # the code of the message, as in scipy; -1 where a Jacobian is not finite
    message: Any
    success: Any  # whether a tolerance was met

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def keys(self) -> Iterator[str]:
        return iter([field.name for field in fields(self)])


def least_squares(
    function: Callable[..., Tensor],
    start: Any,
    *,
    bounds: tuple[Any, Any] | None = None,
    x_scale: Any = "jac",
    loss: str = "linear",
    f_scale: float = 1.0,  # C
    ftol: float | None = None,
    xtol: float | None = None,
    gtol: float | None = None,
    max_nfev: int | None = None,
    args: Sequence[Any] = (),
    batched: bool = False,
    verbose: int = 0,
) -> LeastSquaresResult:
    """Minimize 1/2 sum_i C^2 rho(f_i(x)^2 / C^2) over x, within bounds, by the Levenberg-Marquardt method.

        >>> t = torch.linspace(0, 4, 9, dtype=torch.float64)
        >>> y = 3 * torch.exp(-0.7 * t)
        >>> result = woodbury.least_squares(lambda b: b[0] * torch.exp(-b[1] * t) - y, [1.0, 1.0])
        >>> result.x
        tensor([3.0000, 0.7000], dtype=torch.float64)

    The step p minimizes |f + J p| subject to |D p| <= radius, with J by torch.func and D the largest norm that each
    column of J has had. The radius, the damping and the rules to accept and to stop are those of MINPACK
    (Moré 1978). Another unit for a parameter, or for all residuals, gives the same fit in the other unit.

    function: maps parameters (in the shape of `start`) to residuals f, a tensor of any shape, with operations that
        autograd follows. Where torch.func cannot transform it, J is computed row by row.
    start: a tensor, array or list; its type and device are those of the fit. Lists and integers become float64.
    bounds: (lower, upper), each None, a number, or one number for each parameter. Parameters that a step would
        carry past a bound are put on it, and the step of the others is solved again. The function is computed
        within the bounds only.
    x_scale: "jac", or the scales of the parameters, D = 1 / x_scale: a number, or one for each parameter.
    loss: rho(z) = "linear": z; "soft_l1": 2 (sqrt(1 + z) - 1); "huber": z up to 1, 2 sqrt(z) - 1 from there on;
        "cauchy": log(1 + z); "arctan": arctan(z).
    f_scale: C, the size of residuals from which on they count as outliers.
    ftol: stop when the cost falls by less than this, relative to it, both in fact and by the model.
    xtol: stop when the radius is below this times |D x|.
    gtol: stop when the cosine of f with every column of J is below this.
        None stands for four times the rounding unit: as many digits as the arithmetic gives. Tolerances below the
        rounding unit count as the rounding unit.
    max_nfev: the largest number of points at which to compute the function; by default 1000, or 100 (p + 1) where
        that is more.
    args: passed on, function(x, *args).
    batched: `start` holds b starts along its first axis, for b fits that run at once, each by its own rules. The
        function sees one of them at a time. Tensors in `args` must have b entries as well, one for each fit.
    verbose: 1 prints how it ended, 2 every step.
    """
    x, shape = _starting_points(start, batched)
    if not isinstance(max_nfev, int | None) or (max_nfev is not None and max_nfev < 1):
        raise ValueError(f"max_nfev must be a positive integer or None, got {max_nfev!r}")
    residuals = Residuals(function, args, shape, batched, x)
    unit = residuals.epsilon
    problem = _Problem(
        residuals,
        Loss(loss, f_scale),
        *_limits(bounds, x, shape, batched),
        None if isinstance(x_scale, str) and x_scale == "jac" else 1 / _scales(x_scale, x, shape, batched),
        *(_tolerance(name, value, unit) for name, value in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol))),
        max_nfev or max(1000, 100 * (x.shape[1] + 1)),
        verbose,
    )
    with torch.no_grad():
        return _result(problem, _minimize(problem, x), shape, batched)


class _Problem(NamedTuple):
    """The arguments of `least_squares`, checked."""

    residuals: Residuals
    loss: Loss
    lower: Tensor | None  # (b, p); None without bounds
    upper: Tensor | None
    scale: Tensor | None  # the diagonal of D (b, p) where x_scale is given
    ftol: float
    xtol: float
    gtol: float
    max_nfev: int
    verbose: int


@dataclass
class _Fits:
    """Fits that are not finished, the linear model of each at its point, and its trust region."""

    row: Tensor  # where it is in the batch
    x: Tensor  # (b, p)
    f: Tensor  # residuals (b, m)
    cost: Tensor  # float64, as all numbers per fit
    nfev: Tensor
    njev: Tensor
    status: Tensor
    radius: Tensor
    damping: Tensor
    begun: Tensor  # whether a step has been taken
    scale: Tensor  # the diagonal of D (b, p)
    J: Tensor  # (b, m, p), scaled by the loss
    target: Tensor  # f, scaled by the loss
    free: Tensor  # (b, p): false at a bound towards which the cost falls
    s: Tensor  # the factors of J D^-1
    V: Tensor
    c: Tensor

    def take(self, index: Tensor) -> _Fits:
        return _Fits(*(getattr(self, field.name)[index] for field in fields(self)))

    def put(self, index: Tensor, part: _Fits) -> None:
        for field in fields(self):
            getattr(self, field.name)[index] = getattr(part, field.name)


_RUNNING = 99  # the status of a fit that is not finished


class _Ends(NamedTuple):
    """Where the fits ended."""

    x: Tensor
    f: Tensor
    cost: Tensor
    nfev: Tensor
    njev: Tensor
    status: Tensor


def _minimize(problem: _Problem, x: Tensor) -> _Ends:
    """All fits from x (b, p), to their ends."""
    fits = _begin(problem, x)
    ends = _Ends(*(getattr(fits, name).clone() for name in _Ends._fields))
    step = 0
    _print_step(problem, step, fits)
    while True:
        finished = fits.status != _RUNNING
        if finished.any():
            for name, values in ends._asdict().items():
                values[fits.row[finished]] = getattr(fits, name)[finished]
            if finished.all():
                return ends
            fits = fits.take(~finished)
        accepted = _advance(problem, fits)
        fresh = accepted & (fits.status == _RUNNING)
        if fresh.all():
            fits = _linearize(problem, fits)
        elif fresh.any():
            index = fresh.nonzero()[:, 0]
            fits.put(index, _linearize(problem, fits.take(index)))
        step += 1
        _print_step(problem, step, fits)


def _begin(problem: _Problem, x: Tensor) -> _Fits:
    f = problem.residuals(x, None)
    _check_start("residual", f, problem.residuals)
    J = problem.residuals.jacobian(x, None)
    _check_start("Jacobian", J, problem.residuals)
    b, p = x.shape
    number, count = x.new_zeros(b, dtype=torch.float64), x.new_zeros(b, dtype=torch.int64)
    empty = x.new_zeros(b, 0)
    scale = torch.zeros_like(x) if problem.scale is None else problem.scale
    cost = problem.loss.cost(f)
    fits = _Fits(
        *(torch.arange(b, device=x.device), x, f, cost, count + 1, count.clone(), count + _RUNNING),
        *(number, number.clone(), torch.zeros_like(number, dtype=torch.bool), scale),
        *(empty, empty, empty, empty, empty, empty),
    )
    fits = _linearize(problem, fits, J)
    size = vector_norm(fits.scale * x, dim=-1, dtype=torch.float64)
    instead = 1.0 if problem.scale is not None else (2 * cost).sqrt()  # from zero: what is measured in D x
    fits.radius = FACTOR * torch.where(size > 0, size, instead)
    return fits


def _linearize(problem: _Problem, fits: _Fits, J: Tensor | None = None) -> _Fits:
    """The fits with a new linear model at their points; ends those whose gradient is zero."""
    if J is None:
        J = problem.residuals.jacobian(fits.x, fits.row)
    finite = torch.isfinite(J).flatten(1).all(1)
    if not finite.all():
        J = torch.where(finite[:, None, None], J, 0.0)
    target, J = problem.loss.gauss_newton(fits.f, J)
    norms = vector_norm(J, dim=1, dtype=torch.float64).to(J.dtype)
    scale = torch.maximum(fits.scale, norms) if problem.scale is None else fits.scale
    gradient = _gradient(J, target)
    free = torch.ones_like(gradient, dtype=torch.bool)
    if problem.lower is not None and problem.upper is not None:
        lower, upper = problem.lower[fits.row], problem.upper[fits.row]
        free = ~(((fits.x <= lower) & (gradient >= 0)) | ((fits.x >= upper) & (gradient <= 0)))
    cosine = gradient.abs() / torch.where(norms > 0, norms, 1.0) / (2 * fits.cost).sqrt().unsqueeze(-1)
    flat = (fits.cost == 0) | ((cosine <= problem.gtol) | ~free).all(1)
    status = torch.where(finite, torch.where(flat, 1, fits.status), -1)
    factors = trust_region.factorize(J * free.unsqueeze(1), target, scale)
    return _Fits(
        *(fits.row, fits.x, fits.f, fits.cost, fits.nfev, fits.njev + 1, status),
        *(fits.radius, fits.damping, fits.begun, scale, J, target, free, *factors),
    )


def _advance(problem: _Problem, fits: _Fits) -> Tensor:
    """One trial for each fit: moves those that get better, ends those that meet a tolerance; returns which moved."""
    p, damping, length, predicted, slope, held = _propose(problem, fits)
    fits.damping = damping
    fits.radius = torch.where(fits.begun | held, fits.radius, torch.minimum(fits.radius, length))
    x = fits.x + p
    if problem.lower is not None:
        x = torch.clamp(x, problem.lower[fits.row], problem.upper[fits.row])  # type: ignore[index]
    f = problem.residuals(x, fits.row)
    cost = problem.loss.cost(f)
    fits.nfev = fits.nfev + 1
    actual = torch.where(cost < 100 * fits.cost, 1 - cost / fits.cost, -1.0)  # -1 for NaN too
    ratio, radius, fits.damping = trust_region.judge(fits.radius, damping, length, actual, predicted, slope)
    fits.radius = torch.where(held & (ratio > 0.25), torch.maximum(radius, fits.radius), radius)
    accepted = ratio >= ACCEPTED
    moved = accepted.unsqueeze(-1)
    fits.x, fits.f = torch.where(moved, x, fits.x), torch.where(moved, f, fits.f)
    fits.cost, fits.begun = torch.where(accepted, cost, fits.cost), fits.begun | accepted
    size = vector_norm(fits.scale * fits.x, dim=-1, dtype=torch.float64)
    flat = (actual.abs() <= problem.ftol) & (predicted >= 0) & (predicted <= problem.ftol) & (ratio <= 2)
    short = fits.radius <= problem.xtol * size
    status = torch.where(fits.nfev >= problem.max_nfev, 0, _RUNNING)
    fits.status = torch.where(flat, torch.where(short, 4, 2), torch.where(short, 3, status))
    return accepted


class _Proposal(NamedTuple):
    p: Tensor  # (b, p)
    damping: Tensor
    length: Tensor  # |D p|
    predicted: Tensor  # by which the linear model lowers the cost, relative to it
    slope: Tensor  # of the cost along p, relative to twice the cost
    held: Tensor  # whether a bound was in the way


def _propose(problem: _Problem, fits: _Fits) -> _Proposal:
    """The step of each fit. Parameters that it carries past a bound are put there, and the rest is solved again.

    With p = a + q, a the steps to the bounds and q the solution for residuals f + J a,

        |f|^2 - |f + J p|^2 = -2 f.Ja - |Ja|^2 + |Jq|^2 + 2 damping |D q|^2
        f.Jp                = f.Ja - Ja.Jq - |Jq|^2 - damping |D q|^2
    """
    epsilon = max(fits.J.shape[1:]) * torch.finfo(fits.J.dtype).eps
    units = torch.where(fits.scale > 0, fits.scale, 1.0)
    factors, free = trust_region.Factors(fits.s, fits.V, fits.c), fits.free
    step = trust_region.solve(factors, fits.radius, fits.damping, free.sum(-1), epsilon)
    p = step.scaled / units
    total = 2 * fits.cost
    square = step.damping * step.length**2
    predicted, slope = (step.image + 2 * square) / total, -(step.image + square) / total
    held = torch.zeros_like(fits.begun)
    if problem.lower is None or problem.upper is None:
        return _Proposal(p, step.damping, step.length, predicted, slope, held)
    lower, upper = problem.lower[fits.row], problem.upper[fits.row]
    a = torch.zeros_like(p)
    while True:
        inside = torch.clamp(fits.x + p, lower, upper)
        past = free & (inside != fits.x + p)
        if not past.any():
            break
        a = torch.where(past, inside - fits.x, a)
        free = free & ~past
        held = held | past.any(-1)
        with full_precision():
            target = fits.target + (fits.J @ a.unsqueeze(-1)).squeeze(-1)
        factors = trust_region.factorize(fits.J * free.unsqueeze(1), target, fits.scale)
        step = trust_region.solve(factors, fits.radius, fits.damping, free.sum(-1), epsilon)
        p = torch.where(free, step.scaled / units, a)
    if held.any():
        with full_precision():
            Ja, Jq = (fits.J @ torch.stack([a, p - a], dim=-1)).double().unbind(-1)
        fJa = (fits.target.double() * Ja).sum(-1)
        square = step.damping * step.length**2
        decrease = step.image + 2 * square - 2 * fJa - (Ja * Ja).sum(-1)
        predicted = torch.where(held, decrease / total, predicted)
        slope = torch.where(held, (fJa - (Ja * Jq).sum(-1) - step.image - square) / total, slope)
    length = vector_norm(units * p, dim=-1, dtype=torch.float64)
    return _Proposal(p, step.damping, torch.where(held, length, step.length), predicted, slope, held)


def _gradient(J: Tensor, target: Tensor) -> Tensor:
    with full_precision():
        return (target.unsqueeze(-2) @ J).squeeze(-2)


def _result(problem: _Problem, ends: _Ends, shape: torch.Size, batched: bool) -> LeastSquaresResult:
    x = ends.x
    target, J = problem.loss.gauss_newton(ends.f, problem.residuals.jacobian(x, None))
    gradient = _gradient(J, target)
    mask, distance = torch.zeros_like(x, dtype=torch.int64), torch.ones_like(x)
    if problem.lower is not None and problem.upper is not None:
        mask = (x >= problem.upper).long() - (x <= problem.lower).long()
        distance = torch.where(gradient < 0, problem.upper - x, x - problem.lower)
        distance = torch.where((gradient != 0) & torch.isfinite(distance), distance, 1.0)
    optimality = (gradient * distance).abs().amax(-1)
    each: dict[str, Any] = {
        "x": x.unflatten(-1, shape) if len(shape) != 1 else x,
        "cost": ends.cost,
        "fun": ends.f.reshape(-1, *problem.residuals.output_shape),
        "jac": J,
        "grad": gradient.unflatten(-1, shape) if len(shape) != 1 else gradient,
        "optimality": optimality,
        "active_mask": mask.unflatten(-1, shape) if len(shape) != 1 else mask,
        "nfev": ends.nfev,
        "njev": ends.njev,
        "status": ends.status,
        "message": [MESSAGES[code] for code in ends.status.tolist()],
        "success": ends.status > 0,
    }
    if not batched:
        numbers = ("cost", "optimality", "nfev", "njev", "status", "success")
        each = {name: values[0].item() if name in numbers else values[0] for name, values in each.items()}
    result = LeastSquaresResult(**each)
    if problem.verbose:
        _print_end(result, batched)
    return result


def _starting_points(start: Any, batched: bool) -> tuple[Tensor, torch.Size]:
    """The starts (b, p), and the shape of the parameters as the function sees them."""
    try:
        x = torch.as_tensor(start, dtype=torch.float64 if isinstance(start, list | tuple | int | float) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"start must be a tensor, an array or a list of numbers: {error}") from None
    x = x.detach()
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        x = x.double()
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"start must be float32 or float64, got {x.dtype}; convert it with start.double()")
    if batched and x.dim() == 0:
        raise ValueError("with batched=True, start must have the starts along its first axis, got one number")
    if x.numel() == 0:
        raise ValueError(f"start holds no parameters: its shape is {tuple(x.shape)}")
    shape = x.shape[1:] if batched else x.shape
    x = x.reshape(len(x) if batched else 1, -1).clone()
    if not torch.isfinite(x).all():
        raise ValueError(f"start{_place(~torch.isfinite(x), shape, batched)} is not finite")
    return x, shape


def _place(wrong: Tensor, shape: torch.Size, batched: bool) -> str:
    """The first place where wrong (b, n) is true, as an index into entries of this shape."""
    row, entry = wrong.nonzero()[0].tolist()
    index = [int(i) for i in torch.unravel_index(torch.tensor(entry), shape)] if len(shape) else []
    index = [row, *index] if batched else index
    return str(index) if index else ""


def _for_each(name: str, value: Any, x: Tensor, shape: torch.Size, batched: bool) -> Tensor:
    """A number, or one for each parameter, as (b, p)."""
    whole = (len(x), *shape) if batched else tuple(shape)
    try:
        return torch.as_tensor(value, dtype=x.dtype, device=x.device).broadcast_to(whole).reshape(x.shape)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a number or numbers of the shape {whole} of start, got {value!r}"
        ) from None


def _limits(bounds: Any, x: Tensor, shape: torch.Size, batched: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if bounds is None:
        return None, None
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be a pair (lower, upper), got {bounds!r}") from None
    lower = _for_each("the lower bound", -math.inf if low is None else low, x, shape, batched)
    upper = _for_each("the upper bound", math.inf if high is None else high, x, shape, batched)
    if not (lower < upper).all():
        raise ValueError(
            f"the lower bound{_place(~(lower < upper), shape, batched)} is not below the upper one; to hold a "
            f"parameter fixed, leave it out of start"
        )
    outside = ~((lower <= x) & (x <= upper))
    if outside.any():
        number = outside.nonzero()[0].tolist()
        low, value, high = (side[number[0], number[1]].item() for side in (lower, x, upper))
        raise ValueError(
            f"start{_place(outside, shape, batched)} = {value:g} is outside its bounds {low:g} to {high:g}; start "
            f"inside them, for example from start.clamp(lower, upper)"
        )
    return lower, upper


def _scales(value: Any, x: Tensor, shape: torch.Size, batched: bool) -> Tensor:
    if isinstance(value, str):
        raise ValueError(f'x_scale must be "jac" or positive numbers, got {value!r}')
    scales = _for_each("x_scale", value, x, shape, batched)
    wrong = ~((scales > 0) & torch.isfinite(scales))
    if wrong.any():
        raise ValueError(f"x_scale{_place(wrong, shape, batched)} is not a positive number")
    return scales


def _tolerance(name: str, value: float | None, epsilon: float) -> float:
    if value is None:
        return 4 * epsilon
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} must be None or a number that is not negative, got {value!r}")
    return max(float(value), epsilon)


def _check_start(what: str, values: Tensor, residuals: Residuals) -> None:
    """Raises an error that names the first residual that is not finite; values (b, m) or (b, m, p)."""
    wrong = ~torch.isfinite(values)
    if wrong.any():
        wrong = wrong.flatten(2).any(2) if wrong.dim() == 3 else wrong
        place = _place(wrong, residuals.output_shape, residuals.batched)
        row = "a row of its Jacobian" if what == "Jacobian" else "it"
        raise ValueError(
            f"residual{place} cannot be used: {row} is not finite at the start; start elsewhere, or see which "
            f"operation of function gives it"
        )


def _print_step(problem: _Problem, step: int, fits: _Fits) -> None:
    if problem.verbose < 2:
        return
    if step == 0:
        print(f"{'step':>6}{'nfev':>8}{'fits':>8}{'cost':>16}{'radius':>12}")
    nfev, cost, radius = (int(fits.nfev.max()), float(fits.cost.sum()), float(fits.radius.median()))
    print(f"{step:6}{nfev:8}{len(fits.row):8}{cost:16.8e}{radius:12.2e}", flush=True)


def _print_end(result: LeastSquaresResult, batched: bool) -> None:
    if not batched:
        print(
            f"{result.message} {result.nfev} points, {result.njev} Jacobians, cost {result.cost:.8e}, "
            f"optimality {result.optimality:.2e}"
        )
        return
    for status in sorted(set(result.status.tolist())):
        print(f"{int((result.status == status).sum())} of {len(result.status)} fits: {MESSAGES[status]}")
