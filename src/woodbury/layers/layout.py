"""Which sample each of the rows of a layer belongs to.

Rows are sample-major: row = i k + a for column a of sample i. The letters: n sample, k column, r = n k row,
o output feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from woodbury.device.constants import LIMIT, constant_tensor


@dataclass(frozen=True)
class Layout:
    """Which sample a row belongs to: consecutive pieces of n samples with k rows each."""

    pieces: tuple[tuple[int, int], ...]

    @cached_property
    def samples(self) -> int:
        return sum(n for n, _ in self.pieces)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every sample has exactly one row."""
        return all(k == 1 for _, k in self.pieces)

    def merged(self) -> Layout:
        """The same rows with neighbours of as many rows per sample as one piece."""
        pieces: list[tuple[int, int]] = []
        for n, k in self.pieces:
            if pieces and pieces[-1][1] == k:
                n += pieces.pop()[0]
            pieces.append((n, k))
        return layout_of(tuple(pieces))

    def offset(self, piece: int) -> int:
        """Index of the first sample of a piece."""
        return sum(n for n, _ in self.pieces[:piece])

    def sample_of_row(self, device: torch.device) -> Tensor:
        """(r,) index of the sample each row belongs to."""
        return _sample_of_row(self.pieces, device)

    def of_rows(self, samples: Tensor) -> Tensor:
        """(n, ...) -> (r, ...): the entry of the sample each row belongs to."""
        return samples if self.is_plain else samples.index_select(0, self.sample_of_row(samples.device))

    def multiply_(self, rows: Tensor, samples: Tensor) -> Tensor:
        """Multiply each of the rows (r, o) in place by the entry of its sample in samples (n, o)."""
        row = sample = 0
        for n, k in self.pieces:
            own, multipliers = rows[row : row + n * k], samples[sample : sample + n]
            if k == 1:
                own.mul_(multipliers)
            else:
                own.view(n, k, -1).mul_(multipliers.unsqueeze(1))
            row, sample = row + n * k, sample + n
        return rows

    def contract(self, coefficients: Tensor, rows: Tensor) -> Tensor:
        """sum over the rows of each sample of c h, (n, o), for c (r,) or (r, 1) and rows h (r, o)."""
        if self.is_plain:
            return (coefficients if coefficients.dim() == 2 else coefficients.unsqueeze(1)) * rows
        parts, row = [], 0
        for n, k in self.pieces:
            c, h = coefficients[row : row + n * k], rows[row : row + n * k]
            if k == 1:
                parts.append(c.unsqueeze(1) * h)
            else:
                parts.append(torch.bmm(c.view(n, 1, k), h.view(n, k, -1)).squeeze(1))
            row += n * k
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def spread(self, samples: Tensor, other: Layout) -> Tensor:
        """(n, n') -> (r, r'): the entry of the two samples that rows r and r' belong to."""
        if not other.is_plain:  # columns first, while there are few rows
            samples = samples.index_select(1, other.sample_of_row(samples.device))
        return self.of_rows(samples)


@lru_cache(LIMIT)
def layout_of(pieces: tuple[tuple[int, int], ...]) -> Layout:
    """The layout of these pieces, cached."""
    return Layout(pieces)


@constant_tensor  # a few kilobytes per batch size
def _sample_of_row(pieces: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    columns = torch.tensor([k for n, k in pieces for _ in range(n)])
    return torch.repeat_interleave(columns).to(device)
