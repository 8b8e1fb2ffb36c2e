"""Numbers of a loop before they are read: on a device they wait, so that no step waits for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from woodbury.optim import StepInfo

READ_EVERY = 100  # steps whose numbers are on a device: to read them is to wait for it


class Readings:
    """The numbers of steps until they are read, in order, and handed to `write`."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._waiting: deque[tuple[Mapping[str, Any], StepInfo | None, dict[str, Any]]] = deque()

    def add(self, counts: Mapping[str, Any], info: StepInfo | None, numbers: Mapping[str, Any]) -> None:
        """Add a step: its own counts, what `optimizer.step` returned, and numbers by name."""
        if info is not None and not isinstance(info, StepInfo):
            raise TypeError(
                f"step takes a StepInfo, or numbers by name such as loss=0.5, not {type(info).__name__}"
            )
        if taken := counts.keys() & numbers.keys():
            raise ValueError(f"{taken.pop()!r} is counted here: give the number another name")
        plain = {name: plain_number(name, value) for name, value in numbers.items() if value is not None}
        self._waiting.append((counts, info, plain))

    def __len__(self) -> int:
        return len(self._waiting)

    def write_if_due(self) -> None:
        """Read and write them if there are many, or if nobody has to wait."""
        _, info, numbers = self._waiting[0]
        is_told_later = info is not None and on_device(info.loss)
        must_wait = is_told_later or any(isinstance(value, Tensor) for value in numbers.values())
        if len(self) >= READ_EVERY or not must_wait:
            self.write()

    def write(self) -> None:
        """Read and write all of them; each is left out first: none may be there twice, whenever Ctrl-C comes."""
        while self._waiting:
            counts, info, numbers = self._waiting.popleft()
            told = {} if info is None else info.as_dict()
            self._write({**counts, **told, **{name: read_number(name, value) for name, value in numbers.items()}})


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


def plain_number(name: str, value: Any) -> Any:
    """The value as a plain number; a tensor on a device as a copy of its own, to be read later."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # without its graph, and whatever the loop adds to it later
        return value.detach().clone() if on_device(value) else value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name} must be a number or a tensor with one element, got {value!r:.80}")


def read_number(name: str, value: Any) -> Any:
    """The same, read at once."""
    plain = plain_number(name, value)
    return plain.item() if isinstance(plain, Tensor) else plain
