"""P^-1 by the factorisation of a small matrix, I + M = L L^T: in sample space, or with fewer parameters there.

in sample space       M = U D U^T               P^-1 = D - H^T H,   H = L^-1 U D
in parameter space    M = D^1/2 U^T U D^1/2     P^-1 = H^T H,       H = L^-1 D^1/2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from woodbury._vector import Vector
from woodbury.row_matrix import Rows


def root_of_scales(rows: Rows, precisions: Mapping[str, float]) -> Tensor:
    """The diagonal of D^1/2, (p,)."""
    parts = [
        torch.full((own.numel(),), precisions[name] ** -0.5, dtype=torch.float64, device=own.device)
        for name, own in rows.plan.parameters.items()
    ]
    return torch.cat(parts)


@dataclass
class System:
    """P^-1; see the module docstring."""

    rows: Rows  # U, with the noise
    precisions: dict[str, float]
    lower: Tensor  # L
    in_sample_space: bool

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def scales(self) -> dict[str, float]:
        """D by parameter name."""
        return {name: 1 / own for name, own in self.precisions.items()}

    @property
    def _root(self) -> Tensor:
        """D^1/2, (p,)."""
        return root_of_scales(self.rows, self.precisions)

    def _half(self, rows: Rows) -> Tensor:
        """H R^T."""
        if self.in_sample_space:
            scaled = rows.gram(self.rows, self.scales, torch.float64)
        else:
            scaled = rows.dense().double() * self._root
        return torch.linalg.solve_triangular(self.lower, scaled.mT, upper=False)

    def _solved(self, half: Tensor) -> Tensor:
        """L^-T times a matrix; in parameter space also times D^1/2."""
        solved = torch.linalg.solve_triangular(self.lower.mT, half, upper=True)
        return solved if self.in_sample_space else solved * self._root.unsqueeze(1)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        """The width x width blocks along the diagonal of R P^-1 R^T for rows R, (r / width, width, width)."""
        half = self._half(rows).reshape(len(self), -1, width).permute(1, 2, 0)
        product = torch.bmm(half, half.mT)
        if not self.in_sample_space:
            return product
        return rows.diagonal(width, self.scales, torch.float64).reshape(-1, width, width) - product

    def between(self, a: Rows, b: Rows) -> Tensor:
        """A P^-1 B^T."""
        product = self._half(a).mT @ self._half(b)
        return a.gram(b, self.scales, torch.float64) - product if self.in_sample_space else product

    def with_training(self, rows: Rows) -> Tensor:
        """R P^-1 U^T; in parameter space P^-1 R^T goes through U one row of R at a time."""
        solved = self._solved(self._half(rows)).mT
        if self.in_sample_space:
            return solved
        return torch.stack([self.rows.matvec(self._as_vector(own)).double() for own in solved])

    def determined(self) -> dict[str, float]:
        """gamma_t = p_t - delta_t tr(P^-1)_t of each parameter tensor."""
        inverse = torch.cholesky_inverse(self.lower)
        if not self.in_sample_space:
            parts = inverse.diagonal().split([own.numel() for own in self.rows.plan.parameters.values()])
            return {name: len(own) - float(own.sum()) for name, own in zip(self.precisions, parts, strict=True)}
        # delta_t tr(P^-1)_t = p_t - tr((I + M)^-1 U D_t U^T)
        gammas = dict.fromkeys(self.precisions, 0.0)
        for layer, form in self.rows.forms.items():
            names = self.rows.plan.owned[layer]
            for own in form.parameters:
                alone = {other: self.scales[names[own]] * float(other == own) for other in form.parameters}
                gram = form.gram(form, alone, torch.float64)
                gammas[names[own]] = float((gram * inverse).sum()) * self.rows.scale**2
        return gammas

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        """theta' - theta for draws theta' from the posterior."""
        if not self.in_sample_space:
            draws = self._normal(count, len(self), generator=generator)
            return [self._as_vector(own) for own in self._solved(draws.mT).mT]
        return [self._draw_in_sample_space(generator) for _ in range(count)]

    def _draw_in_sample_space(self, generator: torch.Generator | None) -> Vector:
        """z - D U^T (I + M)^-1 (U z + e)."""
        root = self._root
        z = self._as_vector(self._normal(len(root), generator=generator) * root)
        e = self._normal(len(self), generator=generator)
        weights = torch.cholesky_solve((self.rows.matvec(z).double() + e).unsqueeze(1), self.lower).squeeze(1)
        pulled = self.rows.rmatvec(weights)
        return z - pulled * root.square().to(pulled.flat.dtype)

    def _normal(self, *sizes: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers in float64."""
        device = self.lower.device if generator is None else generator.device
        return torch.randn(*sizes, dtype=torch.float64, generator=generator, device=device).to(self.lower.device)

    def _as_vector(self, flat: Tensor) -> Vector:
        plan = self.rows.plan
        return Vector(plan.space, flat.to(plan.dtype))
