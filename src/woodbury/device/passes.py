"""Passes through a model replayed from CUDA graphs: a search repeats a few of them many times in every step.

A function of tensors is recorded at its third call of a kind, on buffers of its own: arguments are copied in, the
graph is replayed, the results copied out. A kind is a key of the caller (what Python reads: the model and the
functions, as `woodbury.device.fingerprint` sees them), the shapes of all tensors, and the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury.device import fingerprint, recording

_MOST_KINDS = 64  # that are remembered
_MOST_BYTES = 2**34  # that an ordinary call allocates: one with more keeps the device busy without a recording
_AGREES = 1e-6  # of the largest result: recorded and ordinary passes are as close when a recording is made


@dataclass
class _Kind:
    """How often a function was called, and its recording."""

    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    buffers: list[Tensor] = field(default_factory=list)
    results: Any = None
    constants: Any = ()  # which the graph reads too: they must stay where they are

    def replay(self, tensors: list[Tensor]) -> Any:
        assert self.graph is not None
        with torch.no_grad():
            torch._foreach_copy_(self.buffers, tensors)
            self.graph.replay()
            return pytree.tree_map(torch.clone, self.results)


class Replays:
    """The recordings of passes through one model; on anything but a CUDA device every call is an ordinary one."""

    def __init__(self, is_used: bool = True) -> None:
        self.is_used = is_used
        self._kinds: dict[Hashable, _Kind] = {}
        self._pool: Any = None  # the memory of all graphs: only one runs at a time, and its results are copied

    def __deepcopy__(self, memo: Any) -> Replays:
        return Replays(self.is_used)

    def __call__(self, key: Callable[[], Hashable], function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), a tensor or a tree of them; key() is made where that may be replayed."""
        leaves, structure = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = tensors[0].device
        if not self.is_used or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return function(*arguments)
        kind = self._kind_of(key(), leaves, structure)
        if kind.graph is not None:
            return kind.replay(tensors)
        before = recording.bytes_ever_allocated(device)
        results = function(*arguments)
        allocated = recording.bytes_ever_allocated(device) - before
        kind.calls += 1
        if kind.calls > recording.WARM_UP and allocated <= _MOST_BYTES:
            recorded = self._record(kind, function, leaves, structure)
            if not (recorded and _agree(kind.replay(tensors), results)):
                kind.graph, kind.calls = None, -(2**40)  # never again
        return results

    def _kind_of(self, key: Hashable, leaves: list[Any], structure: Any) -> _Kind:
        shapes = [
            (leaf.shape, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else fingerprint.of_value(leaf, depth=3)
            for leaf in leaves
        ]
        full = (key, str(structure), tuple(shapes), torch.is_grad_enabled())
        if full not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            self._kinds[full] = _Kind()
        return self._kinds[full]

    def _record(self, kind: _Kind, function: Callable[..., Any], leaves: list[Any], structure: Any) -> bool:
        """Record a call; it computes nothing yet. Whether that is possible."""
        copies = [recording.buffers_like(leaf) for leaf in leaves]
        buffers = [leaf.detach() for leaf in copies if isinstance(leaf, Tensor)]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph, results, constants = recording.record_graph(
                lambda: function(*pytree.tree_unflatten(copies, structure)), buffers[0].device, self._pool
            )
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a graph cannot hold: a wait for the device, a copy to it
            return False
        kind.graph, kind.buffers, kind.constants = graph, buffers, constants
        kind.results = pytree.tree_map(lambda result: result.detach(), results)
        return True


def _agree(replayed: Any, ordinary: Any) -> bool:
    """A replay runs no Python: what that changes from call to call, random numbers say, shows here."""
    pairs = zip(pytree.tree_leaves(replayed), pytree.tree_leaves(ordinary), strict=True)
    return all(bool((ours - theirs).abs().max() <= _AGREES * theirs.abs().max()) for ours, theirs in pairs)
