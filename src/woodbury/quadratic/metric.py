"""Damping and momentum in another metric than the identity: (B + lambda D) p = lambda D q - g, D diagonal.

It is a plain step in other units. With s = D^{-1/2}, p = s p' and U' = U s,

    (U'^T U' + lambda I) p' = lambda q / s - s g        K' = U' U'^T,  lambda relative to its trace

METRICS has two, both made anew at every step:

    "adam"      D = (v / mean(v) + 0.1)^0.35, v the running mean of g^2 as in Adam (Kingma & Ba 2015). For a matrix
                W of outputs and inputs v is kept as the means r and c of its rows and columns, v = r c / mean(r)
                (Adafactor, Shazeer & Stern 2018), each with its own 0.1: then U' is U with inputs and columns of a
                layer in other units, and K' costs what K costs. A bias has the units of its outputs.
    "diagonal"  D = the largest diagonal of B so far, as in MINPACK (More 1978): steps do not change with the unit
                of a parameter. An entry below (4 eps)^2 times the largest is a rounding error, and counts as the
                largest. Rows are written out: for small models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from woodbury._vector import Space, Vector, flatten, like
from woodbury.device.constants import constant_tensor
from woodbury.device.scalars import Scalar, compute, scalar
from woodbury.layers.forms import RowForm
from woodbury.model.plan import Plan
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Damped, Minimizer, Quadratic
from woodbury.row_matrix import Rows

FORGETTING = 0.9  # of the moments, per step
POWER = 0.35  # D = v^POWER
SMALLEST = 0.1  # of v over its mean


@dataclass(frozen=True)
class Units:
    """s = D^{-1/2}: of a matrix as the outer product of two vectors where D is one, else entry by entry."""

    plan: Plan
    factors: Mapping[str, tuple[Tensor, ...]]  # by parameter, in order: (rows, columns) or (entries,)

    @cached_property
    def vector(self) -> Vector:
        """s."""
        parts = {
            name: torch.outer(*units) if len(units) == 2 else units[0] for name, units in self.factors.items()
        }
        return Vector(self.plan.space, flatten(parts))

    def of_rows(self, forms: Mapping[str, RowForm]) -> dict[str, RowForm]:
        """U s by layer."""
        return {
            layer: form.in_units({local: self.factors[full] for local, full in self.plan.owned[layer].items()})
            for layer, form in forms.items()
        }


class InMetric:
    """The quadratic model with the damping term lambda |p - q|_D^2 / 2: a plain one in the units s."""

    def __init__(self, plain: Quadratic, units: Units) -> None:
        self._plain, self._units = plain, units
        rows, s, complete = plain.all_rows, units.vector, plain._complete
        if not plain.blocks.are_smaller(plain.plan, plain.curvature_rows):
            complete = None  # in sample space nobody asks for it
        self._inside = replace(
            plain,
            rows=Rows(plain.plan, units.of_rows(rows.forms), rows.row_count),  # Z s
            gradient=None if plain.gradient is None else plain.gradient * s,
            center=None if plain.center is None else plain.center / s,
            _complete=None if complete is None else complete * s,
            _gram=None,
        )

    def __getattr__(self, name: str) -> Any:  # what the damping does not change
        return getattr(self._plain, name)

    def trace(self) -> Scalar:
        """Of K' = U' U'^T."""
        return self._inside.trace()

    def by_layer(self) -> InMetric:
        return InMetric(self._plain.by_layer(), self._units)

    def at(self, damping: Scalar, refine: bool = False) -> Damped:
        return _DampedInMetric(self._inside.at(damping, refine), self._units, self._plain)

    def metric(self) -> Vector:
        """D."""
        s = self._units.vector
        return s.of(s.flat.square().reciprocal())


class _DampedInMetric(Damped):
    """(B + lambda D) p = lambda D q - g, by the plain system of p' = p / s."""

    def __init__(self, inside: Damped, units: Units, plain: Quadratic) -> None:
        super().__init__(plain, inside.damping)
        self._inside, self._units = inside, units

    def minimizer(self) -> Minimizer:
        self._found = found = self._inside.minimizer()
        p = found.displacement.dense() * self._units.vector
        displacement = Displacement.of(self.quadratic.plan, p)
        # its image stays: (Z s) (p / s) = Z p
        return replace(found, displacement=displacement, squared_norm=scalar(p.dot(p)))

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        return self._inside.pull_back(weights, refine) * self._units.vector

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        return self._inside.doubt(self._found, look)


class Metric(ABC):
    """A rule for D."""

    name: ClassVar[str]

    @abstractmethod
    def seen(self, quadratic: Quadratic) -> Vector:
        """What a step shows: the moments of its gradient or of its rows."""

    @abstractmethod
    def joined(self, before: Tensor, now: Tensor, steps: int) -> Tensor:
        """The moments after so many steps with those of one more."""

    @abstractmethod
    def units(self, moments: Vector, plan: Plan) -> Units:
        """s of the moments."""

    def next_units(self, state: Mapping[str, Any], quadratic: Quadratic) -> tuple[Units, dict[str, Any]]:
        """The units of a step, and the state after it: {"steps": so many, "moments": {...}}."""
        steps, before, moments = state.get("steps", 0), state.get("moments", {}), self.seen(quadratic)
        if before:
            # those of parameters that are new begin with this step
            known = {name: like(before.get(name, part), part) for name, part in moments.items()}
            moments = moments.of(self.joined(moments.space.pack(known).flat, moments.flat, steps))
        return self.units(moments, quadratic.plan), {"steps": steps + 1, "moments": moments.named()}


