"""Settings of the whole process that a step changes: by the first thread that asks, until the last is done."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from threading import Event, RLock, current_thread, get_ident, main_thread
from types import FrameType
from typing import Any

from torch.nn.modules import module as modules


class ForAllThreads:
    """A context, entered any number of times at once: the first one in changes a setting, the last puts it back.

    Without this, two threads may each put back what they found: the first takes the setting away from the second,
    which then leaves what the first had set for good.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        """change: gives the context that changes the setting and puts it back."""
        self._change = change
        self._lock = RLock()
        self._depths = Counter[int]()  # thread -> how often it is inside
        self._changed: AbstractContextManager[Any] | None = None
        _CONTEXTS.append(self)

    def __enter__(self) -> None:
        with self._lock:
            if self._changed is None:
                changed = self._change()
                changed.__enter__()
                self._changed = changed
            self._depths[get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depths[get_ident()] -= 1
            if self._depths[get_ident()] <= 0:
                self._leave()

    def _leave(self) -> None:
        self._depths.pop(get_ident(), None)
        if not self._depths and self._changed is not None:
            changed, self._changed = self._changed, None
            changed.__exit__(None, None, None)

    def repair(self) -> None:
        """Take this thread out, and its lock: an interrupt may come between the end of a `with` and its exit."""
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()
        if get_ident() in self._depths:
            with self._lock:
                self._leave()


_CONTEXTS: list[ForAllThreads] = []


def leave_all() -> None:
    """Put back, after an error or an interrupt, what this thread may have left changed."""
    for context in _CONTEXTS:
        context.repair()


# the hooks that run when a module is called, or when gradients go back through it, by kind
hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_global_hooks_of = attrgetter(
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
)


def has_global_hook() -> bool:
    """Whether hooks on all modules of the process are registered."""
    return any(_global_hooks_of(modules))


@contextmanager
def stop_on_signal(*numbers: int) -> Iterator[Callable[[], bool]]:
    """Yield a function that is true after a first such signal; a second one acts at once.

    So a signal never cuts a step in two. Threads other than the main one are not told of signals.
    """
    stopping = Event()
    before = {number: signal.getsignal(number) for number in numbers if current_thread() is main_thread()}

    def note(number: int, frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield stopping.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def level_of_caller() -> int:
    """The `stacklevel` of a warning that points at the first line outside this package and its decorators."""
    level, frame, ours = 1, sys._getframe(1), ("woodbury", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    return level
