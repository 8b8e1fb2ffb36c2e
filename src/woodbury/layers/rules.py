"""The open registry from layer class to rule, and the built-in rules: one decorated function each.

A normalisation is z = w xhat + b, with xhat the normalised input. Its rows are written out: that of w is sum_s h_s
xhat_s over the positions that share a weight, that of b is sum_s h_s. PReLU is the same with xhat = min(v, 0). A
convolution is z = W v at the positions of an image, v the patch under the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from woodbury.layers.forms import ExplicitRows, RowForm
from woodbury.layers.outer import Layout, OuterRows
from woodbury.layers.positions import Part, summed_products
from woodbury.layers.shared import EmbeddingRows, SharedRows

# (layer, input (n, ...), output gradients (n, k, ...)) -> rows
Rule = Callable[[Any, Any, Tensor], "RowForm | Mapping[str, Tensor]"]

_RULES: dict[type[nn.Module] | str, tuple[Rule, frozenset[str] | None]] = {}  # with the parameters of each


def register_layer(
    kind: type[nn.Module] | str, parameters: Collection[str] | None = None
) -> Callable[[Rule], Rule]:
    """Function decorator that makes a function the rule for layers of class `kind`.

    A class of a library that need not be there may be given by its full name, "package.module.Class".

    The function gets the layer, its input (n, ...) (a tuple if it was called with several tensors) and the
    gradients of k scalars per sample in its output, (n, k, *output shape). It returns the gradients of those
    scalars in the layer's own parameters, as a dictionary name -> (n, k, *parameter shape), or as one of the
    forms in `woodbury.layers`.

    With `parameters` the rule applies only to layers that have no other trainable parameters (as a layer has whose
    weight is computed from parameters of its own).

    >>> @woodbury.register_layer(Scale)          # forward: self.gain * x
    ... def scale_rows(layer, inputs, grads):
    ...     return {"gain": inputs.unsqueeze(1) * grads}
    """

    def register(rule: Rule) -> Rule:
        _RULES[kind] = rule, None if parameters is None else frozenset(parameters)
        return rule

    return register


WEIGHT_AND_BIAS = ("weight", "bias")  # the parameters of torch's own layers


def rule_of(*kinds: type[nn.Module], parameters: Collection[str] = WEIGHT_AND_BIAS) -> Callable[[Rule], Rule]:
    """`register_layer` for several of torch's own classes."""

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            register_layer(kind, parameters)(rule)
        return rule

    return register


def layer_rule(layer: nn.Module, parameters: Collection[str]) -> Rule | None:
    """The rule for this layer and these of its parameters, or None.

    A subclass inherits a rule only if it inherits `forward` and the private methods that `forward` may call.
    """
    for kind in type(layer).__mro__:
        entry = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if entry is not None:
            rule, covered = entry
            covers_all = covered is None or covered.issuperset(parameters)
            return rule if covers_all and _computes_as(kind, layer) else None
    return None


def _computes_as(kind: type, layer: nn.Module) -> bool:
    """Whether the layer has not replaced `forward` or a private method of `kind`."""
    names = set(dir(kind)) - set(dir(nn.Module))
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    methods = ["forward", *(name for name in private if isfunction(getattr(kind, name)))]
    own = vars(layer)
    return all(getattr(type(layer), name) is getattr(kind, name) and name not in own for name in methods)


def as_form(rows: RowForm | Mapping[str, Tensor]) -> RowForm:
    """The form of the rows that a rule returned."""
    if isinstance(rows, Mapping):
        own = {name: value.flatten(0, 1) for name, value in rows.items()}
        # a rule may compute with the parameters themselves
        return ExplicitRows({name: rows.detach() if rows.requires_grad else rows for name, rows in own.items()})
    return rows


@rule_of(nn.Linear)
def linear_rows(layer: nn.Linear, inputs: Tensor, grads: Tensor) -> OuterRows | SharedRows:
    """z = W v + b: the row of column a at sample n is h_na v_n^T for W and h_na for b, summed over positions."""
    bias = None if layer.bias is None else "bias"
    if inputs.dim() == 2:
        layout = Layout(((len(grads), grads.shape[1]),))
        return OuterRows(inputs, grads.flatten(0, 1), layout, bias=bias, affine=has_own_parameters(layer))
    _check_axes(inputs.dim() > 2, layer, inputs, "(n, ..., features)")
    return sequence_rows(inputs, grads, layer.weight.shape, bias=bias)


def _check_axes(fits: bool, layer: nn.Module, inputs: Tensor, covered: str) -> None:
    if not fits:
        got = f"{type(layer).__name__} got an input of shape {tuple(inputs.shape)}"
        raise ValueError(f"{got}; the rule covers {covered}, samples first")


