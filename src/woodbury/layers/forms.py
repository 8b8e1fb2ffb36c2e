"""Forms: the rows of one layer, stored as cheaply as their structure allows.

A row is the derivative of one scalar (a factor column at one sample) in the layer's parameters. Rows are
sample-major: row = i k + a for column a of sample i. The letters: n sample, k column, r = n k row,
i input feature, o output feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from woodbury.device.constants import LIMIT, constant_tensor, ones
from woodbury.device.scalars import Scale

Scales = Mapping[str, Scale] | None  # one number per parameter; None for ones
Dtype = torch.dtype | None  # to accumulate in; None for the type of the rows


_LEAST_ELSEWHERE = 2**30  # small pieces leave a GPU idle


def byte_limit(max_bytes: int | None, device: torch.device) -> int:
    """The bytes that temporaries may take beside rows and K: max_bytes, or a default for the device."""
    if max_bytes is not None:
        return max_bytes
    if device.type == "cuda":
        return max(_LEAST_ELSEWHERE, torch.cuda.get_device_properties(device).total_memory // 16)
    return 2**28 if device.type == "cpu" else _LEAST_ELSEWHERE


def windows(size: int, length: int) -> Iterator[slice]:
    """0..size in pieces of `length`, at least 1."""
    length = max(1, length)
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


@dataclass(frozen=True)
class Layout:
    """Which sample a row belongs to: consecutive pieces of n samples with k rows each."""

    pieces: tuple[tuple[int, int], ...]

    @cached_property
    def samples(self) -> int:
        return sum(n for n, _ in self.pieces)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every sample has exactly one row."""
        return all(k == 1 for _, k in self.pieces)

    def merged(self) -> Layout:
        """The same rows with neighbours of as many rows per sample as one piece."""
        pieces: list[tuple[int, int]] = []
        for n, k in self.pieces:
            if pieces and pieces[-1][1] == k:
                n += pieces.pop()[0]
            pieces.append((n, k))
        return layout_of(tuple(pieces))

    def offset(self, piece: int) -> int:
        """Index of the first sample of a piece."""
        return sum(n for n, _ in self.pieces[:piece])

    def sample_of_row(self, device: torch.device) -> Tensor:
        """(r,) index of the sample each row belongs to."""
        return _sample_of_row(self.pieces, device)

    def of_rows(self, samples: Tensor) -> Tensor:
        """(n, ...) -> (r, ...): the entry of the sample each row belongs to."""
        return samples if self.is_plain else samples.index_select(0, self.sample_of_row(samples.device))

    def multiply_(self, rows: Tensor, samples: Tensor) -> Tensor:
        """Multiply each of the rows (r, o) in place by the entry of its sample in samples (n, o)."""
        row = sample = 0
        for n, k in self.pieces:
            own, multipliers = rows[row : row + n * k], samples[sample : sample + n]
            if k == 1:
                own.mul_(multipliers)
            else:
                own.view(n, k, -1).mul_(multipliers.unsqueeze(1))
            row, sample = row + n * k, sample + n
        return rows

    def contract(self, coefficients: Tensor, rows: Tensor) -> Tensor:
        """sum over the rows of each sample of c h, (n, o), for c (r,) or (r, 1) and rows h (r, o)."""
        if self.is_plain:
            return (coefficients if coefficients.dim() == 2 else coefficients.unsqueeze(1)) * rows
        parts, row = [], 0
        for n, k in self.pieces:
            c, h = coefficients[row : row + n * k], rows[row : row + n * k]
            if k == 1:
                parts.append(c.unsqueeze(1) * h)
            else:
                parts.append(torch.bmm(c.view(n, 1, k), h.view(n, k, -1)).squeeze(1))
            row += n * k
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def spread(self, samples: Tensor, other: Layout) -> Tensor:
        """(n, n') -> (r, r'): the entry of the two samples that rows r and r' belong to."""
        if not other.is_plain:  # columns first, while there are few rows
            samples = samples.index_select(1, other.sample_of_row(samples.device))
        return self.of_rows(samples)


@lru_cache(LIMIT)
def layout_of(pieces: tuple[tuple[int, int], ...]) -> Layout:
    """The layout of these pieces, cached."""
    return Layout(pieces)


