"""Small tensors that are made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Make = TypeVar("Make", bound=Callable[..., Tensor])


def kept(make: Make) -> Make:
    """Decorator: a tensor for each set of arguments, never let go: a recorded CUDA graph reads it where it is.

    Made as an ordinary tensor, also where the first to ask does so in inference mode: autograd may need it later.
    """

    def made(*arguments: object) -> Tensor:
        with torch.inference_mode(False):
            return make(*arguments)

    return cache(made)  # type: ignore[return-value]
