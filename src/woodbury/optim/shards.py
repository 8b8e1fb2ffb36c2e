"""A batch that is spread over processes: who takes part, what all start from, and what each must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from woodbury import _batch
from woodbury._choice import part_named
from woodbury.losses.rules import ScaledLoss, loss_rule
from woodbury.parallel.group import ALONE, Group, all_processes
from woodbury.quadratic.quadratic import Problem

_OPTIONS = (bool, int, float, str, type(None), Tensor)  # what the options of a loss are
Words = dict[str, "str | None"]  # by what they are about
PROCESS_GROUPS = {None: False, "self": True}  # by name: whether a step is one process's own


def find_group(process_group: Any, model: nn.Module) -> Group:
    """The processes whose samples are one batch: those of torch.distributed, unless each trains for itself."""
    by_name = process_group is None or isinstance(process_group, str)
    is_alone = by_name and part_named("process_group", process_group, PROCESS_GROUPS)
    group = ALONE if is_alone else all_processes(process_group)
    if isinstance(model, DistributedDataParallel) and is_alone:
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, and process_group='self' asks for a model of each "
            "process's own: pass the module inside"
        )
    return group


def start_alike(group: Group, parameters: Iterable[Tensor]) -> None:
    """Start all processes from the parameters of the first."""
    if group.size > 1:
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(group.same(parameter))


def describe(settings: Any, groups: Iterable[Mapping[str, Any]]) -> Words:
    """What processes that train together must have in common, in words: settings, parameters and their groups."""
    words: Words = {name: _in_words(value) for name, value in vars(settings).items()}
    for index, group in enumerate(groups):
        for name, value in group.items():
            if name not in ("params", "param_names"):
                words[f"{name} (of parameter group {index})"] = _in_words(value)
        names = group.get("param_names", [""] * len(group["params"]))
        for place, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            words[f"parameter {place} (of group {index})"] = f"{name} {parameter.dtype} {tuple(parameter.shape)}"
    return words


def _in_words(value: Any) -> str:
    """A setting without addresses in memory, which no two processes share."""
    if isinstance(value, Tensor):  # one on another device is not waited for
        numbers = value.tolist() if value.device.type == "cpu" else "..."
        return f"{value.dtype} {tuple(value.shape)} {numbers}"
    if isinstance(value, nn.Module):  # a loss
        plain = {**vars(value), **dict(value.named_buffers())}
        names = [name for name in sorted(plain) if name[0] != "_" and name != "training"]
        options = [f"{name}={_in_words(plain[name])}" for name in names if isinstance(plain[name], _OPTIONS)]
        return f"{type(value).__name__}({', '.join(options)})"
    if isinstance(getattr(value, "name", None), str):  # a part that was chosen by its name
        return repr(value.name)
    has_words = not callable(value) and type(value).__repr__ is not object.__repr__
    return repr(value) if has_words else str(getattr(value, "__qualname__", type(value).__qualname__))


def _describe_batch(batch: tuple[Any, Any], samples: int) -> Words:
    """The types of numbers in a batch; an empty one, or what is none, goes with any."""
    words: Words = {}
    for name, tree in zip(("inputs", "targets"), batch, strict=True):
        types = [str(leaf.dtype) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        words[f"dtype of {name}"] = ", ".join(types) if samples and types else None
    return words


def borrow_sample(
    group: Group, batch: tuple[Any, Any], device: torch.device, state: dict[Any, Any], common: Words
) -> tuple[Any, Tensor | None] | None:
    """A sample of another of several processes where this one has none; None if it has some.

    All processes must call it, and raise if `common` or the types of their batches differ. The state learns of the
    size of the whole batch, which another number of processes can go on with.
    """
    samples = _count(batch[0])
    both = common, _describe_batch(batch, samples)
    counts, commons, batches = group.gather_numbers(samples, *(zlib.crc32(repr(words).encode()) for words in both))
    if len(set(commons)) > 1 or len({code for code, number in zip(batches, counts, strict=True) if number}) > 1:
        group.check_same({**both[0], **both[1]})
    state["largest_batch"] = max(sum(counts), state["largest_batch"])
    if 0 not in counts:
        return None
    lender = next((rank for rank, count in enumerate(counts) if count), None)
    if lender is None:
        raise ValueError("empty batch: no process has a sample")
    lent = None
    if lender == group.rank:
        first = torch.zeros(1, dtype=torch.long, device=device)
        lent = tuple(_batch.take(tree, first, counts[lender]) for tree in batch)
    lent = group.gather_objects(lent)[lender]
    return None if counts[group.rank] else lent


def _count(inputs: Any) -> int:
    """The number of samples, 0 for an empty batch; of what is no batch 1, which is refused where it is checked."""
    try:
        return 0 if _batch.is_empty(inputs) else _batch.sample_count(inputs)
    except (TypeError, ValueError):
        return 1


def count_nothing(problem: Problem) -> Problem:
    """The problem of a process that has borrowed its sample: it counts 0 times."""
    loss = ScaledLoss(problem.passes.loss, 0.0, counts=False)
    passes = replace(problem.passes, chain=None, loss=loss, rule=loss_rule(loss), samples_count=False)
    return replace(problem, passes=passes)
