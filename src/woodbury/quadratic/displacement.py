"""The step p: evaluate the model at theta + p, and move there; formed only where needed.

    p = p0 + Z^T c

For a layer whose rows are outer products, (Z^T c)_l = Hbar^T V with Hbar (n, o) and V (n, i): the forward
pass at theta + p is z(v) + (v V^T + 1) Hbar, and the update is one in-place product. Where a layer gets the
same input as before (the first layer), z and v V^T are known, and its weights are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from woodbury._vector import Parts, Vector
from woodbury.device.constants import ones
from woodbury.device.scalars import Scalar, Truth, compute, is_known, scaled_if
from woodbury.layers.forms import OuterSum
from woodbury.linalg import sum_of_squares
from woodbury.model.capture import moved_model
from woodbury.model.chain import MovedForward
from woodbury.model.plan import Layer, Plan
from woodbury.model.terms import Capture
from woodbury.row_matrix import Rows

Rates = Mapping[str, float | Tensor]  # by parameter name


class _Factored(NamedTuple):
    """The part of p in one layer, which is a sum of its rows. The rows themselves are let go."""

    layer: Layer
    total: OuterSum


class Displacement:
    """p = Z^T c for rows Z and coefficients c (r,), or (layers, r) to give each layer its own; or any p (`of`).

    In layers whose rows are outer products it stays factored. With `form` p is formed, and the first layer is
    factored as well if v V^T is known: that is cheaper in the trial pass.
    """

    def __init__(self, plan: Plan, rows: Rows, coefficients: Tensor, form: bool = False) -> None:
        self.plan = plan
        self._factored: list[_Factored] = []
        self._vector: Vector | None = None  # p, where all of it is formed
        self._formed, self._is_formed = {}, form
        by_layer = coefficients.dim() == 2
        for index, (name, layer_rows) in enumerate(rows.forms.items()):
            c = coefficients[index] if by_layer else coefficients
            total = layer_rows.factored_sum(c)
            if total is not None and (not form or total.inner is not None):
                self._factored.append(_Factored(rows.plan.layer_named[name], total))
            if form or total is None:
                names, parts = rows.plan.owned[name], layer_rows.rmatvec(c) if total is None else total.dense()
                self._formed |= {names[local]: value for local, value in parts.items()}
        if self._formed and (form or not self._factored):
            self._vector = plan.space.pack(self._formed)

    @classmethod
    def of(cls, plan: Plan, vector: Vector) -> Displacement:
        """p as it is given."""
        displacement = cls.__new__(cls)
        displacement.plan, displacement._vector = plan, vector
        displacement._factored, displacement._is_formed = [], True
        return displacement

    @cached_property
    def _formed(self) -> Parts:
        """Parameters whose p is formed: all, of a p as it is given."""
        assert self._vector is not None
        return self._vector.parts

    def dense(self) -> Vector:
        """p."""
        if self._vector is None:
            parts = dict(self._formed)
            for layer, total in self._factored:
                parts |= {layer.parameters[local]: value for local, value in total.dense().items()}
            self._vector = self.plan.space.pack(parts)
        return self._vector

    def squared_norm(self) -> Scalar:
        """|p|^2, where all of p is formed."""
        assert self._vector is not None
        norms = torch.stack(torch._foreach_norm(list(self._formed.values())))
        return sum_of_squares(norms.double())

    def outputs_on(self, capture: Capture, piece: int = 0) -> Tensor:
        """The outputs at theta + p for this piece of the batch; capture is its pass at theta."""
        return capture.run_again(self._changes(), self._forwards(capture, piece))

    def applied(self, plan: Plan) -> AbstractContextManager[None]:
        """Inside, the model computes at theta + p; the parameters are bit-identical afterwards."""
        return moved_model(plan, self._changes(), self._forwards(None, 0))

    def add_(self, rates: Rates, accepted: Truth | Tensor, versions: Mapping[str, int] | None = None) -> None:
        """theta <- theta + rate p where accepted; does not wait for the device.

        Call it under torch.no_grad(). Parameters whose version is not the one in `versions` any more have moved
        already: so the call can be repeated after an interrupt.
        """
        parameters: Mapping[str, nn.Parameter] = self.plan.parameters
        if versions is not None:
            parameters = {name: theta for name, theta in parameters.items() if theta._version == versions[name]}
        holds = None  # the step is known to be accepted
        if not is_known(accepted):
            holds = compute(accepted)[0].bool()
        elif not accepted:
            return
        if self._formed:
            self._add_formed(parameters, rates, holds)
        if not self._is_formed:
            for part in self._factored:
                _add_factored(part, parameters, rates, holds)

    def _add_formed(self, parameters: Mapping[str, nn.Parameter], rates: Rates, holds: Tensor | None) -> None:
        names = [name for name in self._formed if name in parameters]
        if not names:
            return
        changes, rate = [self._formed[name] for name in names], rates[names[0]]
        on_device = isinstance(rate, Tensor) and rate.is_cuda
        if holds is not None or on_device or len({id(rates[name]) for name in names}) > 1:
            each = zip(names, changes, strict=True)
            changes = [
                rates[name] * change if holds is None else scaled_if(holds, change, rates[name])
                for name, change in each
            ]
            rate = 1.0
        torch._foreach_add_([parameters[name] for name in names], changes, alpha=float(rate))

    def _changes(self) -> Mapping[str, Tensor]:
        """What the trial pass adds to parameters: p of the layers that are not factored."""
        if not self._factored or not self._is_formed:
            return self._formed
        factored = {part.layer.parameters[local] for part in self._factored for local in part.total.parameters}
        return {name: change for name, change in self._formed.items() if name not in factored}

    def _forwards(self, capture: Capture | None, piece: int) -> dict[str, MovedForward]:
        return {part.layer.name: partial(_moved_linear, part, capture, piece) for part in self._factored}


def _add_factored(
    part: _Factored, parameters: Mapping[str, nn.Parameter], rates: Rates, holds: Tensor | None
) -> None:
    """theta <- theta + rate Hbar^T V where `holds`, None for true."""
    layer, total = part
    contracted, inputs = total.contracted, total.inputs
    if holds is not None:
        inputs = scaled_if(holds, inputs)
    last_rate, change = None, contracted.t()
    for local, name in layer.parameters.items():
        if name not in parameters or local not in (total.weight, total.bias):
            continue
        rate = rates[name]
        # alpha= takes plain numbers only; a rate that is a tensor must round in the same way
        if holds is not None or isinstance(rate, Tensor):
            if rate is not last_rate:
                scaled = rate * contracted if holds is None else scaled_if(holds, contracted, rate)
                last_rate, change = rate, scaled.t()
            rate = 1.0
        if local == total.weight:
            parameters[name].addmm_(change, inputs, alpha=rate)
        else:
            all_samples = ones(contracted.shape[0], contracted.dtype, contracted.device)
            parameters[name].addmv_(change, all_samples, alpha=rate)


def _moved_linear(
    part: _Factored, capture: Capture | None, piece: int, plain: Callable[[Tensor], Tensor], input: Tensor
) -> Tensor:
    """A Linear layer at theta + p: z(v) + (v V^T + 1) Hbar, with z and v V^T from a pass where known."""
    layer, total = part
    call = None if capture is None or total.inner is None else capture.call_of(layer.name)
    if (
        call is not None
        and total.inner is not None
        and not (input.requires_grad and torch.is_grad_enabled())  # the model differentiates in its inputs
        and _same_memory(input, call[0])
    ):
        inner, contracted = total.inner, total.contracted
        if inner.dtype != contracted.dtype:
            inner = inner.to(contracted.dtype)
        if inner.shape[0] != input.shape[0]:
            start = sum(n for n, _ in total.pieces[:piece])
            inner = inner[start : start + input.shape[0]]
        outputs = call[1]
        # with gradients on the pass must look as it did at theta (torch's attention asks what needs a gradient)
        if outputs.requires_grad and not torch.is_grad_enabled():
            outputs = outputs.detach()
        return torch.addmm(outputs, inner, contracted)
    return total.outputs_after(input, plain(input))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
