"""Random state: permutations drawn from a state tensor, and repeated random numbers for a second pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Snapshot(NamedTuple):
    """The state of the global generators a forward pass on a device may draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device


def new_state(seed: int | None) -> Tensor:
    """State of a fresh CPU generator; without a seed it follows torch.manual_seed."""
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    return generator.get_state()


class Orders:
    """Random permutations of the samples, on a device.

    The same numbers as drawn one at a time. On a device up to 16 permutations are drawn at once and copied
    together: one copy costs as much as several operations there.
    """

    def __init__(self) -> None:
        self._kind: tuple[int, torch.device] | None = None
        # id of a state -> the state, its version, the permutation drawn from it, the state after
        self._known: dict[int, tuple[Tensor, int, Tensor, Tensor]] = {}

    def draw(self, sample_count: int, state: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """A permutation of range(sample_count) and the state after it."""
        if device.type == "cpu":
            return _draw(sample_count, state, 1)[0]
        if state.is_inference():  # it has no version that shows a change
            order, after = _draw(sample_count, state, 1)[0]
            return order.to(device, non_blocking=True), after
        kind, known = (sample_count, device), self._known.get(id(state))
        if known is None or self._kind != kind or known[0] is not state or known[1] != state._version:
            drawn = _draw(sample_count, state, max(1, min(_AHEAD, _MAX_NUMBERS // sample_count)))
            orders = torch.stack([order for order, _ in drawn]).to(device, non_blocking=True).unbind()
            states = [state, *(after for _, after in drawn)]
            self._kind = kind
            self._known = {
                id(before): (before, before._version, order, after)
                for before, order, after in zip(states, orders, states[1:], strict=False)
            }
            known = self._known[id(state)]
        return known[2:]


_AHEAD, _MAX_NUMBERS = 16, 2**16  # permutations drawn at once, and numbers in them


def _draw(sample_count: int, state: Tensor, times: int) -> list[tuple[Tensor, Tensor]]:
    """Permutations drawn one after the other, each with the state after it."""
    generator = torch.Generator()
    generator.set_state(state)
    return [(torch.randperm(sample_count, generator=generator), generator.get_state()) for _ in range(times)]


def snapshot(device: torch.device) -> Snapshot:
    """The global random state now."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Snapshot(torch.get_rng_state(), cuda, device)


def restore(state: Snapshot) -> None:
    """Put the global random state back."""
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, state.device)


def drawn_since(state: Snapshot) -> bool:
    """Whether random numbers were drawn since a snapshot was taken."""
    now = snapshot(state.device)
    if not torch.equal(now.cpu, state.cpu):
        return True
    return now.cuda is not None and state.cuda is not None and not torch.equal(now.cuda, state.cuda)


@contextmanager
def replayed(state: Snapshot) -> Iterator[None]:
    """Inside, random numbers repeat from `state` (dropout masks agree); the state afterwards is that before."""
    now = snapshot(state.device)
    if state.cuda is None and torch.equal(now.cpu, state.cpu):  # nothing was drawn: nothing to repeat
        yield
        return
    restore(state)
    try:
        yield
    finally:
        restore(now)
