"""A step recorded into a CUDA graph and replayed: one launch in place of hundreds of small ones.

A recording is a step on buffers of its own: a batch is copied in, the graph replayed, six numbers copied out. It
holds for batches of one shape and for settings that do not change but for the learning rates, which it reads
from memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury._batch import has_samples

WARM_UP = 2  # ordinary steps on a shape before it is recorded


@dataclass
class Recording:
    """A graph, the buffers it reads and the numbers it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Any
    targets: Tensor | None
    rates: list[Tensor]  # the learning rate of each parameter group
    state: dict[str, Any]  # part of the optimizer's state, as buffers
    numbers: Tensor  # (6,): loss, damping, ratio, predicted, squared norm, accepted

    def replay(self, inputs: Any, targets: Tensor | None, order: Tensor | None, rates: Sequence[Any]) -> Tensor:
        """Take the step on a batch, its samples in the given order; the numbers, in memory of their own."""
        samples = 0 if order is None else len(order)
        pairs = list(zip(pytree.tree_leaves(self.inputs), pytree.tree_leaves(inputs), strict=True))
        if targets is not None:
            pairs.append((self.targets, targets))
        for buffer, given in pairs:
            if isinstance(buffer, Tensor):
                if order is not None and has_samples(given, samples):
                    torch.index_select(given.detach(), 0, order, out=buffer)
                else:
                    buffer.copy_(given.detach(), non_blocking=True)
        for buffer, rate in zip(self.rates, rates, strict=True):
            buffer.copy_(rate) if isinstance(rate, Tensor) else buffer.fill_(rate)
        self.graph.replay()
        return self.numbers.clone()


class Recorder:
    """Decides which steps are recorded, keeps the recording, and says once where there can be none."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._key: Hashable = None  # what the recording holds for
        self._seen: dict[Hashable, int] = {}
        self._owner: object = None  # kept alive, as the key holds its id
        self._refused = False
        self._told = False

    def is_due(self, key: Hashable, owner: object) -> bool:
        """Whether a step of this kind is replayed, or recorded now; else it is an ordinary one.

        key is a pair: what else must not change, with the id of `owner` in it, and the shape of the batch.
        """
        if self._refused:
            return False
        if key == self._key:
            return True
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP:
            return False
        if self.recording is None or not _same_but_shape(key, self._key):
            self.recording, self._key, self._owner = None, key, owner
            return True
        self._tell(
            "a batch has another shape than the one whose step was recorded: batches of that shape take ordinary "
            "steps (drop_last=True in a DataLoader avoids this)"
        )
        return False

    def refuse(self, reason: str) -> None:
        """Take ordinary steps from now on."""
        self.recording, self._key, self._refused = None, None, True
        self._tell(f"{reason}: steps are not recorded and capture=True has no effect")

    def _tell(self, text: str) -> None:
        if not self._told:
            warnings.warn(text, UserWarning, stacklevel=5)
        self._told = True


def _same_but_shape(a: Any, b: Any) -> bool:
    return bool(a[0] == b[0])


def shape_of(inputs: Any, targets: Tensor | None) -> Hashable:
    """What must agree for two batches to share a recording."""
    leaves, structure = pytree.tree_flatten((inputs, targets))
    described = [
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return str(structure), tuple(described)


def buffers_like(tree: Any) -> Any:
    """Copies of every tensor in a tree."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def overwrite(buffers: Any, values: Any) -> None:
    """Bring buffers up to date where the optimizer's state was replaced (by load_state_dict, say)."""
    for buffer, value in zip(pytree.tree_leaves(buffers), pytree.tree_leaves(values), strict=True):
        if buffer is not value:
            buffer.copy_(value)


def record(
    inputs: Any,
    targets: Tensor | None,
    rates: Sequence[Any],
    state: dict[str, Any],
    device: torch.device,
    run: Callable[[Any, Tensor | None, list[Tensor], dict[str, Any]], tuple[Tensor, dict[str, Any]]],
) -> Recording:
    """Record run(inputs, targets, rates, state) -> (numbers, new state) on buffers; nothing is computed yet.

    state holds tensors, or dictionaries of them; in the recording the new state overwrites the old.
    """
    inputs, targets, state = buffers_like(inputs), buffers_like(targets), buffers_like(state)
    held = [torch.as_tensor(rate, dtype=torch.float64).to(device) for rate in rates]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers, new = run(inputs, targets, held, state)
        for buffer, value in zip(pytree.tree_leaves(state), pytree.tree_leaves(new), strict=True):
            buffer.copy_(value)
    return Recording(graph, inputs, targets, held, state, numbers)
