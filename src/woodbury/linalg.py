"""Solvers for the small symmetric positive definite systems, and the products that feed them.

Everything here knows tensors only. Where curvature is block-diagonal, systems carry a leading axis b of blocks,
one per layer: shapes below say (b, m) for (m,) or (b, m).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury._process import ForAllThreads
from woodbury.device.constants import identity, ones
from woodbury.device.scalars import Scalar, Scale, Truth, compute, scalar, truth


class Solution(NamedTuple):
    """What a solver returns: the solution, and whether it is usable."""

    x: Tensor  # (b, m)
    ok: Truth


def factor_cholesky(matrix: Tensor) -> tuple[Tensor, Truth]:
    """L with L L^T = matrix, (b, m, m), and whether the matrix is numerically positive definite.

    It does not wait for the device. Where the matrix is not definite L has no meaning.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    return lower, scalar(info if info.dim() == 0 else info.any()) == 0


def reciprocal_condition(lower: Tensor) -> float:
    """A bound from above on lmin / lmax of L L^T: (min L_ii / max L_ii)^2, the least of all blocks."""
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    return (pivots.amin(-1) / pivots.amax(-1)).min().item() ** 2


def solve_factored(lower: Tensor, rhs: Tensor) -> Tensor:
    """x with L L^T x = rhs, (b, m)."""
    # cholesky_solve copies L and, for blocks on a GPU, allocates memory that a CUDA graph cannot record
    in_two = lower.dim() == 3 if lower.is_cuda else lower.shape[-1] > _SMALL
    if in_two:
        half = torch.linalg.solve_triangular(lower, rhs.unsqueeze(-1), upper=False)
        return torch.linalg.solve_triangular(lower.mT, half, upper=True).squeeze(-1)
    return torch.cholesky_solve(rhs.unsqueeze(-1), lower).squeeze(-1)


