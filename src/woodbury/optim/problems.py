"""The problem of a step: the batch checked, S2 chosen, the settings of the groups read."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _batch, _random
from woodbury._batch import Batch
from woodbury._bytes import available_bytes, in_words
from woodbury._vector import Vector, like
from woodbury.curvature import OwnScale
from woodbury.device.scalars import as_number, is_known, to_device
from woodbury.loop.watch import UNWATCHED
from woodbury.losses.rules import LossRule, loss_rule
from woodbury.model.capture import call_model
from woodbury.model.chain import Chain, Structure
from woodbury.model.compiled import run_as_written
from woodbury.model.plan import Plan
from woodbury.optim.settings import Hyperparameters, Settings, check_groups, explain_inputs, read_settings
from woodbury.optim.shards import borrow_sample, count_nothing, describe
from woodbury.optim.transaction import Transaction
from woodbury.parallel.group import ALONE, Group
from woodbury.policies.damping import check_damping
from woodbury.quadratic.decay import Decay
from woodbury.quadratic.passes import Batches, Passes
from woodbury.quadratic.quadratic import Problem

FIRST_COLUMNS = 8  # to reckon with before the model has shown its outputs
_WORTH_ASKING = 2**30  # bytes that a step may need before it asks how many there are
FREE = 4e6  # operations that take no time beside the calls of a step
FEWEST_ROWS = 16


@dataclass(eq=False)
class Request:
    """What a step was called with."""

    inputs: Any
    targets: Tensor | None
    subset: Tensor | None = None
    full: Batches | None = None
    held_out: Any = None

    def __post_init__(self) -> None:
        self.inputs = _batch.unwrapped(self.inputs)


@dataclass(eq=False)
class Context:
    """What a step is taken with: the optimizer's model, settings, state and groups as they are."""

    model: nn.Module
    settings: Settings
    state: dict[Any, Any]
    groups: Sequence[Mapping[str, Any]]
    transaction: Transaction
    common: Settings  # that all processes must have: without what a loop of the user's own was seen to do
    device: torch.device


