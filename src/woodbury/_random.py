"""Random state: drawing S2 from a state kept as a tensor, and replaying a forward pass's random numbers."""

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

    The same as drawn one at a time from the state before each; but those of the next steps are drawn along, and
    brought to the device together, as each copy to it costs as much as several operations there.
    """

    def __init__(self) -> None:
        self._kind: tuple[int, torch.device] | None = None
        self._known: dict[int, tuple[Tensor, int, Tensor, Tensor]] = {}  # by the id of the state before

    def draw(self, count: int, state: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """A permutation of range(count) and the state after drawing it."""
        if device.type == "cpu":
            return _drawn(count, state, 1)[0]
        if state.is_inference():  # whether it changes cannot be told
            order, after = _drawn(count, state, 1)[0]
            return order.to(device, non_blocking=True), after
        known = self._known.get(id(state))
        if known is None or self._kind != (count, device) or known[0] is not state or known[1] != state._version:
            drawn = _drawn(count, state, max(1, min(_AHEAD, _MOST // count)))
            orders = torch.stack([order for order, _ in drawn]).to(device, non_blocking=True).unbind()
            states = [state, *(after for _, after in drawn)]
            self._kind = count, device
            self._known = {
                id(before): (before, before._version, order, after)
                for before, order, after in zip(states, orders, states[1:], strict=False)
            }
            known = self._known[id(state)]
        return known[2:]


_AHEAD, _MOST = 16, 2**16  # permutations drawn together, and numbers in them


def _drawn(count: int, state: Tensor, times: int) -> list[tuple[Tensor, Tensor]]:
    """So many permutations, one after the other, each with the state after it."""
    generator = torch.Generator()
    generator.set_state(state)
    return [(torch.randperm(count, generator=generator), generator.get_state()) for _ in range(times)]


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
    """Inside, random numbers repeat from `state` (dropout masks agree); afterwards nothing happened."""
    now = snapshot(state.device)
    if state.cuda is None and torch.equal(now.cpu, state.cpu):  # nothing was drawn: nothing to repeat
        yield
        return
    restore(state)
    try:
        yield
    finally:
        restore(now)
