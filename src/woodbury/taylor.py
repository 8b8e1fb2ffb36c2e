"""Derivatives along a direction by nested forward mode, and Taylor coefficients of functions of one number.

Two nested `torch.func.jvp`s give a wrong second derivative, and no warning, where a forward-mode formula uses a
number saved by the forward pass (the mean of a layer norm, the factors of a determinant): they take it for a
constant. Seen in torch 2.13, against central differences. A single one does so where an operation in place has its
own tensor as an operand too: x.mul_(x) gives twice the derivative. Here such operations are replaced or raise.

The Taylor coefficients are c_j = phi^(j)(z) / j! for j = 0, ..., degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def derivatives_along(function: Callable[..., Any], point: Any, direction: Any, order: int = 2) -> tuple[Any, ...]:
    """f, f'[d], f''[d, d] and so on at a point, for tensors or nestings of tensors."""

    with Corrected():
        return _up_to(order, function, direction, point)


def _up_to(order: int, function: Callable[..., Any], direction: Any, x: Any) -> tuple[Any, ...]:
    """f to this derivative. No inner function: one that calls itself is a circle, which keeps f alive."""
    if order == 0:
        return (function(x),)
    lower = partial(_up_to, order - 1, function, direction)
    values, slopes = cast(Any, torch.func.jvp(lower, (x,), (direction,)))
    return (*values, slopes[-1])


_WRONG = {"instance_norm", "det", "linalg_det", "logdet", "slogdet", "linalg_slogdet"}
_WRONG |= {"linalg_solve", "linalg_solve_ex"}


class Corrected(TorchFunctionMode):
    """Inside, layer norms are computed by plain operations, and other functions with a wrong formula raise.

    Operations in place get copies of their operands.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and (name.startswith("__i") or not name.endswith("__")):
            args = (*args[:1], *(own.clone() if isinstance(own, Tensor) else own for own in args[1:]))
        if name == "layer_norm":
            return _layer_norm(*args, **(kwargs or {}))
        if name in _WRONG:
            raise NotImplementedError(
                f"torch gives a wrong second derivative of {name} by forward mode. Two ways out: write it with "
                "other operations (torch.linalg.inv, a product of pivots), or take it out of the function"
            )
        return func(*args, **(kwargs or {}))


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    result = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def taylor_coefficients(
    function: Callable[..., Any], z: Tensor, degree: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Those of function(z, *args, **kwargs), by a formula or along ones: no entry depends on another one of z."""
    formula = FORMULAS.get(function.__name__)
    if formula is not None:
        return formula(z, degree)
    own = derivatives_along(lambda z: function(z, *args, **kwargs), z, torch.ones_like(z), degree)
    return _divide_by_factorials(own)


def _divide_by_factorials(derivatives: Sequence[Tensor]) -> list[Tensor]:
    return [own if j < 2 else own / math.factorial(j) for j, own in enumerate(derivatives)]


def _sigmoid(z: Tensor, degree: int) -> list[Tensor]:
    v = torch.sigmoid(z)
    first = v * (1 - v)
    return _quadratic([v, first, first * (0.5 - v)], 1, degree)


def _tanh(z: Tensor, degree: int) -> list[Tensor]:
    v = torch.tanh(z)
    first = 1 - v * v
    return _quadratic([v, first, -v * first], 0, degree)


def _quadratic(c: list[Tensor], linear: int, degree: int) -> list[Tensor]:
    """Of v' = a + linear v - v^2: (k + 1) c_{k+1} = linear c_k - sum_i c_i c_{k-i} for k > 0."""
    for k in range(2, degree):
        c.append((linear * c[k] - sum(c[i] * c[k - i] for i in range(k + 1))) / (k + 1))
    return c[: degree + 1]


def _silu(z: Tensor, degree: int) -> list[Tensor]:
    s = _sigmoid(z, degree)
    return [z * s[0], *(own + z * following for own, following in pairwise(s))]


def _wave(shift: int, z: Tensor, degree: int) -> list[Tensor]:
    """Of sin for shift 0, of cos for 1: the derivatives are sin, cos, -sin, -cos in turn."""
    sine, cosine = torch.sin(z), torch.cos(z)
    turns = (sine, cosine, -sine, -cosine)
    return _divide_by_factorials([turns[(shift + j) % 4] for j in range(degree + 1)])


def _exp(z: Tensor, degree: int) -> list[Tensor]:
    return _divide_by_factorials([torch.exp(z)] * (degree + 1))


Formula = Callable[[Tensor, int], list[Tensor]]
FORMULAS: dict[str, Formula] = {"tanh": _tanh, "sigmoid": _sigmoid, "silu": _silu, "exp": _exp}
FORMULAS |= {"sin": partial(_wave, 0), "cos": partial(_wave, 1)}
