"""Policies as plain data, to save and reload them: {"LevenbergMarquardt": {"initial": 1.0, ...}}.

A policy is a frozen dataclass that an optimizer takes as a setting; the data are its name and all its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from woodbury.policies.damping import Constant, LevenbergMarquardt
from woodbury.policies.search import CurvedSearch

POLICIES: dict[str, type[Any]] = {
    policy.__name__: policy for policy in (LevenbergMarquardt, Constant, CurvedSearch)
}
_DEFAULT = LevenbergMarquardt  # the policy of fields without a name


def to_plain(value: Any) -> Any:
    """A policy as plain data; any other value unchanged."""
    if POLICIES.get(type(value).__name__) is not type(value):
        return value
    return {type(value).__name__: dataclasses.asdict(value)}


def from_plain(value: Any) -> Any:
    """The policy that a dictionary describes; any other value unchanged.

    Fields left out have their defaults. A dictionary of fields without a name is a `LevenbergMarquardt`.
    Raises TypeError that names an unknown policy, an unknown field or a missing one.
    """
    if not isinstance(value, Mapping):
        return value
    name, fields = _DEFAULT.__name__, value
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
