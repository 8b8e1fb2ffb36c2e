"""The torch facade of every second-order optimizer: arguments, groups, state, `step`, `direction` and `verify`.

A step is one sentence: the batch gives a `Quadratic` and an `Objective` (`woodbury.quadratic`), a policy proposes a
p and judges it (`woodbury.policies`), and the optimizer moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from woodbury import _random, products
from woodbury._batch import Batch
from woodbury._choice import FALLBACKS, part_named
from woodbury._group import Group
from woodbury._vector import Parts, Vector
from woodbury.device.replay import Replay
from woodbury.device.scalars import as_truth, compute, is_known, to_device
from woodbury.layers.attention import plain_attention
from woodbury.losses.seen import NoLoss
from woodbury.model.buffers import Buffers
from woodbury.model.capture import call_model
from woodbury.model.compiled import written_model
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan
from woodbury.optim.faults import NO_STEP, Doubts, name_bad_samples
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.problems import Context, Problems, Request
from woodbury.optim.recorded import RecordedStep
from woodbury.optim.settings import (
    Hyperparameters,
    Settings,
    check_model_and_loss,
    check_number,
    check_whole_number,
    plain_groups,
    with_names,
)
from woodbury.optim.shards import find_group, start_alike
from woodbury.optim.transaction import Transaction
from woodbury.optim.watch import SeenBatch, Watcher, run_closure
from woodbury.policies.curved import SearchedStep
from woodbury.policies.damped_step import DampedStep
from woodbury.policies.damping import Constant, Damping, LevenbergMarquardt, as_damping
from woodbury.policies.guard import largest_rate
from woodbury.policies.proposal import AnyQuadratic, Limits, Policy, Proposal
from woodbury.quadratic.blocks import BLOCKS
from woodbury.quadratic.linearize import Problem, linearize
from woodbury.quadratic.memory import Kept, with_memory
from woodbury.quadratic.metric import InMetric, next_units
from woodbury.quadratic.objective import Objective
from woodbury.quadratic.passes import Batches, NonFiniteLossError

_WORTH_WRITING = 2**14  # parameters of a layer whose rows, kept and used again, are better written out


class _Setting:
    """An attribute of an optimizer that is one of its settings; to set it makes a changed copy of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.settings, self._name)

    def __set__(self, optimizer: SecondOrder, value: Any) -> None:
        optimizer.settings = replace(optimizer.settings, **{self._name: value})


class Posed(NamedTuple):
    """The quadratic model of a step, f, and what the state gains by making them."""

    quadratic: AnyQuadratic
    objective: Objective
    gains: dict[str, Any]


