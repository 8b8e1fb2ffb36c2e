"""DeepXDE: a compiled `dde.Model` is fitted by Gauss-Newton steps in place of `model.train`.

>>> model.compile("adam", lr=1e-3)
>>> losshistory, train_state = woodbury.deepxde.fit(model, seconds=60)

Every condition becomes a term of `woodbury.Equations`, with the residuals that DeepXDE would square:

    f = sum_i w_i mean |r_i|^2,    r_i = pde(x, u)[i] at points of the domain, or bc.error(...) at its own points

What DeepXDE remembers of its training points (values of boundary functions, Jacobians) is not used for others.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import deepxde as dde
import numpy as np
import torch
from deepxde.icbc.boundary_conditions import BC, Interface2DBC, PointSetBC, PointSetOperatorBC
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from woodbury.fit import Equations
from woodbury.fit import fit as fit_terms

POOL = 4096  # points of boundary and start that conditions draw from
LOOKS = 50  # times that DeepXDE's own loss is computed on the way
POINTS = {"by residual", "as drawn", "given"}
PROBE = 64  # points that show whether a geometry can draw
REMEMBERED = 4  # sets of points whose boundary values are kept
_PAIRS = (dde.icbc.PeriodicBC, Interface2DBC)  # a residual belongs to two points
_SETS = (PointSetBC, PointSetOperatorBC)
_NO_POINTWISE = (dde.data.IDE, dde.data.FPDE)  # integral and fractional operators


def fit(
    model: Any,
    seconds: float | None = 60.0,
    *,
    steps: int | None = None,
    points: str = "by residual",
    weights: str = "given",
    double: bool = True,
    callbacks: Sequence[Any] | None = None,
    verbose: int = 1,
) -> tuple[Any, Any]:
    """Train a compiled `dde.Model` and return (losshistory, train_state), as `model.train` does.

    Args:
        model: as it is compiled, new or trained before. It ends with the lowest training loss by DeepXDE's own
            account that was seen, those of the parameters that it had included.
        seconds, steps: where to stop, whichever comes first.
        points: "by residual" and "as drawn" draw points from the geometry in every step, as `woodbury.fit` does;
            conditions whose points the geometry cannot draw, and measured values, keep those they have. "given"
            takes the training points that the model has.
        weights: "given", those of `model.compile(loss_weights=...)`, or "balanced", by the length of rows.
        double: compute in float64, whatever the type of the model, which comes back in its own.
        callbacks: of DeepXDE, called after every step.
        verbose: 1 shows DeepXDE's losses and metrics.

    Raises:
        ValueError, TypeError: for what cannot be taken; the model stays as it was.
    """
    started = time.perf_counter()
    if points not in POINTS or weights not in ("given", "balanced"):
        raise ValueError(f"deepxde.fit: points={points!r}, weights={weights!r}: use {POINTS}, 'given' or 'balanced'")
    _check_model(model, callbacks)
    run = _Run(model, callbacks, verbose)
    with run.put_back_on_error():
        problem = _Problem(model)
        problem.check(run)
        run.begin()
        if double:
            run.cast(torch.float64)
            try:
                problem.losses(run.solution)
            except RuntimeError:  # a function of the user multiplies by a matrix of the given type
                run.cast(None)
        terms = problem.terms(run.solution, points, balanced=weights == "balanced")
        if seconds is not None:
            run.deadline, run.pause = started + seconds, seconds / LOOKS
        fit_terms(
            run.solution,
            Equations(**terms),
            seconds=None if seconds is None else max(run.deadline - time.perf_counter(), 0.0),
            steps=steps,
            points="as drawn" if points == "given" else points,
            progress=False,
            callback=run.note,
        )
        run.end()
    return model.losshistory, model.train_state


def _check_model(model: Any, callbacks: Sequence[Any] | None) -> None:
    """Raise an error that names what cannot be taken."""
    if not isinstance(model, dde.Model):
        raise TypeError(f"deepxde.fit: model must be a dde.Model, got {type(model).__name__}")
    if dde.backend.backend_name != "pytorch":
        raise ValueError(
            f"deepxde.fit: the back end of DeepXDE is {dde.backend.backend_name}: set DDE_BACKEND=pytorch before "
            "deepxde is imported"
        )
    if model.outputs_losses_train is None:
        raise ValueError("deepxde.fit: the model is not compiled: call model.compile first")
    kind = type(model.data).__name__
    if not isinstance(model.data, dde.data.PDE) or isinstance(model.data, _NO_POINTWISE):
        raise ValueError(
            f"deepxde.fit: dde.data.{kind} cannot be taken: residuals at a point must depend on that point alone, "
            "as those of dde.data.PDE and TimePDE do (no integral or fractional operators, no operator learning)"
        )
    if dde.config.autodiff != "reverse":
        raise ValueError("deepxde.fit: use dde.config.set_default_autodiff('reverse')")
    if model.net.regularizer is not None:
        raise ValueError(f"deepxde.fit: the network has the regularizer {model.net.regularizer}: leave it out")
    for bc in model.data.bcs:
        if getattr(bc, "batch_size", None) is not None:
            raise ValueError(f"deepxde.fit: {type(bc).__name__}(batch_size=...): leave batch_size out")
    if any(isinstance(own, dde.callbacks.PDEPointResampler) for own in callbacks or ()):
        raise ValueError("deepxde.fit: PDEPointResampler: leave it out, points are drawn in every step")


# -- residuals ------------------------------------------------------------------------------------------------


class _Solution(nn.Module):
    """The network, and the unknown numbers outside it, with the same memory."""

    def __init__(self, net: nn.Module, unknowns: Sequence[Tensor]) -> None:
        super().__init__()
        self.net, self.named = net, tuple(unknowns)
        self.unknowns = nn.ParameterList([nn.Parameter(own.detach()) for own in unknowns])


class _Exchange(TorchFunctionMode):
    """Inside, functions of torch take other tensors for some: a pde knows its unknowns by name."""

    def __init__(self, solution: _Solution) -> None:
        super().__init__()
        self.others = {id(own): solution.unknowns[place] for place, own in enumerate(solution.named)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda leaf: self.others.get(id(leaf), leaf), (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def _precision(dtype: torch.dtype) -> Iterator[None]:
    """DeepXDE makes tensors of this type."""
    before, default = dde.config.real.precision, torch.get_default_dtype()
    try:
        getattr(dde.config.real, f"set_float{torch.finfo(dtype).bits}")()
        torch.set_default_dtype(dtype)
        yield
    finally:
        getattr(dde.config.real, f"set_float{before}")()
        torch.set_default_dtype(default)


def _evaluate(solution: _Solution, x: Tensor, function: Callable[[Tensor, Tensor, Any], Tensor]) -> Tensor:
    """function(inputs, outputs, the inputs as an array); x is (n, d), or (n, 2, d) for pairs of points.

    DeepXDE has the second points of all pairs after the first ones; in the network the two are neighbours.
    """
    follow, inputs = torch.is_grad_enabled(), x.detach()
    inputs = inputs.transpose(0, 1).flatten(0, 1) if x.dim() == 3 else inputs
    exchanged = _Exchange(solution) if solution.named else nullcontext()
    with torch.enable_grad(), _precision(x.dtype), exchanged:
        inputs = inputs.requires_grad_()
        if x.dim() == 3:
            neighbours = inputs.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            outputs = solution.net(neighbours).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        else:
            outputs = solution.net(inputs)
        try:
            result = function(inputs, outputs, inputs.detach().cpu().numpy())
        finally:
            dde.grad.clear()
    return result if follow else result.detach()


class _Values:
    """The values of a function at points, remembered by what the points are."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.known = function, {}  # type: ignore[var-annotated]

    def __call__(self, X: Any, start: int = 0, end: int | None = None, _: Any = None) -> Any:
        key = X[start:end].tobytes()
        if key not in self.known:
            while len(self.known) >= REMEMBERED:
                del self.known[next(iter(self.known))]
            self.known[key] = self.function(X[start:end])
        return self.known[key]