class AdamMetric(Metric):
    """See the module docstring. Moments are those of a vector, or of the rows and of the columns of a matrix."""

    name = "adam"

    def seen(self, quadratic: Quadratic) -> Vector:
        gradient = quadratic.all_of_gradient()
        parts, moments = list(gradient.values()), dict[str, Tensor]()
        for name, square in zip(gradient, torch._foreach_mul(parts, parts), strict=True):
            if square.dim() > 1:
                square = square if square.dim() == 2 else square.flatten(1)
                rows, columns = [_averaging(size, square.dtype, square.device) for size in square.shape]
                moments[f"{name}.rows"], moments[f"{name}.columns"] = square.mv(columns), square.t().mv(rows)
            else:
                moments[name] = square
        return Space.of(moments).pack(moments)

    def joined(self, before: Tensor, now: Tensor, steps: int) -> Tensor:
        return torch.lerp(before, now, max(1 - FORGETTING, 1 / (steps + 1)))  # a plain mean at first

    def units(self, moments: Vector, plan: Plan) -> Units:
        # all at once: they are many, and small. The mean of the rows of a matrix is that of its columns
        device = plan.device
        lengths = _lengths(moments.space, device)
        # that of a part without entries is 0
        means = torch.segment_reduce(moments.flat, "mean", lengths=lengths, unsafe=True, initial=0.0)
        shares = _shares(moments.space, plan.space, plan.dtype, device)
        divisors = shares.mv(means).clamp_min(torch.finfo(plan.dtype).tiny)
        relative = moments.flat / divisors.index_select(0, _part_of_each(moments.space, device))
        parts = iter(relative.add_(SMALLEST).pow_(-0.5 * POWER).split(moments.space.sizes))  # s = D^{-1/2}
        factors: dict[str, tuple[Tensor, ...]] = {}
        for name in plan.parameters:
            factors[name] = (next(parts),) if name in moments.space.shapes else (next(parts), next(parts))
        for names in plan.owned.values():
            weight, bias = names.get("weight"), names.get("bias")
            if weight is None or bias is None or len(factors[weight]) != 2:
                continue
            if factors[weight][0].shape == plan.parameters[bias].shape:
                factors[bias] = (factors[weight][0],)
        return Units(plan, factors)


@constant_tensor
def _lengths(moments: Space, device: torch.device) -> Tensor:
    """Of each part of the moments."""
    return torch.tensor(moments.sizes, device="cpu").to(device)


@constant_tensor
def _part_of_each(moments: Space, device: torch.device) -> Tensor:
    """The index of the part that each of the moments belongs to."""
    return torch.repeat_interleave(torch.tensor(moments.sizes, device="cpu")).to(device)


@constant_tensor
def _averaging(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / size for each of so many numbers: their mean as a product, which takes half the time of `mean`."""
    return torch.full((size,), 1 / max(size, 1), dtype=dtype, device=device)


@constant_tensor
def _shares(moments: Space, parameters: Space, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Times the means of all parts of the moments: the mean of v; for columns that of their own matrix."""
    sizes = {name: shape.numel() / parameters.size for name, shape in parameters.shapes.items()}
    sizes |= {f"{name}.rows": share for name, share in sizes.items() if name not in moments.shapes}
    shares = torch.tensor([sizes.get(name, 0.0) for name in moments.shapes], dtype=dtype, device="cpu")
    alone = torch.eye(len(shares), dtype=dtype, device="cpu")
    return torch.where(shares.unsqueeze(1) > 0, shares, alone).to(device)


class DiagonalMetric(Metric):
    """See the module docstring."""

    name = "diagonal"

    def seen(self, quadratic: Quadratic) -> Vector:
        (divisor,) = compute(quadratic.divisor)
        squares = quadratic.all_rows.squared_columns(quadratic.curvature_rows)
        return quadratic.space.pack(squares) / divisor

    def joined(self, before: Tensor, now: Tensor, steps: int) -> Tensor:
        return torch.maximum(before, now)

    def units(self, moments: Vector, plan: Plan) -> Units:
        largest = moments.flat.max()
        least = (4 * torch.finfo(largest.dtype).eps) ** 2 * largest
        # where nothing moves the outputs at all B and g are zero, and so is p, whatever D is
        instead = torch.where(largest > 0, largest, 1.0)
        units = moments.of(torch.where(moments.flat > least, moments.flat, instead).rsqrt())
        return Units(plan, {name: (part,) for name, part in units.items()})


METRICS: dict[str, Metric] = {kind.name: kind for kind in (AdamMetric(), DiagonalMetric())}
