"""Rows of any model, by backward passes through the graph of a pass that were batched over columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from woodbury._vector import Parts
from woodbury.layers.forms import ExplicitRows, RowForm
from woodbury.layers.sums import Place, Use, sum_uses
from woodbury.model.bare import Bare, find_bare
from woodbury.model.call import Call
from woodbury.model.fallback import Pass, WrittenRows, grads_of_many, tells_little
from woodbury.model.graph import PassGraph, unseen_parameters


@dataclass
class NotedPass(Pass):
    """A pass with the calls of its layers. Rows come from layer rules, bare parameters, and else the fallback."""

    calls: list[Call]  # in the order they were made
    obstacles: Mapping[str, str]  # layers whose calls were not captured, and why

    def rows_of_modules(self, columns: Tensor) -> Mapping[str, RowForm]:
        """The rows of every module for columns (n, k, C) of all samples; it frees the graph."""
        graph = PassGraph.behind(self.outputs)
        unseen = unseen_parameters(self.plan, graph, self.calls)
        forms: dict[str, RowForm] | None = None
        while forms is None:  # rows of bare parameters that were wrong are not tried again
            forms = self._attempt(columns, *self._without_rules(graph, unseen))
        # in other batches an axis may look like that of the samples
        self.plan.findings.leave_out(self.obstacles)
        return forms

    def _without_rules(self, graph: PassGraph, unseen: Mapping[str, str]) -> tuple[Bare, list[str]]:
        """Where rows come from that no rule gives: bare parameters, and those left to the fallback.

        Raises an error that names a parameter where the fallback is needed and there is none.
        """
        plan = self.plan
        hindered = [plan.layer_named[layer] for layer in self.obstacles]
        own = [name for layer in hindered for name in layer.parameters.values()]
        lacking = list(dict.fromkeys([*plan.uncovered, *unseen, *own]))
        blocks = {plan.block_of[name][0] for name in lacking}
        wanted = [full for block in plan.owned if block in blocks for full in plan.owned[block].values()]
        bare = find_bare(plan, graph, wanted, len(self.outputs))
        written = [name for name in wanted if name not in bare.keys]
        if written and not plan.has_fallback:
            blocks = {plan.block_of[name][0] for name in written}
            culprits = [name for name in lacking if plan.block_of[name][0] in blocks]
            culprits.sort(key=lambda name: (name in bare.keys, tells_little(name)))  # those that tell most first
            raise ValueError(self._refusal(culprits, unseen))
        return bare, written

    def _refusal(self, names: Sequence[str], unseen: Mapping[str, str]) -> str:
        """Why parameters have no rows, and the ways out."""
        plan, name = self.plan, names[0]
        if name in plan.uncovered:
            return plan.uncovered[name]
        obstacles = {**plan.findings.uncapturable, **self.obstacles}
        for layer in plan.layers:
            if layer.name in obstacles and not set(names).isdisjoint(layer.parameters.values()):
                return obstacles[layer.name]
        return (
            f"parameter {name!r} is used outside the forward call of its module {unseen[name]!r}, where no rule "
            "sees it (directly, or because the network is differentiated in its inputs). Two ways out: call the "
            "module itself, or pass fallback='autograd'"
        )

    def _attempt(self, columns: Tensor, bare: Bare, written: Sequence[str]) -> dict[str, RowForm] | None:
        """The rows; None if those of bare parameters turned out to be wrong."""
        plan = self.plan
        rows = self._by_fallback(columns, written)
        explicit = {plan.block_of[name][0] for name in (*written, *bare.keys)}
        ruled = plan.owned.keys() - explicit
        calls = [call for call in self.calls if any(plan.block_of[name][0] in ruled for name in call.parameters)]
        unsure = not bare.is_checked(columns.shape)
        keep_graph = unsure or bare.goes_back_again
        edges = [*(call.edge for call in calls), *(meeting.edge for meeting in bare.meetings)]
        grads = self._grads(edges, columns, keep_graph)
        if bare.keys:
            bare_rows = bare.rows(grads[len(calls) :], columns.shape)
            if unsure and not bare.check(bare_rows, self, columns):
                return None
            rows |= bare_rows
        forms = self._by_rules(calls, grads, ruled)
        for block in explicit:  # (n, k, *shape) of each of its parameters
            names = plan.owned[block]
            own = {local: rows[full].flatten(0, 1).detach() for local, full in names.items()}
            forms[block] = ExplicitRows(own)
        return {block: forms[block] for block in plan.owned if block in forms}

    def _by_fallback(self, columns: Tensor, names: Sequence[str]) -> Parts:
        """Rows (n, k, *shape) of some parameters, written out."""
        if not names:
            return {}
        parameters = {name: self.plan.parameters[name] for name in names}
        return WrittenRows(self, parameters, columns).compute()

    def _by_rules(
        self, calls: Sequence[Call], grads: Sequence[Tensor | None], ruled: Collection[str]
    ) -> dict[str, RowForm]:
        """Rows of modules whose parameters are used in calls alone."""
        plan = self.plan
        uses: dict[str, list[Use]] = {}
        for call, grad in zip(calls, grads, strict=False):
            if grad is not None:
                form = call.form(grad.transpose(0, 1), plan.dtype).within(plan.max_bytes)
                for block, use in self._by_block(call, form).items():
                    uses.setdefault(block, []).append(use)
        forms: dict[str, RowForm] = {}
        for block in ruled & uses.keys():
            shapes = {local: plan.parameters[full].shape for local, full in plan.owned[block].items()}
            forms[block] = sum_uses(uses[block], shapes, plan.max_bytes)
        return forms

    def _by_block(self, call: Call, form: RowForm) -> dict[str, Use]:
        """The rows of a call, split by the modules its parameters belong to."""
        uses: dict[str, dict[str, Place]] = {}
        for own, place in call.places.items():
            block, local = self.plan.block_of[place.name]
            uses.setdefault(block, {})[own] = place._replace(name=local)
        if set(uses) != {call.layer.name}:
            form = form.only_rows()  # the module also depends on parameters of others
        return {block: Use(form.restrict(places), places) for block, places in uses.items()}

    def _grads(self, edges: Sequence[GradientEdge], columns: Tensor, keep_graph: bool) -> Sequence[Tensor | None]:
        """Gradients that arrive at edges, (k, *shape) each, or None where they have no effect."""
        if not edges:
            return []
        if columns.shape[1] == 1:
            grads = torch.autograd.grad(
                self.outputs, edges, columns[:, 0], retain_graph=keep_graph, allow_unused=True
            )
            return [None if grad is None else grad.unsqueeze(0) for grad in grads]
        return grads_of_many(self.outputs, edges, columns.transpose(0, 1), self._warn_of_columns)

    def _warn_of_columns(self, count: int) -> None:
        """Say once that columns go back one at a time."""
        self.plan.findings.warn_of_passes(
            count,
            "an operation in it cannot be differentiated for several columns of a sample at once. Ways out: "
            "another operation in its place, fewer outputs, or NaturalGradient, which has one column per sample",
        )
