"""Small constant tensors, made once and kept: writing one to a device costs as much as an operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Make = TypeVar("Make", bound=Callable[..., Tensor])

LIMIT = 32  # tensors kept by each function: batches of ever new sizes must not fill the memory
_made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # those that are still in use
_numbers = count()


def constant_tensor(make: Make) -> Make:
    """Decorator: one tensor per set of arguments; the `LIMIT` that were asked for last are kept.

    It is an ordinary tensor even if it is made in inference mode, as autograd may need it later.
    """

    def make_ordinary(*arguments: object) -> Tensor:
        with torch.inference_mode(False):
            tensor = make(*arguments)
        _made[next(_numbers)] = tensor
        return tensor

    return lru_cache(LIMIT)(make_ordinary)  # type: ignore[return-value]


def all_constants() -> list[Tensor]:
    """Every constant in use now: a recorded CUDA graph reads them where they are, and must keep them there."""
    references = _made.valuerefs()  # one operation, whatever other threads make meanwhile
    return [tensor for tensor in (reference() for reference in references) if tensor is not None]


def _constant(make: Callable[..., Tensor]) -> Callable[[int | tuple[()], torch.dtype, torch.device], Tensor]:
    def constant(size: int | tuple[()], dtype: torch.dtype, device: torch.device) -> Tensor:
        return make(size, dtype=dtype, device=device)

    return constant_tensor(constant)


ones = _constant(torch.ones)
zeros = _constant(torch.zeros)
identity = _constant(torch.eye)
indices = _constant(torch.arange)
