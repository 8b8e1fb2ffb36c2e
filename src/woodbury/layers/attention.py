"""MultiheadAttention: its parameters act through linear maps inside its forward pass.

torch's own forward pass runs, with all its options; `linear_maps` reports its calls of `F.linear`. Each is a use
of all or part of the projection weights: z = W v + b at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.layers.registry import register_layer
from woodbury.layers.sums import Place

PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
Report = Callable[[Tensor, Tensor, "tuple[Place | None, Place | None]"], None]


@register_layer(nn.MultiheadAttention, parameters=PROJECTIONS)
def attention_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> Any:
    """Mark the layer: its rows are those of the linear maps inside it."""
    raise AssertionError("the rows of MultiheadAttention come from the linear maps inside it")


@contextmanager
def linear_maps(samples: int, names: Mapping[int, str], report: Report) -> Iterator[None]:
    """Inside, every z = F.linear(v, W, b) in attention calls report(v, z, places of W and b), samples first.

    names: id of a trainable parameter -> its name. torch passes tensors (positions, n, features), or (positions n,
    features). Calls with other weights are not reported.
    """
    plain = F.linear

    def place(tensor: Tensor | None) -> Place | None:
        """The place of a tensor in a trainable parameter, or None."""
        whole = tensor if tensor is None or id(tensor) in names else tensor._base
        if tensor is None or whole is None or id(whole) not in names:
            return None
        start = (tensor.storage_offset() - whole.storage_offset()) // whole.stride(0)
        return Place(names[id(whole)], start, tensor.shape[0])

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        places = place(weight), place(bias)
        flat = input.dim() == 2
        if places == (None, None) or (flat and len(input) % samples):  # the second has no sample axis
            return plain(input, weight, bias)
        inputs = (input.unflatten(0, (-1, samples)) if flat else input).transpose(0, 1)  # (n, positions, features)
        outputs = plain(inputs, weight, bias)
        report(inputs, outputs, places)
        outputs = outputs.transpose(0, 1).contiguous()  # torch takes views of it
        return outputs.flatten(0, 1) if flat else outputs

    F.linear = linear  # where multi_head_attention_forward looks for it
    try:
        yield
    finally:
        F.linear = plain
