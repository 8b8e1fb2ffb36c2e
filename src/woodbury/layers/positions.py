"""Positions: what layers have in common that use the same parameters at several positions of a sample.

The row of a sample is the sum over its positions s. For z_s = W v_s + b with back-propagated columns h,

    row of W = sum_s h_s v_s^T,  row of b = sum_s h_s,  K_ij = sum_{s,t} (v_is . v_jt + 1) (h_is . h_jt)

and an embedding is the same with v_s one-hot. K has two exact routes; a form takes the cheaper one:

    pairs       the double sum as it stands, in blocks of sample pairs:  n^2 s^2 (i + o) work
    gradients   G_i = sum_s h_is v_is^T written out for a block of the layer's parameters, K += G G^T:
                n s i o + n^2 i o work

The product of two summed Gram matrices, (sum v . sum v')(sum h . sum h'), is not K. Letters: n sample,
k column, r = n k row, s and t position, g group, i input feature, o output feature.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from woodbury.layers.forms import Dtype, Scales, WeightRows, add_onto, add_own_product, byte_limit, windows

ELEMENTWISE = 8  # an elementwise product out of cache costs about as much as 8 inside a matrix product


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a form with the same number of columns and positions."""

    # v (n, s, g, i) of a window of samples, made when asked for; other processes get it pickled
    features: Callable[[slice], Tensor]
    grads: Tensor  # h (n, k, s, g, o)

    @property
    def samples(self) -> int:
        return self.grads.shape[0]

    @property
    def columns(self) -> int:
        return self.grads.shape[1]

    @property
    def positions(self) -> int:
        return self.grads.shape[2]

    @property
    def rows(self) -> int:
        return self.samples * self.columns

    def read(self, window: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """v and h of a window of samples, in dtype; integers keep their type."""
        features = self.features(window)
        features = features.to(dtype) if features.is_floating_point() else features
        return features, self.grads[window].to(dtype)

    def scaled(self, outputs: Tensor, inputs: Tensor) -> Part:
        """h times outputs (g, o), v times inputs (i)."""
        return Part(partial(_times, self, inputs), self.grads * outputs)

    def cut(self, window: slice) -> Part:
        """Some of the samples."""
        return Part(partial(_within, self, window), self.grads[window])

    @staticmethod
    def join(parts: Sequence[Part]) -> Part:
        """The same samples with the positions of all parts, one after the other."""
        return Part(partial(_joined, parts), torch.cat([part.grads for part in parts], dim=2))


def _times(part: Part, inputs: Tensor, window: slice) -> Tensor:
    return part.features(window) * inputs


def _within(part: Part, samples: slice, window: slice) -> Tensor:
    return part.features(slice(samples.start + window.start, samples.start + window.stop))


def _joined(parts: Sequence[Part], window: slice) -> Tensor:
    return torch.cat([part.features(window) for part in parts], dim=1)


def own_outputs(outputs: Tensor) -> Tensor:
    """Outputs that torch made as a view of memory which is theirs alone, as if they were no view.

    A model may then change them in place (an in-place ReLU) while autograd still knows them as they are now. The
    memory must be used by nothing else: `F.linear` of a sequence and `F.instance_norm` give such views.
    """
    return torch.ops.aten._unsafe_view.default(outputs, outputs.shape) if outputs._is_view() else outputs


def spans(parts: Sequence[Part]) -> list[tuple[Part, slice]]:
    """Each part with the window of its rows."""
    ends = accumulate(part.rows for part in parts)
    return [(part, slice(end - part.rows, end)) for part, end in zip(parts, ends, strict=True)]


def row_count(parts: Sequence[Part]) -> int:
    return sum(part.rows for part in parts)


def row_window(part: Part, samples: slice) -> slice:
    return slice(samples.start * part.columns, samples.stop * part.columns)


def chunks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` numbers (1 at least) that cover an array of these sizes; first axes cut first."""
    lengths: list[int] = []
    for size in reversed(sizes):
        lengths.append(max(1, min(size, limit)))
        limit //= lengths[-1]
    return product(*map(windows, sizes, reversed(lengths)))


def summed_products(grads: Tensor, inputs: Tensor) -> Tensor:
    """sum_s h_s v_s feature by feature: h (n, k, s, f) and v (n, s, f) -> (n, k, f)."""
    step = byte_limit(None, grads.device) // grads.element_size() // max(1, grads[0].numel())
    parts = [(grads[w] * inputs[w].unsqueeze(1)).sum(2) for w in windows(grads.shape[0], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class PartRows(WeightRows):
    """Rows of z_s = W v_s + b over positions s, stored as parts: what the forms with positions have in common."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]  # of W
    max_bytes: int | None = field(default=None, kw_only=True)

    @property
    def _byte_limit(self) -> int:
        return byte_limit(self.max_bytes, self.parts[0].grads.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape in which gradients of W are written."""
        return self.shape

    @abstractmethod
    def pairs_are_cheaper(self, other: Self) -> bool:
        """Which of the two routes to K costs less."""

    @abstractmethod
    def inner(self, x: Tensor, y: Tensor, group: int) -> Tensor:
        """v_is . v_jt, (n, s, m, t), for inputs (n, s, ...) and (m, t, ...)."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """How many numbers the inputs have at one position."""

    @abstractmethod
    def write_gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        """Write sum_s h_s v_s^T of every row for a chunk of `sizes` into out (r, *chunk)."""

    @abstractmethod
    def change(self, part: Part, window: slice, vector: Mapping[str, Tensor]) -> Tensor:
        """The change of z along a vector, (n, s, g, o), for a window of samples."""

    @abstractmethod
    def add_gradient(self, total: Mapping[str, Tensor], part: Part, window: slice, grads: Tensor) -> None:
        """Add to `total` the gradient of W and b for gradients in z, (n, s, g, o), of a window of samples."""

    def sample_windows(self, part: Part, dtype: torch.dtype, more: int = 0) -> Iterator[slice]:
        """Windows of as many samples as half of `max_bytes` holds; more: numbers of each beside v, h and z."""
        columns, positions, groups, width = part.grads.shape[1:]
        # v twice (padded, unfolded), h and its copy, a change of z
        numbers = positions * (2 * self.input_size + (2 * columns + 1) * groups * width) + more
        return windows(part.samples, self._byte_limit // dtype.itemsize // 2 // max(1, numbers))

    def bias_rows(self, dtype: torch.dtype) -> Tensor:
        """The rows of b, sum_s h_s, (r, g o)."""
        return torch.cat([part.grads.sum(2, dtype=dtype).flatten(2).flatten(0, 1) for part in self.parts])

    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        dtype = self.parts[0].grads.dtype if dtype is None else dtype
        total: Tensor | None = None
        if self.weight is not None:
            by_pairs = self.pairs_are_cheaper(other)
            total = (self.gram_by_pairs if by_pairs else self.gram_by_gradients)(other, dtype)
            total = total if scales is None else total.mul_(scales[self.weight])
        if self.bias is not None:
            left = self.bias_rows(dtype)
            term = F.linear(left, left if other is self else other.bias_rows(dtype))
            total = add_onto(term if scales is None else term.mul_(scales[self.bias]), total)
        assert total is not None
        return add_onto(total, onto)

    def gram_by_pairs(self, other: Self, dtype: torch.dtype) -> Tensor:
        """The term of W in K, as the double sum over positions, in blocks of sample pairs."""
        same = other.parts is self.parts
        lefts = self._cut(self.parts, dtype)
        rights = lefts if same else self._cut(other.parts, dtype)
        gram = lefts[0].grads.new_empty(row_count(lefts), row_count(rights), dtype=dtype)
        for p, (left, rows) in enumerate(spans(lefts)):
            x, h = left.read(slice(0, left.samples), dtype)
            for q, (right, columns) in enumerate(spans(rights)):
                if same and q < p:
                    gram[rows, columns] = gram[columns, rows].t()
                    continue
                y, e = (x, h) if right is left else right.read(slice(0, right.samples), dtype)
                gram[rows, columns] = self._sum_pairs(x, y, h, e).flatten(2).flatten(0, 1)
        return gram

    def _cut(self, parts: Sequence[Part], dtype: torch.dtype) -> list[Part]:
        """Parts of fewer samples: two at once fit into half of `max_bytes`, their pairs into the other half."""
        blocks, budget = [], self._byte_limit // dtype.itemsize
        for part in parts:
            numbers = part.positions * self.input_size + part.grads[0].numel()
            pairs = part.positions**2 * (2 * part.columns**2 + 2)
            step = min(budget // 4 // numbers, math.isqrt(budget // 2 // pairs))
            blocks += [part] if step >= part.samples else [part.cut(w) for w in windows(part.samples, step)]
        return blocks

    def _sum_pairs(self, x: Tensor, y: Tensor, h: Tensor, e: Tensor) -> Tensor:
        """sum_{s,t} (v_is . v_jt) (h_is . h_jt), (n, k, m, l), by some s at a time where all do not fit."""
        total: Tensor | None = None
        samples, columns, positions = e.shape[:3]
        pairs = len(h) * samples * positions * (2 * h.shape[1] * columns + 2)  # for one s
        for s in windows(h.shape[2], self._byte_limit // h.element_size() // 2 // pairs):
            for group in range(h.shape[3]):
                # (n, k, s, m, l, t)
                outer = torch.tensordot(h[:, :, s, group], e[:, :, :, group], dims=([3], [3]))
                # cast before it is spread: of a mask that would be a copy
                products = self.inner(x[:, s], y, group).to(h.dtype)
                term = outer.mul_(products[:, None, :, :, None]).sum((2, 5))
                total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def gram_by_gradients(self, other: Self, dtype: torch.dtype) -> Tensor:
        """The term of W in K, from rows written out for one chunk of W at a time.

        A third of `max_bytes` is for the rows, a third for the copy of its right side that a matrix product may
        make (oneDNN on ARM does), a third for temporaries while rows are written.
        """
        same = other.parts is self.parts
        rows_at_once = row_count(self.parts) + (0 if same else row_count(other.parts))
        gram = self.parts[0].grads.new_zeros(row_count(self.parts), row_count(other.parts), dtype=dtype)
        for chunk in chunks(self.sizes, self._byte_limit // dtype.itemsize // 3 // rows_at_once):
            a = self.write_rows(chunk, dtype)
            if same:
                add_own_product(gram, a)
            else:
                gram.addmm_(a, other.write_rows(chunk, dtype).t())
            del a  # before the next chunk is made
        return gram

    def write_rows(self, chunk: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """The rows of a chunk of W, (r, numbers in the chunk)."""
        sizes = [window.stop - window.start for window in chunk]
        rows = self.parts[0].grads.new_empty(row_count(self.parts), *sizes, dtype=dtype)
        for part, span in spans(self.parts):
            self.write_gradients(part, chunk, rows[span])
        return rows.flatten(1)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        products = []
        for part in self.parts:
            for window in self.sample_windows(part, part.grads.dtype):
                change = self.change(part, window, vector)
                products.append(torch.einsum("nksgo,nsgo->nk", part.grads[window], change).flatten())
        return torch.cat(products)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        first = self.parts[0].grads
        total = {name: first.new_zeros(shape) for name, shape in self.shapes.items()}
        for part, span in spans(self.parts):
            c = coefficients[span].to(first.dtype).unflatten(0, (part.samples, part.columns))
            for window in self.sample_windows(part, first.dtype):
                contracted = torch.einsum("nk,nksgo->nsgo", c[window], part.grads[window])
                self.add_gradient(total, part, window, contracted)
        return total

    def within(self, max_bytes: int | None) -> Self:
        return self if max_bytes is None else replace(self, max_bytes=max_bytes)

    def new_rows(self, *sizes: int, dtype: Dtype = None) -> Tensor:
        return self.parts[0].grads.new_zeros(row_count(self.parts), *sizes, dtype=dtype)

    def head(self, row_count: int) -> Self:
        inside = [(part, span) for part, span in spans(self.parts) if span.start < row_count]
        counts = [(min(row_count, span.stop) - span.start) // part.columns for part, span in inside]
        parts = [part.cut(slice(0, count)) for (part, _), count in zip(inside, counts, strict=True)]
        return replace(self, parts=tuple(parts))

    @staticmethod
    def concatenate(forms: Sequence[Any]) -> PartRows:
        return replace(forms[0], parts=tuple(part for form in forms for part in form.parts))

    @staticmethod
    def join(forms: Sequence[Any]) -> PartRows:
        """One form with the positions of all."""
        parts = zip(*(form.parts for form in forms), strict=True)
        return replace(forms[0], parts=tuple(Part.join(own) for own in parts))