def has_own_parameters(layer: nn.Module) -> bool:
    """Whether weight and bias are parameters of the layer, not computed from others (a parametrization)."""
    return all(name in layer._parameters for name in WEIGHT_AND_BIAS)


def sequence_rows(
    inputs: Tensor,
    grads: Tensor,
    shape: torch.Size,
    weight: str | None = "weight",
    bias: str | None = "bias",
    swapped: bool = False,
) -> SharedRows:
    """z = W v + b at every position: v (n, ..., i), h (n, k, ..., o)."""
    n, k = grads.shape[:2]
    features = inputs.reshape(n, -1, 1, inputs.shape[-1])
    part = Part(features.__getitem__, grads.reshape(n, k, -1, 1, grads.shape[-1]))
    return SharedRows((part,), tuple(shape), weight=weight, bias=bias, swapped=swapped)


@register_layer("transformers.pytorch_utils.Conv1D", parameters=WEIGHT_AND_BIAS)
def turned_linear_rows(layer: Any, inputs: Tensor, grads: Tensor) -> SharedRows:
    """z = W^T v + b at every position, as GPT-2 has it: a Linear layer whose W is stored as (i, o)."""
    return sequence_rows(inputs, grads, layer.weight.shape, swapped=True)


@rule_of(nn.Bilinear)
def bilinear_rows(layer: nn.Bilinear, inputs: tuple[Tensor, Tensor], grads: Tensor) -> SharedRows:
    """z_o = x^T W_o y + b_o: a Linear layer on the products x_i y_j, formed for a block of samples at a time."""
    n, width = grads.shape[0], layer.in1_features
    pairs = torch.cat(inputs, dim=-1).reshape(n, -1, width + layer.in2_features)
    columns = grads.reshape(n, grads.shape[1], -1, 1, grads.shape[-1])
    bias = None if layer.bias is None else "bias"
    return SharedRows((Part(partial(_products, pairs, width), columns),), tuple(layer.weight.shape), bias=bias)


def _products(pairs: Tensor, width: int, window: slice) -> Tensor:
    left, right = pairs[window, :, :width], pairs[window, :, width:]
    return (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2).unsqueeze(2)


@rule_of(nn.Embedding)
def embedding_rows(layer: nn.Embedding, inputs: Tensor, grads: Tensor) -> EmbeddingRows:
    """z_s = W[x_s]: the row of W[x] is the sum of h_s over all s with x_s = x, without padding."""
    n, k = grads.shape[:2]
    indices = inputs.reshape(n, -1).long()
    columns = grads.reshape(n, k, -1, 1, grads.shape[-1])
    if layer.padding_idx is not None:
        columns = columns.masked_fill((indices == layer.padding_idx)[:, None, :, None, None], 0.0)
    shape = (layer.num_embeddings, layer.embedding_dim)
    return EmbeddingRows((Part(indices.__getitem__, columns),), shape)


LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
LOOKUP_OPTIONS = {
    "max_norm": "renormalises its weight in place during the forward pass",
    "scale_grad_by_freq": "divides gradients by counts over the whole batch: they are derivatives of no function",
    "sparse": "gives sparse gradients",
}


def refused_option(module: nn.Module, trained: Collection[int]) -> str | None:
    """The option of an embedding under which there is no step, and why; trained: the ids of parameters.

    max_norm changes the weight of an embedding that is not trained as well.
    """
    for option, why in LOOKUP_OPTIONS.items():
        value = getattr(module, option, None)
        if value is None or value is False:
            continue
        if option == "max_norm" or any(id(parameter) in trained for parameter in module.parameters()):
            return f"{option}={value} {why}"
    return None


