"""Value, gradient and Laplacian of a network in its inputs, by one pass (the forward Laplacian).

With v the values of a layer, v_i their derivatives along the axes and l = sum_i w_i d2v/dx_i2, a layer f makes

    f(v),    f'(v) v_i,    f'(v) l + sum_i w_i f''(v)[v_i, v_i]

of them: W v + b, W v_i and W l if it is Linear; phi(z), phi'(z) z_i and phi'(z) l + phi''(z) sum_i w_i z_i^2 if it
is an activation. Nested differentiation carries a second derivative along every axis through the network; this
carries their sum alone (Li et al., A computational framework for neural network-based variational Monte Carlo with
Forward Laplacian, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from woodbury._forward_mode import Corrected, derivatives_along
from woodbury._process import has_global_hook, has_hook
from woodbury.device.constants import constant_tensor, identity


class Laplacian(NamedTuple):
    """What `laplacian` returns for points (n, d) and outputs (n, C)."""

    value: Tensor  # (n, C)
    gradient: Tensor  # (n, C, d)
    laplacian: Tensor  # (n, C)


def laplacian(model: nn.Module, points: Tensor, weights: Sequence[float] | Tensor | None = None) -> Laplacian:
    """Value, gradient and sum_i w_i d2/dx_i2 of model(points), in the points (n, d) of one sample each.

    weights are the d numbers w, ones by default: for u(t, x) they are (0, 1) to get u_xx, (1, -1) for the wave
    operator. A tensor (n, d) gives each point its own.

    An `nn.Sequential`, nested or not, is taken layer by layer, by the formulas above. Modules in it that are
    neither Linear nor one of torch's activations, and models that are no Sequential, go through two nested
    forward-mode derivatives along every axis. All three results can be differentiated in the parameters. Linear
    layers are called as modules on (n, positions, features), so that optimizers get their rows by the rule for
    sequences: a Sequential whose parameters all belong to Linear layers needs no `fallback=`.
    """
    if points.dim() != 2:
        raise ValueError(f"points must have the shape (n, d), one row per point, not {tuple(points.shape)}")
    n, d = points.shape
    if weights is not None and not isinstance(weights, Tensor):
        weights = _constant(tuple(weights), points.dtype, points.device)
    if weights is not None and weights.shape not in ((d,), (n, d)):
        raise ValueError(
            f"weights have the shape {tuple(weights.shape)}: give one per axis, ({d},), or a tensor with a row "
            f"for each point, ({n}, {d})"
        )
    jet = _through(model, _Jet(points, identity(d, points.dtype, points.device).expand(n, d, d), None), weights)
    bend = torch.zeros_like(jet.value) if jet.bend is None else jet.bend
    return Laplacian(jet.value, jet.slopes.movedim(1, -1), bend)


@constant_tensor
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


class _Jet(NamedTuple):
    """The values (n, h) of a layer, their derivatives (n, d, h) along the axes and l (n, h), None for zeros."""

    value: Tensor
    slopes: Tensor
    bend: Tensor | None


def _through(module: nn.Module, jet: _Jet, weights: Tensor | None) -> _Jet:
    """What a module makes of a jet."""
    kind = type(module)
    if _is_bare(module):
        if kind.forward is nn.Sequential.forward:
            for child in module._modules.values():  # `children` leaves out one that is used again
                assert child is not None
                jet = _through(child, jet, weights)
            return jet
        if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
            return _through_linear(module, jet)
        if kind in DERIVATIVES:
            return _through_activation(DERIVATIVES[kind](module, jet.value), jet, weights)
        if kind is nn.Identity:
            return jet
        if isinstance(module, nn.Flatten) and module.start_dim in (1, -1) and jet.value.dim() == 2:
            return jet
    return _through_any(module, jet, weights)


def _is_bare(module: nn.Module) -> bool:
    """Whether a call of the module runs the forward of its class and no hooks."""
    forward = vars(module).get("forward")
    if forward is not None:  # an optimizer that watches a layer puts its own there
        source = getattr(getattr(forward, "func", forward), "__module__", None)
        if not (source or "").startswith("woodbury."):
            return False
    return not (has_hook(module) or has_global_hook())


def _through_linear(layer: nn.Linear, jet: _Jet) -> _Jet:
    """By one call of the layer on all positions, which adds b to the value alone.

    To the rule for sequences b is part of every position. A position of zeros, taken away from the derivatives,
    sends their gradients back with the other sign: the row of b is that of the value.
    """
    parts = [jet.value.unsqueeze(1), jet.slopes]
    if jet.bend is not None:
        parts.append(jet.bend.unsqueeze(1))
    if layer.bias is not None:
        parts.append(torch.zeros_like(parts[0]))
    with _BiasOfValue():
        z = layer(torch.cat(parts, dim=1))
    derivatives = z[:, 1:] if layer.bias is None else z[:, 1:-1] - z[:, -1:]
    if jet.bend is None:
        return _Jet(z[:, 0], derivatives, None)
    return _Jet(z[:, 0], derivatives[:, :-1], derivatives[:, -1])


class _BiasOfValue(TorchFunctionMode):
    """Inside, F.linear adds b to the first position alone: W v_i + b - b would lose the digits of W v_i."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or args[2] is None:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = args
        z = F.linear(inputs, weight)
        first = bias.to(z.dtype).expand(1, *z.shape[2:])
        return z + F.pad(first, [0, 0] * (z.dim() - 2) + [0, z.shape[1] - 1])


