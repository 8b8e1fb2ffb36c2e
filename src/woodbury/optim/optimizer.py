"""The torch facade of every second-order optimizer: arguments, groups, state, `step`, `direction` and `verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from woodbury import _random
from woodbury._choice import FALLBACKS, check_number, check_truth, check_whole_number, part_named
from woodbury._vector import Parts
from woodbury.device.recording import Recordings
from woodbury.loop.calls import Seen, SeenBatch
from woodbury.loop.compare import Comparison, compare
from woodbury.loop.watch import Watcher, run_closure
from woodbury.losses.rules import NoLoss, ScaledLoss
from woodbury.model.buffers import Buffers
from woodbury.model.capture import call_model
from woodbury.model.compiled import uncompiled, unhidden, written_model
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan
from woodbury.optim.faults import Doubts
from woodbury.optim.info import StepInfo
from woodbury.optim.problems import FIRST_COLUMNS, Context, Problems, Request
from woodbury.optim.recorded import RecordedStep
from woodbury.optim.settings import Settings, check_model_and_loss, check_state, plain_groups, with_names
from woodbury.optim.shards import describe, find_group, start_alike
from woodbury.optim.step import Step
from woodbury.optim.transaction import Transaction
from woodbury.parallel.group import Group
from woodbury.policies.damping import Constant, Damping, LevenbergMarquardt, as_damping
from woodbury.quadratic.passes import Batches
from woodbury.quadratic.quadratic import BLOCKS


class _Setting:
    """An attribute of an optimizer that is one of its settings; to set it makes a changed copy of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.settings, self._name)

    def __set__(self, optimizer: SecondOrder, value: Any) -> None:
        optimizer.settings = replace(optimizer.settings, **{self._name: value})


class _Optimizer(torch.optim.Optimizer):
    """torch's own, without the seconds of an import."""

    add_param_group = unhidden(torch.optim.Optimizer.add_param_group)
    state_dict = unhidden(torch.optim.Optimizer.state_dict)
    load_state_dict = unhidden(torch.optim.Optimizer.load_state_dict)
    zero_grad = unhidden(torch.optim.Optimizer.zero_grad)


