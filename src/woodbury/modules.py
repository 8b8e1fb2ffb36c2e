"""Modules for networks that solve differential equations."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Sine(nn.Module):
    """The activation sin(omega x), as in SIREN (Sitzmann et al., Implicit Neural Representations, 2020)."""

    def __init__(self, omega: float = 1.0) -> None:
        super().__init__()
        self.omega = omega

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * x)


class Periodic(nn.Module):
    """cos(2 pi k x_i / period), sin(2 pi k x_i / period) for k = 1, ..., harmonics, in place of some columns x_i.

    A network after it is periodic in these columns: (n, d) -> (n, d + len(columns) (2 harmonics - 1)).
    """

    def __init__(self, *columns: int, period: float = 2.0, harmonics: int = 1) -> None:
        super().__init__()
        self.columns, self.period, self.harmonics = columns, period, harmonics

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for column, own in enumerate(x.split(1, -1)):
            if column in self.columns:
                angles = [2 * math.pi * k / self.period * own for k in range(1, self.harmonics + 1)]
                parts += [wave for angle in angles for wave in (torch.cos(angle), torch.sin(angle))]
            else:
                parts.append(own)
        return torch.cat(parts, -1)
