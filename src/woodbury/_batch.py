"""Batches of any nesting (tensor, tuple, dictionary): count, check and select their samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class BadSamplesError(ValueError):
    """Some samples of a batch cannot be used; `indices` are their places in the batch."""

    def __init__(self, message: str, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = list(indices)


def in_words(indices: Sequence[int], most: int = 10) -> str:
    """The first of these indices, for a message."""
    shown = ", ".join(map(str, indices[:most]))
    return shown if len(indices) <= most else f"{shown}, ..."


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def sample_count(inputs: Any) -> int:
    """The number of samples: the length of the first axis of the first tensor."""
    leaves = _leaves(inputs)
    if not leaves:
        raise TypeError(f"inputs must hold at least one tensor, got {type(inputs).__name__}")
    if leaves[0].dim() == 0:
        raise ValueError("inputs must have a sample axis, got a 0-dim tensor")
    if leaves[0].shape[0] == 0:
        raise ValueError("empty batch: inputs hold no sample")
    return leaves[0].shape[0]


def check_batch(inputs: Any, targets: Tensor | None) -> int:
    """The number of samples; raises on an empty batch, a wrong number of targets or (on CPU) nan and inf."""
    samples = sample_count(inputs)
    if targets is not None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a tensor or None, got {type(targets).__name__}")
        if targets.dim() == 0 or targets.shape[0] != samples:
            raise ValueError(f"{samples} samples but targets of shape {tuple(targets.shape)}")
        _check_finite(targets, "targets", samples)
    for leaf in _leaves(inputs):
        _check_finite(leaf, "inputs", samples)
    return samples


def _check_finite(tensor: Tensor, what: str, samples: int) -> None:
    """Raise if a value is nan or infinite; not checked on other devices than the CPU, as that would wait."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
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
    """Whether a leaf of a batch is a tensor whose first axis is the sample axis."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples


def whole_leaves(tree: Any, samples: int, known: frozenset[Any]) -> frozenset[Any]:
    """The places (structure, index) of tensors without a sample axis: those known and those in this tree.

    Raises if a tensor that had no sample axis before now has a first axis as long as the number of samples.
    """
    if isinstance(tree, Tensor):
        return known
    leaves, structure = pytree.tree_flatten(tree)
    shape = str(structure)
    for index, leaf in enumerate(leaves):
        if has_samples(leaf, samples) and (shape, index) in known:
            raise ValueError(
                f"tensor {index + 1} of the inputs, of shape {tuple(leaf.shape)}, had no sample axis in an "
                f"earlier batch, and now its first axis has as many entries as there are samples ({samples}): "
                "whether it is to be cut by sample cannot be told. Keep what is the same for all samples in the "
                "model, or in forward="
            )
        if isinstance(leaf, Tensor) and not has_samples(leaf, samples):
            known = known | {(shape, index)}
    return known


def take(tree: Any, index: Tensor, samples: int) -> Any:
    """The samples at `index` of every tensor in the tree whose first axis has `samples` entries."""

    def select(leaf: Any) -> Any:
        if not has_samples(leaf, samples):
            return leaf
        if leaf.is_cuda and leaf.layout is torch.strided and leaf.is_contiguous():
            return leaf[index]  # the same here, and faster to launch
        return leaf.index_select(0, index)

    return select(tree) if isinstance(tree, Tensor) else pytree.tree_map(select, tree)


def part(tree: Any, window: slice, samples: int) -> Any:
    """The samples of a window, as views."""

    def select(leaf: Any) -> Any:
        return leaf[window] if has_samples(leaf, samples) else leaf

    return select(tree) if isinstance(tree, Tensor) else pytree.tree_map(select, tree)


def split(tree: Any, at: int, samples: int) -> tuple[Any, Any]:
    """The first `at` samples and the others, as views."""
    return part(tree, slice(0, at), samples), part(tree, slice(at, None), samples)


@dataclass(frozen=True)
class Batch:
    """A checked batch whose first `curvature` samples are S2."""

    inputs: Any
    targets: Tensor | None
    samples: int  # N1
    curvature: int  # N2
    order: Tensor | None = None  # the place of each sample in the batch that was given; None: the same

    def pieces(self) -> list[tuple[Any, Tensor | None, int]]:
        """S2 and the samples outside it, as (inputs, targets, samples)."""
        if self.curvature == self.samples:
            return [(self.inputs, self.targets, self.samples)]
        inputs = split(self.inputs, self.curvature, self.samples)
        targets = (None, None) if self.targets is None else split(self.targets, self.curvature, self.samples)
        sample_counts = (self.curvature, self.samples - self.curvature)
        return list(zip(inputs, targets, sample_counts, strict=True))


def ordered_batch(inputs: Any, targets: Tensor | None, samples: int, order: Tensor, curvature: int) -> Batch:
    """The batch with its samples in this order, the first `curvature` of them S2."""
    targets = None if targets is None else take(targets, order, samples)
    return Batch(take(inputs, order, samples), targets, samples, curvature, order)


def subset_first(subset: Any, samples: int) -> tuple[Tensor, int]:
    """An order of the batch with the subset in front, and the size of the subset."""
    try:
        indices = torch.as_tensor(subset).cpu()
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0)
    if indices.dtype == torch.bool or indices.is_floating_point() or indices.dim() != 1 or len(indices) == 0:
        raise ValueError("subset must be a non-empty 1-d sequence of integer indices into the batch")
    indices = indices.long()
    if indices.min() < 0 or indices.max() >= samples:
        raise ValueError(f"subset: indices must lie in 0..{samples - 1}, got {indices.min()} to {indices.max()}")
    if len(indices.unique()) != len(indices):
        raise ValueError("subset: an index appears twice")
    outside = torch.ones(samples, dtype=torch.bool)
    outside[indices] = False
    return torch.cat([indices, outside.nonzero().flatten()]), len(indices)
