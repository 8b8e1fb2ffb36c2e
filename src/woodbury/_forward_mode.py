"""Derivatives of a function along a direction by nested forward mode, without those that torch gets wrong.

Two nested `torch.func.jvp`s give a wrong second derivative, and no warning, where a forward-mode formula uses a
number saved by the forward pass (the mean of a layer norm, the factors of a determinant): they take it for a
constant. Seen in torch 2.13, against central differences. A single one does so where an operation in place has its
own tensor as an operand too: x.mul_(x) gives twice the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def derivatives_along(
    function: Callable[[Any], Any], point: Any, direction: Any, order: int = 2
) -> tuple[Any, ...]:
    """f, f'[d], f''[d, d] and so on at a point, for tensors or nestings of tensors."""

    def raised(lower: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
        def push(x: Any) -> tuple[Any, ...]:
            values, slopes = cast(Any, torch.func.jvp(lower, (x,), (direction,)))
            return (*values, slopes[-1])

        return push

    push: Callable[[Any], tuple[Any, ...]] = lambda x: (function(x),)  # noqa: E731
    for _ in range(order):
        push = raised(push)
    with Corrected():
        return push(point)


_WRONG = frozenset(
    (
        *("instance_norm", "det", "linalg_det", "logdet", "slogdet", "linalg_slogdet"),
        *("linalg_solve", "linalg_solve_ex"),
    )
)


class Corrected(TorchFunctionMode):
    """Inside, layer norms are computed by plain operations, and other functions with a wrong formula raise.

    Operations in place get copies of their operands.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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
