"""Vectors in parameter space: one flat tensor, with a view of each parameter's part by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

Parts = dict[str, Tensor]  # tensors by parameter name


class Space:
    """The coordinates of a parameter vector: the names and shapes of its parts, one after the other."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    @staticmethod
    def of(parts: Mapping[str, Tensor]) -> Space:
        """The space of tensors by name; the same one for the same names and shapes."""
        return _space(tuple((name, part.shape) for name, part in parts.items()))

    def pack(self, parts: Mapping[str, Tensor]) -> Vector:
        """The vector of tensors by name, in any order; parts that are not there are zero."""
        if len(parts) < len(self.shapes):
            parts = {**self.zeros(next(iter(parts.values()))), **parts}
        parts = {name: parts[name] for name in self.shapes}
        return Vector(self, self._common_base(parts), parts)

    def _common_base(self, parts: Parts) -> Tensor | None:
        """The flat tensor that all parts are views of, one after the other, if there is one."""
        base = next(iter(parts.values()))._base
        if base is None or base.dim() != 1 or base.numel() != self.size:
            return None
        start = 0
        for part in parts.values():
            if part._base is not base or part.storage_offset() - base.storage_offset() != start:
                return None
            start += part.numel()
        return base

    def zeros(self, like: Tensor) -> Vector:
        """0 in the type and on the device of a tensor."""
        return Vector(self, torch.zeros(self.size, dtype=like.dtype, device=like.device))

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor, by name."""
        pairs = zip(self.shapes.items(), flat.split_with_sizes(self.sizes), strict=True)
        return {name: piece if len(shape) == 1 else piece.view(shape) for (name, shape), piece in pairs}


@lru_cache(256)
def _space(shapes: tuple[tuple[str, torch.Size], ...]) -> Space:
    return Space(dict(shapes))


class Vector(Mapping[str, Tensor]):
    """A vector in parameter space: `flat`, or its parts by name; either is made from the other when asked for."""

    __slots__ = ("_flat", "_parts", "space")

    def __init__(self, space: Space, flat: Tensor | None = None, parts: dict[str, Tensor] | None = None) -> None:
        self.space, self._flat, self._parts = space, flat, parts

    @property
    def flat(self) -> Tensor:
        """(p,)."""
        if self._flat is None:
            assert self._parts is not None
            self._flat = flatten(self._parts)
        return self._flat

    @property
    def parts(self) -> dict[str, Tensor]:
        """A tensor of the parameter's shape by name."""
        if self._parts is None:
            assert self._flat is not None
            self._parts = self.space.split(self._flat)
        return self._parts

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.space.shapes)

    def __len__(self) -> int:
        return len(self.space.shapes)

    def of(self, flat: Tensor) -> Vector:
        """Another vector of this space."""
        return Vector(self.space, flat)

    def __add__(self, other: Vector) -> Vector:
        return self.of(self.flat + other.flat)

    def __sub__(self, other: Vector) -> Vector:
        return self.of(self.flat - other.flat)

    def __neg__(self) -> Vector:
        return self.of(-self.flat)

    def __mul__(self, other: Vector | Tensor | float) -> Vector:
        return self.of(self.flat * (other.flat if isinstance(other, Vector) else other))

    def __truediv__(self, other: Vector | Tensor | float) -> Vector:
        return self.of(self.flat / (other.flat if isinstance(other, Vector) else other))

    def plus(self, other: Vector, scale: float) -> Vector:
        """self + scale other."""
        return self.of(torch.add(self.flat, other.flat, alpha=scale))

    def dot(self, other: Vector) -> Tensor:
        """<self, other>, accumulated in float64."""
        if self.flat.is_cuda and self.flat.dtype != torch.float64:  # one kernel less
            return (self.flat * other.flat).sum(dtype=torch.float64)
        own = self.flat.double()
        return torch.dot(own, own if other is self else other.flat.double())

    def restrict(self, names: Iterable[str]) -> Vector:
        """The same with zeros in every part outside `names`."""
        inside = set(names)
        parts = {name: part if name in inside else torch.zeros_like(part) for name, part in self.items()}
        return Vector(self.space, parts=parts)

    def named(self) -> Parts:
        """The parts as views of one tensor, which `Space.pack` finds again: for the state of an optimizer."""
        return self.space.split(self.flat)


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum_j w_j a_j; a vector of weight zero is not read."""
    used = [(weight, vector) for weight, vector in zip(weights, vectors, strict=True) if weight]
    if not used:
        return vectors[0].of(torch.zeros_like(vectors[0].flat))
    total = used[0][1] * used[0][0]
    for weight, vector in used[1:]:
        total = total.plus(vector, weight)
    return total


def like(part: Tensor, other: Tensor) -> Tensor:
    """A tensor in the type and on the device of another; itself where it is so already."""
    same_device = part.is_cpu if other.is_cpu else part.device == other.device
    return part if same_device and part.dtype == other.dtype else part.to(device=other.device, dtype=other.dtype)


def flatten(parts: Mapping[str, Tensor]) -> Tensor:
    """The entries of tensors by name, one after the other, as one long tensor."""
    if isinstance(parts, Vector):
        return parts.flat
    return _flatten_dense_tensors(list(parts.values()))


def norm(parts: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of tensors by name, accumulated in float64."""
    return torch.linalg.vector_norm(flatten(parts), dtype=torch.float64)
