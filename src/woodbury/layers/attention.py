"""MultiheadAttention: its parameters act through linear maps inside its forward pass.

torch's own forward pass runs, with all its options; `watch_linear_maps` reports its calls of `F.linear`. Each is a
use of all or part of the projection weights: z = W v + b at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from woodbury._process import ForAllThreads
from woodbury.layers.positions import own_outputs
from woodbury.layers.registry import register_layer
from woodbury.layers.sums import Place

# Inside, attention is computed by kernels that can be differentiated twice, and mapped: torch's fused ones cannot.
plain_attention = ForAllThreads(lambda: sdpa_kernel(SDPBackend.MATH))

PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
Report = Callable[[Tensor, Tensor, "tuple[Place | None, Place | None]"], None]


@register_layer(nn.MultiheadAttention, parameters=PROJECTIONS)
def attention_rows(layer: nn.Module, inputs: Tensor, grads: Tensor) -> Any:
    """Mark the layer: its rows are those of the linear maps inside it."""
    raise AssertionError("the rows of MultiheadAttention come from the linear maps inside it")


def projects_out(module: nn.Module, trained: Collection[int]) -> bool:
    """Whether a module is attention that uses parameters of its `out_proj`, some of them trained (given by id)."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return any(id(parameter) in trained for parameter in module.out_proj._parameters.values())


def watch_linear_maps(
    forward: Callable[..., Any], samples: int, names: Mapping[int, str], report: Report
) -> Callable[..., Any]:
    """`forward` of attention, whose every z = F.linear(v, W, b) also calls report(v, z, places of W and b).

    names: id of a trainable parameter -> its name. v and z have samples first; torch passes tensors (positions, n,
    features), or (positions n, features). Calls with other weights are not reported. torch's functions are copied
    to see a linear map of ours in place of `F.linear`, so that nothing is exchanged for the rest of the program.
    """

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
            return F.linear(input, weight, bias)
        inputs = (input.unflatten(0, (-1, samples)) if flat else input).transpose(0, 1)  # (n, positions, features)
        outputs = F.linear(inputs, weight, bias)
        if 1 in outputs.shape[:2]:  # nothing is copied below, and the caller may change what it gets in place
            outputs = own_outputs(outputs)
        report(inputs, outputs, places)
        outputs = outputs.transpose(0, 1).contiguous()  # torch takes views of it
        return outputs.flatten(0, 1) if flat else outputs

    if not isinstance(forward, FunctionType):
        return forward
    return _copy(forward, {**forward.__globals__, "F": SimpleNamespace(**_functions_with(linear))})


def _functions_with(linear: Callable[..., Tensor]) -> dict[str, Any]:
    """What `torch.nn.functional` holds, with its functions for attention copied to call this linear map."""
    functions = dict(vars(F), linear=linear)
    for name in ("multi_head_attention_forward", "_in_projection_packed", "_in_projection"):
        function = functions.get(name)
        if isinstance(function, FunctionType) and function.__globals__ is vars(F):  # torch's own
            functions[name] = _copy(function, functions)
    return functions


def _copy(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A copy of a function that looks up global names in `names`."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
