"""The built-in rules for Linear, Conv1D, Bilinear, Embedding and PReLU: one decorated function each."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from woodbury.layers.embeddings import EmbeddingRows
from woodbury.layers.outer import Layout, OuterRows
from woodbury.layers.positions import Part, summed_products
from woodbury.layers.registry import register_layer
from woodbury.layers.shared import SharedRows

WEIGHT_AND_BIAS = ("weight", "bias")  # the parameters of torch's own layers


@register_layer(nn.Linear, parameters=WEIGHT_AND_BIAS)
def linear_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> OuterRows | SharedRows:
    """z = W v + b: the row of column a at sample n is h_na v_n^T for W and h_na for b, summed over positions."""
    bias = None if layer.bias is None else "bias"
    if inputs.dim() == 2:
        n, k, _ = grads.shape
        return OuterRows(
            inputs, grads.flatten(0, 1), Layout(((n, k),)), bias=bias, affine=has_own_parameters(layer)
        )
    if inputs.dim() < 2:
        raise ValueError(
            f"Linear got an input of shape {tuple(inputs.shape)}; the rule covers (n, ..., features), "
            "samples first"
        )
    assert isinstance(layer.weight, Tensor)
    return sequence_rows(inputs, grads, layer.weight.shape, bias=bias)


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
def turned_linear_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> SharedRows:
    """z = W^T v + b at every position, as GPT-2 has it: a Linear layer whose W is stored as (i, o)."""
    assert isinstance(layer.weight, Tensor)
    return sequence_rows(inputs, grads, layer.weight.shape, swapped=True)


@register_layer(nn.Bilinear, parameters=WEIGHT_AND_BIAS)
def bilinear_rows(layer: nn.Module, inputs: tuple[Tensor, Tensor], grads: Tensor) -> SharedRows:
    """z_o = x^T W_o y + b_o: a Linear layer on the products x_i y_j, formed for a block of samples at a time."""
    assert isinstance(layer, nn.Bilinear)
    n, width = grads.shape[0], layer.in1_features
    pairs = torch.cat(inputs, dim=-1).reshape(n, -1, width + layer.in2_features)
    columns = grads.reshape(n, grads.shape[1], -1, 1, grads.shape[-1])
    bias = None if layer.bias is None else "bias"
    return SharedRows((Part(partial(_products, pairs, width), columns),), tuple(layer.weight.shape), bias=bias)


def _products(pairs: Tensor, width: int, window: slice) -> Tensor:
    left, right = pairs[window, :, :width], pairs[window, :, width:]
    return (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2).unsqueeze(2)


@register_layer(nn.Embedding, parameters=WEIGHT_AND_BIAS)
def embedding_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> EmbeddingRows:
    """z_s = W[x_s]: the row of W[x] is the sum of h_s over the positions s with x_s = x."""
    assert isinstance(layer, nn.Embedding)
    n = inputs.shape[0]
    indices = inputs.reshape(n, -1).long()
    columns = grads.reshape(n, grads.shape[1], -1, 1, grads.shape[-1])
    shape = (layer.num_embeddings, layer.embedding_dim)
    return EmbeddingRows((Part(indices.__getitem__, columns),), shape, layer.padding_idx)


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


@register_layer(nn.PReLU, parameters=WEIGHT_AND_BIAS)
def prelu_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """z = max(v, 0) + a min(v, 0): the row of a is sum_s h_s min(v_s, 0), one slope for all or one per channel."""
    assert isinstance(layer.weight, Tensor)
    negative = inputs.clamp(max=0)
    n, k = grads.shape[:2]
    channels = layer.weight.numel()
    rows = summed_products(
        grads.reshape(n, k, channels, -1).transpose(2, 3), negative.reshape(n, channels, -1).transpose(1, 2)
    )
    return {"weight": rows}
