"""Forms: the rows of one layer, stored as cheaply as their structure allows.

A row is the derivative of one scalar (a factor column at one sample) in the layer's parameters. Rows are
sample-major: row = i k + a for column a of sample i. The letters: n sample, k column, r = n k row,
i input feature, o output feature.

A form is one class: it fills in what is abstract in `RowForm`, and does better than the defaults there where its
structure allows. Nobody outside of `layers/` asks which form rows have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from woodbury.device.constants import ones
from woodbury.device.scalars import Scale

Scales = Mapping[str, Scale] | None  # one number per parameter; None for ones
Dtype = torch.dtype | None  # to accumulate in; None for the type of the rows
Units = Mapping[str, tuple[Tensor, ...]]  # s by parameter: (s,), or two vectors whose outer product it is

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


def length_of(shape: Sequence[int]) -> int:
    """The length of the first axis; a single number counts as an axis of length 1."""
    return shape[0] if shape else 1


class RowForm(ABC):
    """The rows of one layer. Vectors are dictionaries from the layer's own parameter names to tensors."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The shapes of the parameters, by their own names."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    @property
    def signature(self) -> tuple[object, ...]:
        """What must agree for forms to be multiplied, joined or put one after the other."""
        return type(self), self.parameters

    @abstractmethod
    def restrict(self, names: Collection[str]) -> RowForm:
        """The same rows with every parameter outside `names` left out."""

    @abstractmethod
    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        """U diag(scales) U'^T, (r, r'), added in place to `onto` if that is not None; one scale per parameter."""

    @abstractmethod
    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        """U v, (r,)."""

    @abstractmethod
    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        """U^T c for coefficients (r,)."""

    @abstractmethod
    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        """The rows of parameter[window], written out: (r, length, *shape[1:]) for a parameter of this shape."""

    @abstractmethod
    def new_rows(self, *sizes: int, dtype: Dtype = None) -> Tensor:
        """Zeros (r, *sizes), of the type of the rows or of dtype."""

    def dense(self) -> dict[str, Tensor]:
        """The rows themselves: name -> (r, *parameter shape)."""
        dtype = self.new_rows(0).dtype
        rows = {name: self.slab(name, slice(0, length_of(shape)), dtype) for name, shape in self.shapes.items()}
        return {name: own.reshape(len(own), *self.shapes[name]) for name, own in rows.items()}

    def written_out(self) -> RowForm:
        """The same rows, where they are sums, written out."""
        return ExplicitRows(self.dense())

    def head(self, row_count: int) -> RowForm:
        """The first rows, of whole samples."""
        return ExplicitRows({name: rows[:row_count] for name, rows in self.dense().items()})

    def gram_head(self, row_count: int, dtype: Dtype, is_first: bool) -> Tensor:
        """The first rows of U U^T, (row_count, r); is_first tells that the layer gets the inputs of the model."""
        return self.head(row_count).gram(self, None, dtype)

    def diagonal(self, width: int, scales: Scales, dtype: torch.dtype, max_bytes: int) -> Tensor:
        """Blocks of `width` rows along the diagonal of U diag(scales) U^T, (r / width, width, width)."""
        row_count = len(self.new_rows(0))
        total = self.new_rows(dtype=dtype).new_zeros(row_count // width, width, width)
        for name, shape in self.shapes.items():
            numbers = row_count * math.prod(shape[1:])
            for window in windows(length_of(shape), max_bytes // dtype.itemsize // max(1, numbers)):
                term = block_products(self.slab(name, window, dtype).flatten(1), width, dtype)
                total += term if scales is None else scales[name] * term
        return total

    def in_units(self, units: Units) -> RowForm:
        """U diag(s): the rows in other units of the parameters."""
        entries = {name: torch.outer(*own) if len(own) == 2 else own[0] for name, own in units.items()}
        return ExplicitRows({name: own * entries[name].view(own.shape[1:]) for name, own in self.dense().items()})

    def factored_sum(self, coefficients: Tensor) -> OuterSum | None:
        """U^T c for coefficients (r,), if the outputs of the layer at theta + U^T c follow from its factors."""
        return None

    def affine_sizes(self, row_count: int) -> tuple[int, int, int, int] | None:
        """(i, o, n, m) of a layer that has a `factored_sum`, m the samples of the first so many rows."""
        return None

    def kronecker_sides(self) -> tuple[Tensor, Tensor] | None:
        """a (n, i) and h (r, o) if each row is the outer product h_r a_n^T, for W and b side by side."""
        return None

    def only_rows(self) -> RowForm:
        """The same rows without a `factored_sum`."""
        return self

    def within(self, max_bytes: int | None) -> RowForm:
        """The same rows, whose temporaries take at most so many bytes; None for a default."""
        return self

    def as_state(self) -> dict[str, Any] | None:
        """What a `state_dict` holds of the rows, for `form_of_state`; None where they are not saved."""
        return None

    def summand(self) -> RowForm:
        """The same rows in a form that `join` adds up."""
        return self

    @staticmethod
    def join(forms: Sequence[Any]) -> RowForm:
        """The sum of the rows of several forms with one signature."""
        written = [form.dense() for form in forms]
        return ExplicitRows({name: torch.stack([rows[name] for rows in written]).sum(0) for name in written[0]})

    @staticmethod
    def concatenate(forms: Sequence[Any]) -> RowForm:
        """The rows of several forms with one signature, one after the other."""
        written = [form.dense() for form in forms]
        return ExplicitRows({name: torch.cat([rows[name] for rows in written]) for name in written[0]})


class WeightRows(RowForm):
    """What forms of a weight W and perhaps a bias b have in common; either may be absent, or frozen."""

    weight: str | None
    bias: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple([name for name in (self.weight, self.bias) if name is not None])

    def restrict(self, names: Collection[str]) -> RowForm:
        if all(name in names for name in self.parameters):
            return self
        sides = {"weight": self.weight, "bias": self.bias}
        kept = {side: own if own in names else None for side, own in sides.items()}
        return replace(self, **kept)  # type: ignore[type-var]

    def in_units(self, units: Units) -> RowForm:
        sides = () if self.weight is None else units[self.weight]
        if len(sides) == 2 and (self.bias is None or units[self.bias][0] is sides[0]):
            scaled = self.scaled(*sides)
            if scaled is not None:
                return scaled
        return super().in_units(units)

    @abstractmethod
    def scaled(self, first: Tensor, others: Tensor) -> RowForm | None:
        """U diag(s) for s = first others^T over the axes of W, the first and the others, and s = first of b.

        None where it would have no structure.
        """


@dataclass
class OuterSum:
    """U^T c of one layer whose rows are outer products, factored: Hbar^T V for W, the sum of Hbar for b."""

    inputs: Tensor  # V (n, i)
    contracted: Tensor  # Hbar (n, o): the sum over the columns of each sample of c h
    weight: str | None
    bias: str | None
    inner: Tensor | None = None  # V V^T + 1 (n, n), if it is known
    pieces: tuple[tuple[int, int], ...] = ()  # the samples of each piece of the batch, and columns per sample

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple([name for name in (self.weight, self.bias) if name is not None])

    def dense(self) -> dict[str, Tensor]:
        """The sum itself: name -> tensor of the parameter's shape."""
        vector = {}
        if self.weight is not None:
            vector[self.weight] = self.contracted.t().mm(self.inputs)
        if self.bias is not None:
            vector[self.bias] = self.contracted.sum(0)
        return vector

    def outputs_after(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """z(v) + (v V^T + 1) Hbar, in place of outputs z(v): the outputs of the layer at theta + U^T c.

        Exact for a layer that computes W v + b and nothing else.
        """
        if self.weight is None:
            return outputs + self.contracted.sum(0)
        inner = shifted_product(inputs, self.inputs, self.bias is not None)
        return outputs.addmm_(inner, self.contracted)


@dataclass
class ExplicitRows(RowForm):
    """Rows written out, name -> (r, *parameter shape): for small parameters and layers of users."""

    rows: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: rows.shape[1:] for name, rows in self.rows.items()}

    def restrict(self, names: Collection[str]) -> ExplicitRows:
        return ExplicitRows({name: rows for name, rows in self.rows.items() if name in names})

    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        products = []
        for name, rows in self.rows.items():
            own = _flat(rows)
            found = product(own, own if other is self else _flat(other.rows[name]), dtype)
            products.append(found if scales is None else found * scales[name])
        return add_onto(torch.stack(products).sum(0), onto)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        products = [_flat(rows) @ vector[name].flatten() for name, rows in self.rows.items()]
        return torch.stack(products).sum(0)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(coefficients.to(own.dtype), own, dims=1) for name, own in self.rows.items()}

    def dense(self) -> dict[str, Tensor]:
        return dict(self.rows)

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        rows = self.rows[name]
        return (rows.unsqueeze(1) if rows.dim() == 1 else rows)[:, window].to(dtype)

    def new_rows(self, *sizes: int, dtype: Dtype = None) -> Tensor:
        rows = next(iter(self.rows.values()))
        return rows.new_zeros(len(rows), *sizes, dtype=dtype)

    def written_out(self) -> ExplicitRows:
        return self

    def as_state(self) -> dict[str, Any]:
        return {"written": dict(self.rows)}


def paired(a: RowForm, b: RowForm) -> tuple[RowForm, RowForm]:
    """Two forms of the same parameters that can be multiplied: written out where they differ."""
    if a is b or a.signature == b.signature:
        return a, b
    shared = set(a.parameters) & set(b.parameters)
    return ExplicitRows(a.dense()).restrict(shared), ExplicitRows(b.dense()).restrict(shared)


def concatenate_forms(pieces: Sequence[Mapping[str, RowForm]]) -> dict[str, RowForm]:
    """The forms of several pieces of a batch, one piece after the other, layer by layer."""
    if len(pieces) == 1:
        return dict(pieces[0])
    forms: dict[str, RowForm] = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece):
        own = [piece[name] for piece in pieces if name in piece]
        # a rule may treat pieces differently, and a model may skip layers at random
        if len(own) < len(pieces) or len({form.signature for form in own}) > 1:
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


