"""Rows of bare parameters: those that are added to or multiplied with what the samples give.

A position table (`x + self.places[:t]`), a class token (`self.token.expand(n, 1, d)`), a layer scale (`self.gain *
x`). In the autograd graph of a pass a value q that is computed from parameters alone meets what has samples in one
node, z = x + q, x q, x / q, ..., where an entry of z depends on one entry of q. For a column whose gradient in z
is h,

    row of q at sample i = the sum of (dz/dq) h over the entries of z_i that an entry of q is broadcast to

and autograd takes it from q to the parameters. All uses of a parameter that reach the outputs are in the graph;
one of another kind leaves the parameter to the fallback. What no graph shows is which axis of z the samples are
on. So the rows are checked whenever shapes are new, or the model reorders samples: for random c, sum_i c_i row_i
must be the gradient of the sum of c_i (column_i . outputs_i), which it is not where the row of one sample holds a
part that belongs to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from woodbury._vector import Parts
from woodbury.model.fallback import Pass, WrittenRows, grads_of_many
from woodbury.model.graph import PassGraph
from woodbury.model.plan import Plan

_CHOICES = 2  # of the sample axis that are tried: the first that may be it, and the last

Slope = Tensor | float  # dz/dq, broadcast over z


def _addcmul_slope(node: Any, operand: int) -> Slope:
    if operand == 0:
        return 1.0
    return (node._saved_tensor2 if operand == 1 else node._saved_tensor1) * node._saved_value


# A node, and which of its inputs q is -> dz/dq.
_SLOPES: dict[str, Callable[[Any, int], Slope]] = {
    "AddBackward0": lambda node, operand: 1.0 if operand == 0 else float(node._saved_alpha),
    "SubBackward0": lambda node, operand: 1.0 if operand == 0 else -float(node._saved_alpha),
    "RsubBackward0": lambda node, operand: -float(node._saved_alpha) if operand == 0 else 1.0,
    "MulBackward0": lambda node, operand: node._saved_other if operand == 0 else node._saved_self,
    "DivBackward0": lambda node, operand: (
        1 / node._saved_other if operand == 0 else -node._saved_self / node._saved_other.square()
    ),
    "AddcmulBackward0": _addcmul_slope,
    "WhereBackward0": lambda node, operand: node._saved_condition if operand == 0 else ~node._saved_condition,
    "MaskedFillBackward0": lambda node, operand: ~node._saved_mask,
    "MaskedFillBackward1": lambda node, operand: ~node._saved_mask if operand == 0 else node._saved_mask,
    "ExpandBackward0": lambda node, operand: 1.0,
    "RepeatBackward0": lambda node, operand: 1.0,
    "NativeLayerNormBackward0": lambda node, operand: (
        1.0 if operand == 2 else (node._saved_input - node._saved_result1) * node._saved_result2
    ),
}


@dataclass(frozen=True)
class Meeting:
    """A node of the graph where a value q, computed from parameters alone, meets what has samples."""

    edge: GradientEdge  # where gradients in z arrive
    source: GradientEdge  # of q
    parameters: frozenset[str]  # that q is computed from, of those without a rule
    shape: torch.Size  # of z
    inner: torch.Size  # of q
    axes: tuple[int, ...]  # of z that may be the sample axis
    slope: Slope
    key: Hashable

    def rows(self, grads: Tensor, axis: int) -> Tensor:
        """Rows of q, (n, k, *inner), for gradients in z (k, *shape) and samples on an axis.

        Of the type of grads, or that of dz/dq if that has more digits.
        """
        slope, grads = self.slope, grads.movedim(axis + 1, 0)  # (n, k, ...)
        if isinstance(slope, Tensor):
            missing = len(self.shape) - slope.dim()
            slope = slope.detach()[(None,) * (missing + 1)].movedim(axis + 1, 0)
        if isinstance(slope, Tensor) or slope != 1.0:
            grads = grads * slope
        sizes = enumerate(zip(self.shape, _aligned(self.inner, self.shape), strict=True))
        broadcast = [place for place, (size, own) in sizes if place != axis and own != size]
        if broadcast:  # axes in front of the sample axis have moved by one
            grads = grads.sum([place + 2 if place < axis else place + 1 for place in broadcast])
        return grads.reshape(*grads.shape[:2], *self.inner)


@dataclass(frozen=True)
class Bare:
    """The bare parameters of a pass: those that the graph uses in meetings alone, with these meetings."""

    plan: Plan
    meetings: tuple[Meeting, ...]
    keys: dict[str, Hashable]  # parameter -> its uses

    @property
    def goes_back_again(self) -> bool:
        """Whether `rows` takes another pass back, through what values are computed from parameters by."""
        return any(getattr(own.source.node, "variable", None) is None for own in self.meetings)

    def is_checked(self, columns: torch.Size) -> bool:
        """Whether rows of these uses were found right."""
        return all((key, columns) in self.plan.findings.checked_bare for key in self.keys.values())

    def rows(self, grads: Sequence[Tensor | None], columns: torch.Size) -> Parts:
        """Rows (n, k, *shape) of each parameter, for gradients (k, *shape of z) that arrive at the meetings."""
        plan = self.plan
        by_source: dict[GradientEdge, Tensor] = {}
        for meeting, grad in zip(self.meetings, grads, strict=True):
            if grad is None:
                continue
            failed = any(plan.findings.wrong_bare.get(self.keys[name]) for name in meeting.parameters)
            # the pass may have run under autocast; rows have the type of the parameters
            own = meeting.rows(grad.to(plan.dtype), meeting.axes[-1 if failed else 0])
            seen = by_source.get(meeting.source)
            by_source[meeting.source] = own if seen is None else seen + own
        parameters = {name: plan.parameters[name] for name in self.keys}
        total: Parts = {}
        for source, rows in by_source.items():
            for name, part in _to_parameters(source, parameters, rows).items():
                total[name] = total[name] + part if name in total else part
        for name in self.keys - total.keys():
            total[name] = parameters[name].new_zeros(*columns[:2], *parameters[name].shape)
        return total

    def check(self, rows: Parts, forward_pass: Pass, columns: Tensor, precision: torch.dtype) -> bool:
        """Compare rows with a gradient, in half the digits of the pass, which are those of `precision`.

        False if some are wrong, which the next call of `find_bare` knows then.
        """
        if not all(bool(torch.isfinite(own).all()) for own in rows.values()):
            return True  # nothing can be said; the step has its own word for it
        parameters = {name: self.plan.parameters[name] for name in self.keys}
        wrong = WrittenRows(forward_pass, parameters, columns).wrong(rows, precision)
        self.plan.findings.note_bare(self.keys, wrong, columns.shape)
        return not wrong


def _to_parameters(source: GradientEdge, parameters: Mapping[str, Tensor], rows: Tensor) -> Parts:
    """Rows (n, k, *shape) of the parameters that a value is computed from, if of these, from its own rows."""
    variable = getattr(source.node, "variable", None)
    if variable is not None:
        return {name: rows for name, own in parameters.items() if own is variable}
    seeds = rows.flatten(0, 1).to(source.node._input_metadata[source.output_nr].dtype)
    grads = grads_of_many(source, list(parameters.values()), seeds)
    pairs = zip(parameters, grads, strict=True)
    return {name: grad.unflatten(0, rows.shape[:2]) for name, grad in pairs if grad is not None}


def find_bare(plan: Plan, graph: PassGraph, wanted: Collection[str], samples: int) -> Bare:
    """Those of the wanted parameters whose every use in the graph is a meeting, with these meetings.

    A value is computed from parameters alone if all nodes behind it are, and no axis of it is as long as there are
    samples where what it comes from is broadcast: inputs of the model have no node.
    """
    free, reached = _free_nodes(plan, graph, wanted, samples)
    refused = set(free.get(graph.root, ()))
    meetings: list[Meeting] = []
    for node in reached - free.keys():
        for place, (source, number) in enumerate(node.next_functions):
            names = free.get(source)
            if not names:
                continue
            meeting = _meeting(node, place, GradientEdge(source, number), names, samples)
            if meeting is None:
                refused |= names
            else:
                meetings.append(meeting)
    keys: dict[str, Hashable] = {}
    for name in wanted:
        key = (name, frozenset(meeting.key for meeting in meetings if name in meeting.parameters))
        if name not in refused and plan.findings.wrong_bare.get(key, 0) < _CHOICES:
            keys[name] = key
    kept = [replace(own, parameters=own.parameters & keys.keys()) for own in meetings]
    return Bare(plan, tuple([meeting for meeting in kept if meeting.parameters]), keys)


def _free_nodes(
    plan: Plan, graph: PassGraph, wanted: Collection[str], samples: int
) -> tuple[dict[Any, frozenset[str]], set[Any]]:
    """The nodes of values computed from parameters alone, with those wanted, and all nodes that use one."""
    free: dict[Any, frozenset[str]] = {}
    for name in wanted:
        node = graph.accumulators.get(id(plan.parameters[name]))
        if node is not None:
            free[node] = frozenset((name,))
    pending, reached = list(free), set()
    while pending:
        for node in graph.consumers.get(pending.pop(), ()):
            reached.add(node)
            if node in free:
                continue
            behind = [edge for edge in node.next_functions if edge[0] is not None]
            if all(
                below in free or id(getattr(below, "variable", None)) in plan.names for below, _ in behind
            ) and not any(
                _sample_axes(_sizes(node, 0), _sizes(*edge), samples) for edge in behind if node.name() in _SLOPES
            ):
                free[node] = frozenset().union(*(free.get(below, frozenset()) for below, _ in behind))
                pending.append(node)
    return free, reached


def _sizes(node: Any, number: int) -> torch.Size:
    return torch.Size(node._input_metadata[number].shape)


def _aligned(inner: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of q with as many axes as z has."""
    return *[1] * (len(shape) - len(inner)), *inner


