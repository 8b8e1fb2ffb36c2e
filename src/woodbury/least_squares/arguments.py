"""The arguments of `least_squares`, checked: an error names the argument, the place in it and a way out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def starting_points(start: Any, batched: bool) -> tuple[Tensor, torch.Size]:
    """The starts (b, p), and the shape of the parameters as the function sees them."""
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
    shape = x.shape[1:] if batched else x.shape
    x = x.reshape(len(x) if batched else 1, -1).clone()
    if not torch.isfinite(x).all():
        raise ValueError(f"start{place(~torch.isfinite(x), shape, batched)} is not finite")
    return x, shape


def place(wrong: Tensor, shape: torch.Size, batched: bool) -> str:
    """The first place where wrong (b, n) is true, as an index into entries of this shape."""
    row, entry = wrong.nonzero()[0].tolist()
    index = [int(i) for i in torch.unravel_index(torch.tensor(entry, device="cpu"), shape)] if len(shape) else []
    index = [row, *index] if batched else index
    return str(index) if index else ""


def _for_each(name: str, value: Any, x: Tensor, shape: torch.Size, batched: bool) -> Tensor:
    """A number, or one for each parameter, as (b, p) of float64, rounded to the type of x."""
    whole = (len(x), *shape) if batched else tuple(shape)
    try:
        numbers = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        return numbers.broadcast_to(whole).reshape(x.shape).double()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a number or numbers of the shape {whole} of start, got {value!r}"
        ) from None


class Bounds(NamedTuple):
    """The lower and upper bounds of every fit, (b, p)."""

    lower: Tensor
    upper: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.lower[rows], self.upper[rows]


def limits(bounds: Any, x: Tensor, shape: torch.Size, batched: bool) -> Bounds | None:
    if bounds is None:
        return None
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be a pair (lower, upper), got {bounds!r}") from None
    lower = _for_each("the lower bound", -math.inf if low is None else low, x, shape, batched)
    upper = _for_each("the upper bound", math.inf if high is None else high, x, shape, batched)
    if not (lower < upper).all():
        raise ValueError(
            f"the lower bound{place(~(lower < upper), shape, batched)} is not below the upper one; to hold a "
            f"parameter fixed, leave it out of start"
        )
    outside = ~((lower <= x) & (x <= upper))
    if outside.any():
        number = outside.nonzero()[0].tolist()
        low, value, high = (side[number[0], number[1]].item() for side in (lower, x, upper))
        raise ValueError(
            f"start{place(outside, shape, batched)} = {value:g} is outside its bounds {low:g} to {high:g}; start "
            f"inside them, for example from start.clamp(lower, upper)"
        )
    return Bounds(lower, upper)


def diagonal(x_scale: Any, x: Tensor, shape: torch.Size, batched: bool) -> Tensor | None:
    """D = 1 / x_scale (b, p); None for "jac"."""
    if isinstance(x_scale, str):
        if x_scale == "jac":
            return None
        raise ValueError(f'x_scale must be "jac" or positive numbers, got {x_scale!r}')
    scales = _for_each("x_scale", x_scale, x, shape, batched)
    wrong = ~((scales > 0) & torch.isfinite(scales))
    if wrong.any():
        raise ValueError(f"x_scale{place(wrong, shape, batched)} is not a positive number")
    return 1 / scales
