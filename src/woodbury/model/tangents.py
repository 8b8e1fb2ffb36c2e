"""Derivatives of the outputs along vectors p of parameters: J p, and y'' = d^2/dt^2 y(theta + t p) at t = 0.

J p comes from differentiating J^T u in u (`woodbury.products`), y'' from two more passes:

    y'' = (y(theta + h p) - 2 y(theta) + y(theta - h p)) / h^2 ,    h |p| = eps^(1/4) |theta|

Its error is about sqrt(eps) of the outputs times |p|^2 / |theta|^2, as rounding and the next term of the series
are both of that size: half of the digits, and the bend of a path needs no more. (Forward mode takes more time for
either, seconds to import, and some of torch's formulas are wrong where it is nested, without a warning.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Parts
from woodbury.model.fallback import Pass
from woodbury.products import jacobian_products

MovedOutputs = Callable[[Parts], Tensor]  # the outputs after a change of the parameters


def push_forward(forward_pass: Pass, vectors: Sequence[Parts]) -> Tensor:
    """J p of each vector, (k, n, C), from the graph of the pass."""
    product = jacobian_products(forward_pass.outputs, forward_pass.plan.parameters)
    return torch.stack([product(vector) for vector in vectors])


def push_forward_again(forward_pass: Pass, vectors: Sequence[Parts]) -> Tensor:
    """The same from another pass, recorded with what follows from it."""

    def push(point: Parts, directions: Sequence[Parts], inputs: Any) -> Tensor:
        with torch.enable_grad():
            values = {name: own.detach().requires_grad_() for name, own in point.items()}
            outputs = forward_pass.run_with(values, inputs).reshape(forward_pass.outputs.shape)
        product = jacobian_products(outputs, values)
        return torch.stack([product(vector) for vector in directions])

    point = {name: own.detach() for name, own in forward_pass.plan.parameters.items()}
    images: Tensor = forward_pass.repeat("push", push, point, list(vectors), forward_pass.inputs)
    return images.detach()


def second_derivative(forward_pass: Pass, run: MovedOutputs, vector: Parts, precision: torch.dtype) -> Tensor:
    """y'' along a vector, (n, C), from the outputs at theta +- h p of passes with the digits of `precision`."""
    plan, outputs = forward_pass.plan, forward_pass.outputs.detach()
    size = _vector.norm({name: own.detach() for name, own in plan.parameters.items()})
    length = _vector.norm(vector)
    share = torch.finfo(precision).eps ** 0.25
    step = (share * torch.where(size > 0, size, 1.0) / torch.where(length > 0, length, 1.0)).to(outputs.dtype)
    ahead, behind = (run({name: sign * step * value for name, value in vector.items()}) for sign in (1, -1))
    return ((ahead - outputs) + (behind - outputs)) / step.square()