@constant_tensor  # a few kilobytes per batch size
def _sample_of_row(pieces: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    columns = torch.tensor([k for n, k in pieces for _ in range(n)])
    return torch.repeat_interleave(columns).to(device)


class RowForm(Protocol):
    """What every form offers. Vectors are dictionaries from the layer's own parameter names to tensors."""

    @property
    def parameters(self) -> tuple[str, ...]: ...

    def restrict(self, names: Collection[str]) -> RowForm:
        """The same rows with every parameter outside `names` left out."""

    def gram(self, other: RowForm, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        """U diag(scales) U'^T, (r, r'), added in place to `onto` if that is not None; one scale per parameter."""

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        """U v, (r,)."""

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        """U^T c for coefficients (r,)."""

    def dense(self) -> dict[str, Tensor]:
        """The rows themselves: name -> (r, *parameter shape)."""

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        """The rows of parameter[window], written out: (r, length, *shape[1:]) for a parameter of this shape."""

    def new_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros (r, *sizes), of the type of the rows or of dtype."""

    @staticmethod
    def concatenate(forms: Sequence[Any]) -> RowForm:
        """The rows of several forms of this class and the same parameters, one after the other."""


@dataclass
class OuterRows:
    """Rows of z = W v + b: row r is the outer product h_r v_n^T for W, and h_r for b.

    Their Gram matrix needs no row written out:  K[r, r'] = (v_n . v_n' + 1) (h_r . h_r')   (paper, appendix A.6).
    """

    inputs: Tensor  # v (n, i)
    grads: Tensor  # h (r, o)
    layout: Layout
    weight: str | None = "weight"
    bias: str | None = "bias"
    affine: bool = False  # whether the module computes W v + b of its input and nothing else
    inner: Tensor | None = field(default=None, repr=False)  # v . v' + 1 (n, n), for the trial pass

    @property
    def parameters(self) -> tuple[str, ...]:
        if self.weight is None or self.bias is None:
            return tuple(name for name in (self.weight, self.bias) if name is not None)
        return self.weight, self.bias

    def restrict(self, names: Collection[str]) -> OuterRows:
        if all(name in names for name in self.parameters):
            return self
        weight = self.weight if self.weight in names else None
        bias = self.bias if self.bias in names else None
        return OuterRows(self.inputs, self.grads, self.layout, weight, bias, self.affine)

    def gram(self, other: RowForm, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        assert isinstance(other, OuterRows)
        inner = self.input_gram(other.inputs, scales, dtype)
        if other is self and scales is None:
            self.inner = inner
        outer, spread = self.outer_gram(other, dtype), self.layout.spread(inner, other.layout)
        return outer.mul_(spread) if onto is None else onto.addcmul_(outer, spread)

    def outer_gram(self, other: OuterRows, dtype: Dtype) -> Tensor:
        """h . h', (r, r')."""
        return _product(self.grads, other.grads, dtype)

    def input_gram(self, inputs: Tensor, scales: Scales = None, dtype: Dtype = None) -> Tensor:
        """s_W v . v' + s_b, (n, n'), without the term of an absent or frozen parameter."""
        if self.weight is not None and scales is None:
            return _shifted_product(self.inputs, inputs, self.bias is not None, dtype)
        weight = 0.0 if self.weight is None else 1.0 if scales is None else scales[self.weight]
        bias = 0.0 if self.bias is None else 1.0 if scales is None else scales[self.bias]
        return _product(self.inputs, inputs, dtype) * weight + bias

    def scaled(self, outputs: Tensor, inputs: Tensor) -> OuterRows:
        """U diag(s) for s = outputs inputs^T (o, i) of W and s = outputs of b: W and b in other units."""
        return replace(self, inputs=self.inputs * inputs, grads=self.grads * outputs, affine=False, inner=None)

    def head(self, row_count: int) -> OuterRows:
        """The first rows, of whole samples."""
        first = self.layout.pieces[0]
        samples = row_count if self.layout.is_plain else first[0]
        layout = Layout(((row_count, 1),) if self.layout.is_plain else (first,))
        return replace(self, inputs=self.inputs[:samples], grads=self.grads[:row_count], layout=layout, inner=None)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        change = self.grads.new_zeros(self.layout.samples, self.grads.shape[1])  # of z, (n, o)
        if self.weight is not None:
            change = self.inputs @ vector[self.weight].T
        if self.bias is not None:
            change = change + vector[self.bias]
        return (self.grads * self.layout.of_rows(change)).sum(1)

    def weighted_sum(self, coefficients: Tensor) -> OuterSum:
        """U^T c for coefficients (r,), factored."""
        if coefficients.dtype != self.grads.dtype:
            coefficients = coefficients.to(self.grads.dtype)
        contracted = self.layout.contract(coefficients, self.grads)
        return OuterSum(self.inputs, contracted, self.layout, self.weight, self.bias, self.inner)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        return self.weighted_sum(coefficients).dense()

    def dense(self) -> dict[str, Tensor]:
        inputs = self.layout.of_rows(self.inputs)
        rows = {}
        if self.weight is not None:
            rows[self.weight] = self.grads.unsqueeze(2) * inputs.unsqueeze(1)
        if self.bias is not None:
            rows[self.bias] = self.grads
        return rows

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        grads = self.grads[:, window].to(dtype)
        if name == self.bias:
            return grads
        inputs = self.layout.of_rows(self.inputs).to(dtype)
        return grads.unsqueeze(2) * inputs.unsqueeze(1)

    def new_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.grads.new_zeros(len(self.grads), *sizes, dtype=dtype)

    @staticmethod
    def concatenate(forms: Sequence[OuterRows]) -> OuterRows:
        first = forms[0]
        if len(forms) == 1:
            return first
        layout = Layout(tuple(piece for form in forms for piece in form.layout.pieces))
        inputs = torch.cat([form.inputs for form in forms])
        grads = torch.cat([form.grads for form in forms])
        return OuterRows(inputs, grads, layout, first.weight, first.bias, first.affine)


@dataclass
class OuterSum:
    """U^T c of one layer whose rows are outer products, factored: Hbar^T V for W, the sum of Hbar for b."""

    inputs: Tensor  # V (n, i)
    contracted: Tensor  # Hbar (n, o): the sum over the columns of each sample of c h
    layout: Layout
    weight: str | None
    bias: str | None
    inner: Tensor | None  # V V^T + 1 (n, n), if it is known

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple([name for name in (self.weight, self.bias) if name is not None])

    def dense(self) -> dict[str, Tensor]:
        """The sum itself: name -> tensor of the parameter's shape."""
        vector = {}
        if self.weight is not None:
            vector[self.weight] = self.contracted.t() @ self.inputs
        if self.bias is not None:
            vector[self.bias] = self.contracted.sum(0)
        return vector

    def outputs_after(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """z(v) - (v V^T + 1) Hbar, in place of outputs z(v): the outputs of the layer at theta - U^T c.

        Exact for a layer that computes W v + b and nothing else.
        """
        if self.weight is None:
            return outputs - self.contracted.sum(0)
        inner = _shifted_product(inputs, self.inputs, self.bias is not None)
        return outputs.addmm_(inner, self.contracted, alpha=-1)


@dataclass
class ExplicitRows:
    """Rows written out, name -> (r, *parameter shape): for small parameters and layers of users."""

    rows: dict[str, Tensor]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.rows)

    def head(self, row_count: int) -> ExplicitRows:
        """The first rows."""
        return ExplicitRows({name: rows[:row_count] for name, rows in self.rows.items()})

    def restrict(self, names: Collection[str]) -> ExplicitRows:
        return ExplicitRows({name: rows for name, rows in self.rows.items() if name in names})

    def gram(self, other: RowForm, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        assert isinstance(other, ExplicitRows)
        products = [
            _product(_flat(rows), _flat(other.rows[name]), dtype) * (1.0 if scales is None else scales[name])
            for name, rows in self.rows.items()
        ]
        return add_onto(torch.stack(products).sum(0), onto)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        products = [_flat(rows) @ vector[name].flatten() for name, rows in self.rows.items()]
        return torch.stack(products).sum(0)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.tensordot(coefficients.to(rows.dtype), rows, dims=1) for name, rows in self.rows.items()
        }

    def dense(self) -> dict[str, Tensor]:
        return dict(self.rows)

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        rows = self.rows[name]
        return (rows.unsqueeze(1) if rows.dim() == 1 else rows)[:, window].to(dtype)

    def new_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        rows = next(iter(self.rows.values()))
        return rows.new_zeros(len(rows), *sizes, dtype=dtype)

    @staticmethod
    def concatenate(forms: Sequence[ExplicitRows]) -> ExplicitRows:
        return ExplicitRows({name: torch.cat([form.rows[name] for form in forms]) for name in forms[0].rows})


def concatenate_forms(pieces: Sequence[Mapping[str, RowForm]]) -> dict[str, RowForm]:
    """The forms of several pieces of a batch, one piece after the other, layer by layer."""
    forms: dict[str, RowForm] = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece):
        own = [piece[name] for piece in pieces if name in piece]
        # a rule may treat pieces differently, and a model may skip layers at random
        if len(own) < len(pieces) or len({(type(form), form.parameters) for form in own}) > 1:
            own = _write_out(pieces, name)
        forms[name] = own[0].concatenate(own)
    return forms


