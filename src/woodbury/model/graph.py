"""What the autograd graph of a pass shows: whether it is a chain, and parameters used outside captured calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury.layers.rules import LOOKUP_OPTIONS, has_own_parameters, linear_rows
from woodbury.model.call import Call
from woodbury.model.chain import ACTIVATIONS, Back
from woodbury.model.plan import Layer, Plan

# Elementwise nodes of the autograd graph.
_ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sigmoid", "Tanh", "Relu", "Silu", "Gelu", "Elu", "LeakyRelu", "Softplus", "Hardtanh", "Hardswish"),
        *("Mish", "LogSigmoid", "Sin", "Cos", "Exp", "Celu", "NativeDropout", "Pow", "Neg"),
        *("Mul", "Div", "Add", "Sub"),  # with a constant: they have one parent then
    )
)
# Those whose derivative needs v = phi(z) alone, by one operation; autograd gives the others.
_BY_OUTPUT: Mapping[str, type[nn.Module]]
_BY_OUTPUT = {"SigmoidBackward0": nn.Sigmoid, "TanhBackward0": nn.Tanh, "ReluBackward0": nn.ReLU}


def chain_of(
    plan: Plan, outputs: Tensor, calls: Sequence[Call]
) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
    """Layers, their inputs and the `Back`s between them if the model is a chain, else None.

    A chain has outputs = z_L and every v_{l+1} = phi(z_l); phi may be any elementwise function. The walk through
    the autograd graph of this pass, from the outputs, must meet nothing but the plan's Linear layers and
    elementwise nodes with one input.
    """
    if plan.uncovered or plan.tied:
        return None
    owners = {call.edge.node: call for call in calls}
    chain: list[Call] = []  # last first
    nodes: list[list[str]] = []  # names of those below each layer
    node, shape = outputs.grad_fn, outputs.shape
    while node is not None:
        call = owners.get(node)
        if call is None:
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if not chain or len(parents) != 1 or node.name() not in _ELEMENTWISE:
                return None
            nodes[-1].append(node.name())
            node = parents[0]
            continue
        inputs = call.arguments[0]
        # an elementwise node may broadcast, which shows in the shape
        if call.layer.rule is not linear_rows or inputs.dim() != 2 or call.outputs.shape != shape:
            return None
        if not has_own_parameters(call.layer.module) or inputs._backward_hooks or call.outputs._backward_hooks:
            return None  # what autograd sees there is more than W v + b
        chain.append(call)
        nodes.append([])
        node, shape = inputs.grad_fn, inputs.shape
        if node is None and inputs.requires_grad:
            return None
    if not len({call.layer.name for call in chain}) == len(chain) == len(calls):
        return None
    backs = [_back(call, below, names) for call, below, names in zip(chain, chain[1:], nodes, strict=False)]
    chain = chain[::-1]
    return [call.layer for call in chain], [call.inputs for call in chain], backs[::-1]


def _back(call: Call, below: Call, nodes: Sequence[str]) -> Back:
    """The function from gradients in the input of a layer to those in the output of the layer below."""
    kind = _BY_OUTPUT.get(nodes[0]) if len(nodes) == 1 else None
    if kind is not None:
        return partial(ACTIVATIONS[kind].backward, None, call.inputs, call.inputs)
    return lambda grads: torch.autograd.grad(call.arguments[0], [below.edge], grads)[0]


def graph_edges(outputs: Tensor) -> Iterator[tuple[Any, Any]]:
    """Every edge (node, next node) of the autograd graph behind the outputs."""
    pending: list[Any] = [outputs.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() in _LOOKED_AT:
            _check_node(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            yield node, following
            if following not in seen:
                seen.add(following)
                pending.append(following)


def fewest_digits(outputs: Tensor) -> torch.dtype:
    """The type with the fewest digits among the values that autograd followed up to the outputs.

    A model may cast to float32 in between, as norms do that were written for bfloat16.
    """
    dtype = outputs.dtype
    for node in {outputs.grad_fn, *(following for _, following in graph_edges(outputs))}:
        for value in getattr(node, "_input_metadata", ()):
            if value.dtype.is_floating_point and torch.finfo(value.dtype).eps > torch.finfo(dtype).eps:
                dtype = value.dtype
    return dtype


def runs_compiled(outputs: Tensor) -> bool:
    """Whether the pass ran code that torch.compile made, which autograd cannot see inside."""
    return any("CompiledFunctionBackward" in (node.name(), below.name()) for node, below in graph_edges(outputs))


_LOOKED_AT = frozenset(("CheckpointFunctionBackward", "EmbeddingBackward0", "EmbeddingBagBackward0"))


def _check_node(node: Any) -> None:
    """Raise if autograd cannot see inside, or gives something else than derivatives."""
    if node.name() == "CheckpointFunctionBackward":
        raise ValueError(
            "the model calls torch.utils.checkpoint with use_reentrant=True, which hides the parameters "
            "inside from torch.autograd.grad: pass use_reentrant=False there"
        )
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(node, f"_saved_{option}"):
            raise ValueError(
                f"the model looks up an embedding with {option}=True, which {LOOKUP_OPTIONS[option]}. Leave that "
                "option out"
            )


@dataclass(frozen=True)
class PassGraph:
    """The autograd graph behind the outputs of a pass, as its leaves see it."""

    root: Any  # the node of the outputs
    consumers: dict[Any, list[Any]]  # a node -> the nodes that use what it gives, once per use
    accumulators: dict[int, Any]  # the id of a leaf -> its node

    @staticmethod
    def behind(outputs: Tensor) -> PassGraph:
        consumers: dict[Any, list[Any]] = {}
        accumulators: dict[int, Any] = {}
        for node, following in graph_edges(outputs):
            consumers.setdefault(following, []).append(node)
            variable = getattr(following, "variable", None)
            if variable is not None:
                accumulators[id(variable)] = following
        return PassGraph(outputs.grad_fn, consumers, accumulators)

    def __contains__(self, node: object) -> bool:
        return node in self.consumers or node is self.root

    def reorders(self, samples: int) -> bool:
        """Whether samples may have another order inside, which may be a different one at every batch."""
        return any(_reorders(node, samples) for node in (self.root, *self.consumers) if node.name() in _MOVING)


_JOINING = ("CatBackward0", "StackBackward0")
_MOVING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Index", "IndexSelect", "Gather", "Embedding", "Sort", "Topk", "Take", "MaskedSelect", "Flip", "Roll"),
        *("IndexPut", "IndexCopy", "IndexAdd", "Put", "MaskedScatter", "Scatter", "ScatterAdd", "ScatterReduce"),
        "PackPaddedSequence",
    )
) | {"torch::autograd::CopySlices", *_JOINING}


def _reorders(node: Any, samples: int) -> bool:
    """Whether a node of `_MOVING` moves entries along an axis with one of them, or several, per sample."""
    if all(hasattr(source, "variable") for source, _ in node.next_functions if source is not None):
        return False  # a look-up in a parameter
    shape = getattr(node, "_saved_self_sym_sizes", node._input_metadata[0].shape)
    indices = getattr(node, "_saved_indices", None)
    if isinstance(indices, tuple):
        dims = [dim for dim, index in enumerate(indices) if index is not None and not _is_in_order(index)]
    else:
        dims = getattr(node, "_saved_dims", None) or [getattr(node, "_saved_dim", None)]
    if node.name() in _JOINING:
        dims = [dim for dim in dims if dim == 0]  # along others they join features
    # torch gives a negative one as a number of 64 bits without a sign
    return any(dim is None or shape[dim - 2**64 * (dim >= 2**63)] % samples == 0 for dim in dims)


def _is_in_order(index: Tensor) -> bool:
    return index.dtype == torch.long and index.equal(torch.arange(index.numel(), device="cpu"))


def unseen_parameters(plan: Plan, graph: PassGraph, calls: Sequence[Call]) -> dict[str, str]:
    """Parameter -> its module, for parameters that reach the outputs outside the captured calls too.

    That is, where the autograd graph uses a parameter more often than the captured calls on the way to the outputs
    do: `F.linear(x, layer.weight)` calls no module, and of a layer perhaps only its derivative reaches the
    outputs. A view counts by its own uses: the derivative of a network in its inputs uses the transposed weight
    once more.
    """
    reached = [call for call in calls if call.edge.node in graph]
    captured = Counter(name for call in reached for name in call.parameters)
    unseen: dict[str, str] = {}
    for name, parameter in plan.parameters.items():
        node = graph.accumulators.get(id(parameter))
        if name in plan.uncovered or node is None:
            continue
        use_count = _uses(graph, node)
        if use_count > captured[name]:
            # a layer may use it several times in one call
            inside = [_uses(graph, node, _nodes_of(call, reached)) for call in reached if name in call.parameters]
            if use_count > sum(inside):
                unseen[name] = plan.block_of[name][0]
    return unseen


def _uses(graph: PassGraph, node: Any, among: Collection[Any] | None = None) -> int:
    """How often the nodes behind it, or those of them in `among`, use what a node gives."""
    total = 0
    for consumer in graph.consumers.get(node, ()):
        if among is not None and consumer not in among:
            continue
        parents = [parent for parent, _ in consumer.next_functions if parent is not None]
        total += _uses(graph, consumer, among) if len(parents) == 1 and consumer.name() in _VIEWS else 1
    return total


def _nodes_of(call: Call, calls: Sequence[Call]) -> set[Any]:
    """The nodes of the autograd graph that a call made: those between its outputs and what it was called with."""
    ends = {tensor.grad_fn for tensor in pytree.tree_leaves(call.given) if isinstance(tensor, Tensor)}
    ends |= {tensor.grad_fn for tensor in call.arguments}
    ends |= {other.edge.node for other in calls if other is not call}
    pending, own = [call.edge.node], {call.edge.node}
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None and following not in own and following not in ends:
                own.add(following)
                pending.append(following)
    return own


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "Alias", "Expand", "Unsqueeze", "ToCopy"),
        *("Slice", "Split", "SplitWithSizes", "Select", "Unbind", "Narrow"),
    )
)
