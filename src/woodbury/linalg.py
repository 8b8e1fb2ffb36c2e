"""Solvers for the small symmetric positive definite systems, and the products that feed them.

Everything here knows tensors only. Systems carry a leading block axis b: one block for the full
curvature matrix, one per layer for the block-diagonal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    """What a solver returns: the solution, whether it can be trusted, and how many iterations it took."""

    x: Tensor  # (b, m)
    ok: Tensor  # 0-dim bool
    iterations: int


def solve_cholesky(matrix: Tensor, rhs: Tensor) -> Solution:
    """Solve matrix x = rhs by a Cholesky factorisation, without waiting for the device.

    matrix (b, m, m), rhs (b, m). Where the matrix is not numerically positive definite `ok` is false
    and x holds no meaning.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    x = torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)
    return Solution(x, (info == 0).all(), 1)


def solve_conjugate_gradient(
    product: Callable[[Tensor], Tensor], rhs: Tensor, tolerance: float, max_iterations: int
) -> Solution:
    """Solve A x = rhs for symmetric positive definite A given as a product, block by block.

    product maps (b, m) to (b, m). Stops when every block has |A x - rhs| <= tolerance |rhs|; `ok` is
    false if that did not happen within max_iterations.
    """
    x = torch.zeros_like(rhs)
    residual = rhs.clone()
    direction = residual.clone()
    square = (residual * residual).sum(-1, keepdim=True)
    goal = tolerance**2 * square
    for iteration in range(max_iterations):
        active = square > goal
        if not active.any():
            return Solution(x, torch.ones((), dtype=torch.bool, device=rhs.device), iteration)
        image = product(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        # A block that has converged takes no further step: its direction may be zero.
        length = torch.where(active, square / torch.where(active, curvature, 1.0), 0.0)
        x = x + length * direction
        residual = residual - length * image
        previous, square = square, (residual * residual).sum(-1, keepdim=True)
        direction = (
            residual + torch.where(active, square / torch.where(active, previous, 1.0), 0.0) * direction
        )
    return Solution(x, (square <= goal).all(), max_iterations)


@contextmanager
def full_precision() -> Iterator[None]:
    """Keep TF32 and bfloat16 out of float32 matrix products inside, whatever the global settings say."""
    kept = _precision()
    if set(kept) <= _FULL:
        yield
        return
    _set_precision(("ieee",) * len(kept))
    try:
        yield
    finally:
        _set_precision(kept)


_FULL = {"ieee", "none", "highest"}

# torch 2.9 gave each backend a setting of its own; reading or writing the older one beside it raises.
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _cuda: Any = torch.backends.cuda.matmul
    _cpu: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (unknown to the type stubs)

    def _precision() -> tuple[str, ...]:
        return _cuda.fp32_precision, _cpu.fp32_precision

    def _set_precision(values: tuple[str, ...]) -> None:
        _cuda.fp32_precision, _cpu.fp32_precision = values
else:

    def _precision() -> tuple[str, ...]:
        return (torch.get_float32_matmul_precision(),)

    def _set_precision(values: tuple[str, ...]) -> None:
        torch.set_float32_matmul_precision("highest" if values[0] == "ieee" else values[0])
