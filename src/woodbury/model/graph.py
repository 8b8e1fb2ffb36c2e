"""What the autograd graph of a pass tells: whether it is a chain, and which parameters act past captured calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.layers.rules import has_own, linear_rows
from woodbury.model.call import Call
from woodbury.model.chain import ACTIVATIONS, Back
from woodbury.model.plan import Layer, Plan

# Nodes of the autograd graph that act on each number by itself.
_ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sigmoid", "Tanh", "Relu", "Silu", "Gelu", "Elu", "LeakyRelu", "Softplus", "Hardtanh", "Hardswish"),
        *("Mish", "LogSigmoid", "Sin", "Cos", "Exp", "Celu", "NativeDropout", "Pow", "Neg"),
        *("Mul", "Div", "Add", "Sub"),  # with a constant: they have one parent then
    )
)
# Those whose derivative is one operation in v = phi(z) alone; autograd gives the others.
_BY_OUTPUT: dict[str, type[nn.Module]] = {
    "SigmoidBackward0": nn.Sigmoid,
    "TanhBackward0": nn.Tanh,
    "ReluBackward0": nn.ReLU,
}


def chain_of(
    plan: Plan, outputs: Tensor, made: Sequence[Call]
) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
    """Layers, their inputs and the ways back between them if outputs = z_L and every v_{l+1} = phi(z_l).

    phi may be any function of each number by itself.

    Read off the autograd graph of this very pass: the walk from the outputs must meet nothing but the
    plan's Linear layers and one-input elementwise nodes. None for any other model.
    """
    if plan.rest or plan.tied:
        return None
    owners = {call.edge.node: call for call in made}
    calls: list[Call] = []  # last first
    nodes: list[list[str]] = []  # names of those below each layer
    node, shape = outputs.grad_fn, outputs.shape
    while node is not None:
        call = owners.get(node)
        if call is None:
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if not calls or len(parents) != 1 or node.name() not in _ELEMENTWISE:
                return None
            nodes[-1].append(node.name())
            node = parents[0]
            continue
        given = call.given[0]
        # an elementwise node may still broadcast, which the shape gives away
        if call.layer.rule is not linear_rows or given.dim() != 2 or call.outputs.shape != shape:
            return None
        if not has_own(call.layer.module) or given._backward_hooks or call.outputs._backward_hooks:
            return None  # what autograd sees there is more than W v + b
        calls.append(call)
        nodes.append([])
        node, shape = given.grad_fn, given.shape
        if node is None and given.requires_grad:
            return None
    if not len({call.layer.name for call in calls}) == len(calls) == len(made):
        return None
    backs = [_back(call, below, names) for call, below, names in zip(calls, calls[1:], nodes, strict=False)]
    calls = calls[::-1]
    return [call.layer for call in calls], [call.inputs for call in calls], backs[::-1]


def _back(call: Call, below: Call, nodes: Sequence[str]) -> Back:
    """From gradients in the input of a layer to those in the output of the one below."""
    kind = _BY_OUTPUT.get(nodes[0]) if len(nodes) == 1 else None
    if kind is not None:
        return partial(ACTIVATIONS[kind].backward, None, call.inputs, call.inputs)
    return lambda grads: torch.autograd.grad(call.given[0], [below.edge], grads)[0]


def graph_edges(outputs: Tensor) -> Iterator[tuple[Any, Any]]:
    """Every edge (node, next node) of the autograd graph behind the outputs."""
    pending: list[Any] = [outputs.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "the model calls torch.utils.checkpoint with use_reentrant=True, which hides the parameters "
                "inside from torch.autograd.grad: pass use_reentrant=False there"
            )
        for following, _ in node.next_functions:
            if following is None:
                continue
            yield node, following
            if following not in seen:
                seen.add(following)
                pending.append(following)


def unseen_parameters(plan: Plan, outputs: Tensor, calls: Sequence[Call]) -> dict[str, str]:
    """Parameter -> its module wherever one reaches the outputs other than through the calls that were captured.

    Walks the autograd graph: a parameter covered by rules must have as many uses as there are captured calls on
    the way to the outputs that use it (`F.linear(x, layer.weight)` calls no module; of a layer perhaps only the
    derivative is on the way). A view of a parameter counts by its own uses: the derivative of a network in its
    inputs goes through the transposed weight a second time.
    """
    consumers: dict[Any, list[Any]] = {}
    accumulators: dict[int, Any] = {}
    seen = {outputs.grad_fn}
    for node, following in graph_edges(outputs):
        consumers.setdefault(following, []).append(node)
        variable = getattr(following, "variable", None)
        if variable is not None:
            accumulators[id(variable)] = following
        seen.add(following)

    def uses(node: Any) -> int:
        total = 0
        for consumer in consumers.get(node, ()):
            parents = [parent for parent, _ in consumer.next_functions if parent is not None]
            total += uses(consumer) if len(parents) == 1 and consumer.name() in _VIEWS else 1
        return total

    captured = Counter(name for call in calls if call.edge.node in seen for name in call.parameters)
    found: dict[str, str] = {}
    for name, parameter in plan.parameters.items():
        node = accumulators.get(id(parameter))
        if name not in plan.rest and node is not None and uses(node) > captured[name]:
            found[name] = plan.block_of[name][0]
    return found


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "Alias", "Expand", "Unsqueeze", "ToCopy"),
        *("Slice", "Split", "SplitWithSizes", "Select", "Unbind", "Narrow"),
    )
)
