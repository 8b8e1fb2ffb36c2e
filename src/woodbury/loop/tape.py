"""The operations from the outputs of a model to its loss, noted as they run, so that they can be run again.

`tape` returns the outputs as a tensor that notes each operation done with it, and with what came out of it, up to
the call of `backward`; `Node.value_from` runs the same operations on other outputs. The versions that torch counts
for every tensor say which operations write into their arguments, and whether something was written unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from woodbury.losses.rules import FUNCTIONS

Operation = Callable[..., Any]
_NO_WHOLE_GRAPH = (
    "a woodbury optimizer follows the operations from the outputs of a model to its loss: compile the loss "
    "function without fullgraph=True"
)


class Owner(Protocol):
    """Who has given outputs a tape."""

    def before_backward(self, root: Node) -> None: ...

    def after_backward(self, root: Node) -> None: ...


class Node:
    """One result of an operation on outputs; its arguments are nodes where they depend on the outputs."""

    def __init__(self, function: Operation, arguments: Any, tensor: Tensor, written: Sequence[int] = ()) -> None:
        self.function = function
        self.leaves, self.structure = pytree.tree_flatten(arguments)  # of (args, kwargs)
        self.index = 0  # of the result among those of the operation
        self.written = written  # places of the leaves that the operation writes into
        self.is_written = False  # whether the result is the first of them
        self.tensor = tensor.detach()  # as it was computed
        self.version = tensor._version
        self.hooks = 0
        self.is_lost = False  # whether it has changed, nobody knows how
        given = [leaf for place, leaf in enumerate(self.leaves) if place not in written]
        self._states = [(leaf, state_of(leaf)) for leaf in given if has_version(leaf)]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    @property
    def arguments(self) -> tuple[Any, Any]:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        return args, kwargs

    def parents(self) -> list[Node]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def ancestors(self, owner: Owner | None = None) -> Iterator[Node]:
        """This node and all that it depends on, up to the outputs that an owner has given a tape."""
        waiting, seen = [self], {id(self)}
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, Base) and node.owner is owner:
                continue
            for parent in node.parents():
                if id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)

    def bases(self, owner: Owner) -> list[Base]:
        """The outputs of an owner's model that it depends on."""
        return [node for node in self.ancestors(owner) if isinstance(node, Base) and node.owner is owner]

    def strangers(self, owner: Owner) -> list[Tensor]:
        """Tensors beside the outputs that the result sends gradients to."""
        leaves = [leaf for node in self.ancestors(owner) for leaf in node.leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def is_stale(self, owner: Owner) -> bool:
        """Whether a tensor that an operation was given has been written into since."""
        return any(state_of(leaf) != state for node in self.ancestors(owner) for leaf, state in node._states)

    def value_from(self, node: Node, value: Tensor) -> Tensor:
        """The result, by the same operations, if that of a node it depends on, the outputs say, were this."""
        return self._value({id(node): value})

    def _value(self, known: dict[int, Tensor]) -> Tensor:
        if id(self) not in known:
            leaves = [_run_again(leaf, known) for leaf in self.leaves]
            for place in self.written:
                leaves[place] = leaves[place].clone()
            args, kwargs = pytree.tree_unflatten(leaves, self.structure)
            result = self.function(*args, **kwargs)
            known[id(self)] = (
                leaves[self.written[0]] if self.is_written else pytree.tree_leaves(result)[self.index]
            )
        return known[id(self)]


class Base(Node):
    """Outputs of a model, where a tape begins; those of another model may lead to them (its `origin`)."""

    def __init__(self, tensor: Tensor, owner: Owner, call: Any, place: int, origin: Node | None) -> None:
        super().__init__(tape, ((origin,), {}), tensor)
        self.owner, self.call, self.origin = owner, call, origin
        self.place = place  # among the outputs of the call, or among the losses inside the model
        self._is_copy = False

    def _value(self, known: dict[int, Tensor]) -> Tensor:
        if id(self) in known:
            return known[id(self)]
        return self.tensor if self.origin is None else self.origin._value(known)

    def keep(self) -> None:
        """Keep the outputs as they are, before something is written into them."""
        if not self._is_copy:
            self.tensor, self._is_copy = self.tensor.clone(), True

    @property
    def is_overwritten(self) -> bool:
        return not self._is_copy and self.tensor._version != self.version


def has_version(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def state_of(tensor: Tensor) -> tuple[int, str]:
    """What shows that a tensor was written into: its version; and its sum, where NumPy may have written."""
    is_seen = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor._version, str(tensor.detach().sum().item()) if is_seen else ""


def _run_again(leaf: Any, known: dict[int, Tensor]) -> Any:
    if isinstance(leaf, Node):
        return leaf._value(known)
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


class Taped(Tensor):
    """A tensor that depends on the outputs of a model; what is computed from it is noted."""

    node: Node

    @classmethod
    def __torch_function__(
        cls, function: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(function, args, dict(kwargs or {}))


def _run(function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if function is Tensor.__format__:
            return format(args[0].detach(), args[1])
        if function is Tensor.backward:
            return _run_backward(args, kwargs)
        if function is Tensor.register_hook:
            args[0].node.hooks += 1
        return _run_noted(function, args, kwargs)


def _run_compiled_as_written() -> None:
    """Let functions that torch.compile has compiled run as they were written where they are given a tape."""
    global _run
    config = sys.modules.get("torch._dynamo.config")  # an import would take seconds
    known = getattr(config, "nontraceable_tensor_subclasses", None)
    if known is not None and Taped not in known:
        known.add(Taped)
        _run = torch.compiler.disable(_run, reason=_NO_WHOLE_GRAPH)


def _run_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The backward pass from a result; the owners of all outputs that it depends on hear of it."""
    root = _node_of(args[0])
    weights = kwargs.get("gradient", args[1] if len(args) > 1 else None)
    if weights is not None:
        product = Node(torch.mul, ((root, weights.detach()), {}), root.tensor * weights.detach())
        root = Node(torch.sum, ((product,), {}), product.tensor.sum())
    owners = {id(node.owner): node.owner for node in root.ancestors() if isinstance(node, Base)}.values()
    for owner in owners:
        owner.before_backward(root)
    Tensor.backward(*args, **kwargs)
    for owner in owners:
        owner.after_backward(root)


def _run_noted(function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    nodes = [_node_of(leaf) if isinstance(leaf, Taped) else leaf for leaf in leaves]
    if _may_write(function, leaves, kwargs):
        for node in nodes:
            for base in node.ancestors() if isinstance(node, Node) else ():
                if isinstance(base, Base):
                    base.keep()
    before = [leaf._version if has_version(leaf) else None for leaf in leaves]
    result = function(*args, **kwargs)
    written = [
        place for place, leaf in enumerate(leaves) if before[place] is not None and leaf._version != before[place]
    ]

    def note(tensor: Tensor, index: int) -> Node:
        node = Node(function, pytree.tree_unflatten(nodes, structure), tensor, written)
        node.index = index
        node.is_lost = function is torch.autograd.grad  # which is no function of the outputs alone
        return node

    target = leaves[written[0]] if written else None
    if isinstance(target, Taped) and target.requires_grad:
        known = target.node
        target.node = note(target, 0)
        target.node.is_written = True
        # what is written without a gradient, or through a view of other outputs, cannot be run again
        target.node.is_lost = known.is_lost or not torch.is_grad_enabled()

    def taped(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
            return leaf
        if isinstance(leaf, Taped):
            return leaf
        other = leaf.as_subclass(Taped)
        other.node = note(other, index)
        other.node.is_lost |= leaf is target  # a tensor that was there before
        return other

    if isinstance(result, Tensor):
        return taped(result, 0)
    if not isinstance(result, tuple | list):
        return result
    results, form = pytree.tree_flatten(result)
    return pytree.tree_unflatten([taped(leaf, index) for index, leaf in enumerate(results)], form)


def _node_of(leaf: Taped) -> Node:
    """The node of a tensor; a lost one if it was written into since by way of a view or of memory it shares."""
    if leaf._version != leaf.node.version:
        leaf.node = Node(_node_of, ((leaf.node,), {}), leaf)
        leaf.node.is_lost = True
    return leaf.node


def _may_write(function: Operation, leaves: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation may write into its arguments; one that does and is not known here is found later."""
    name = str(getattr(function, "__name__", ""))
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or name.startswith(("__i", "__set")) or "out" in kwargs or any(leaf is True for leaf in leaves)


def tape(outputs: Tensor, owner: Owner, call: Any, place: int) -> Taped:
    """Outputs of a call with a tape; their owner hears of each backward pass from a result."""
    _run_compiled_as_written()
    with torch._C.DisableTorchFunctionSubclass():
        origin = _node_of(outputs) if isinstance(outputs, Taped) else None
        taped = outputs.as_subclass(Taped)
        taped.node = Base(taped, owner, call, place, origin)
    return taped


class LossesInside(TorchFunctionMode):
    """Inside, the first argument of torch's loss functions is noted, and given a tape if there is an owner."""

    def __init__(self, owner: Owner | None = None, call: Any = None) -> None:
        super().__init__()
        self._owner, self._call = owner, call
        self.inputs: list[Tensor] = []  # of these functions, in the order they were called

    def __torch_function__(
        self, function: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in FUNCTIONS:
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, Tensor) and not isinstance(first, Taped):
                self.inputs.append(first)
                if self._owner is not None and first.requires_grad:
                    first = tape(first, self._owner, self._call, len(self.inputs) - 1)
                args, kwargs = ((first, *args[1:]), kwargs) if args else (args, {**kwargs, "input": first})
        return function(*args, **kwargs)
