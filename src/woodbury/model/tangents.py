"""Derivatives of the outputs along vectors p of parameters: J p, and y'' = d^2/dt^2 y(theta + t p) at t = 0.

By forward mode: torch.func, once for J p and nested for y''. A model that it cannot transform (one that calls
torch.autograd.grad, a custom Function) has J p by differentiating J^T u in u, and y'' by central differences

    y'' = (y(theta + h p) - 2 y(theta) + y(theta - h p)) / h^2 ,    h |p| = eps^(1/4) |theta|

whose error is about sqrt(eps) of the outputs, as rounding and the next term of the series are both of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from woodbury import _vector
from woodbury._vector import Parts
from woodbury.layers.maps import plain_attention
from woodbury.model.fallback import Pass, no_batching_warnings
from woodbury.taylor import derivatives_along

MovedOutputs = Callable[[Parts], Tensor]  # the outputs after a change of the parameters


def push_forward(forward_pass: Pass, vectors: Sequence[Parts]) -> Tensor | None:
    """J p of each vector, (k, n, C), in one batched pass; None if the model does not allow forward mode."""

    def push(point: Parts, directions: Parts, inputs: Any) -> Any:
        along = _along(forward_pass, inputs)
        jvp: Any = torch.func.jvp
        values, images = torch.func.vmap(lambda own: jvp(along, (point,), (own,)), randomness="same")(directions)
        return values[0], images

    names = forward_pass.plan.parameters
    return _attempt(forward_pass, push, {name: torch.stack([own[name] for own in vectors]) for name in names})


def second_derivative(forward_pass: Pass, vector: Parts) -> Tensor | None:
    """y'' along a vector, (n, C), by nested forward mode; None if the model does not allow it."""

    def bend(point: Parts, direction: Parts, inputs: Any) -> Any:
        values, _, curve = derivatives_along(_along(forward_pass, inputs), point, direction)
        return values, curve

    return _attempt(forward_pass, bend, {name: vector[name] for name in forward_pass.plan.parameters})


def central_difference(forward_pass: Pass, run: MovedOutputs, vector: Parts) -> Tensor:
    """y'' along a vector from the outputs at theta and at theta +- h p."""
    outputs, step = forward_pass.outputs.detach(), _difference_step(forward_pass, vector)
    ahead, behind = (run({name: sign * step * value for name, value in vector.items()}) for sign in (1, -1))
    return ((ahead - outputs) + (behind - outputs)) / step.square()


def agrees_with_differences(nested: Tensor, forward_pass: Pass, run: MovedOutputs, vector: Parts) -> bool:
    """Whether y'' by forward mode is that of central differences, as far as their rounding lets them tell.

    torch has formulas that are wrong where forward mode is nested. Those known are left out
    (`woodbury.taylor`); this finds others.
    """
    outputs, step = forward_pass.outputs.detach(), _difference_step(forward_pass, vector)
    differences = central_difference(forward_pass, run, vector)
    eps, size = torch.finfo(outputs.dtype).eps, nested.abs().max()
    excess = (nested - differences).abs().max() - 0.1 * size
    noise = 100 * eps / step.square()  # times the size of the outputs, or of the terms they are a difference of
    if bool(excess <= noise * outputs.abs().max()):
        return True
    return bool(excess <= noise * forward_pass.moved(eps**0.5) / eps**0.5)


def _difference_step(forward_pass: Pass, vector: Parts) -> Tensor:
    """h."""
    dtype = forward_pass.outputs.dtype
    size = _vector.norm({name: own.detach() for name, own in forward_pass.plan.parameters.items()})
    length = _vector.norm(vector)
    step = torch.finfo(dtype).eps ** 0.25 * torch.where(size > 0, size, 1.0)
    return (step / torch.where(length > 0, length, 1.0)).to(dtype)


def _along(forward_pass: Pass, inputs: Any) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The outputs (n, C) as a function of the parameters."""
    samples = len(forward_pass.outputs)
    return lambda values: forward_pass.run_with(values, inputs).reshape(samples, -1)


def _attempt(forward_pass: Pass, derive: Callable[..., Any], along: Parts) -> Tensor | None:
    """The second of the outputs and derivatives that derive(parameters, along, inputs) gives; replayed by name.

    None where torch.func cannot transform the model, or gives other outputs.
    """
    point = {name: parameter.detach() for name, parameter in forward_pass.plan.parameters.items()}
    try:
        with no_batching_warnings, torch.no_grad(), plain_attention:
            outputs, derivative = forward_pass.repeat(derive.__name__, derive, point, along, forward_pass.inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever torch.func does not like
        return None
    return derivative if forward_pass.gives(outputs) else None