def _without_cache(bc: Any) -> Any:
    """A copy of a condition that looks at points, and not at the identity of their array."""
    own = copy.copy(bc)
    for name in ("func", "boundary_normal"):
        function = getattr(bc, name, None)
        if getattr(getattr(function, "__code__", None), "co_name", "") == "wrapper_cache":
            setattr(own, name, _Values(function.__wrapped__))
    return own


class _Problem:
    """The equation and the conditions of a model as terms."""

    def __init__(self, model: Any) -> None:
        self.model, self.data = model, model.data
        inputs = self.data.train_next_batch(model.batch_size)
        self.theirs = model._outputs_losses(True, *inputs)[1]  # DeepXDE's losses, weighted
        weights = np.broadcast_to(1.0 if model.loss_weights is None else model.loss_weights, len(self.theirs))
        self.equations = len(weights) - len(self.data.bcs)
        self.weights = [float(own) for own in weights]
        self.auxiliary = _Values(lambda X: torch.as_tensor(self.data.auxiliary_var_fn(X).astype(X.dtype)))

    def terms(self, solution: _Solution, points: str, balanced: bool = False) -> dict[str, tuple[Any, ...]]:
        """(source, function, weight) of the equation and of every condition, for `Equations`."""
        like, data = next(solution.parameters()).detach(), self.data
        edges: dict[str, Any] = {}
        if points != "given":
            with suppress(Exception):  # a geometry that cannot draw raises errors of many kinds
                edges = _draw_edges(data)
        terms: dict[str, tuple[Any, ...]] = {}
        if self.equations:
            source: Any = _tensor(data.train_x_all, like)
            if points != "given" and data.num_domain > 0:
                with suppress(Exception):
                    source = _draw_inside(data, edges, like)
            weights = [1.0] * self.equations if balanced else self.weights
            function = partial(_evaluate, function=partial(self._equation, weights=weights))
            terms["equation"] = (source, function, None if balanced else 1.0)
        ends = np.cumsum([0, *data.num_bcs])
        for place, bc in enumerate(data.bcs):
            weight, own = self.weights[self.equations + place], _without_cache(bc)
            x: Any = _arrange(bc, data.train_x[ends[place] : ends[place + 1]], like)
            if isinstance(bc, _SETS):  # what is measured is subtracted later
                own.values, values = 0.0, bc.values.to(like)
                x = (x, values.expand(len(x), values.shape[1] if values.dim() > 1 else 1))
            elif edges and isinstance(bc, BC | dde.icbc.IC):
                pool = _arrange(bc, bc.collocation_points(np.vstack(list(edges.values()))), like)
                x = partial(_choose, pool) if len(pool.unique(dim=0)) > len(x) else x
            if weight > 0:
                function = partial(_evaluate, function=partial(_error, own))
                terms[f"{type(bc).__name__} {place + 1}"] = (x, function, None if balanced else weight)
        return terms

    def _equation(self, inputs: Tensor, outputs: Tensor, X: Any, weights: Sequence[float]) -> Tensor:
        """Numbers (n, K), whose mean square is the weighted sum of the mean squares of the equations."""
        more = []
        if self.data.auxiliary_var_fn is not None:
            more = [self.auxiliary(X)]
            self.model.net.auxiliary_vars = more[0]
        found = self.data.pde(inputs, outputs, *more)
        parts = [own.reshape(len(X), -1) for own in (found if isinstance(found, list | tuple) else [found])]
        width = sum(part.shape[1] for part in parts)
        scales = [(weight * width / part.shape[1]) ** 0.5 for part, weight in zip(parts, weights, strict=False)]
        return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], 1)

    def losses(self, solution: _Solution) -> dict[str, float]:
        """The weighted mean squares at the training points, each computed on two halves of them."""
        losses = {}
        with torch.no_grad():
            for name, (source, function, weight) in self.terms(solution, "given").items():
                x, target = source if isinstance(source, tuple) else (source, 0.0)
                found = torch.cat([function(solution, half) for half in x.tensor_split(2) if len(half)])
                if len(found) != len(x):
                    raise ValueError(f"deepxde.fit: {name} gives {len(found)} residuals at {len(x)} points")
                losses[name] = weight * float((found - target).square().mean())
        return losses

    def check(self, run: _Run) -> None:
        """Raise an error unless the losses of the terms are those that DeepXDE minimizes."""
        if not np.isfinite(self.theirs).all():
            raise ValueError(f"deepxde.fit: the losses of the model are {self.theirs}: not all are numbers")
        losses = _loss_functions(self.model)
        error = torch.tensor([[-1.0], [2.0], [4.0]])
        for loss in losses if isinstance(losses, list | tuple) else [losses]:
            for own in (error, error / 8):
                if not torch.allclose(torch.as_tensor(loss(torch.zeros_like(own), own)), own.square().mean()):
                    raise ValueError(f"deepxde.fit: the loss {getattr(loss, '__name__', loss)} is no mean of squares")
        inputs = self.data.train_next_batch(self.model.batch_size)
        with run.moved():  # where no loss is small
            theirs, mine = self.model._outputs_losses(True, *inputs)[1], self.losses(run.solution)
        theirs = [theirs[: self.equations].sum()] * bool(self.equations) + list(theirs[self.equations :])
        theirs = [own for own, weight in zip(theirs, [1.0] * bool(self.equations) + self.weights[self.equations:]) if weight > 0]
        share = torch.finfo(next(run.solution.parameters()).dtype).eps ** 0.5
        for (name, own), other in zip(mine.items(), theirs, strict=True):
            if np.isfinite(other) and not abs(own - other) <= 10 * share * abs(other):
                raise ValueError(
                    f"deepxde.fit: {name} cannot be taken: its residuals at some points depend on other points of "
                    "the batch, or on random numbers"
                )