def block_products(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """R R^T for each block R of `width` rows (r, p): (r / width, width, width)."""
    blocks = rows.to(dtype).reshape(-1, width, rows.shape[1])
    return torch.bmm(blocks, blocks.mT)


def add_onto(gram: Tensor, onto: Tensor | None) -> Tensor:
    """onto + gram, in place; gram itself where onto is None."""
    return gram if onto is None else onto.add_(gram)


def shifted_product(a: Tensor, b: Tensor, bias: bool, dtype: torch.dtype | None = None) -> Tensor:
    """a b^T + 1, (n, n'), or a b^T for a layer without bias; accumulated in `dtype` if one is given."""
    a, b = _both_in(dtype, a, b)
    return linear(a, b, ones(b.shape[0], b.dtype, b.device) if bias else None)


def _both_in(dtype: Dtype, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b in dtype, if that is not None; where they are one tensor, they stay one."""
    if dtype is None or dtype == a.dtype:
        return a, b
    converted = a.to(dtype)
    return converted, converted if a is b else b.to(dtype)


_FUSED = 2**17  # outputs from which a GPU is faster with b added within the product
# With the Arm Compute Library torch takes 70 us to begin a product v W^T of more than 8 rows and columns, and none
# for v A: where both have fewer numbers than this, W^T is copied.
_WITH_ARM_LIBRARY = getattr(torch.backends.mkldnn, "is_acl_available", bool)()
_COPIED = 2**16 if _WITH_ARM_LIBRARY else 0


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """v W^T + b."""
    if inputs.is_cuda and bias is not None and inputs.shape[0] * weight.shape[0] < _FUSED:
        return F.linear(inputs, weight).add_(bias)
    small = inputs.numel() < _COPIED and weight.numel() < _COPIED
    if small and inputs.dtype == torch.float32 and inputs.dim() == 2 and min(weight.shape) > 8 and inputs.is_cpu:
        right = weight.t().contiguous()
        return inputs.mm(right) if bias is None else torch.addmm(bias, inputs, right)
    return F.linear(inputs, weight, bias)


# From so many rows and columns on it pays to leave out half of a symmetric product, in strips: 4 to 12 on a CPU,
# in float64 of half as many rows that are long, and elsewhere of 320 rows or more and at most 16.
_HALVED_ON_CPU, _HALVED_ELSEWHERE = 256, 1024


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """a b^T, accumulated in `dtype` if that is not None.

    A large a a^T in strips of rows, each up to the diagonal: 5/8 of the work in four of them.
    """
    a, b = _both_in(dtype, a, b)
    if a is b and _strips(a) > 1:
        return add_own_product(a.new_empty(a.shape[0], a.shape[0]), a, beta=0)
    return linear(a, b, None)


def _strips(a: Tensor) -> int:
    """In how many strips to form a a^T."""
    if a.is_cpu:
        long = a.dtype == torch.float64 and 2 * a.shape[0] >= _HALVED_ON_CPU and a.shape[1] >= 4 * _HALVED_ON_CPU
        return min(max(a.shape[0] // 112, 4), 12) if long or min(a.shape) >= _HALVED_ON_CPU else 1
    return min(a.shape[0] // 320, 16) if min(a.shape) >= _HALVED_ELSEWHERE else 1


def add_own_product(product: Tensor, a: Tensor, beta: int = 1) -> Tensor:
    """beta product + a a^T, in place, for a product that is symmetric; in strips as in `product`."""
    strips = _strips(a)
    if strips == 1:
        return product.addmm_(a, a.t(), beta=beta)
    for rows in windows(a.shape[0], -(-a.shape[0] // strips)):
        strip, left, right = product[rows, : rows.stop], a[rows], a[: rows.stop]
        if a.is_cuda or not _WITH_ARM_LIBRARY:
            strip.addmm_(left, right.t(), beta=beta)
        else:  # in memory of its own: there a product into part of a matrix takes half as long again
            own = F.linear(left, right)
            strip.copy_(strip + own if beta else own)
        if rows.start:
            product[: rows.start, rows] = strip[:, : rows.start].t()
    return product
