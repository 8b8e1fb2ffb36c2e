"""What a recorded step depends on beside its batch: modules, hooks, settings and functions, as a value to compare.

Python is not run when a graph is replayed, so what it would have read must be the same: the modules themselves,
their plain attributes, hooks and training flags, where parameters and buffers lie, and for functions of one's own
what they close over and the plain globals they name. What those functions read beyond that is not seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size)
_OWN = frozenset(vars(nn.Module()))  # what every module has: looked at below, one by one
_HOOKS = tuple(name for name in _OWN if name.endswith("hooks"))
_MOST = 32  # entries of a list or dictionary that are looked at


def of_model(model: nn.Module, owners: list[object]) -> Hashable:
    """Everything about a model and its modules that decides what it computes; owners gains what is known by id."""
    parts: list[Hashable] = [len(getattr(module_hooks, name)) for name in _GLOBAL_HOOKS]
    for module in model.modules():
        parts.append(_of_module(module, owners))
    return tuple(parts)


def of_function(function: Any, owners: list[object], depth: int = 1) -> Hashable:
    """A function: its code, what it closes over, its defaults, and the plain globals it names."""
    owners.append(function)
    inner = getattr(function, "func", None)  # functools.partial
    if inner is not None and callable(inner):
        given = of_value((function.args, function.keywords), owners, depth)
        return of_function(inner, owners, depth), given
    bound = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return id(function), of_value(function, owners, depth)
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(of_value(cell.cell_contents, owners, depth))
        except ValueError:  # not filled in yet
            cells.append(None)
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    plain = [function.__globals__[name] for name in names if isinstance(function.__globals__[name], _PLAIN)]
    defaults = of_value((function.__defaults__, function.__kwdefaults__), owners, depth)
    return id(function.__code__), id(bound), tuple(cells), tuple(plain), defaults


_GLOBAL_HOOKS = tuple(
    name
    for name in (
        *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"),
        "_global_backward_pre_hooks",
    )
    if hasattr(module_hooks, name)
)


def _of_module(module: nn.Module, owners: list[object]) -> Hashable:
    held, kind = vars(module), type(module)
    owners.append(module)
    parts: list[Hashable] = [id(module), id(kind), module.training]
    for tensors in (module._parameters, module._buffers):
        parts.extend(_of_tensor(tensor) for tensor in tensors.values())
    parts.extend(tuple(map(id, held[name].values())) for name in _HOOKS if held.get(name))
    for name, value in held.items():
        if name not in _OWN:
            parts.append((name, of_value(value, owners, 1)))
    if not kind.__module__.startswith("torch."):
        parts.append(of_function(getattr_static(kind, "forward"), owners))
    return tuple(parts)


def _of_tensor(tensor: Tensor | None) -> Hashable:
    """Where a tensor lies, and as what: its numbers are read when a graph is replayed."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def of_value(value: Any, owners: list[object], depth: int = 1) -> Hashable:
    """A plain value by itself, containers by their entries, anything else by which object it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        owners.append(value)
        return _of_tensor(value)
    if isinstance(value, list | tuple) and len(value) <= _MOST:
        return tuple(of_value(entry, owners, depth) for entry in value)
    if isinstance(value, Mapping) and len(value) <= _MOST:
        return tuple((str(key), of_value(entry, owners, depth)) for key, entry in value.items())
    owners.append(value)
    if isinstance(value, FunctionType) and depth > 0:
        return of_function(value, owners, depth - 1)
    if depth > 0 and not isinstance(value, type | nn.Module) and hasattr(value, "__dict__"):
        return id(value), tuple((name, of_value(own, owners, depth - 1)) for name, own in vars(value).items())
    return id(value)
