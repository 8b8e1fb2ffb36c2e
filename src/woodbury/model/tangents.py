"""Derivatives of the outputs along vectors p of parameters: J p, and y'' = d^2/dt^2 y(theta + t p) at t = 0.

J p comes from forward mode, by torch.func; where that cannot transform the model (one that calls
torch.autograd.grad, a custom Function), by differentiating J^T u in u. y'' comes from two more passes:

    y'' = (y(theta + h p) - 2 y(theta) + y(theta - h p)) / h^2 ,    h |p| = eps^(1/4) |theta|

Its error is about sqrt(eps) of the outputs times |p|^2 / |theta|^2, as rounding and the next term of the series
are both of that size: half of the digits, and the bend of a path needs no more. (Nested forward mode takes more
time, and some of torch's formulas are wrong there, without a warning.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Parts
from woodbury.layers.maps import plain_attention
from woodbury.model.fallback import Pass, no_batching_warnings

MovedOutputs = Callable[[Parts], Tensor]  # the outputs after a change of the parameters


def push_forward(forward_pass: Pass, vectors: Sequence[Parts]) -> Tensor | None:
    """J p of each vector, (k, n, C), in one batched pass.

    None where torch.func cannot transform the model, or gives other outputs.
    """
    samples = len(forward_pass.outputs)

    def push(point: Parts, directions: Parts, inputs: Any) -> Any:
        def along(values: Parts) -> Tensor:
            return forward_pass.run_with(values, inputs).reshape(samples, -1)

        jvp: Any = torch.func.jvp
        values, images = torch.func.vmap(lambda own: jvp(along, (point,), (own,)), randomness="same")(directions)
        return values[0], images

    parameters = forward_pass.plan.parameters
    point = {name: parameter.detach() for name, parameter in parameters.items()}
    directions = {name: torch.stack([own[name] for own in vectors]) for name in parameters}
    try:
        with no_batching_warnings, torch.no_grad(), plain_attention:
            outputs, images = forward_pass.repeat("push", push, point, directions, forward_pass.inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever torch.func does not like
        return None
    return images if forward_pass.gives(outputs) else None


def second_derivative(forward_pass: Pass, run: MovedOutputs, vector: Parts, precision: torch.dtype) -> Tensor:
    """y'' along a vector, (n, C), from the outputs at theta +- h p of passes with the digits of `precision`."""
    plan, outputs = forward_pass.plan, forward_pass.outputs.detach()
    size = _vector.norm({name: own.detach() for name, own in plan.parameters.items()})
    length = _vector.norm(vector)
    share = torch.finfo(precision).eps ** 0.25
    step = (share * torch.where(size > 0, size, 1.0) / torch.where(length > 0, length, 1.0)).to(outputs.dtype)
    ahead, behind = (run({name: sign * step * value for name, value in vector.items()}) for sign in (1, -1))
    return ((ahead - outputs) + (behind - outputs)) / step.square()
