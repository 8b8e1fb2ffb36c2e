"""The rules for convolutions: z = W v at the positions of an image, v the patch under the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.layers.positions import Part
from woodbury.layers.registry import register_layer
from woodbury.layers.rules import WEIGHT_AND_BIAS
from woodbury.layers.shared import SharedRows

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@register_layer(nn.Conv1d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.Conv2d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.Conv3d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.ConvTranspose1d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.ConvTranspose2d, parameters=WEIGHT_AND_BIAS)
@register_layer(nn.ConvTranspose3d, parameters=WEIGHT_AND_BIAS)
def convolution_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> SharedRows:
    """Rows summed over the output positions; patches are cut out (im2col) for a block of samples at a time.

    A transposed convolution is one of the input with zeros in between (the stride), and the kernel reversed.
    """
    assert isinstance(layer, Convolution | Transposed)
    kind, axes = type(layer).__name__, len(layer.kernel_size)
    if inputs.dim() != axes + 2:
        raise ValueError(
            f"{kind} got an input of shape {tuple(inputs.shape)}; the rule covers (n, channels, "
            f"{axes} axes of positions), samples first"
        )
    # (n, k, g o, *positions) -> (n, k, s, g, o), a view
    columns = grads.flatten(3).unflatten(2, (layer.groups, -1)).permute(0, 1, 4, 2, 3)
    bias = None if layer.bias is None else "bias"
    if isinstance(layer, Transposed):
        size = tuple(grads.shape[3:])  # of the output, output_padding or output_size included
        cut: Callable[[Tensor], Tensor] = partial(spread_patches, layer, size)
    else:
        cut = partial(patches, layer)
    part = Part(partial(_cut_window, cut, inputs), columns)
    return SharedRows((part,), tuple(layer.weight.shape), bias=bias, swapped=isinstance(layer, Transposed))


def _cut_window(cut: Callable[[Tensor], Tensor], inputs: Tensor, window: slice) -> Tensor:
    return cut(inputs[window])


def _padding(layer: Convolution) -> list[int]:
    """The padding (before, after) of each axis, last axis first, as F.pad takes it."""
    if layer.padding_mode != "zeros":
        return list(layer._reversed_padding_repeated_twice)  # what its forward pass uses then
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return [0] * (2 * len(layer.kernel_size))
        # "same": an odd one goes after
        total = [d * (size - 1) for d, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for length in reversed(total) for side in (length // 2, length - length // 2)]
    return [side for length in reversed(layer.padding) for side in (length, length)]


def patches(layer: Convolution, inputs: Tensor) -> Tensor:
    """What the kernel sees at each output position: (n, g c, *positions) -> (n, s, g, c kernel)."""
    padding = _padding(layer)
    if any(padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    steps = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, step, gap) in enumerate(steps):
        inputs = inputs.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]  # a view
    return _in_order(layer, inputs)


def spread_patches(layer: Transposed, size: Sequence[int], inputs: Tensor) -> Tensor:
    """The inputs that reach each output position of a transposed convolution, in the order of its kernel."""
    assert not isinstance(layer.padding, str)
    lengths = [(length - 1) * step + 1 for length, step in zip(inputs.shape[2:], layer.stride, strict=True)]
    spread = inputs.new_zeros(*inputs.shape[:2], *lengths)
    spread[(slice(None), slice(None), *(slice(None, None, step) for step in layer.stride))] = inputs
    # Output position y holds x[q] W[u] wherever y = q stride - padding + u dilation.
    reach = [gap * (width - 1) for gap, width in zip(layer.dilation, layer.kernel_size, strict=True)]
    before = [length - pad for length, pad in zip(reach, layer.padding, strict=True)]
    after = [
        total + length - first - own
        for total, length, first, own in zip(size, reach, before, lengths, strict=True)
    ]
    sides = [side for pair in reversed(list(zip(before, after, strict=True))) for side in pair]
    spread = F.pad(spread, sides)  # a negative side cuts off
    for axis, (length, gap) in enumerate(zip(reach, layer.dilation, strict=True)):
        spread = spread.unfold(2 + axis, length + 1, 1)[..., ::gap]
    return _in_order(layer, spread, reverse=True)


def _in_order(layer: Convolution | Transposed, cut: Tensor, reverse: bool = False) -> Tensor:
    """(n, g c, *positions, *kernel) -> (n, s, g, c kernel), the kernel reversed or not."""
    axes, cut = len(layer.kernel_size), cut.unflatten(1, (layer.groups, -1))
    positions, kernel = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
    if reverse:
        cut = torch.flip(cut, list(kernel))
    # Positions last in memory: the copy then runs along rows of the image.
    position_count = math.prod(cut.shape[axis] for axis in positions)
    ordered = cut.permute(0, 1, 2, *kernel, *positions).reshape(cut.shape[0], layer.groups, -1, position_count)
    return ordered.permute(0, 3, 1, 2)
