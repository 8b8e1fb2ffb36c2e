"""Sums of forms: parameters that a model uses several times, in one layer or in several.

The row of such a parameter is the sum of the rows of its uses, so K has a term for every pair of uses. Uses of one
kind become one form with the positions of all (`shared`); other uses, or those of parts of a parameter, become a
`SumRows`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury.layers.embeddings import EmbeddingRows
from woodbury.layers.forms import Dtype, ExplicitRows, OuterRows, RowForm, Scales, add_onto, byte_limit, windows
from woodbury.layers.shared import SharedRows, as_shared


class Place(NamedTuple):
    """Where the rows of a use belong: parameter[start : start + length] along its first axis."""

    name: str
    start: int
    length: int

    @property
    def window(self) -> slice:
        return slice(self.start, self.start + self.length)


def whole_parameter(name: str, shape: Sequence[int] | None) -> Place:
    """All of a parameter."""
    return Place(name, 0, _length(shape))


def _length(shape: Sequence[int] | None) -> int:
    """The length of the first axis; a single number counts as an axis of length 1."""
    return shape[0] if shape else 1


class Use(NamedTuple):
    """Rows of one use of parameters, and for each of the form's own names the place where they belong."""

    form: RowForm
    places: dict[str, Place]


def sum_uses(uses: Sequence[Use], shapes: Mapping[str, torch.Size], max_bytes: int | None) -> RowForm:
    """The rows of a module's parameters, of these shapes, from all their uses."""
    merged = _merge(uses)
    form, places = merged[0]
    if len(merged) == 1 and all(place == whole_parameter(own, shapes.get(own)) for own, place in places.items()):
        return form
    return SumRows(tuple(merged), dict(shapes), max_bytes)


def _merge(uses: Sequence[Use]) -> list[Use]:
    """Uses of the same kind at the same places, joined into one."""
    if len(uses) == 1:
        return list(uses)
    groups: dict[object, list[RowForm]] = {}
    places: dict[object, dict[str, Place]] = {}
    for use in uses:
        form = as_shared(use.form) if isinstance(use.form, OuterRows) else use.form
        key = (type(form), tuple(use.places.items()), _kind(form))
        groups.setdefault(key, []).append(form)
        places[key] = use.places
    return [Use(_join(forms), places[key]) for key, forms in groups.items()]


def _kind(form: RowForm) -> object:
    """What must agree for forms of a class to be joined."""
    if isinstance(form, SharedRows):
        return form.sizes, form.swapped
    if isinstance(form, EmbeddingRows):
        return form.padding
    return None if isinstance(form, ExplicitRows) else id(form)


def _signature(use: Use) -> object:
    """What must agree for a use to be one form over several pieces of a batch."""
    kind = _kind(use.form) if isinstance(use.form, SharedRows | EmbeddingRows) else None
    return type(use.form), use.form.parameters, tuple(use.places.items()), kind


def _join(forms: Sequence[Any]) -> RowForm:
    """The sum of forms of one kind."""
    first: RowForm = forms[0]
    if len(forms) == 1:
        return first
    if isinstance(first, SharedRows | EmbeddingRows):
        return first.join(forms)
    assert isinstance(first, ExplicitRows)
    written = [form.dense() for form in forms]
    return ExplicitRows({name: torch.stack([rows[name] for rows in written]).sum(0) for name in first.rows})


