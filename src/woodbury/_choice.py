"""Arguments that name a part of a method, looked up once where they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Part = TypeVar("Part")

FALLBACKS = {None: False, "autograd": True}  # whether rows past the layer rules are computed instead of refused


def chosen(name: str, value: Any, parts: Mapping[Any, Part]) -> Part:
    """The part that the value of an argument stands for; an error that names the argument if there is none."""
    try:
        return parts[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name} must be one of {tuple(parts)}, got {value!r}") from None