class SecondOrder(torch.optim.Optimizer):
    """The second-order optimizers. See `woodbury.GaussNewton` for the arguments."""

    state: dict[Any, Any]  # type: ignore[assignment]  # keyed by what it holds, not by parameter
    loss, forward, damping, curvature_samples = _Setting(), _Setting(), _Setting(), _Setting()
    accept, guard, max_bytes, autocast = _Setting(), _Setting(), _Setting(), _Setting()
    search, memory, gram_dtype = _Setting(), _Setting(), _Setting()

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None,
        lr: float,  # alpha
        *,
        blocks: str,
        momentum: float,  # mu
        fallback: str | None,
        method: Mapping[str, Any],  # settings that the kind of optimizer decides about, see `Settings`
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
        self._called = model  # in loops of the user's own: what torch.compile returned, if that was given
        model, loss = written_model(model), written_model(NoLoss() if loss is None else loss)
        check_model_and_loss(model, loss)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_number(name, value)
        if seed is not None:
            check_whole_number("seed", seed)
        if not isinstance(watch, bool):
            raise TypeError(f"watch must be True or False, got {watch!r}")
        self.settings = Settings(
            method=type(self).__name__,
            loss=loss,
            forward=call_model if forward is None else forward,
            blocks=part_named("blocks", blocks, BLOCKS),
            damping=as_damping(damping),
            curvature_samples=curvature_samples,
            accept=accept,
            guard=guard,
            has_fallback=part_named("fallback", fallback, FALLBACKS),
            **method,
        )
        if momentum and self.settings.search is not None:
            raise ValueError(f"search= and momentum={momentum} do not go together: a search needs no momentum")
        check_number("momentum", momentum, most=self.settings.most_momentum)
        self.model, self.process_group, self.watch = model, process_group, watch
        self.last: StepInfo | None = None
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(plain_groups(model, params), defaults)
        self._problems = Problems(self.settings, self._new_group())
        # Refuses now what no pass is needed for, rather than at the first step.
        self._plan()
        self._doubts = Doubts(self.settings.method)
        self._replay = Replay() if self.settings.is_recordable else None
        self.state["damping"] = to_device(self.damping.initial, self._context().device)
        self.state["generator"] = self._problems.group.same(_random.new_state(seed))
        self.state["largest_batch"] = 0
        start_alike(self._problems.group, self._trained())
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
        request = Request(inputs, targets, subset, full, held_out)
        if closure is None and (inputs is not None or self._watcher is None):
            return self._step(self._context(), request)
        if inputs is not None or targets is not None:
            raise TypeError("step takes a batch (inputs, targets) or a closure, not both")
        seen = self._seen_batch(closure)
        settings = replace(self.settings, loss=seen.loss, forward=seen.forward)
        request = replace(request, inputs=seen.inputs, targets=seen.targets)
        with self._seen_again(seen):
            return self._step(self._context(settings), request)

    def direction(
        self,
        inputs: Any,
        targets: Tensor | None = None,
        *,
        subset: Tensor | None = None,
        full: Batches | None = None,
        held_out: tuple[Any, Tensor | None] | None = None,
    ) -> Parts:
        """p as a dictionary from parameter name to tensor; nothing changes, random state included.

        It is the p the next `step` on the same batch would use; with a search alpha p + alpha^2 bend.
        """
        context = self._context()
        with context.transaction.undone():
            problem, hyper = self._problems.pose(context, Request(inputs, targets, subset, full, held_out))
            with self._derivatives(context, problem):
                proposal = self._propose(context, problem, hyper)[0]
                self._check_solved(problem, proposal.predicted, to_take=False)
                return dict(proposal.displacement.dense())

    def verify(self, inputs: Any, targets: Tensor | None = None, *, subset: Tensor | None = None) -> Tensor:
        """Relative residual |(B + lambda I) p + g| / |g| of the step on this batch, as a 0-dim tensor.

        B and g come from matrix-free autograd products that share no code with the solve. With weight decay
        and momentum it is the residual of the system they turn this into, with a search that of its smallest
        damping, with `memory=` that of a step without it. Nothing changes.
        """
        if self._problems.group.size > 1:
            raise ValueError("verify looks at the samples of one process: call it in a run with one")
        context = self._context(replace(self.settings, memory=0))
        with context.transaction.undone():
            problem, hyper = self._problems.pose(context, Request(inputs, targets, subset))
            random = _random.snapshot(context.device)
            with _random.replayed(random), self._derivatives(context, problem, twice=True):
                with self._naming_bad_samples(problem):
                    quadratic = self._pose(context, problem).quadratic
                    damped, found = self._policy(context, problem, hyper).solve(quadratic, self.state)
                self._check_solved(problem, found.predicted, to_take=False)
                drawn = _random.drawn_since(random)
            forward = problem.passes.forward
            with _random.replayed(random), plain_attention, torch.enable_grad():
                if drawn:  # in the pieces the step ran, so that dropout masks agree
                    outputs = torch.cat([forward(self.model, piece.inputs) for piece in quadratic.pieces])
                else:  # as it was given, in one piece: a model that mixes samples gives itself away
                    outputs = forward(self.model, inputs)
                    outputs = outputs if problem.batch.order is None else outputs[problem.batch.order]
            return products.relative_residual(
                outputs,
                self.loss,
                problem.batch,
                problem.plan.parameters,
                found.displacement.dense(),
                damping=damped.damping,
                decay=hyper.weight_decay,
                previous=damped.center,
                blocks=self.settings.blocks.parameter_names(problem.plan),
                at_outputs=self.settings.curvature.at_outputs,
                metric=quadratic.metric() if isinstance(quadratic, InMetric) else None,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; steps do not need it, except for what watch=True has seen: that is forgotten."""
        super().zero_grad(set_to_none)
        if self._watcher is not None:
            self._watcher.clear()

    @property
    def blocks(self) -> str:
        """Which blocks of B are kept, by name."""
        return self.settings.blocks.name

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
        if self.search is not None:
            raise AttributeError("a search chooses its own dampings: give CurvedSearch(rungs=...) others")
        check_number("current_damping", damping, above=0)
        if damping < self.damping.floor:
            raise ValueError(f"current_damping must be at least {self.damping.floor}, the floor of {self.damping}")
        value = float(damping) - self.damping.floor
        if isinstance(self.damping, Constant):
            self.damping = replace(self.damping, initial=value)
        self.state["damping"] = to_device(value, self._context().device)

    def affordable_samples(self, samples: int) -> int:
        """N2 that curvature_samples="auto" takes of a batch of N1 samples: all where rows are not formed."""
        return self._problems.affordable_samples(self._context(), samples)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, given as torch.optim takes them, with settings of their own."""
        super().add_param_group(with_names(self.model, param_group))

    def state_dict(self) -> dict[str, Any]:
        """The settings of the groups and the state by names; `load_state_dict` goes on from it."""
        state = super().state_dict()
        return {**state, "state": _as_plain(state["state"])}

    # -- one step ---------------------------------------------------------------------------------------

    def _context(self, settings: Settings | None = None) -> Context:
        """What a step is taken with, and the part of the state that posing a problem changes."""
        transaction = Transaction(self.state, ("generator", "largest_batch"))
        return Context(self.model, settings or self.settings, self.state, self.param_groups, transaction)

    def _step(self, context: Context, request: Request) -> StepInfo:
        transaction = context.transaction
        try:
            replay = self._replay if context.device.type == "cuda" and self._problems.group.size == 1 else None
            if replay is not None and request.subset is None and request.full is None:
                info = self._replayed(replay, context, request)
                if info is not None:
                    return info
            problem, hyper = self._problems.pose(context, request)
            info = self._take(context, problem, hyper)
            if replay is not None:
                random = transaction.random
                replay.ordinary_step_ended(context.device, random is not None and _random.drawn_since(random))
            return info
        except BaseException:  # bad input, or an interrupt
            transaction.end()
            raise

    def _replayed(self, replay: Replay, context: Context, request: Request) -> StepInfo | None:
        """A step from a CUDA graph, recorded first if it is time; None if it is not."""

        def take(context: Context, request: Request, batch: Batch, rates: list[Any]) -> StepInfo:
            inner = replace(context, transaction=Transaction(self.state, ("generator", "largest_batch")))
            plan = self._problems.plan(inner)
            last = self.last
            info = self._take(inner, *self._problems.problem(inner, plan, batch, request, rates))
            self.last = last
            return info

        step = RecordedStep(context, self._problems, request, take)
        if not replay.take(step):
            return None
        assert step.numbers is not None
        self.last = StepInfo.later(step.numbers)
        return self.last

    def _take(self, context: Context, problem: Problem, hyper: Hyperparameters) -> StepInfo:
        """Propose, judge and move."""
        by_hand = problem.passes.chain is not None and context.settings.keeps_nothing
        with torch.inference_mode() if by_hand else self._derivatives(context, problem):
            proposal, policy, objective = self._propose(context, problem, hyper)
            self._check_solved(problem, proposal.predicted, to_take=True)
            policy.judge(proposal, objective, self.state)
        for kind, message in proposal.warnings.items():
            self._doubts.warn_once(kind, message)
        with torch.no_grad():
            return self._conclude(context, problem, hyper, proposal)

    def _propose(
        self, context: Context, problem: Problem, hyper: Hyperparameters
    ) -> tuple[Proposal, Policy, Objective]:
        """The step that the policy proposes; where that fails on the CPU, an error that names the bad samples."""
        policy = self._policy(context, problem, hyper)
        with self._naming_bad_samples(problem):
            posed = self._pose(context, problem)
            proposal = policy.propose(posed.quadratic, posed.objective, self.state)
        proposal.gains |= posed.gains
        return proposal, policy, posed.objective

    def _pose(self, context: Context, problem: Problem) -> Posed:
        """The quadratic model of a problem, with the rows of earlier batches and in the metric that are asked for."""
        settings, gains, units = context.settings, dict[str, Any](), None
        dtype = problem.plan.dtype
        if settings.solver.exact and settings.gram_dtype is None and dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"the small system cannot be solved in {dtype}: pass gram_dtype=torch.float32")
        quadratic, objective = linearize(problem)
        if settings.search is None and (settings.memory or settings.metric is not None):
            quadratic = quadratic.written_out(_WORTH_WRITING)
        if settings.metric is not None:
            if quadratic.decay is not None:
                raise ValueError(
                    f"metric={settings.metric.name!r} and weight_decay do not go together: leave one of them out, "
                    "or add the penalty to a loss of your own"
                )
            units, gains["metric"] = next_units(settings.metric, self.state.get("metric", {}), quadratic)
        if settings.memory:
            kept = Kept.read(self.state.get("kept", {}), problem.plan)
            quadratic, gains["kept"] = with_memory(quadratic, kept, settings.memory, units is None)
        return Posed(quadratic if units is None else InMetric(quadratic, units), objective, gains)

    def _policy(self, context: Context, problem: Problem, hyper: Hyperparameters) -> Policy:
        settings = context.settings
        precision = torch.finfo(settings.autocast or problem.plan.dtype).eps
        limits = Limits(settings.accept, settings.guard, precision, largest_rate(hyper.lr))
        if settings.search is not None:
            return SearchedStep(settings.search, problem.curvature, limits, problem.held_out)
        damping = context.state["damping"]
        look = is_known(damping) and self._doubts.is_time_to_look(damping + settings.damping.floor)
        return DampedStep(settings.damping, limits, look)

    def _conclude(
        self, context: Context, problem: Problem, hyper: Hyperparameters, proposal: Proposal
    ) -> StepInfo:
        """Move, if the step is accepted."""
        numbers = Numbers(
            proposal.loss,
            proposal.damping,
            proposal.ratio,
            proposal.predicted,
            proposal.squared_norm,
            proposal.accepted,
            proposal.length,
            proposal.share,
            proposal.bent,
        )
        # all at once: on a device that is one kernel, and what they come from may be overwritten later
        damping, *computed = compute(proposal.gains["damping"], *numbers)
        numbers = Numbers(*computed)
        state = proposal.gains | {"damping": damping}
        if hyper.any_momentum:
            state["momentum"] = _momentum(proposal.displacement.dense(), numbers.accepted)
        info, buffers, displacement = StepInfo.later(numbers), context.transaction.buffers, proposal.displacement
        versions = {name: parameter._version for name, parameter in problem.plan.parameters.items()}
        if buffers is not None:
            with _random.replayed(context.transaction.random):
                buffers.prepare(lambda: problem.passes.forward(self.model, problem.batch.inputs))

        def finish() -> None:
            displacement.add_(hyper.lr, numbers.accepted, versions)
            if buffers is not None:
                buffers.settle(numbers.accepted)
            self.state.update(state)
            self.last = info

        context.transaction.commit(finish)
        return info

    def _derivatives(self, context: Context, problem: Problem, twice: bool = False) -> AbstractContextManager[Any]:
        """Inside, passes through the model can be differentiated as often as the method does, or twice."""
        if problem.passes.chain is not None:
            return torch.no_grad()  # by hand
        twice = twice or not context.settings.solver.forms_rows
        return plain_attention if twice else nullcontext()

    @contextmanager
    def _naming_bad_samples(self, problem: Problem) -> Iterator[None]:
        """On the CPU an error inside that comes from some samples becomes one that names them."""
        try:
            yield
        except (NonFiniteLossError, torch.linalg.LinAlgError) as error:
            name_bad_samples(problem, error)
            raise

    def _check_solved(self, problem: Problem, predicted: Any, to_take: bool) -> None:
        """On the CPU, where no p could be computed: an error that names the samples, if it is some of them.

        Where it is not the samples, a proposal to take is one that will be rejected.
        """
        if not is_known(predicted) or math.isfinite(predicted):
            return
        name_bad_samples(problem, None)
        if not to_take:
            raise ArithmeticError(f"{type(self).__name__}: {NO_STEP}")
        self._doubts.warn_once("no step", f"{NO_STEP}. The step is rejected")

    # -- a loop of the user's own -------------------------------------------------------------------------

    def _new_watcher(self) -> Watcher | None:
        return Watcher(self._called, self._trained(), runs_backward=True) if self.watch else None

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _seen_batch(self, closure: Callable[[], Any] | None) -> SeenBatch:
        """The batch and the loss of a closure, or of the backward passes that were watched."""
        self._seen_steps += 1
        if self._watcher is None:
            assert closure is not None
            return run_closure(self._called, self._trained(), closure, self.loss, self._seen_steps)
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self._watcher.take(self.loss, self._seen_steps)

    @contextmanager
    def _seen_again(self, seen: SeenBatch) -> Iterator[None]:
        """The model has run on the batch before: its random numbers are repeated, and its buffers stay as they are."""
        watcher = self._watcher
        with nullcontext() if watcher is None else watcher.paused(), _random.replayed(seen.random):
            holders = self._plan().buffers
            buffers = Buffers(holders, {}) if holders else None
            try:
                yield
            finally:
                if buffers is not None:
                    buffers.put_back()

    # -- parts and copies -------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        return self._problems.plan(self._context())

    def _new_group(self) -> Group:
        group = find_group(self.process_group, self._called)
        if group.size > 1:
            self.settings.check_joint()
        return group

    def __getstate__(self) -> dict[str, Any]:
        # torch's own version keeps the groups and the state alone
        names = ("step", "_zero_grad_profile_name", "profile_hook_step")
        kept = {name: value for name, value in vars(self).items() if name not in names and "hooks" not in name}
        return kept | {
            "state": _as_plain(self.state),
            "_problems": None,
            "_replay": None,
            "_watcher": None,
            "_called": self.model,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._problems = Problems(self.settings, self._new_group())
        self._replay = Replay() if self.settings.is_recordable else None
        self._watcher = self._new_watcher()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(damping={self.damping}, blocks={self.blocks!r}, {super().__repr__()})"


def _as_plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with its own objects (`Vector`, `Kept`) as plain numbers and tensors."""
    return {key: value.as_state() if hasattr(value, "as_state") else value for key, value in state.items()}


def _momentum(p: Vector, accepted: Any) -> Vector:
    """p of the step for the next one; a rejected step leaves none behind."""
    if is_known(accepted) and not accepted:
        return p.of(torch.zeros_like(p.flat))
    if is_known(accepted):
        return p.of(p.flat.clone()) if p.flat.is_inference() else p
    return p.of(torch.where(as_truth(accepted), p.flat, torch.zeros_like(p.flat)))
