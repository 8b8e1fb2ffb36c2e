"""Forms for layers that use the same parameters at several positions of a sample: convolutions, sequences.

The row of a sample is the SUM over its positions s. For z_s = W v_s + b with back-propagated columns h,

    row of W = sum_s h_s v_s^T,  row of b = sum_s h_s,  K_ij = sum_{s,t} (v_is . v_jt + 1) (h_is . h_jt)

and an embedding is the same with v_s one-hot. K has two exact routes, of which a form takes the cheaper:

    pairs       the double sum as it stands, in blocks of sample pairs:  n^2 s^2 (i + o) work
    gradients   G_i = sum_s h_is v_is^T written out for a block of the layer's parameters, K += G G^T:
                n s i o + n^2 i o work

The product of the two summed Grams, (sum v . sum v')(sum h . sum h'), is something else. Letters: n sample,
k column, r = n k row, s and t position, g group, i input feature, o output feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from woodbury._scalar import Scalar

MAX_BYTES = 2**28  # temporaries of a form, beside its inputs, its columns and K; one sample at a time at least
_ELEMENTWISE = 8  # a product of two numbers out of cache costs about as much as so many inside a matrix product


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a form with the same number of columns and positions."""

    inputs: Tensor  # (n, ...)
    grads: Tensor  # h (n, k, s, g, o)
    unfold: Callable[[Tensor], Tensor]  # a block of inputs -> v (n, s, g, i); or indices (n, s)

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
        """v and h of some samples; integers stay what they are."""
        inputs = self.unfold(self.inputs[window])
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return inputs, self.grads[window].to(dtype)


def _windows(count: int, length: int) -> Iterator[slice]:
    """0..count in pieces of `length`, at least 1."""
    length = max(1, length)
    return (slice(start, min(start + length, count)) for start in range(0, count, length))


def _spans(parts: Sequence[Part]) -> list[tuple[Part, slice]]:
    """Each part with its rows."""
    spans, row = [], 0
    for part in parts:
        spans.append((part, slice(row, row + part.rows)))
        row += part.rows
    return spans


def _row_count(parts: Sequence[Part]) -> int:
    return sum(part.rows for part in parts)


def _row_window(part: Part, samples: slice) -> slice:
    return slice(samples.start * part.columns, samples.stop * part.columns)


Inner = Callable[[Tensor, Tensor, int], Tensor]  # inputs (n, s, ...), (m, t, ...), group -> (n, s, m, t)


def gram_by_pairs(
    lefts: Sequence[Part], rights: Sequence[Part], inner: Inner, features: int, dtype: torch.dtype, max_bytes: int
) -> Tensor:
    """K (r, r') as the double sum over positions, with inner(v_is, v_jt) given; features: numbers in one v."""
    gram = lefts[0].grads.new_empty(_row_count(lefts), _row_count(rights), dtype=dtype)
    budget = max_bytes // dtype.itemsize
    same = lefts is rights
    for p, (left, rows) in enumerate(_spans(lefts)):
        for q, (right, columns) in enumerate(_spans(rights)):
            if same and q < p:
                gram[rows, columns] = gram[columns, rows].t()
            else:
                _fill_by_pairs(gram[rows, columns], left, right, inner, features, dtype, budget)
    return gram


