"""Rows of any model by expanded weights: every sample has its own copy of the parameters, without memory for it.

With copies theta_i of theta the outputs of sample i depend on copy i alone, so that one backward pass gives the
rows of all samples:

    row of sample i = d (sum_j c_j . y_j) / d theta_i

The model runs once, on the batch as it is: derivatives that it takes itself (torch.autograd.grad), its random
numbers and its branches are those of any other pass. What is computed from copies alone is again a copy for each
sample. Where copies meet samples, a linear map is taken with the one weight that they all are, and only its
derivative is taken sample by sample; other functions are mapped over the samples by torch.func.vmap.

A model that takes derivatives uses each weight many times. Its rows add up the outer products h x^T of all uses u,
in one product of what the uses leave in `Uses`:

    d (sum_j c_j . y_j) / d W_i = sum_u h_ui x_ui^T
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from woodbury.jets import Jet

_MATRIX_PRODUCTS = frozenset((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__))
_SPREADING = frozenset((Tensor.expand, Tensor.repeat, Tensor.broadcast_to, torch.broadcast_to))

# Whether this backward pass goes on to a node: derivatives in x, that a model takes itself, need none in W.
_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


class Uses:
    """Of a weight in linear maps: h (n, s, o) and x (n, s, i) of each, from a backward pass that keeps them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] | None = None

    def add_to(self, grad: Tensor | None) -> Tensor | None:
        """grad (n, o, i), or none, with the sum of h x^T of what was kept, which ends here."""
        kept, self.kept = self.kept, None
        if not kept:
            return grad
        h, x = (own[0] if len(own) == 1 else torch.cat(own, 1) for own in zip(*kept, strict=True))
        return h.mT @ x if grad is None else grad + h.mT @ x


class Copies(Tensor):
    """A value (n, *shape) with a copy for each sample, which looks to a model as if it had this shape."""

    uses: Uses | None = None  # of a parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Jet in types:
            return NotImplemented  # it works on the tensors inside
        with torch._C.DisableTorchFunctionSubclass():
            mapped = _as_linear_map(func, args, kwargs or {})
            return _map_over_samples(func, args, kwargs or {}) if mapped is None else mapped


def expand(parameters: Mapping[str, Tensor], samples: int) -> tuple[list[Tensor], dict[str, Copies]]:
    """Leaves (n, *shape) of the graph that gradients of each sample arrive at, and what a model takes for them."""
    leaves = [own.detach().expand(samples, *own.shape).requires_grad_() for own in parameters.values()]
    copies = {name: leaf.as_subclass(Copies) for name, leaf in zip(parameters, leaves, strict=True)}
    for own in copies.values():
        own.uses = Uses()
    return leaves, copies


def grads_by_sample(
    outputs: Tensor, leaves: Sequence[Tensor], copies: Mapping[str, Copies], seed: Tensor
) -> list[Tensor | None]:
    """The gradient of seed . outputs in each leaf (n, *shape); None where there is none."""
    uses = [own.uses for own in copies.values() if own.uses is not None]
    for own in uses:
        own.kept = []
    grads = torch.autograd.grad(outputs, leaves, seed, retain_graph=True, allow_unused=True)
    return [own.add_to(grad) for grad, own in zip(grads, uses, strict=True)]


