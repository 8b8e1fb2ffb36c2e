"""Value, gradient, Laplacian and mixed derivatives of a network in its inputs, by one pass on jets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial, reduce
from itertools import combinations
from math import factorial, prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from woodbury.device.constants import constant_tensor, identity
from woodbury.jets import Function, Jet, NoRuleError, Parts, run
from woodbury.taylor import Corrected, derivatives_along

Index = tuple[int, ...]  # axes in order, as often as a derivative is taken along each


class Laplacian(NamedTuple):
    """What `laplacian` returns for points (n, d) and outputs (n, C)."""

    value: Tensor  # (n, C)
    gradient: Tensor  # (n, C, d)
    laplacian: Tensor  # (n, C)


def laplacian(model: Function, points: Tensor, weights: Sequence[float] | Tensor | None = None) -> Laplacian:
    """Value, gradient and sum_i w_i d2/dx_i2 of model(points), in the points (n, d) of one sample each.

    The model may be a function, such as `lambda x: net(x)[:, :1]`.
    weights are the d numbers w, ones by default: for u(t, x) they are (0, 1) to get u_xx, (1, -1) for the wave
    operator. A tensor (n, d) gives each point its own.

    With v the values of a layer, v_i their derivatives along the axes and l = sum_i w_i d2v/dx_i2, a function f
    makes f(v), f'(v) v_i and f'(v) l + sum_i w_i f''(v)[v_i, v_i] of them. Arithmetic on points and outputs is
    followed as layers are, so that `x * (1 - x) * net(x)` costs what the network costs. Functions without a rule
    go through nested forward mode. All three results can be differentiated in the parameters. Linear layers are
    called on (n, positions, features), so that optimizers get their rows by the rule for sequences: a model whose
    parameters all belong to Linear layers needs no `fallback=`.
    """
    n, d = _check(points)
    weights = [1.0] * d if weights is None else weights
    shape = tuple(weights.shape) if isinstance(weights, Tensor) else (len(weights),)
    if shape not in ((d,), (n, d)):
        raise ValueError(
            f"weights have the shape {shape}: give one per axis, ({d},), or a tensor with a row for each point, "
            f"({n}, {d})"
        )
    start = identity(d, points.dtype, points.device).expand(n, d, d)
    jet = run(model, Jet(_Sum(weights, points), points, [start, None]))
    slopes, bend = jet.filled_parts()
    return Laplacian(jet.value, slopes.movedim(1, -1), (bend + bend).squeeze(1))


def derivatives(model: Function, points: Tensor, axes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Derivatives of model(points) in the points (n, d), (n, C) each, along the axes that each tuple names.

    For u(t, x) the axes [(), (0,), (1, 1, 1), (0, 1)] give u, u_t, u_xxx, u_tx. All come from one pass on Taylor
    coefficients, u(x + h) = sum_a u_a h^a, where the derivative along a is a! u_a. With c_j = phi^(j)(z_0) / j!,

        (u v)_a = sum_{b + c = a} u_b v_c,    phi(z)_a = sum_j c_j ((z - z_0)^j)_a    (Faa di Bruno's formula)

    The pass carries the derivatives asked for and those that they are made of: (1, 1, 1) brings (1,) and (1, 1).
    Models, layer rules and what has no rule are as with `laplacian`.
    """
    n, d = _check(points)
    wanted = [tuple(sorted(own)) if hasattr(own, "__iter__") else (d,) for own in axes]
    if any(axis not in range(d) for own in wanted for axis in own):
        raise ValueError(f"axes are {axes}: give a list of tuples of numbers from 0 to {d - 1}, such as [(0, 0)]")
    kind = _Chosen(wanted)
    if not kind.widths:
        return tuple(model(points) for _ in wanted)
    start = _units(tuple(axis for (axis,) in kind.levels[0]), d, points.dtype, points.device)
    jet = run(model, Jet(kind, points, [start.expand(n, -1, -1), *[None] * (len(kind.widths) - 1)]))
    found: dict[Index, Tensor] = {(): jet.value}
    for level, part in zip(kind.levels, jet.filled_parts(), strict=True):
        found |= {own: _factorial(own) * column for own, column in zip(level, part.unbind(1), strict=True)}
    return tuple(found[own] for own in wanted)


def _check(points: Tensor) -> torch.Size:
    if not isinstance(points, Tensor):
        raise TypeError(f"points must be a tensor (n, d), one row per point, not {type(points).__name__}")
    if points.dim() != 2:
        raise ValueError(f"points must have the shape (n, d), one row per point, not {tuple(points.shape)}")
    if isinstance(points, Jet):
        raise NoRuleError("derivatives of derivatives: use woodbury.derivatives(model, x, [(0, 0, 0, 0)])")
    return points.shape


