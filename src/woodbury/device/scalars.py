"""Single numbers that never make a step wait: plain floats on the CPU, numbers of the device elsewhere.

Arithmetic and comparisons are written once with the ordinary operators; what they lack is here. On the CPU a
float costs a fraction of a 0-dim tensor, and a small step consists of many such numbers; on a CUDA device see
`woodbury.device.numbers`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from woodbury.device.constants import kept
from woodbury.device.numbers import Number, number

Scale = float | Tensor  # what a tensor can be multiplied by in place
Scalar = float | Tensor | Number
Truth = bool | Tensor | Number


def scalar(value: Tensor) -> Scalar:
    """A 0-dim tensor as a number of its device; what is computed from it and a double is a double."""
    return value.item() if value.device.type == "cpu" else number(value)


def truth(value: Tensor) -> Truth:
    """A boolean tensor with one entry as a truth value of its device."""
    return bool(value) if value.device.type == "cpu" else number(value.reshape(()))


def as_number(value: Scalar) -> Scalar:
    """A number kept from an earlier step, to compute with in this one."""
    return number(value) if isinstance(value, Tensor) else value


def is_known(value: Scalar | Truth) -> bool:
    """Whether asking for the value would not wait."""
    return not isinstance(value, Tensor | Number)


def placed(value: Scalar, device: torch.device) -> float | Tensor:
    """The same number for use on a device, wherever it was before."""
    if device.type == "cpu":
        return float(value)
    if isinstance(value, Tensor) and value.dtype == torch.float64 and value.device == device:
        return value
    return torch.as_tensor(value, dtype=torch.float64, device=device)


@kept
def constant(value: float, device: torch.device) -> Tensor:
    """A number kept on a device: writing a new one there costs as much as any operation on it.

    In single precision where that is exact, so that it does not change the type of what it meets.
    """
    exact = math.isinf(value) or float(torch.tensor(value, dtype=torch.float32)) == value
    return torch.tensor(value, dtype=torch.float32 if exact else torch.float64, device=device)


@kept
def ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of ones kept on a device."""
    return torch.ones(count, dtype=dtype, device=device)


def where(condition: Truth, a: Scalar, b: Scalar) -> Scalar:
    """a where the condition holds, else b."""
    if isinstance(condition, Number):
        return condition.where(a, b)
    if isinstance(condition, Tensor):
        a, b = (constant(x, condition.device) if isinstance(x, float | int) else x for x in (a, b))
        return torch.where(condition, a, b)  # type: ignore[arg-type]
    return a if condition else b


def ratio_where(condition: Truth, a: Scalar, b: Scalar, otherwise: float) -> Scalar:
    """a / b where the condition holds."""
    if is_known(condition):
        return a / b if condition else otherwise
    return where(condition, a / b, otherwise)


def magnitude(value: Scalar) -> Scalar:
    """|value|."""
    return value.abs() if isinstance(value, Tensor) else value.__abs__()


def root(value: Scalar) -> Scalar:
    """Square root; rounding may have left a square a little below zero."""
    if isinstance(value, Number):
        return value.root()
    if isinstance(value, Tensor):
        return value.clamp_min(0).sqrt()
    return max(value, 0.0) ** 0.5 if value == value else value


def as_double(value: Scalar) -> Tensor:
    """The number as a 0-dim tensor in double precision."""
    if isinstance(value, Number):
        value = value.tensor()
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value.clone().double() if value.is_inference() else value.double()


def as_truth(value: Truth) -> Tensor:
    """The truth value as a 0-dim boolean tensor."""
    if isinstance(value, Number):
        value = value.tensor()
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    return value.clone().bool() if value.is_inference() else value.bool()
