"""The built-in rules for Linear, Embedding and PReLU: one decorated function each."""

from __future__ import annotations

from torch import Tensor, nn

from woodbury.layers.forms import Layout, OuterRows
from woodbury.layers.registry import register_layer
from woodbury.layers.shared import EmbeddingRows, Part, SharedRows, summed_products

OWN = ("weight", "bias")  # what torch's own layers call their parameters


@register_layer(nn.Linear, parameters=OWN)
def linear_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> OuterRows | SharedRows:
    """z = W v + b: the row of column a at sample n is h_na v_n^T for W and h_na for b, summed over positions."""
    bias = None if layer.bias is None else "bias"
    if inputs.dim() == 2:
        n, k, _ = grads.shape
        return OuterRows(inputs, grads.flatten(0, 1), Layout(((n, k),)), bias=bias, affine=True)
    if inputs.dim() < 2:
        raise ValueError(
            f"Linear got an input of shape {tuple(inputs.shape)}; the rule covers (n, ..., features), "
            "samples first"
        )
    part = Part(inputs, grads.flatten(2, -2).unsqueeze(3), _positions)
    assert isinstance(layer.weight, Tensor)
    return SharedRows((part,), tuple(layer.weight.shape), bias=bias)


def _positions(inputs: Tensor) -> Tensor:
    """(n, ..., i) -> (n, s, 1, i)."""
    return inputs.flatten(1, -2).unsqueeze(2)


@register_layer(nn.Embedding, parameters=OWN)
def embedding_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> EmbeddingRows:
    """z_s = W[x_s]: the rows of W at the indices x of a sample collect the columns h at their positions."""
    assert isinstance(layer, nn.Embedding)
    for name, why in (
        ("max_norm", "renormalises its weight during the forward pass"),
        ("scale_grad_by_freq", "divides gradients by counts over the whole batch"),
        ("sparse", "gives sparse gradients"),
    ):
        if getattr(layer, name):
            raise ValueError(
                f"Embedding with {name}={getattr(layer, name)} {why}: no rows per sample. Leave it out"
            )
    n = inputs.shape[0]
    indices = inputs.reshape(n, -1).long()
    columns = grads.reshape(n, grads.shape[1], -1, 1, grads.shape[-1])
    shape = (layer.num_embeddings, layer.embedding_dim)
    return EmbeddingRows((Part(indices, columns, _indices),), shape, layer.padding_idx)


def _indices(inputs: Tensor) -> Tensor:
    return inputs


@register_layer(nn.PReLU, parameters=OWN)
def prelu_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """z = max(v, 0) + a min(v, 0): the row of a is sum_s h_s min(v_s, 0), one slope for all or one a channel."""
    assert isinstance(layer.weight, Tensor)
    negative = inputs.clamp(max=0)
    n, k = grads.shape[:2]
    if layer.weight.numel() == 1:
        return {"weight": summed_products(grads.reshape(n, k, -1, 1), negative.reshape(n, -1, 1))}
    channels = inputs.shape[1]
    rows = summed_products(
        grads.reshape(n, k, channels, -1).transpose(2, 3), negative.reshape(n, channels, -1).transpose(1, 2)
    )
    return {"weight": rows}
