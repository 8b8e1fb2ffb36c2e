"""P^-1 by the factorisation of a small matrix, I + M = L L^T: in sample space, or with fewer parameters there.

in sample space       M = U D U^T               P^-1 = D - H^T H,   H = L^-1 U D
in parameter space    M = D^1/2 U^T U D^1/2     P^-1 = H^T H,       H = L^-1 D^1/2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from woodbury._vector import Vector
from woodbury.linalg import solve_factored
from woodbury.row_matrix import Rows


def root_of_scales(rows: Rows, precisions: Mapping[str, float]) -> Tensor:
    """The diagonal of D^1/2, (p,)."""
    roots, device = [precisions[name] ** -0.5 for name in rows.plan.parameters], rows.plan.device
    sizes = torch.tensor(rows.plan.space.sizes, device=device)
    return torch.tensor(roots, dtype=torch.float64, device=device).repeat_interleave(sizes)


@dataclass
class _Factored:
    """What both ways have; see the module docstring."""

    rows: Rows  # U up to a factor
    unit: float  # that factor, 1 / sqrt(2 s) for noise of variance s
    precisions: dict[str, float]
    lower: Tensor  # L

    @property
    def root(self) -> Tensor:
        """D^1/2, (p,)."""
        return root_of_scales(self.rows, self.precisions)

    def _normal(self, *sizes: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers in float64."""
        device = self.lower.device if generator is None else generator.device
        return torch.randn(*sizes, dtype=torch.float64, generator=generator, device=device).to(self.lower.device)

    def _as_vector(self, flat: Tensor) -> Vector:
        return Vector(self.rows.plan.space, flat.to(self.rows.plan.dtype))


class InSampleSpace(_Factored):
    """P^-1 = D - H^T H, H = L^-1 U D."""

    @property
    def scales(self) -> dict[str, float]:
        """D by parameter name."""
        return {name: 1 / own for name, own in self.precisions.items()}

    def half(self, rows: Rows) -> Tensor:
        """H R^T."""
        scaled = rows.gram(self.rows, self.scales, torch.float64) * self.unit
        return solve_triangular(self.lower, scaled.mT, upper=False)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        """The width x width blocks along the diagonal of R P^-1 R^T for rows R, (r / width, width, width)."""
        whole = rows.diagonal(width, self.scales, torch.float64).reshape(-1, width, width)
        return whole - _products_of_blocks(self.half(rows), width)

    def between(self, a: Rows, b: Rows) -> Tensor:
        """A P^-1 B^T."""
        return a.gram(b, self.scales, torch.float64) - self.half(a).mT @ self.half(b)

    def with_training(self, rows: Rows) -> Tensor:
        """R P^-1 U^T = R D U^T (I + M)^-1."""
        return solve_triangular(self.lower.mT, self.half(rows), upper=True).mT

    def determined(self) -> dict[str, float]:
        """gamma_t = p_t - delta_t tr(P^-1)_t of each parameter tensor."""
        # delta_t tr(P^-1)_t = p_t - tr((I + M)^-1 U D_t U^T)
        inverse, scales = torch.cholesky_inverse(self.lower), self.scales
        gammas = dict.fromkeys(self.precisions, 0.0)
        for layer, form in self.rows.forms.items():
            names = self.rows.plan.owned[layer]
            for own in form.parameters:
                alone = {other: scales[names[own]] * float(other == own) for other in form.parameters}
                gram = form.gram(form, alone, torch.float64)
                gammas[names[own]] = float((gram * inverse).sum()) * self.unit**2
        return gammas

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        """theta' - theta = z - D U^T (I + M)^-1 (U z + e) for draws theta' from the posterior."""
        root, draws = self.root, []
        for _ in range(count):
            z = self._as_vector(self._normal(len(root), generator=generator) * root)
            e = self._normal(len(self.lower), generator=generator)
            image = self.rows.matvec(z).double() * self.unit
            pulled = self.rows.rmatvec(solve_factored(self.lower, image + e) * self.unit)
            draws.append(z - pulled * root.square().to(pulled.flat.dtype))
        return draws


class InParameterSpace(_Factored):
    """P^-1 = H^T H, H = L^-1 D^1/2: the same methods."""

    def half(self, rows: Rows) -> Tensor:
        """H R^T."""
        return solve_triangular(self.lower, (rows.dense().double() * self.root).mT, upper=False)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        return _products_of_blocks(self.half(rows), width)

    def between(self, a: Rows, b: Rows) -> Tensor:
        return self.half(a).mT @ self.half(b)

    def with_training(self, rows: Rows) -> Tensor:
        """P^-1 R^T goes through U one row of R at a time."""
        solved = self._pull_back(self.half(rows)) * self.unit
        return torch.stack([self.rows.matvec(self._as_vector(own)).double() for own in solved.mT])

    def determined(self) -> dict[str, float]:
        parts = torch.cholesky_inverse(self.lower).diagonal().split(self.rows.plan.space.sizes)
        return {name: len(own) - float(own.sum()) for name, own in zip(self.precisions, parts, strict=True)}

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        z = self._normal(count, len(self.lower), generator=generator)
        return [self._as_vector(own) for own in self._pull_back(z.mT).mT]

    def _pull_back(self, half: Tensor) -> Tensor:
        """H^T times a matrix."""
        return solve_triangular(self.lower.mT, half, upper=True) * self.root.unsqueeze(1)


System = InSampleSpace | InParameterSpace


def _products_of_blocks(half: Tensor, width: int) -> Tensor:
    """(H R^T)^T (H R^T) for every `width` columns."""
    columns = half.reshape(len(half), -1, width).permute(1, 2, 0)
    return torch.bmm(columns, columns.mT)
