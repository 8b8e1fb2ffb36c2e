"""Where the samples of a fit come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury import _batch

Data = tuple[Any, "Tensor | None"]
Draw = Callable[[int], Any]


@dataclass(frozen=True)
class Source:
    """Where the samples of a step come from, for steps with a search: the same at every step, or fresh ones."""

    draw: Callable[[int], Data]  # so many samples; where they are not fresh, all there are
    is_fresh: bool  # then there can be more of them, and the loss of a batch is an estimate

    def batches(self, count: int) -> tuple[Data, Data | None]:
        """The batch of a step, and as many others to judge it; None where the batch judges itself."""
        return self.draw(count), self.draw(count) if self.is_fresh else None


@dataclass
class MiniBatches:
    """The batches of a loader, epoch after epoch, on the device of the model."""

    loader: Iterable[Any]
    device: torch.device
    epoch: int = 0  # epochs that are over
    taken: int = 0  # batches of the epoch under way
    length: int | None = None  # batches of an epoch, once that is known
    _iterator: Iterator[Any] | None = field(default=None, repr=False)
    _held: Data | None = field(default=None, repr=False)  # a batch that did not fit to those before it

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise TypeError(
                f"fit: {type(self.loader).__name__} can be gone through once only: pass something that can be "
                "gone through again and again, as a DataLoader or a list of batches"
            )
        try:
            self.length = len(self.loader)  # type: ignore[arg-type]
        except TypeError:  # a stream: the first epoch tells
            self.length = None
        if self.length == 0:
            raise ValueError("fit: the loader has no batches")

    @property
    def epochs(self) -> float:
        """Epochs so far; of a first epoch whose length is not known only whole ones."""
        return self.epoch + (self.taken / self.length if self.length else 0.0)

    def next(self, most: int = 1) -> tuple[Data, int, bool]:
        """The next batches as one, at most so many, how many they are, and whether an epoch ended before them.

        Fewer at the end of an epoch, and where those that follow are of another form or shape.
        """
        ended, batch = False, None
        while batch is None:
            if self._iterator is None:
                self._iterator, self.taken = iter(self.loader), 0
            batch = self._take()
            if batch is None:
                if not self.taken:
                    raise ValueError("fit: the loader has no batches")
                self.length, ended = self.taken, True
                self.end_epoch()
        count = 1
        while count < most and not self.is_over:
            other = self._take()
            if other is None:
                break
            try:
                batch, count = _joined(batch, other), count + 1
            except ValueError:  # a step of its own
                self._held, self.taken = other, self.taken - 1
                break
        return batch, count, ended

    def _take(self) -> Data | None:
        """One more batch of the epoch under way, if there is one."""
        assert self._iterator is not None
        if self._held is not None:
            batch, self._held = self._held, None
        else:
            try:
                found = next(self._iterator)
            except StopIteration:
                return None
            batch = to_device(as_pair(found, "a loader must give pairs"), self.device)
        self.taken += 1
        return batch

    @property
    def is_over(self) -> bool:
        """Whether the batch just taken was the last of its epoch, as far as that is known."""
        return self.length is not None and self.taken >= self.length

    def end_epoch(self) -> None:
        """Close the epoch under way; the next batch opens another."""
        self._iterator, self.taken, self.epoch = None, 0, self.epoch + 1


def _joined(first: Data, second: Data) -> Data:
    """One batch of two; ValueError where they do not fit together."""
    sizes = [_batch.sample_count(own[0]) for own in (first, second)]
    inputs = _batch.join([first[0], second[0]], sizes)
    return inputs, _batch.join([first[1], second[1]], sizes)


def as_pair(batch: Any, what: str) -> Data:
    """(inputs, targets) of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"fit: {what} (inputs, targets), targets None for zeros, got {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        )
    return batch[0], batch[1]


def to_device(data: Data, device: torch.device) -> Data:
    """The same batch where the model is."""
    if device.type == "cpu":
        return data
    moved: Data = pytree.tree_map_only(Tensor, lambda own: own.to(device, non_blocking=True), data)
    return moved


def is_batches(data: Any) -> bool:
    """Whether data is a loader, or a list of batches, rather than a pair of tensors or a function."""
    if isinstance(data, Tensor) or (callable(data) and not isinstance(data, Iterable)):
        return False
    if isinstance(data, tuple | list):
        return len(data) != 2 or all(isinstance(own, tuple | list) and len(own) == 2 for own in data)
    return isinstance(data, Iterable)


def source_of(data: Any) -> Source:
    """All samples at every step, or a sampler, by what the data is."""
    if isinstance(data, tuple | list) and len(data) == 2 and not callable(data):
        _batch.check_batch(data[0], data[1])
        return Source(lambda count: (data[0], data[1]), is_fresh=False)
    if not callable(data):
        raise TypeError(
            "fit: data must be a pair (inputs, targets), a function draw(count) or a loader of such pairs, got "
            f"{type(data).__name__}"
        )

    def draw(count: int) -> Data:
        drawn = data(count)
        return (drawn, None) if isinstance(drawn, Tensor) else as_pair(drawn, f"draw({count}) must return a pair")

    return Source(draw, is_fresh=True)
