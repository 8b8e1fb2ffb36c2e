"""What every second-order optimizer here shares: the contract of `step`, the trial point, rho and lambda.

A subclass fills in one method, `_propose`: it runs the model on the batch and returns p with its predicted
decrease. Everything else (checks, choice of the curvature samples, reduction ratio, damping, acceptance,
state) lives here once.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _batch, _random, products
from woodbury._batch import Batch
from woodbury._choice import FALLBACKS, part_named
from woodbury._group import ALONE, Group
from woodbury._vector import Vector
from woodbury.blocks import BLOCKS
from woodbury.curvature import Curvature
from woodbury.damping import Constant, Damping, LevenbergMarquardt, as_damping, check_damping, is_relative
from woodbury.device import fingerprint, recording
from woodbury.device.recording import Key, Recordings
from woodbury.device.scalars import (
    Scalar,
    Truth,
    as_double,
    as_number,
    as_truth,
    compute,
    magnitude,
    ratio_where,
    to_device,
)
from woodbury.layers.attention import plain_attention
from woodbury.linalg import full_precision
from woodbury.losses.rules import loss_rule
from woodbury.losses.seen import NoLoss
from woodbury.model.buffers import Buffers
from woodbury.model.capture import call_model
from woodbury.model.chain import Chain
from woodbury.model.compiled import run_as_written, written_model
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan
from woodbury.model.structure import Structure
from woodbury.optim.faults import NO_STEP, name_bad_samples
from woodbury.optim.guard import Course, guard_warning, largest_rate
from woodbury.optim.passes import Batches, NonFiniteLossError, Passes
from woodbury.optim.settings import (
    BELOW_ONE,
    Hyperparameters,
    check_curvature_samples,
    check_groups,
    check_model_and_loss,
    check_number,
    check_whole_number,
    explain_inputs,
    plain_groups,
    read_settings,
    with_names,
)
from woodbury.optim.shards import agree, borrow_sample, count_nothing, find_group, start_alike
from woodbury.optim.step import Numbers, Problem, Proposal, StepInfo, decay_decrease
from woodbury.optim.transaction import Transaction
from woodbury.optim.watch import UNWATCHED, Watcher, run_closure


@cache
def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class SecondOrder(torch.optim.Optimizer):
    """Base of the second-order optimizers. See `woodbury.GaussNewton` for the arguments."""

    curvature: Curvature
    _by_layers = True  # whether it works with rows, which layers give
    max_bytes: int | None = None  # for temporaries of the rows
    autocast: torch.dtype | None = None  # of the passes through the model
    _keeps_nothing = False  # of what `_propose` computes, so that torch need not follow it
    _twice_differentiated = False  # whether it takes derivatives of the model's derivatives
    _most_momentum = BELOW_ONE  # that a group may have
    state: dict[Any, Any]  # type: ignore[assignment]  # keyed by what it holds, not by parameter

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None,
        lr: float,  # alpha
        *,
        blocks: str,
        momentum: float,  # mu
        fallback: str | None,
        damping: Damping | float = LevenbergMarquardt(),  # noqa: B008  (frozen) lambda
        curvature_samples: int | float | str | None = None,  # N2
        weight_decay: float = 0.0,
        accept: float | None = None,  # eta
        guard: float | None = 1.0,
        forward: Forward | None = None,
        seed: int | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        watch: bool = False,
    ) -> None:
        loss = NoLoss() if loss is None else loss
        self.process_group = process_group
        self._blocks = part_named("blocks", blocks, BLOCKS)
        has_fallback = part_named("fallback", fallback, FALLBACKS)
        check_curvature_samples(curvature_samples)
        self._called = model  # in loops of the user's own: what torch.compile returned, if that was given
        model, loss = written_model(model), written_model(loss)
        check_model_and_loss(model, loss)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_number(name, value)
        check_number("momentum", momentum, most=self._most_momentum)
        if accept is not None and (
            isinstance(accept, bool) or not isinstance(accept, int | float) or math.isnan(accept)
        ):
            raise ValueError(f"accept must be a number or None, got {accept!r}")
        if guard is not None:
            check_number("guard", guard)
        if forward is not None and not callable(forward):
            raise TypeError(f"forward must be a function of (model, inputs), got {forward!r}")
        if seed is not None:
            check_whole_number("seed", seed)
        if not isinstance(watch, bool):
            raise TypeError(f"watch must be True or False, got {watch!r}")
        self.model = model
        self.loss = loss
        self.damping = as_damping(damping)
        self._check_damping()
        self.curvature_samples = curvature_samples
        self.accept = accept
        self.guard = guard
        self.forward = forward or call_model
        self.last: StepInfo | None = None
        self._structure = Structure(has_fallback, self._by_layers, self.max_bytes)
        self._sample_axes: Mapping[str, bool] = {}  # places in the inputs, and whether they have a sample axis
        self._recordings: Recordings | None = None
        self._orders = _random.Orders()
        self._warnings_given: set[str] = set()
        self._rule = loss_rule(loss)
        self._options: tuple[Any, ...] | None = None  # of the loss, as they were when last looked at
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(plain_groups(model, params), defaults)
        # Refuses now what no pass is needed for, rather than at the first step.
        self._plan()
        self._group = self._new_group()
        self.state["damping"] = to_device(self.damping.initial, self._device())
        self.state["generator"] = self._group.same(_random.new_state(seed))
        self.state["largest_batch"] = 0
        start_alike(self._group, self._trained())
        self.watch = watch
        self._seen_steps = 0  # whose batch and loss came from a loop of the user's own
        self._watcher = self._new_watcher()

    # -- the contract -----------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        inputs: Any = None,
        targets: Tensor | None = None,
        *,
        closure: Callable[[], Any] | None = None,
        subset: Tensor | None = None,
        full: Batches | None = None,
        held_out: tuple[Any, Tensor | None] | None = None,
    ) -> StepInfo:
        """Take one step on a batch and return what happened.

        `step(closure)` takes the batch and the loss from a function that calls the model, computes the loss from
        its outputs and calls `backward`, as torch.optim has it; it is run once. `step()` takes them from the
        backward passes since the last step, if the optimizer was made with watch=True.

        Args:
            inputs: the batch as the model takes it; the first axis of its tensors is the sample axis.
            targets: the targets as the loss takes them; None means zeros.
            subset: indices into the batch that fix S2 instead of drawing it.
            full: any re-iterable of (inputs, targets) batches. Then g, f(theta) and f(theta + p) are taken
                over all of it, and the curvature from `inputs` alone (the paper's semi-stochastic variant).
            closure: in place of a batch: a function as above; it may be given as the first argument too.
            held_out: (inputs, targets) of other samples, on which a `search` chooses its step; by default it does
                so on the batch itself.
        """
        if closure is None and callable(inputs) and not isinstance(inputs, nn.Module):
            closure, inputs = inputs, None
        if closure is None and (inputs is not None or self._watcher is None):
            return self._step(inputs, targets, subset, full, held_out)
        if inputs is not None or targets is not None:
            raise TypeError("step takes a batch (inputs, targets) or a closure, not both")
        with self._seen_batch(closure) as (inputs, targets):
            return self._step(inputs, targets, subset, full, held_out)

    def _step(
        self,
        inputs: Any,
        targets: Tensor | None,
        subset: Tensor | None,
        full: Batches | None,
        held_out: tuple[Any, Tensor | None] | None,
    ) -> StepInfo:
        transaction = self._begin()
        try:
            device = self._device()
            recordings = self._recordings if device.type == "cuda" and self._group.size == 1 else None
            if recordings is not None and subset is None and full is None:
                info = self._replay(recordings, inputs, targets, transaction)
                if info is not None:
                    return info
            problem = self._pose_together(inputs, targets, subset, full, transaction, held_out)
            info = self._take(problem, transaction)
            if recordings is not None:
                recordings.ordinary_step_ended(device)
                if transaction.random is not None and _random.drawn_since(transaction.random):
                    recordings.give_up()
            return info
        except BaseException:  # bad input, or an interrupt
            transaction.end()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; steps do not need it, except for what watch=True has seen: that is forgotten."""
        super().zero_grad(set_to_none)
        if self._watcher is not None:
            self._watcher.clear()

    @property
    def blocks(self) -> str:
        """Which blocks of B are kept, by name."""
        return self._blocks.name

    @property
    def current_damping(self) -> float:
        """lambda of the next step: what the damping policy has reached, plus its floor.

        Setting a number, at least the floor, makes the next step use it; a policy goes on from there. Where the
        policy is relative both are in units of the scale of K. A `search` chooses its own dampings instead.
        To read it is to wait for the device.
        """
        return float(self.state["damping"]) + self.damping.floor

    @current_damping.setter
    def current_damping(self, damping: float) -> None:
        if getattr(self, "search", None) is not None:
            raise AttributeError("a search chooses its own dampings: give CurvedSearch(rungs=...) others")
        check_number("current_damping", damping, above=0)
        if damping < self.damping.floor:
            raise ValueError(f"current_damping must be at least {self.damping.floor}, the floor of {self.damping}")
        value = float(damping) - self.damping.floor
        if isinstance(self.damping, Constant):
            self.damping = replace(self.damping, initial=value)
        self.state["damping"] = to_device(value, self._device())

    def direction(
        self,
        inputs: Any,
        targets: Tensor | None = None,
        *,
        subset: Tensor | None = None,
        full: Batches | None = None,
        held_out: tuple[Any, Tensor | None] | None = None,
    ) -> Vector:
        """p as a dictionary from parameter name to tensor; nothing changes, random state included.

        It is the p the next `step` on the same batch would use; with a search alpha p + alpha^2 bend.
        """
        transaction = self._begin()
        with transaction.undone():
            problem = self._pose_together(inputs, targets, subset, full, transaction, held_out)
            with self._derivatives(problem):
                return self._proposal(problem).displacement.dense()

    def verify(self, inputs: Any, targets: Tensor | None = None, *, subset: Tensor | None = None) -> Tensor:
        """Relative residual |(B + lambda I) p + g| / |g| of the step on this batch, as a 0-dim tensor.

        B and g come from matrix-free autograd products that share no code with the solve. With weight decay
        and momentum it is the residual of the system they turn this into, with a search that of its smallest
        damping, with `memory=` that of a step without it. Nothing changes.
        """
        if self._group.size > 1:
            raise ValueError("verify looks at the samples of one process: call it in a run with one")
        transaction = self._begin()
        with transaction.undone():
            problem = self._pose(inputs, targets, subset, None, transaction)
            random = _random.snapshot(self._device())
            with _random.replayed(random), self._derivatives(problem, twice=True):
                proposal = self._one_system(problem)
                drawn = _random.drawn_since(random)
            forward = problem.passes.forward
            with _random.replayed(random), plain_attention, torch.enable_grad():
                if drawn:  # in the pieces the step ran, so that dropout masks agree
                    outputs = torch.cat([forward(self.model, part) for part in proposal.parts])
                else:  # as it was given, in one piece: a model that mixes samples gives itself away
                    outputs = forward(self.model, inputs)
                    outputs = outputs if problem.batch.order is None else outputs[problem.batch.order]
            return products.relative_residual(
                outputs,
                self.loss,
                problem.batch,
                problem.plan.parameters,
                proposal.displacement.dense(),
                damping=proposal.damping,
                decay=problem.hyper.weight_decay,
                previous=proposal.center,
                blocks=self._blocks.parameter_names(problem.plan),
                at_outputs=self.curvature.at_outputs,
                metric=None if proposal.metric is None else proposal.metric(),
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, given as torch.optim takes them, with settings of their own."""
        super().add_param_group(with_names(self.model, param_group))

    def state_dict(self) -> dict[str, Any]:
        """The settings of the groups and the state by names; `load_state_dict` goes on from it."""
        state = super().state_dict()
        return {**state, "state": _as_plain(state["state"])}

    # -- what a subclass fills in ------------------------------------------------------------------------

    @abstractmethod
    def _propose(self, problem: Problem) -> Proposal:
        """Compute p for this problem without changing anything."""

    def _one_system(self, problem: Problem) -> Proposal:
        """The proposal that solves one damped system, for `verify`."""
        return self._proposal(problem)

    # -- a loop of the user's own -------------------------------------------------------------------------

    def _new_watcher(self) -> Watcher | None:
        return Watcher(self._called, self._trained(), runs_backward=True) if self.watch else None

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @contextmanager
    def _seen_batch(self, closure: Callable[[], Any] | None) -> Iterator[tuple[Any, Tensor]]:
        """The batch of a closure, or of the backward passes that were watched; inside, its loss is the step's.

        The model has run on the batch before: its random numbers are repeated, and its buffers stay as they are.
        """
        self._seen_steps += 1
        watcher = self._watcher
        if watcher is None:
            assert closure is not None
            seen = run_closure(self._called, self._trained(), closure, self.loss, self._seen_steps)
        else:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            seen = watcher.take(self.loss, self._seen_steps)
        loss, forward, buffers = self.loss, self.forward, None
        self.loss, self.forward = seen.loss, seen.forward
        try:
            with (
                nullcontext() if watcher is None else watcher.paused(),
                _random.replayed(seen.random),
            ):
                holders = self._plan().buffers
                buffers = Buffers(holders, {}) if holders else None
                yield seen.inputs, seen.targets
        finally:
            self.loss, self.forward = loss, forward
            if buffers is not None:
                buffers.put_back()

    # -- parts -------------------------------------------------------------------------------------------

    def _begin(self) -> Transaction:
        """Note the part of the state that posing a problem changes."""
        return Transaction(self.state, ("generator", "largest_batch"))

    def _take(self, problem: Problem, transaction: Transaction) -> StepInfo:
        """Propose, judge and move. The trial pass repeats the random numbers of the first."""
        by_hand = problem.chain is not None and self._keeps_nothing
        random = transaction.random
        with torch.inference_mode() if by_hand else self._derivatives(problem):
            proposal = self._proposal(problem, to_take=True)
            with _random.replayed(random):
                actual = proposal.evaluate(proposal.displacement)
            proposal, actual = agree(self._group, proposal, actual)
        with torch.no_grad():
            return self._conclude(problem, proposal, actual, transaction)

    def _proposal(self, problem: Problem, to_take: bool = False) -> Proposal:
        """`_propose`; where that fails on the CPU, an error that names the samples it fails for.

        Where it is not the samples, a proposal to take is one that will be rejected.
        """
        try:
            proposal = self._propose(problem)
        except (NonFiniteLossError, torch.linalg.LinAlgError) as error:
            name_bad_samples(problem, self.curvature, error)
            raise
        predicted = proposal.predicted
        if isinstance(predicted, float) and not -math.inf < predicted < math.inf:
            name_bad_samples(problem, self.curvature, None)
            if not to_take:
                raise ArithmeticError(f"{type(self).__name__}: {NO_STEP}")
            self._warn_once("no step", f"{NO_STEP}. The step is rejected")
        return proposal

    def _conclude(
        self, problem: Problem, proposal: Proposal, actual: Scalar, transaction: Transaction
    ) -> StepInfo:
        """Judge a proposal by the actual decrease, and move."""
        vector = self._vector_if_needed(problem, proposal)
        ratio, accepted = self._judge(problem, proposal, actual, vector)
        numbers = Numbers(
            *(proposal.loss, proposal.damping, ratio, proposal.predicted, proposal.squared_norm, accepted),
            *(proposal.length, proposal.share, proposal.bent),
        )
        # all at once: on a device that is one kernel, and what they come from may be overwritten later
        damping, *computed = compute(self._next_damping(problem, proposal, ratio), *numbers)
        numbers = Numbers(*computed)
        state = self._next_state(problem, proposal, damping, numbers.accepted, vector)
        info, buffers, displacement = StepInfo.later(numbers), transaction.buffers, proposal.displacement
        versions = {name: parameter._version for name, parameter in problem.plan.parameters.items()}
        if buffers is not None:
            random = transaction.random
            with _random.replayed(random):
                buffers.prepare(lambda: problem.passes.forward(self.model, problem.batch.inputs))

        def finish() -> None:
            displacement.add_(problem.hyper.lr, numbers.accepted, versions)
            if buffers is not None:
                buffers.settle(numbers.accepted)
            self.state.update(state)
            self.last = info

        transaction.commit(finish)
        return info

    def _derivatives(self, problem: Problem, twice: bool = False) -> AbstractContextManager[Any]:
        """Inside, passes through the model can be differentiated as often as the method does, or twice."""
        if problem.chain is not None:
            return torch.no_grad()  # by hand
        return plain_attention if twice or self._twice_differentiated else nullcontext()

    def _replay(
        self, recordings: Recordings, inputs: Any, targets: Tensor | None, transaction: Transaction
    ) -> StepInfo | None:
        """A step replayed from a CUDA graph, recorded first if it is time; None if it is not."""
        device = self._device()
        self._check_surroundings()
        samples = self._count_samples(inputs, targets)
        shape = recording.shape_of(inputs, targets, device)
        if shape is None:
            return None
        plan, moving = self._plan(), self._moving_state(device)
        curvature_samples = self._curvature_count(samples)
        key = Key(self._fingerprint(plan, moving), (shape, curvature_samples))
        replayable = recordings.find(key)
        if replayable is None:
            if not recordings.is_due(key, device):
                return None
            if any(parameter.device != device for parameter in self.model.parameters()):
                recordings.give_up()
                return None
        order = None
        if curvature_samples < samples:
            order, self.state["generator"] = self._orders.draw(samples, self.state["generator"], device)
        rates = [group["lr"] for group in self.param_groups]
        if replayable is None:

            def run(
                inputs: Any, targets: Tensor | None, rates: list[Tensor], state: dict[str, Any]
            ) -> tuple[Tensor, dict[str, Any]]:
                self.state.update(state)
                batch, inner = Batch(inputs, targets, samples, curvature_samples), self._begin()
                numbers = self._take(self._problem(plan, batch, None, inner, rates), inner)._numbers
                # the others have their defaults: nothing with a search is recorded
                shown = torch.stack([as_double(value) for value in numbers[: len(Numbers._fields) - 3]])
                return shown, {n: self.state[n] for n in state}

            wide, last = torch.promote_types(plan.dtype, torch.float32), self.last
            transaction.watch(plan, None)
            try:
                replayable = recording.record(inputs, targets, rates, moving, device, wide, run)
            except RuntimeError:  # what a graph cannot hold: a wait for the device, say
                transaction.undo()
                recordings.give_up()
                return None
            finally:  # recording computes nothing: what it left behind holds no numbers
                self.state.update(moving)
                self.last = last
            recordings.add(key, replayable)
        for name, value in moving.items():
            recording.overwrite(replayable.state[name], value)
        self.state.update(replayable.state)
        replayable.load(inputs, targets, order, rates)
        launched = False

        def finish() -> None:
            nonlocal launched
            # in one line: an interrupt falls before it or after it
            launched = launched or replayable.graph.replay() is None  # type: ignore[func-returns-value]
            self.last = StepInfo.later(replayable.numbers.clone())

        transaction.commit(finish)
        return self.last

    def _fingerprint(self, plan: Plan, moving: Mapping[str, Any]) -> Hashable:
        """All that the numbers of a step depend on beside its batch, the learning rates and the moving state."""
        groups = [(float(group["momentum"]), float(group["weight_decay"])) for group in self.param_groups]
        return (
            *(fingerprint.Same(plan), self._structure.groups, tuple(groups), tuple(moving)),
            *(self.accept, self.curvature_samples, self._blocks, self.autocast, self.max_bytes, self._choices()),
            *(full_precision.settings(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
            fingerprint.of_value(self.damping),
            fingerprint.of_function(self.forward),
            fingerprint.of_model(self.model),
            fingerprint.of_model(self.loss),
        )

    def _choices(self) -> Hashable:
        """What a subclass lets its user choose, as far as it changes the numbers of a step."""
        return None

    def _moving_state(self, device: torch.device) -> dict[str, Any]:
        """The state that every step replaces, as tensors on the device."""
        moving: dict[str, Any] = {"damping": to_device(self.state["damping"], device)}
        if "scale" in self.state:
            moving["scale"] = to_device(self.state["scale"], device)
        if "momentum" in self.state:
            moving["momentum"] = {name: value.to(device) for name, value in self.state["momentum"].items()}
        return moving

    def _plan(self) -> Plan:
        """The layers to train, made anew whenever something about the model has changed."""
        return self._structure.read(self.model, self.param_groups)

    def _chain_for(self, inputs: Any) -> Chain | None:
        """The chain that the model is, if a batch can be run along it by hand.

        Not with a loss rule of someone's own, which may draw random numbers or differentiate.
        """
        chain = self._structure.chain
        if chain is None or self.forward is not call_model or self.autocast is not None or not self._rule.by_hand:
            return None
        return chain if chain.takes(inputs) else None

    def _device(self) -> torch.device:
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def _pose_together(
        self,
        inputs: Any,
        targets: Tensor | None,
        subset: Tensor | None,
        full: Batches | None,
        transaction: Transaction,
        held_out: tuple[Any, Tensor | None] | None,
    ) -> Problem:
        """`_pose`, where the batch may be spread over processes: an error of one is an error of all.

        A process without a sample borrows one of another, and counts it 0 times.
        """
        borrowed = borrow_sample(self._group, inputs, targets, self._device(), self.state)
        if borrowed is not None:
            (inputs, targets), subset = borrowed, None
        with self._group.together():
            problem = self._pose(inputs, targets, subset, full, transaction, held_out)
        return problem if borrowed is None else count_nothing(problem)

    def _pose(
        self,
        inputs: Any,
        targets: Tensor | None,
        subset: Tensor | None,
        full: Batches | None,
        transaction: Transaction,
        held_out: tuple[Any, Tensor | None] | None = None,
    ) -> Problem:
        """Check the batch, choose S2 and read the settings."""
        self._check_surroundings()
        samples = self._count_samples(inputs, targets)
        if held_out is not None:
            self._check_held_out(held_out)
        self._sample_axes = _batch.sample_axes(inputs, samples, self._sample_axes)
        plan = self._plan()
        batch = self._choose(inputs, targets, samples, subset)
        self.state["damping"] = to_device(self.state["damping"], self._device())
        problem = self._problem(plan, batch, full, transaction)
        return problem if held_out is None else replace(problem, held_out=tuple(held_out))

    def _check_held_out(self, held_out: Any) -> None:
        raise ValueError(f"{type(self).__name__} has no search: held_out= needs GaussNewton(..., search=...)")

    def _problem(
        self,
        plan: Plan,
        batch: Batch,
        full: Batches | None,
        transaction: Transaction,
        rates: Sequence[float | Tensor] | None = None,
    ) -> Problem:
        """The problem of this batch with the settings as they are now.

        While a step is recorded, its learning rates by group are given.
        """
        hyper = read_settings(self.param_groups, self._structure.names, rates)
        damping = as_number(self.state["damping"]) + self.damping.floor
        if isinstance(damping, float) and not 0 < damping < math.inf:
            check_damping(damping, self.damping)
        chain = None if full is not None else self._chain_for(batch.inputs)
        is_chain, forward = chain is not None, self.forward
        if not is_chain:
            forward = run_as_written(forward, plan.has_compiled)
            transaction.watch(plan, _random.snapshot(plan.device) if rates is None else None)
            if transaction.buffers is not None:
                forward = transaction.buffers.preserved(forward, batch.inputs)
            if self.autocast is None:  # which casts between layers
                is_chain = self._structure.shows_chain(plan, forward, batch.inputs, batch.samples)
        passes = Passes(plan, chain, forward, self.autocast, self.loss, self._rule, self._group)
        if chain is None:
            passes.check_parts(batch)
        previous, random = self._previous(plan, hyper), None if chain is not None else transaction.random
        return Problem(passes, batch, damping, hyper, full, previous, is_chain, random=random)

    def _count_samples(self, inputs: Any, targets: Tensor | None) -> int:
        try:
            return _batch.check_batch(inputs, targets)
        except (TypeError, ValueError):
            if inputs is None:
                raise TypeError(UNWATCHED) from None
            explain_inputs(inputs)
            raise

    def _check_loss(self) -> None:
        """Read the rule of the loss again if an option of the loss, or the loss itself, has changed."""
        attributes = vars(self.loss)
        buffers = [own for own in attributes["_buffers"].values() if own is not None]
        versions = [own._version for own in buffers]
        if self._options is not None:
            loss, known, tensors, numbers = self._options
            try:  # values that are the same object are not compared
                same = loss is self.loss and known == attributes and versions == numbers
            except RuntimeError:  # an attribute is another tensor than before
                same = False
            if same and not any(map(is_not, buffers, tensors)):
                return
        self._rule = loss_rule(self.loss)
        self._options = self.loss, dict(attributes), buffers, versions

    def _check_damping(self) -> None:
        """Raise where the method cannot take this policy."""
        if is_relative(self.damping):
            raise ValueError(
                f"{type(self).__name__} forms no Gram matrix that its damping could be relative to: use "
                "GaussNewton or NaturalGradient, or relative=False"
            )

    def _check_surroundings(self) -> None:
        self._check_loss()
        check_groups(self.param_groups, self._most_momentum)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a step needs gradients: take it outside torch.inference_mode()")
        device = self._device().type
        if device == "meta":
            raise ValueError("the model is on the meta device, which holds no numbers: bring it to another first")
        if torch.is_autocast_enabled(device):
            raise RuntimeError(
                "a step inside torch.autocast is not supported: take it outside, and pass autocast=torch.bfloat16 "
                "to GaussNewton or NaturalGradient for passes through the model in that type"
            )

    def _new_group(self) -> Group:
        group = find_group(self.process_group, self._called)
        if group.size > 1:
            self._check_joint()
        return group

    def _check_joint(self) -> None:
        """Raise where a setting cannot be had by several processes."""

    def _choose(self, inputs: Any, targets: Tensor | None, samples: int, subset: Tensor | None) -> Batch:
        """Order the batch so that S2 leads."""
        if subset is None:
            count = self._curvature_count(samples)
            if count == samples:
                return Batch(inputs, targets, samples, samples)
            if self._group.size > 1:  # an order of its own for each process, and the same state for all
                seed, self.state["generator"] = _random.draw_seed(self.state["generator"])
                generator = torch.Generator().manual_seed(seed + self._group.rank)
                order = torch.randperm(samples, generator=generator).to(self._device())
            else:
                order, self.state["generator"] = self._orders.draw(
                    samples, self.state["generator"], self._device()
                )
        else:
            order, count = _batch.subset_first(subset, samples)
            order = order.to(self._device())
        return _batch.ordered_batch(inputs, targets, samples, order, count)

    def _curvature_count(self, samples: int) -> int:
        """N2 for a batch of N1 samples; a batch smaller than an earlier one may be smaller than N2."""
        self.state["largest_batch"] = largest = max(samples, self.state["largest_batch"])
        wanted = self.curvature_samples
        if wanted is None:
            return samples
        if isinstance(wanted, str):
            return self.affordable_samples(samples)
        if isinstance(wanted, float):
            return max(1, round(wanted * samples))
        if self._group.size > 1:  # its share of all
            share = wanted // self._group.size + (self._group.rank < wanted % self._group.size)
            return max(1, min(share, samples))
        if wanted > largest:
            raise ValueError(
                f"curvature_samples={wanted} is more than the {samples} samples of the batch; "
                "use None for the whole batch, or a fraction of it"
            )
        return min(wanted, samples)

    def affordable_samples(self, samples: int) -> int:
        """N2 that curvature_samples="auto" takes of a batch of N1 samples: all where rows are not formed."""
        return samples

    def _previous(self, plan: Plan, hyper: Hyperparameters) -> Vector | None:
        """q = mu p_prev by parameter name, or None while it is zero."""
        stored: Mapping[str, Tensor] = self.state.get("momentum", {})
        if not stored or not hyper.any_momentum:
            return None
        return {
            name: hyper.momentum[name] * stored[name].to(parameter)
            if name in stored
            else torch.zeros_like(parameter)
            for name, parameter in plan.parameters.items()
        }

    def _vector_if_needed(self, problem: Problem, proposal: Proposal) -> Vector | None:
        """p itself where momentum or weight decay ask for it."""
        if problem.hyper.any_momentum or problem.hyper.any_decay:
            return proposal.displacement.dense()
        return None

    def _judge(
        self, problem: Problem, proposal: Proposal, decrease: Scalar, vector: Vector | None
    ) -> tuple[Scalar, Truth]:
        """rho and whether theta may move."""
        if vector is not None and problem.hyper.any_decay:
            decrease = decrease + decay_decrease(problem, vector)
        # Below the rounding of f both decreases are noise, and the model is as right as it can be: adding the
        # noise level to both makes 0/0 a good step (Conn, Gould & Toint, Trust-Region Methods, 17.4.2). Where f
        # is 0, p^T B p is still known up to a small multiple of eps^2 only.
        precision = _rounding(self.autocast or self.param_groups[0]["params"][0].dtype)
        noise = precision * magnitude(proposal.loss) + 16 * precision**2
        actual, predicted = decrease + noise, proposal.predicted + noise
        finite = (magnitude(actual + predicted) < math.inf) & proposal.usable
        # Momentum can ask for a p that the model itself expects to raise f: there rho has no meaning.
        sensible = finite & (predicted > 0)
        ratio = ratio_where(sensible, actual, predicted, -math.inf)
        accepted = finite if self.accept is None else finite & (ratio >= self.accept)
        if self.guard is not None and isinstance(decrease, float) and isinstance(proposal.loss, float):
            accepted = accepted & self._course(proposal).allows(
                decrease, proposal.loss, largest_rate(problem.hyper), self.guard
            )
        return ratio, accepted

    def _course(self, proposal: Proposal) -> Course:
        """How the loss has gone before this step."""
        return Course.read(self.state.get("course", ()), proposal.loss)

    def _next_damping(self, problem: Problem, proposal: Proposal, ratio: Scalar) -> Scalar:
        """The value of the damping policy after a step with this ratio."""
        value = as_number(self.state["damping"])
        if proposal.raised:
            raised = proposal.damping if proposal.scale is None else proposal.damping / proposal.scale
            value = raised - self.damping.floor
        value = self.damping.next(value, ratio)
        if isinstance(value, float) and not 0 < value < math.inf:  # 0 may do, with a floor
            check_damping(value + self.damping.floor, self.damping)
        return value

    def _next_state(
        self, problem: Problem, proposal: Proposal, damping: Scalar, accepted: Truth, vector: Vector | None
    ) -> dict[str, Any]:
        """What the state gains by the step: lambda, the momentum and what the method keeps for itself."""
        state = {**proposal.memory, "damping": damping}
        if isinstance(proposal.loss, float):
            course = self._course(proposal).after(proposal.loss)
            state["course"] = list(course)
            if accepted and course.runs_away():
                self._warn_once("course", guard_warning(course, self.guard is not None))
        if problem.hyper.any_momentum and vector is not None:
            moved = as_truth(accepted)
            state["momentum"] = {  # a rejected step leaves none behind
                name: torch.where(moved, value, torch.zeros_like(value)) for name, value in vector.items()
            }
        return state

    def _warn_once(self, kind: str, message: str) -> None:
        """Warn, once per optimizer and kind of warning."""
        if kind not in self._warnings_given:
            self._warnings_given.add(kind)
            warnings.warn(f"{type(self).__name__}: {message}", RuntimeWarning, stacklevel=2)

    # -- copying ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # torch's own version keeps the groups and the state alone
        names = ("step", "_zero_grad_profile_name", "profile_hook_step")
        own = {name: value for name, value in vars(self).items() if name not in names and "hooks" not in name}
        return own | {
            "state": _as_plain(self.state),
            "_structure": self._structure.fresh_copy(),
            "_orders": _random.Orders(),
            "_options": None,
            "_recordings": None if self._recordings is None else Recordings(),
            "_watcher": None,
            "_called": self.model,
            "_group": ALONE,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group = self._new_group()
        self._watcher = self._new_watcher()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(damping={self.damping}, blocks={self.blocks!r}, {super().__repr__()})"


def _as_plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with what is an object of its own, `woodbury.optim.memory.Kept`, as plain numbers and tensors."""
    return {key: value.as_state() if hasattr(value, "as_state") else value for key, value in state.items()}