class SecondOrder(_Optimizer):
    """The second-order optimizers. See `woodbury.GaussNewton` for the arguments."""

    state: dict[Any, Any]  # type: ignore[assignment]  # keyed by what it holds, not by parameter
    loss, forward, damping, curvature_samples = _Setting(), _Setting(), _Setting(), _Setting()
    accept, guard, max_bytes, autocast = _Setting(), _Setting(), _Setting(), _Setting()
    search, memory, gram_dtype, curvature = _Setting(), _Setting(), _Setting(), _Setting()

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
        check_truth("watch", watch)
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
        find_group(process_group, self._called).check_same(describe(self.settings, self.param_groups))
        self._problems = Problems(self.settings, self._new_group())
        # Refuses now what no pass is needed for, rather than at the first step.
        self._plan()
        self._doubts = Doubts(self.settings.method)
        self._recordings = Recordings() if self.settings.is_recordable else None
        self.state["damping"] = float(self.damping.initial)
        self.state["generator"] = self._problems.group.same(_random.new_state(seed))
        self.state["largest_batch"], self.state["columns"] = 0, FIRST_COLUMNS
        start_alike(self._problems.group, self._trained())
        self._comparison = Comparison()
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
        seen = self._compared(self._seen(closure))
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
            return self._posed(context, Request(inputs, targets, subset, full, held_out)).direction()

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
            return self._posed(context, Request(inputs, targets, subset)).residual(inputs)

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
        self.state["damping"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, given as torch.optim takes them, with settings of their own."""
        super().add_param_group(with_names(self.model, param_group))

    def state_dict(self) -> dict[str, Any]:
        """The settings of the groups and the state by names; `load_state_dict` goes on from it."""
        state = super().state_dict()
        return {**state, "state": _as_plain(state["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, of an optimizer of the same parameters."""
        check_state(state_dict, self.model)
        super().load_state_dict(state_dict)

    # -- one step ---------------------------------------------------------------------------------------

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper of `step`, where there are hooks or a profiler: it takes as long as ten operations."""
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: SecondOrder, *args: Any, **options: Any) -> Any:
            own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled():
                return wrapped(self, *args, **options)
            return func(self, *args, **options)

        return step

    def _context(self, settings: Settings | None = None) -> Context:
        own, groups = self.settings, self.param_groups
        device = groups[0]["params"][0].device
        return Context(self.model, settings or own, self.state, groups, Transaction(self.state), own, device)

    def _step(self, context: Context, request: Request) -> StepInfo:
        transaction = context.transaction
        try:
            recordings = self._recordings
            if recordings is not None and (context.device.type != "cuda" or self._problems.group.size > 1):
                recordings = None
            plain = request.subset is None and request.full is None
            if recordings is not None and plain and context.settings.is_recordable:
                recorded = RecordedStep(context, self._problems, request, self._doubts)
                if recorded.replay(recordings, self._done):
                    assert self.last is not None
                    return self.last
            info = self._posed(context, request).take(self._done)
            if recordings is not None:
                random = transaction.random
                recordings.ordinary_step_ended(context.device, random is not None and _random.drawn_since(random))
            return info
        except BaseException:  # bad input, or an interrupt
            transaction.end()
            raise

    def _posed(self, context: Context, request: Request) -> Step:
        return Step(context, *self._problems.pose(context, request), self._doubts)

    def _done(self, info: StepInfo) -> None:
        self.last = info

    # -- a loop of the user's own -------------------------------------------------------------------------

    def _new_watcher(self) -> Watcher | None:
        return Watcher(self._called, self._trained()) if self.watch else None

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _seen(self, closure: Callable[[], Any] | None) -> Seen:
        """What a closure does, or what was watched since the last step."""
        if self._watcher is None:
            assert closure is not None
            return run_closure(self._called, self._trained(), closure, self.loss)
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self._watcher.take(self.loss)

    def _compared(self, seen: Seen) -> SeenBatch:
        """The batch of a loop, whose loss has the gradients that the loop has left: compared where it is time."""
        group = self._problems.group
        what = seen.what if group.size == 1 else None  # several processes compare in the same steps
        if not self._comparison.is_due(what):
            return seen.batch
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        trained = {names[id(parameter)]: parameter for parameter in self._trained()}
        factor = compare(seen, self.model, trained, self._seen_again, group)
        self._comparison.settle(what, factor)
        loss = seen.batch.loss
        return seen.batch if factor == 1 else replace(seen.batch, loss=ScaledLoss(loss, factor))

    @contextmanager
    def _seen_again(self, seen: SeenBatch) -> Iterator[None]:
        """The model has run on the batch before: its random numbers are repeated, its buffers stay as they are."""
        watcher = self._watcher
        with nullcontext() if watcher is None else watcher.paused(), _random.replayed(seen.random):
            plan = self._plan()
            buffers = Buffers(plan.buffers, {}) if plan.buffers else None
            try:
                with uncompiled if plan.has_compiled() else nullcontext():
                    yield
            finally:
                if buffers is not None:
                    buffers.put_back()

    # -- parts and copies -------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        return self._problems.structure.read(self.model, self.param_groups)

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
            "_problems": self._problems.fresh_copy(),
            "_recordings": None,
            "_watcher": None,
            "_called": self.model,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._problems.group = self._new_group()
        self._recordings = Recordings() if self.settings.is_recordable else None
        self._watcher = self._new_watcher()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(damping={self.damping}, blocks={self.blocks!r}, {super().__repr__()})"


def _as_plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with what is an object (`woodbury.quadratic.memory.Kept`) as plain numbers and tensors."""
    return {key: value.as_state() if hasattr(value, "as_state") else value for key, value in state.items()}
