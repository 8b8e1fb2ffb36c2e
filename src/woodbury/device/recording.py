"""Steps, and passes that a search repeats, as CUDA graphs: one launch in place of hundreds of small ones.

A step or a function of tensors is recorded at its third call of a kind, on buffers of its own: arguments are
copied in, the graph is replayed, the results copied out. A kind is a key of what Python reads
(`woodbury.device.fingerprint`) and the shapes of all tensors. Learning rates are read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury._batch import has_samples
from woodbury.device import fingerprint
from woodbury.device.constants import all_constants

WARM_UP = 2  # ordinary calls of a kind before one is recorded
_MAX_RECORDINGS = 4  # of steps at a time, one per shape of batches
_MAX_KINDS = 64  # that are counted
WORTH_RECORDING = 2**30  # bytes: a step that allocates more keeps the device busy without a recording
PASSES_WORTH_RECORDING = 2**34  # as do passes
_AGREES = 1e-6  # of the largest result: recorded and ordinary passes are as close when a recording is made


class Key(NamedTuple):
    """What must be the same for a recording to be valid."""

    fixed: Hashable  # everything but the batch that changes the numbers
    shape: Hashable  # of the batch


class Graph(NamedTuple):
    """A CUDA graph of a function."""

    replay: Callable[[], None]
    results: Any  # what the function returned
    constants: Sequence[Tensor]  # which the graph reads: they must stay where they are


class Recording:
    """A CUDA graph of run(inputs, targets, rates, state) on buffers, which computes nothing yet.

    state holds tensors, or dictionaries of them, that run overwrites. dtype is that of the rates.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Tensor | None,
        rates: Sequence[Any],
        state: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        run: Callable[[Any, Tensor | None, list[Tensor], dict[str, Any]], Tensor],
    ) -> None:
        self.inputs, self.targets, self.state = buffers_like(inputs), buffers_like(targets), buffers_like(state)
        self.rates = [torch.as_tensor(rate, dtype=dtype, device=device) for rate in rates]  # by parameter group
        self.known_rates: list[float | None] = [None] * len(rates)  # the values in them, None where not known
        self.graph = record_graph(partial(run, self.inputs, self.targets, self.rates, self.state), device)

    def load(self, inputs: Any, targets: Tensor | None, order: Tensor | None, rates: Sequence[Any]) -> None:
        """Copy in a batch, with its samples in this order, and the learning rates, for `graph.replay`."""
        samples = 0 if order is None else order.shape[0]
        pairs = [(self.inputs, inputs)]
        if not isinstance(inputs, Tensor):
            pairs = list(zip(pytree.tree_leaves(self.inputs), pytree.tree_leaves(inputs), strict=True))
        if targets is not None:
            pairs.append((self.targets, targets))
        with torch.no_grad():
            for buffer, value in pairs:
                if isinstance(buffer, Tensor):
                    if order is not None and has_samples(value, samples):
                        torch.index_select(value.detach(), 0, order, out=buffer.detach())
                    else:
                        buffer.copy_(value, non_blocking=True)
        for index, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                self.rates[index].copy_(rate)
                self.known_rates[index] = None
            elif rate != self.known_rates[index]:
                self.rates[index].fill_(rate)
                self.known_rates[index] = rate


class Recordings:
    """Decides which steps are recorded, and keeps the recordings."""

    def __init__(self) -> None:
        self._recordings: dict[Key, Recording] = {}
        self._step_counts: dict[Key, int] = {}  # ordinary steps of each kind
        self._large_kinds: set[Key] = set()  # kinds that are not worth recording
        self._running: tuple[Key, int] | None = None  # an ordinary step, and the bytes allocated before it
        self._given_up = False

    def is_due(self, key: Key, device: torch.device) -> bool:
        """Whether to record a step of this kind now, which has no recording yet; else it is an ordinary step."""
        if self._given_up or key in self._large_kinds:
            return False
        if len(self._step_counts) >= _MAX_KINDS and key not in self._step_counts:
            self._step_counts, self._large_kinds = {}, set()
        self._step_counts[key] = step_count = self._step_counts.get(key, 0) + 1
        if step_count <= WARM_UP:
            self._running = key, bytes_ever_allocated(device)
            return False
        alike = [old for old in self._recordings if old.fixed == key.fixed]
        return len(alike) < _MAX_RECORDINGS

    def ordinary_step_ended(self, device: torch.device, drew_numbers: bool = False) -> None:
        """Note what a step has shown: whether it is too large to be worth recording, or draws random numbers."""
        if self._running is not None:
            key, before = self._running
            if bytes_ever_allocated(device) - before > WORTH_RECORDING:
                self._large_kinds.add(key)
            self._running = None
        if drew_numbers:
            self.give_up()

    def find(self, key: Key) -> Recording | None:
        return self._recordings.get(key)

    def add(self, key: Key, recording: Recording) -> None:
        """Keep a recording, and drop those whose fixed part of the key differs."""
        self._recordings = {old: kept for old, kept in self._recordings.items() if old.fixed == key.fixed}
        self._recordings[key] = recording

    def give_up(self) -> None:
        """Record nothing from now on, and drop all recordings."""
        self._recordings, self._step_counts, self._running, self._given_up = {}, {}, None, True


