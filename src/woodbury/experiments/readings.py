"""Numbers of a loop before they are read: on a device they wait, so that no step waits for them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from woodbury.optim import StepInfo

READ_EVERY = 100  # steps whose numbers are on a device: to read them is to wait for it


@dataclass(frozen=True)
class Reading:
    """The record of a step before its numbers are read."""

    counts: dict[str, Any]
    info: StepInfo | None
    values: dict[str, Any]

    @classmethod
    def of(cls, info: StepInfo | Mapping[str, Any] | None, numbers: Mapping[str, Any]) -> "Reading":
        """What `optimizer.step` returned, or numbers by name, and more of them; without counts as yet."""
        if info is not None and not isinstance(info, StepInfo | Mapping):
            raise TypeError(
                f"step takes a StepInfo, a mapping, or numbers by name such as loss=0.5, not {type(info).__name__}"
            )
        given = {**info, **numbers} if isinstance(info, Mapping) else numbers
        values = {name: plain_number(name, value) for name, value in given.items()}
        return cls({}, info if isinstance(info, StepInfo) else None, values)

    def is_on_device(self) -> bool:
        return any(isinstance(value, Tensor) for value in self.values.values()) or (
            self.info is not None and on_device(self.info.loss)
        )

    def read(self) -> dict[str, Any]:
        told = {} if self.info is None else self.info.as_dict()
        return {**self.counts, **told, **{name: read_number(value) for name, value in self.values.items()}}


class Clock:
    """Seconds that run except in `stopped` blocks, which may lie inside one another."""

    def __init__(self) -> None:
        self.seconds = 0.0  # until it was last stopped
        self._stops = 0
        self._since = time.perf_counter()

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
            self._since = time.perf_counter()


def on_device(tensor: Tensor) -> bool:
    """Whether to read the tensor is to wait."""
    return tensor.device.type != "cpu"


def wait_for_device() -> None:
    """Wait for the work that a loop has handed to a GPU, which is part of the time it takes."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def plain_number(name: str, value: Any) -> Any:
    """The value as a plain number, or None; a tensor on a device as a copy of its own, to be read later."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"{name} must be one real number, got a tensor of shape {tuple(value.shape)}")
        if on_device(value):
            return value.detach().clone()  # without its graph, and whatever the loop adds to it
        return value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name} must be a number or a tensor with one element, got {type(value).__name__}")


def read_number(value: Any) -> Any:
    """A number that `plain_number` may have left on a device."""
    return value.item() if isinstance(value, Tensor) else value
