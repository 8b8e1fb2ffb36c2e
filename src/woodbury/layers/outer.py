"""The form of a layer z = W v + b on one vector per sample: rows are outer products.

Which sample each of the rows belongs to is their `Layout`. The letters are those of `forms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from woodbury.device.constants import LIMIT, constant_tensor
from woodbury.layers.forms import (
    Dtype,
    ExplicitRows,
    OuterSum,
    RowForm,
    Scales,
    WeightRows,
    block_products,
    linear,
    product,
    shifted_product,
)
from woodbury.layers.positions import Part
from woodbury.layers.shared import SharedRows


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

    @cached_property
    def width(self) -> int:
        """k where it is the same for all samples, else 0."""
        widths = {k for _, k in self.pieces}
        return max(widths) if len(widths) == 1 else 0

    def merged(self) -> Layout:
        """The same rows with neighbours of as many rows per sample as one piece."""
        neighbours = groupby(self.pieces, key=itemgetter(1))
        return layout_of(tuple([(sum(n for n, _ in own), k) for k, own in neighbours]))

    def of_rows(self, samples: Tensor, axis: int = 0) -> Tensor:
        """(n, ...) -> (r, ...) along an axis: the entry of the sample each row belongs to."""
        if self.is_plain:
            return samples
        return samples.index_select(axis, _sample_of_row(self.pieces, samples.device))

    @cached_property
    def _windows(self) -> list[slice]:
        return [slice(*own) for own in pairwise([0, *accumulate(n * k for n, k in self.pieces)])]

    def split(self, rows: Tensor) -> list[Tensor]:
        """(r, ...) -> the rows of each piece."""
        return [rows] if len(self.pieces) == 1 else [rows[window] for window in self._windows]

    def multiply_(self, rows: Tensor, samples: Tensor) -> None:
        """Multiply each of the rows (r, o) in place by the entry of its sample in samples (n, o)."""
        sizes = [n for n, _ in self.pieces]
        multipliers = (samples,) if len(sizes) == 1 else samples.split_with_sizes(sizes)
        for (n, k), own, by in zip(self.pieces, self.split(rows), multipliers, strict=True):
            if k == 1:
                own.mul_(by)
            else:
                own.view(n, k, -1).mul_(by.unsqueeze(1))

    def contract(self, coefficients: Tensor, rows: Tensor) -> Tensor:
        """sum over the rows of each sample of c h, (n, o), for c (r,) and rows h (r, o)."""
        if self.is_plain:
            return coefficients.unsqueeze(1) * rows
        parts = []
        for (n, k), c, h in zip(self.pieces, self.split(coefficients), self.split(rows), strict=True):
            if k == 1:
                parts.append(c.unsqueeze(1) * h)
            else:
                parts.append(torch.bmm(c.view(n, 1, k), h.view(n, k, -1)).squeeze(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(LIMIT)
def layout_of(pieces: tuple[tuple[int, int], ...]) -> Layout:
    """The layout of these pieces, cached."""
    return Layout(pieces)


@lru_cache(LIMIT)
def _layout_of_head(pieces: tuple[tuple[int, int], ...], row_count: int) -> Layout:
    """The layout of the first rows of these pieces, of whole samples."""
    head: list[tuple[int, int]] = []
    for n, k in pieces:
        if row_count > 0:
            head.append((min(n, row_count // k), k))
        row_count -= n * k
    return layout_of(tuple(head))


@constant_tensor  # a few kilobytes per batch size
def _sample_of_row(pieces: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(r,) index of the sample each row belongs to."""
    columns = torch.tensor([k for n, k in pieces for _ in range(n)], device="cpu")
    return torch.repeat_interleave(columns).to(device)