class Problems:
    """Makes the problems of an optimizer, and knows what does not change from one to the next."""

    def __init__(self, settings: Settings, group: Group) -> None:
        self.group = group
        self.structure = Structure(settings.has_fallback, settings.solver.forms_rows, settings.max_bytes)
        self.rule: LossRule = loss_rule(settings.loss)
        self.orders = _random.Orders()
        self._options: tuple[Any, ...] | None = None  # of the loss, as they were when last looked at
        self._sample_axes: Mapping[str, bool] = {}  # places in the inputs, and whether they have a sample axis
        self._small: tuple[Any, ...] = ()  # what the memory of a step depends on that needs little
        self._affordable: dict[int, int] = {}  # rows, by the samples of a batch

    def fresh_copy(self) -> Problems:
        """For a copy of the optimizer: nothing that belongs to this model or to these processes."""
        other = copy.copy(self)
        other.structure, other.orders, other.group = replace(self.structure), _random.Orders(), ALONE
        other._options, other._small = None, ()
        return other

    # -- a batch --------------------------------------------------------------------------------------------

    def pose(self, context: Context, request: Request) -> tuple[Problem, Hyperparameters]:
        """The problem of a batch, which may be spread over processes: an error of one is an error of all.

        A process without a sample borrows one of another, and counts it 0 times.
        """
        if self.group.size == 1:
            return self._pose(context, request)
        given, common = (request.inputs, request.targets), describe(context.common, context.groups)
        borrowed = borrow_sample(self.group, given, context.device, context.state, common)
        if borrowed is not None:
            request = replace(request, inputs=borrowed[0], targets=borrowed[1], subset=None)
        with self.group.together():
            problem, hyper = self._pose(context, request)
        return (problem if borrowed is None else count_nothing(problem)), hyper

    def _pose(self, context: Context, request: Request) -> tuple[Problem, Hyperparameters]:
        """The problem of the batch of this process."""
        self.check_surroundings(context)
        samples = count_samples(request.inputs, request.targets)
        if request.held_out is not None:
            _check_held_out(context.settings, request.held_out)
        self._sample_axes = _batch.sample_axes(request.inputs, samples, self._sample_axes)
        plan = self.structure.read(context.model, context.groups)
        batch = self._choose(context, request, samples)
        context.state["damping"] = to_device(context.state["damping"], context.device)
        return self.problem(context, plan, batch, request)

    def problem(
        self,
        context: Context,
        plan: Plan,
        batch: Batch,
        request: Request,
        rates: Sequence[float | Tensor] | None = None,
    ) -> tuple[Problem, Hyperparameters]:
        """The problem of a chosen batch with the settings as they are now; rates by group if it is recorded."""
        settings, transaction = context.settings, context.transaction
        plan.replays.is_used = settings.search is not None
        hyper = read_settings(context.groups, self.structure.names, rates)
        damping = as_number(context.state["damping"]) + settings.damping.floor
        if is_known(damping) and not 0 < damping < math.inf:
            check_damping(damping, settings.damping)
        if settings.memory:
            batch = batch.copied()
        chain = None if request.full is not None else self._chain_for(settings, batch.inputs)
        forward = settings.forward
        if chain is None:
            forward = run_as_written(forward, plan.has_compiled)
            transaction.watch(plan, _random.snapshot(plan.device) if rates is None else None)
            if transaction.buffers is not None:
                forward = transaction.buffers.preserved(forward, batch.inputs)
        passes = Passes(
            plan,
            chain,
            forward=forward,
            autocast=settings.autocast,
            loss=settings.loss,
            rule=self.rule,
            group=self.group,
        )
        if chain is None:
            passes.check_parts(batch)
        problem = Problem(
            plan,
            self.group,
            passes,
            batch,
            settings.curvature if settings.search is None else OwnScale(),
            settings.solver,
            settings.blocks,
            settings.gram_dtype,
            decay=Decay(hyper.weight_decay, plan.parameters) if any(hyper.weight_decay.values()) else None,
            center=_center(plan, hyper, context.state.get("momentum", {})),
            apart=settings.memory > 0,
            full=request.full,
            held_out=None if request.held_out is None else tuple(request.held_out),
            random=None if chain is not None else transaction.random,
            state=context.state,
            check_room=partial(self._check_room, settings, context.state),
        )
        return problem, hyper

    def _chain_for(self, settings: Settings, inputs: Any) -> Chain | None:
        """The chain that the model is, if a batch can be run along it by hand.

        Not with a loss rule of someone's own, which may draw random numbers or differentiate.
        """
        chain = self.structure.chain
        plain = settings.forward is call_model and settings.autocast is None and self.rule.by_hand
        return chain if chain is not None and plain and chain.takes(inputs) else None

    # -- checks ---------------------------------------------------------------------------------------------

    def check_surroundings(self, context: Context) -> None:
        """Raise where no step can be taken here and now."""
        self._read_rule(context.settings.loss)
        check_groups(context.groups, context.settings.most_momentum)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a step needs gradients: take it outside torch.inference_mode()")
        device = context.device.type
        if device == "meta":
            raise ValueError("the model is on the meta device, which holds no numbers: bring it to another first")
        if torch.is_autocast_enabled(device):
            raise RuntimeError(
                "a step inside torch.autocast is not supported: take it outside, and pass autocast=torch.bfloat16 "
                "to GaussNewton or NaturalGradient for passes through the model in that type"
            )

    def _read_rule(self, loss: nn.Module) -> None:
        """Read the rule of the loss again if an option of the loss, or the loss itself, has changed."""
        attributes = vars(loss)
        buffers = dict(attributes["_buffers"])
        versions = [(id(own), own._version) for own in buffers.values() if own is not None]
        if self._options is not None:
            before, known, _, numbers = self._options
            try:  # values that are the same object are not compared
                if before is loss and known == attributes and versions == numbers:
                    return
            except RuntimeError:  # an attribute is another tensor than before
                pass
        self.rule = loss_rule(loss)
        self._options = loss, dict(attributes), buffers, versions  # tensors that are held keep their ids

    def _check_room(self, settings: Settings, state: dict[Any, Any], problem: Problem, raw: Tensor) -> None:
        """Raise before anything is allocated if the rows of S2 and the small system cannot fit."""
        batch, plan = problem.batch, problem.plan
        sizes = plan, settings, self.rule, batch.samples, batch.curvature, raw.shape
        state["columns"] = k = settings.curvature.column_count(self.rule, raw.shape)
        if sizes == self._small:
            return
        row_count, number = batch.curvature * k * (1 + settings.memory), raw.element_size()
        others = batch.samples - batch.curvature
        height, outputs = row_count + others, raw.numel() // raw.shape[0]
        # in parameter space a block has fewer parameters than there are rows: this bounds both cases below
        if not plan.uncovered and 8 * height * (5 * len(plan.owned) * height + outputs) < _WORTH_ASKING:
            self._small = sizes
            return
        size = settings.solver.size(plan, settings.blocks, row_count, others)
        columns = row_count * outputs * number
        wide = number if settings.gram_dtype is None else settings.gram_dtype.itemsize
        written_out = row_count * plan.size if size < height else 0  # in parameter space
        if plan.uncovered:
            written_out += height * sum(plan.parameters[name].numel() for name in plan.uncovered)
        # written out and collected; the matrix, with damping, and its factor
        needed = (2 * written_out + 3 * len(settings.blocks.sizes(plan)) * size**2) * wide
        if columns + needed < _WORTH_ASKING:
            return
        available = available_bytes(raw.device)
        if available is not None and columns + needed > available:
            raise MemoryError(
                f"{settings.method}: {batch.curvature} curvature samples give {row_count} rows, {k} each. "
                f"Their columns take about {in_words(columns)} and the system to solve {in_words(needed)}; "
                f"{in_words(available)} are available. Ways out: fewer curvature_samples, "
                "NaturalGradient (one row per sample), or solver='products' (no rows at all)"
            )

    # -- S2 -------------------------------------------------------------------------------------------------

    def _choose(self, context: Context, request: Request, samples: int) -> Batch:
        """Order the batch so that S2 leads."""
        inputs, targets = request.inputs, request.targets
        if request.subset is None:
            count = self.curvature_count(context, samples)
            order = self.draw_order(context, samples, count)
        else:
            order, count = _batch.subset_first(request.subset, samples, context.device)
        if order is not None:
            inputs, targets = _batch.take(inputs, order, samples), _batch.take(targets, order, samples)
        return Batch(inputs, targets, samples, count, order)

    def draw_order(self, context: Context, samples: int, count: int) -> Tensor | None:
        """A random order of the samples; None for the one they have, where all of them are S2."""
        state = context.state
        if count == samples:
            return None
        if self.group.size > 1:  # an order of its own for each process, and the same state for all
            seed, state["generator"] = _random.draw_seed(state["generator"])
            generator = torch.Generator(device="cpu").manual_seed(seed + self.group.rank)
            return torch.randperm(samples, generator=generator, device="cpu").to(context.device)
        order, state["generator"] = self.orders.draw(samples, state["generator"], context.device)
        return order

    def curvature_count(self, context: Context, samples: int) -> int:
        """N2 for a batch of N1 samples; a batch smaller than an earlier one may be smaller than N2."""
        state, wanted = context.state, context.settings.curvature_samples
        state["largest_batch"] = largest = max(samples, state["largest_batch"])
        if wanted is None:
            return samples
        if isinstance(wanted, str):
            return self.affordable_samples(context, samples)
        if isinstance(wanted, float):
            return max(1, round(wanted * samples))
        if self.group.size > 1:  # its share of all
            share = wanted // self.group.size + (self.group.rank < wanted % self.group.size)
            return max(1, min(share, samples))
        if wanted > largest:
            raise ValueError(
                f"curvature_samples={wanted} is more than the {samples} samples of the batch; "
                "use None for the whole batch, or a fraction of it"
            )
        return min(wanted, samples)

    def affordable_samples(self, context: Context, samples: int) -> int:
        """N2 that curvature_samples="auto" takes of a batch of N1 samples: all where no Gram matrix is formed."""
        if not context.settings.solver.has_trace:
            return samples
        if samples not in self._affordable:
            trained = [parameter for group in context.groups for parameter in group["params"]]
            self._affordable[samples] = affordable_rows(samples, trained)
        columns = context.state.get("columns", FIRST_COLUMNS)  # per sample, known from the first outputs on
        return min(samples, max(2, self._affordable[samples] // columns))


def count_samples(inputs: Any, targets: Tensor | None) -> int:
    """The number of samples of a batch; raises an error that says what to write where it is none."""
    try:
        return _batch.check_batch(inputs, targets)
    except (TypeError, ValueError):
        if inputs is None:
            raise TypeError(UNWATCHED) from None
        explain_inputs(inputs)
        raise


def _check_held_out(settings: Settings, held_out: Any) -> None:
    if settings.search is None:
        raise ValueError(f"{settings.method} has no search: held_out= needs GaussNewton(..., search=...)")
    if not isinstance(held_out, tuple | list) or len(held_out) != 2:
        raise TypeError(f"held_out must be a pair (inputs, targets), got {type(held_out).__name__}")
    count_samples(*held_out)


def _center(plan: Plan, hyper: Hyperparameters, stored: Mapping[str, Tensor]) -> Vector | None:
    """q = mu p_prev, or None while it is zero."""
    if not any(hyper.momentum.values()):
        return None
    # others were not trained before
    known = {name: like(stored[name], parameter) for name, parameter in plan.parameters.items() if name in stored}
    if not known:
        return None
    before = plan.space.pack(known)
    rates = set(hyper.momentum.values())
    if len(rates) == 1:
        return before * rates.pop()
    return plan.space.pack({name: hyper.momentum[name] * part for name, part in before.items()})


def affordable_rows(samples: int, parameters: Iterable[Tensor]) -> int:
    """R rows of curvature for a batch of N1 samples, where curvature_samples="auto".

    With P parameters, and layers whose inputs and outputs have W numbers together, a step takes beside the 6 N1 P
    operations of an SGD step about 4 R P (columns sent back, and U p_prev) + 2 R^2 W (Gram matrix) + R^3 / 3
    (Cholesky factorisation). R is the largest with a sum of at most 12 N1 P: then a step has the operations of
    three SGD steps. Steps bound by the number of operations, and not by their size, get more.
    """
    shapes = [parameter.shape for parameter in parameters]
    size = sum(shape.numel() for shape in shapes)
    width = sum(shape[0] + shape[1:].numel() for shape in shapes if len(shape) > 1)

    def cost(rows: int) -> float:
        return 4.0 * rows * size + 2.0 * rows**2 * width + rows**3 / 3

    budget = 12.0 * samples * size + FREE
    return FEWEST_ROWS + bisect_right(range(FEWEST_ROWS + 1, 1 << 20), budget, key=cost)