def bytes_ever_allocated(device: torch.device) -> int:
    """All bytes that torch has allocated on a device so far, freed ones included."""
    statistics = torch.cuda.memory_stats(device)
    return int(statistics.get("allocated_bytes.all.allocated", 0))


def shape_of(inputs: Any, targets: Tensor | None, device: torch.device) -> Hashable | None:
    """What must agree for two batches to share a recording; None for batches that no graph can read.

    These are batches that are not on the device (a copy to it may still be under way when the next batch comes),
    and those that hold anything but plain tensors and plain values.
    """
    tensors, plain = [inputs, targets], ()
    if not isinstance(inputs, Tensor):
        leaves, structure = pytree.tree_flatten(inputs)
        tensors = [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), targets]
        values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if not all(isinstance(value, bool | int | float | str | None) for value in values):
            return None
        plain = (str(structure), *values)
    descriptions = []
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != device:
                return None
            descriptions.append((tensor.shape, tensor.dtype, tensor.requires_grad))
    return tuple(descriptions), plain


def buffers_like(tree: Any) -> Any:
    """Copies of every tensor in a tree."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(copy, tree)


def overwrite(buffers: Any, values: Any) -> None:
    """Copy values into buffers wherever they are other tensors."""
    for buffer, value in zip(pytree.tree_leaves(buffers), pytree.tree_leaves(values), strict=True):
        if buffer is not value:
            buffer.copy_(value)


def record_graph(run: Callable[[], Any], device: torch.device, pool: Any = None) -> Graph:
    """A graph of run(), which computes nothing yet."""
    graph = torch.cuda.CUDAGraph()
    constants = all_constants()
    try:
        # thread_local: other threads (a DataLoader's, say) may go on using the device meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = run()
    except BaseException:  # torch's allocator and generator still wait for the end of the recording
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index, graph.pool())
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=device)  # a recording that succeeds resets the generator
        raise
    return Graph(graph.replay, results, constants + all_constants())  # and those that were made meanwhile


@dataclass
class _Kind:
    """How often a function was called, and its recording."""

    calls: int = 0
    graph: Graph | None = None
    buffers: list[Tensor] = field(default_factory=list)

    def replay(self, tensors: list[Tensor]) -> Any:
        assert self.graph is not None
        with torch.no_grad():
            torch._foreach_copy_(self.buffers, tensors)
            self.graph.replay()
            return pytree.tree_map(torch.clone, self.graph.results)


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
        before = bytes_ever_allocated(device)
        results = function(*arguments)
        allocated = bytes_ever_allocated(device) - before
        kind.calls += 1
        if kind.calls > WARM_UP and allocated <= PASSES_WORTH_RECORDING:
            kind.graph = self._record(kind, function, leaves, structure)
            if kind.graph is None or not _agree(kind.replay(tensors), results):
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
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            self._kinds[full] = _Kind()
        return self._kinds[full]

    def _record(
        self, kind: _Kind, function: Callable[..., Any], leaves: list[Any], structure: Any
    ) -> Graph | None:
        """A graph of a call, which computes nothing yet; None if there can be none."""
        copies = buffers_like(leaves)
        kind.buffers = [leaf.detach() for leaf in copies if isinstance(leaf, Tensor)]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

        def run() -> Any:
            return pytree.tree_map(Tensor.detach, function(*pytree.tree_unflatten(copies, structure)))

        try:
            return record_graph(run, kind.buffers[0].device, self._pool)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a graph cannot hold: a wait for the device, a copy to it
            return None


def _agree(replayed: Any, ordinary: Any) -> bool:
    """A replay runs no Python: what that changes from call to call, random numbers say, shows here."""
    pairs = zip(pytree.tree_leaves(replayed), pytree.tree_leaves(ordinary), strict=True)
    return all(bool((ours - theirs).abs().max() <= _AGREES * theirs.abs().max()) for ours, theirs in pairs)
