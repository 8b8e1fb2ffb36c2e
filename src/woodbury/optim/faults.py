"""Samples that a step cannot use: an error that names them."""

from __future__ import annotations

import torch

from woodbury import _batch
from woodbury.curvature import Curvature
from woodbury.optim.passes import NonFiniteLossError, NonFiniteSampleError
from woodbury.optim.step import Problem

NO_STEP = (
    "the system of the step cannot be solved, as its gradient or its curvature is not finite: numbers overflow in "
    "the type of the parameters, or the model has no derivative there. Ways out: inputs, targets and weights of "
    "moderate size, or a model in float64"
)


def name_bad_samples(problem: Problem, curvature: Curvature, cause: Exception | None) -> None:
    """Raise an error that names the samples whose loss, gradient or S is not finite, if it is some of them.

    cause is the error that the loss of the batch gave rise to, None if that is finite. On the CPU only.
    """
    batch, passes = problem.batch, problem.passes
    parameters = problem.plan.parameters.values()
    if problem.plan.device.type != "cpu" or not all(bool(torch.isfinite(own).all()) for own in parameters):
        return
    bad = passes.bad_samples(batch, curvature)
    # every sample, with a finite loss: it is not the samples, but numbers that overflow, say
    if bad and (len(bad) < batch.samples or cause is not None):
        bad = sorted(bad if batch.order is None else batch.order[bad].tolist())
        what = "gradient" if cause is None else "loss"
        raise NonFiniteSampleError(
            f"the {what} at the current parameters is not finite for {len(bad)} of {batch.samples} sample(s), at "
            f"index {_batch.in_words(bad)} of the batch",
            bad,
        ) from cause
    if problem.full is not None:
        place = passes.bad_sample_of(problem.full, curvature)
        if place is not None:
            raise NonFiniteLossError(
                f"the loss or the gradient at the current parameters is not finite for sample {place[1]} of batch "
                f"{place[0]} of full=: nothing was changed. Leave it out of the loader"
            ) from cause
