"""The layers of a model, read once and again whenever the model has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from woodbury.model.chain import Chain, read_chain
from woodbury.model.plan import Plan, plan_layers


class Structure:
    """The layers to train, and whether they form a chain."""

    def __init__(self, has_fallback: bool, by_layers: bool, max_bytes: int | None) -> None:
        self.has_fallback = has_fallback
        self.by_layers = by_layers
        self.max_bytes = max_bytes
        self.chain: Chain | None = None  # the model as a chain, if its structure is one
        self.names: list[list[str]] = []  # of the trained parameters in each group
        self._plan: Plan | None = None
        self.groups: tuple[tuple[int, ...], ...] = ()  # the ids of the parameters in each group

    def fresh_copy(self) -> Structure:
        """The same settings before any model was read: for a copy of the optimizer."""
        return Structure(self.has_fallback, self.by_layers, self.max_bytes)

    def read(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan of the model as it is now, for the parameter groups of an optimizer."""
        ids = tuple([tuple(map(id, group["params"])) for group in groups])
        if self._plan is not None and self.groups == ids and self._plan.is_current(model):
            if self.chain is not None and not self.chain.is_current():
                self.chain = None
            return self._plan
        named = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        trained = {names[id(p)] for group in groups for p in group["params"] if id(p) in names}
        if len(trained) < len(named):
            named = {name: parameter for name, parameter in named.items() if name in trained}
        plan = plan_layers(model, named, self.has_fallback, self.by_layers, self.max_bytes)
        if self._plan is not None:
            plan.findings.take_over(self._plan.findings)
        self._plan = plan
        self.groups = ids
        self.names = [[plan.names[own] for own in group if own in plan.names] for group in ids]
        self.chain = read_chain(plan, model) if self.by_layers else None
        return plan
