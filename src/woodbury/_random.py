"""Random state: permutations drawn from a state tensor, and repeated random numbers for a second pass."""

from __future__ import annotations

import ctypes
import random as python
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Snapshot(NamedTuple):
    """The state of the global generators a forward pass on a device may draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device
    python: tuple[Any, ...]  # (version, words with the position last, a Gaussian kept for the next call)
    numpy: tuple[Any, ...] | None  # None if numpy.random was never imported, or holds a generator of another kind


def new_state(seed: int | None) -> Tensor:
    """State of a fresh CPU generator; without a seed it follows torch.manual_seed."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    return generator.get_state()


def _in_state(generator: torch.Generator, state: Tensor) -> torch.Generator:
    """A CPU generator in this state, which may have been moved to another device with the rest of a checkpoint."""
    generator.set_state(state if state.is_cpu else state.cpu())
    return generator


def draw_seed(state: Tensor) -> tuple[int, Tensor]:
    """A seed for another generator, and the state after it."""
    generator = _in_state(torch.Generator(device="cpu"), state)
    return int(torch.randint(2**62, (), generator=generator, device="cpu")), generator.get_state()


class Orders:
    """Random permutations of the samples, on a device.

    The same numbers as drawn one at a time. On a device up to 16 permutations are drawn at once and copied
    together: one copy costs as much as several operations there.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None  # made once: that takes longer than to set its state
        self._kind: tuple[int, torch.device] | None = None
        # id of a state -> the state, its version, the permutation drawn from it, the state after
        self._known: dict[int, tuple[Tensor, int, Tensor, Tensor]] = {}

    def draw(self, sample_count: int, state: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """A permutation of range(sample_count) and the state after it."""
        if device.type == "cpu":
            return self._draw(sample_count, state, 1)[0]
        if state.is_inference():  # it has no version that shows a change
            order, after = self._draw(sample_count, state, 1)[0]
            return order.to(device, non_blocking=True), after
        kind, known = (sample_count, device), self._known.get(id(state))
        if known is None or self._kind != kind or known[0] is not state or known[1] != state._version:
            drawn = self._draw(sample_count, state, max(1, min(_AHEAD, _MAX_NUMBERS // sample_count)))
            orders = torch.stack([order for order, _ in drawn]).to(device, non_blocking=True).unbind()
            states = [state, *(after for _, after in drawn)]
            self._kind = kind
            drawings = zip(states, orders, states[1:], strict=False)
            self._known = {id(own): (own, own._version, order, after) for own, order, after in drawings}
            known = self._known[id(state)]
        return known[2:]

    def _draw(self, sample_count: int, state: Tensor, times: int) -> list[tuple[Tensor, Tensor]]:
        """Permutations drawn one after the other, each with the state after it."""
        if self._generator is None:
            self._generator = torch.Generator(device="cpu")
        own = _in_state(self._generator, state)
        return [(torch.randperm(sample_count, generator=own, device="cpu"), own.get_state()) for _ in range(times)]


_AHEAD, _MAX_NUMBERS = 16, 2**16  # permutations drawn at once, and numbers in them


def snapshot(device: torch.device) -> Snapshot:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Snapshot(torch.get_rng_state(), cuda, device, python.getstate(), _numpy_state())


def restore(state: Snapshot) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, state.device)
    python.setstate(state.python)
    if state.numpy is not None and state.numpy is not _numpy_state():
        sys.modules["numpy.random"].set_state(state.numpy)


@contextmanager
def kept(device: torch.device) -> Iterator[Snapshot]:
    """Inside, random numbers may be drawn: the state afterwards is the one before, which is given."""
    before = snapshot(device)
    try:
        yield before
    finally:
        restore(before)


def as_plain(state: Snapshot) -> dict[str, Any]:
    """Plain values and tensors, for a file; `from_plain` gives the state again."""
    numpy = state.numpy and (state.numpy[0], [*map(int, state.numpy[1])], *state.numpy[2:])
    return {"cpu": state.cpu, "cuda": state.cuda, "python": state.python, "numpy": numpy}


def from_plain(values: Mapping[str, Any], device: torch.device) -> Snapshot:
    """The state for a device; what was drawn from another one is left alone."""
    cuda = values["cuda"].cpu() if values["cuda"] is not None and device.type == "cuda" else None
    numpy = values["numpy"] if "numpy.random" in sys.modules else None
    return Snapshot(values["cpu"].cpu(), cuda, device, values["python"], numpy)


def drawn_since(state: Snapshot) -> bool:
    return not _same(snapshot(state.device), state)


def _same(a: Snapshot, b: Snapshot) -> bool:
    """Whether no random numbers were drawn between two snapshots."""
    if not torch.equal(a.cpu, b.cpu) or (a.cuda is not None and not torch.equal(a.cuda, cast(Tensor, b.cuda))):
        return False
    # The position moves with every number drawn, and all words change when it starts anew: a few show that.
    if a.python[1][-1] != b.python[1][-1] or a.python[1][:4] != b.python[1][:4] or a.python[2] != b.python[2]:
        return False
    if a.numpy is b.numpy or a.numpy is None or b.numpy is None:
        return a.numpy is b.numpy
    return a.numpy[2:] == b.numpy[2:] and bool((a.numpy[1] == b.numpy[1]).all())


_MT19937_BYTES = 625 * 4  # 624 words and the position
_numpy_seen: tuple[bytes, tuple[Any, ...]] | None = None  # the last state read, and the same as NumPy gives it


def _numpy_state() -> tuple[Any, ...] | None:
    """The state of NumPy's global generator; the same object as long as nothing was drawn.

    NumPy takes 0.1 ms to write its state out, so the words are compared in memory first. They do not show whether
    a Gaussian is kept for the next call: a state that holds one is written out each time. None for a generator of
    another kind, if someone has set one.
    """
    global _numpy_seen
    module = sys.modules.get("numpy.random")
    if module is None:
        return None
    try:
        generator = module.get_bit_generator()
    except AttributeError:  # before NumPy 1.24, where it is always MT19937
        return cast("tuple[Any, ...]", module.get_state())
    if type(generator) is not module.MT19937:
        return None
    words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    seen = _numpy_seen
    if seen is not None and seen[0] == words:
        return seen[1]
    state: tuple[Any, ...] = module.get_state()
    _numpy_seen = None if state[3] else (words, state)
    return state


def replayed(state: Snapshot | None) -> AbstractContextManager[None]:
    """Inside, random numbers repeat from `state`, unless it is None; the state afterwards is that before."""
    return _NOTHING if state is None else _replayed(state)


_NOTHING = nullcontext()


@contextmanager
def _replayed(state: Snapshot) -> Iterator[None]:
    now = snapshot(state.device)
    if state.cuda is None and _same(now, state):  # nothing was drawn: nothing to repeat
        yield
        return
    restore(state)
    try:
        yield
    finally:
        restore(now)
