"""Numbers of a loop before they are read: on a device they wait, so that no step waits for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from woodbury.optim import StepInfo

READ_EVERY = 100  # steps whose numbers are on a device: to read them is to wait for it
EXACT = 2**53  # whole numbers up to here are exact as floats
_NO_TRUTHS = ("epoch", "step", "seconds", "damping", "ratio", "train_loss", "test_loss", "test_error")


@dataclass(frozen=True)
class Reading:
    """The record of a step before its numbers are read."""

    counts: dict[str, Any]
    info: StepInfo | None
    values: dict[str, Any]

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
        if value.numel() != 1 or value.is_complex() or (value.dtype == torch.bool and name in _NO_TRUTHS):
            raise TypeError(
                f"{name} must be one real number, got a tensor of shape {tuple(value.shape)}, {value.dtype}"
            )
        if on_device(value):
            return value.detach().clone()  # without its graph, and whatever the loop adds to it
        value = value.item()
    if isinstance(value, bool) and name in _NO_TRUTHS:
        raise TypeError(f"{name} must be a number, got {value}")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, Real):
        return whole if isinstance(value, Integral) and abs(whole := int(value)) <= EXACT else float(value)
    raise TypeError(f"{name} must be a number or a tensor with one element, got {type(value).__name__}")


def read_number(value: Any) -> Any:
    """A number that `plain_number` may have left on a device."""
    return value.item() if isinstance(value, Tensor) else value
