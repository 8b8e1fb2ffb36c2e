"""The built-in layer rules: one decorated function each."""

from __future__ import annotations

from torch import Tensor, nn

from woodbury.layers.forms import Layout, OuterRows
from woodbury.layers.registry import register_layer


@register_layer(nn.Linear)
def linear_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> OuterRows:
    """z = W v + b: the row of column a at sample n is h_na v_n^T for W and h_na for b."""
    if inputs.dim() != 2:
        raise ValueError(
            f"Linear got an input of shape {tuple(inputs.shape)}; "
            "the rule covers one vector per sample, (n, features)"
        )
    n, k, _ = grads.shape
    bias = None if layer.bias is None else "bias"
    return OuterRows(inputs, grads.flatten(0, 1), Layout(((n, k),)), bias=bias, affine=True)
