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


def permutation(count: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """A random permutation of range(count) and the state after drawing it."""
    generator = torch.Generator()
    generator.set_state(state)
    return torch.randperm(count, generator=generator), generator.get_state()


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