def solve_conjugate_gradient(
    product: Callable[[Tensor], Tensor], rhs: Tensor, tolerance: float, max_iterations: int
) -> Solution:
    """Solve A x = rhs for symmetric positive definite A by conjugate gradients, block by block.

    product computes A x, (b, m), for x (b, m). Stops when every block has |A x - rhs| <= tolerance |rhs|; `ok` is
    false if that did not happen within max_iterations.
    """
    size = rhs.abs().amax(-1, keepdim=True)  # so that squares do not underflow
    size = torch.where(size > 0, size, 1.0)
    rhs = rhs / size
    x = torch.zeros_like(rhs)
    residual = rhs.clone()
    direction = residual.clone()
    square = (residual * residual).sum(-1, keepdim=True)
    goal = tolerance**2 * square
    for _ in range(max_iterations):
        active = square > goal
        if not active.any():
            return Solution(x * size, truth(~active.any()))
        image = product(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        # A block that has converged takes no further step: its direction may be zero.
        length = torch.where(active, square / torch.where(active, curvature, 1.0), 0.0)
        x = x + length * direction
        residual = residual - length * image
        previous, square = square, (residual * residual).sum(-1, keepdim=True)
        direction = residual + torch.where(active, square / torch.where(active, previous, 1.0), 0.0) * direction
    return Solution(x * size, truth((square <= goal).all()))


class Minimum(NamedTuple):
    """The last point of a minimisation, the value there, and the number of iterations."""

    x: Tensor
    value: float
    iterations: int


def minimize_quadratic(
    product: Callable[[Tensor], Tensor], linear: Tensor, start: Tensor, *, progress: float, max_iterations: int
) -> Minimum:
    """Lower phi(x) = x^T A x / 2 + linear . x by conjugate gradients, for a positive definite A.

    Stops by relative progress (Martens 2010, section 4.4): after iteration i, with k = max(10, i / 10), if
    phi(x_i) < 0 and (phi(x_i) - phi(x_{i-k})) / phi(x_i) < k progress. One product more than iterations.
    """
    x = start.clone()
    residual = product(x) + linear  # gradient of phi
    direction = -residual
    square = float(residual @ residual)
    negligible = torch.finfo(x.dtype).eps ** 2 * square
    values = [0.5 * float(x @ (residual + linear))]
    for iteration in range(1, max_iterations + 1):
        if not square > negligible:  # small, or not a number
            return Minimum(x, values[-1], iteration - 1)
        image = product(direction)
        length = square / float(direction @ image)
        x.add_(direction, alpha=length)
        residual.add_(image, alpha=length)
        previous, square = square, float(residual @ residual)
        direction = direction.mul_(square / previous).sub_(residual)
        values.append(0.5 * float(x @ (residual + linear)))
        window = max(10, iteration // 10)
        if iteration > window and values[-1] < 0:
            gained = (values[-1] - values[-1 - window]) / values[-1]
            if gained < window * progress:
                return Minimum(x, values[-1], iteration)
    return Minimum(x, values[-1], max_iterations)


def minimize_nonnegative(matrix: Tensor, linear: Tensor, ridge: float) -> Tensor:
    """argmin of c^T (A + ridge diag A) c / 2 - linear . c over c >= 0, (k,), for a small A >= 0 on the CPU.

    The best of the minima over all 2^k supports that are not negative: all of them at once, in few operations.
    Variables are scaled by the diagonal of A; one whose diagonal is not positive stays 0.
    """
    scale = matrix.diagonal().clamp_min(0).sqrt()
    unused = scale == 0
    inverse = scale.reciprocal().masked_fill(unused, 0.0)
    matrix, linear = matrix * inverse * inverse.unsqueeze(1), linear * inverse
    matrix = matrix + (unused.to(matrix) + ridge).diag()
    supports, pairs, outside = _supports(len(linear))
    systems = torch.where(pairs, matrix, outside.to(matrix))
    c = torch.linalg.solve(systems, torch.where(supports, linear, 0.0))
    gains = (c @ linear).masked_fill(~(c >= 0).all(1), -torch.inf)  # twice what each takes off
    return c[gains.argmax()] * inverse


@cache
def _supports(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """All supports of k variables, (2^k, k); pairs inside each, (2^k, k, k); and 1 on the diagonal outside."""
    numbers = torch.arange(2**count, device="cpu").unsqueeze(1)
    inside = (numbers >> torch.arange(count, device="cpu")) & 1 == 1
    pairs = inside.unsqueeze(2) & inside.unsqueeze(1)
    return inside, pairs, (~inside).double().diag_embed()


class SampleSpaceStep(NamedTuple):
    """The coefficients of p = p0 + Z^T c, with p^T B p for the quadratic model."""

    coefficients: Tensor  # c (b, r)
    curvature: Scalar  # p^T B p = |U p|^2
    ok: Truth


def solve_in_sample_space(
    gram: Tensor,
    curvature_rows: int,
    divisor: Scalar,
    term_count: Scalar,
    e: Tensor | None,
    projected_base: Tensor | None,
    damping: Scalar,
    solve: Callable[[Tensor, Tensor], Solution],
) -> SampleSpaceStep:
    """Coefficients c of p = p0 + Z^T c and p^T B p = |U p|^2, from the Gram matrix Z Z^T alone.

    gram is (b, r, r), or its first m = curvature_rows rows (b, m, r); e is (m,), None for ones; projected_base is
    Z p0 on the factor rows, (b, m), or None; solve(matrix, rhs) solves the small system. With D the divisor, M the
    term_count (N2 and N1 for a mean over samples), U = Z[:m] / sqrt(D) and x = -M lambda c = M lambda a / sqrt(D),
    the system of `woodbury.quadratic.sample_space` times M D lambda is

        (Z Z^T + D lambda I) x = D lambda e + M lambda Z p0 - M Z g_rest
        -sqrt(D) U p = (D / M) (e - x)

    and x = 1 on the gradient rows of the samples outside S2.
    """
    m, gradient_rows = curvature_rows, gram.shape[-1] - curvature_rows
    # c = x / unit; damping is computed by the same kernel, for the predicted decrease
    shift, unit, _ = compute(damping * divisor, damping * -term_count, damping)
    head = gram if gram.shape[-2] == m else gram.narrow(-2, 0, m)
    inside, others = head.split_with_sizes([m, gradient_rows], -1) if gradient_rows else (head, head)
    matrix = plus_diagonal(inside, shift)
    constant, outside = e is None and gradient_rows > 0, ones(gradient_rows, gram.dtype, gram.device)
    e = ones(m, gram.dtype, gram.device) if e is None else e.to(gram.dtype)
    if gradient_rows and gram.dim() == 2 and not isinstance(shift, Tensor):  # the same in one operation
        rhs = torch.addmv(e, others, outside, beta=shift, alpha=-1)
    else:
        rhs = shift if constant else e * shift
        if gradient_rows:
            rhs = rhs - others.sum(-1)
    if projected_base is not None:
        rhs = rhs - projected_base * unit
    solution = solve(matrix, rhs if rhs.dim() + 1 == matrix.dim() else rhs.expand(matrix.shape[:-1]))
    x = solution.x
    curvature = sum_of_squares(e - x) * (divisor / (term_count * term_count))
    if gradient_rows:
        x = torch.cat([x, outside if x.dim() == 1 else outside.expand(len(x), gradient_rows)], dim=-1)
    return SampleSpaceStep(x / unit, curvature, solution.ok)


def plus_diagonal(matrix: Tensor, shift: Scale) -> Tensor:
    """A + diag(shift) in new memory; shift is one number or (m,)."""
    size = matrix.shape[-1]
    if size > _SMALL:
        matrix = matrix.clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
        return matrix
    unit = identity(size, matrix.dtype, matrix.device)
    if isinstance(shift, Tensor):
        return torch.addcmul(matrix, unit, shift)
    return torch.add(matrix, unit, alpha=shift)


_SMALL = 128  # up to here one operation on the whole matrix costs less than several on its diagonal


def sum_of_squares(values: Tensor) -> Scalar:
    if values.is_cuda:  # one kernel, where a dot product takes two
        norm = scalar(torch.linalg.vector_norm(values))
        return norm * norm
    flat = values if values.dim() == 1 else values.reshape(-1)
    return scalar(torch.dot(flat, flat))


def quadratic_form(matrix: Tensor, vector: Tensor) -> Tensor:
    """v^T A v, summed over blocks; A (b, m, m), v (b, m)."""
    if vector.dim() == 1:
        return torch.dot(vector, matrix.mv(vector))
    return torch.dot(vector.flatten(), torch.bmm(matrix, vector.unsqueeze(-1)).flatten())


def quadratic_form_error(matrix: Tensor, vector: Tensor) -> Scalar:
    """A bound on the rounding error of v^T A v for A >= 0: eps trace(A) |v|^2, summed over blocks."""
    return torch.finfo(matrix.dtype).eps * trace(matrix) * sum_of_squares(vector)


def trace(matrix: Tensor) -> Scalar:
    """The trace of A (b, m, m), summed over blocks."""
    return scalar(matrix.trace() if matrix.dim() == 2 else matrix.diagonal(dim1=-2, dim2=-1).sum())


@contextmanager
def _changed_precision() -> Iterator[None]:
    before = matmul_precision()
    _set_precision(("ieee",) * len(before))
    yield
    _set_precision(before)


class _FullPrecision(ForAllThreads):
    """Inside, float32 matrix products use neither TF32 nor bfloat16, whatever the global settings say."""

    def __call__(self) -> AbstractContextManager[None]:
        """Nothing to enter where there is nothing to change, and no thread inside that will change it back."""
        with self._lock:
            return _NOTHING if self._changed is None and _FULL.issuperset(matmul_precision()) else self


full_precision = _FullPrecision(_changed_precision)
_NOTHING = nullcontext()
_FULL = {"ieee", "none", "highest"}

# torch 2.9 gave each backend its own setting; to use the older one as well raises an error.
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _cuda: Any = torch.backends.cuda.matmul
    _cpu: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (unknown to the type stubs)

    def matmul_precision() -> tuple[str, ...]:
        return _cuda.fp32_precision, _cpu.fp32_precision

    def _set_precision(values: tuple[str, ...]) -> None:
        _cuda.fp32_precision, _cpu.fp32_precision = values
else:

    def matmul_precision() -> tuple[str, ...]:
        return (torch.get_float32_matmul_precision(),)

    def _set_precision(values: tuple[str, ...]) -> None:
        torch.set_float32_matmul_precision("highest" if values[0] == "ieee" else values[0])
