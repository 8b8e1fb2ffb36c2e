"""Curvature of the last batches too: B is the mean over their curvature samples, each at the theta of its step.

Momentum averages gradients over many batches, and B of one small batch is no match for it. With the rows U_0 of
this batch and U_1, ..., U_m of the m batches before, and their divisors D_0, ..., D_m,

    B = (U_0^T U_0 + ... + U_m^T U_m) / (D_0 + ... + D_m)

Kept rows cost no pass through the model. They stand in front of Z with e = 0, since g is that of this batch alone,
and their Gram matrix is kept too: a step computes the products of its own rows with all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from woodbury.device.constants import zeros
from woodbury.device.scalars import Scalar
from woodbury.layers.forms import RowForm, concatenate_forms
from woodbury.layers.outer import form_of_state
from woodbury.model.plan import Plan
from woodbury.quadratic.quadratic import Quadratic
from woodbury.row_matrix import Rows


class KeptBatch(NamedTuple):
    """The factor rows of one batch."""

    forms: Mapping[str, RowForm]
    rows: int
    divisor: Scalar


class Kept(NamedTuple):
    """The factor rows of the last batches, the oldest first."""

    batches: tuple[KeptBatch, ...] = ()
    gram: Tensor | None = None  # of all of them, where it was formed
    plan: Plan | None = None  # of the model they belong to

    @property
    def rows(self) -> int:
        return sum([batch.rows for batch in self.batches])

    def as_state(self) -> dict[str, Any]:
        """What a `state_dict` holds of them: all, or nothing where rows of a layer are stored in parts."""
        batches = []
        for batch in self.batches:
            forms = {name: form.as_state() for name, form in batch.forms.items()}
            if None in forms.values():
                return {}
            batches.append({"rows": batch.rows, "divisor": float(batch.divisor), "forms": forms})
        return {"batches": batches, "gram": self.gram}

    @classmethod
    def read(cls, state: Kept | Mapping[str, Any], plan: Plan) -> Kept:
        """The rows that a step left behind or a `state_dict` holds; none if they are those of another model."""
        if isinstance(state, Kept):
            return state if state.plan is plan else cls(plan=plan)
        batches = []
        for batch in state.get("batches", ()):
            forms = {name: form_of_state(form, plan.device, plan.dtype) for name, form in batch["forms"].items()}
            batches.append(KeptBatch(forms, batch["rows"], batch["divisor"]))
        gram = state.get("gram")
        return cls(tuple(batches), None if gram is None else gram.to(plan.device), plan)


def with_memory(quadratic: Quadratic, kept: Kept, most: int, needs_gram: bool) -> tuple[Quadratic, Kept]:
    """The quadratic model with the rows of the batches before, and what to keep for the next step.

    Without needs_gram (in a metric, which is another at every step) no Gram matrix is formed.
    """
    rows, count, plan = quadratic.all_rows, quadratic.curvature_rows, quadratic.plan
    dtype = quadratic.gram_dtype
    new, before = KeptBatch(rows.head_forms(count), count, quadratic.divisor), kept.rows
    gram = rows.gram(dtype=dtype) if needs_gram else None
    if kept.batches:
        earlier = [batch.forms for batch in kept.batches]
        forms = concatenate_forms([*earlier, rows.forms])
        if gram is not None:
            old = Rows(plan, concatenate_forms(earlier), before)
            cross = old.gram(rows, dtype=dtype)
            first = old.gram(dtype=dtype) if kept.gram is None else kept.gram
            gram = torch.cat([torch.cat([first, cross], 1), torch.cat([cross.t(), gram], 1)])
        e = quadratic.factor_weights
        quadratic = replace(
            quadratic,
            # no longer those of the pieces of one batch
            rows=Rows(plan, {name: form.only_rows() for name, form in forms.items()}, before + rows.row_count),
            curvature_rows=before + count,
            divisor=sum([batch.divisor for batch in kept.batches], quadratic.divisor),
            e=torch.cat([zeros(before, e.dtype, e.device), e]),
            _gram=None,
        )
    batches = (*kept.batches, new)
    if gram is not None:
        quadratic._gram = gram
        window = slice(sum([batch.rows for batch in batches[:-most]]), before + count)
        gram = gram[window, window]
    return quadratic, Kept(batches[-most:], gram, plan)
