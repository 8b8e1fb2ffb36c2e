"""What a recorded step depends on beside its batch: modules, hooks, settings and functions, as a value to compare.

A replay of a CUDA graph runs no Python, so all that Python would read must be the same: the modules, their plain
attributes, hooks and training flags, the addresses of parameters and buffers, and for functions of the user their
closures and the plain globals they name. What those functions read beyond that does not show here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._process import has_global_hook

_PLAIN = frozenset((int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size))
_OWN = frozenset(vars(nn.Module()))  # attributes of every module, which `_of_module` treats one by one
_HOOKS = tuple(name for name in sorted(_OWN) if name.endswith("hooks"))
_MAX_ENTRIES = 32  # larger lists and dictionaries count by which object they are


class Same:
    """A key that is equal for the same object only, and keeps it alive."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)


def of_model(model: nn.Module) -> Hashable:
    """Everything about a model and its modules that decides what it computes."""
    return has_global_hook(), *map(_of_module, model.modules())


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
        except ValueError:  # an empty cell
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
    if isinstance(value, list | tuple) and len(value) <= _MAX_ENTRIES:
        return tuple([of_value(entry, depth) for entry in value])
    if isinstance(value, Mapping) and len(value) <= _MAX_ENTRIES:
        return tuple([(str(key), of_value(entry, depth)) for key, entry in value.items()])
    if depth > 0 and isinstance(value, FunctionType | MethodType):
        return of_function(value, depth - 1)
    if depth > 0 and not isinstance(value, type | nn.Module) and hasattr(value, "__dict__"):
        return Same(value), tuple([(name, of_value(part, depth - 1)) for name, part in vars(value).items()])
    return Same(value)


def _of_module(module: nn.Module) -> Hashable:
    attributes, kind = vars(module), type(module)
    parts: list[Any] = [Same(module), kind, module.training]
    for tensors in (attributes["_parameters"], attributes["_buffers"]):
        for tensor in tensors.values():
            # its address, type and shape: a replay reads the numbers
            parts.append(None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape))
    for name in _HOOKS:
        hooks = attributes[name]
        if hooks:
            parts.append(tuple(map(Same, hooks.values())) if isinstance(hooks, dict) else name)
    for name, value in attributes.items():
        if name not in _OWN:
            parts.append((name, value if type(value) in _PLAIN else of_value(value)))
    if not kind.__module__.startswith("torch."):
        parts.append(of_function(kind.forward))
    elif kind.forward is not _FORWARDS.setdefault(kind, kind.forward):
        parts.append(Same(kind.forward))  # replaced for the whole class
    return tuple(parts)


_FORWARDS: dict[type[nn.Module], Any] = {}
