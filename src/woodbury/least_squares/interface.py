"""Nonlinear least squares: `least_squares`, Levenberg-Marquardt as in MINPACK for functions written in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodbury._choice import check_number, check_whole_number
from woodbury.least_squares.minimize import Bounds, Fits, Problem, gradient, minimize
from woodbury.least_squares.residuals import Loss, Residuals, place

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
    optimality: Any  # largest entry of the gradient; with bounds each times the distance to the one it points to
    active_mask: Tensor  # -1, 0, 1: at the lower bound, at none, at the upper bound
    nfev: Any  # points at which the function was computed
    njev: Any  # Jacobians on the way; `jac` is one more, which scipy does not count either
    status: Any  # the code of the message, as in scipy; -1 where a Jacobian is not finite
    message: Any
    success: Any  # whether a tolerance was met

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


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
    callback: Callable[[Tensor], object] | None = None,
) -> LeastSquaresResult:
    """Minimize 1/2 sum_i C^2 rho(f_i(x)^2 / C^2) over x, within bounds, by the Levenberg-Marquardt method.

        >>> t = torch.linspace(0, 4, 9, dtype=torch.float64)
        >>> y = 3 * torch.exp(-0.7 * t)
        >>> result = woodbury.least_squares(lambda b: b[0] * torch.exp(-b[1] * t) - y, [1.0, 1.0])
        >>> result.x
        tensor([3.0000, 0.7000], dtype=torch.float64)

    The step p minimizes |f + J p| subject to |D p| <= radius, with J by torch.func and D the largest norm that
    each column of J has had. Radius, damping and the rules to accept a step are those of MINPACK (Moré 1978); near
    the minimum, where the cost no longer shows the difference, steps are judged by gradients. Another unit for a
    parameter, or for all residuals, gives the same fit in the other unit.

    function: maps parameters (in the shape of `start`) to residuals f, a tensor of any shape, with operations that
        autograd follows. Where torch.func cannot transform it, J is computed row by row.
    start: a tensor, array or list; its device is that of the fit, and its type the one in which the function is
        computed (everything else is float64). Lists and integers become float64.
    bounds: (lower, upper), each None, a number, or one number for each parameter. Parameters that a step would
        carry past a bound are put on it, and the step of the others is solved again. The function is computed
        within the bounds only.
    x_scale: "jac", or the scales of the parameters, D = 1 / x_scale: a number, or one for each parameter.
    loss: rho(z) = "linear": z; "soft_l1": 2 (sqrt(1 + z) - 1); "huber": z up to 1, 2 sqrt(z) - 1 from there on;
        "cauchy": log(1 + z); "arctan": arctan(z).
    f_scale: C, the size of residuals from which on they count as outliers.
    ftol: stop when the cost falls by no more than this, relative to it, both in fact and by the linear model, or
        when a step is lost in rounding errors. None: eps^(4/3), eps the rounding unit, so that the last step has
        |J p| <= eps^(2/3) |f| (4e-11 in float64).
    xtol: stop when the radius is at most this times |D x|. None: 4 eps.
    gtol: stop when the cosine of f with every column of J is at most this. None: 0.
    max_nfev: the largest number of points at which to compute the function; by default 1000, or 100 (p + 1) where
        that is more.
    args: passed on, function(x, *args).
    batched: `start` holds b starts along its first axis, for b fits that run at once, each by its own rules. The
        function sees one of them at a time. Tensors and arrays in `args` must have b entries as well, of which
        it sees one, as a tensor.
    callback: called with x after every trial.
    """
    for name, tolerance in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol)):
        if tolerance is not None:
            check_number(name, tolerance)
    if max_nfev is not None:
        check_whole_number("max_nfev", max_nfev, least=1)
    x, shape = _starting_points(start, batched)
    residuals = Residuals(function, args, shape[1:] if batched else shape, batched, x)
    problem = Problem(
        residuals,
        Loss(loss, f_scale),
        _limits(bounds, x, shape),
        _diagonal(x_scale, x, shape),
        ftol=residuals.epsilon ** (4 / 3) if ftol is None else ftol,
        xtol=4 * residuals.epsilon if xtol is None else xtol,
        gtol=0.0 if gtol is None else gtol,
        max_nfev=max(1000, 100 * (x.shape[1] + 1)) if max_nfev is None else max_nfev,
        callback=None if callback is None else lambda x: callback(x.to(residuals.dtype).reshape(shape)),
    )
    with torch.no_grad():
        begin = residuals.begin(x, problem.bounds or (-math.inf, math.inf))
        return _result(problem, minimize(problem, x.double(), *begin))


# -- the arguments, checked: an error names the argument, the place in it and a way out


def _starting_points(start: Any, batched: bool) -> tuple[Tensor, torch.Size]:
    """The starts (b, p), and the shape in which they were given."""
    try:
        plain = isinstance(start, list | tuple | int | float)
        x = start if isinstance(start, Tensor) else torch.as_tensor(start, dtype=torch.float64 if plain else None)
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
    if not torch.isfinite(x).all():
        raise ValueError(f"start{place(~torch.isfinite(x), x.shape)} is not finite")
    return x.reshape(len(x) if batched else 1, -1).clone(), x.shape


def _for_each(name: str, value: Any, x: Tensor, shape: torch.Size) -> Tensor:
    """A number, or one for each parameter, as (b, p) of float64, rounded to the type of x."""
    try:
        numbers = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        return numbers.broadcast_to(shape).reshape(x.shape).double()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a number or numbers of the shape {tuple(shape)} of start, got {value!r}"
        ) from None


def _limits(bounds: Any, x: Tensor, shape: torch.Size) -> Bounds | None:
    if bounds is None:
        return None
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be a pair (lower, upper), got {bounds!r}") from None
    lower = _for_each("the lower bound", -math.inf if low is None else low, x, shape)
    upper = _for_each("the upper bound", math.inf if high is None else high, x, shape)
    if not (lower < upper).all():
        raise ValueError(
            f"the lower bound{place(~(lower < upper), shape)} is not below the upper one; to hold a "
            f"parameter fixed, leave it out of start"
        )
    outside = ~((lower <= x) & (x <= upper))
    if outside.any():
        low, value, high = (side[outside][0].item() for side in (lower, x, upper))
        raise ValueError(
            f"start{place(outside, shape)} = {value:g} is outside its bounds {low:g} to {high:g}; start "
            f"inside them, for example from start.clamp(lower, upper)"
        )
    return Bounds(lower, upper)


def _diagonal(x_scale: Any, x: Tensor, shape: torch.Size) -> Tensor | None:
    """D = 1 / x_scale (b, p); None for "jac"."""
    if isinstance(x_scale, str):
        if x_scale == "jac":
            return None
        raise ValueError(f'x_scale must be "jac" or positive numbers, got {x_scale!r}')
    scales = _for_each("x_scale", x_scale, x, shape)
    wrong = ~((scales > 0) & torch.isfinite(scales))
    if wrong.any():
        raise ValueError(f"x_scale{place(wrong, shape)} is not a positive number")
    return 1 / scales


def _result(problem: Problem, ends: Fits) -> LeastSquaresResult:
    """The ends in the shapes of the caller."""
    residuals, x = problem.residuals, ends.x
    target, J = problem.loss.gauss_newton(ends.f, residuals.jacobian(x, ends.row))
    g = gradient(J, target)
    mask, distance = torch.zeros_like(x, dtype=torch.int64), torch.ones_like(x)
    if problem.bounds is not None:
        lower, upper = problem.bounds
        mask = (x >= upper).long() - (x <= lower).long()
        distance = torch.where(g < 0, upper - x, x - lower)
        distance = torch.where((g != 0) & torch.isfinite(distance), distance, 1.0)
    of_parameters = (-1, *residuals.shape)
    each: dict[str, Any] = {
        "x": x.to(residuals.dtype).reshape(of_parameters),
        "cost": ends.cost,
        "fun": ends.f.to(residuals.dtype).reshape(-1, *residuals.output_shape),
        "jac": J.to(residuals.dtype),
        "grad": g.to(residuals.dtype).reshape(of_parameters),
        "optimality": (g * distance).abs().amax(-1),
        "active_mask": mask.reshape(of_parameters),
        "nfev": ends.nfev,
        "njev": ends.njev,
        "status": ends.status,
        "message": [MESSAGES[code] for code in ends.status.tolist()],
        "success": ends.status > 0,
    }
    if not residuals.batched:
        numbers = ("cost", "optimality", "nfev", "njev", "status", "success")
        each = {name: values[0].item() if name in numbers else values[0] for name, values in each.items()}
    return LeastSquaresResult(**each)
