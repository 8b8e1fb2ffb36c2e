"""Samples that a step cannot use: which they are, and how to do without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from woodbury import _batch
from woodbury._batch import BadSamplesError
from woodbury.curvature import Curvature
from woodbury.optim.passes import NonFiniteLossError, NonFiniteSampleError
from woodbury.optim.step import Problem

Result = TypeVar("Result")

BAD_SAMPLES = {"raise": False, "skip": True}  # whether a step leaves them out

NO_STEP = (
    "the system of the step cannot be solved, as its gradient or its curvature is not finite: numbers overflow in "
    "the type of the parameters, or the model has no derivative there. Ways out: inputs, targets and weights of "
    "moderate size, or a model in float64"
)


def on_good_samples(
    attempt: Callable[[Any, Tensor | None, Any], Result],
    otherwise: Callable[[], Result] | None,
    inputs: Any,
    targets: Tensor | None,
    subset: Any,
) -> Result:
    """attempt(inputs, targets, subset), again without the samples that it names in a `BadSamplesError`.

    That gives a warning. Where no sample, or none of the subset, is left: `otherwise`, or the error.
    """
    kept: list[int] = []  # the places in the batch of the samples that are still in it
    first: BadSamplesError | None = None
    while True:
        try:
            result = attempt(inputs, targets, subset)
            break
        except BadSamplesError as error:
            samples = _batch.sample_count(inputs)
            if first is None:
                first, kept = error, list(range(samples))
                total = samples
            bad = set(error.indices)
            good = [index for index in range(samples) if index not in bad]
            if subset is not None:
                places = {old: new for new, old in enumerate(good)}
                order, count = _batch.subset_first(subset, samples)  # checked: names what is wrong with it
                subset = [places[index] for index in order[:count].tolist() if index in places]
            kept = [kept[index] for index in good]
            if not good or (subset is not None and len(subset) == 0):
                if otherwise is None:
                    raise
                kept, result = [], otherwise()
                break
            index = torch.tensor(good)
            inputs = _batch.take(inputs, index, samples)
            targets = None if targets is None else _batch.take(targets, index, samples)
    if first is not None:
        gone = [index for index in range(total) if index not in set(kept)]
        outcome = f"left out: sample(s) {_batch.in_words(gone)} of {total}" if kept else "the step is rejected"
        warnings.warn(f"{first}; {outcome}", RuntimeWarning, stacklevel=4)
    return result


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
            f"index {_batch.in_words(bad)} of the batch (bad_samples='skip' leaves such samples out)",
            bad,
        ) from cause
    if problem.full is not None:
        place = passes.bad_sample_of(problem.full, curvature)
        if place is not None:
            raise NonFiniteLossError(
                f"the loss or the gradient at the current parameters is not finite for sample {place[1]} of batch "
                f"{place[0]} of full=: nothing was changed. Leave it out of the loader"
            ) from cause
