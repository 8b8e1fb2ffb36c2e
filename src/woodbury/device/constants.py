"""Small constant tensors, made once and never let go: writing one to a device costs as much as an operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Make = TypeVar("Make", bound=Callable[..., Tensor])


def constant_tensor(make: Make) -> Make:
    """Decorator: one tensor for each set of arguments; a recorded CUDA graph reads it where it is.

    Made as an ordinary tensor, also where the first to ask does so in inference mode: autograd may need it later.
    """

    def ordinary(*arguments: object) -> Tensor:
        with torch.inference_mode(False):
            return make(*arguments)

    return cache(ordinary)  # type: ignore[return-value]


@constant_tensor
def ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of ones."""
    return torch.ones(count, dtype=dtype, device=device)


@constant_tensor
def indices(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1."""
    return torch.arange(count, device=device)


@constant_tensor
def zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number 0."""
    return torch.zeros((), dtype=dtype, device=device)


@constant_tensor
def identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An identity matrix."""
    return torch.eye(size, dtype=dtype, device=device)
