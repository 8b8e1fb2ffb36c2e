"""Why p of a damped model cannot be trusted, where it cannot."""

from __future__ import annotations

import torch

from woodbury.device.scalars import is_known, scalar
from woodbury.quadratic.quadratic import Damped, Minimizer


def doubt_of_condition(reciprocal_condition: float, dtype: torch.dtype) -> str | None:
    """Why the solution of a system with this lmin / lmax, or less, cannot be trusted in this type, if so.

    The error of p was measured at 0.5 eps lmax / lmin where rows repeat each other: this bound is 3 %.
    """
    if not reciprocal_condition < 16 * torch.finfo(dtype).eps:
        return None  # or not a number: there is no solution to trust
    instead = "" if dtype == torch.float64 else "gram_dtype=torch.float64 or "
    return (
        f"the system of the step is nearly singular in {dtype} (lmin / lmax <= {reciprocal_condition:.1g}): p may "
        f"be off by some percent or more. {instead}a larger damping avoids this"
    )


def doubt_of_cancellation(damped: Damped, found: Minimizer, tolerance: float = 0.0) -> str | None:
    """Why p = p0 + Z^T c cannot be trusted where g is not made of rows: too little is left of the two.

    The error of p was measured at about 64 eps |p0| / |p|, and at 20 tolerance |p0| / |p| where the system is
    solved to a tolerance: this bound is 1 %.
    """
    base = damped.base
    if base is None or damped.quadratic.gradient is None or not is_known(found.squared_norm):
        return None
    dtype = base.flat.dtype
    least = max(6400 * torch.finfo(dtype).eps, 2000 * tolerance)
    if not found.squared_norm < least**2 * float(scalar(base.dot(base))):
        return None  # or not a number: there is no p to trust
    return (
        "the gradient nearly lies in the rows of the batch, and at this damping p is a difference of numbers that "
        f"are equal in nearly all digits of {dtype}: it may be off by more than 1 %. A model in float64 or a "
        "larger damping avoids this"
    )


def doubt_of_iteration(damped: Damped, found: Minimizer, tolerance: float) -> str | None:
    """Why p by conjugate gradients cannot be trusted, if so."""
    if found.usable is not False:
        return doubt_of_cancellation(damped, found, tolerance)
    return (
        f"conjugate gradients did not reach a relative residual of {tolerance:.2g}: the step is rejected. A "
        "larger solver_tolerance, a larger damping or solver='cholesky' avoids this"
    )
