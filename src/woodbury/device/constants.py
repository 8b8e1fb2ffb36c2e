"""Small constant tensors, made once and kept: writing one to a device costs as much as an operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Make = TypeVar("Make", bound=Callable[..., Tensor])


def constant_tensor(make: Make) -> Make:
    """Decorator: one tensor per set of arguments, at a fixed address, as a recorded CUDA graph needs it.

    It is an ordinary tensor even if it is made in inference mode, as autograd may need it later.
    """

    def make_ordinary(*arguments: object) -> Tensor:
        with torch.inference_mode(False):
            return make(*arguments)

    return cache(make_ordinary)  # type: ignore[return-value]


@constant_tensor
def ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of ones."""
    return torch.ones(size, dtype=dtype, device=device)


@constant_tensor
def indices(size: int, device: torch.device) -> Tensor:
    """0, 1, ..., size - 1."""
    return torch.arange(size, device=device)


@constant_tensor
def zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number 0."""
    return torch.zeros((), dtype=dtype, device=device)


@constant_tensor
def identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An identity matrix."""
    return torch.eye(size, dtype=dtype, device=device)