def _write_out(pieces: Sequence[Mapping[str, RowForm]], name: str) -> list[RowForm]:
    """The rows of a layer in every piece as `ExplicitRows`: zeros where a piece did not use a parameter."""
    written = [piece[name].dense() if name in piece else {} for piece in pieces]
    examples = {own: rows for piece in written for own, rows in piece.items()}
    result: list[RowForm] = []
    for piece, rows in zip(pieces, written, strict=True):
        height = len(next(iter(piece.values())).new_rows(0))
        zeros = {own: like.new_zeros(height, *like.shape[1:]) for own, like in examples.items() if own not in rows}
        result.append(ExplicitRows({**rows, **zeros}))
    return result


def _flat(rows: Tensor) -> Tensor:
    """(r, *shape) -> (r, p), also for a parameter that is a single number."""
    return rows.reshape(rows.shape[0], -1)


def add_onto(gram: Tensor, onto: Tensor | None) -> Tensor:
    """onto + gram, in place; gram itself where onto is None."""
    return gram if onto is None else onto.add_(gram)


def _shifted_product(a: Tensor, b: Tensor, bias: bool, dtype: torch.dtype | None = None) -> Tensor:
    """a b^T + 1, (n, n'), or a b^T for a layer without bias; accumulated in `dtype` if one is given."""
    if dtype is not None and dtype != a.dtype:
        a, b = (a.to(dtype),) * 2 if a is b else (a.to(dtype), b.to(dtype))
    return linear(a, b, ones(b.shape[0], b.dtype, b.device) if bias else None)