@constant_tensor
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@constant_tensor
def _units(axes: Index, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(d, dtype=dtype, device=device)[list(axes)]


class _Sum:
    """All first derivatives, and sum_i w_i d2/dx_i2 / 2 in place of the second ones."""

    def __init__(self, weights: Sequence[float] | Tensor, points: Tensor) -> None:
        d = points.shape[1]
        self.widths, self._start, self._end = (d, 1), 0, d
        self._weights = weights if isinstance(weights, Tensor) else None  # None: all are 1 from start to end
        if not isinstance(weights, Tensor):
            counted = [axis for axis in range(d) if weights[axis] != 0]
            self._start, self._end = (counted[0], counted[-1] + 1) if counted else (0, 0)
            numbers = tuple(weights[self._start : self._end])
            if any(number != 1 for number in numbers):
                self._weights = _constant(numbers, points.dtype, points.device)

    def multiply(self, u: Tensor, v: Tensor, degrees: tuple[int, int]) -> Tensor:
        own = self._counted(u)
        return self._sum(own.square() if u is v else own * self._counted(v))

    def _counted(self, terms: Tensor) -> Tensor:
        """Without axes at both ends whose weights are 0."""
        return terms[:, self._start : self._end]

    def _sum(self, terms: Tensor) -> Tensor:
        """sum_i w_i terms_i for terms (n, d, ...) of the axes that count."""
        if self._weights is not None:
            terms = terms * self._weights.reshape(*self._weights.shape, *[1] * (terms.dim() - 2))
        return terms.sum(1, keepdim=True)

    def push(self, function: Function, values: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> Parts:
        """By f' v_i and f''[v_i, v_i] along every axis, and f'[l]."""
        at, slopes = tuple(values), [first for first, _ in parts]
        derive = lambda *along: derivatives_along(lambda point: function(*point), at, along)[1:]  # noqa: E731
        pushed, bends = torch.func.vmap(derive, in_dims=1)(*slopes)  # (d, n, ...), as zeros may have no such axis
        with Corrected():
            _, bend = cast(Any, torch.func.jvp(function, at, tuple(own.squeeze(1) for _, own in parts)))
        return [pushed.movedim(0, 1), self._sum(self._counted(bends.movedim(0, 1))) / 2 + bend.unsqueeze(1)]


class _Chosen:
    """Some derivatives, and all that they are made of, as Taylor coefficients: divided by the factorials."""

    def __init__(self, wanted: Sequence[Index]) -> None:
        every = {own for index in wanted for size in range(1, len(index) + 1) for own in combinations(index, size)}
        degree = max(map(len, wanted), default=0)
        self.levels = [sorted(own for own in every if len(own) == k) for k in range(1, degree + 1)]
        self.widths = [len(level) for level in self.levels]
        self._places = {index: place for level in self.levels for place, index in enumerate(level)}

    def multiply(self, u: Tensor, v: Tensor, degrees: tuple[int, int]) -> Tensor:
        left, right = u.unbind(1), v.unbind(1)
        columns = []
        for index in self.levels[sum(degrees) - 1]:
            pairs = _splits(index, degrees[0])
            columns.append(reduce(torch.add, [left[self._places[a]] * right[self._places[b]] for a, b in pairs]))
        return torch.stack(columns, 1) if len(columns) > 1 else columns[0].unsqueeze(1)

    def push(self, function: Function, values: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> Parts:
        """d/dx_i g(v, w, ...) = g'[v_i, w_i, ...], for g = f, then for g = its derivative, and so on."""
        at: dict[Index, tuple[Tensor, ...]] = {(): tuple(values)}
        for degree, level in enumerate(self.levels):
            columns = zip(*(own[degree].unbind(1) for own in parts), strict=True)
            for index, own in zip(level, columns, strict=True):
                at[index] = tuple(_factorial(index) * c for c in own)

        def derive(index: Index) -> Tensor:
            g: Function = lambda own: function(*own)  # noqa: E731
            needed: list[Index] = [()]  # the derivatives that g takes
            for axis in index:
                g = partial(_derivative, g)
                needed += [(*own, axis) for own in needed]
            return g(*[at[own] for own in needed]) / _factorial(index)

        with Corrected():
            return [torch.stack([derive(index) for index in level], 1) for level in self.levels]


def _derivative(g: Function, *state: Any) -> Any:
    """Along the second half of the state, at the first."""
    half = len(state) // 2
    return cast(Any, torch.func.jvp(g, state[:half], state[half:]))[1]


@cache
def _splits(index: Index, size: int) -> list[tuple[Index, Index]]:
    """The different ways to take `size` axes out of some, and those that are left."""
    parts = dict.fromkeys(combinations(index, size))
    return [(part, tuple(sorted((Counter(index) - Counter(part)).elements()))) for part in parts]


def _factorial(index: Index) -> int:
    return prod(map(factorial, Counter(index).values()))
