"""The random numbers of a pass over a batch, kept so that passes over part of it get their share of them.

Dropout draws a mask for all samples at once. On fewer samples it would draw another one, and the outputs would be
those of another function. `recorded` repeats the pass from the same state of the generators and keeps what every
operation draws; inside `Noise.shared` the same operations, on some of the samples, get the numbers of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from woodbury import _random


class _Listener(TorchDispatchMode):
    """Inside, every operation that draws random numbers is handed to `drawn` with what it returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.drawn(func, args, result) if torch.Tag.nondeterministic_seeded in func.tags else result

    def drawn(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        raise NotImplementedError


class _Recorder(_Listener):
    """Keeps what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Tensor] = []

    def drawn(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        numbers = result[1] if isinstance(result, tuple) else result  # dropout gives (outputs, mask)
        self.numbers.append(numbers.clone())  # a mask is divided in place
        return result


class _Supplier(_Listener):
    """Puts the numbers of some samples in the place of what is drawn."""

    def __init__(self, numbers: Sequence[Tensor], samples: int, window: slice, mapped: bool) -> None:
        super().__init__()
        self.left, self.samples, self.window, self.mapped = list(numbers[::-1]), samples, window, mapped

    def drawn(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        if not self.left or isinstance(result, tuple):
            raise RuntimeError("on part of the batch the model draws other random numbers")
        return result.copy_(self.part(self.left.pop(), result.shape))

    def part(self, numbers: Tensor, shape: torch.Size) -> Tensor:
        """The numbers of the samples in the window, in this shape: with an axis in front if mapped over them."""
        count = self.window.stop - self.window.start
        for axis, size in enumerate(numbers.shape):
            if size != self.samples:
                continue
            own = numbers.narrow(axis, self.window.start, count)
            if self.mapped:
                own = own.unsqueeze(axis).movedim(axis + 1, 0)
            if own.shape == shape:
                return own
        if numbers.shape == (shape[1:] if self.mapped else shape):  # one draw for all samples
            return numbers
        raise RuntimeError("on part of the batch the model draws random numbers of another shape")


@dataclass(frozen=True)
class Noise:
    """What a pass over `samples` samples drew, in order, and the state of the generators before it."""

    state: _random.Snapshot
    numbers: tuple[Tensor, ...]
    samples: int
    start: int = 0  # the sample that windows count from

    @contextmanager
    def shared(self, window: slice, mapped: bool) -> Iterator[None]:
        """Inside, a pass over these samples draws the numbers they had in the batch.

        mapped: the pass is that of one sample, mapped over them by torch.func.
        """
        own = slice(self.start + window.start, self.start + window.stop)
        with _random.replayed(self.state), _Supplier(self.numbers, self.samples, own, mapped) as supplier:
            yield
        if supplier.left:
            raise RuntimeError("on part of the batch the model draws fewer random numbers")


@contextmanager
def recorded(state: _random.Snapshot, samples: int, found: list[Noise]) -> Iterator[None]:
    """Inside, random numbers repeat from `state`; what was drawn is put into `found`."""
    with _random.replayed(state), _Recorder() as recorder:
        yield
    found.append(Noise(state, tuple(recorder.numbers), samples))
