"""SMW-GN, SMW-NG and SMW-NG-BD: exact damped steps, solved in the smaller of sample space and parameter space.

The two methods of the paper differ in the factor S only (`woodbury.curvature`); the routes to p are
`woodbury.optim.sample_space`, `parameter_space` and `by_products`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from woodbury import _random
from woodbury._choice import part_named
from woodbury._memory import available_bytes, in_words
from woodbury.curvature import CURVATURES, Curvature, OwnScale
from woodbury.damping import FORGETTING, is_relative, next_scale
from woodbury.device.recording import Recordings
from woodbury.device.scalars import Scalar, as_number, compute
from woodbury.displacement import Displacement
from woodbury.optim.base import SecondOrder
from woodbury.optim.by_products import Products
from woodbury.optim.linearize import Linearization, linearize
from woodbury.optim.memory import Kept, remember
from woodbury.optim.metric import METRICS, Units, next_units
from woodbury.optim.parameter_space import is_smaller
from woodbury.optim.passes import Piece
from woodbury.optim.price import affordable_rows
from woodbury.optim.sample_space import Cholesky, ConjugateGradient, Solver, System
from woodbury.optim.searched import searched_proposal
from woodbury.optim.settings import BELOW_ONE, Common, check_number, check_whole_number
from woodbury.optim.step import Answer, Problem, Proposal
from woodbury.search import CurvedSearch

SOLVERS: dict[str, Solver] = {kind.name: kind for kind in (Cholesky(), ConjugateGradient(), Products())}
FIRST_COLUMNS = 8  # to reckon with before the model has shown its outputs
_WORTH_WRITING = 2**14  # parameters of a layer whose rows, kept and used again, are better written out
_WORTH_ASKING = 2**30  # bytes that a step may need before it asks how many there are
# by how much lambda may be raised within a step, time after time, to make K + lambda I definite
_RAISES = (*[10.0] * 12, *[1000.0] * 6)


class _SampleSpace(SecondOrder):
    """The two methods of the paper; they differ in the factor S only."""

    search: CurvedSearch | None = None

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None = None,
        lr: float = 1.0,  # alpha
        *,
        blocks: str = "full",
        momentum: float = 0.0,  # mu
        solver: str = "cholesky",
        solver_tolerance: float | None = None,
        gram_dtype: torch.dtype | None = None,
        fallback: str | None = None,
        max_bytes: int | None = None,
        capture: bool = True,
        autocast: torch.dtype | None = None,
        search: CurvedSearch | None = None,
        memory: int = 0,
        metric: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        if max_bytes is not None:
            check_number("max_bytes", max_bytes, above=0)
        if solver_tolerance is not None:
            check_number("solver_tolerance", solver_tolerance)
        if gram_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"gram_dtype must be torch.float32, torch.float64 or None, got {gram_dtype}")
        if autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be torch.bfloat16 or None, got {autocast}")
        if not isinstance(capture, bool):
            raise TypeError(f"capture must be True or False, got {capture!r}")
        self._solver = part_named("solver", solver, SOLVERS)
        self._check_search(search, momentum)
        self.search = search
        self._check_memory_and_metric(memory, metric)
        self.memory = memory
        self._metric = None if metric is None else part_named("metric", metric, METRICS)
        self.solver_tolerance = solver_tolerance
        self.gram_dtype = gram_dtype
        self.max_bytes = max_bytes
        self.autocast = autocast
        super().__init__(model, loss, lr, blocks=blocks, momentum=momentum, fallback=fallback, **common)
        self._solves, self._looked_at = 0, math.inf  # see `_is_time_to_look`
        self._columns = FIRST_COLUMNS  # per sample; known from the first outputs on
        self._affordable: dict[int, int] = {}  # rows, by the samples of a batch
        # the other solvers, and a search, look at numbers as they go, which no graph can record
        plain = self._solver.exact and search is None
        plain = plain and not memory and metric is None  # whose numbers of rows change
        self._recordings = Recordings() if capture and plain else None

    def _check_search(self, search: CurvedSearch | None, momentum: float) -> None:
        if search is None:
            return
        if not isinstance(search, CurvedSearch):
            raise TypeError(f"search must be a woodbury.CurvedSearch or None, got {search!r}")
        if not self.curvature.fits_loss:
            raise ValueError(f"{type(self).__name__} takes no search: use GaussNewton(..., search=...)")
        if not self._solver.exact:
            raise ValueError(f"search= needs solver='cholesky', got {self._solver.name!r}")
        if momentum:
            raise ValueError(f"search= and momentum={momentum} do not go together: a search needs no momentum")

    def _check_memory_and_metric(self, memory: int, metric: str | None) -> None:
        check_whole_number("memory", memory, least=0)
        wanted = [f"memory={memory}"] if memory else []
        wanted += [] if metric is None else [f"metric={metric!r}"]
        if wanted and not self._solver.exact:
            raise ValueError(f"{wanted[0]} needs solver='cholesky', got {self._solver.name!r}")
        if self.search is not None and (memory or metric not in (None, "diagonal")):
            raise ValueError(f"search= and {wanted[0]} do not go together")

    @property
    def metric(self) -> str | None:
        """The name of the metric of damping and momentum, None for I."""
        return None if self._metric is None else self._metric.name

    @property
    def _most_momentum(self) -> float:  # type: ignore[override]
        return BELOW_ONE if self.search is None else 0.0

    def _check_held_out(self, held_out: Any) -> None:
        if self.search is None:
            super()._check_held_out(held_out)
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise TypeError(f"held_out must be a pair (inputs, targets), got {type(held_out).__name__}")
        self._count_samples(*held_out)

    def _check_joint(self) -> None:
        if self.search is not None:
            raise ValueError("search= is for one process: it looks at the loss several times per step")
        if not self._solver.forms_rows:
            raise ValueError(f"solver={self._solver.name!r} is for one process: use 'cholesky', or HessianFree")
        if self.memory or self.metric is not None:
            raise ValueError("memory= and metric= are for one process: leave them out")

    def _one_system(self, problem: Problem) -> Proposal:
        if self.search is None:
            memory, self.memory = self.memory, 0  # what is verified has the curvature of the batch alone
            try:
                return super()._one_system(problem)
            finally:
                self.memory = memory
        search, self.search = self.search, None
        try:
            system = System(self._blocks, self.gram_dtype, self.solver_tolerance)
            assert isinstance(self._solver, Cholesky)
            line, _ = self._linearize(problem, system)
            if self._metric is not None:
                line = self._next_units(problem, line)[0].of_line(line)
            trace = float(self._solver.trace(problem, line, system))
            if problem.random is not None:
                _random.restore(problem.random)
            return self._proposal(replace(problem, damping=search.rungs[-1] * trace))
        finally:
            self.search = search

    def _next_damping(self, problem: Problem, proposal: Proposal, ratio: Scalar) -> Scalar:
        if self.search is None:
            return super()._next_damping(problem, proposal, ratio)
        return as_number(self.state["damping"])  # its dampings follow the trace of K

    @property
    def solver(self) -> str:
        """The name of the solver."""
        return self._solver.name

    @property
    def _keeps_nothing(self) -> bool:  # type: ignore[override]
        return self.search is None

    @property
    def _by_layers(self) -> bool:  # type: ignore[override]
        return self._solver.forms_rows

    @property
    def _twice_differentiated(self) -> bool:  # type: ignore[override]
        return not self._solver.forms_rows

    def _choices(self) -> Hashable:
        return self.solver_tolerance, self.gram_dtype

    def _propose(self, problem: Problem) -> Proposal:
        dtype = problem.plan.dtype
        if self.gram_dtype is None and dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"the small system cannot be solved in {dtype}: pass gram_dtype=torch.float32")
        if self.memory:
            problem = replace(problem, batch=problem.batch.copied())
        passes = problem.passes
        system = System(
            self._blocks, self.gram_dtype, self.solver_tolerance, self._is_time_to_look(problem.damping)
        )
        if problem.full is None:
            line, pieces = self._linearize(problem, system)
            loss = line.loss
            evaluate: Callable[[Displacement], Scalar] = partial(
                passes.decrease_on, pieces, term_count=line.term_count
            )
        else:
            # The loader first: its random numbers must be the ones that `evaluate` replays.
            loss, gradient, evaluate, samples = passes.over_all(problem.full)
            line, pieces = self._linearize(problem, system)
            line.gradient = gradient
            if passes.is_sum:  # over the samples of the loader
                line.divisor = line.divisor * problem.batch.samples / samples
        if self.search is not None:
            assert isinstance(self._solver, Cholesky)
            system, units, gains = system._replace(look=False, factors={}), None, dict[str, Any]()
            if self._metric is not None:
                units, gains["metric"] = self._next_units(problem, line)
            proposal = searched_proposal(
                *(problem, self.search, self._scaled_curvature(), self._solver, system, line, pieces),
                *(self.state.get("search", {}), units),
            )
            proposal.memory.update(gains)
            return proposal
        center, units, gains = problem.previous, None, dict[str, Any]()
        if self.memory or self._metric is not None:
            line = line.written_out(_WORTH_WRITING)
        if self._metric is not None:
            units, gains["metric"] = self._next_units(problem, line)
        if self.memory:
            line, gains["kept"] = self._remember(problem, system, line)
        if units is not None:
            problem, line = units.of_problem(problem), units.of_line(line)
        scale = None
        if is_relative(self.damping):
            before = as_number(self.state["scale"]) if "scale" in self.state else None
            forgetting = getattr(self.damping, "forgetting", FORGETTING)
            scale = next_scale(self._solver.trace(problem, line, system), before, forgetting)
            problem = replace(problem, damping=problem.damping * scale)
        solve = partial(self._solver.answer, problem, line, system)
        damping = problem.damping
        answer = solve(damping)
        if answer.usable is False and self._solver.exact and isinstance(damping, float):
            answer, damping = self._with_more_damping(solve, answer, damping)
        if answer.doubt is not None and damping is problem.damping and (answer.usable or not self._solver.exact):
            self._warn_once("doubt", answer.doubt)
        if units is not None:
            answer = units.back(answer)
        if scale is not None:
            gains["scale"] = compute(scale)[0]
        return Proposal(
            displacement=answer.displacement,
            predicted=answer.predicted,
            squared_norm=answer.squared_norm,
            usable=answer.usable,
            damping=damping,
            loss=loss,
            parts=[piece.inputs for piece in pieces],
            center=center,
            evaluate=evaluate,
            scale=scale,
            raised=damping is not problem.damping,
            memory=gains,
            metric=None if units is None else units.metric,  # which `verify` alone asks for
        )

    def _next_units(self, problem: Problem, line: Linearization) -> tuple[Units, dict[str, Any]]:
        """The units of the metric in this step, and what the state gains."""
        if problem.hyper.any_decay:
            raise ValueError(
                f"metric={self.metric!r} and weight_decay do not go together: leave one of them out, or add the "
                "penalty to a loss of your own"
            )
        assert self._metric is not None
        return next_units(self._metric, self.state.get("metric", {}), line, problem.plan)

    def _remember(self, problem: Problem, system: System, line: Linearization) -> tuple[Linearization, Kept]:
        """The step with the rows of earlier batches, and the rows to keep."""
        kept = Kept.read(self.state.get("kept", {}), problem.plan)
        by_rows = not is_smaller(problem.plan, system.blocks, kept.rows + line.curvature_rows)
        needs_gram = self._metric is None and system.blocks.name == "full" and by_rows
        return remember(line, kept, self.memory, system.gram_dtype, needs_gram)

    def _check_damping(self) -> None:
        if is_relative(self.damping) and not self._solver.forms_rows:
            raise ValueError(
                f"solver={self._solver.name!r} forms no Gram matrix that the damping could be relative to: use "
                "solver='cholesky' or 'cg', or relative=False"
            )

    def _is_time_to_look(self, damping: Scalar) -> bool:
        """Whether to look at the condition of the system: where lambda has halved, and at steps 1, 2, 4, 8, ..."""
        if not isinstance(damping, float) or "doubt" in self._warnings_given:
            return False
        self._solves += 1
        due = damping < 0.5 * self._looked_at or self._solves & (self._solves - 1) == 0
        if due:
            self._looked_at = damping
        return due

    def _linearize(self, problem: Problem, system: System) -> tuple[Linearization, list[Piece]]:
        products_by = None if self._solver.forms_rows else system.blocks.parameter_names(problem.plan)
        check_memory = partial(self._check_memory, problem, system)
        return linearize(problem, self._scaled_curvature(), products_by, check_memory, apart=self.memory > 0)

    def _scaled_curvature(self) -> Curvature:
        return self.curvature if self.search is None else OwnScale()

    def affordable_samples(self, samples: int) -> int:
        chosen = self.state.get("curvature_samples")  # by `woodbury.fit`
        if chosen is None:
            if samples not in self._affordable:
                trained = [own for group in self.param_groups for own in group["params"]]
                self._affordable[samples] = affordable_rows(samples, trained)
            chosen = max(2, self._affordable[samples] // self._columns)
        return min(samples, int(chosen))

    def _check_memory(self, problem: Problem, system: System, raw: Tensor) -> None:
        """Raise before anything is allocated if the rows of S2 and the small system cannot fit."""
        batch, plan = problem.batch, problem.plan
        self._columns = k = self.curvature.column_count(self._rule, raw.shape)
        row_count, number = batch.curvature * k * (1 + self.memory), raw.element_size()
        height = row_count + batch.samples - batch.curvature
        outputs = raw.numel() // raw.shape[0]
        # in parameter space a block has fewer parameters than there are rows: this bounds both cases below
        if not plan.uncovered and 8 * height * (5 * len(plan.owned) * height + outputs) < _WORTH_ASKING:
            return
        size = self._solver.size(problem, system, row_count)
        columns = row_count * outputs * number
        wide = number if self.gram_dtype is None else self.gram_dtype.itemsize
        written_out = row_count * plan.size if size < height else 0  # in parameter space
        if plan.uncovered:
            written_out += height * sum(plan.parameters[name].numel() for name in plan.uncovered)
        # written out and collected; the matrix, with damping, and its factor
        needed = (2 * written_out + 3 * len(system.blocks.sizes(plan)) * size**2) * wide
        if columns + needed < _WORTH_ASKING:
            return
        available = available_bytes(raw.device)
        if available is not None and columns + needed > available:
            raise MemoryError(
                f"{type(self).__name__}: {batch.curvature} curvature samples give {row_count} rows, {k} each. "
                f"Their columns take about {in_words(columns)} and the system to solve {in_words(needed)}; "
                f"{in_words(available)} are available. Ways out: fewer curvature_samples, "
                "NaturalGradient (one row per sample), or solver='products' (no rows at all)"
            )

    def _with_more_damping(
        self, solve: Callable[[Scalar], Answer], failed: Answer, damping: float
    ) -> tuple[Answer, float]:
        """Raise lambda, tenfold at first, until K + lambda I is numerically positive definite, and say so.

        Where no lambda helps (the Gram matrix overflowed, say) the failed step stands and will be rejected.
        """
        raised = damping
        for factor in _RAISES:
            raised = raised * factor
            answer = solve(raised)
            if answer.usable:
                dtype = self.param_groups[0]["params"][0].dtype
                _warn_raised_damping(damping, raised, self.gram_dtype or dtype)
                return answer, raised
        return replace(failed, predicted=math.nan), damping


def _warn_raised_damping(before: float, after: float, dtype: torch.dtype) -> None:
    """Say that the small system was not positive definite and what was done about it."""
    warnings.warn(
        f"the system to solve at damping {before:.3g} is not numerically positive definite in {dtype}: damping "
        f"raised to {after:.3g} for this step. gram_dtype=torch.float64 or a larger damping avoids this",
        RuntimeWarning,
        stacklevel=4,
    )


class GaussNewton(_SampleSpace):
    """SMW-GN: p = -(B + lambda I)^{-1} g with the Gauss-Newton matrix B = (1/N2) sum_{S2} J_i^T H_i J_i.

    On the CPU a step whose p cannot be trusted gives a RuntimeWarning, once per optimizer: where the system is
    nearly singular in its type (looked at whenever lambda has halved, and at steps 1, 2, 4, 8, ...), where "cg" or
    "products" stop before their tolerance, where a `full=` gradient leaves no digits of p, and where numbers
    overflow. A step that could not be solved is rejected, and `direction` and `verify` raise there. Samples with
    nan or inf in their inputs, targets, loss or gradient raise a ValueError on the CPU that names their places in
    the batch, and has them in its `indices` (`woodbury.optim.BadSamplesError`).

    Args:
        model: any module; only parameters with requires_grad are trained. Layers without a rule need `fallback`.
        loss: CrossEntropyLoss (per token too, with ignored targets and class weights), NLLLoss after LogSoftmax,
            BCEWithLogitsLoss, MSELoss, HuberLoss, SmoothL1Loss, L1Loss, PoissonNLLLoss, GaussianNLLLoss with given
            variances, each with reduction "mean" or "sum", or one added by `register_loss`.
        lr: alpha, theta moves by alpha p.
        damping: lambda: a policy such as `LevenbergMarquardt`, or a number for a constant.
        curvature_samples: N2: None for the whole batch, a number of samples, a fraction of the batch, or "auto"
            for as many as make a step about as dear as three SGD steps, by the shapes of the model
            (`woodbury.optim.price`). S2 is drawn at random from the batch at each step. A last batch smaller than
            N2 is used whole.
        blocks: "full", or "layer" for a block-diagonal B with one block per layer.
        momentum: mu: p minimises the damped model around mu p_prev instead of around 0.
        weight_decay: adds weight_decay |theta|^2 / 2 to the loss, its gradient to g and its Hessian to B.
        accept: eta: theta moves only if rho >= eta (None: whenever theta + p has a finite loss). A loss at theta
            that is not finite raises on the CPU; on other devices the step is rejected.
        guard: on the CPU a step that would raise the loss of its batch by more than this many times the loss as
            smoothed over 20 steps is rejected; None for no guard. While the smoothed loss lies far above its best,
            only steps that lower the loss of their batch are taken, with one warning. See `woodbury.optim.guard`.
        solver: "cholesky" (exact; solves the system with one row per factor row or the one with one row per
            parameter, whichever is smaller), "cg" (conjugate gradients with the explicit Gram matrix) or
            "products" (conjugate gradients through U and U^T by autograd: no rows and no Gram matrix in memory).
        solver_tolerance: relative residual at which "cg" and "products" stop (default eps^(3/4) of the type).
        gram_dtype: accumulate and solve the small system in this type (torch.float64 buys 2 to 4 digits
            of a float32 step at small damping). With `full=`, g is not made of rows of the batch and p is a
            difference: there only a model in float64 keeps its digits at small damping (in float32 p is off by 2 %
            at a damping of 1e-5 and by 20 % at 1e-6).
        forward: f(model, inputs) in place of model(inputs).
        fallback: "autograd" computes rows that no layer rule covers with torch.func, or by plain autograd where
            the model does not allow that. Exact too, and slower.
        max_bytes: memory for temporaries of the rows and of the Gram matrix (default 256 MiB, on a GPU a
            sixteenth of its memory, at least 1 GiB): less is slower, not fatal.
        capture: on a CUDA device a step whose shapes repeat is recorded into a CUDA graph after two ordinary
            steps and replayed: the same numbers in a fraction of the time where steps are small. Ordinary steps
            are taken with `subset=`, `full=`, "cg" and "products", by models that draw random numbers or wait for
            the device, for batches on another device, and where a step allocates more than 1 GiB. A replay runs no
            Python: pass False if `forward` reads numbers that change elsewhere than in its modules, closures and
            plain globals.
        autocast: torch.bfloat16 runs the model, forward and backward, under torch.autocast; rows, Gram matrix and
            solve stay in the type of the parameters. A decrease of the loss below the rounding of bfloat16 then
            counts as a good step.
        search: None for the steps of the paper, or a `woodbury.CurvedSearch`, which chooses damping and length by
            itself: for fits and differential equations to many digits, in full or large batches. It looks at the
            loss several times per step, and waits for the device.
        memory: of how many batches before this one the rows count in B as well, each at the theta of its step: a
            better B without a pass more. For small batches; see `woodbury.optim.memory`.
        metric: None for damping and momentum in the metric I, "adam" for Adam's, or "diagonal" for the diagonal of
            B, as MINPACK does: (B + lambda D) p = lambda D mu p_prev - g. No weight_decay with it. See
            `woodbury.optim.metric`. Steps with memory or metric are not recorded on a GPU; a `search` takes no
            memory, and of the metrics "diagonal" alone.
        seed: of the draws of S2; by default they follow torch.manual_seed.
        watch: True to take steps in an unchanged loop: `loss = criterion(model(x), y); loss.backward();
            optimizer.step()`. Hooks on the model see its calls and the losses of their outputs, from now on.
            Several backward passes before one step are added up, up to zero_grad(). No `loss` is needed for this,
            nor for `step(closure)`, which needs no hooks. See docs/doors.md.
        params: parameter groups as torch.optim takes them, each with its own lr, momentum, weight_decay;
            parameters of the model in no group are left alone.
        process_group: of torch.distributed, whose processes take one step on the samples of all of them: None for
            all processes, a group, or "self" where each trains a model of its own. Each process passes its own
            part of the batch, of any size; all start from the parameters of the first. curvature_samples as a
            number are those of all processes together. See docs/processes.md.
    """

    curvature = CURVATURES["gauss-newton"]


class NaturalGradient(_SampleSpace):
    """SMW-NG: p = -(F + lambda I)^{-1} g with the empirical Fisher F = (1/N2) sum_{S2} g_i g_i^T.

    g_i is the gradient of sample i's own loss. blocks="layer" gives SMW-NG-BD. Arguments as for
    `GaussNewton`.
    """

    curvature = CURVATURES["empirical"]
