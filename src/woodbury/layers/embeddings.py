"""The form of an embedding: rows of z_s = W[x_s], without one-hot vectors.

The Gram matrix has the two routes of `positions`, with v_s the unit vector of index x_s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from woodbury.layers.forms import windows
from woodbury.layers.positions import ELEMENTWISE, Part, PartRows, row_count, row_window


@dataclass
class EmbeddingRows(PartRows):
    """Rows of z_s = W[x_s] for indices x: K_ij = sum over equal x_is = x_jt of h_is . h_jt.

    Parts have features (n, s), the indices, and grads (n, k, s, 1, o); W has the shape (indices, o). By gradients,
    only the indices that occur count, and only a block is written out.
    """

    padding: int | None = None  # an index that contributes nothing
    weight: str = "weight"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.weight: self.shape}

    @property
    def signature(self) -> tuple[object, ...]:
        return *super().signature, self.padding

    def scaled(self, first: Tensor, others: Tensor) -> EmbeddingRows:
        parts = []
        for part in self.parts:
            own = first[part.features(slice(0, part.samples))][:, None, :, None, None]
            parts.append(replace(part, grads=part.grads * own * others))
        return replace(self, parts=tuple(parts))

    def pairs_are_cheaper(self, other: Self) -> bool:
        """Beside the gradients in the rows of W that occur."""
        lefts, rights, (count, width) = self.parts, other.parts, self.shape
        pairs = sum(a.rows * a.positions * b.rows * b.positions for a in lefts for b in rights)
        used = sum(part.samples * part.positions for part in (lefts if lefts is rights else (*lefts, *rights)))
        written = row_count(lefts) * row_count(rights) * min(count, used) * width
        return pairs * (width + ELEMENTWISE) < written

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape

    @property
    def input_size(self) -> int:
        return 1

    def inner(self, x: Tensor, y: Tensor, group: int) -> Tensor:
        equal = x[:, :, None, None] == y
        return equal if self.padding is None else equal & (y != self.padding)

    def gram_by_gradients(self, other: EmbeddingRows, dtype: torch.dtype) -> Tensor:
        """K from the gradients in the rows of W that occur."""
        same, count = other.parts is self.parts, len(self.parts)
        parts = self.parts if same else (*self.parts, *other.parts)
        index_count, ranked = _renumber(parts, self.shape[0], self.padding)
        own = replace(self, parts=ranked[:count], shape=(index_count, self.shape[1]))
        return PartRows.gram_by_gradients(own, own if same else replace(own, parts=ranked[count:]), dtype)

    def write_gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        indices, features = chunk
        numbers = part.columns * (indices.stop - indices.start + 1 + 3 * part.positions) * out.shape[-1]
        for window in windows(part.samples, self._byte_limit // out.element_size() // 8 // max(1, numbers)):
            x, h = part.read(window, out.dtype)
            sums = _sums_by_index(x, h[:, :, :, 0, features], indices)
            out[row_window(part, window)].unflatten(0, h.shape[:2]).copy_(sums)

    def _without_padding(self, indices: Tensor, values: Tensor) -> Tensor:
        """Values (n, s, 1, o) with zeros at the padding index."""
        return values if self.padding is None else values * (indices != self.padding)[:, :, None, None]

    def change(self, part: Part, window: slice, vector: Mapping[str, Tensor]) -> Tensor:
        indices = part.features(window)
        return self._without_padding(indices, vector[self.weight][indices].unsqueeze(2))

    def add_gradient(self, total: Mapping[str, Tensor], part: Part, window: slice, grads: Tensor) -> None:
        indices = part.features(window)
        values = self._without_padding(indices, grads)
        total[self.weight].index_add_(0, indices.flatten(), values.flatten(0, 2))

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        rows = []
        for part in self.parts:
            for samples in self.sample_windows(part, dtype):
                x, h = part.read(samples, dtype)
                if self.padding is not None:
                    x = torch.where(x == self.padding, -1, x)  # in no window
                rows.append(_sums_by_index(x, h[:, :, :, 0], window).flatten(0, 1))
        return torch.cat(rows)


def _sums_by_index(indices: Tensor, columns: Tensor, window: slice) -> Tensor:
    """sum_s h_s [x_s = w] for the indices w of a window: x (n, s), h (n, k, s, o) -> (n, k, w, o)."""
    length = window.stop - window.start
    inside = (indices >= window.start) & (indices < window.stop)
    place = torch.where(inside, indices - window.start, length)  # one more place for indices outside
    sums = columns.new_zeros(*columns.shape[:2], length + 1, columns.shape[3])
    sums.scatter_add_(2, place[:, None, :, None].expand(columns.shape), columns)
    return sums[:, :, :length]


def _renumber(parts: Sequence[Part], indices: int, padding: int | None) -> tuple[int, tuple[Part, ...]]:
    """How many indices occur, and the parts with these renumbered 0, 1, ..., padding as -1."""
    old_indices = [part.features(slice(0, part.samples)) for part in parts]
    flat = torch.cat([own.flatten() for own in old_indices])
    ordered, order = flat.sort()
    steps = torch.zeros_like(ordered)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = torch.empty_like(flat).index_copy_(0, order, steps.cumsum(0))
    # On a device an upper bound: the number itself would make a step wait.
    index_count = int(ranks.max()) + 1 if flat.device.type == "cpu" else min(indices, flat.numel())
    if padding is not None:
        ranks = torch.where(flat == padding, -1, ranks)
    split = ranks.split([own.numel() for own in old_indices])
    renumbered = [
        replace(part, features=own.reshape(old.shape).__getitem__)
        for part, own, old in zip(parts, split, old_indices, strict=True)
    ]
    return index_count, tuple(renumbered)
