"""Batches of any nesting (tensor, tuple, dictionary): count, check and select their samples.

Of a batch of n samples, an entry has a sample axis if it is a tensor or a NumPy array whose first axis has length
n, or a list or tuple of n entries none of which has a sample axis itself (names, lengths, graphs of different
sizes).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class BadSamplesError(ValueError):
    """Some samples of a batch cannot be used; `indices` are their places in the batch."""

    def __init__(self, message: str, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = list(indices)


def in_words(items: Sequence[object]) -> str:
    """The first ten of these indices or names, for a message."""
    shown = ", ".join(map(str, items[:10]))
    return shown if len(items) <= 10 else f"{shown}, ..."


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def unwrapped(tree: Any) -> Any:
    """A mapping that torch does not look into, such as transformers.BatchEncoding, as a dictionary."""
    is_known = isinstance(tree, Tensor) or type(tree) in pytree.SUPPORTED_NODES
    return dict(tree) if not is_known and isinstance(tree, Mapping) else tree


def sample_count(inputs: Any) -> int:
    """The number of samples: the length of the first axis of the first tensor."""
    leaves = _leaves(inputs)
    if not leaves:
        ways = "inputs.toarray() as a tensor" if hasattr(inputs, "toarray") else "a dict of tensors: dict(batch)"
        raise TypeError(f"inputs must hold at least one tensor, got {type(inputs).__name__}: pass {ways}")
    if leaves[0].dim() == 0:
        raise ValueError("inputs must have a sample axis, got a 0-dim tensor")
    if leaves[0].shape[0] == 0:
        raise ValueError("empty batch: inputs hold no sample")
    return leaves[0].shape[0]


def is_empty(inputs: Any) -> bool:
    """Whether these are inputs of no sample; what is no batch at all is not empty."""
    leaves = _leaves(inputs)
    return bool(leaves) and leaves[0].dim() > 0 and leaves[0].shape[0] == 0


def fault_of_types(error: Exception, inputs: Any, dtype: torch.dtype) -> str | None:
    """What to write if a pass failed for inputs of another type than the parameters."""
    if any(leaf.layout is not torch.strided for leaf in _leaves(inputs)):
        return f"the model does not take sparse inputs: write inputs.to_dense() ({error})"
    others = sorted({str(leaf.dtype) for leaf in _leaves(inputs)} - {str(dtype)})
    if not others or "type" not in str(error):
        return None
    return (
        f"inputs of {' and '.join(others)} do not fit parameters of {dtype}: write inputs.to({dtype}), of an "
        f"array inputs.astype('{str(dtype).removeprefix('torch.')}'), or convert the model ({error})"
    )


def check_batch(inputs: Any, targets: Tensor | None) -> int:
    """The number of samples; raises on an empty batch, a wrong number of targets or (on CPU) nan and inf."""
    samples = sample_count(inputs)
    if targets is not None:
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"targets must be a tensor or None, got {type(targets).__name__}: write torch.as_tensor(targets)"
            )
        if targets.dim() == 0 or targets.shape[0] != samples:
            raise ValueError(f"{samples} samples but targets of shape {tuple(targets.shape)}")
        _check_finite(targets, "targets", samples)
    for leaf in _leaves(inputs):
        _check_finite(leaf, "inputs", samples)
    return samples


def _check_finite(tensor: Tensor, what: str, samples: int) -> None:
    """Raise if a value is nan or infinite; not checked on other devices than the CPU, as that would wait."""
    if not tensor.is_cpu or not tensor.is_floating_point():
        return
    # A sum is cheap. It can overflow though all values are finite: only then look at each.
    if math.isfinite(tensor.sum().item()) or torch.isfinite(tensor).all():
        return
    if not has_samples(tensor, samples):
        raise ValueError(f"{what} hold nan or inf in a tensor of shape {tuple(tensor.shape)}, for all samples")
    flat = torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor)
    bad: list[int] = (~flat).nonzero().flatten().tolist()
    raise BadSamplesError(
        f"{what} hold nan or inf in {len(bad)} sample(s), at index {in_words(bad)} of the batch", bad
    )


def has_samples(leaf: Any, samples: int) -> bool:
    """Whether an entry of a batch has one entry of its own for each sample."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == samples
    if type(leaf) in (list, tuple):
        return len(leaf) == samples and not any(has_samples(entry, samples) for entry in pytree.tree_leaves(leaf))
    return _is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == samples


def _is_array(leaf: Any) -> bool:
    """Whether it is a NumPy array; torch alone is needed here."""
    return type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim")


def leaves_of(tree: Any, samples: int) -> tuple[list[Any], Any]:
    """The entries of a batch and the structure around them; what has a sample axis is one entry."""
    return pytree.tree_flatten(tree, is_leaf=lambda node: has_samples(node, samples))


def sample_axes(tree: Any, samples: int, known: Mapping[str, bool]) -> Mapping[str, bool]:
    """Which places in the inputs have a sample axis: those known from earlier batches, and those in this tree.

    Raises if a place had one before and has none now, or the other way round: one of the two was a coincidence of
    sizes, and an entry that is the same for all samples must not be cut.
    """
    if isinstance(tree, Tensor) or samples == 1:  # of one sample nothing is cut
        return known
    new: dict[str, bool] = {}
    for path, node in _places(tree, samples):
        new[path] = has = has_samples(node, samples)
        if known.get(path, has) is not has:
            size = f"of shape {tuple(node.shape)}" if hasattr(node, "shape") else f"with {len(node)} entries"
            before, now = ("no", "as many") if has else ("a", "not as many")
            raise ValueError(
                f"inputs{path}, {type(node).__name__} {size}, had {before} sample axis in an earlier batch, and "
                f"now has {now} entries as there are samples ({samples}): whether to cut it by sample cannot be "
                "told. Keep what is the same for all samples in the model, or in forward="
            )
    return known if new.items() <= known.items() else {**known, **new}