@dataclass
class SumRows:
    """Rows that are sums over uses, each of all or part of the parameters."""

    uses: tuple[Use, ...]
    shapes: dict[str, torch.Size]
    max_bytes: int | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def restrict(self, names: Collection[str]) -> SumRows:
        uses = []
        for form, places in self.uses:
            inside = {own: place for own, place in places.items() if place.name in names}
            if inside:
                uses.append(Use(form.restrict(inside), inside))
        return replace(self, uses=tuple(uses), shapes={n: shape for n, shape in self.shapes.items() if n in names})

    def gram(self, other: RowForm, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        """K use by use where they do not overlap, else from rows written out for a block of the parameters."""
        assert isinstance(other, SumRows)
        total = onto
        if self._is_disjoint:
            for (form, places), (theirs, _) in zip(self.uses, other.uses, strict=True):
                own = None if scales is None else {name: scales[place.name] for name, place in places.items()}
                total = form.gram(theirs, own, dtype, total)
            assert total is not None
            return total
        for name, shape in self.shapes.items():
            term = self._gram_of(other, name, shape, dtype)
            total = add_onto(term if scales is None else term.mul_(scales[name]), total)
        assert total is not None
        return total

    @property
    def _is_disjoint(self) -> bool:
        """Whether no two uses touch the same part of a parameter."""
        places = sorted(place for use in self.uses for place in use.places.values())
        return all(a.name != b.name or a.start + a.length <= b.start for a, b in pairwise(places))

    def _gram_of(self, other: SumRows, name: str, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        """The term of one parameter: sum over blocks of it of G G'^T, G its rows written out."""
        left, right = self.new_rows(0, dtype=dtype), other.new_rows(0)
        gram = left.new_zeros(len(left), len(right))
        rows_at_once = len(left) + (0 if other is self else len(right))
        bytes_per_entry = rows_at_once * math.prod(shape[1:]) * left.element_size()
        # a third for the rows, a third for a copy by the matrix product, or rows of one use (as in `shared`)
        limit = byte_limit(self.max_bytes, left.device) // 3
        for window in windows(_length(shape), limit // max(1, bytes_per_entry)):
            a = self.slab(name, window, left.dtype).flatten(1)
            b = a if other is self else other.slab(name, window, left.dtype).flatten(1)
            gram.addmm_(a, b.t())
        return gram

    def new_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.uses[0].form.new_rows(*sizes, dtype=dtype)

    def slab(self, name: str, window: slice, dtype: torch.dtype) -> Tensor:
        total = self.new_rows(window.stop - window.start, *self.shapes[name][1:], dtype=dtype)
        for form, places in self.uses:
            for own, place in places.items():
                start, stop = max(window.start, place.start), min(window.stop, place.start + place.length)
                if place.name == name and start < stop:
                    rows = form.slab(own, slice(start - place.start, stop - place.start), dtype)
                    total[:, start - window.start : stop - window.start] += rows
        return total

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        axes = {name: value.reshape(1) if value.dim() == 0 else value for name, value in vector.items()}
        images = [
            form.matvec({own: axes[place.name][place.window] for own, place in places.items()})
            for form, places in self.uses
        ]
        return torch.stack(images).sum(0)

    def rmatvec(self, coefficients: Tensor) -> dict[str, Tensor]:
        like = self.new_rows(0)
        total = {name: like.new_zeros(shape or (1,)) for name, shape in self.shapes.items()}
        for form, places in self.uses:
            for own, value in form.rmatvec(coefficients).items():
                total[places[own].name][places[own].window] += value
        return {name: value.reshape(self.shapes[name]) for name, value in total.items()}

    def dense(self) -> dict[str, Tensor]:
        dtype = self.new_rows(0).dtype
        rows = {name: self.slab(name, slice(0, _length(shape)), dtype) for name, shape in self.shapes.items()}
        return {name: own.reshape(len(own), *self.shapes[name]) for name, own in rows.items()}

    @staticmethod
    def concatenate(forms: Sequence[SumRows]) -> RowForm:
        if len({tuple(_signature(use) for use in form.uses) for form in forms}) > 1:  # pieces differ in their uses
            return ExplicitRows.concatenate([ExplicitRows(form.dense()) for form in forms])
        uses = [
            Use(own[0].form.concatenate([use.form for use in own]), own[0].places)
            for own in zip(*(form.uses for form in forms), strict=True)
        ]
        return replace(forms[0], uses=tuple(uses))
