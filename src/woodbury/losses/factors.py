"""S, a square root of the loss Hessian at each sample, stored as compactly as its structure allows.

H_i = S_i S_i^T. A factor gives the columns of S for rows, and products with S and S^T where rows would not fit.
The C outputs at each of T positions of a sample (tokens, pixels) are ordered as torch orders (n, C, T), flattened
to (n, C T). Columns are position-major: column t k + a of a sample is the a-th of position t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from woodbury.device.constants import indices


@dataclass(frozen=True)
class Factor(ABC):
    """S of n samples with m outputs and k columns each, and e (n, k) with S_i e_i = r_i, None if not known.

    Where r_i is not in the range of S_i the rest of it is in `rest`: r_i = S_i e_i + rest_i.
    """

    e: Tensor | None
    rest: Tensor | None = field(default=None, kw_only=True)  # (n, m), None for zeros

    @property
    @abstractmethod
    def width(self) -> int:
        """k, the number of columns per sample."""

    @abstractmethod
    def columns(self) -> Tensor:
        """The columns of each S_i as rows, (n, k, m)."""

    @abstractmethod
    def combine(self, coefficients: Tensor) -> Tensor:
        """S_i c_ij, (n, j, m), for coefficients (n, j, k): j combinations of the columns of each sample."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """The squared length of each column, (n, k)."""

    def matvec(self, coefficients: Tensor) -> Tensor:
        """S_i c_i, (n, m), for coefficients (n, k)."""
        return self.combine(coefficients.unsqueeze(1)).squeeze(1)

    @abstractmethod
    def rmatvec(self, outputs: Tensor) -> Tensor:
        """S_i^T y_i, (n, k), for outputs (n, m)."""


@dataclass(frozen=True)
class DenseFactor(Factor):
    """S written out."""

    matrix: Tensor  # (n, k, m), columns as rows

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    def columns(self) -> Tensor:
        return self.matrix

    def combine(self, coefficients: Tensor) -> Tensor:
        return torch.bmm(coefficients, self.matrix)

    def squared_norms(self) -> Tensor:
        return self.matrix.square().sum(2)

    def rmatvec(self, outputs: Tensor) -> Tensor:
        return torch.bmm(self.matrix, outputs.unsqueeze(2)).squeeze(2)


@dataclass(frozen=True)
class DiagonalFactor(Factor):
    """S = diag(root), for losses that are sums over single outputs."""

    root: Tensor  # (n, m)

    @property
    def width(self) -> int:
        return self.root.shape[1]

    def columns(self) -> Tensor:
        return torch.diag_embed(self.root)

    def combine(self, coefficients: Tensor) -> Tensor:
        return self.root.unsqueeze(1) * coefficients

    def squared_norms(self) -> Tensor:
        return self.root.square()

    def rmatvec(self, outputs: Tensor) -> Tensor:
        return self.root * outputs


@dataclass(frozen=True)
class SoftmaxFactor(Factor):
    """At each position S = (E + common 1^T) diag(root), E the unit vectors of all classes but one as columns."""

    root: Tensor  # (n T, C - 1)
    others: Tensor  # (n T, C - 1): the class of each column
    common: Tensor  # (n T, C)
    positions: int  # T

    @property
    def width(self) -> int:
        return self.positions * self.root.shape[1]

    def columns(self) -> Tensor:
        root = self.root.unsqueeze(2)
        blocks = (self.common.unsqueeze(1) * root).scatter_add_(2, self.others.unsqueeze(2), root)
        return _block_diagonal(blocks, self.positions)

    def combine(self, coefficients: Tensor) -> Tensor:
        root, others, common = (
            own.view(-1, 1, self.positions, own.shape[1]) for own in (self.root, self.others, self.common)
        )
        scaled = coefficients.unflatten(2, root.shape[2:]) * root  # (n, j, T, C - 1)
        image = common * scaled.sum(3, keepdim=True)
        image.scatter_add_(3, others.expand_as(scaled), scaled)
        return image.transpose(2, 3).flatten(2)

    def squared_norms(self) -> Tensor:
        length = 1 + 2 * self.common.gather(1, self.others) + self.common.square().sum(1, keepdim=True)
        return (self.root.square() * length).view(-1, self.width)

    def rmatvec(self, outputs: Tensor) -> Tensor:
        outputs = by_position(outputs, self.positions)
        inner = (self.common * outputs).sum(1, keepdim=True)
        return (self.root * (outputs.gather(1, self.others) + inner)).view(len(outputs) // self.positions, -1)


def dense_factor(columns: Tensor, residual: Tensor) -> DenseFactor:
    """S written out, (n, k, m) with columns as rows, and what it makes of r (n, m): r_i = S_i e_i + rest_i.

    e = S^T (S S^T)^+ r, where eigenvalues below the rounding of S count as zero, and those so small that e = r / S
    would be huge: |U p|^2 = |lambda a - e|^2 would be its rounding. A rest below the rounding of r is zero: kept,
    it would be divided by the damping.
    """
    rounding = columns.shape[2] * torch.finfo(columns.dtype).eps
    wide, r = columns.double(), residual.double()
    eigenvalues, vectors = torch.linalg.eigh(wide.mT @ wide)
    kept = eigenvalues > (rounding * eigenvalues[:, -1:]).clamp_min(torch.finfo(columns.dtype).eps ** 1.5)
    image = torch.einsum("nmj,nm->nj", vectors, r)
    image = torch.where(kept, image / torch.where(kept, eigenvalues, 1.0), 0.0)
    e = torch.einsum("nkm,nmj,nj->nk", wide, vectors, image).to(columns.dtype)
    rest = r - torch.einsum("nkm,nk->nm", wide, e.double())
    beyond = rest.norm(dim=1, keepdim=True) > 8 * rounding * r.norm(dim=1, keepdim=True)
    if rest.device.type == "cpu" and not beyond.any():
        return DenseFactor(e, columns)
    return DenseFactor(e, columns, rest=torch.where(beyond, rest, 0.0).to(residual.dtype))


def sampled_factor(factor: Factor, count: int, signs: Tensor) -> DenseFactor:
    """S~ with `count` columns in place of the K of S, for random signs (n, K): E[S~ S~^T] = S S^T.

    S~ e~ + rest = r, as exactly as S e + rest = r. With u = e / |e| the first column is S u = r / |e|, so that
    e~ = (|e|, 0, ..., 0). What is left of H is T T^T with T = S (I - u u^T). The columns t of T are put into
    count - 1 groups, and each group gives one column of S~, the sum of its members with their signs. Any grouping
    is unbiased, as E[s_i s_j] = 0; the error comes from pairs of columns in the same group,

        E |S~ S~^T - H|^2 = sum over groups, i != j in the group, of |t_i|^2 |t_j|^2 + (t_i . t_j)^2

    so that columns are dealt out by size. It is 0 where count - 1 = K.

    One column alone cannot hold r and be unbiased: it is the sum of all columns of S with their signs, and what of
    r it does not hold is in the rest.
    """
    e = factor.e
    assert e is not None
    if count == 1:
        column = factor.matvec(signs)
        residual = factor.matvec(e)
        if factor.rest is not None:
            residual = residual + factor.rest
        squared = column.square().sum(1, keepdim=True).clamp_min_(torch.finfo(e.dtype).tiny)
        share = (column * residual).sum(1, keepdim=True) / squared
        return DenseFactor(share, column.unsqueeze(1), rest=residual - share * column)
    size = e.norm(dim=1, keepdim=True)
    unit = e / size.clamp_min(torch.finfo(e.dtype).tiny)
    first = factor.matvec(unit)
    squared = first.square().sum(1, keepdim=True)
    norms = factor.squared_norms() + unit * (unit * squared - 2 * factor.rmatvec(first))  # of the columns of T
    groups = _dealt_out(norms, count - 1)
    coefficients = signs.new_zeros(len(e), count - 1, e.shape[1]).scatter_(
        1, groups.unsqueeze(1), signs.unsqueeze(1)
    )
    inner = torch.bmm(coefficients, unit.unsqueeze(2))  # (n, count - 1, 1)
    columns = torch.cat([first.unsqueeze(1), factor.combine(coefficients - inner * unit.unsqueeze(1))], 1)
    weights = torch.cat([size, size.new_zeros(len(e), count - 1)], 1)
    return DenseFactor(weights, columns, rest=factor.rest)


def _dealt_out(sizes: Tensor, count: int) -> Tensor:
    """A group in 0..count-1 for each entry of a row, (n, k): by size, forth and back, 0 1 2 2 1 0 0 1 2 ..."""
    place = indices(sizes.shape[1], sizes.device) % (2 * count)
    place = torch.minimum(place, 2 * count - 1 - place).expand_as(sizes)
    return torch.empty_like(place).scatter_(1, sizes.argsort(1, descending=True), place)


def by_position(outputs: Tensor, positions: int) -> Tensor:
    """Outputs (n, C T) as (n T, C)."""
    if positions == 1:
        return outputs
    return outputs.unflatten(1, (-1, positions)).transpose(1, 2).flatten(0, 1)


def by_sample(outputs: Tensor, positions: int) -> Tensor:
    """Outputs (n T, C) as (n, C T): the inverse of `by_position`."""
    if positions == 1:
        return outputs
    return outputs.unflatten(0, (-1, positions)).transpose(1, 2).flatten(1)


def _block_diagonal(blocks: Tensor, positions: int) -> Tensor:
    """Columns (n, T k, C T), zero outside their own position, from those of each position, (n T, k, C)."""
    if positions == 1:
        return blocks
    blocks = blocks.unflatten(0, (-1, positions))  # (n, T, k, C)
    columns = blocks.new_zeros(*blocks.shape, positions)
    columns.diagonal(dim1=1, dim2=4).copy_(blocks.movedim(1, 3))
    return columns.flatten(3).flatten(1, 2)