def _sample_axes(shape: torch.Size, inner: torch.Size, samples: int) -> tuple[int, ...]:
    """The axes of z with one entry per sample along which q is broadcast."""
    sizes = enumerate(zip(shape, _aligned(inner, shape), strict=True))
    return tuple(place for place, (size, own) in sizes if size == samples and own == 1)


def _meeting(node: Any, operand: int, source: GradientEdge, names: frozenset[str], samples: int) -> Meeting | None:
    """The meeting at a node, or None if there is no formula for it."""
    slope_of = _SLOPES.get(node.name())
    if slope_of is None or not node._input_metadata[0].dtype.is_floating_point:
        return None
    shape, inner = _sizes(node, 0), _sizes(source.node, source.output_nr)
    axes = _sample_axes(shape, inner, samples)
    fits = all(own in (1, size) for size, own in zip(shape, _aligned(inner, shape), strict=True))
    if not axes or not fits:
        return None
    try:
        slope = slope_of(node, operand)
        if isinstance(slope, Tensor):
            slope = slope.as_subclass(Tensor)  # saved ones may be of a class of the user's
    except RuntimeError:  # changed in place since: the fallback, or an ordinary backward pass, has its own word
        return None
    key = (node.name(), operand, shape, inner, axes)
    return Meeting(GradientEdge(node, 0), source, names, shape, inner, axes, slope, key)