def _through_activation(derivatives: tuple[Tensor, Tensor, Tensor], jet: _Jet, weights: Tensor | None) -> _Jet:
    """By phi(z), phi'(z) and phi''(z), (n, h) each."""
    value, first, second = derivatives
    bend = second * _weighted_sum(jet.slopes.square(), weights)
    if jet.bend is not None:
        bend = bend + first * jet.bend
    return _Jet(value, first.unsqueeze(1) * jet.slopes, bend)


def _weighted_sum(terms: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i terms_i for terms (n, d, ...)."""
    if weights is not None:
        terms = terms * weights.reshape(*weights.shape, *[1] * (terms.dim() - 2))
    return terms.sum(1)


Function = Callable[[Tensor], Tensor]


def _through_any(module: Function, jet: _Jet, weights: Tensor | None) -> _Jet:
    """By f' v_i and f''[v_i, v_i] along every axis, for any function of one sample at a time."""
    function = _leaving_inputs(module)
    slopes, bends = torch.func.vmap(
        lambda slope: derivatives_along(function, jet.value, slope)[1:], in_dims=1, out_dims=1
    )(jet.slopes)
    bend = _weighted_sum(bends, weights)
    if jet.bend is None:
        return _Jet(function(jet.value), slopes, bend)
    with Corrected():
        value, pushed = cast(Any, torch.func.jvp(function, (jet.value,), (jet.bend,)))
    return _Jet(value, slopes, bend + pushed)


def _leaving_inputs(module: Function) -> Function:
    """A module may write into what it gets."""
    return lambda v: module(v.clone())


Derivatives = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]  # (module, z) -> phi, phi', phi''


# v + v and not 2 v: forward mode through a product with a number takes torch a dozen Python calls.


def _tanh(module: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = torch.tanh(z)
    first = 1 - v * v
    return v, first, -(v + v) * first


def _sigmoid(module: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = torch.sigmoid(z)
    first = v * (1 - v)
    return v, first, first * (1 - (v + v))


def _silu(module: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s, first, second = _sigmoid(module, z)
    return z * s, s + z * first, first + first + z * second


def _elementwise(module: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of an activation without a formula here: along ones, as no entry of phi(z) depends on another of z."""
    return derivatives_along(_leaving_inputs(module), z, torch.ones_like(z))


DERIVATIVES: dict[type[nn.Module], Derivatives] = {
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.SiLU: _silu,
    **dict.fromkeys((nn.GELU, nn.Softplus, nn.ELU, nn.CELU, nn.SELU, nn.Mish), _elementwise),
    **dict.fromkeys((nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.ReLU, nn.LeakyReLU), _elementwise),
}
