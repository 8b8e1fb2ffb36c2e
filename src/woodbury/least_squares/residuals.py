"""Residuals of `least_squares`: values and exact Jacobians of a function at many points, and their cost.

The function is computed in the type of the start. All numbers that come from it are float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from woodbury._choice import check_number, part_named
from woodbury._process import level_of_caller

_FEW = 10_000  # b m^2: up to here reverse mode is the quicker one, whatever the number of parameters
_SMALLEST, _LARGEST = 1e-75, 1e75  # of residuals and derivatives: squares of their squares are numbers


def place(wrong: Tensor, shape: Sequence[int]) -> str:
    """The first place where wrong is true, as an index into entries of this shape."""
    index = wrong.reshape(shape).nonzero()[0].tolist()
    return str(index) if index else ""


def _shared_out(value: Any, device: torch.device) -> Any:
    """An array of numbers as a tensor: fits get their entries of it."""
    is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0
    return torch.as_tensor(value, device=device) if is_array else value


class Residuals:
    """f (b, m) and J (b, m, p) at points x (b, p). Of batched fits, point i gets entry i of each of `args`."""

    def __init__(
        self, function: Callable[..., Tensor], args: Sequence[Any], shape: torch.Size, batched: bool, start: Tensor
    ) -> None:
        """start (b, p), in the type of the function; shape: that of the parameters as the function sees them."""
        if not callable(function):
            raise TypeError(f"function must be a function of the parameters, got {type(function).__name__}")
        self.batched, self._count = batched, len(start)
        self._function, self.shape, self.dtype = function, shape, start.dtype
        self._args = tuple(_shared_out(value, start.device) if batched else value for value in args)
        if batched:
            for number, value in enumerate(self._args):
                if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != len(start)):
                    raise ValueError(
                        f"args[{number}] has the shape {tuple(value.shape)}: with batched=True its first axis "
                        f"must have {len(start)} entries, one for each start; what all fits share belongs into "
                        f"function"
                    )
        point = start[0].detach().requires_grad_()
        try:
            with torch.enable_grad():
                first = self._function(point.reshape(shape), *self._arguments(0))
        except RuntimeError as error:
            if "numpy()" not in str(error):
                raise
            raise TypeError(
                "function must compute in torch, and NumPy was called with the parameters: write torch.exp for "
                f"np.exp and so on, and torch.as_tensor(data) for arrays that they are combined with ({error})"
            ) from error
        if not isinstance(first, Tensor):
            raise TypeError(
                f"function must return a tensor of residuals, got {type(first).__name__}; "
                f"torch.stack or torch.cat make one of several"
            )
        if not first.dtype.is_floating_point or first.numel() == 0:
            raise ValueError(
                f"function must return one residual or more in floating point, got {first.dtype} of the shape "
                f"{tuple(first.shape)}"
            )
        if not first.requires_grad:
            raise ValueError(
                "the residuals do not depend on the parameters by operations that autograd follows: compute them "
                "from the tensor that function gets, without detach(), item(), numpy() or torch.no_grad()"
            )
        self.output_shape = first.shape
        self.epsilon = max(torch.finfo(dtype).eps for dtype in (first.dtype, start.dtype))
        self._maps = batched and self._can_map(start, first)
        self._jacobian = self._choose(point, first)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """f (b, m) at x (b, p); rows (b,) says which of all fits these are."""
        return self._map(self._flat, x, rows)

    def jacobian(self, x: Tensor, rows: Tensor) -> Tensor:
        """J (b, m, p)."""
        return self._map(self._jacobian, x, rows)

    def begin(self, x: Tensor, within: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """f and J at the start; raises an error that says where they cannot be used. within: bounds on x."""
        rows = torch.arange(len(x), device=x.device)
        f, J = self(x, rows), self.jacobian(x, rows)
        fits = (len(x),) if self.batched else ()
        of_outputs, of_parameters = (*fits, *self.output_shape), (*fits, *self.shape)
        wrong_f, wrong_x = ~torch.isfinite(f), ~torch.isfinite(J).all(1)
        parameter = "the derivative in parameter"
        for name, wrong, shape in (("residual", wrong_f, of_outputs), (parameter, wrong_x, of_parameters)):
            if wrong.any():
                advice = "start elsewhere, or find the operation in function that gives it"
                raise ValueError(f"{name}{place(wrong, shape)} is not finite at the start; {advice}")
        largest_f, largest_x = f.abs().amax(-1), J.abs().amax(1)
        for name, sizes, shape in (("residuals", largest_f, fits), ("derivatives", largest_x, of_parameters)):
            wrong = (sizes > 0) & ~((sizes > _SMALLEST) & (sizes < _LARGEST))
            if wrong.any():
                raise ValueError(
                    f"the {name}{place(wrong, shape)} are of the size {sizes[wrong][0].item():.0e}, whose square "
                    "is no number: take another unit for them"
                )
        self._find_lost_derivatives(x, rows, (J == 0).all(1), within)
        return f, J

    def _find_lost_derivatives(self, x: Tensor, rows: Tensor, still: Tensor, within: Sequence[Any]) -> None:
        """Warn if residuals change with parameters in which their derivatives are zero; still (b, p)."""
        step = still * self.epsilon ** (1 / 3) * (1 + x.abs())

        def changes(step: Tensor) -> bool:
            ahead, behind = (self((x + side * step).clamp(*within), rows) for side in (1, -1))
            size = (ahead.abs() + behind.abs()).amax(-1, keepdim=True)
            return bool(((ahead - behind).abs() > math.sqrt(self.epsilon) * size).any())

        if not still.any() or not changes(step):
            return
        for entry in still.any(0).nonzero().flatten():
            alone = torch.zeros_like(step)
            alone[:, entry] = step[:, entry]
            if changes(alone):
                index = place(torch.arange(x.shape[1], device=x.device) == entry, self.shape)
                warnings.warn(
                    f"the residuals change with parameter{index} of start, but their derivative in it is zero: it "
                    "will stay where it is. Compute them without item(), float(), detach() or numpy() of it",
                    RuntimeWarning,
                    stacklevel=level_of_caller(),
                )
                return

    def rounded(self, x: Tensor) -> Tensor:
        """Points that the function can be computed at."""
        return x.to(self.dtype).double()

    def _flat(self, x: Tensor, *args: Any) -> Tensor:
        return self._function(x.reshape(self.shape), *args).reshape(-1)

    def _arguments(self, row: int) -> tuple[Any, ...]:
        if not self.batched:
            return self._args
        return tuple(value[row] if isinstance(value, Tensor) else value for value in self._args)

    def _map(self, compute: Callable[..., Tensor], x: Tensor, rows: Tensor) -> Tensor:
        """compute(x, *args) for each point, stacked."""
        x = x.to(self.dtype)
        with torch.enable_grad():  # the function may compute derivatives itself
            if not self._maps or compute == self._by_rows:
                each = [compute(point, *self._arguments(row)) for point, row in zip(x, rows.tolist(), strict=True)]
                values = torch.stack(each)
            else:
                args = [value[rows] if isinstance(value, Tensor) else value for value in self._args]
                axes = [0 if isinstance(value, Tensor) else None for value in args]
                values = torch.func.vmap(compute, in_dims=(0, *axes))(x, *args)
        return values.detach().double()

    def _first(self, compute: Callable[..., Tensor], start: Tensor) -> Tensor | None:
        """What torch.func gives for the first fit; None where it cannot transform the function."""
        try:
            return self._map(compute, start[:1], torch.zeros(1, dtype=torch.int64, device=start.device))[0]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever torch.func does not like; the function itself has run
            return None

    def _can_map(self, start: Tensor, first: Tensor) -> bool:
        """Whether torch.func maps the function over points; first: what it gives at the first of them."""
        self._maps = True
        mapped = self._first(self._flat, start)
        if mapped is None:
            return False
        tolerance, first = math.sqrt(self.epsilon), first.detach().flatten().to(mapped)
        size = first.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        return torch.allclose(mapped, first, tolerance, tolerance * size, equal_nan=True)

    def _choose(self, point: Tensor, first: Tensor) -> Callable[..., Tensor]:
        """How to compute Jacobians: by torch.func, or row by row where that cannot transform the function.

        What torch.func gives is compared, in one combination of rows, with plain autograd.
        """
        forward, reverse = torch.func.jacfwd(self._flat), torch.func.jacrev(self._flat)
        weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype, device=first.device)
        (expected,) = torch.autograd.grad(first.flatten(), point, weights, materialize_grads=True)
        weights, expected = weights.double(), expected.double()
        # Forward mode carries p numbers along with each, reverse mode m, but it has less to do per operation.
        few = self._count * first.numel() ** 2 <= _FEW
        for compute in (reverse, forward) if few or point.numel() > first.numel() else (forward, reverse):
            J = self._first(compute, point.detach().unsqueeze(0))
            if J is None:
                continue
            error = (weights @ J - expected).abs()
            agree = error <= math.sqrt(self.epsilon) * (weights @ J.abs())
            if bool((agree | ~expected.isfinite()).all()):
                return compute
        return self._by_rows

    def _by_rows(self, x: Tensor, *args: Any) -> Tensor:
        x = x.detach().requires_grad_()
        f = self._flat(x, *args)
        rows = [torch.autograd.grad(value, x, retain_graph=True, materialize_grads=True)[0] for value in f]
        return torch.stack(rows)


Rho = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # z -> rho(z), rho'(z), rho''(z)


def _soft_l1(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    root = (1 + z).sqrt()
    return 2 * z / (1 + root), 1 / root, -0.5 / root**3


def _huber(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner, root = z <= 1, z.clamp(min=1).sqrt()
    curvature = torch.where(inner, 0.0, -0.5 / root**3)
    return torch.where(inner, z, 2 * root - 1), 1 / root, curvature


def _cauchy(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2


def _arctan(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    slope = 1 / (1 + z * z)
    return torch.atan(z), slope, -2 * z * slope * slope


LOSSES: dict[str, Rho | None] = {
    "linear": None,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}

_FARTHEST = 2.0**500  # its square does not overflow
_SCALES = 1e-75, 1e140  # of C


class Loss:
    """The cost 1/2 sum_i C^2 rho(f_i^2 / C^2) of residuals f (b, m)."""

    def __init__(self, name: str, f_scale: float) -> None:
        """f_scale: C."""
        self._rho = part_named("loss", name, LOSSES)
        self.is_linear = self._rho is None
        check_number("f_scale", f_scale, least=_SCALES[0], most=_SCALES[1])
        self._scale = float(f_scale)

    def cost(self, f: Tensor) -> Tensor:
        """(b,)"""
        if self._rho is None:
            return 0.5 * f.square().sum(-1)
        return 0.5 * self._scale**2 * self._rho(self._z(f))[0].sum(-1)

    def _z(self, f: Tensor) -> Tensor:
        return (f / self._scale).square().clamp(max=_FARTHEST)

    def gauss_newton(self, f: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals and Jacobian with J^T f the gradient of the cost and J^T J its Gauss-Newton Hessian.

        Row i of J times sqrt(h_i) and f_i rho' / sqrt(h_i), with h_i = rho' + 2 rho'' z the second derivative of
        rho(t^2) / 2 at t^2 = z = f_i^2 / C^2 (Triggs et al. 2000, section 4.3). Where that is not positive, h_i is
        a small part of rho'.
        """
        if self._rho is None:
            return f, J
        z = self._z(f)
        _, slope, curvature = self._rho(z)
        smallest = math.sqrt(torch.finfo(f.dtype).eps)  # h is cancelled by f rho' / h: rounding must not show
        root = torch.maximum(slope + 2 * curvature * z, smallest * slope).sqrt()
        return f * (slope / root), J * root.unsqueeze(-1)
