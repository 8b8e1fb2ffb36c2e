"""MultiheadAttention: its parameters act through linear maps inside its forward pass, which are caught there.

torch's own forward pass runs, with every option it has; only its calls of `F.linear` are looked at. Each is a
use of (a part of) the projection weights: z = W v + b at every position.
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
Record = Callable[[Tensor, Tensor, "tuple[Place | None, Place | None]"], None]


@register_layer(nn.MultiheadAttention, parameters=PROJECTIONS)
def attention_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> Any:
    """Marks the layer: its rows are those of the linear maps inside it."""
    raise AssertionError("the rows of MultiheadAttention come from the linear maps inside it")


@contextmanager
def linear_maps(samples: int, names: Mapping[int, str], record: Record) -> Iterator[None]:
    """Inside, reports v, z and the places of W and b of every z = F.linear(v, W, b) in attention, samples first.

    names: id of a trainable parameter -> its name. Tensors there are (positions, n, features), or (positions n,
    features). Calls with other weights are left alone.
    """
    plain = F.linear

    def place(tensor: Tensor | None) -> Place | None:
        """Which rows of which parameter a tensor is."""
        whole = tensor if tensor is None or id(tensor) in names else tensor._base
        if tensor is None or whole is None or id(whole) not in names:
            return None
        start = (tensor.storage_offset() - whole.storage_offset()) // whole.stride(0)
        return Place(names[id(whole)], start, tensor.shape[0])

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        places = place(weight), place(bias)
        flat = input.dim() == 2
        if places == (None, None) or (flat and len(input) % samples):  # the latter has no sample axis
            return plain(input, weight, bias)
        given = (input.unflatten(0, (-1, samples)) if flat else input).transpose(0, 1)  # (n, positions, features)
        outputs = plain(given, weight, bias)
        record(given, outputs, places)
        outputs = outputs.transpose(0, 1).contiguous()  # torch takes views of it
        return outputs.flatten(0, 1) if flat else outputs

    F.linear = linear  # where multi_head_attention_forward looks for it
    try:
        yield
    finally:
        F.linear = plain
