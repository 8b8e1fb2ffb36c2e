"""One step: the quadratic model of its problem, the proposal of a policy, and the move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from woodbury import _random, products
from woodbury._batch import fault_of_types
from woodbury._vector import Parts, Vector
from woodbury.device.scalars import Truth, as_truth, compute, is_known
from woodbury.layers.maps import plain_attention
from woodbury.optim.faults import BATCH_ERRORS, Doubts, check_solved, name_bad_samples
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.problems import Context
from woodbury.optim.settings import Hyperparameters
from woodbury.policies.curved import SearchedStep
from woodbury.policies.damped_step import DampedStep
from woodbury.policies.proposal import AnyQuadratic, Policy, Proposal
from woodbury.quadratic.linearize import linearize
from woodbury.quadratic.memory import Kept, with_memory
from woodbury.quadratic.metric import InMetric
from woodbury.quadratic.objective import Objective
from woodbury.quadratic.quadratic import Problem
from woodbury.quadratic.solvers import SOLVERS

_SHOWN = attrgetter(*Numbers._fields)
_WORTH_WRITING = 2**14  # parameters of a layer whose rows, kept and used again, are better written out


@dataclass(eq=False)
class Step:
    """The step of one problem, with the settings of its groups."""

    context: Context
    problem: Problem
    hyper: Hyperparameters
    doubts: Doubts

    def take(self, done: Callable[[StepInfo], None]) -> StepInfo:
        """Propose, judge and move; `done` hears of the step as part of the move, perhaps twice."""
        settings, by_hand = self.context.settings, self.problem.passes.chain is not None
        if settings.search is not None or settings.solver.keeps_state:
            by_hand = False  # a pass is differentiated later
        with torch.inference_mode() if by_hand else self._derivatives():
            proposal, policy, objective = self._propose()
            check_solved(self.problem, proposal.predicted, self.doubts, to_take=True)
            policy.judge(proposal, objective, self.context.state)
        if proposal.warnings:
            self.doubts.warn_once(proposal.warnings, settings.advice)
        with torch.set_grad_enabled(False):
            return self._move(proposal, done)

    def direction(self) -> Parts:
        """p by parameter name."""
        with self._derivatives():
            proposal, _, _ = self._propose()
            self.doubts.warn_once(proposal.warnings)
            check_solved(self.problem, proposal.predicted, self.doubts, to_take=False)
            return dict(proposal.displacement.dense())

    def residual(self, inputs: Any) -> Tensor:
        """|(B + lambda I) p + g| / |g|, where B and g share no code with the solve; see `SecondOrder.verify`."""
        problem, settings, model = self.problem, self.context.settings, self.context.model
        random = _random.snapshot(self.context.device)
        with _random.replayed(random), self._derivatives(twice=True):
            try:
                quadratic, _, _ = self._pose()
                damped, found = self._policy().solve(quadratic, self.context.state)
            except BATCH_ERRORS as error:
                name_bad_samples(problem, error)
                raise
            check_solved(problem, found.predicted, self.doubts, to_take=False)
            drawn = _random.drawn_since(random)
        forward = problem.passes.forward
        with _random.replayed(random), plain_attention, torch.enable_grad():
            if drawn:  # in the pieces the step ran, so that dropout masks agree
                outputs = torch.cat([forward(model, piece.inputs) for piece in quadratic.pieces])
            else:  # as it was given, in one piece: a model that mixes samples gives itself away
                outputs = forward(model, inputs)
                outputs = outputs if problem.batch.order is None else outputs[problem.batch.order]
        return products.relative_residual(
            outputs,
            settings.loss,
            problem.batch,
            problem.plan.parameters,
            found.displacement.dense(),
            damping=damped.damping,
            decay=self.hyper.weight_decay,
            previous=damped.center,
            blocks=settings.blocks.parameter_names(problem.plan),
            at_outputs=settings.curvature.at_outputs,
            metric=quadratic.metric() if isinstance(quadratic, InMetric) else None,
        )

    def _propose(self) -> tuple[Proposal, Policy, Objective]:
        policy = self._policy()
        try:
            quadratic, objective, gains = self._pose()
            proposal = policy.propose(quadratic, objective, self.context.state)
        except BATCH_ERRORS as error:
            name_bad_samples(self.problem, error)
            raise
        except RuntimeError as error:
            fault = fault_of_types(error, self.problem.batch.inputs, self.problem.plan.dtype)
            if fault is None:
                raise
            raise TypeError(fault) from error
        proposal.gains |= gains
        return proposal, policy, objective

    def _pose(self) -> tuple[AnyQuadratic, Objective, dict[str, Any]]:
        """The quadratic model, with the rows and in the metric that are asked for; f; what the state gains."""
        settings, state, plan = self.context.settings, self.context.state, self.problem.plan
        low = plan.dtype in (torch.float16, torch.bfloat16)
        if low and settings.gram_dtype is None and settings.solver.name in SOLVERS:
            ways = "pass gram_dtype=torch.float32, or use model.float()"
            raise ValueError(f"the small system cannot be solved in {plan.dtype}: {ways}")
        quadratic, objective = linearize(self.problem)
        gains: dict[str, Any] = {}
        units = None
        if settings.search is None and (settings.memory or settings.metric is not None):
            quadratic = quadratic.written_out(_WORTH_WRITING)
        if settings.metric is not None:
            if quadratic.decay is not None:
                raise ValueError(
                    f"metric={settings.metric.name!r} and weight_decay do not go together: leave one of them out, "
                    "or add the penalty to a loss of your own"
                )
            units, gains["metric"] = settings.metric.next_units(state.get("metric", {}), quadratic)
        if settings.memory:
            kept = Kept.read(state.get("kept", {}), plan)
            row_count = kept.rows + quadratic.curvature_rows
            has_gram = units is None and settings.blocks.is_whole
            needs_gram = has_gram and not settings.blocks.are_smaller(plan, row_count)
            quadratic, gains["kept"] = with_memory(quadratic, kept, settings.memory, needs_gram)
        return (quadratic if units is None else InMetric(quadratic, units)), objective, gains

    def _policy(self) -> Policy:
        settings, problem = self.context.settings, self.problem
        precision = torch.finfo(settings.autocast or problem.plan.dtype).eps
        accept, guard, rates = settings.accept, settings.guard, self.hyper.lr
        if settings.search is not None:
            return SearchedStep(accept, guard, precision, rates, settings.search)
        damping = self.context.state["damping"]
        look = is_known(damping) and self.doubts.is_time_to_look(damping + settings.damping.floor)
        return DampedStep(accept, guard, precision, rates, settings.damping, look)

    def _move(self, proposal: Proposal, done: Callable[[StepInfo], None]) -> StepInfo:
        """theta <- theta + alpha p if the step is accepted, and the new state."""
        problem, transaction, buffers = self.problem, self.context.transaction, self.context.transaction.buffers
        # all at once: on a device that is one kernel, and what they come from may be overwritten later
        damping, *computed = compute(proposal.gains["damping"], *_SHOWN(proposal))
        numbers = Numbers(*computed)
        state, info = proposal.gains | {"damping": damping}, StepInfo.later(numbers)
        if any(self.hyper.momentum.values()):
            state["momentum"] = _momentum(proposal.displacement.dense(), numbers.accepted).named()
        versions = {name: parameter._version for name, parameter in problem.plan.parameters.items()}
        if buffers is not None:
            with _random.replayed(transaction.random):
                buffers.prepare(lambda: problem.passes.forward(self.context.model, problem.batch.inputs))

        def finish() -> None:
            proposal.displacement.add_(self.hyper.lr, numbers.accepted, versions)
            if buffers is not None:
                buffers.settle(numbers.accepted)
            self.context.state.update(state)
            done(info)

        transaction.commit(finish)
        return info

    def _derivatives(self, twice: bool = False) -> AbstractContextManager[Any]:
        """Inside, passes through the model can be differentiated as often as the method does, or twice."""
        if self.problem.passes.chain is not None:
            return torch.no_grad()  # by hand
        settings = self.context.settings
        twice = twice or not settings.solver.forms_rows or settings.search is not None
        return plain_attention if twice else nullcontext()


def _momentum(p: Vector, accepted: Truth | Tensor) -> Vector:
    """p of the step for the next one; a rejected step leaves none behind."""
    if not is_known(accepted):
        return p.of(torch.where(as_truth(accepted), p.flat, torch.zeros_like(p.flat)))
    if not accepted:
        return p.of(torch.zeros_like(p.flat))
    return p.of(p.flat.clone()) if p.flat.is_inference() else p
