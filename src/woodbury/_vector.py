"""Arithmetic on vectors in parameter space: dictionaries from parameter name to tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Vector = dict[str, Tensor]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product <a, b> over the names of a, accumulated over tensors in float64."""
    parts = [torch.sum(value * b[name]).double() for name, value in a.items()]
    return torch.stack(parts).sum()


def norm(a: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm |a|."""
    return dot(a, a).sqrt()


def combine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Vector:
    """a + scale b, name by name."""
    return {name: value + scale * b[name] for name, value in a.items()}


def scaled(a: Mapping[str, Tensor], scale: float) -> Vector:
    """scale a, name by name."""
    return {name: scale * value for name, value in a.items()}


def weighted_sum(vectors: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Vector:
    """sum_j w_j a_j; a vector of weight zero is not read."""
    used = [(weight, vector) for weight, vector in zip(weights, vectors, strict=True) if weight]
    if not used:
        return zeros_like(vectors[0])
    total = scaled(used[0][1], used[0][0])
    for weight, vector in used[1:]:
        total = combine(total, vector, weight)
    return total


def zeros_like(a: Mapping[str, Tensor]) -> Vector:
    """0 with the names and shapes of a."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def restrict(a: Mapping[str, Tensor], names: Iterable[str]) -> Vector:
    """a with every entry outside `names` replaced by zero."""
    inside = set(names)
    return {name: value if name in inside else torch.zeros_like(value) for name, value in a.items()}


def flatten(a: Mapping[str, Tensor]) -> Tensor:
    """The entries of a, one after the other, as one long tensor."""
    return torch.cat([value.reshape(-1) for value in a.values()])


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> Vector:
    """The inverse of `flatten` for a vector with the names and shapes of `like`."""
    parts = flat.split([value.numel() for value in like.values()])
    return {name: part.view_as(value) for (name, value), part in zip(like.items(), parts, strict=True)}
