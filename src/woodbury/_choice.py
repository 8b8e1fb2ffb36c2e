"""Lookup of arguments that name a part of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Part = TypeVar("Part")

FALLBACKS = {None: False, "autograd": True}  # whether rows that no layer rule gives are computed


def part_named(name: str, value: Any, parts: Mapping[Any, Part]) -> Part:
    """The part that the value of an argument names; raises an error that names the argument if there is none."""
    try:
        return parts[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name} must be one of {tuple(parts)}, got {value!r}") from None