def _error(bc: Any, inputs: Tensor, outputs: Tensor, X: Any) -> Tensor:
    return bc.error(X, inputs, outputs, 0, len(X))


def _loss_functions(model: Any) -> Any:
    """What the model was compiled with: DeepXDE hands it to `data.losses_train`."""
    found, data = [], model.data
    method = data.losses_train

    def spy(targets: Any, outputs: Any, loss_fn: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(loss_fn)
        return method(targets, outputs, loss_fn, *args, **kwargs)

    data.losses_train = spy
    try:
        model._outputs_losses(True, *data.train_next_batch(model.batch_size))
    finally:
        del data.losses_train
    return found[0]


# -- points ---------------------------------------------------------------------------------------------------


def _tensor(X: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(X).to(like)


def _arrange(bc: Any, X: Any, like: Tensor) -> Tensor:
    """(n, d), or (n, 2, d) for pairs."""
    x = _tensor(X, like)
    return x.unflatten(0, (2, -1)).transpose(0, 1) if isinstance(bc, _PAIRS) else x


def _choose(pool: Tensor, count: int) -> Tensor:
    return pool[torch.randint(len(pool), (count,), device=pool.device)]


def _draw_edges(data: Any) -> dict[str, Any]:
    """Points of the kinds that the training points have beside those inside."""
    edges = {} if data.anchors is None else {"anchors": data.anchors}
    if data.num_boundary > 0:
        edges["boundary"] = data.geom.random_boundary_points(POOL)
    if getattr(data, "num_initial", 0) > 0:
        edges["initial"] = data.geom.random_initial_points(POOL)
    return edges


def _draw_inside(data: Any, edges: Mapping[str, Any], like: Tensor) -> Callable[[int], Tensor]:
    """A function that draws points of the equation: all kinds of training points, in the shares they have."""
    numbers = {"boundary": data.num_boundary, "initial": getattr(data, "num_initial", 0)}
    if "anchors" in edges:
        numbers["anchors"] = len(edges["anchors"])
    total = data.num_domain + sum(numbers.values())

    def draw(count: int) -> Tensor:
        parts = [own[np.random.randint(len(own), size=count * numbers[kind] // total)] for kind, own in edges.items()]
        wanted = count - sum(map(len, parts))
        inside = data.geom.random_points(wanted)
        if len(inside) != wanted:  # a cloud has only so many
            inside = inside[np.random.randint(len(inside), size=wanted)]
        return _tensor(np.vstack([*parts, inside]), like)

    draw(PROBE)  # raises where the geometry cannot
    return draw


# -- the model ------------------------------------------------------------------------------------------------


class _Run:
    """The state of a model of DeepXDE during a fit."""

    def __init__(self, model: Any, callbacks: Sequence[Any] | None, verbose: int) -> None:
        self.model, self.verbose = model, verbose
        self.callbacks = dde.callbacks.CallbackList(callbacks=list(callbacks or []))
        self.callbacks.set_model(model)
        self.tensors = [*model.net.parameters(), *model.net.buffers(), *model.external_trainable_variables]
        self.needs = [own.requires_grad for own in self.tensors]
        self.first = [own.data for own in self.tensors]
        self.deadline, self.pause, self.next_look = float("inf"), 0.0, 0.0
        self.cast(None)

    def load(self, values: Sequence[Tensor]) -> None:
        for own, value in zip(self.tensors, values, strict=True):
            own.data = value

    def cast(self, dtype: torch.dtype | None) -> None:
        """Train copies of the parameters, of this type or of the one they have."""
        copies = [own.to(dtype) if dtype and own.is_floating_point() else own.clone() for own in self.first]
        self.load(copies)
        self.solution = _Solution(self.model.net, self.model.external_trainable_variables)

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """The model in its own type, as DeepXDE and callbacks know it."""
        mine, training = [own.data for own in self.tensors], self.model.net.training
        self.load([own.to(first.dtype) for own, first in zip(mine, self.first, strict=True)])
        try:
            yield
        finally:
            self.load(mine)
            self.model.net.train(training)
            for own, needs in zip(self.tensors, self.needs, strict=True):
                own.requires_grad_(needs)

    @contextmanager
    def moved(self) -> Iterator[None]:
        """The parameters somewhere else."""
        mine = [own.data for own in self.tensors]
        generator = torch.Generator(device="cpu").manual_seed(0)
        noise = [torch.randn(own.shape, generator=generator, device="cpu").to(own) for own in mine]
        self.load([own + 0.1 * other for own, other in zip(mine, noise, strict=True)])
        try:
            with self.as_given():
                yield
        finally:
            self.load(mine)

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.load(self.first)
            raise

    def look(self) -> None:
        """Compute DeepXDE's losses, show them, and keep the parameters if they are the best."""
        with self.as_given():
            self.model._test(verbose=self.verbose)
        loss = float(np.sum(self.model.train_state.loss_train))
        if loss < self.best_loss:
            self.best_loss, self.best = loss, [own.data.clone() for own in self.tensors]
        self.looked = self.model.train_state.step
        self.next_look = time.perf_counter() + self.pause

    def begin(self) -> None:
        """As `model.train` begins."""
        model, self.best_loss = self.model, float("inf")
        model.stop_training, model.callbacks = False, self.callbacks
        model.train_state.set_data_train(*model.data.train_next_batch(model.batch_size))
        model.train_state.set_data_test(*model.data.test())
        self.look()
        self.callbacks.on_train_begin()

    def note(self, fit: Any) -> bool:
        """After a step; whether to stop."""
        state = self.model.train_state
        state.iteration, state.step = state.iteration + 1, state.step + 1
        if time.perf_counter() >= self.next_look:
            self.look()
        if self.callbacks.callbacks:
            with self.as_given():
                self.callbacks.on_batch_end()
                self.callbacks.on_epoch_end()
        return self.model.stop_training or time.perf_counter() >= self.deadline

    def end(self) -> None:
        """Leave the best parameters, in their own type, and what DeepXDE says of them."""
        self.look()
        for first, best in zip(self.first, self.best, strict=True):
            first.copy_(best)
        self.load(self.first)
        self.model._test(verbose=self.verbose)
        self.callbacks.on_train_end()
