"""The equation and the conditions of a `dde.Model` as terms of `woodbury.Equations`, for `woodbury.deepxde`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import deepxde as dde
import numpy as np
import torch
from deepxde.icbc.boundary_conditions import BC, Interface2DBC, PointSetBC, PointSetOperatorBC
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

POOL = 2048  # points of the boundary, and of the start, that conditions choose from
_PAIRS, _SETS = (dde.icbc.PeriodicBC, Interface2DBC), (PointSetBC, PointSetOperatorBC)  # of two points; measured


class Solution(nn.Module):
    """The network, and the unknown numbers outside it, in the same memory."""

    def __init__(self, net: nn.Module, unknowns: Sequence[Tensor]) -> None:
        super().__init__()
        self.net, self.originals = net, tuple(unknowns)
        self.unknowns = nn.ParameterList([nn.Parameter(own.detach()) for own in unknowns])


class _Exchange(TorchFunctionMode):
    """Inside, functions of torch take the unknowns of a solution for those that the equation was written with."""

    def __init__(self, solution: Solution) -> None:
        super().__init__()
        self.others = {id(own): solution.unknowns[place] for place, own in enumerate(solution.originals)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._exchange(args), **{name: self._exchange(own) for name, own in (kwargs or {}).items()})

    def _exchange(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._exchange, value)) if type(value) in (tuple, list) else value
        return self.others.get(id(value), value)


@contextmanager
def _precision(dtype: torch.dtype) -> Iterator[None]:
    """Inside, DeepXDE makes tensors of this type."""
    real, default = dde.config.real, torch.get_default_dtype()
    before = real.precision
    try:
        getattr(real, f"set_float{torch.finfo(dtype).bits}")()
        torch.set_default_dtype(dtype)
        yield
    finally:
        getattr(real, f"set_float{before}")()
        torch.set_default_dtype(default)


def _evaluate(solution: Solution, x: Tensor, function: Callable[[Tensor, Tensor, Any], Tensor]) -> Tensor:
    """function(inputs, outputs, the inputs as an array); x is (n, d), or (n, 2, d) for pairs of points.

    DeepXDE has the second points of all pairs after the first ones; in the network the two are neighbours, as
    those that belong to one sample have to be.
    """
    follow, together = torch.is_grad_enabled(), 2 if x.dim() == 3 else 1
    exchange = _Exchange(solution) if solution.originals else nullcontext()
    with torch.enable_grad(), _precision(x.dtype), exchange:
        inputs = x.reshape(len(x), together, -1).transpose(0, 1).flatten(0, 1).detach().requires_grad_()
        neighbours = inputs.unflatten(0, (together, -1)).transpose(0, 1).flatten(0, 1)
        outputs = solution.net(neighbours).unflatten(0, (-1, together)).transpose(0, 1).flatten(0, 1)
        try:
            result = function(inputs, outputs, inputs.detach().cpu().numpy())
        finally:
            dde.grad.clear()
    return result if follow else result.detach()


def _without_cache(bc: Any) -> Any:
    """A copy of a condition that looks at the points, and not at which array they are in."""
    own = copy.copy(bc)
    for name in ("func", "boundary_normal"):
        function: Any = getattr(bc, name, None)
        if getattr(getattr(function, "__code__", None), "co_name", "") == "wrapper_cache":
            bare = function.__wrapped__ if name == "func" else _remember(function.__wrapped__)
            setattr(own, name, lambda X, start, end, _, bare=bare: bare(X[start:end]))
    return own


MOST_KNOWN = 2**15  # points whose normals are kept: new ones are drawn in every step


def _remember(normals: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """The same, computed once for each point: of some geometries this takes most of the time."""
    known: dict[bytes, Tensor] = {}

    def of(X: Any) -> Tensor:
        if len(known) > MOST_KNOWN:
            known.clear()
        keys = [x.tobytes() for x in X]
        new = {key: x for key, x in zip(keys, X, strict=True) if key not in known}
        if new:
            known.update(zip(new, normals(np.stack([*new.values()])), strict=True))
        return torch.stack([known[key] for key in keys])

    return of


class Problem:
    """The equation and the conditions of a model as terms."""

    def __init__(self, model: Any) -> None:
        self.model, self.data = model, model.data
        losses = self.their_losses()
        if not np.isfinite(losses).all():
            raise ValueError(f"deepxde.fit: the losses of the model are {losses}: not all are numbers")
        self.equations = len(losses) - len(self.data.bcs)
        weights = 1.0 if model.loss_weights is None else model.loss_weights
        self.weights = np.broadcast_to(np.asarray(weights, float), len(losses)).tolist()
        if min(self.weights) < 0:
            raise ValueError(f"deepxde.fit: loss_weights must not be negative, got {self.weights}")
        self.conditions = [_without_cache(bc) for bc in self.data.bcs]
        self.names = [f"{type(bc).__name__} {place}" for place, bc in enumerate(self.data.bcs, 1)]
        domain = getattr(self.data.geom, "timedomain", self.data.geom)
        has_time = isinstance(domain, dde.geometry.TimeDomain) and self.equations
        # the column of the equation that is the time, unless its only conditions in time are at the end
        self.time = -1 if has_time and not self._runs_back(domain) else None

    def _runs_back(self, domain: Any) -> bool:
        ends, x = np.cumsum([0, *self.data.num_bcs]), self.data.train_x
        times = [x[start:end, -1] for start, end in pairwise(ends) if end > start]
        at_start, at_end = (any(np.isclose(own, t).all() for own in times) for t in (domain.t0, domain.t1))
        return at_end and not at_start

    def terms(self, solution: Solution, points: str, balanced: bool = False) -> dict[str, tuple[Any, ...]]:
        """(source, function, weight) of the equation and of every condition, for `Equations`."""
        like, data = next(solution.parameters()).detach(), self.data
        edges: list[tuple[int, Any]] = []
        terms: dict[str, tuple[Any, ...]] = {}
        source: Any = torch.as_tensor(data.train_x_all).to(like)
        if points != "given":
            with suppress(Exception):  # a geometry that cannot draw raises errors of many kinds
                edges = _draw_edges(data)
                source = _draw_inside(data, edges, like) if data.num_domain > 0 else source
        if self.equations:
            weights = [1.0] * self.equations if balanced else self.weights
            function = partial(_evaluate, function=partial(self._equation, weights=weights))
            terms["equation"] = (source, function, None if balanced else 1.0)
        ends = np.cumsum([0, *data.num_bcs])
        for place, bc in enumerate(data.bcs):
            weight, own = self.weights[self.equations + place], self.conditions[place]
            source = _arrange(bc, data.train_x[ends[place] : ends[place + 1]], like)
            if isinstance(bc, _SETS):  # what is measured is subtracted later
                own.values, values = 0.0, bc.values.to(like)
                width = len(bc.component) if isinstance(getattr(bc, "component", 0), list) else 1
                source = source, values.expand(len(source), width)
            elif edges and isinstance(bc, BC | dde.icbc.IC):
                pool = _arrange(bc, bc.collocation_points(np.vstack([own for _, own in edges])), like)
                if len(pool.unique(dim=0)) > len(source):
                    source = lambda count, pool=pool: pool[torch.randint(len(pool), (count,))]  # noqa: E731
            if weight > 0:
                error: Any = lambda x, y, X, bc=own: bc.error(X, x, y, 0, len(X))  # noqa: E731
                function = partial(_evaluate, function=error)
                terms[self.names[place]] = (source, function, None if balanced else weight)
        return terms

    def _equation(self, inputs: Tensor, outputs: Tensor, X: Any, weights: Sequence[float]) -> Tensor:
        """Numbers (n, K), whose mean square is the weighted sum of the mean squares of the equations."""
        auxiliary = self.data.auxiliary_var_fn
        more = [] if auxiliary is None else [torch.as_tensor(auxiliary(X).astype(X.dtype))]
        found = self.data.pde(inputs, outputs, *more)
        parts = [own.reshape(len(X), -1) for own in (found if isinstance(found, list | tuple) else [found])]
        width = sum(part.shape[1] for part in parts)
        scales = [(weight * width / part.shape[1]) ** 0.5 for part, weight in zip(parts, weights, strict=False)]
        return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], 1)

    def their_losses(self) -> Any:
        """DeepXDE's losses at the training points, weighted."""
        return self.model._outputs_losses(True, *self.data.train_next_batch(self.model.batch_size))[1]

    def losses(self, solution: Solution) -> dict[str, float]:
        """The weighted mean squares of the terms at the training points, each computed on two halves of them."""
        losses = {}
        with torch.no_grad():
            for name, (source, function, weight) in self.terms(solution, "given").items():
                x, target = source if isinstance(source, tuple) else (source, 0.0)
                found = torch.cat([function(solution, half) for half in x.tensor_split(2) if len(half)])
                losses[name] = weight * float((found - target).square().mean())
        return losses