def _places(tree: Any, samples: int, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and the value of every tensor, array and list in a batch that may have a sample axis."""
    if isinstance(tree, Tensor) or _is_array(tree):
        if tree.ndim:
            yield path, tree
    elif isinstance(tree, dict):
        for key, node in tree.items():
            yield from _places(node, samples, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        tensors = [leaf for leaf in tree if isinstance(leaf, Tensor)]
        if path and len(tensors) == samples > len([leaf for leaf in tensors if has_samples(leaf, samples)]) > 0:
            raise ValueError(
                f"inputs{path} holds {samples} tensors for {samples} samples, and some of them have a first axis "
                "of that length too: whether there is one per sample cannot be told. Pad and stack them"
            )
        if type(tree) in (list, tuple):
            yield path, tree
        if not has_samples(tree, samples):
            for index, node in enumerate(tree):
                yield from _places(node, samples, f"{path}[{index}]")


def take(tree: Any, index: Tensor, samples: int) -> Any:
    """The samples at `index` of every entry of the tree that has some; raises where they cannot be chosen."""

    def select(leaf: Any) -> Any:
        if not has_samples(leaf, samples):
            if not isinstance(leaf, Tensor) and not _is_array(leaf):
                _check_plain(leaf)
            return leaf
        if not isinstance(leaf, Tensor):
            rows = index.tolist()
            return leaf[rows] if _is_array(leaf) else type(leaf)([leaf[row] for row in rows])
        if leaf.is_cuda and leaf.layout is torch.strided and leaf.is_contiguous():
            return leaf[index]  # the same here, and faster to launch
        return leaf.index_select(0, index)

    return _map_leaves(select, tree, samples)


def _check_plain(leaf: Any) -> None:
    """Raise for an entry that may hold samples of its own in a way not known here."""
    if not isinstance(leaf, _PLAIN) and not callable(leaf):
        raise TypeError(
            f"inputs hold a {type(leaf).__name__}, of which the curvature samples cannot be chosen: pass tensors, "
            "NumPy arrays or lists with one entry per sample, or take the curvature from the whole batch"
        )


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)


def part(tree: Any, window: slice, samples: int) -> Any:
    """The samples of a window, as views where they are tensors."""
    return _map_leaves(lambda leaf: leaf[window] if has_samples(leaf, samples) else leaf, tree, samples)


def _map_leaves(function: Callable[[Any], Any], tree: Any, samples: int) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    return pytree.tree_map(function, tree, is_leaf=lambda node: has_samples(node, samples))


def join(trees: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One batch of several: tensors with a sample axis are joined, everything else must be the same."""
    flattened = [pytree.tree_flatten(tree) for tree in trees]
    structure = flattened[0][1]
    if any(other != structure for _, other in flattened[1:]):
        raise ValueError("the inputs of the batches for one step have different forms")
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flattened), strict=True):
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) == len(leaves) and all(map(has_samples, tensors, sizes)):
            shapes = {tensor.shape[1:] for tensor in tensors}
            if len(shapes) > 1:
                raise ValueError(f"the inputs of the batches for one step have different shapes: {sorted(shapes)}")
            joined.append(torch.cat(tensors))
            continue
        equal = torch.equal if len(tensors) == len(leaves) else operator.eq
        if not all(equal(leaves[0], other) for other in leaves[1:]):
            raise ValueError("inputs without a sample axis differ between the batches for one step")
        joined.append(leaves[0])
    return pytree.tree_unflatten(joined, structure)


@dataclass(eq=False)
class Batch:
    """A checked batch whose first `curvature` samples are S2."""

    inputs: Any
    targets: Tensor | None
    samples: int  # N1
    curvature: int  # N2
    order: Tensor | None = None  # of its samples in the batch as it was given; None: the same

    def copied(self) -> Batch:
        """The same with inputs of its own, which nobody changes later."""
        if self.order is not None:  # gathered, and so its own already
            return self
        return replace(self, inputs=pytree.tree_map_only(Tensor, Tensor.clone, self.inputs))

    def pieces(self) -> list[tuple[Any, Tensor | None, int]]:
        """S2 and the samples outside it, as (inputs, targets, samples)."""
        if self.curvature == self.samples:
            return [(self.inputs, self.targets, self.samples)]
        pieces = []
        for window in (slice(0, self.curvature), slice(self.curvature, self.samples)):
            inputs, targets = (part(tree, window, self.samples) for tree in (self.inputs, self.targets))
            pieces.append((inputs, targets, window.stop - window.start))
        return pieces


def subset_first(subset: Any, samples: int, device: torch.device) -> tuple[Tensor, int]:
    """An order of the batch with the subset in front, and the size of the subset."""
    try:
        indices = torch.as_tensor(subset, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0, device="cpu")
    if indices.dtype == torch.bool or indices.is_floating_point() or indices.dim() != 1 or len(indices) == 0:
        raise ValueError("subset must be a non-empty 1-d sequence of integer indices into the batch")
    indices = indices.long()
    if indices.min() < 0 or indices.max() >= samples:
        raise ValueError(f"subset: indices must lie in 0..{samples - 1}, got {indices.min()} to {indices.max()}")
    if len(indices.unique()) != len(indices):
        raise ValueError("subset: an index appears twice")
    outside = torch.ones(samples, dtype=torch.bool, device="cpu")
    outside[indices] = False
    return torch.cat([indices, outside.nonzero().flatten()]).to(device), len(indices)
