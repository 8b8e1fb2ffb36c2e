"""All or nothing: whatever ends a step early leaves what was before it, or all of what comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _random
from woodbury._process import leave_all
from woodbury.model.buffers import Buffers
from woodbury.model.plan import Plan


class Transaction:
    """What a step may change, as it was before, and the way to finish once it has begun to change it.

    Everything is computed first; then one function, safe to call again after it was interrupted, changes
    parameters, buffers and state. An error or an interrupt before that is undone, one within it is completed.
    """

    def __init__(self, state: dict[Any, Any]) -> None:
        self._state = state
        self._gradients = torch.is_grad_enabled()
        # what posing a problem changes
        posed = ("generator", "largest_batch", "columns")
        self._entries = {name: state[name] for name in posed if name in state}
        self.random: _random.Snapshot | None = None
        self._plan: Plan | None = None
        self._parameters: list[tuple[nn.Parameter, Tensor]] = []
        self.buffers: Buffers | None = None
        self._finish: Callable[[], None] | None = None

    def watch(self, plan: Plan, random: _random.Snapshot | None) -> None:
        """Note what passes through a model by autograd may change."""
        self.random, self._plan = random, plan
        self._parameters = [(parameter, parameter.data) for parameter in plan.parameters.values()]
        self.buffers = Buffers(plan.buffers, plan.findings.quiet_buffers) if plan.buffers else None

    def commit(self, finish: Callable[[], None]) -> None:
        """Change everything, by a function that may be called again if it was interrupted; gradients are off."""
        self._finish = finish
        finish()
        self._finish = lambda: None  # which holds on to nothing

    def end(self) -> None:
        """After an error or an interrupt: finish what was begun, else undo."""
        leave_all()
        torch.set_grad_enabled(self._gradients)  # an interrupt may come just before the exit of a context
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        else:
            self.undo()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, whatever changes is undone at the end."""
        try:
            yield
        except BaseException:
            leave_all()
            raise
        finally:
            self.undo()

    def undo(self) -> None:
        """Make everything what it was before."""
        torch.set_grad_enabled(self._gradients)
        self._state.update(self._entries)
        if self._plan is None:
            return
        for parameter, data in self._parameters:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for layer in self._plan.layers:
            vars(layer.module).pop("forward", None)  # a layer with a forward of its own is in no plan
        if self.buffers is not None:
            self.buffers.put_back()
        if self.random is not None:
            _random.restore(self.random)
