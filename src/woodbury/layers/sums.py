"""Sums of forms: parameters that a model uses several times, in one layer or in several.

The row of such a parameter is the sum of the rows of its uses, so K has a term for every pair of uses. Uses of one
kind become one form with the positions of all (`positions`); other uses, or those of parts of a parameter,
become a `SumRows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from woodbury.layers.forms import Dtype, RowForm, Scales, add_onto, byte_limit, length_of, windows


class Place(NamedTuple):
    """Where the rows of a use belong: parameter[start : start + length] along its first axis."""

    name: str
    start: int
    length: int

    @property
    def window(self) -> slice:
        return slice(self.start, self.start + self.length)


def whole_parameter(name: str, shape: Sequence[int]) -> Place:
    return Place(name, 0, length_of(shape))


class Use(NamedTuple):
    """Rows of one use of parameters, and for each of the form's own names the place where they belong."""

    form: RowForm
    places: dict[str, Place]

    @property
    def signature(self) -> object:
        """What must agree for uses to be joined, or to be one form over several pieces of a batch."""
        return self.form.signature, tuple(self.places.items())


def sum_uses(uses: Sequence[Use], shapes: Mapping[str, torch.Size], max_bytes: int | None) -> RowForm:
    """The rows of a module's parameters, of these shapes, from all their uses."""
    merged = _merge(uses)
    form, places = merged[0]
    is_whole = all(place == whole_parameter(own, shapes.get(own, ())) for own, place in places.items())
    if len(merged) == 1 and is_whole:
        return form
    return SumRows(tuple(merged), dict(shapes), max_bytes)


def _merge(uses: Sequence[Use]) -> list[Use]:
    """Uses of the same kind at the same places, joined into one."""
    if len(uses) == 1:
        return list(uses)
    groups: dict[object, list[Use]] = {}
    for form, places in uses:
        use = Use(form.summand(), places)
        groups.setdefault(use.signature, []).append(use)
    return [own[0] if len(own) == 1 else _combine(own[0].form.join, own) for own in groups.values()]


def _combine(combine: Callable[[list[RowForm]], RowForm], uses: Sequence[Use]) -> Use:
    """One use in place of several with the same signature."""
    return Use(combine([use.form for use in uses]), uses[0].places)


@dataclass
class SumRows(RowForm):
    """Rows that are sums over uses, each of all or part of the parameters."""

    uses: tuple[Use, ...]
    whole: dict[str, torch.Size]  # the shapes of the parameters
    max_bytes: int | None = None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return self.whole

    @property
    def signature(self) -> tuple[object, ...]:
        return *super().signature, *(use.signature for use in self.uses)

    def restrict(self, names: Collection[str]) -> SumRows:
        uses = []
        for form, places in self.uses:
            inside = {own: place for own, place in places.items() if place.name in names}
            if inside:
                uses.append(Use(form.restrict(inside), inside))
        return replace(self, uses=tuple(uses), whole={n: shape for n, shape in self.whole.items() if n in names})

    def gram(self, other: Self, scales: Scales, dtype: Dtype, onto: Tensor | None = None) -> Tensor:
        """K use by use where they do not overlap, else from rows written out for a block of the parameters."""
        total = onto
        if self._is_disjoint:
            for (form, places), (theirs, _) in zip(self.uses, other.uses, strict=True):
                own = None if scales is None else {name: scales[place.name] for name, place in places.items()}
                total = form.gram(theirs, own, dtype, total)
        else:
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
        # a third for the rows, a third for a copy by the matrix product, or rows of one use (as in `positions`)
        limit = byte_limit(self.max_bytes, left.device) // 3
        for window in windows(length_of(shape), limit // max(1, bytes_per_entry)):
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

    @staticmethod
    def concatenate(forms: Sequence[SumRows]) -> RowForm:
        uses = [_combine(own[0].form.concatenate, own) for own in zip(*(form.uses for form in forms), strict=True)]
        return replace(forms[0], uses=tuple(uses))

    def head(self, row_count: int) -> SumRows:
        return replace(self, uses=tuple(Use(form.head(row_count), places) for form, places in self.uses))
