"""What a recorded step depends on beside its batch: modules, hooks, settings and functions, as a value to compare.

Python is not run when a graph is replayed, so what it would have read must be the same: the modules themselves,
their plain attributes, hooks and training flags, where parameters and buffers lie, and for functions of one's own
what they close over and the plain globals they name. What those functions read beyond that is not seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

_PLAIN = frozenset((int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size))
_OWN = frozenset(vars(nn.Module()))  # what every module has: looked at one by one
_HOOKS = tuple(name for name in sorted(_OWN) if name.endswith("hooks"))
_MOST = 32  # entries of a list or dictionary that are looked at


class Same:
    """Equal to what holds the very same object, which it keeps alive."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def of_model(model: nn.Module) -> Hashable:
    """Everything about a model and its modules that decides what it computes."""
    return bool(module_hooks._has_any_global_hook()), *map(_of_module, model.modules())


def of_function(function: Any, depth: int = 1) -> Hashable:
    """A function: its code, what it closes over, its defaults, and the plain globals it names."""
    if isinstance(function, MethodType):
        return Same(function.__self__), of_function(function.__func__, depth)
    if not isinstance(function, FunctionType):
        return of_value(function, depth)
    parts: list[Hashable] = [function.__code__]
    for cell in function.__closure__ or ():
        try:
            parts.append(of_value(cell.cell_contents, depth))
        except ValueError:  # not filled in yet
            parts.append(None)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if type(value) in _PLAIN:
            parts.append(value)
    if function.__defaults__ or function.__kwdefaults__:
        parts.append(of_value((function.__defaults__, function.__kwdefaults__), depth))
    return tuple(parts)


def of_value(value: Any, depth: int = 1) -> Hashable:
    """A plain value by itself, containers by their entries, anything else by which object it is."""
    if type(value) in _PLAIN:
        plain: Hashable = value
        return plain
    if isinstance(value, Tensor):
        return Same(value), value.data_ptr()
    if isinstance(value, list | tuple) and len(value) <= _MOST:
        return tuple([of_value(entry, depth) for entry in value])
    if isinstance(value, Mapping) and len(value) <= _MOST:
        return tuple([(str(key), of_value(entry, depth)) for key, entry in value.items()])
    if depth > 0 and isinstance(value, FunctionType | MethodType):
        return of_function(value, depth - 1)
    if depth > 0 and not isinstance(value, type | nn.Module) and hasattr(value, "__dict__"):
        return Same(value), tuple([(name, of_value(own, depth - 1)) for name, own in vars(value).items()])
    return Same(value)


def _of_module(module: nn.Module) -> Hashable:
    held, kind = vars(module), type(module)
    parts: list[Any] = [Same(module), kind, module.training]
    for tensors in (held["_parameters"], held["_buffers"]):
        for tensor in tensors.values():
            # where it lies, and as what: its numbers are read when a graph is replayed
            parts.append(None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape))
    for name in _HOOKS:
        if held[name]:
            parts.append(tuple(map(Same, held[name].values())) if isinstance(held[name], dict) else name)
    for name, value in held.items():
        if name not in _OWN:
            parts.append((name, value if type(value) in _PLAIN else of_value(value)))
    if not kind.__module__.startswith("torch."):
        parts.append(of_function(kind.forward))
    elif kind.forward is not _FORWARDS.setdefault(kind, kind.forward):
        parts.append(Same(kind.forward))  # exchanged for all modules of the class
    return tuple(parts)


_FORWARDS: dict[type[nn.Module], Any] = {}
