"""Numbers of a loop before they are read: on a device they wait, so that no step waits for them."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from woodbury.optim import StepInfo

READ_EVERY = 100  # steps whose numbers are on a device: to read them is to wait for it


class Reading:
    """The numbers of a step before they are read: what `optimizer.step` returned, or numbers by name, and more."""

    def __init__(self, info: StepInfo | Mapping[str, Any] | None, numbers: Mapping[str, Any]) -> None:
        if info is not None and not isinstance(info, StepInfo | Mapping):
            raise TypeError(
                f"step takes a StepInfo, a mapping, or numbers by name such as loss=0.5, not {type(info).__name__}"
            )
        named = {**info, **numbers} if isinstance(info, Mapping) else numbers
        self._info = info if isinstance(info, StepInfo) else None
        self.values = {name: _plain(name, value) for name, value in named.items()}
        self.counts: dict[str, Any] = {}  # the first of the record

    def is_on_device(self) -> bool:
        """Whether to read it is to wait."""
        tensors = any(isinstance(value, Tensor) for value in self.values.values())
        return tensors or (self._info is not None and on_device(self._info.loss))

    def take(self, name: str) -> Any:
        """Read one of the values and leave it out from then on; None if it was not given."""
        return _read(self.values.pop(name, None))

    def read(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        told = {} if self._info is None else self._info.as_dict()
        return {**self.counts, **told, **{name: _read(value) for name, value in self.values.items()}}


class Waiting(deque[Reading]):
    """Steps whose numbers are still on a device."""

    def are_due(self) -> bool:
        """Whether to read them: there are many, or nobody has to wait."""
        return len(self) >= READ_EVERY or not self[0].is_on_device()

    def read(self) -> Iterator[dict[str, Any]]:
        """The numbers of each, which is left out first: none may be there twice, whenever Ctrl-C comes."""
        while self:
            yield self.popleft().read()


def read_numbers(**numbers: Any) -> dict[str, Any]:
    """The numbers, read at once."""
    return Reading(None, numbers).read()


class Clock:
    """Seconds that run except in `stopped` blocks, which may lie inside one another."""

    def __init__(self) -> None:
        self.seconds = 0.0  # until it was last stopped
        self._stops = 0
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the clock was last stopped."""
        self._since = time.perf_counter()

    def now(self) -> float:
        return self.seconds if self._stops else self.seconds + time.perf_counter() - self._since

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.seconds = self.now()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            self.restart()


def on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def wait_for_device() -> None:
    """Wait for the work that a loop has handed to a GPU, which is part of the time it takes."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _plain(name: str, value: Any) -> Any:
    """The value as a plain number, or None; a tensor on a device as a copy of its own, to be read later."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # without its graph, and whatever the loop adds to it later
        return value.detach().clone() if on_device(value) else value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r:.80}")


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
