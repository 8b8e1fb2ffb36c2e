"""The rules for normalisation layers: z = w xhat + b, with xhat the normalised input; rows are written out.

The row of w is sum_s h_s xhat_s over the positions that share a weight, that of b is sum_s h_s.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from woodbury.layers.positions import summed_products
from woodbury.layers.registry import register_layer
from woodbury.layers.rules import WEIGHT_AND_BIAS


@register_layer(nn.LayerNorm, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.RMSNorm, parameters=WEIGHT_AND_BIAS)
def layer_norm_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over the last axes, RMSNorm without centring, with one weight per entry of these."""
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    if inputs.dim() <= len(layer.normalized_shape):
        raise ValueError(
            f"{type(layer).__name__} got an input of shape {tuple(inputs.shape)} and normalises over all of it, "
            "the samples too: rows per sample do not exist"
        )
    normalise: Callable[..., Tensor] = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
    xhat = normalise(inputs, layer.normalized_shape, eps=layer.eps)
    n, k, width = grads.shape[0], grads.shape[1], len(layer.normalized_shape)
    features = xhat.shape[xhat.dim() - width :].numel()
    rows = _affine_rows(layer, xhat.reshape(n, -1, features), grads.reshape(n, k, -1, features))
    return {name: value.unflatten(2, tuple(layer.normalized_shape)) for name, value in rows.items()}


@register_layer(nn.GroupNorm, parameters=WEIGHT_AND_BIAS)
def group_norm_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over groups of channels, with one weight per channel."""
    assert isinstance(layer, nn.GroupNorm)
    return _over_channels(layer, F.group_norm(inputs, layer.num_groups, eps=layer.eps), grads)


@register_layer(nn.InstanceNorm1d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.InstanceNorm2d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.InstanceNorm3d, parameters=WEIGHT_AND_BIAS)
def instance_norm_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over the positions of each channel, or by running statistics in eval mode if it has some."""
    assert isinstance(layer, _InstanceNorm)
    axes = layer._get_no_batch_dim() + 1
    if inputs.dim() != axes:
        raise ValueError(
            f"{type(layer).__name__} got an input of shape {tuple(inputs.shape)}; the rule covers {axes} axes, "
            "samples first"
        )
    if layer.training or not layer.track_running_stats:
        return _over_channels(layer, F.instance_norm(inputs, eps=layer.eps), grads)
    xhat = F.instance_norm(inputs, layer.running_mean, layer.running_var, use_input_stats=False, eps=layer.eps)
    return _over_channels(layer, xhat, grads)


@register_layer(nn.BatchNorm1d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.BatchNorm2d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.BatchNorm3d, parameters=WEIGHT_AND_BIAS)
def batch_norm_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised by the running statistics in eval mode; in training mode `plan_layers` raises."""
    assert isinstance(layer, _BatchNorm) and not layer.training and layer.running_mean is not None
    xhat = F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    return _over_channels(layer, xhat, grads)


def _over_channels(layer: nn.Module, xhat: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Rows for xhat (n, channels, ...) with one weight per channel."""
    n, k, channels = grads.shape[:3]
    xhat, grads = xhat.reshape(n, channels, -1), grads.reshape(n, k, channels, -1)
    return _affine_rows(layer, xhat.transpose(1, 2), grads.transpose(2, 3))


def _affine_rows(layer: nn.Module, xhat: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Rows (n, k, f) for xhat (n, s, f) and h (n, k, s, f)."""
    rows = {}
    if getattr(layer, "weight", None) is not None:
        rows["weight"] = summed_products(grads, xhat)
    if getattr(layer, "bias", None) is not None:
        rows["bias"] = grads.sum(2)
    return rows
