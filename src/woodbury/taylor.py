"""Taylor coefficients c_j = phi^(j)(z) / j! of functions of one number, for j = 0, ..., degree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from woodbury._forward_mode import derivatives_along


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
