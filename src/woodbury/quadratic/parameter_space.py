"""p through parameters: (B + lambda + W) p = lambda q - W theta - g, block by block.

Taken where U has more rows than columns: then the p x p system is the smaller one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from woodbury import linalg
from woodbury._vector import Vector
from woodbury.device.scalars import Scalar, Scale, Truth, compute, scalar
from woodbury.model.plan import Plan
from woodbury.quadratic.quadratic import Blocks, Damped, Minimizer, Quadratic, Solver
from woodbury.quadratic.sample_space import InSampleSpace, doubt_of_condition, minimizer_of


class InParameterSpace(Damped):
    """By Cholesky factorisations of the blocks of B + lambda + W: exact."""

    def __init__(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> None:
        super().__init__(quadratic, damping, refine)
        self._names = quadratic.blocks.parameter_names(quadratic.plan)
        self._lowers: list[Tensor] = []  # L of each block
        self._ok: Truth = True

    def minimizer(self) -> Minimizer:
        quadratic = self.quadratic
        p, image = self._solve(quadratic.force(self.damping), self.refine)
        p = p.of(quadratic.group.same(p.flat))
        if image is None:
            curvature: Scalar = 0.0
            for matrix, entries in zip(quadratic.matrices, self._by_block(p), strict=True):
                x = entries.to(matrix.dtype)
                curvature = curvature + scalar(torch.dot(x, matrix.mv(x)))
        else:
            curvature = linalg.sum_of_squares(image[: quadratic.curvature_rows]) / quadratic.divisor
        return minimizer_of(self, p, curvature, self._ok, image)

    def doubt(self, found: Minimizer, look: bool) -> str | None:
        if not look:
            return None
        condition = min(linalg.reciprocal_condition(lower) for lower in self._lowers)
        return doubt_of_condition(condition, self._lowers[0].dtype)

    def pull_back(self, weights: Tensor, refine: bool = True) -> Vector:
        quadratic = self.quadratic
        return self._solve(quadratic.combine_factor_rows(weights / quadratic.divisor), refine)[0]

    def _solve(self, force: Vector, refine: bool) -> tuple[Vector, Tensor | None]:
        """p with (B + lambda + W) p = force, and Z p where p is refined."""
        matrices = self.quadratic.matrices
        if not self._lowers:
            for names, matrix in zip(self._names, matrices, strict=True):
                lower, ok = linalg.factor_cholesky(linalg.plus_diagonal(matrix, self._shift(names, matrix)))
                self._lowers.append(lower)
                self._ok = self._ok & ok
        parts = []
        for lower, entries in zip(self._lowers, self._by_block(force), strict=True):
            parts.append(linalg.solve_factored(lower, entries.to(lower.dtype)))
        if not refine or len(parts) > 1:
            return self._joined(parts, force), None
        # one step of iterative refinement with U^T (U p), as in sample space
        rows, dtype, (p,) = self.quadratic.all_rows, force.flat.dtype, parts
        image = rows.matvec(force.of(p.to(dtype)))
        image[self.quadratic.curvature_rows :] = 0  # the rows of samples outside S2
        curved = rows.rmatvec(image / self.quadratic.divisor).flat.to(p.dtype)
        residual = force.flat.to(p.dtype) - curved - self._shift(self._names[0], p) * p
        refined = force.of((p + linalg.solve_factored(self._lowers[0], residual)).to(dtype))
        return refined, rows.matvec(refined)

    def _shift(self, names: tuple[str, ...], like: Tensor) -> Scale:
        """lambda + W of a block: one number, or one per parameter."""
        (damping,) = compute(self.damping)
        decay = self.quadratic.decay
        return damping if decay is None else decay.shift(names, like, damping)

    def _by_block(self, vector: Vector) -> list[Tensor]:
        """The entries of each block."""
        if len(self._names) == 1:
            return [vector.flat]
        return [torch.cat([vector[name].reshape(-1) for name in names]) for names in self._names]

    def _joined(self, parts: list[Tensor], like: Vector) -> Vector:
        """The vector of the entries of each block."""
        if len(parts) == 1:
            return like.of(parts[0].to(like.flat.dtype))
        result: dict[str, Tensor] = {}
        for names, part in zip(self._names, parts, strict=True):
            pieces = part.to(like.flat.dtype).split([like[name].numel() for name in names])
            result |= {name: piece.view_as(like[name]) for name, piece in zip(names, pieces, strict=True)}
        return like.space.pack(result)


class Cholesky(Solver):
    """Exact: in sample space, or in parameter space where there are more rows than parameters."""

    name = "cholesky"
    exact = True

    def at(self, quadratic: Quadratic, damping: Scalar, refine: bool) -> Damped:
        if quadratic.blocks.are_smaller(quadratic.plan, quadratic.curvature_rows):
            return InParameterSpace(quadratic, damping, refine)
        return InSampleSpace(quadratic, damping, refine)

    def trace(self, quadratic: Quadratic) -> Scalar:
        if quadratic.blocks.are_smaller(quadratic.plan, quadratic.curvature_rows):
            return sum([linalg.trace(matrix) for matrix in quadratic.matrices], 0.0)
        return super().trace(quadratic)

    def size(self, plan: Plan, blocks: Blocks, row_count: int, others: int) -> int:
        if blocks.are_smaller(plan, row_count):
            return max(blocks.sizes(plan))
        return super().size(plan, blocks, row_count, others)
