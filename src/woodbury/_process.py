"""Settings of the whole process that a step changes: by the first thread that asks, until the last is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any


class ForAllThreads:
    """A context, entered any number of times at once: the first one in changes a setting, the last puts it back.

    Without this, two threads may each put back what they found: the first takes the setting away from the second,
    which then leaves what the first had set for good.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        """change: gives the context that changes the setting and puts it back."""
        self._change = change
        self._lock = Lock()
        self._inside = 0
        self._changed: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                changed = self._change()
                changed.__enter__()
                self._changed = changed
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._changed is not None:
                changed, self._changed = self._changed, None
                changed.__exit__(None, None, None)
