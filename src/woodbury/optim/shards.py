"""A batch that is spread over processes: who takes part, what all start from, and what each must agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from woodbury import _batch
from woodbury._choice import part_named
from woodbury.losses.rules import loss_rule
from woodbury.losses.scaled import NoSamples
from woodbury.parallel.group import ALONE, Group, all_processes
from woodbury.quadratic.linearize import Problem

PROCESS_GROUPS = {None: False, "self": True}  # by name: whether a step is one process's own


def find_group(process_group: Any, model: nn.Module) -> Group:
    """The processes whose samples are one batch: those of torch.distributed, unless each trains for itself."""
    by_name = process_group is None or isinstance(process_group, str)
    own = by_name and part_named("process_group", process_group, PROCESS_GROUPS)
    group = ALONE if own else all_processes(process_group)
    if isinstance(model, DistributedDataParallel) and own:
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


def borrow_sample(
    group: Group, inputs: Any, targets: Tensor | None, device: torch.device, state: dict[Any, Any]
) -> tuple[Any, Tensor | None] | None:
    """A sample of another process where this one has none; None if it has some. All processes must call it.

    The state learns of the size of the whole batch, which another number of processes can go on with.
    """
    if group.size == 1:
        return None
    counts = group.gather_numbers(_count(inputs))
    state["largest_batch"] = max(sum(counts), state["largest_batch"])
    if 0 not in counts:
        return None
    lender = next((rank for rank, count in enumerate(counts) if count), None)
    if lender is None:
        raise ValueError("empty batch: no process has a sample")
    lent = None
    if lender == group.rank:
        first = torch.zeros(1, dtype=torch.long, device=device)
        lent = tuple(
            None if tree is None else _batch.take(tree, first, counts[lender]) for tree in (inputs, targets)
        )
    lent = group.gather_objects(lent)[lender]
    return None if counts[group.rank] else lent


def _count(inputs: Any) -> int:
    """The number of samples, 0 for an empty batch; of what is no batch 1, which is refused where it is checked."""
    try:
        return _batch.sample_count(inputs)
    except ValueError as error:
        return 0 if "empty" in str(error) else 1
    except TypeError:
        return 1


def count_nothing(problem: Problem) -> Problem:
    """The problem of a process that has borrowed its sample: it counts 0 times."""
    loss = NoSamples(problem.passes.loss)
    passes = replace(problem.passes, chain=None, loss=loss, rule=loss_rule(loss), samples_count=False)
    return replace(problem, passes=passes)
