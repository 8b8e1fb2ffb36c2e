"""Policies as plain data: {"LevenbergMarquardt": {"initial": 1.0, ...}}, the name and every field.

A policy is a frozen dataclass that an optimizer takes as a setting. What is saved is enough to make it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from woodbury.damping import Constant, LevenbergMarquardt

POLICIES: dict[str, type[Any]] = {policy.__name__: policy for policy in (LevenbergMarquardt, Constant)}
# Whose fields these are where no name stands before them.
_UNNAMED = LevenbergMarquardt


def to_plain(value: Any) -> Any:
    """A policy as plain data; anything else as it is."""
    if POLICIES.get(type(value).__name__) is not type(value):
        return value
    return {type(value).__name__: dataclasses.asdict(value)}


def from_plain(value: Any) -> Any:
    """The policy that plain data stand for; anything but a dictionary as it is.

    Fields left out have their defaults. Fields without a name before them are those of `LevenbergMarquardt`.
    Raises TypeError that names a policy or a field there is not, or one that is missing.
    """
    if not isinstance(value, Mapping):
        return value
    name, fields = _UNNAMED.__name__, value
    if len(value) == 1 and isinstance(next(iter(value.values())), Mapping):
        ((name, fields),) = value.items()
    if name not in POLICIES:
        raise TypeError(f"there is no policy {name!r}, only {', '.join(POLICIES)}")
    known = {field.name: field for field in dataclasses.fields(POLICIES[name])}
    for field in fields:
        if field not in known:
            raise TypeError(f"{name} has no field {field!r}, only {', '.join(known)}")
    for field in known.values():
        if field.name not in fields and field.default is dataclasses.MISSING:
            raise TypeError(f"{name} needs its field {field.name!r}")
    return POLICIES[name](**fields)
