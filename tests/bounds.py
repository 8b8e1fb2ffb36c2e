"""How far rounding may take two computations of the same numbers apart, on any processor.

An operation errs by eps of its result. The errors of n operations have any sign, and add up to a few sqrt(n) eps
(Higham and Mary, 2019: with a probability as close to 1 as one likes). A solution of (B + lambda I) p = -g
multiplies the relative errors of B and g by the condition of the matrix, 1 + |B| / lambda. The steps of a run add
up what each of them errs by:

    relative error <= 8 eps sqrt(size) condition steps

size is how many numbers are added up on the way to one result: the parameters, and the rows of the system. Steps
that amplify the errors of those before are left out: compare a few steps, with a damping that keeps them short.
"""

import math
from contextlib import contextmanager
from unittest.mock import patch

import torch

import woodbury
from woodbury import row_matrix
from woodbury.model.independence import check_samples_apart
from woodbury.quadratic import passes

FACTOR = 8  # for the sums and products in between


@contextmanager
def known_apart():
    """Looking again whether these samples are mixed makes no passes of its own, which cost more than the rest."""

    def look(captured, number=1, alone=False):
        check_samples_apart(captured, number, alone=False)

    with (
        patch.object(row_matrix, "check_samples_apart", look),
        patch.multiple(passes, check_samples_apart=look, check_part=lambda *given: None),
    ):
        yield


def rounding(size, condition=1.0, steps=1, dtype=torch.float64):
    """The bound above for numbers of this type."""
    return FACTOR * torch.finfo(dtype).eps * math.sqrt(size) * condition * steps


def condition(B, damping):
    """Of B + damping I, where B is dense and positive semidefinite, or U U^T in place of U^T U."""
    return 1 + float(torch.linalg.eigvalsh(B.detach().double())[-1]) / float(damping)


def of_solve(B, damping, steps=1, dtype=torch.float64):
    """For p = -(B + damping I)^-1 g, and for its residual relative to g, where B is dense."""
    return rounding(len(B), condition(B, damping), steps, dtype)


def of_step(model, loss, inputs, targets, damping, steps=1, dtype=None, size=None, **options):
    """The same for steps of a model on a batch; options are those of `woodbury.rows` (curvature, forward).

    size: where no sum has that many terms, those of the longest, in place of the parameters and rows.
    """
    with known_apart():
        rows = woodbury.rows(model, loss, inputs, targets, fallback="autograd", **options)
    gram = rows.gram()
    return rounding(size or sum(rows.shape), condition(gram, damping), steps, dtype or gram.dtype)


def of_decrease(loss, decrease, size, dtype=torch.float64):
    """For a difference of two losses, as in rho = (f(theta) - f(theta + p)) / predicted: their digits cancel."""
    return rounding(size, max(1.0, abs(float(loss) / float(decrease))), dtype=dtype)


def of_verify(optimizer, inputs, targets=None, **options):
    """For `optimizer.verify` on this batch, and for the parameters after steps of that kind; see `of_step`."""
    options |= {"curvature": optimizer.curvature.name, "forward": optimizer.forward}
    return of_step(optimizer.model, optimizer.loss, inputs, targets, optimizer.current_damping, **options)


def of_info(info, step):
    """For the numbers of a `StepInfo` whose p has the bound `step`: a difference of losses is in its ratio."""
    numbers = info.as_dict()
    return step * max(1.0, abs(numbers["loss"] / (numbers["ratio"] * numbers["predicted"])))
