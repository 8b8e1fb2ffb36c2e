"""Which blocks of B are kept: all of it, or one block per layer (SMW-NG-BD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from woodbury.device.scalars import Scale
from woodbury.model.plan import Plan
from woodbury.row_matrix import Rows


@dataclass(frozen=True)
class Blocks:
    """How the terms of layers form the small system: (r, r), or (b, r, r) for b blocks, one per layer."""

    name: str

    @property
    def is_whole(self) -> bool:
        return self.name == "full"

    def parameter_names(self, plan: Plan) -> list[tuple[str, ...]]:
        """The names of the parameters of each block."""
        return [tuple(plan.parameters)] if self.is_whole else plan.blocks

    def sizes(self, plan: Plan) -> list[int]:
        """The number of parameters in each block."""
        return [plan.size] if self.is_whole else plan.block_sizes

    def gram(self, rows: Rows, scales: Mapping[str, Scale] | None, dtype: torch.dtype | None) -> Tensor:
        """Z D Z^T of each block."""
        if self.is_whole:
            return rows.gram(scales=scales, dtype=dtype)
        return torch.stack(rows.layer_grams(scales=scales, dtype=dtype))

    def join(self, terms: list[Tensor]) -> Tensor:
        """The sum of the terms of each block, from one term per layer."""
        if self.is_whole and len(terms) < 4:
            return reduce(torch.add, terms)
        stacked = torch.stack(terms)
        return stacked.sum(0) if self.is_whole else stacked


BLOCKS = {name: Blocks(name) for name in ("full", "layer")}