@rule_of(nn.PReLU)
def prelu_rows(layer: nn.PReLU, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """z = max(v, 0) + a min(v, 0): the row of a is sum_s h_s min(v_s, 0), one slope for all or one per channel."""
    return _over_channels(layer, layer.weight.numel(), inputs.clamp(max=0), grads)


@rule_of(nn.LayerNorm, nn.RMSNorm)
def layer_norm_rows(layer: nn.LayerNorm | nn.RMSNorm, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over the last axes, RMSNorm without centring, with one weight per entry of these."""
    if inputs.dim() <= len(layer.normalized_shape):
        raise ValueError(
            f"{type(layer).__name__} got an input of shape {tuple(inputs.shape)} and normalises over all of it, "
            "the samples too: rows per sample do not exist"
        )
    normalise: Callable[..., Tensor] = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
    xhat = normalise(inputs, layer.normalized_shape, eps=layer.eps)
    n, k = grads.shape[:2]
    features = math.prod(layer.normalized_shape)
    rows = _affine_rows(layer, xhat.reshape(n, -1, features), grads.reshape(n, k, -1, features))
    return {name: value.unflatten(2, tuple(layer.normalized_shape)) for name, value in rows.items()}


@rule_of(nn.GroupNorm)
def group_norm_rows(layer: nn.GroupNorm, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over groups of channels, with one weight per channel."""
    xhat = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _over_channels(layer, xhat.shape[1], xhat, grads)


@rule_of(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm_rows(layer: _InstanceNorm, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised over the positions of each channel, or by running statistics in eval mode if it has some."""
    axes = layer._get_no_batch_dim() + 1
    _check_axes(inputs.dim() == axes, layer, inputs, f"{axes} axes")
    if layer.training or not layer.track_running_stats:
        xhat = F.instance_norm(inputs, eps=layer.eps)
    else:
        xhat = F.instance_norm(inputs, layer.running_mean, layer.running_var, use_input_stats=False, eps=layer.eps)
    return _over_channels(layer, xhat.shape[1], xhat, grads)


@rule_of(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_rows(layer: _BatchNorm, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Normalised by the running statistics in eval mode; in training mode `plan_layers` raises."""
    assert not layer.training and layer.running_mean is not None
    xhat = F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    return _over_channels(layer, xhat.shape[1], xhat, grads)


def _over_channels(layer: nn.Module, channels: int, xhat: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Rows for xhat (n, channels, ...) with one weight per channel."""
    n, k = grads.shape[:2]
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


# of layers whose outputs torch makes as views
GIVE_VIEWS = (linear_rows, turned_linear_rows, instance_norm_rows)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@rule_of(nn.Conv1d, nn.Conv2d, nn.Conv3d)
@rule_of(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def convolution_rows(layer: Convolution | Transposed, inputs: Tensor, grads: Tensor) -> SharedRows:
    """Rows summed over the output positions; patches are cut out (im2col) for a block of samples at a time.

    A transposed convolution is one of the input with zeros in between (the stride), and the kernel reversed.
    """
    axes = len(layer.kernel_size)
    _check_axes(inputs.dim() == axes + 2, layer, inputs, f"(n, channels, {axes} axes of positions)")
    # (n, k, g o, *positions) -> (n, k, s, g, o), a view
    columns = grads.flatten(3).unflatten(2, (layer.groups, -1)).permute(0, 1, 4, 2, 3)
    bias = None if layer.bias is None else "bias"
    if isinstance(layer, Transposed):
        size = tuple(grads.shape[3:])  # of the output, output_padding or output_size included
        features: Callable[[slice], Tensor] = partial(spread_patches, layer, size, inputs)
    else:
        features = partial(patches, layer, inputs)
    part = Part(features, columns)
    return SharedRows((part,), tuple(layer.weight.shape), bias=bias, swapped=isinstance(layer, Transposed))


def _padding(layer: Convolution) -> list[int]:
    """The padding (before, after) of each axis, last axis first, as F.pad takes it."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return list(layer._reversed_padding_repeated_twice)  # what its forward pass uses, or amounts to
    return [side for length in reversed(layer.padding) for side in (length, length)]


def patches(layer: Convolution, samples: Tensor, window: slice) -> Tensor:
    """What the kernel sees at each output position: (n, g c, *positions) -> (n, s, g, c kernel)."""
    padding, inputs = _padding(layer), samples[window]
    if any(padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    steps = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, step, gap) in enumerate(steps):
        inputs = inputs.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]  # a view
    return _in_order(layer, inputs)


def spread_patches(layer: Transposed, size: Sequence[int], samples: Tensor, window: slice) -> Tensor:
    """The inputs that reach each output position of a transposed convolution, in the order of its kernel."""
    assert not isinstance(layer.padding, str)
    inputs = samples[window]
    lengths = [(length - 1) * step + 1 for length, step in zip(inputs.shape[2:], layer.stride, strict=True)]
    spread = inputs.new_zeros(*inputs.shape[:2], *lengths)
    spread[(slice(None), slice(None), *(slice(None, None, step) for step in layer.stride))] = inputs
    # Output position y holds x[q] W[u] wherever y = q stride - padding + u dilation.
    reach = [gap * (width - 1) for gap, width in zip(layer.dilation, layer.kernel_size, strict=True)]
    before = [length - pad for length, pad in zip(reach, layer.padding, strict=True)]
    axes = zip(size, reach, before, lengths, strict=True)
    after = [total + length - first - own for total, length, first, own in axes]
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
