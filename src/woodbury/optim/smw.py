"""SMW-GN, SMW-NG and SMW-NG-BD: exact damped steps solved in the space of samples.

With rows Z of the batch (factor rows of S2, then gradient rows of the samples outside it), U the factor
rows over sqrt(D) (D = N2 for a mean over samples; see `woodbury.row_matrix.curvature_divisor`), and
g = U^T e + g_rest:

    (K + lambda I) a = e + U p0 - U g_rest / lambda          K = U U^T, small
    p = p0 - U^T a - g_rest / lambda                         U p = lambda a - e

which is p = -(U^T U + lambda I)^{-1} g for p0 = 0 (paper, equations (6) and (7), by the
Sherman-Morrison-Woodbury identity). Where U has more rows than columns, the p x p system is the smaller one and
is solved instead. Writing g through e instead of subtracting U^T K^{-1} U g from g keeps
float32 accurate at small damping. Momentum, weight decay and a gradient given from outside enter through p0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _vector
from woodbury._memory import available_bytes, in_words
from woodbury._vector import Vector
from woodbury.chain_step import ChainDisplacement, ChainRows
from woodbury.damping import Damping, LevenbergMarquardt
from woodbury.device.numbers import forced
from woodbury.device.scalars import Scalar, Scale, Truth, scalar
from woodbury.displacement import Displacement
from woodbury.linalg import (
    Solution,
    solve_conjugate_gradient,
    solve_in_parameter_space,
    solve_in_sample_space,
    sum_of_squares,
)
from woodbury.losses.rules import check_count
from woodbury.model.chain import Chain
from woodbury.model.fallback import Forward
from woodbury.optim.base import SecondOrder
from woodbury.optim.linearize import Linearization, divisor_of, linearize, segments_of
from woodbury.optim.passes import Passes, Piece, check_loss, mean_of
from woodbury.optim.recorded import Recorder
from woodbury.optim.settings import check_choice
from woodbury.optim.step import Problem, Proposal
from woodbury.products import FactorProducts
from woodbury.row_matrix import Rows, forming_pays

SOLVERS = ("cholesky", "cg", "products")
_WORTH_ASKING = 2**30  # bytes that a step may need before it asks how many there are
_RAISES = 12  # how often, tenfold each time, lambda may be raised within a step to make K + lambda I definite


class _SampleSpace(SecondOrder):
    """The two methods of the paper; they differ in the factor S only."""

    keeps_nothing = True

    @property
    def twice_differentiated(self) -> bool:  # type: ignore[override]
        return self.solver == "products"

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        lr: float = 1.0,  # alpha
        damping: Damping | float = LevenbergMarquardt(),  # noqa: B008  (frozen) lambda
        curvature_samples: int | float | None = None,  # N2
        blocks: str = "full",
        momentum: float = 0.0,  # mu
        weight_decay: float = 0.0,
        *,
        accept: float | None = None,  # eta
        solver: str = "cholesky",
        solver_tolerance: float | None = None,
        gram_dtype: torch.dtype | None = None,
        forward: Forward | None = None,
        fallback: str | None = None,
        max_bytes: int | None = None,
        capture: bool = False,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        params: Iterable[Any] | None = None,
    ) -> None:
        check_choice("solver", solver, SOLVERS)
        if max_bytes is not None and not max_bytes > 0:
            raise ValueError(f"max_bytes must be positive or None, got {max_bytes}")
        if gram_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"gram_dtype must be torch.float32, torch.float64 or None, got {gram_dtype}")
        self.solver = solver
        self.solver_tolerance = solver_tolerance
        self.gram_dtype = gram_dtype
        if autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be torch.bfloat16 or None, got {autocast}")
        self.max_bytes = max_bytes
        self.autocast = autocast
        self.by_layers = solver != "products"  # which needs no rows, and so no rules
        super().__init__(
            model,
            loss,
            lr=lr,
            damping=damping,
            curvature_samples=curvature_samples,
            blocks=blocks,
            momentum=momentum,
            weight_decay=weight_decay,
            accept=accept,
            forward=forward,
            fallback=fallback,
            seed=seed,
            params=params,
        )
        if capture and solver != "cholesky":
            raise ValueError(f"capture=True needs solver='cholesky': {solver!r} looks at numbers as it goes")
        self._recorder = Recorder() if capture else None

    def _propose(self, problem: Problem) -> Proposal:
        if problem.chain is not None:
            in_factors, is_small = self._found(problem, problem.chain)
            if in_factors:
                return self._propose_along(problem, problem.chain, is_small)
        passes = problem.passes
        if problem.full is None:
            line, pieces = self._linearize(problem)
            loss = mean_of([piece.values for piece in pieces], line.count)
            evaluate: Callable[[Displacement], Scalar] = partial(passes.decrease_on, pieces)
        else:
            # The loader first: its random numbers must be the ones that `evaluate` replays.
            loss, gradient, evaluate = passes.over_all(problem.full)
            line, pieces = self._linearize(problem)
            line.gradient = gradient
        check_loss(loss)
        parts = [piece.inputs for piece in pieces]
        return self._answer(problem, partial(self._solve, problem, line), loss, parts, evaluate)

    def _linearize(self, problem: Problem) -> tuple[Linearization, list[Piece]]:
        self._check_dtype(problem.plan.dtype)
        products_by = self._blocks(problem) if self.solver == "products" else None
        return linearize(problem, self.curvature, products_by, partial(self._check_memory, problem))

    def _answer(
        self,
        problem: Problem,
        solve: Callable[[Scalar], _Step],
        loss: Scalar,
        parts: list[Any],
        evaluate: Callable[[Any], Scalar],
    ) -> Proposal:
        """The proposal for the damping of the problem, or for a larger one where that fails."""
        damping = problem.damping
        step = solve(damping)
        if step.usable is False and self.solver == "cholesky" and isinstance(damping, float):
            step, damping = self._with_more_damping(solve, step, damping)
        return Proposal(
            displacement=step.displacement,
            predicted=step.predicted,
            squared_norm=step.squared_norm,
            damping=damping,
            usable=step.usable,
            loss=loss,
            parts=parts,
            center=problem.previous,
            evaluate=evaluate,
        )

    def _found(self, problem: Problem, chain: Chain) -> tuple[bool, bool]:
        """Whether the step is one of `woodbury.chain_step`, and whether it surely fits into memory.

        The former: K in sample space, and p in factors throughout.
        """
        if problem.previous is not None or problem.hyper.any_decay:
            return False, False
        n, m = problem.batch.samples, problem.batch.curvature
        key = n, m, self.curvature, self.blocks, self.solver
        if key not in chain.found:
            shapes = [(weight.shape[1], weight.shape[0]) for weight in chain.weights]
            k = self._rule.column_count((n, shapes[-1][1])) if self.curvature == "gauss-newton" else 1
            rows = m * k + n - m
            formed = forming_pays(shapes, n, m, rows, m * k)
            small = (3 * len(shapes) * rows**2 + rows * shapes[-1][1]) * 8 < _WORTH_ASKING
            chain.found[key] = not formed and not self._in_parameter_space(problem, m * k), small
        found: tuple[bool, bool] = chain.found[key]
        return found

    def _propose_along(self, problem: Problem, chain: Chain, is_small: bool) -> Proposal:
        """p along a chain, in factors."""
        passes, batch, m = problem.passes, problem.batch, problem.batch.curvature
        self._check_dtype(chain.weights[0].dtype)
        made = chain.run(batch.inputs)
        outputs = made.outputs
        targets = self._rule.prepare(self.loss, outputs, batch.targets)
        count = chosen = check_count(self._rule.count(self.loss, targets))
        losses = _losses(passes, outputs, targets)
        loss = _mean(losses, count)
        check_loss(loss)
        if not is_small:
            self._check_memory(problem, outputs)
        if m < batch.samples:
            chosen = self._rule.count_of_first(self.loss, targets, m)
        segments, e = segments_of(passes, self.curvature, batch, outputs, targets)
        rows = ChainRows(made, segments)
        gram = rows.grams(self.gram_dtype, self.blocks == "layer")
        width, divisor = m * rows.layout.pieces[0][1], divisor_of(self.curvature, chosen, m)

        def solve(damping: Scalar) -> _Step:
            found = solve_in_sample_space(gram, width, divisor, count, e, None, damping, self._solver())
            squared = found.squared_norm(gram)
            return _Step(rows.step(found.coefficients), damping * squared + 0.5 * found.bend, squared, found.ok)

        def evaluate(displacement: ChainDisplacement) -> Scalar:
            return _mean(losses - _losses(passes, displacement.outputs(), targets), count)

        return self._answer(problem, solve, loss, [batch.inputs], evaluate)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if self.gram_dtype is None and dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"the small system cannot be solved in {dtype}: pass gram_dtype=torch.float32")

    def _blocks(self, problem: Problem) -> list[tuple[str, ...]]:
        """The parameters of each block of B."""
        return problem.plan.blocks if self.blocks == "layer" else [tuple(problem.plan.parameters)]

    def _largest_block(self, problem: Problem) -> int:
        sizes = problem.plan.block_sizes
        return max(sizes) if self.blocks == "layer" else sum(sizes)

    def _in_parameter_space(self, problem: Problem, rows: int) -> bool:
        """Whether B, block by block, is smaller than the Gram matrix of so many factor rows."""
        return self.solver == "cholesky" and rows > self._largest_block(problem)

    def _check_memory(self, problem: Problem, raw: Tensor) -> None:
        """Raise before anything is allocated if the rows of S2 and the small system cannot fit."""
        batch = problem.batch
        k = self._rule.column_count(raw.shape) if self.curvature == "gauss-newton" else 1
        rows, number = batch.curvature * k, raw.element_size()
        columns = rows * (raw.numel() // raw.shape[0]) * number
        wide = number if self.gram_dtype is None else self.gram_dtype.itemsize
        size = height = rows + batch.samples - batch.curvature
        written_out = 0
        if self._in_parameter_space(problem, rows):
            size = self._largest_block(problem)
            written_out = rows * sum(problem.plan.block_sizes)
        written_out += height * sum(problem.plan.parameters[name].numel() for name in problem.plan.rest)
        # written out and collected; the matrix, with damping, and its factor
        blocks = len(problem.plan.owned) if self.blocks == "layer" else 1
        system = (2 * written_out + 3 * blocks * size**2) * wide
        if columns + system < _WORTH_ASKING:
            return
        available = available_bytes(raw.device)
        if available is not None and columns + system > available:
            raise MemoryError(
                f"{type(self).__name__}: {batch.curvature} curvature samples give {rows} rows, {k} each. Their "
                f"columns take about {in_words(columns)} and the system to solve {in_words(system)}; "
                f"{in_words(available)} are available. Ways out: fewer curvature_samples, NaturalGradient (one "
                "row a sample), or solver='products' (no rows at all)"
            )

    def _solve(self, problem: Problem, line: Linearization, damping: Scalar) -> _Step:
        """p for this damping, with its norm and predicted decrease."""
        if isinstance(line.rows, FactorProducts):
            return self._solve_by_products(problem, line, line.rows, damping)
        if self._in_parameter_space(problem, line.curvature_rows):
            return self._solve_in_parameter_space(problem, line, line.rows, damping)
        scales = _scales(problem, damping)
        base = _base(problem, line, scales, damping)
        form = base is None and scales is None and problem.is_chain and line.rows.forming_pays(line.curvature_rows)
        gram = self._gram(line.rows, scales, line.curvature_rows if form else None)
        found = solve_in_sample_space(
            gram,
            line.curvature_rows,
            line.divisor,
            line.count,
            line.e,
            None if base is None else self._project(line, line.rows, base),
            damping,
            self._solver(),
        )
        displacement = Displacement(problem.plan.parameters, line.rows, found.coefficients, base, scales, form)
        if base is not None:
            return _step_along(problem, displacement, damping, found.bend, found.ok)
        # of p itself where that is formed: c^T Z Z^T c loses digits where rows nearly repeat each other
        squared = displacement.squared_norm() if form else found.squared_norm(gram)
        return _Step(displacement, damping * squared + 0.5 * found.bend, squared, found.ok)

    def _solver(self) -> Callable[[Tensor, Tensor], Solution] | None:
        """For small systems: from matrix (b, m, m) and right-hand side (b, m) to the solution; None: exactly."""
        if self.solver == "cholesky":
            return None
        return lambda matrix, rhs: solve_conjugate_gradient(
            lambda x: torch.matmul(matrix, x.unsqueeze(-1)).squeeze(-1),
            rhs,
            self._tolerance(rhs.dtype),
            max_iterations=10 * rhs.shape[-1],
        )

    def _with_more_damping(
        self, solve: Callable[[Scalar], _Step], failed: _Step, damping: float
    ) -> tuple[_Step, float]:
        """Raise lambda tenfold until K + lambda I is numerically positive definite, and say so.

        Where no lambda helps (the Gram matrix overflowed, say) the failed step stands and will be rejected.
        """
        raised = damping
        for _ in range(_RAISES):
            raised = raised * 10
            step = solve(raised)
            if step.usable:
                dtype = self.param_groups[0]["params"][0].dtype
                _warn_raised_damping(damping, raised, self.gram_dtype or dtype)
                return step, raised
        return failed, damping

    def _solve_by_products(
        self, problem: Problem, line: Linearization, rows: FactorProducts, damping: Scalar
    ) -> _Step:
        """The system in sample space by CG with products Z (D Z^T x) alone."""
        scales = _scales(problem, damping)
        base = _base(problem, line, scales, damping)
        like = next(iter(problem.plan.parameters.values())).detach()
        e = line.factor_weights(like) * (line.divisor / line.count)
        shift = line.divisor * damping

        def transposed(x: Tensor) -> Vector:
            vector = rows.rmatvec(x)
            return vector if scales is None else {name: value * scales[name] for name, value in vector.items()}

        rhs = e.expand(len(rows.blocks), -1) if base is None else e + rows.matvec(base)
        solution = solve_conjugate_gradient(
            lambda x: rows.matvec(transposed(x)) + shift * x,
            rhs,
            self._tolerance(rhs.dtype),
            max_iterations=10 * line.curvature_rows,
        )
        bend = sum_of_squares(shift * solution.x - e) / line.divisor
        change = transposed(solution.x)
        vector = {name: -value if base is None else base[name] - value for name, value in change.items()}
        displacement = Displacement(problem.plan.parameters, base=vector)
        return _step_along(problem, displacement, damping, bend, solution.ok)

    def _solve_in_parameter_space(
        self, problem: Problem, line: Linearization, rows: Rows, damping: Scalar
    ) -> _Step:
        """(B + lambda + W) p = lambda q - W theta - g, block by block."""
        blocks, parameters, decays = self._blocks(problem), problem.plan.parameters, problem.hyper.weight_decay
        if line.curvature is None:  # a raised damping comes back with the same B
            matrices = rows.curvature(line.curvature_rows, blocks, self.gram_dtype)
            (divisor,) = forced(line.divisor)
            line.curvature = [matrix.div_(divisor) for matrix in matrices]
        like = next(iter(problem.plan.parameters.values())).detach()
        inside = line.factor_weights(like)
        weights = torch.cat([inside, inside.new_ones(rows.count - line.curvature_rows)]) / line.count
        force: Vector = {}
        for name, value in rows.rmatvec(weights).items():
            force[name] = -value if line.gradient is None else -value - line.gradient[name]
            if decays[name]:
                force[name] = force[name] - decays[name] * parameters[name].detach()
            if problem.previous is not None:
                force[name] = force[name] + damping * problem.previous[name]
        vector: Vector = {}
        bend: Scalar = 0.0
        ok: Truth = True
        for block, matrix in zip(blocks, line.curvature, strict=True):
            own = {name: force[name] for name in block}
            (shift,) = forced(damping)
            if any(decays[name] for name in block):
                shift = torch.cat([matrix.new_full((own[name].numel(),), decays[name]) for name in block]) + shift
            p, curved, solution = solve_in_parameter_space(matrix, shift, _vector.flatten(own))
            vector |= _vector.unflatten(p.to(like.dtype), own)
            bend, ok = bend + curved, ok & solution.ok
        displacement = Displacement(parameters, base={name: vector[name] for name in parameters})
        return _step_along(problem, displacement, damping, bend, ok)

    def _gram(self, rows: Rows, scales: dict[str, Scale] | None, count: int | None = None) -> Tensor:
        """Z D Z^T, (r, r), or (layers, r, r) for the block-diagonal methods; its first `count` rows alone."""
        if count is not None:
            grams = torch.stack(rows.gram_head(count, self.gram_dtype))
            return grams if self.blocks == "layer" else grams.sum(0)
        if self.blocks == "layer":
            return torch.stack(rows.layer_grams(scales=scales, dtype=self.gram_dtype))
        return rows.gram(scales=scales, dtype=self.gram_dtype)

    def _project(self, line: Linearization, rows: Rows, base: Vector) -> Tensor:
        """Z p0 on the factor rows, (m,), or (layers, m) for the block-diagonal methods."""
        images = torch.stack(rows.layer_matvec(base))[:, : line.curvature_rows]
        return images if self.blocks == "layer" else images.sum(0)

    def _tolerance(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps ** 0.75 if self.solver_tolerance is None else self.solver_tolerance


def _losses(passes: Passes, outputs: Tensor, targets: Tensor) -> Any:
    """The loss of each sample, or their sum where the outputs have less digits than it: for a difference."""
    if outputs.dtype == torch.float64:
        return passes.values(outputs, targets)
    return scalar(passes.rule.total(passes.loss, outputs.double(), targets))


def _mean(losses: Any, count: Scalar) -> Scalar:
    """From the losses of the samples, or from their sum."""
    total: Scalar = scalar(losses.sum()) if isinstance(losses, Tensor) and losses.dim() else losses
    return total / count


@dataclass
class _Step:
    displacement: Displacement | ChainDisplacement
    predicted: Scalar
    squared_norm: Scalar
    usable: Truth


def _step_along(problem: Problem, displacement: Displacement, damping: Scalar, bend: Scalar, ok: Truth) -> _Step:
    """A step whose p is at hand, with its norm and predicted decrease; bend is p^T B p.

    m(0) - m(p) = lambda p . (p - q) + p^T (B + W) p / 2
    """
    vector = displacement.dense()
    squared = pull = scalar(_vector.dot(vector, vector))
    if problem.previous is not None:
        pull = pull - scalar(_vector.dot(vector, problem.previous))
    for name, decay in problem.hyper.weight_decay.items():
        if decay:
            bend = bend + decay * scalar(vector[name].square().sum())
    return _Step(displacement, damping * pull + 0.5 * bend, squared, ok)


def _scales(problem: Problem, damping: Scalar) -> dict[str, Scale] | None:
    """lambda / (lambda + weight decay) by parameter: the metric of the damped model relative to lambda I."""
    decays = problem.hyper.weight_decay
    if not problem.hyper.any_decay:
        return None
    (known,) = forced(damping)
    return {name: known / (known + decay) for name, decay in decays.items()}


def _base(
    problem: Problem, line: Linearization, scales: dict[str, Scale] | None, damping: Scalar
) -> Vector | None:
    """p0 = (lambda q - W theta - g') / (lambda + W): p without any row; None if zero.

    q = mu p_prev, W the weight decay, g' the part of the gradient that is not in the rows.
    """
    if scales is None and problem.previous is None and line.gradient is None:
        return None
    base = {}
    for name, parameter in problem.plan.parameters.items():
        force = torch.zeros_like(parameter) if line.gradient is None else line.gradient[name]
        if problem.hyper.weight_decay[name]:
            force = force + problem.hyper.weight_decay[name] * parameter.detach()
        value = -force / damping
        if problem.previous is not None:
            value = value + problem.previous[name]
        base[name] = value if scales is None else value * scales[name]
    return base


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

    Args:
        model: any module made of layers a rule covers; only parameters with requires_grad are trained.
        loss: CrossEntropyLoss (per token too, ignored targets included), BCEWithLogitsLoss, MSELoss (mean
            reduction), or one added by `register_loss`.
        lr: alpha, theta moves by alpha p.
        damping: lambda: a policy such as `LevenbergMarquardt`, or a number for a constant.
        curvature_samples: N2: None for the whole batch, a number of samples, or a fraction of the batch. S2
            is drawn at random from the batch at each step. A last batch smaller than N2 is used whole.
        blocks: "full", or "layer" for a block-diagonal B with one block a layer.
        momentum: mu: p minimises the damped model around mu p_prev instead of around 0.
        weight_decay: adds weight_decay |theta|^2 / 2 to the loss, its gradient to g and its Hessian to B.
        accept: eta: theta moves only if rho >= eta (None: whenever theta + p has a finite loss).
        solver: for the small system: "cholesky" (exact; in the space of parameters where a step has more rows
            than these), "cg" (conjugate gradients with the explicit matrix) or "products" (conjugate gradients
            through U and U^T by autograd: neither rows nor a Gram matrix in memory).
        solver_tolerance: relative residual at which "cg" and "products" stop.
        gram_dtype: accumulate and solve the small system in this type (torch.float64 buys 2 to 4 digits
            of a float32 step at small damping).
        forward: f(model, inputs) in place of model(inputs).
        fallback: "autograd" computes rows that no layer rule covers with torch.func, or by plain autograd where
            the model does not allow that. Exact too, and slower.
        max_bytes: memory for temporaries of the rows and of the Gram matrix (default 256 MiB, on a GPU 1 GiB):
            less is slower, not fatal.
        capture: on a CUDA device, record the step into a CUDA graph after two ordinary steps and replay it for
            batches of the same shape: the same numbers in a fraction of the time where steps are small. Batches
            of another shape, and models that draw random numbers, take ordinary steps.
        autocast: torch.bfloat16 runs the model, forward and backward, under torch.autocast; rows, Gram matrix and
            solve stay in the type of the parameters. rho then sees what exceeds the rounding of bfloat16 only.
        seed: of the draws of S2; by default they follow torch.manual_seed.
        params: parameter groups as torch.optim takes them, each with its own lr, momentum, weight_decay;
            parameters of the model in no group are left alone.
    """

    curvature = "gauss-newton"


class NaturalGradient(_SampleSpace):
    """SMW-NG: p = -(F + lambda I)^{-1} g with the empirical Fisher F = (1/N2) sum_{S2} g_i g_i^T.

    g_i is the gradient of sample i's own loss. blocks="layer" gives SMW-NG-BD. Arguments as for
    `GaussNewton`.
    """

    curvature = "empirical"
