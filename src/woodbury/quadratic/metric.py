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

from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, compute, scalar
from woodbury.layers.forms import RowForm
from woodbury.model.plan import Plan
from woodbury.quadratic.damped import Damped, Minimizer
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.quadratic import Quadratic
from woodbury.row_matrix import Rows

Moments = Mapping[str, Tensor]  # by parameter, with ".rows" and ".columns" behind the name of a factored one

FORGETTING = 0.9  # of the moments, per step
POWER = 0.35  # D = v^POWER
SMALLEST = 0.1  # of v over its mean


@dataclass(frozen=True)
class Units:
    """s = D^{-1/2}: of a matrix as the outer product of two vectors where D is one, else entry by entry."""

    plan: Plan
    factors: Mapping[str, tuple[Tensor, ...]]  # by parameter: (rows, columns) or (entries,)

    @cached_property
    def vector(self) -> Vector:
        """s."""
        return self.plan.space.pack(
            {
                name: (torch.outer(*own) if len(own) == 2 else own[0]).view_as(self.plan.parameters[name])
                for name, own in self.factors.items()
            }
        )

    def metric(self) -> Vector:
        """D."""
        return self.vector.of(self.vector.flat.square().reciprocal())

    def of_rows(self, forms: Mapping[str, RowForm]) -> dict[str, RowForm]:
        """U s by layer."""
        return {
            layer: form.in_units({own: self.factors[full] for own, full in self.plan.owned[layer].items()})
            for layer, form in forms.items()
        }

    def of_quadratic(self, quadratic: Quadratic) -> Quadratic:
        """The quadratic model in these units: rows Z s, gradient s g, center q / s."""
        rows = quadratic.all_rows
        return replace(
            quadratic,
            rows=Rows(self.plan, self.of_rows(rows.forms), rows.row_count),
            gradient=None if quadratic.gradient is None else quadratic.gradient * self.vector,
            center=None if quadratic.center is None else quadratic.center / self.vector,
            _complete=None if quadratic._complete is None else quadratic._complete * self.vector,
            _gram=None,
            _matrices=None,
        )


class InMetric:
    """The quadratic model with the damping term lambda |p - q|_D^2 / 2: a plain one in the units s."""

    def __init__(self, plain: Quadratic, units: Units) -> None:
        self._plain, self._units = plain, units
        self._inside = units.of_quadratic(plain)

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
        return self._units.metric()


class _DampedInMetric(Damped):
    """(B + lambda D) p = lambda D q - g, by the plain system of p' = p / s."""

    def __init__(self, inside: Damped, units: Units, plain: Quadratic) -> None:
        self._inside, self._units, self._plain = inside, units, plain
        self.damping = inside.damping

    @property
    def center(self) -> Vector | None:
        return self._plain.center

    def minimizer(self) -> Minimizer:
        self._found = self._inside.minimizer()
        p = self._found.displacement.dense() * self._units.vector
        displacement = Displacement.of(self._plain.plan, p)
        return replace(
            self._found, displacement=displacement, squared_norm=scalar(p.dot(p))
        )  # (Z s) (p / s) = Z p

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        return self._inside.pull_back(weights, refine) * self._units.vector

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        return self._inside.doubt(self._found, look)


class Metric(ABC):
    """A rule for D."""

    name: ClassVar[str]

    @abstractmethod
    def after(self, moments: Moments, quadratic: Quadratic, steps: int) -> dict[str, Tensor]:
        """The moments with those of a step, after so many others."""

    @abstractmethod
    def units(self, moments: Moments, plan: Plan) -> Units:
        """s of the moments."""


class AdamMetric(Metric):
    """See the module docstring."""

    name = "adam"

    def after(self, moments: Moments, quadratic: Quadratic, steps: int) -> dict[str, Tensor]:
        share = max(1 - FORGETTING, 1 / (steps + 1))  # a plain mean at first
        result: dict[str, Tensor] = {}
        for name, own in quadratic.all_of_gradient().items():
            square = own.square()
            if square.dim() > 1:
                square = square.flatten(1)
                result[f"{name}.rows"], result[f"{name}.columns"] = square.mean(1), square.mean(0)
            else:
                result[name] = square
        return {
            key: torch.lerp(moments[key].to(value), value, share) if key in moments else value
            for key, value in result.items()
        }

    def units(self, moments: Moments, plan: Plan) -> Units:
        tiny, relative = torch.finfo(plan.dtype).tiny, []
        means = {name: moments[name if name in moments else f"{name}.rows"].mean() for name in plan.parameters}
        sizes = torch.tensor([float(own.numel()) for own in plan.parameters.values()], dtype=plan.dtype)
        weights = (sizes / sizes.sum()).to(plan.device)
        mean = torch.dot(torch.stack(list(means.values())), weights).clamp_min(tiny)
        for name in plan.parameters:
            if name in moments:
                relative.append(moments[name].flatten() / mean)
            else:
                relative.append(moments[f"{name}.rows"] / mean)
                relative.append(moments[f"{name}.columns"] / means[name].clamp_min(tiny))
        # s = D^{-1/2} of all of them at once: they are many, and small
        units = torch.cat(relative).add_(SMALLEST).pow_(-0.5 * POWER).split([len(own) for own in relative])
        parts, factors = iter(units), dict[str, tuple[Tensor, ...]]()
        for name in plan.parameters:
            factors[name] = (next(parts),) if name in moments else (next(parts), next(parts))
        for names in plan.owned.values():
            weight, bias = names.get("weight"), names.get("bias")
            if weight is None or bias is None or len(factors[weight]) != 2:
                continue
            if factors[weight][0].shape == plan.parameters[bias].shape:
                factors[bias] = (factors[weight][0],)
        return Units(plan, factors)


class DiagonalMetric(Metric):
    """See the module docstring."""

    name = "diagonal"

    def after(self, moments: Moments, quadratic: Quadratic, steps: int) -> dict[str, Tensor]:
        (divisor,) = compute(quadratic.divisor)
        squares = quadratic.all_rows.squared_columns(quadratic.curvature_rows)
        diagonal = {name: own / divisor for name, own in squares.items()}
        return {
            name: torch.maximum(moments[name].to(own), own) if name in moments else own
            for name, own in diagonal.items()
        }

    def units(self, moments: Moments, plan: Plan) -> Units:
        largest = torch.stack([own.max() for own in moments.values()]).max()
        least = (4 * torch.finfo(largest.dtype).eps) ** 2 * largest
        # where nothing moves the outputs at all B and g are zero, and so is p, whatever D is
        instead = torch.where(largest > 0, largest, 1.0)
        return Units(
            plan, {name: (torch.where(own > least, own, instead).rsqrt(),) for name, own in moments.items()}
        )


METRICS: dict[str, Metric] = {kind.name: kind for kind in (AdamMetric(), DiagonalMetric())}


def next_units(metric: Metric, state: Mapping[str, Any], quadratic: Quadratic) -> tuple[Units, dict[str, Any]]:
    """The units of a step, and the state after it: {"steps": so many, "moments": {...}}."""
    plan = quadratic.plan
    placed = {name: own.to(device=plan.device, dtype=plan.dtype) for name, own in state.get("moments", {}).items()}
    steps = state.get("steps", 0)
    moments = metric.after(placed, quadratic, steps)
    return metric.units(moments, plan), {"steps": steps + 1, "moments": moments}
