"""What users choose, checked: a part by its name, a number by its bounds. Errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from torch import Tensor

Part = TypeVar("Part")

FALLBACKS = {None: False, "autograd": True}  # whether rows that no layer rule gives are computed
BELOW_ONE = math.nextafter(1.0, 0.0)


def part_named(name: str, value: Any, parts: Mapping[Any, Part]) -> Part:
    """The part that the value of an argument names."""
    try:
        return parts[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name} must be one of {tuple(parts)}, got {value!r}") from None


def check_number(
    name: str, value: Any, *, least: float = 0.0, above: float | None = None, most: float = math.inf
) -> None:
    """Raise unless it is a finite number, a tensor of one perhaps, within bounds; above stands in for least."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be more than {above:g}, got {value}")
    if above is None and value < least:
        raise ValueError(f"{name} must not be {f'less than {least:g}' if least else 'negative'}, got {value}")
    if value > most:
        bound = "less than 1" if most == BELOW_ONE else f"at most {most:g}"
        raise ValueError(f"{name} must be {bound}, got {value}")


def check_whole_number(name: str, value: Any, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
        bound = "" if least is None else f" from {least} on"
        raise ValueError(f"{name} must be a whole number{bound}, got {value!r}")


def check_truth(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
