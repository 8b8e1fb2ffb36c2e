"""SMW-GN, SMW-NG and SMW-NG-BD: the methods of the paper, which differ in the factor S only."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from typing_extensions import Unpack

from woodbury._choice import BELOW_ONE, check_number, part_named
from woodbury.curvature import CURVATURES, Curvature
from woodbury.optim.optimizer import SecondOrder
from woodbury.optim.settings import Common, refuse_others
from woodbury.policies.search import CurvedSearch
from woodbury.quadratic.metric import METRICS
from woodbury.quadratic.solvers import SOLVERS


class _SampleSpace(SecondOrder):
    kind: ClassVar[Curvature]  # of B

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
        refuse_others(type(self).__name__, common)
        if solver_tolerance is not None:
            check_number("solver_tolerance", solver_tolerance)
        method = {
            "curvature": self.kind,
            "solver": part_named("solver", solver, SOLVERS)(tolerance=solver_tolerance),
            "most_momentum": BELOW_ONE if search is None else 0.0,
            "gram_dtype": gram_dtype,
            "max_bytes": max_bytes,
            "capture": capture,
            "autocast": autocast,
            "search": search,
            "memory": memory,
            "metric": None if metric is None else part_named("metric", metric, METRICS),
        }
        super().__init__(
            model, loss, lr, blocks=blocks, momentum=momentum, fallback=fallback, method=method, **common
        )

    @property
    def solver(self) -> str:
        """The name of the solver."""
        return self.settings.solver.name

    @property
    def metric(self) -> str | None:
        """The name of the metric of damping and momentum, None for I."""
        return None if self.settings.metric is None else self.settings.metric.name


class GaussNewton(_SampleSpace):
    """SMW-GN: p = -(B + lambda I)^{-1} g with the Gauss-Newton matrix B = (1/N2) sum_{S2} J_i^T H_i J_i.

    On the CPU a step whose p cannot be trusted gives a RuntimeWarning, once per optimizer: where the system is
    nearly singular in its type (looked at whenever lambda has halved, and at steps 1, 2, 4, 8, ...), where "cg" or
    "products" stop before their tolerance, where a `full=` gradient leaves no digits of p, and where numbers
    overflow. A step that could not be solved is rejected, and `direction` and `verify` raise there. Samples with
    nan or inf in their inputs, targets, loss or gradient raise a ValueError on the CPU that names their places in
    the batch, and has them in its `indices` (`woodbury.optim.BadSamplesError`).

    Args:
        model: any module; only parameters with requires_grad are trained. One that gets it later is added by
            `add_param_group({"params": [...]})`. Layers without a rule need `fallback`.
        loss: CrossEntropyLoss (per token too, with ignored targets and class weights), NLLLoss after LogSoftmax,
            BCEWithLogitsLoss, MSELoss, HuberLoss, SmoothL1Loss, L1Loss, PoissonNLLLoss, GaussianNLLLoss with given
            variances, each with reduction "mean" or "sum", or one added by `register_loss`.
        lr: alpha, theta moves by alpha p.
        damping: lambda: a policy such as `LevenbergMarquardt`, or a number for a constant.
        curvature_samples: N2: None for the whole batch, a number of samples, a fraction of the batch, or "auto"
            for as many as make a step about as dear as three SGD steps, by the shapes of the model. S2 is drawn
            at random from the batch at each step. A last batch smaller than N2 is used whole.
        blocks: "full", or "layer" for a block-diagonal B with one block per layer.
        momentum: mu: p minimises the damped model around mu p_prev instead of around 0.
        weight_decay: adds weight_decay |theta|^2 / 2 to the loss, its gradient to g and its Hessian to B.
        accept: eta: theta moves only if rho >= eta (None: whenever theta + p has a finite loss). A loss at theta
            that is not finite raises on the CPU; on other devices the step is rejected.
        guard: on the CPU a step that would raise the loss of its batch by more than this many times the loss as
            smoothed over 20 steps is rejected; None for no guard. While the smoothed loss lies far above its best,
            only steps that lower the loss of their batch are taken, with one warning. See
            `woodbury.policies.guard`.
        solver: "cholesky" (exact; solves the system with one row per factor row or the one with one row per
            parameter, whichever is smaller), "cg" (conjugate gradients with the explicit Gram matrix) or
            "products" (conjugate gradients through U and U^T by autograd: no rows and no Gram matrix in memory).
        solver_tolerance: relative residual at which "cg" and "products" stop (default eps^(3/4) of the type).
        gram_dtype: accumulate and solve the small system in this type (torch.float64 buys 2 to 4 digits
            of a float32 step at small damping). With `full=`, g is not made of rows of the batch and p is a
            difference: there only a model in float64 keeps its digits at small damping (in float32 p is off by 2 %
            at a damping of 1e-5 and by 20 % at 1e-6).
        forward: f(model, inputs) in place of model(inputs).
        fallback: "autograd" computes rows that no layer rule covers with a copy of the weights for each sample, or
            sample by sample where the model does not allow that. Exact too, and slower.
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
            better B without a pass more. For small batches; see `woodbury.quadratic.memory`.
        metric: None for damping and momentum in the metric I, "adam" for Adam's, or "diagonal" for the diagonal of
            B, as MINPACK does: (B + lambda D) p = lambda D mu p_prev - g. No weight_decay with it. See
            `woodbury.quadratic.metric`. Steps with memory or metric are not recorded on a GPU; a `search` takes no
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

    kind = CURVATURES["gauss-newton"]


class NaturalGradient(_SampleSpace):
    """SMW-NG: p = -(F + lambda I)^{-1} g with the empirical Fisher F = (1/N2) sum_{S2} g_i g_i^T.

    g_i is the gradient of sample i's own loss. blocks="layer" gives SMW-NG-BD. Arguments as for
    `GaussNewton`.
    """

    kind = CURVATURES["empirical"]
