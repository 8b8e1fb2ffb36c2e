"""Samples that a step cannot use: an error that names them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from woodbury import _batch
from woodbury._batch import Batch
from woodbury.device.scalars import Scalar, is_known
from woodbury.quadratic.passes import NonFiniteLossError, NonFiniteSampleError, Piece
from woodbury.quadratic.quadratic import Problem

NO_STEP = (
    "the system of the step has no finite solution. Either its gradient or its curvature is not finite: numbers "
    "overflow in the type of the parameters, or the model has no derivative there (ways out: inputs, targets and "
    "weights of moderate size, or a model in float64). Or its curvature is zero: no parameter changes outputs or "
    "residuals, as with second derivatives of a network of ReLU (way out: a smooth activation, tanh)"
)

BATCH_ERRORS = (NonFiniteLossError, torch.linalg.LinAlgError)  # that may come from some samples of a batch


class Doubts:
    """What an optimizer has warned of, each kind once, and when it looks at the condition of its systems."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._given: set[str] = set()
        self._solves, self._looked_at = 0, math.inf

    def warn_once(self, messages: Mapping[str, str], advice: str | None = None) -> None:
        """By kind; advice: ways out where the loss runs away, of which nothing is said without."""
        for kind, message in messages.items():
            ways_out = advice if kind == "course" else ""
            if kind not in self._given and ways_out is not None:
                self._given.add(kind)
                text = f"{message}. Ways out: {ways_out}" if ways_out else message
                warnings.warn(f"{self.method}: {text}", RuntimeWarning, stacklevel=3)

    def is_time_to_look(self, damping: float) -> bool:
        """Where lambda has halved, and at steps 1, 2, 4, 8, ..., until someone was warned."""
        if "doubt" in self._given:
            return False
        self._solves += 1
        due = damping < 0.5 * self._looked_at or self._solves & (self._solves - 1) == 0
        if due:
            self._looked_at = damping
        return due


def name_bad_samples(problem: Problem, cause: Exception | None) -> None:
    """Raise an error that names the samples whose loss, gradient or S is not finite, if it is some of them.

    cause is the error that the loss of the batch gave rise to, None if that is finite. On the CPU only.
    """
    batch, parameters = problem.batch, problem.plan.parameters.values()
    if problem.plan.device.type != "cpu" or not all(
        bool(torch.isfinite(parameter).all()) for parameter in parameters
    ):
        return
    bad = _bad_samples(problem, batch)
    # every sample, with a finite loss: it is not the samples, but numbers that overflow, say
    if bad and (len(bad) < batch.samples or cause is not None):
        bad = sorted(bad if batch.order is None else batch.order[bad].tolist())
        what = "gradient" if cause is None else "loss"
        raise NonFiniteSampleError(
            f"the {what} at the current parameters is not finite for {len(bad)} of {batch.samples} sample(s), at "
            f"index {_batch.in_words(bad)} of the batch",
            bad,
        ) from cause


def check_solved(problem: Problem, predicted: Scalar, doubts: Doubts, to_take: bool) -> None:
    """On the CPU, where no p could be computed: an error that names the samples, if it is some of them.

    Where it is not the samples, a proposal to take is one that will be rejected.
    """
    if not is_known(predicted) or math.isfinite(predicted):
        return
    name_bad_samples(problem, None)
    if not to_take:
        raise ArithmeticError(f"{doubts.method}: {NO_STEP}")
    doubts.warn_once({"no step": f"{NO_STEP}. The step is rejected"})


def _bad_samples(problem: Problem, batch: Batch) -> list[int]:
    """The places in the batch of samples whose loss, gradient or S is not finite, by halving the batch."""

    def search(indices: Tensor) -> list[int]:
        inputs = _batch.take(batch.inputs, indices, batch.samples)
        targets = _batch.take(batch.targets, indices, batch.samples)
        passes = problem.passes
        piece = passes.evaluate(inputs, targets, len(indices))
        finite = torch.isfinite(passes.rule.terms(passes.loss, piece.outputs.double(), piece.targets))
        if not finite.all():
            found: list[int] = indices[~finite].tolist()
            return found + (search(indices[finite]) if finite.any() else [])
        if _is_finite(problem, piece):
            return []
        if len(indices) == 1:
            return indices.tolist()
        half = len(indices) // 2
        return search(indices[:half]) + search(indices[half:])

    try:
        return search(torch.arange(batch.samples, device="cpu"))
    except Exception:  # a model may not take some of the samples alone: then it is not known
        return []


def _is_finite(problem: Problem, piece: Piece) -> bool:
    """Whether the gradient of these samples and their factor S are finite."""
    passes = problem.passes
    try:
        factor = problem.curvature.factor(passes.rule, passes.loss, piece.outputs, piece.targets)
    except torch.linalg.LinAlgError:  # an eigendecomposition of nan
        return False
    gradient = piece.capture.gradient(passes.residual(piece))
    parts = [*gradient.values(), factor.columns()]
    return all(bool(torch.isfinite(part).all()) for part in parts)