@dataclass
class OuterRows(WeightRows):
    """Rows of z = W v + b: row r is the outer product h_r v_n^T for W, and h_r for b.

    Their Gram matrix needs no row written out:  K[r, r'] = (v_n . v_n' + 1) (h_r . h_r')   (paper, appendix A.6).
    """

    inputs: Tensor  # v (n, i)
    grads: Tensor  # h (r, o)
    layout: Layout
    weight: str | None = "weight"
    bias: str | None = "bias"
    affine: bool = False  # whether the module computes W v + b of its input and nothing else
    inner: Tensor | None = field(default=None, init=False, repr=False)  # v . v' + 1 (n, n), for the trial pass

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {self.weight: (self.grads.shape[1], self.inputs.shape[1]), self.bias: self.grads.shape[1:]}
        return {name: tuple(shapes[name]) for name in self.parameters}

    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        inner = self.input_gram(other.inputs, scales, dtype)
        if other is self and scales is None:
            self.inner = inner
        return self._times_inputs(other, inner, dtype, onto)

    def _times_inputs(self, other: OuterRows, inner: Tensor, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        """h . h' times `inner` of the samples, (r, r')."""
        outer = product(self.grads, other.grads, dtype)
        k, others = self.layout.width, other.layout.width
        if others == 0 or (others > 1 and outer.is_cpu):  # a CPU is up to three times as fast along whole rows
            inner, others = other.layout.of_rows(inner, axis=1), 1
        if k == 0:
            inner, k = self.layout.of_rows(inner), 1
        if k == others == 1:
            return outer.mul_(inner) if onto is None else onto.addcmul_(outer, inner)
        n, m = inner.shape
        by_sample, inner = outer.view(n, k, m, others), inner.view(n, 1, m, 1)
        if onto is None:
            by_sample.mul_(inner)
            return outer
        onto.view(by_sample.shape).addcmul_(by_sample, inner)
        return onto

    def input_gram(self, inputs: Tensor, scales: Scales = None, dtype: Dtype = None) -> Tensor:
        """s_W v . v' + s_b, (n, n'), without the term of an absent or frozen parameter."""
        if self.weight is not None and scales is None:
            return shifted_product(self.inputs, inputs, self.bias is not None, dtype)
        scales = dict.fromkeys(self.parameters, 1.0) if scales is None else scales
        weight = 0.0 if self.weight is None else scales[self.weight]
        bias = 0.0 if self.bias is None else scales[self.bias]
        return product(self.inputs, inputs, dtype) * weight + bias

    def gram_head(self, row_count: int, dtype: Dtype, is_first: bool) -> Tensor:
        """v V^T of the first layer is kept in full if that saves time in the trial pass."""
        head, samples = self.head(row_count), self.layout.samples
        i, o = self.inputs.shape[1], self.grads.shape[1]
        # v V^T of all and its product with Hbar cost less than the layer
        if is_first and samples * (i + o) < i * o:
            self.inner = self.input_gram(self.inputs, dtype=dtype)
            return head._times_inputs(self, self.inner[: head.layout.samples], dtype)
        return head._times_inputs(self, head.input_gram(self.inputs, dtype=dtype), dtype)

    def diagonal(self, width: int, scales: Scales, dtype: torch.dtype, max_bytes: int) -> Tensor:
        outer = block_products(self.grads, width, dtype)
        total = torch.zeros_like(outer)
        if self.weight is not None:
            inner = block_products(self.layout.of_rows(self.inputs), width, dtype)
            total += inner if scales is None else scales[self.weight] * inner
        if self.bias is not None:
            total += 1.0 if scales is None else scales[self.bias]
        return total.mul_(outer)

    def scaled(self, first: Tensor, others: Tensor) -> OuterRows:
        return OuterRows(self.inputs * others, self.grads * first, self.layout, self.weight, self.bias)

    def head(self, row_count: int) -> OuterRows:
        if row_count == len(self.grads):
            return self
        layout = _layout_of_head(self.layout.pieces, row_count)
        return replace(self, inputs=self.inputs[: layout.samples], grads=self.grads[:row_count], layout=layout)

    def only_rows(self) -> OuterRows:
        return OuterRows(self.inputs, self.grads, self.layout.merged(), self.weight, self.bias)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        bias = None if self.bias is None else vector[self.bias]
        if self.weight is not None:
            change = linear(self.inputs, vector[self.weight], bias)  # of z, (n, o)
        elif bias is not None:
            change = bias.expand(self.layout.samples, -1)
        else:
            return self.grads.new_zeros(len(self.grads))
        return (self.grads * self.layout.of_rows(change)).sum(1)

    def _weighted_sum(self, coefficients: Tensor) -> OuterSum:
        if coefficients.dtype != self.grads.dtype:
            coefficients = coefficients.to(self.grads.dtype)
        contracted = self.layout.contract(coefficients, self.grads)
        return OuterSum(self.inputs, contracted, self.weight, self.bias, self.inner, self.layout.pieces)

    def factored_sum(self, coefficients: Tensor) -> OuterSum | None:
        return self._weighted_sum(coefficients) if self.affine else None

    def affine_sizes(self, row_count: int) -> tuple[int, int, int, int] | None:
        if not self.affine or self.weight is None:
            return None
        head = _layout_of_head(self.layout.pieces, row_count)
        return self.inputs.shape[1], self.grads.shape[1], self.layout.samples, head.samples

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        return self._weighted_sum(coefficients).dense()

    def kronecker_sides(self) -> tuple[Tensor, Tensor]:
        sides = [] if self.weight is None else [self.inputs]
        sides += [] if self.bias is None else [self.inputs.new_ones(self.layout.samples, 1)]
        return sides[0] if len(sides) == 1 else torch.cat(sides, dim=1), self.grads

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        grads = self.grads[:, window].to(dtype)
        if name == self.bias:
            return grads
        inputs = self.layout.of_rows(self.inputs).to(dtype)
        return grads.unsqueeze(2) * inputs.unsqueeze(1)

    def new_rows(self, *sizes: int, dtype: Dtype = None) -> Tensor:
        return self.grads.new_zeros(len(self.grads), *sizes, dtype=dtype)

    def written_out(self) -> OuterRows:
        return self

    def summand(self) -> SharedRows:
        """The form of a layer with one position, for rows as a rule returns them."""
        ((n, k),) = self.layout.pieces
        part = Part(self.inputs[:, None, None].__getitem__, self.grads.unflatten(0, (n, k))[:, :, None, None])
        shape = (self.grads.shape[1], self.inputs.shape[1])
        return SharedRows((part,), shape, weight=self.weight, bias=self.bias)

    @staticmethod
    def concatenate(forms: Sequence[OuterRows]) -> OuterRows:
        first, layout = forms[0], layout_of(tuple(piece for form in forms for piece in form.layout.pieces))
        inputs, grads = torch.cat([form.inputs for form in forms]), torch.cat([form.grads for form in forms])
        return OuterRows(inputs, grads, layout, first.weight, first.bias, first.affine)

    def as_state(self) -> dict[str, Any]:
        pieces = [list(piece) for piece in self.layout.pieces]
        own = {"inputs": self.inputs, "grads": self.grads, "pieces": pieces}
        return own | {"weight": self.weight, "bias": self.bias, "affine": self.affine}


def form_of_state(state: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> RowForm:
    """The form that `as_state` of it described."""
    if "written" in state:
        return ExplicitRows({name: rows.to(device, dtype) for name, rows in state["written"].items()})
    layout = layout_of(tuple((n, k) for n, k in state["pieces"]))
    inputs, grads = state["inputs"].to(device, dtype), state["grads"].to(device, dtype)
    return OuterRows(inputs, grads, layout, state["weight"], state["bias"], state["affine"])