class _LinearMap(torch.autograd.Function):
    """z_i = W_i x_i for x (n, ..., i) and copies (n, o, i) of one W: dz/dW_i is the outer product of h_i, x_i.

    Or z_i = W_i^T x_i for x (n, ..., o): derivatives in W have its layout in either case.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, transposed: bool, uses: Uses | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.transposed, ctx.uses = transposed, uses
        return x @ (weights[0] if transposed else weights[0].T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (h,), (x, weights) = grads, ctx.saved_tensors
        to_x = to_weights = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():  # the model differentiates this derivative once more
                to_x = _LinearMap.apply(h, weights, not ctx.transposed, ctx.uses)
            else:
                to_x = h @ (weights[0].T if ctx.transposed else weights[0])
        if ctx.needs_input_grad[1] and _will_run(ctx.next_functions[1][0]):
            h, x = (x, h) if ctx.transposed else (h, x)
            h, x = (own.flatten(1, -2) if own.dim() > 2 else own.unsqueeze(1) for own in (h, x))
            if ctx.uses is not None and ctx.uses.kept is not None:
                ctx.uses.kept.append((h.detach(), x.detach()))
            else:  # (n, s, o) x (n, s, i) -> (n, o, i)
                to_weights = h.mT * x if h.shape[1] == 1 else h.mT @ x
        return to_x, to_weights, None, None


def _as_linear_map(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """x W^T + b for samples x and copies of W, whether written F.linear or as a product; None if it is neither."""
    if kwargs or not (func is F.linear or func in _MATRIX_PRODUCTS) or not isinstance(args[1], Copies):
        return None
    x, weights = args[0], args[1].as_subclass(Tensor)
    n = len(weights)
    fits = weights.dim() == 3 and x.dim() >= 2 and len(x) % n == 0
    if isinstance(x, Copies) or not fits or torch.is_autocast_enabled(x.device.type):
        return None
    rows = x.unflatten(0, (n, -1)) if len(x) > n else x
    z: Tensor = _LinearMap.apply(rows, weights, func is not F.linear, args[1].uses)
    bias = args[2] if len(args) > 2 else None
    if isinstance(bias, Copies):
        bias = bias.as_subclass(Tensor)[(slice(None), *[None] * (z.dim() - 2))]
    z = z if bias is None else z + bias
    return z.flatten(0, 1) if len(x) > n else z


def _map_over_samples(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """func(*args, **kwargs) for every sample; copies again if none of the arguments has samples."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    samples = next(len(leaf.as_subclass(Tensor)) for leaf in leaves if isinstance(leaf, Copies))
    axis = None
    sizes = [place for place, leaf in enumerate(leaves) if isinstance(leaf, int) and leaf == samples]
    if func in _SPREADING and sizes:  # `token.expand(n, 1, d)`: one for each sample
        leaves[sizes[0]], axis = 1, 0
    tensors: dict[int, Tensor] = {}
    axes: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Copies):
            tensors[place] = leaf.as_subclass(Tensor)
            axes.append(0)
        elif isinstance(leaf, Tensor):
            own = _sample_axis(leaf, samples)
            if own is None and _is_mapped(leaf):
                raise RuntimeError("the model maps over samples by itself: each would meet the copies of all")
            if own is not None:
                axis = own
                tensors[place] = leaf.unflatten(own, (samples, -1))
                axes.append(own)
    others: list[Any] = []  # what is not a tensor: a shape, a type

    def of_one(*values: Tensor) -> Any:
        own = list(leaves)
        for place, value in zip(tensors, values, strict=True):
            own[place] = value
        own_args, own_kwargs = pytree.tree_unflatten(own, structure)
        result = (_weight_norm if func is torch._weight_norm else func)(*own_args, **own_kwargs)
        if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            return result
        others.append(result)
        return values[0]

    results = torch.func.vmap(of_one, tuple(axes), axis or 0)(*tensors.values())
    if others:
        return others[0]
    if axis is None:
        return pytree.tree_map(lambda result: result.as_subclass(Copies), results)
    return pytree.tree_map(lambda result: result.flatten(axis, axis + 1), results)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """As torch._weight_norm, which torch.func maps by a loop over the samples; dim=-1: the norm of all of v."""
    axes = [axis for axis in range(v.dim() + 1) if axis != dim]  # one more, so that there is one at least
    return v * (g / torch.linalg.vector_norm(v.unsqueeze(-1), dim=axes, keepdim=True).squeeze(-1))


def _sample_axis(tensor: Tensor, samples: int) -> int | None:
    """The axis with one entry per sample, or on which samples and their positions are one after the other."""
    if samples in tensor.shape:
        return tensor.shape.index(samples)
    return 0 if tensor.dim() > 0 and len(tensor) > 0 and len(tensor) % samples == 0 else None


def _is_mapped(tensor: Tensor) -> bool:
    """Whether it is one entry of a tensor that torch.func.vmap maps over, perhaps inside derivatives."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
