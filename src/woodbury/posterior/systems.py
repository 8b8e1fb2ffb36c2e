"""P^-1 in sample space and in parameter space."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
class System(ABC):
    """P^-1, by the factorisation of a small matrix I + M = L L^T."""

    rows: Rows  # U, with the noise
    precisions: dict[str, float]
    lower: Tensor

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def scales(self) -> dict[str, float]:
        """D by parameter name."""
        return {name: 1 / own for name, own in self.precisions.items()}

    @abstractmethod
    def blocks(self, rows: Rows, width: int) -> Tensor:
        """The width x width blocks along the diagonal of R P^-1 R^T for rows R, (r / width, width, width)."""

    @abstractmethod
    def between(self, a: Rows, b: Rows) -> Tensor:
        """A P^-1 B^T."""

    @abstractmethod
    def with_training(self, rows: Rows) -> Tensor:
        """R P^-1 U^T."""

    @abstractmethod
    def determined(self) -> dict[str, float]:
        """gamma_t = p_t - delta_t tr(P^-1)_t of each parameter tensor."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        """theta' - theta for draws theta' from the posterior."""

    def normal(self, *sizes: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers in float64."""
        device = self.lower.device if generator is None else generator.device
        return torch.randn(*sizes, dtype=torch.float64, generator=generator, device=device).to(self.lower.device)

    def as_vector(self, flat: Tensor) -> Vector:
        plan = self.rows.plan
        return Vector(plan.space, flat.to(plan.dtype))


class InSampleSpace(System):
    """With A = I + U D U^T = L L^T."""

    def _half(self, rows: Rows) -> Tensor:
        """L^-1 U D R^T."""
        return torch.linalg.solve_triangular(self.lower, self._with_rows(rows).mT, upper=False)

    def _with_rows(self, rows: Rows) -> Tensor:
        """R D U^T."""
        return rows.gram(self.rows, self.scales, torch.float64)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        prior = rows.diagonal(width, self.scales, torch.float64).reshape(-1, width, width)
        half = self._half(rows).reshape(len(self), -1, width).permute(1, 2, 0)
        return prior - torch.bmm(half, half.mT)

    def between(self, a: Rows, b: Rows) -> Tensor:
        return a.gram(b, self.scales, torch.float64) - self._half(a).mT @ self._half(b)

    def with_training(self, rows: Rows) -> Tensor:
        return torch.cholesky_solve(self._with_rows(rows).mT, self.lower).mT

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        root, draws = root_of_scales(self.rows, self.precisions), []
        for _ in range(count):
            z = self.as_vector(self.normal(len(root), generator=generator) * root)
            e = self.normal(len(self), generator=generator)
            weights = torch.cholesky_solve((self.rows.matvec(z).double() + e).unsqueeze(1), self.lower).squeeze(1)
            pulled = self.rows.rmatvec(weights)
            scales = root.square().to(pulled.flat.dtype)
            draws.append(z - pulled * scales)
        return draws

    def determined(self) -> dict[str, float]:
        # delta_t tr(P^-1)_t = p_t - tr(A^-1 U D_t U^T)
        inverse = torch.cholesky_inverse(self.lower)
        gammas = dict.fromkeys(self.precisions, 0.0)
        for layer, form in self.rows.forms.items():
            names = self.rows.plan.owned[layer]
            for own in form.parameters:
                alone = {other: self.scales[names[own]] * float(other == own) for other in form.parameters}
                gram = form.gram(form, alone, torch.float64)
                gammas[names[own]] = float((gram * inverse).sum()) * self.rows.scale**2
        return gammas


class InParameterSpace(System):
    """With D^1/2 P D^1/2 = I + D^1/2 U^T U D^1/2 = L L^T."""

    def _half(self, rows: Rows) -> Tensor:
        """L^-1 D^1/2 R^T."""
        scaled = rows.dense().double() * root_of_scales(self.rows, self.precisions)
        return torch.linalg.solve_triangular(self.lower, scaled.mT, upper=False)

    def blocks(self, rows: Rows, width: int) -> Tensor:
        half = self._half(rows).reshape(len(self), -1, width).permute(1, 2, 0)
        return torch.bmm(half, half.mT)

    def between(self, a: Rows, b: Rows) -> Tensor:
        return self._half(a).mT @ self._half(b)

    def with_training(self, rows: Rows) -> Tensor:
        # P^-1 R^T = D^1/2 L^-T (L^-1 D^1/2 R^T), sent through U one row of R at a time
        solved = torch.linalg.solve_triangular(self.lower.mT, self._half(rows), upper=True)
        solved = solved * root_of_scales(self.rows, self.precisions).unsqueeze(1)
        return torch.stack([self.rows.matvec(self.as_vector(own)).double() for own in solved.mT])

    def determined(self) -> dict[str, float]:
        inverse = torch.cholesky_inverse(self.lower).diagonal()
        parts = inverse.split([own.numel() for own in self.rows.plan.parameters.values()])
        return {name: len(part) - float(part.sum()) for name, part in zip(self.precisions, parts, strict=True)}

    def draw(self, count: int, generator: torch.Generator | None) -> list[Vector]:
        draws = self.normal(count, len(self), generator=generator)
        solved = torch.linalg.solve_triangular(self.lower.mT, draws.mT, upper=True)
        solved = solved * root_of_scales(self.rows, self.precisions).unsqueeze(1)
        return [self.as_vector(own) for own in solved.mT]