def _arrange(bc: Any, X: Any, like: Tensor) -> Tensor:
    """(n, d), or (n, 2, d) for pairs."""
    x = torch.as_tensor(X).to(like)
    return x.unflatten(0, (2, -1)).transpose(0, 1) if isinstance(bc, _PAIRS) else x


def _draw_edges(data: Any) -> list[tuple[int, Any]]:
    """Points of each kind that training points have beside those inside, with the number of those."""
    edges = [] if data.anchors is None else [(len(data.anchors), data.anchors)]
    if data.num_boundary > 0:
        edges.append((data.num_boundary, data.geom.random_boundary_points(POOL)))
    if getattr(data, "num_initial", 0) > 0:
        edges.append((data.num_initial, data.geom.random_initial_points(POOL)))
    return edges


def _draw_inside(data: Any, edges: Sequence[tuple[int, Any]], like: Tensor) -> Callable[[int], Tensor]:
    """A function that draws points of the equation: all kinds of training points, in the shares they have."""
    total = data.num_domain + sum(number for number, _ in edges)

    def draw(count: int) -> Tensor:
        parts = [own[np.random.randint(len(own), size=count * number // total)] for number, own in edges]
        wanted = count - sum(map(len, parts))
        inside = data.geom.random_points(wanted)
        if len(inside) != wanted:  # of a cloud
            inside = inside[np.random.randint(len(inside), size=wanted)]
        return torch.as_tensor(np.vstack([*parts, inside])).to(like)

    draw(2)  # raises where the geometry cannot
    return draw
