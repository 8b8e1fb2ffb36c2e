"""What the two kinds of fits share: the loop, its clock, the parameters kept, and going on from a state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from woodbury.fit.limits import Limits, Progress
from woodbury.fit.result import Fit
from woodbury.fit.sources import Data
from woodbury.model.capture import call_model
from woodbury.optim import GaussNewton
from woodbury.products import loss_of

Callback = Callable[[Fit], Any]


class Run(ABC):
    """A fit under way."""

    needed: ClassVar[set[str]] = {"parameters", "optimizer", "steps", "seconds", "samples", "history"}  # to go on

    def __init__(self, optimizer: GaussNewton, limits: Limits, callback: Callback | None) -> None:
        self.optimizer, self.model = optimizer, optimizer.model
        self.limits, self.callback = limits, callback
        self.fit = Fit()
        self.best: tuple[float, dict[str, Tensor]] | None = None  # the lowest loss seen, and where

    @abstractmethod
    def reached(self) -> str | None:
        """The limit that is reached, if one is."""

    @abstractmethod
    def advance(self) -> Callable[[], str | None]:
        """Take a step; the function returned, outside the clock's sight, notes it and says why to stop, if so."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the best parameters in the model, and the loss in the `Fit`."""

    @abstractmethod
    def shown(self) -> tuple[str, float]:
        """What the progress line says beside the loss, and the epochs so far."""

    def go(self, progress: Progress | None) -> Fit:
        """Take steps until there is a reason to stop."""
        fit, started = self.fit, time.perf_counter() - self.fit.seconds
        fit.reason = "running"
        try:
            while fit.reason == "running":
                reason = self.reached()
                if reason is not None:
                    fit.reason = reason
                    break
                note = self.advance()
                fit.seconds = time.perf_counter() - started
                fit.reason = note() or "running"
                if progress is not None:
                    progress.show(fit, *self.shown())
                if self.callback is not None and self.callback(fit) and fit.reason == "running":
                    fit.reason = "callback"
                started = time.perf_counter() - fit.seconds
        except KeyboardInterrupt:
            fit.reason = "interrupted"
        fit.state = self.state()
        self.finish()
        if progress is not None:
            progress.end(fit)
        return fit

    def parameters(self) -> dict[str, Tensor]:
        """A copy of the parameters and buffers of the model."""
        return {name: own.detach().clone() for name, own in _tensors(self.model).items()}

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in _tensors(self.model).items():
                own.copy_(values[name])

    def loss_on(self, data: Data) -> Tensor:
        """The loss itself, by a pass through the model without gradients where that is possible."""
        optimizer = self.optimizer
        inputs, targets = data
        with torch.set_grad_enabled(optimizer.forward is not call_model):
            outputs = optimizer.forward(self.model, inputs)
            value = loss_of(optimizer.loss, outputs, targets)
        return value.detach()

    def state(self) -> dict[str, Any]:
        """What `load` needs beside what the `Fit` holds."""
        best = {} if self.best is None else {"best_loss": self.best[0], "best": self.best[1]}
        return {"parameters": self.parameters(), "optimizer": self.optimizer.state_dict(), **best}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `Fit.state_dict`."""
        names = set(_tensors(self.model))
        if not isinstance(state, Mapping) or not set(state) >= self.needed:
            raise ValueError("fit: resume must be the state_dict() of an earlier Fit to the same kind of data")
        if set(state["parameters"]) != names:
            odd = sorted(names ^ set(state["parameters"]))[0]
            raise ValueError(f"fit: resume is of another model: parameter {odd!r} is not in both")
        self.load_parameters(state["parameters"])
        self.optimizer.load_state_dict(state["optimizer"])
        fit = self.fit
        fit.steps, fit.seconds, fit.samples = state["steps"], state["seconds"], state["samples"]
        fit.history = [dict(record) for record in state["history"]]
        if "best" in state:
            self.best = state["best_loss"], dict(state["best"])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