def _fill_by_pairs(
    gram: Tensor, left: Part, right: Part, inner: Inner, features: int, dtype: torch.dtype, budget: int
) -> None:
    """One pair of parts; budget in numbers."""
    same = left is right
    # Half the budget for the products of position pairs, the rest for v and h of the two blocks.
    pair = right.positions * (2 * left.columns * right.columns + 2)  # one position on the left, one sample right
    count = max(1, budget // 2 // pair)
    held = max(1, budget // 4 // max(_held(left, features), _held(right, features)))
    pairs = count // left.positions
    if pairs:
        left_step = min(left.samples, held, math.isqrt(pairs))
        right_step = left_step if same else min(right.samples, held, max(1, pairs // left_step))
        position_step = left.positions
    else:
        left_step = right_step = 1
        position_step = count
    for a in _windows(left.samples, left_step):
        x, h = left.read(a, dtype)
        for b in _windows(right.samples, right_step):
            if same and b.start < a.start:
                gram[_row_window(left, a), _row_window(right, b)] = gram[
                    _row_window(right, b), _row_window(left, a)
                ].t()
                continue
            y, e = (x, h) if same and a == b else right.read(b, dtype)
            total: Tensor | None = None
            for s in _windows(left.positions, position_step):
                for group in range(h.shape[3]):
                    outer = torch.tensordot(h[:, :, s, group], e[:, :, :, group], dims=([3], [3]))
                    factor = inner(x[:, s], y, group).to(
                        dtype
                    )  # before it is spread: of a mask that would be a copy
                    outer.mul_(factor[:, None, :, :, None])  # (n, k, s, m, l, t)
                    term = outer.sum((2, 5))
                    total = term if total is None else total.add_(term)
            assert total is not None
            gram[_row_window(left, a), _row_window(right, b)] = total.flatten(2).flatten(0, 1)


def _held(part: Part, features: int) -> int:
    """Numbers of v and h of one sample."""
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
    """K (r, r') from rows written out for one chunk of the parameters, shaped `sizes`, at a time."""
    same = lefts is rights
    count = _row_count(lefts) + (0 if same else _row_count(rights))
    gram = lefts[0].grads.new_zeros(_row_count(lefts), _row_count(rights), dtype=dtype)
    for chunk in chunks(sizes, max_bytes // dtype.itemsize // 2 // count):
        a = _written_out(lefts, chunk, gradients, dtype)
        b = a if same else _written_out(rights, chunk, gradients, dtype)
        gram.addmm_(a, b.t())
        del a, b  # before the next chunk is made
    return gram


def _written_out(
    parts: Sequence[Part], chunk: tuple[slice, ...], gradients: Gradients, dtype: torch.dtype
) -> Tensor:
    sizes = [window.stop - window.start for window in chunk]
    rows = parts[0].grads.new_empty(_row_count(parts), *sizes, dtype=dtype)
    for part, span in _spans(parts):
        gradients(part, chunk, rows[span])
    return rows.flatten(1)


def chunks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """An array of these sizes cut into boxes of at most `limit` numbers (1 at least), last axes whole first."""
    if not sizes:
        yield ()
        return
    inside = math.prod(sizes[1:])
    length = max(1, limit // max(1, inside))
    inner = limit if limit < inside else inside
    for window in _windows(sizes[0], length):
        for rest in chunks(sizes[1:], inner):
            yield (window, *rest)


def summed_products(grads: Tensor, inputs: Tensor, max_bytes: int | None = None) -> Tensor:
    """sum_s h_s v_s feature by feature: h (n, k, s, f) and v (n, s, f) -> (n, k, f)."""
    limit = MAX_BYTES if max_bytes is None else max_bytes
    step = limit // grads.element_size() // max(1, grads[0].numel())
    parts = [(grads[w] * inputs[w].unsqueeze(1)).sum(2) for w in _windows(grads.shape[0], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class SharedRows:
    """Rows of z_s = W v_s + b over positions s, W perhaps in groups. See the module docstring."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]  # of W: (g o, i...), or with swapped (g c, o, ...) where i = (c, ...)
    weight: str | None = "weight"
    bias: str | None = "bias"
    swapped: bool = False  # as ConvTranspose stores W
    max_bytes: int | None = None  # None: MAX_BYTES

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(g, o, i)."""
        groups, width = self.parts[0].grads.shape[3:]
        return groups, width, math.prod(self.shape) // (groups * width)

    @property
    def _limit(self) -> int:
        return MAX_BYTES if self.max_bytes is None else self.max_bytes

    def restrict(self, names: Collection[str]) -> SharedRows:
        weight = self.weight if self.weight in names else None
        return replace(self, weight=weight, bias=self.bias if self.bias in names else None)

    def gram(self, other: object, scales: Mapping[str, Scalar] | None, dtype: torch.dtype | None) -> Tensor:
        assert isinstance(other, SharedRows)
        dtype = self.parts[0].grads.dtype if dtype is None else dtype
        gram = None
        if self.weight is not None:
            by_pairs = pairs_are_cheaper(self.parts, other.parts, self.sizes)
            gram = (self.gram_by_pairs if by_pairs else self.gram_by_gradients)(other, dtype)
            if scales is not None:
                gram = gram.mul_(scales[self.weight])
        if self.bias is not None:
            left = self._summed(dtype)
            term = F.linear(left, left if other is self else other._summed(dtype))
            if scales is not None:
                term = term.mul_(scales[self.bias])
            gram = term if gram is None else gram.add_(term)
        assert gram is not None
        return gram

    def _summed(self, dtype: torch.dtype) -> Tensor:
        """sum_s h_s, (r, g o): the rows of b."""
        return torch.cat([part.grads.sum(2, dtype=dtype).flatten(2).flatten(0, 1) for part in self.parts])

    def gram_by_pairs(self, other: SharedRows, dtype: torch.dtype) -> Tensor:
        """The term of W, from pairs of positions."""
        groups, _, width = self.sizes

        def inner(x: Tensor, y: Tensor, group: int) -> Tensor:
            return torch.tensordot(x[:, :, group], y[:, :, group], dims=([2], [2]))

        return gram_by_pairs(self.parts, other.parts, inner, groups * width, dtype, self._limit)

    def gram_by_gradients(self, other: SharedRows, dtype: torch.dtype) -> Tensor:
        """The term of W, from per-sample gradients."""
        return gram_by_gradients(self.parts, other.parts, self.sizes, self._gradients, dtype, self._limit)

    def _gradients(self, part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
        """Write G = sum_s h_s v_s^T for some groups, outputs and inputs into out (r, g, o, i)."""
        groups, outputs, inputs = chunk
        for window in self._sample_windows(part, out.dtype):
            v, h = part.read(window, out.dtype)
            product = torch.einsum("nksgo,nsgi->nkgoi", h[..., groups, outputs], v[..., groups, inputs])
            out[_row_window(part, window)] = product.flatten(0, 1)

    def _sample_windows(self, part: Part, dtype: torch.dtype) -> Iterator[slice]:
        groups, width, features = self.sizes
        columns = part.columns
        # v twice (padded, unfolded), h and its copy, a change of z, a block of G
        numbers = part.positions * groups * (2 * features + (2 * columns + 1) * width)
        numbers += columns * min(groups * width * features, self._limit // dtype.itemsize // 8)
        return _windows(part.samples, self._limit // dtype.itemsize // 2 // max(1, numbers))

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
        for part, span in _spans(self.parts):
            c = coefficients[span].to(first.dtype).unflatten(0, (part.samples, part.columns))
            for window in self._sample_windows(part, first.dtype):
                contracted = torch.einsum("nk,nksgo->nsgo", c[window], part.grads[window])
                if self.weight is not None:
                    inputs = part.unfold(part.inputs[window]).to(first.dtype)
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
            written = _written_out(self.parts, whole, self._gradients, dtype)
            rows[self.weight] = self._to_weight(written.unflatten(1, self.sizes))
        if self.bias is not None:
            rows[self.bias] = self._summed(self.parts[0].grads.dtype)
        return rows

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
    def concatenate(forms: Sequence[SharedRows]) -> SharedRows:
        return replace(forms[0], parts=tuple(part for form in forms for part in form.parts))


def pairs_are_cheaper(lefts: Sequence[Part], rights: Sequence[Part], sizes: tuple[int, int, int]) -> bool:
    """Whether pairs of positions cost less than per-sample gradients, counted in multiplications."""
    groups, width, features = sizes
    pairs = groups * sum(
        a.samples * a.positions * b.samples * b.positions
        * (features + a.columns * b.columns * (width + _ELEMENTWISE))
        for a in lefts
        for b in rights
    )  # fmt: skip
    written = sum(part.rows * part.positions for part in (lefts if lefts is rights else (*lefts, *rights)))
    return pairs < groups * width * features * (written + _row_count(lefts) * _row_count(rights))


@dataclass
class EmbeddingRows:
    """Rows of z_s = W[x_s] for indices x: K_ij = sum over equal x_is = x_jt of h_is . h_jt.

    No one-hot row is formed: by gradients, only the indices at hand are counted and only a block is written out.
    """

    parts: tuple[Part, ...]  # inputs (n, s) indices, grads (n, k, s, 1, o)
    shape: tuple[int, int]  # of W: (indices, o)
    padding: int | None = None  # an index that contributes nothing
    weight: str = "weight"
    max_bytes: int | None = None  # None: MAX_BYTES

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,)

    @property
    def _limit(self) -> int:
        return MAX_BYTES if self.max_bytes is None else self.max_bytes

    def restrict(self, names: Collection[str]) -> EmbeddingRows:
        assert self.weight in names
        return self

    def gram(self, other: object, scales: Mapping[str, Scalar] | None, dtype: torch.dtype | None) -> Tensor:
        assert isinstance(other, EmbeddingRows)
        dtype = self.parts[0].grads.dtype if dtype is None else dtype
        by_pairs = indices_are_cheaper_by_pairs(self.parts, other.parts, self.shape)
        gram = (self.gram_by_pairs if by_pairs else self.gram_by_gradients)(other, dtype)
        return gram if scales is None else gram.mul_(scales[self.weight])

    def gram_by_pairs(self, other: EmbeddingRows, dtype: torch.dtype) -> Tensor:
        """K from pairs of positions."""

        def inner(x: Tensor, y: Tensor, group: int) -> Tensor:
            equal = x[:, :, None, None] == y
            return equal if self.padding is None else equal & (y != self.padding)

        return gram_by_pairs(self.parts, other.parts, inner, 1, dtype, self._limit)

    def gram_by_gradients(self, other: EmbeddingRows, dtype: torch.dtype) -> Tensor:
        """K from the gradients in the rows of W at hand."""
        parts = self.parts if other.parts is self.parts else (*self.parts, *other.parts)
        count, ranked = _ranks(parts, self.shape[0], self.padding)
        own = ranked[: len(self.parts)]
        others = own if other.parts is self.parts else ranked[len(self.parts) :]

        def gradients(part: Part, chunk: tuple[slice, ...], out: Tensor) -> None:
            """Write sum_s h_s [x_s = w] for some indices w and features into out (r, w, o)."""
            indices, features = chunk
            width = indices.stop - indices.start
            each = part.columns * (width + 1 + 3 * part.positions) * out.shape[-1]
            for window in _windows(part.samples, self._limit // dtype.itemsize // 8 // max(1, each)):
                x, h = part.read(window, dtype)
                x = x - indices.start
                x = torch.where((x >= 0) & (x < width), x, width)  # what lies outside goes to a last place
                h = h[:, :, :, 0, features]
                sums = h.new_zeros(*h.shape[:2], width + 1, h.shape[3])
                sums.scatter_add_(2, x[:, None, :, None].expand(h.shape), h)
                out[_row_window(part, window)].unflatten(0, h.shape[:2]).copy_(sums[:, :, :width])

        sizes = (count, self.shape[1])
        return gram_by_gradients(own, others, sizes, gradients, dtype, self._limit)

    def _blocks(self, part: Part) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Windows of samples, their indices (n, s), and h (n, k, s, o) silenced at the padding index."""
        each = 3 * part.grads.element_size() * max(1, part.grads[0].numel())
        for window in _windows(part.samples, self._limit // each):
            indices, grads = part.inputs[window], part.grads[window, :, :, 0]
            if self.padding is not None:
                grads = grads * (indices != self.padding)[:, None, :, None]
            yield window, indices, grads

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        weight = vector[self.weight]
        products = [
            torch.einsum("nkso,nso->nk", h, weight[x]).flatten()
            for part in self.parts
            for _, x, h in self._blocks(part)
        ]
        return torch.cat(products)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        first = self.parts[0].grads
        weight = first.new_zeros(self.shape)
        for part, span in _spans(self.parts):
            c = coefficients[span].to(first.dtype).unflatten(0, (part.samples, part.columns))
            for window, x, h in self._blocks(part):
                contracted = torch.einsum("nk,nkso->nso", c[window], h)
                weight.index_add_(0, x.flatten(), contracted.flatten(0, 1))
        return {self.weight: weight}

    def dense(self) -> dict[str, Tensor]:
        rows = []
        for part in self.parts:
            for _, x, h in self._blocks(part):
                row = h.new_zeros(*h.shape[:2], *self.shape)
                rows.append(row.scatter_add_(2, x[:, None, :, None].expand(h.shape), h).flatten(0, 1))
        return {self.weight: torch.cat(rows)}

    @staticmethod
    def concatenate(forms: Sequence[EmbeddingRows]) -> EmbeddingRows:
        return replace(forms[0], parts=tuple(part for form in forms for part in form.parts))


def indices_are_cheaper_by_pairs(lefts: Sequence[Part], rights: Sequence[Part], shape: tuple[int, int]) -> bool:
    """Whether pairs of positions cost less than the gradients in the rows of W at hand."""
    pairs = sum(
        a.rows * a.positions * b.rows * b.positions * (shape[1] + _ELEMENTWISE) for a in lefts for b in rights
    )
    positions = sum(part.samples * part.positions for part in (lefts if lefts is rights else (*lefts, *rights)))
    return pairs < _row_count(lefts) * _row_count(rights) * min(shape[0], positions) * shape[1]


def _ranks(parts: Sequence[Part], indices: int, padding: int | None) -> tuple[int, tuple[Part, ...]]:
    """The parts with indices renumbered 0, 1, ... over those at hand, padding as -1; and how many there are."""
    flat = torch.cat([part.inputs.flatten() for part in parts])
    ordered, order = flat.sort()
    steps = torch.zeros_like(ordered)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = torch.empty_like(flat).index_copy_(0, order, steps.cumsum(0))
    # On a device a bound must do: the number itself would have to be waited for.
    count = int(ranks.max()) + 1 if flat.device.type == "cpu" else min(indices, flat.numel())
    if padding is not None:
        ranks = torch.where(flat == padding, -1, ranks)
    split = ranks.split([part.inputs.numel() for part in parts])
    renumbered = [
        replace(part, inputs=own.reshape(part.inputs.shape)) for part, own in zip(parts, split, strict=True)
    ]
    return count, tuple(renumbered)
