"""The operations from the outputs of a model to its loss, noted as they run, so that they can be run again.

A loss in a loop of the user's own is any expression in the outputs. `tape` returns the outputs as a tensor that
notes each operation done with it, and with what came out of it, up to the call of `backward`. `Node.value` runs
the same operations on other outputs: the loss as a function of the outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Hears = Callable[["Node", Callable[[], Any]], None]  # of a root, and of the backward pass itself


class Node:
    """One result of an operation on outputs; its arguments are nodes where they depend on the outputs."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, index: int, tensor: Tensor) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.index = index  # of the result among those of the operation
        self.tensor = tensor.detach()  # as it was computed

    @property
    def name(self) -> str:
        """Of the operation, without the underscores of its special and in-place forms."""
        return str(getattr(self.function, "__name__", "")).strip("_")

    def parents(self) -> list[Node]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Node)]

    def ancestors(self) -> Iterator[Node]:
        """This node and all that it depends on."""
        waiting, seen = [self], {id(self)}
        while waiting:
            node = waiting.pop()
            yield node
            for parent in node.parents():
                if id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)

    def bases(self) -> list[Base]:
        """The outputs that it depends on."""
        return [node for node in self.ancestors() if isinstance(node, Base)]

    def strangers(self) -> list[Tensor]:
        """Tensors beside the outputs that the result would send gradients to."""
        leaves = [leaf for node in self.ancestors() for leaf in pytree.tree_leaves((node.args, node.kwargs))]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def value(self, outputs: Mapping[Base, Tensor]) -> Tensor:
        """The result for other outputs, by the same operations."""
        return self._value(outputs, {})

    def _value(self, outputs: Mapping[Base, Tensor], known: dict[int, Tensor]) -> Tensor:
        if id(self) not in known:

            def run(leaf: Any) -> Any:
                return leaf._value(outputs, known) if isinstance(leaf, Node) else leaf

            args, kwargs = pytree.tree_map(run, self.args), pytree.tree_map(run, self.kwargs)
            if _is_in_place(self.function):
                args = (args[0].clone(), *args[1:])
            known[id(self)] = pytree.tree_leaves(self.function(*args, **kwargs))[self.index]
        return known[id(self)]


class Base(Node):
    """Outputs of a model, where a tape begins."""

    def __init__(self, tensor: Tensor, hears: Hears) -> None:
        super().__init__(tape, (), {}, 0, tensor)
        self.hears = hears  # what to do when a backward pass starts from a result

    def _value(self, outputs: Mapping[Base, Tensor], known: dict[int, Tensor]) -> Tensor:
        return outputs[self]


def _is_in_place(function: Callable[..., Any]) -> bool:
    name = str(getattr(function, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


class Taped(Tensor):
    """A tensor that depends on the outputs of a model; what is computed from it is noted."""

    node: Node

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})

        def run() -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)

        if function is Tensor.__format__:
            return format(args[0].detach(), args[1])
        if function is Tensor.backward:
            root = args[0].node
            hears = {id(base): base.hears for base in root.bases()}
            return next(iter(hears.values()))(root, run) if hears else run()
        # the nodes first: an operation in place gives its argument another one
        nodes, named = pytree.tree_map(_as_node, args), pytree.tree_map(_as_node, kwargs)
        result = run()
        if isinstance(result, Tensor):
            return _note(function, nodes, named, 0, result)
        if not isinstance(result, tuple | list):
            return result
        leaves, structure = pytree.tree_flatten(result)
        noted = [_note(function, nodes, named, index, leaf) for index, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(noted, structure)


def _as_node(leaf: Any) -> Any:
    return leaf.node if isinstance(leaf, Taped) else leaf


def _note(function: Callable[..., Any], args: Any, kwargs: Any, index: int, leaf: Any) -> Any:
    """A result of an operation, taped if it has a gradient."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
        return leaf
    if isinstance(leaf, Taped):
        if _is_in_place(function):
            leaf.node = Node(function, args, kwargs, index, leaf)
        return leaf
    taped = leaf.as_subclass(Taped)
    taped.node = Node(function, args, kwargs, index, leaf)
    return taped


def tape(outputs: Tensor, hears: Hears) -> Taped:
    """The outputs with a tape; hears(root, run) is called in place of a backward pass from a result."""
    with torch._C.DisableTorchFunctionSubclass():
        taped = outputs.as_subclass(Taped)
        taped.node = Base(outputs, hears)
    return taped


class LossesInside(TorchFunctionMode):
    """Inside, the first argument of each of these functions gets a tape: a model that computes its own loss."""

    def __init__(self, functions: Iterable[Callable[..., Any]], hears: Hears) -> None:
        super().__init__()
        self._functions = set(functions)
        self._hears = hears
        self.inputs: list[Tensor] = []  # of these functions, in the order they were called

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in self._functions:
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, Tensor) and not isinstance(first, Taped):
                self.inputs.append(first)
                taped = tape(first, self._hears) if first.requires_grad else first
                if args:
                    args = (taped, *args[1:])
                else:
                    kwargs["input"] = taped
        return function(*args, **kwargs)
