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


@dataclass(eq=False)
class Factor(ABC):
    """S of n samples with m outputs and k columns each, and e (n, k) with S_i e_i = r_i.

    Where r_i is not in the range of S_i the rest of it is in `rest`: r_i = S_i e_i + rest_i.
    """

    e: Tensor
    rest: Tensor | None = field(default=None, kw_only=True)  # (n, m), None for zeros
    unit: float = field(default=1.0, kw_only=True)  # S is over it, and e times it

    @abstractmethod
    def columns(self) -> Tensor:
        """The columns of each S_i as rows, (n, k, m)."""

    @abstractmethod
    def matvec(self, coefficients: Tensor) -> Tensor:
        """S_i c_i, (n, m), for coefficients (n, k)."""

    @abstractmethod
    def rmatvec(self, outputs: Tensor) -> Tensor:
        """S_i^T y_i, (n, k), for outputs (n, m)."""


@dataclass(eq=False)
class DenseFactor(Factor):
    """S written out."""

    matrix: Tensor  # (n, k, m), columns as rows

    def columns(self) -> Tensor:
        return self.matrix

    def matvec(self, coefficients: Tensor) -> Tensor:
        return torch.bmm(coefficients.unsqueeze(1), self.matrix).squeeze(1)

    def rmatvec(self, outputs: Tensor) -> Tensor:
        return torch.bmm(self.matrix, outputs.unsqueeze(2)).squeeze(2)


@dataclass(eq=False)
class DiagonalFactor(Factor):
    """S = diag(root), for losses that are sums over single outputs."""

    root: Tensor  # (n, m)

    def columns(self) -> Tensor:
        return self.root.unsqueeze(2) if self.root.shape[1] == 1 else torch.diag_embed(self.root)

    def matvec(self, coefficients: Tensor) -> Tensor:
        return self.root * coefficients

    def rmatvec(self, outputs: Tensor) -> Tensor:
        return self.root * outputs


@dataclass(eq=False)
class SoftmaxFactor(Factor):
    """At each position S = (E + common 1^T) diag(root), E the unit vectors of all classes but one as columns."""

    root: Tensor  # (n T, C - 1)
    others: Tensor  # (n T, C - 1): the class of each column
    common: Tensor  # (n T, C)
    positions: int  # T

    def columns(self) -> Tensor:
        root = self.root.unsqueeze(2)
        blocks = (self.common.unsqueeze(1) * root).scatter_add_(2, self.others.unsqueeze(2), root)
        return _block_diagonal(blocks, self.positions)

    def matvec(self, coefficients: Tensor) -> Tensor:
        scaled = coefficients.reshape(self.root.shape) * self.root
        image = self.common * scaled.sum(1, keepdim=True)
        return by_sample(image.scatter_add_(1, self.others, scaled), self.positions)

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
