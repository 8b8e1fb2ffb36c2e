"""Which blocks of B are kept: all of it, or one block per layer (SMW-NG-BD)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from woodbury.device.scalars import Scale
from woodbury.model.plan import Plan
from woodbury.row_matrix import Rows


class Blocks(ABC):
    """How the terms of layers form the small system: (r, r), or (b, r, r) for b blocks."""

    name: ClassVar[str]

    @abstractmethod
    def parameter_names(self, plan: Plan) -> list[tuple[str, ...]]:
        """The names of the parameters of each block."""

    @abstractmethod
    def gram(self, rows: Rows, scales: Mapping[str, Scale] | None, dtype: torch.dtype | None) -> Tensor:
        """Z D Z^T of each block."""

    @abstractmethod
    def join(self, terms: list[Tensor]) -> Tensor:
        """The sum of the terms of each block, from one term per layer."""

    def sizes(self, plan: Plan) -> list[int]:
        """The number of parameters in each block."""
        return plan.block_sizes


class OneBlock(Blocks):
    """All of B."""

    name = "full"

    def parameter_names(self, plan: Plan) -> list[tuple[str, ...]]:
        return [tuple(plan.parameters)]

    def gram(self, rows: Rows, scales: Mapping[str, Scale] | None, dtype: torch.dtype | None) -> Tensor:
        return rows.gram(scales=scales, dtype=dtype)

    def join(self, terms: list[Tensor]) -> Tensor:
        return torch.stack(terms).sum(0)

    def sizes(self, plan: Plan) -> list[int]:
        return [plan.size]


class LayerBlocks(Blocks):
    """B without the entries between parameters of two layers."""

    name = "layer"

    def parameter_names(self, plan: Plan) -> list[tuple[str, ...]]:
        return plan.blocks

    def gram(self, rows: Rows, scales: Mapping[str, Scale] | None, dtype: torch.dtype | None) -> Tensor:
        return torch.stack(rows.layer_grams(scales=scales, dtype=dtype))

    def join(self, terms: list[Tensor]) -> Tensor:
        return torch.stack(terms)


BLOCKS: dict[str, Blocks] = {kind.name: kind for kind in (OneBlock(), LayerBlocks())}
