"""The damped quadratic model at one lambda: what every final of it answers, and what its p is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, Truth, is_known, scalar
from woodbury.quadratic.displacement import Displacement


@dataclass
class Minimizer:
    """p of one damping, with what the quadratic model says about it."""

    displacement: Displacement
    predicted: Scalar  # m(0) - m(p)
    squared_norm: Scalar  # |p|^2
    usable: Truth  # whether the system could be solved
    image: Tensor | None = field(default=None, kw_only=True)  # Z p, where it is known
    gains: dict[str, Any] = field(default_factory=dict, kw_only=True)  # of the optimizer's state


class Damped(ABC):
    """m(p) + lambda |p - q|^2 / 2: factored once, where it is factored at all, and solved many times."""

    damping: Scalar

    @abstractmethod
    def minimizer(self) -> Minimizer:
        """p = argmin m(p) + lambda |p - q|^2 / 2."""

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        """(B + W + lambda I)^{-1} U^T w for w = weights / sqrt(D), with one weight per factor row, (m,).

        refine: by one step, where the factorisation allows it. Without it the matrix is symmetric to rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factorisation to pull back with")

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        """Why p cannot be trusted, if so; the condition of the system is asked for with `look` alone."""
        return None

    @property
    def center(self) -> Vector | None:
        """q, None for zero."""
        return None


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


def doubt_of_cancellation(base: Vector, found: Minimizer, tolerance: float = 0.0) -> str | None:
    """Why p = base - Z^T c cannot be trusted where g is not made of rows: too little is left by the subtraction.

    The error of p was measured at about 64 eps |base| / |p|, and at 20 tolerance |base| / |p| where the system is
    solved to a tolerance: this bound is 1 %.
    """
    if not is_known(found.squared_norm):
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


def doubt_of_iteration(tolerance: float) -> str:
    """What to say where conjugate gradients stopped short."""
    return (
        f"conjugate gradients did not reach a relative residual of {tolerance:.2g}: the step is rejected. A "
        "larger solver_tolerance, a larger damping or solver='cholesky' avoids this"
    )
