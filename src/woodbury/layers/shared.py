"""The forms of layers with W at positions s of a sample: convolutions, sequences, embeddings (see `positions`).

Of an embedding z_s = W[x_s] no one-hot vector is made: v_s is the unit vector of index x_s in both routes to K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from woodbury.layers.forms import windows
from woodbury.layers.positions import ELEMENTWISE, Part, PartRows, row_count, row_window


@dataclass
class SharedRows(PartRows):
    """Rows of z_s = W v_s + b over positions s, W perhaps in groups.

    W has the shape (g o, i...), or with `swapped` (g c, o, ...) where i = (c, ...).
    """

    weight: str | None = "weight"
    bias: str | None = "bias"
    swapped: bool = False  # as ConvTranspose stores W

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {self.weight: self.shape, self.bias: (math.prod(self.sizes[:2]),)}
        return {name: shapes[name] for name in self.parameters}

    @property
    def signature(self) -> tuple[object, ...]:
        return *super().signature, self.sizes, self.swapped

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(g, o, i)."""
        groups, width = self.parts[0].grads.shape[3:]
        return groups, width, math.prod(self.shape) // (groups * width)

    def scaled(self, first: Tensor, others: Tensor) -> SharedRows | None:
        if self.swapped:
            return None
        parts = tuple(part.scaled(first.view(self.sizes[:2]), others) for part in self.parts)
        return replace(self, parts=parts)

    def pairs_are_cheaper(self, other: Self) -> bool:
        """By the number of multiplications."""
        groups, width, features = self.sizes
        lefts, rights = self.parts, other.parts
        pairs = groups * sum(
            a.samples * a.positions * b.samples * b.positions
            * (features + a.columns * b.columns * (width + ELEMENTWISE))
            for a in lefts
            for b in rights
        )  # fmt: skip
        written = sum(part.rows * part.positions for part in (lefts if lefts is rights else (*lefts, *rights)))
        return pairs < groups * width * features * (written + row_count(lefts) * row_count(rights))

    @property
    def input_size(self) -> int:
        groups, _, width = self.sizes
        return groups * width

    def inner(self, x: Tensor, y: Tensor, group: int) -> Tensor:
        return torch.tensordot(x[:, :, group], y[:, :, group], dims=([2], [2]))

    def write_gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        groups, outputs, inputs = chunk
        block = min(math.prod(self.sizes), self._byte_limit // out.element_size() // 8)  # of G
        for window in self.sample_windows(part, out.dtype, part.columns * block):
            v, h = part.read(window, out.dtype)
            product = torch.einsum("nksgo,nsgi->nkgoi", h[..., groups, outputs], v[..., groups, inputs])
            out[row_window(part, window)] = product.flatten(0, 1)

    def change(self, part: Part, window: slice, vector: Mapping[str, Tensor]) -> Tensor:
        bias = 0.0 if self.bias is None else vector[self.bias].reshape(self.sizes[:2])
        if self.weight is None:
            return bias + part.grads.new_zeros(window.stop - window.start, part.positions, *self.sizes[:2])
        features = part.features(window).to(part.grads.dtype)
        return torch.einsum("nsgi,goi->nsgo", features, self._from_stored(vector[self.weight])) + bias

    def add_gradient(self, total: Mapping[str, Tensor], part: Part, window: slice, grads: Tensor) -> None:
        if self.weight is not None:
            gradient = torch.einsum("nsgo,nsgi->goi", grads, part.features(window).to(grads.dtype))
            total[self.weight].add_(self._as_stored(gradient).reshape(self.shape))
        if self.bias is not None:
            total[self.bias].add_(grads.sum((0, 1)).flatten())

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        if name == self.bias:
            return self.bias_rows(dtype)[:, window]
        groups, width, features = self.sizes
        kernel, written = math.prod(self.shape[2:]), []
        for group, inside in _within_groups(window, self.shape[0] // groups):
            chunk = group, inside, slice(0, features)
            if self.swapped:  # the first axis is (g, c), and i = (c, *kernel)
                chunk = group, slice(0, width), slice(inside.start * kernel, inside.stop * kernel)
            rows = self.write_rows(chunk, dtype).unflatten(1, [own.stop - own.start for own in chunk])
            written.append(self._as_stored(rows).flatten(1, 2))
        joined = written[0] if len(written) == 1 else torch.cat(written, dim=1)
        return joined.reshape(len(joined), window.stop - window.start, *self.shape[1:])

    def _as_stored(self, values: Tensor) -> Tensor:
        """(..., g, o, i) with its axes in the order of W: (..., g, c, o kernel) where it is swapped."""
        if not self.swapped:
            return values
        return values.unflatten(-1, (-1, math.prod(self.shape[2:]))).transpose(-3, -2).flatten(-2)

    def _from_stored(self, weight: Tensor) -> Tensor:
        """(*shape) -> (g, o, i)."""
        if self.swapped:
            groups, width, _ = self.sizes
            weight = weight.reshape(groups, -1, width, math.prod(self.shape[2:])).transpose(1, 2)
        return weight.reshape(self.sizes)


def _within_groups(window: slice, size: int) -> Iterator[tuple[slice, slice]]:
    """A window of the flattened axes (g, size), as windows of groups and inside of each."""
    if window.start % size == 0 and window.stop % size == 0:
        yield slice(window.start // size, window.stop // size), slice(0, size)
        return
    for group in range(window.start // size, (window.stop - 1) // size + 1):
        first = group * size
        yield slice(group, group + 1), slice(max(window.start - first, 0), min(window.stop - first, size))


@dataclass
class EmbeddingRows(PartRows):
    """Rows of z_s = W[x_s] for indices x: K_ij = sum over equal x_is = x_jt of h_is . h_jt.

    Parts have features (n, s), the indices, and grads (n, k, s, 1, o); W has the shape (indices, o). By gradients,
    only the indices that occur count, and only a block is written out.
    """

    weight: str = "weight"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.weight: self.shape}

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
    def input_size(self) -> int:
        return 1

    def inner(self, x: Tensor, y: Tensor, group: int) -> Tensor:
        return x[:, :, None, None] == y

    def gram_by_gradients(self, other: EmbeddingRows, dtype: torch.dtype) -> Tensor:
        """K from the gradients in the rows of W that occur."""
        same, count = other.parts is self.parts, len(self.parts)
        parts = self.parts if same else (*self.parts, *other.parts)
        index_count, ranked = _renumber(parts, self.shape[0])
        own = replace(self, parts=ranked[:count], shape=(index_count, self.shape[1]))
        return PartRows.gram_by_gradients(own, own if same else replace(own, parts=ranked[count:]), dtype)

    def write_gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        indices, features = chunk
        numbers = part.columns * (indices.stop - indices.start + 1 + 3 * part.positions) * out.shape[-1]
        for window in windows(part.samples, self._byte_limit // out.element_size() // 8 // max(1, numbers)):
            x, h = part.read(window, out.dtype)
            sums = _sums_by_index(x, h[:, :, :, 0, features], indices)
            out[row_window(part, window)].unflatten(0, h.shape[:2]).copy_(sums)

    def change(self, part: Part, window: slice, vector: Mapping[str, Tensor]) -> Tensor:
        return vector[self.weight][part.features(window)].unsqueeze(2)

    def add_gradient(self, total: Mapping[str, Tensor], part: Part, window: slice, grads: Tensor) -> None:
        total[self.weight].index_add_(0, part.features(window).flatten(), grads.flatten(0, 2))

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        width = self.shape[1]
        return self.write_rows((window, slice(0, width)), dtype).unflatten(1, (-1, width))


def _sums_by_index(indices: Tensor, columns: Tensor, window: slice) -> Tensor:
    """sum_s h_s [x_s = w] for the indices w of a window: x (n, s), h (n, k, s, o) -> (n, k, w, o)."""
    length = window.stop - window.start
    inside = (indices >= window.start) & (indices < window.stop)
    place = torch.where(inside, indices - window.start, length)  # one more place for indices outside
    sums = columns.new_zeros(*columns.shape[:2], length + 1, columns.shape[3])
    sums.scatter_add_(2, place[:, None, :, None].expand(columns.shape), columns)
    return sums[:, :, :length]


def _renumber(parts: Sequence[Part], indices: int) -> tuple[int, tuple[Part, ...]]:
    """How many indices occur, and the parts with these renumbered 0, 1, ..."""
    old_indices = [part.features(slice(0, part.samples)) for part in parts]
    flat = torch.cat([own.flatten() for own in old_indices])
    ordered, order = flat.sort()
    steps = torch.zeros_like(ordered)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = torch.empty_like(flat).index_copy_(0, order, steps.cumsum(0))
    # On a device an upper bound: the number itself would make a step wait.
    index_count = int(ranks.max()) + 1 if flat.device.type == "cpu" else min(indices, flat.numel())
    split = ranks.split([own.numel() for own in old_indices])
    triples = zip(parts, split, old_indices, strict=True)
    renumbered = [replace(part, features=own.reshape(old.shape).__getitem__) for part, own, old in triples]
    return index_count, tuple(renumbered)
