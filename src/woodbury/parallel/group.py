"""Processes that train one model together: sums and gathers over them, which one process alone need not make.

Every collective here is the identity for one process, so that what uses it has no branches by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from woodbury._vector import Vector

if torch.distributed.is_available():
    # Its functions take the group there is when it is imported as a default argument. torch.optim imports it with
    # the first optimizer: then destroy_process_group would not end the threads of gloo, and one that is still at
    # work when the interpreter ends aborts the process.
    import torch.distributed.nn


Given = ParamSpec("Given")
Result = TypeVar("Result")


class LostProcessError(RuntimeError):
    """Another process of the group has failed, or is gone."""


_NOTHING = nullcontext()
_TOLD = {kind.__name__: kind for kind in (FileNotFoundError, OSError, TypeError, ValueError)}  # as they are


class Group:
    """The processes of a group of torch.distributed, or this one alone."""

    def __init__(self, processes: Any = None, alone: bool = True) -> None:
        self._processes = processes
        self.size = 1 if alone else torch.distributed.get_world_size(processes)
        self.rank = 0 if alone else torch.distributed.get_rank(processes)
        self.bytes_given = 0  # of tensors that this process has put into collectives

    def _run(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.bytes_given += sum([own.nbytes for own in args if isinstance(own, Tensor)])
        try:
            return collective(*args, group=self._processes, **options)
        except (RuntimeError, ValueError) as error:  # a closed connection, or a timeout
            raise LostProcessError(
                f"process {self.rank} of {self.size} waited for the others in vain ({error}): one of them has "
                "failed or was ended; its own message says why. Start again from the last checkpoint"
            ) from error

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in new memory."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone().contiguous()
        self._run(torch.distributed.all_reduce, total)
        return total

    def sums(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes."""
        if self.size == 1:
            return list(numbers)
        return self.sum(torch.tensor(numbers, dtype=torch.float64, device=self._device())).tolist()

    def sum_vector(self, vector: Vector) -> Vector:
        """The sum of a vector by parameter name, in one collective."""
        return vector if self.size == 1 else vector.of(self.sum(vector.flat))

    def gather(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The tensor of each process, whose last axes have these lengths."""
        if self.size == 1:
            return [tensor]
        padded = tensor.new_zeros(*tensor.shape[:-1], max(lengths))
        padded[..., : tensor.shape[-1]] = tensor
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(torch.distributed.all_gather, everyone, padded)
        return [whole[..., :length] for whole, length in zip(everyone, lengths, strict=True)]

    def gather_numbers(self, *numbers: int) -> list[tuple[int, ...]]:
        """Whole numbers by process: for each that was given, those of all processes."""
        if self.size == 1:
            return [(number,) for number in numbers]
        mine = torch.tensor(numbers, device=self._device())
        everyone = self.gather(mine, [len(numbers)] * self.size)
        return [tuple(column) for column in torch.stack(everyone, 1).tolist()]

    def gather_objects(self, value: Any) -> list[Any]:
        """A small object of each process."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        self._run(torch.distributed.all_gather_object, everyone, value)
        return everyone

    def object_of_first(self, value: Any) -> Any:
        """The object of the first process, of any size."""
        if self.size == 1:
            return value
        shared = [value if self.rank == 0 else None]
        self._run(torch.distributed.broadcast_object_list, shared, group_src=0)
        return shared[0]

    @contextmanager
    def before_meeting(self) -> Iterator[None]:
        """An error of one process inside is an error of all, where they next `check_same`. Nothing else may be
        exchanged in between."""
        try:
            yield
        except Exception as error:
            if self.size == 1 or isinstance(error, LostProcessError) or getattr(error, "is_of_all", False):
                raise
            self._meet({}, error)

    def check_same(self, words: Mapping[str, str | None]) -> None:
        """Raise on all processes unless what they hold by name is the same; None goes with everything."""
        if self.size > 1:
            self._meet(words, None)

    def _meet(self, words: Mapping[str, str | None], error: Exception | None) -> None:
        """Raise the error of one process, or say what differs, on all of them."""
        told = None if error is None else (type(error).__name__, str(error))
        everyone, errors = zip(*self.gather_objects((dict(words), told)), strict=True)
        for rank, other in enumerate(errors):
            if other is not None:
                raised = _TOLD.get(other[0], RuntimeError)(other[1])
                raise of_all(error if error is not None and rank == self.rank else raised)
        found = []
        for name in dict.fromkeys(name for other in everyone for name in other):
            values = [other.get(name, "absent") for other in everyone]
            if len(set(values) - {None}) > 1:
                listed = (f"{value} (process {rank})" for rank, value in enumerate(values))
                found.append(f"{name}: {', '.join(listed)}")
        if found:
            raise of_all(ValueError(f"processes that train together must have the same {'; '.join(found[:3])}"))

    def same(self, tensor: Tensor) -> Tensor:
        """The tensor of the first process: what all of them have computed alike, to the last bit."""
        if self.size == 1:
            return tensor
        shared = tensor.detach().clone().contiguous()
        self._run(torch.distributed.broadcast, shared, group_src=0)
        return shared

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of the first process."""
        if self.size == 1:
            return list(numbers)
        return self.same(torch.tensor(numbers, dtype=torch.float64, device=self._device())).tolist()

    def together(self) -> AbstractContextManager[None]:
        """At the end, an error or Ctrl-C inside on one process is one of all, before anything is exchanged."""
        return _NOTHING if self.size == 1 else self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        failure: BaseException | None = None
        try:
            yield
        except LostProcessError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        (failures,) = self.sums(0.0 if failure is None else 1.0)
        if failures:
            texts = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
            if failure is not None:
                raise failure
            rank = next(index for index, text in enumerate(texts) if text is not None)
            if texts[rank].startswith(KeyboardInterrupt.__name__):
                raise KeyboardInterrupt
            raise LostProcessError(f"process {rank} of {self.size} failed: {texts[rank]}")

    def _device(self) -> torch.device:
        backend = torch.distributed.get_backend(self._processes)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def of_all(error: Exception) -> Exception:
    """Mark an error that all processes know of: `before_meeting` need not tell them."""
    error.is_of_all = True  # type: ignore[attr-defined]
    return error


ALONE = Group()


def all_processes(processes: Any = None) -> Group:
    """The processes of torch.distributed, or of a group of it; where there is but one, `ALONE`."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ALONE
    return ALONE if torch.distributed.get_world_size(processes) == 1 else Group(processes, alone=False)


def raised_by_all(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, whose errors before processes first meet are raised by all of them."""

    @wraps(function)
    def together(*args: Given.args, **options: Given.kwargs) -> Result:
        with all_processes().before_meeting():
            return function(*args, **options)

    return together