_FUSED = 2**17  # outputs from which a GPU is faster with b added within the product


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """v W^T + b."""
    if bias is not None and inputs.is_cuda and inputs.shape[0] * weight.shape[0] < _FUSED:
        return F.linear(inputs, weight).add_(bias)
    return F.linear(inputs, weight, bias)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """a b^T, accumulated in `dtype` if that is not None."""
    if a is b:
        return own_product(a, dtype)
    if dtype is not None and dtype != a.dtype:
        a, b = a.to(dtype), b.to(dtype)
    return F.linear(a, b)


# from so many rows and columns on it pays to leave out half of a symmetric product, in so many strips
_HALVED_ON_CPU, _HALVED_ELSEWHERE = (192, 4), (8192, 16)


def own_product(a: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """a a^T, accumulated in `dtype` if that is not None.

    Large ones in strips of rows, each up to the diagonal: 5/8 of the work in four of them.
    """
    if dtype is not None and dtype != a.dtype:
        a = a.to(dtype)
    if _strips(a) == 1:
        return F.linear(a, a)
    return add_own_product(a.new_empty(a.shape[0], a.shape[0]), a, beta=0)


def _strips(a: Tensor) -> int:
    """In how many strips to form a a^T."""
    least, strips = _HALVED_ON_CPU if a.device.type == "cpu" else _HALVED_ELSEWHERE
    return strips if min(a.shape) >= least else 1


def add_own_product(product: Tensor, a: Tensor, beta: int = 1) -> Tensor:
    """beta product + a a^T, in place, for a product that is symmetric; in strips as in `own_product`."""
    strips = _strips(a)
    if strips == 1:
        return product.addmm_(a, a.t(), beta=beta)
    for rows in windows(a.shape[0], -(-a.shape[0] // strips)):
        strip = product[rows, : rows.stop]
        strip.addmm_(a[rows], a[: rows.stop].t(), beta=beta)
        product[: rows.start, rows] = strip[:, : rows.start].t()
    return product
