"""Modules for networks: columns in other units, and for differential equations sines and periods."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

CONSTANT = 10  # times the rounding of a column: what varies less does not vary


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
        if not columns or not all(isinstance(own, Integral) for own in columns):
            raise ValueError(f"Periodic needs the columns by their numbers, Periodic(0, 1), got {columns}")
        self.columns, self.period, self.harmonics = columns, period, harmonics

    def forward(self, x: Tensor) -> Tensor:
        parts, d = [], x.shape[-1]
        if not all(-d <= own < d for own in self.columns):
            raise ValueError(f"Periodic has columns {self.columns}, and inputs the shape {tuple(x.shape)}")
        for column, own in enumerate(x.split(1, -1)):
            if column in self.columns or column - d in self.columns:
                angles = [2 * math.pi * k / self.period * own for k in range(1, self.harmonics + 1)]
                parts += [wave for angle in angles for wave in (torch.cos(angle), torch.sin(angle))]
            else:
                parts.append(own)
        return torch.cat(parts, -1)


class Scale(nn.Module):
    """y = shift + factor (x - center), column by column, along the last axis; nothing is trained.

    >>> model = torch.nn.Sequential(woodbury.Scale.inputs(x), network, woodbury.Scale.targets(y))

    The network in between sees inputs from -1 to 1 and has to give targets of mean 0 and deviation 1; the model
    takes and gives the units of x and y, and losses are in these units too. The numbers are buffers, saved by
    `state_dict`. `Scale(columns)` leaves its input as it is: load a `state_dict` into it.
    """

    center: Tensor
    factor: Tensor
    shift: Tensor

    def __init__(self, columns: int | None = None) -> None:
        super().__init__()
        size = () if columns is None else (columns,)  # one number for everything, or one per column
        for name, value in (("center", 0.0), ("factor", 1.0), ("shift", 0.0)):
            self.register_buffer(name, torch.full(size, value))

    @classmethod
    def inputs(cls, values: Any) -> Scale:
        """From inputs (n, ..., columns) to -1 ... 1: a first layer. Constant columns become 0."""
        columns = _columns(values)
        low, high = columns.amin(0) / 2, columns.amax(0) / 2
        return cls._with(center=low + high, factor=1 / _spread(high - low, columns))

    @classmethod
    def targets(cls, values: Any) -> Scale:
        """From mean 0 and deviation 1 to targets like these (n, ..., columns), or (n,): a last layer."""
        columns = _columns(values)
        return cls._with(shift=columns.mean(0), factor=_spread(columns.std(0, correction=0), columns))

    @classmethod
    def _with(cls, factor: Tensor, **others: Tensor) -> Scale:
        scale = cls(*factor.shape).to(factor)
        scale.load_state_dict({**scale.state_dict(), "factor": factor, **others})
        return scale

    def forward(self, inputs: Tensor) -> Tensor:
        if self.factor.dim() and inputs.shape[-1:] != self.factor.shape:
            raise ValueError(f"Scale has {len(self.factor)} columns, and inputs the shape {tuple(inputs.shape)}")
        scaled = self.shift + self.factor * (inputs - self.center)
        return scaled.to(inputs.dtype) if inputs.is_floating_point() else scaled


def _columns(values: Any) -> Tensor:
    """(n, columns), or (n,), of a tensor, an array, a table or a list."""
    values = values.to_numpy() if hasattr(values, "to_numpy") else values
    values = torch.as_tensor(values, dtype=torch.float64 if isinstance(values, list) else None).detach()
    if not values.dim() or not len(values):
        raise ValueError(f"Scale needs samples (n, columns), got the shape {tuple(values.shape)}")
    columns = values.flatten(0, -2) if values.dim() > 1 else values
    bad = (~torch.isfinite(columns)).reshape(len(columns), -1).any(0).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"Scale: nan or inf in column {', '.join(map(str, bad[:10]))}")
    return columns if columns.is_floating_point() else columns.double()


def _spread(spread: Tensor, columns: Tensor) -> Tensor:
    """The same, and 1 where a column is constant to rounding."""
    least = CONSTANT * torch.finfo(columns.dtype).eps * columns.abs().amax(0)
    return torch.where(spread > least, spread, 1.0)
