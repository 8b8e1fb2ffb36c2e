"""Policies as plain data, to save and reload them: {"LevenbergMarquardt": {"initial": 1.0, ...}}.

A policy is a frozen dataclass that an optimizer takes as a setting; the data are its name and all its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from woodbury.policies.damping import Constant, LevenbergMarquardt, as_damping
from woodbury.policies.search import CurvedSearch

POLICIES: dict[str, type[Any]] = {
    policy.__name__: policy for policy in (LevenbergMarquardt, Constant, CurvedSearch)
}


def to_plain(value: Any) -> Any:
    """A policy as plain data; any other value unchanged."""
    if POLICIES.get(type(value).__name__) is not type(value):
        return value
    return {type(value).__name__: dataclasses.asdict(value)}


def from_plain(value: Any) -> Any:
    """The policy that {name: fields} describes; any other value unchanged. Fields left out have their defaults.

    Raises TypeError that names an unknown policy, an unknown field or a missing one.
    """
    if not isinstance(value, Mapping):
        return value
    name, fields = next(iter(value.items()), ("", {}))
    if len(value) != 1 or name not in POLICIES or not isinstance(fields, Mapping):
        given = ", ".join(map(repr, value))
        raise TypeError(f"there is no policy {given}, only {', '.join(POLICIES)}")
    known = [field.name for field in dataclasses.fields(POLICIES[name])]
    for field in fields:
        if field not in known:
            raise TypeError(f"{name} has no field {field!r}, only {', '.join(known)}")
    return POLICIES[name](**fields)


def change(setting: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """The policy that a setting has, with some fields changed; a number stands for a `Constant`.

    Raises TypeError that names a setting without fields or an unknown field.
    """
    policy = from_plain(value)
    if isinstance(policy, int | float) and not isinstance(policy, bool) and setting == "damping":
        policy = as_damping(policy)
    plain = to_plain(policy)
    if not isinstance(plain, dict):
        raise TypeError(f"{setting} has no field {next(iter(fields))!r}: it is {value!r}")
    ((name, own),) = plain.items()
    return from_plain({name: {**own, **fields}})
