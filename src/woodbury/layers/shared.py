"""The form of layers z_s = W v_s + b over positions s of a sample: convolutions, sequences (see `positions`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from woodbury.layers.forms import Dtype, Scales, add_onto, windows
from woodbury.layers.positions import (
    ELEMENTWISE,
    Part,
    PartRows,
    gram_by_gradients,
    gram_by_pairs,
    row_count,
    row_window,
    spans,
    write_rows,
)


@dataclass
class SharedRows(PartRows):
    """Rows of z_s = W v_s + b over positions s, W perhaps in groups.

    W has the shape (g o, i...), or with `swapped` (g c, o, ...) where i = (c, ...).
    """

    weight: str | None = "weight"
    bias: str | None = "bias"
    swapped: bool = False  # as ConvTranspose stores W
    has_positions = True

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

    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        dtype = self.parts[0].grads.dtype if dtype is None else dtype
        gram = None
        if self.weight is not None:
            by_pairs = pairs_are_cheaper(self.parts, other.parts, self.sizes)
            gram = (self.gram_by_pairs if by_pairs else self.gram_by_gradients)(other, dtype)
            if scales is not None:
                gram = gram.mul_(scales[self.weight])
        if self.bias is not None:
            left = self._bias_rows(dtype)
            term = F.linear(left, left if other is self else other._bias_rows(dtype))
            if scales is not None:
                term = term.mul_(scales[self.bias])
            gram = term if gram is None else gram.add_(term)
        assert gram is not None
        return add_onto(gram, onto)

    def _bias_rows(self, dtype: torch.dtype) -> Tensor:
        """The rows of b, sum_s h_s, (r, g o)."""
        return torch.cat([part.grads.sum(2, dtype=dtype).flatten(2).flatten(0, 1) for part in self.parts])

    def gram_by_pairs(self, other: SharedRows, dtype: torch.dtype) -> Tensor:
        """The term of W, from pairs of positions."""
        groups, _, width = self.sizes

        def inner(x: Tensor, y: Tensor, group: int) -> Tensor:
            return torch.tensordot(x[:, :, group], y[:, :, group], dims=([2], [2]))

        return gram_by_pairs(self.parts, other.parts, inner, groups * width, dtype, self._byte_limit)

    def gram_by_gradients(self, other: SharedRows, dtype: torch.dtype) -> Tensor:
        """The term of W, from per-sample gradients."""
        return gram_by_gradients(self.parts, other.parts, self.sizes, self._gradients, dtype, self._byte_limit)

    def _gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        """Write G = sum_s h_s v_s^T for a chunk of groups, outputs and inputs into out (r, g, o, i)."""
        groups, outputs, inputs = chunk
        for window in self._sample_windows(part, out.dtype):
            v, h = part.read(window, out.dtype)
            product = torch.einsum("nksgo,nsgi->nkgoi", h[..., groups, outputs], v[..., groups, inputs])
            out[row_window(part, window)] = product.flatten(0, 1)

    def _sample_windows(self, part: Part, dtype: torch.dtype) -> Iterator[slice]:
        groups, width, features = self.sizes
        columns = part.columns
        # v twice (padded, unfolded), h and its copy, a change of z, a block of G
        numbers = part.positions * groups * (2 * features + (2 * columns + 1) * width)
        numbers += columns * min(groups * width * features, self._byte_limit // dtype.itemsize // 8)
        return windows(part.samples, self._byte_limit // dtype.itemsize // 2 // max(1, numbers))

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        weight = None if self.weight is None else self._from_stored(vector[self.weight])
        bias = None if self.bias is None else vector[self.bias].reshape(self.sizes[:2])
        products = []
        for part in self.parts:
            dtype = part.grads.dtype
            for window in self._sample_windows(part, dtype):
                if weight is None:
                    h = part.grads[window]
                    products.append(torch.einsum("nksgo,go->nk", h, bias).flatten())
                    continue
                v, h = part.read(window, dtype)
                change = torch.einsum("nsgi,goi->nsgo", v, weight)
                if bias is not None:
                    change = change + bias
                products.append(torch.einsum("nksgo,nsgo->nk", h, change).flatten())
        return torch.cat(products)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        first = self.parts[0].grads
        weight, bias = first.new_zeros(self.sizes), first.new_zeros(self.sizes[:2])
        for part, span in spans(self.parts):
            c = coefficients[span].to(first.dtype).unflatten(0, (part.samples, part.columns))
            for window in self._sample_windows(part, first.dtype):
                contracted = torch.einsum("nk,nksgo->nsgo", c[window], part.grads[window])
                if self.weight is not None:
                    inputs = part.features(window).to(first.dtype)
                    weight += torch.einsum("nsgo,nsgi->goi", contracted, inputs)
                if self.bias is not None:
                    bias += contracted.sum((0, 1))
        vector = {}
        if self.weight is not None:
            vector[self.weight] = self._as_stored(weight).reshape(self.shape)
        if self.bias is not None:
            vector[self.bias] = bias.flatten()
        return vector

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        if name == self.bias:
            return self._bias_rows(dtype)[:, window]
        groups, width, features = self.sizes
        kernel, written = math.prod(self.shape[2:]), []
        for group, inside in _within_groups(window, self.shape[0] // groups):
            chunk = group, inside, slice(0, features)
            if self.swapped:  # the first axis is (g, c), and i = (c, *kernel)
                chunk = group, slice(0, width), slice(inside.start * kernel, inside.stop * kernel)
            rows = write_rows(self.parts, chunk, self._gradients, dtype)
            rows = rows.unflatten(1, [own.stop - own.start for own in chunk])
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


def pairs_are_cheaper(lefts: Sequence[Part], rights: Sequence[Part], sizes: tuple[int, int, int]) -> bool:
    """Whether pairs of positions need fewer multiplications than per-sample gradients."""
    groups, width, features = sizes
    pairs = groups * sum(
        a.samples * a.positions * b.samples * b.positions
        * (features + a.columns * b.columns * (width + ELEMENTWISE))
        for a in lefts
        for b in rights
    )  # fmt: skip
    written = sum(part.rows * part.positions for part in (lefts if lefts is rights else (*lefts, *rights)))
    return pairs < groups * width * features * (written + row_count(lefts) * row_count(rights))
