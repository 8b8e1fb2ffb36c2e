"""Batches of any nesting (tensor, tuple, dictionary): counting, checking and choosing their samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


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
    """Raise on an empty batch, a wrong number of targets or (on CPU) a number that is not finite."""
    samples = sample_count(inputs)
    if targets is not None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a tensor or None, got {type(targets).__name__}")
        if targets.dim() == 0 or targets.shape[0] != samples:
            raise ValueError(f"{samples} samples but targets of shape {tuple(targets.shape)}")
        _check_finite(targets, "targets")
    for leaf in _leaves(inputs):
        _check_finite(leaf, "inputs")
    return samples


def _check_finite(tensor: Tensor, what: str) -> None:
    """Raise if a value is nan or infinite; on other devices than the CPU asking would wait, so they pass."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return
    # One cheap pass; a sum can overflow without any value being infinite, so only then look closely.
    if math.isfinite(tensor.sum().item()) or torch.isfinite(tensor).all():
        return
    flat = torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor)
    bad = (~flat).nonzero().flatten()
    raise ValueError(f"{what} hold nan or inf in {len(bad)} sample(s), first at index {int(bad[0])}")


def take(tree: Any, index: Tensor, samples: int) -> Any:
    """The samples at `index` of every tensor in the tree whose first axis has `samples` entries."""

    def choose(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples:
            return leaf.index_select(0, index)
        return leaf

    return choose(tree) if isinstance(tree, Tensor) else pytree.tree_map(choose, tree)


def split(tree: Any, at: int, samples: int) -> tuple[Any, Any]:
    """The first `at` samples and the rest, as views."""

    def cut(window: slice) -> Any:
        def choose(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples:
                return leaf[window]
            return leaf

        return choose(tree) if isinstance(tree, Tensor) else pytree.tree_map(choose, tree)

    return cut(slice(0, at)), cut(slice(at, None))
