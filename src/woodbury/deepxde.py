"""DeepXDE: a compiled `dde.Model` is fitted by Gauss-Newton steps in place of `model.train`.

>>> model.compile("adam", lr=1e-3)
>>> fit = woodbury.deepxde.fit(model, seconds=60)

Equation and conditions become terms of `woodbury.Equations`, with the residuals that DeepXDE squares:

    f = sum_i w_i mean |r_i|^2,    r_i = pde(x, u)[i] in the domain, or bc.error(...) at points of its own

What DeepXDE remembers of its training points (values of boundary functions, Jacobians) is not used for others.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import deepxde as dde
import numpy as np
import torch
from torch import Tensor, nn

from woodbury._deepxde import Problem, Solution
from woodbury.fit.equations import Equations, TermSource
from woodbury.fit.limits import Limits
from woodbury.fit.result import Fit
from woodbury.fit.run import PLAIN
from woodbury.fit.solving import FEW, SolvingRun
from woodbury.optim import GaussNewton

POINTS, WEIGHTS = ("by residual", "as drawn", "given"), ("auto", "given", "balanced")
FEWEST = 64  # points of the equation at first
LARGE = 16 * FEW  # parameters: with more, steps have half the points, and momentum makes up for the others
STEPS: dict[str, Any] = {"fallback": "autograd", "gram_dtype": torch.float64, "damping": PLAIN}
LARGE_STEPS = STEPS | {"momentum": 0.9, "damping": replace(PLAIN, initial=1e-3)}
TURNS, PARTS = 12, 5  # parts of the time: Gauss-Newton steps have one in a turn, the other optimizer 5, 20, ...
# Of the loss, or less: in the second half of a turn of Gauss-Newton steps it makes that the last turn, as FALLEN
# of the first one does at its end. A turn of the other optimizer that takes off less has gained nothing.
ENOUGH, FALLEN = 0.9, 0.1
# Where the first Gauss-Newton steps take off less, the other optimizer begins where they began: they may have led
# to a place from which it gains nothing.
WELL = 0.75
# They are judged after as many steps, or half of them at the end of LATEST turns: a network may need some twenty
# steps to move at all.
JUDGED, LATEST = 32, 3
# Early times count more, so that residuals are late, unless a path has left the solution early for one where
# nothing happens. In this part of its budget a fit begins anew, twice at most, where the loss has not fallen to
# SLOW in STAYED steps, and half of the squares is before EARLY times the share of the budget that is used up, but
# not in a layer at the start. Where their mean is below SOLVED of the loss of a new network, it is the solution.
STUCK_AT, SLOW, STAYED, LAYER, EARLY, SOLVED, STARTS = (0.2, 0.35), 0.4, 16, 0.05, 1.25, 1e-5, 2
# DeepXDE's own losses are computed so many times on the way, or as often as that takes DEAREST of the time.
LOOKS, DEAREST = 50, 0.05
# What the optimizer warns of, with ways out that are not those of a `dde.Model`.
UNHEARD = "fit: columns? .* far from|GaussNewton: the loss runs away"


def fit(
    model: Any,
    seconds: float | None = 60.0,
    *,
    steps: int | None = None,
    points: str = "by residual",
    weights: str = "auto",
    double: bool = True,
    callbacks: Sequence[Any] | None = None,
    verbose: int = 1,
) -> Fit:
    """Train a compiled `dde.Model` in place. Its `losshistory` and `train_state` are what `model.train` returns.

    Args:
        model: new, or trained before. It ends with the lowest training loss seen, by DeepXDE's own account.
        seconds, steps: where to stop, whichever comes first. With seconds, where the first Gauss-Newton steps of
            a new model gain little, turns of the optimizer that it was compiled with follow. Where an equation
            has a time, early times count more in the first six tenths; if residuals stay there all the same, the
            fit begins anew with new weights.
        points: "by residual" and "as drawn" draw points from the geometry in every step, as in `woodbury.fit`;
            "given" takes the training points, as do conditions whose points the geometry cannot draw.
        weights: "given", those of `model.compile(loss_weights=...)`, or "balanced", as in `woodbury.Equations`;
            "auto" balances where none were given.
        double: compute in float64, if the functions of the model allow it; the model keeps its own type.
        callbacks, verbose: as in `model.train`.

    The loss of the `Fit` is DeepXDE's own. An error names what cannot be taken, and leaves the model as it was.
    """
    if (seconds is None and steps is None) or points not in POINTS or weights not in WEIGHTS:
        raise ValueError(f"deepxde.fit: use seconds= or steps=, points= of {POINTS}, weights= of {WEIGHTS}")
    Limits(steps, seconds)  # raises where these are no numbers
    _check_model(model, callbacks)
    run, is_new = _Run(model, callbacks, verbose), model.train_state.step == 0
    try:
        problem = Problem(model)
        _check_losses(problem, run)
        if problem.time is not None and run.layers:
            with run.holding(run.renewed(torch.Generator(device="cpu").manual_seed(0))):
                run.starts, run.scale = STARTS, sum(problem.losses(run.solution).values())
        run.begin()
        if double:
            run.cast(torch.float64, run.first)
            try:
                problem.losses(run.solution)
            except RuntimeError:  # a function of the user multiplies by a matrix of the given type
                run.cast(None, run.first)
        if seconds is not None:
            run.length = seconds / TURNS * (is_new and not dde.optimizers.is_external_optimizer(model.opt_name))
            run.deadline, run.turn_end = run.started + seconds, run.started + (run.length or math.inf)
        run.pause, turn, result = (seconds or 0.0) / LOOKS, 0.0, Fit(reason="callback")
        try:
            while result.reason == "callback" and not run.is_over:
                if run.is_stuck:
                    run.begin_anew()
                elif turn > 0:
                    run.descend(turn)
                turn, before = 4 * turn or PARTS * run.length, result.history
                left = None if seconds is None else max(0.0, run.deadline - run.begun)
                run.limits = Limits(None if steps is None else steps - len(before), left)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", UNHEARD)
                    result = _solving(run, problem, points, weights).go(None)
                for record in result.history:  # as steps of the whole fit
                    record["step"] += len(before)
                    record["seconds"] += run.begun - run.started
                result.history = before + result.history
        except KeyboardInterrupt:  # which ends the fit as its time does
            result.reason = "interrupted"
        run.end()
    except BaseException as error:
        run.give_back(run.best if isinstance(error, KeyboardInterrupt) else run.first)
        raise
    result.reason = "seconds" if time.perf_counter() > run.deadline else result.reason
    spent, steps = time.perf_counter() - run.started, len(result.history)
    return replace(result, loss=run.best_loss, best_step=run.best_step, steps=steps, seconds=spent)


def _solving(run: _Run, problem: Problem, points: str, weights: str) -> SolvingRun:
    """A fit as `woodbury.fit` has it, but with plain steps at first, and fewer points for systems."""
    balanced = weights == "balanced" or (weights == "auto" and run.model.loss_weights is None)
    terms = Equations(**problem.terms(run.solution, points, balanced)).terms
    source = TermSource(run.solution, terms, by_residual=points == "by residual", time=problem.time)
    run.middles = source.middles
    is_large = sum(own.numel() for own in run.solution.parameters()) > LARGE
    settings, few = (LARGE_STEPS, FEW // 2) if is_large else (STEPS, FEW)
    optimizer = GaussNewton(run.solution, nn.MSELoss(), forward=source.forward, **settings)
    few = max(few // max(1, problem.equations), FEWEST)
    solving = SolvingRun(optimizer, source, limits=run.limits, seed=None, callback=run.note, samples=few)
    solving.fit.seconds = time.perf_counter() - run.begun
    solving.begin_plain(most=4 * FEW)
    return solving


def _check_model(model: Any, callbacks: Sequence[Any] | None) -> None:
    """Raise an error that names what cannot be taken."""
    if not isinstance(model, dde.Model):
        raise TypeError(f"deepxde.fit: model must be a dde.Model, got {type(model).__name__}")
    data, regularizer, back_end = model.data, getattr(model.net, "regularizer", None), dde.backend.backend_name
    is_pointwise = isinstance(data, dde.data.PDE) and not isinstance(data, dde.data.IDE | dde.data.FPDE)
    batched = [type(bc).__name__ for bc in getattr(data, "bcs", []) if getattr(bc, "batch_size", None) is not None]
    resampler = any(isinstance(own, dde.callbacks.PDEPointResampler) for own in callbacks or ())
    faults = {
        f"the back end is {back_end}: set DDE_BACKEND=pytorch before deepxde is imported": back_end != "pytorch",
        "the model is not compiled: call model.compile first": model.outputs_losses_train is None,
        f"dde.data.{type(data).__name__} cannot be taken: residuals at a point must depend on that point alone, "
        "as in dde.data.PDE and TimePDE (no integral, fractional or learned operators)": not is_pointwise,
        "use dde.config.set_default_autodiff('reverse')": dde.config.autodiff != "reverse",
        f"the regularizer {regularizer} of the network: leave it out": regularizer is not None,
        f"{batched} with batch_size: leave it out": batched,
        "PDEPointResampler: leave it out, points are drawn in every step": resampler,
    }
    for message, is_true in faults.items():
        if is_true:
            raise ValueError(f"deepxde.fit: {message}")


def _check_losses(problem: Problem, run: _Run) -> None:
    """Raise an error unless the losses of the terms are those that DeepXDE minimizes."""
    generator, model = torch.Generator(device="cpu").manual_seed(0), problem.model
    noise = [torch.randn(own.shape, generator=generator, device="cpu").to(own) for own in run.first]
    with run.holding([own + 0.1 * other for own, other in zip(run.first, noise, strict=True)]):
        theirs = problem.their_losses()  # where none is small
        mine = problem.losses(Solution(model.net, model.external_trainable_variables))
    others = {"equation": theirs[: problem.equations].sum()} if problem.equations else {}
    others |= dict(zip(problem.names, theirs[problem.equations :], strict=True))
    share = 10 * torch.finfo(next(run.solution.parameters()).dtype).eps ** 0.5
    for name, own in mine.items():
        if np.isfinite(others[name]) and not abs(own - others[name]) <= share * abs(others[name]):
            raise ValueError(
                f"deepxde.fit: {name} cannot be taken: its loss is not a mean of squares, or its residuals at "
                "a point depend on other points of the batch or on random numbers"
            )


class _Run:
    """A model of DeepXDE during a fit: its parameters, what it shows, and its callbacks."""

    def __init__(self, model: Any, callbacks: Sequence[Any] | None, verbose: int) -> None:
        self.model, self.verbose, self.started = model, verbose, time.perf_counter()
        self.callbacks = dde.callbacks.CallbackList(callbacks=list(callbacks or []))
        self.callbacks.set_model(model)
        self.tensors = [*model.net.parameters(), *model.net.buffers(), *model.external_trainable_variables]
        self.needs = [own.requires_grad for own in self.tensors]
        self.first = [own.data for own in self.tensors]
        self.layers = [
            own for own in model.net.modules() if isinstance(own, nn.Linear) and own.weight.requires_grad
        ]
        self.best_loss, self.best = math.inf, self.first
        self.steps = self.best_step = 0  # of Gauss-Newton
        self.deadline, self.pause, self.next_look = math.inf, 0.0, 0.0
        self.length, self.turn_end, self.is_over = 0.0, math.inf, False
        self.begun, self.limits, self.middles = self.started, Limits(), list[float]()
        self.starts, self.is_stuck, self.scale = 0, False, 0.0
        self.cast(None, self.first)

    def load(self, values: Sequence[Tensor]) -> None:
        for own, value, needs in zip(self.tensors, values, self.needs, strict=True):
            own.data = value
            own.requires_grad_(needs)  # DeepXDE switches it off and on

    def cast(self, dtype: torch.dtype | None, values: Sequence[Tensor]) -> None:
        """Go on with copies of these values, of this type or the given one."""
        self.dtype = dtype
        types = [dtype if dtype and own.is_floating_point() else own.dtype for own in self.first]
        self.load([value.to(own, copy=True) for value, own in zip(values, types, strict=True)])
        self.solution = Solution(self.model.net, self.model.external_trainable_variables)

    def descend(self, seconds: float) -> None:
        """A turn of the optimizer that the model was compiled with, from the best parameters so far, or the first.

        It goes on where it has not gained a tenth, or gains that faster and faster: a plateau, or the end of one.
        Two turns of Gauss-Newton steps are left.
        """
        state, dtype, now = self.model.train_state, self.dtype, time.perf_counter()
        part, latest = min(seconds, (self.deadline - now) / 2) / PARTS, self.deadline - 2 * self.length
        lost = self.best_loss > WELL * self.first_loss and self.begun == self.started
        loss, values = (self.first_loss, self.first) if lost else (self.best_loss, self.best)
        losses, goes_on, self.starts = [loss] * 2, False, 0
        self.cast(None, values)
        try:
            while not self.is_over and (len(losses) < PARTS + 2 or (goes_on and now + part <= latest)):
                end = now + part
                while now < end and not self.is_over:
                    self.model._train_step(state.X_train, state.y_train, state.train_aux_vars)
                    self.count_step()
                    now = time.perf_counter()
                losses.append(min(losses[-1], self.look()))
                first, second, third = losses[-3:]
                is_faster = third < ENOUGH * second and third * first < second**2
                goes_on = is_faster or third > ENOUGH * losses[0]
        finally:
            self.model.opt.zero_grad()
        self.cast(dtype, self.best)
        self.turn_end = time.perf_counter() + self.length

    def renewed(self, generator: torch.Generator | None = None) -> list[Tensor]:
        """The given values, but Linear layers that are trained as before training (Glorot)."""
        values = {id(own): first for own, first in zip(self.tensors, self.first, strict=True)}
        for own in self.layers:
            weight = torch.empty(own.weight.shape, device="cpu")
            given = values[id(own.weight)]
            values[id(own.weight)] = nn.init.xavier_normal_(weight, generator=generator).to(given)
            if own.bias is not None and own.bias.requires_grad:
                values[id(own.bias)] = torch.zeros_like(values[id(own.bias)])
        return list(values.values())

    def begin_anew(self) -> None:
        """With new weights, and with what is left of the time as the whole of it."""
        if self.verbose:
            print("Residuals are at early times and stay there: the fit begins anew with new weights")
        self.cast(self.dtype, self.renewed())
        self.begun, self.is_stuck, self.starts = time.perf_counter(), False, self.starts - 1

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the model has these values."""
        mine, training = [own.data for own in self.tensors], self.model.net.training
        self.load(values)
        try:
            yield
        finally:
            self.load(mine)
            self.model.net.train(training)

    def as_given(self) -> AbstractContextManager[None]:
        """The parameters in their own type, as DeepXDE and its callbacks know them."""
        return self.holding([own.data.to(first) for own, first in zip(self.tensors, self.first, strict=True)])

    def look(self) -> float:
        """Compute DeepXDE's loss, show it, and keep the parameters if it is the lowest."""
        started = time.perf_counter()
        with self.as_given():
            self.model._test(verbose=self.verbose)
        loss = float(np.sum(self.model.train_state.loss_train))
        if loss < self.best_loss:
            self.best_loss, self.best = loss, [own.data.clone() for own in self.tensors]
            self.best_step = self.steps
        now = time.perf_counter()
        self.next_look = now + max(self.pause, (now - started) / DEAREST)
        return loss

    def begin(self) -> None:
        """As `model.train` begins."""
        model = self.model
        model.stop_training, model.callbacks = False, self.callbacks
        model.train_state.set_data_train(*model.data.train_next_batch(model.batch_size))
        model.train_state.set_data_test(*model.data.test())
        self.first_loss = self.look()
        self.callbacks.on_train_begin()

    def count_step(self) -> None:
        """After a step of any kind: look, if it is time, and let the callbacks say whether to stop."""
        state = self.model.train_state
        state.iteration, state.step = state.iteration + 1, state.step + 1
        if time.perf_counter() >= self.next_look:
            self.look()
        if self.callbacks.callbacks:
            with self.as_given():
                self.callbacks.on_batch_end()
                self.callbacks.on_epoch_end()
        self.is_over = self.model.stop_training or time.perf_counter() >= self.deadline

    def note(self, fit: Fit) -> bool:
        """After a Gauss-Newton step: whether to stop, because time is over or another turn promises more."""
        self.steps += 1
        self.count_step()
        steps, now = len(fit.history), time.perf_counter()
        if self.is_over or 2 * steps < JUDGED:
            return self.is_over
        if self.starts > 0 and steps >= 2 * STAYED:
            self.is_stuck = self._is_stuck(fit)
        is_early = steps < JUDGED and now < self.turn_end + (LATEST - 1) * self.length
        if self.is_stuck or now < self.turn_end or is_early:
            return self.is_stuck
        self.turn_end, quarter, course = math.inf, steps // 4, [record["loss"] for record in fit.history]
        self.look()
        return median(course[-quarter:]) > max(ENOUGH * median(course[quarter : 2 * quarter]), FALLEN * course[0])

    def _is_stuck(self, fit: Fit) -> bool:
        share = self.limits.share(len(fit.history), fit.seconds, 0.0)
        if not STUCK_AT[0] <= share <= STUCK_AT[1]:
            return False
        losses = [record["loss"] for record in fit.history[-2 * STAYED :]]
        stays = median(losses[STAYED:]) > SLOW * median(losses[:STAYED])
        is_early = LAYER < median(self.middles[-STAYED:]) < EARLY * share
        found = median(record["terms"]["equation"] for record in fit.history[-STAYED:])
        return stays and is_early and found > SOLVED * self.scale

    def give_back(self, values: Sequence[Tensor]) -> None:
        """Leave these values, in their own type and where they were."""
        for first, value in zip(self.first, values, strict=True):
            first.copy_(value)
        self.load(self.first)

    def end(self) -> None:
        """Leave the best parameters, and what DeepXDE says of them."""
        self.look()
        self.give_back(self.best)
        self.model._test(verbose=self.verbose)
        self.load(self.first)
        self.callbacks.on_train_end()
