"""Forms for layers that use the same parameters at several positions of a sample: convolutions, sequences.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from woodbury.layers.forms import (
    Dtype,
    OuterRows,
    RowForm,
    Scales,
    add_onto,
    add_own_product,
    byte_limit,
    windows,
)

ELEMENTWISE = 8  # an elementwise product out of cache costs about as much as 8 inside a matrix product


class Sliced(Protocol):
    """What can be cut to a window of samples."""

    def __getitem__(self, window: slice) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a form with the same number of columns and positions."""

    inputs: Sliced  # (n, ...)
    grads: Tensor  # h (n, k, s, g, o)
    unfold: Callable[[Tensor], Tensor]  # a block of inputs -> v (n, s, g, i)

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

    def features(self, window: slice) -> Tensor:
        """v of a window of samples, (n, s, g, i)."""
        return self.unfold(self.inputs[window])

    def read(self, window: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """v and h of a window of samples, in dtype; integers keep their type."""
        features = self.features(window)
        features = features.to(dtype) if features.is_floating_point() else features
        return features, self.grads[window].to(dtype)

    def scaled(self, outputs: Tensor, inputs: Tensor) -> Part:
        """h times outputs (g, o), v times inputs (i)."""
        return Part(self.inputs, self.grads * outputs, lambda own: self.unfold(own) * inputs)

    @staticmethod
    def join(parts: Sequence[Part]) -> Part:
        """The same samples with the positions of all parts, one after the other."""
        return Part(_Joined(parts), torch.cat([part.grads for part in parts], dim=2), unchanged)


@dataclass(frozen=True)
class _Joined:
    parts: Sequence[Part]

    def __getitem__(self, window: slice) -> Tensor:
        return torch.cat([part.features(window) for part in self.parts], dim=1)


def own_outputs(outputs: Tensor) -> Tensor:
    """Outputs that torch made as a view of memory which is theirs alone, as if they were no view.

    A model may then change them in place (an in-place ReLU) while autograd still knows them as they are now. The
    memory must be used by nothing else: `F.linear` of a sequence and `F.instance_norm` give such views.
    """
    return torch.ops.aten._unsafe_view.default(outputs, outputs.shape) if outputs._is_view() else outputs


def unchanged(inputs: Tensor) -> Tensor:
    """The inputs themselves: the `unfold` of inputs that need none."""
    return inputs


def spans(parts: Sequence[Part]) -> list[tuple[Part, slice]]:
    """Each part with the window of its rows."""
    result, row = [], 0
    for part in parts:
        result.append((part, slice(row, row + part.rows)))
        row += part.rows
    return result


def row_count(parts: Sequence[Part]) -> int:
    return sum(part.rows for part in parts)


def row_window(part: Part, samples: slice) -> slice:
    return slice(samples.start * part.columns, samples.stop * part.columns)


Inner = Callable[[Tensor, Tensor, int], Tensor]  # inputs (n, s, ...), (m, t, ...), group -> (n, s, m, t)


def gram_by_pairs(
    lefts: Sequence[Part], rights: Sequence[Part], inner: Inner, features: int, dtype: torch.dtype, max_bytes: int
) -> Tensor:
    """K (r, r') as the double sum over positions, with inner for v_is . v_jt; features: numbers in one v."""
    gram = lefts[0].grads.new_empty(row_count(lefts), row_count(rights), dtype=dtype)
    budget = max_bytes // dtype.itemsize
    same = lefts is rights
    for p, (left, rows) in enumerate(spans(lefts)):
        for q, (right, columns) in enumerate(spans(rights)):
            if same and q < p:
                gram[rows, columns] = gram[columns, rows].t()
            else:
                _fill_by_pairs(gram[rows, columns], left, right, inner, features, dtype, budget)
    return gram


def _fill_by_pairs(
    gram: Tensor, left: Part, right: Part, inner: Inner, features: int, dtype: torch.dtype, budget: int
) -> None:
    """Write the block of K for one pair of parts; budget in numbers."""
    same = left is right
    # Half the budget for the products of position pairs, half for v and h of the two blocks.
    pair = right.positions * (2 * left.columns * right.columns + 2)  # one position on the left, one sample right
    pair_count = max(1, budget // 2 // pair)
    largest = max(_numbers_per_sample(left, features), _numbers_per_sample(right, features))
    sample_limit = max(1, budget // 4 // largest)
    pairs = pair_count // left.positions
    if pairs:
        left_step = min(left.samples, sample_limit, math.isqrt(pairs))
        right_step = left_step if same else min(right.samples, sample_limit, max(1, pairs // left_step))
        position_step = left.positions
    else:
        left_step = right_step = 1
        position_step = pair_count
    for a in windows(left.samples, left_step):
        x, h = left.read(a, dtype)
        for b in windows(right.samples, right_step):
            if same and b.start < a.start:
                gram[row_window(left, a), row_window(right, b)] = gram[
                    row_window(right, b), row_window(left, a)
                ].t()
                continue
            y, e = (x, h) if same and a == b else right.read(b, dtype)
            total: Tensor | None = None
            for s in windows(left.positions, position_step):
                for group in range(h.shape[3]):
                    outer = torch.tensordot(h[:, :, s, group], e[:, :, :, group], dims=([3], [3]))
                    # cast before it is spread: of a mask that would be a copy
                    products = inner(x[:, s], y, group).to(dtype)
                    outer.mul_(products[:, None, :, :, None])  # (n, k, s, m, l, t)
                    term = outer.sum((2, 5))
                    total = term if total is None else total.add_(term)
            assert total is not None
            gram[row_window(left, a), row_window(right, b)] = total.flatten(2).flatten(0, 1)


def _numbers_per_sample(part: Part, features: int) -> int:
    """How many numbers v and h of one sample have."""
    return part.positions * features + part.grads[0].numel()


Gradients = Callable[[Part, tuple[slice, ...], Tensor], None]  # part, chunk of the parameters, where to write


def gram_by_gradients(
    lefts: Sequence[Part],
    rights: Sequence[Part],
    sizes: tuple[int, ...],
    gradients: Gradients,
    dtype: torch.dtype,
    max_bytes: int,
) -> Tensor:
    """K (r, r') from rows written out for one chunk at a time of the parameters, of shape `sizes`.

    A third of max_bytes is for the rows, a third for the copy of its right side that a matrix product may make
    (oneDNN on ARM does), a third for temporaries while rows are written.
    """
    same = lefts is rights
    rows_at_once = row_count(lefts) + (0 if same else row_count(rights))
    gram = lefts[0].grads.new_zeros(row_count(lefts), row_count(rights), dtype=dtype)
    for chunk in chunks(sizes, max_bytes // dtype.itemsize // 3 // rows_at_once):
        a = _write_rows(lefts, chunk, gradients, dtype)
        if same:
            add_own_product(gram, a)
        else:
            gram.addmm_(a, _write_rows(rights, chunk, gradients, dtype).t())
        del a  # before the next chunk is made
    return gram


def _write_rows(
    parts: Sequence[Part], chunk: tuple[slice, ...], gradients: Gradients, dtype: torch.dtype
) -> Tensor:
    sizes = [window.stop - window.start for window in chunk]
    rows = parts[0].grads.new_empty(row_count(parts), *sizes, dtype=dtype)
    for part, span in spans(parts):
        gradients(part, chunk, rows[span])
    return rows.flatten(1)


def chunks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` numbers (1 at least) that cover an array of these sizes; first axes cut first."""
    if not sizes:
        yield ()
        return
    inside = math.prod(sizes[1:])
    length = max(1, limit // max(1, inside))
    inner = limit if limit < inside else inside
    for window in windows(sizes[0], length):
        for inner_windows in chunks(sizes[1:], inner):
            yield (window, *inner_windows)


def summed_products(grads: Tensor, inputs: Tensor) -> Tensor:
    """sum_s h_s v_s feature by feature: h (n, k, s, f) and v (n, s, f) -> (n, k, f)."""
    step = byte_limit(None, grads.device) // grads.element_size() // max(1, grads[0].numel())
    parts = [(grads[w] * inputs[w].unsqueeze(1)).sum(2) for w in windows(grads.shape[0], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class PartRows:
    """Rows stored as parts: what `SharedRows` and `EmbeddingRows` have in common."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]  # of W
    max_bytes: int | None = field(default=None, kw_only=True)

    @property
    def _byte_limit(self) -> int:
        return byte_limit(self.max_bytes, self.parts[0].grads.device)

    def new_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.parts[0].grads.new_zeros(row_count(self.parts), *sizes, dtype=dtype)

    @staticmethod
    def concatenate(forms: Sequence[Any]) -> RowForm:
        joined: RowForm = replace(forms[0], parts=tuple(part for form in forms for part in form.parts))
        return joined


@dataclass
class SharedRows(PartRows):
    """Rows of z_s = W v_s + b over positions s, W perhaps in groups. See the module docstring.

    W has the shape (g o, i...), or with `swapped` (g c, o, ...) where i = (c, ...).
    """

    weight: str | None = "weight"
    bias: str | None = "bias"
    swapped: bool = False  # as ConvTranspose stores W

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(g, o, i)."""
        groups, width = self.parts[0].grads.shape[3:]
        return groups, width, math.prod(self.shape) // (groups * width)

    def restrict(self, names: Collection[str]) -> SharedRows:
        weight = self.weight if self.weight in names else None
        return replace(self, weight=weight, bias=self.bias if self.bias in names else None)

    def scaled(self, outputs: Tensor, inputs: Tensor) -> SharedRows | None:
        """U diag(s) for s = outputs inputs^T of W, (g o, i), and s = outputs of b; None for a swapped W."""
        if self.swapped:
            return None
        parts = tuple(part.scaled(outputs.view(self.sizes[:2]), inputs) for part in self.parts)
        return replace(self, parts=parts)

    def gram(self, other: object, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        assert isinstance(other, SharedRows)
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
        weight = None if self.weight is None else self._from_weight(vector[self.weight])
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
            vector[self.weight] = self._to_weight(weight)
        if self.bias is not None:
            vector[self.bias] = bias.flatten()
        return vector

    def dense(self) -> dict[str, Tensor]:
        rows = {}
        if self.weight is not None:
            dtype = self.parts[0].grads.dtype
            whole = tuple(slice(0, size) for size in self.sizes)
            written = _write_rows(self.parts, whole, self._gradients, dtype)
            rows[self.weight] = self._to_weight(written.unflatten(1, self.sizes))
        if self.bias is not None:
            rows[self.bias] = self._bias_rows(self.parts[0].grads.dtype)
        return rows

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        if name == self.bias:
            return self._bias_rows(dtype)[:, window]
        groups, width, features = self.sizes
        if self.swapped:  # the first axis is (g, c), and i = (c, *kernel)
            own, kernel = self.shape[0] // groups, math.prod(self.shape[2:])
            boxes = [
                (group, slice(0, width), slice(start * kernel, stop * kernel))
                for group, start, stop in _within_groups(window, own)
            ]
        else:  # (g, o)
            boxes = [
                (group, slice(start, stop), slice(0, features))
                for group, start, stop in _within_groups(window, width)
            ]
        written = []
        for group, outputs, inputs in boxes:
            chunk = (slice(group, group + 1), outputs, inputs)
            rows = _write_rows(self.parts, chunk, self._gradients, dtype)
            rows = rows.unflatten(1, (outputs.stop - outputs.start, inputs.stop - inputs.start))
            if self.swapped:
                rows = rows.unflatten(2, (-1, kernel)).transpose(1, 2)
            written.append(rows)
        joined = written[0] if len(written) == 1 else torch.cat(written, dim=1)
        return joined.reshape(len(joined), window.stop - window.start, *self.shape[1:])

    def _to_weight(self, values: Tensor) -> Tensor:
        """(..., g, o, i) -> (..., *shape)."""
        lead = values.shape[:-3]
        if self.swapped:
            groups, width, _ = self.sizes
            values = values.reshape(*lead, groups, width, self.shape[0] // groups, *self.shape[2:])
            values = values.transpose(len(lead) + 1, len(lead) + 2)
        return values.reshape(*lead, *self.shape)

    def _from_weight(self, weight: Tensor) -> Tensor:
        """(*shape) -> (g, o, i)."""
        groups, width, _ = self.sizes
        if self.swapped:
            weight = weight.reshape(groups, -1, width, *self.shape[2:]).transpose(1, 2)
        return weight.reshape(self.sizes)

    @staticmethod
    def join(forms: Sequence[SharedRows]) -> SharedRows:
        """The sum of the rows of several forms: one form with the positions of all."""
        parts = zip(*(form.parts for form in forms), strict=True)
        return replace(forms[0], parts=tuple(Part.join(own) for own in parts))


def as_shared(form: OuterRows) -> SharedRows:
    """Rows h v^T, as a rule returns them, in the form of a layer with one position."""
    ((n, k),) = form.layout.pieces
    part = Part(form.inputs[:, None, None], form.grads.unflatten(0, (n, k))[:, :, None, None], unchanged)
    shape = (form.grads.shape[1], form.inputs.shape[1])
    return SharedRows((part,), shape, weight=form.weight, bias=form.bias)


def _within_groups(window: slice, size: int) -> Iterator[tuple[int, int, int]]:
    """A window of the flattened axes (g, size), as (group, start, stop) within each group."""
    for group in range(window.start // size, (window.stop - 1) // size + 1):
        first = group * size
        yield group, max(window.start - first, 0), min(window.stop - first, size)


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
