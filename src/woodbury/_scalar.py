"""Single numbers that never make a step wait: plain floats on the CPU, 0-dim tensors on other devices.

Arithmetic and comparisons are written once with the ordinary operators; what they lack is here. On the CPU a
float costs a fraction of a 0-dim tensor, and a small step consists of many such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Scalar = float | Tensor
Truth = bool | Tensor


def scalar(value: Tensor) -> Scalar:
    """A 0-dim tensor as a number of its device, in double precision."""
    return value.item() if value.device.type == "cpu" else value.double()


def truth(value: Tensor) -> Truth:
    """A 0-dim boolean tensor as a truth value of its device."""
    return bool(value) if value.device.type == "cpu" else value


def placed(value: Scalar, device: torch.device) -> Scalar:
    """The same number for use on a device, wherever it was before."""
    if device.type == "cpu":
        return float(value)
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def where(condition: Truth, a: Scalar, b: Scalar) -> Scalar:
    """a where the condition holds, else b."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def magnitude(value: Scalar) -> Scalar:
    """|value|."""
    return value.abs() if isinstance(value, Tensor) else abs(value)


def root(value: Scalar) -> Scalar:
    """Square root; rounding may have left a square a little below zero."""
    result: Scalar = where(value < 0, 0.0 * value, value) ** 0.5
    return result


def tensors(values: Sequence[Scalar]) -> Sequence[Tensor]:
    """The numbers as 0-dim tensors."""
    if all(isinstance(value, Tensor) for value in values):
        return values  # type: ignore[return-value]
    return torch.tensor(values, dtype=torch.float64).unbind()
