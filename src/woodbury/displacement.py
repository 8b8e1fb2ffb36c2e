"""The step p as a point to evaluate and to move to, formed only where it must be.

    p = base - Z^T c

For a layer whose rows are outer products, (Z^T c)_l = Hbar^T V with Hbar (n, o) and V (n, i): the forward
pass at theta + p is z(v) - (v V^T + 1) Hbar, and the update is one in-place product. Where the layer sees
the very input it saw before (the first layer) z is known and v V^T is the Gram matrix already at hand, so
its weights are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury._vector import Vector
from woodbury.device.numbers import forced, keep
from woodbury.device.scalars import Scalar, Scale, Truth, is_known, ones, scalar
from woodbury.layers.forms import OuterRows
from woodbury.model.call import Call
from woodbury.model.capture import Capture, replaced_forward
from woodbury.model.chain import ChainPass
from woodbury.model.plan import Layer
from woodbury.row_matrix import Rows


class Displacement:
    """p = base - scales * Z^T c for rows Z and coefficients c (r,), or (layers, r) to give each layer its own.

    Either part may be absent. With a base or scales p is formed; otherwise it stays in factors, unless `form` asks
    for it. Then the first layer has its factors too if its products v V^T are at hand: for the trial pass they are
    cheaper.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rows: Rows | None = None,
        coefficients: Tensor | None = None,
        base: Vector | None = None,
        scales: Mapping[str, Scale] | None = None,
        form: bool = False,
    ) -> None:
        self.parameters = parameters
        self._factors: list[tuple[Layer, OuterRows, Tensor]] = []  # layers kept as Hbar^T V
        self._vector: Vector = {}  # parameters whose p is formed
        if rows is None or coefficients is None or base is not None or scales is not None:
            self._vector = _formed(rows, coefficients, base, scales)
        else:
            layers = {layer.name: layer for layer in rows.plan.layers}
            for index, (name, own_rows) in enumerate(rows.forms.items()):
                own = coefficients[index] if coefficients.dim() == 2 else coefficients
                factored = isinstance(own_rows, OuterRows) and own_rows.affine
                if isinstance(own_rows, OuterRows) and factored and (not form or own_rows.inner is not None):
                    self._factors.append((layers[name], own_rows, own_rows.contract(own)))
                if form or not factored:
                    names = rows.plan.owned[name]
                    self._vector |= {names[local]: -value for local, value in own_rows.rmatvec(own).items()}

    def dense(self) -> Vector:
        """p as a dictionary over all trainable parameters."""
        vector = dict(self._vector)
        for layer, form, contracted in self._only_factored():
            if form.weight is not None:
                vector[layer.parameters[form.weight]] = -(contracted.T @ form.inputs)
            if form.bias is not None:
                vector[layer.parameters[form.bias]] = -contracted.sum(0)
        return {
            name: vector[name] if name in vector else torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
        }

    def _only_factored(self) -> list[tuple[Layer, OuterRows, Tensor]]:
        return [
            entry
            for entry in self._factors
            if not any(entry[0].parameters[local] in self._vector for local in entry[1].parameters)
        ]

    def squared_norm(self) -> Scalar:
        """|p|^2, where all of p is formed."""
        assert not self._only_factored()
        norms = [torch.linalg.vector_norm(value) for value in self._vector.values()]
        return scalar(torch.stack(norms).double().square().sum())

    @contextmanager
    def applied(self, capture: Capture | None = None, piece: int = 0) -> Iterator[None]:
        """Inside, the model computes at theta + p; the parameters are bit-identical afterwards.

        capture is the pass over this piece of the batch at theta, if there was one.
        """
        before: list[tuple[nn.Parameter, Tensor]] = []
        forwards = {}
        for layer, form, contracted in self._factors:
            call = None if capture is None else capture.call_of(layer)
            forwards[layer.module] = _displaced_linear(layer.module, form, contracted, call, piece)
        try:
            factored = {layer.parameters[local] for layer, form, _ in self._factors for local in form.parameters}
            for name, change in self._vector.items():
                if name in factored:
                    continue
                parameter = self.parameters[name]
                before.append((parameter, parameter.data))
                parameter.data = parameter.data + change
            with replaced_forward(forwards):
                yield
        finally:
            for parameter, data in before:
                parameter.data = data

    def outputs_along(self, made: ChainPass) -> Tensor:
        """What the chain gives at theta + p for the batch of a pass at theta, where p is formed.

        In factors alone p along a chain is a `ChainDisplacement`.
        """
        outputs = v = made.given[0]
        for index, layer in enumerate(made.chain.layers):
            if index == 0 and self._factors:
                _, form, contracted = self._factors[0]
                assert form.inner is not None
                inner = form.inner.to(contracted.dtype)
                outputs = torch.addmm(made.sums[0], inner, contracted, alpha=-1)  # z is known
            else:
                weight, bias = made.chain.weights[index], made.chain.biases[index]
                outputs = F.linear(v, self._moved(layer, "weight", weight), self._moved(layer, "bias", bias))
            if index + 1 < len(made.chain.layers):
                v = made.chain.activate(index, outputs)
        return outputs

    def _moved(self, layer: Layer, local: str, parameter: Any) -> Any:
        """A parameter of a layer (None where it has none) at theta + p."""
        change = self._vector.get(layer.parameters.get(local, ""))
        return parameter if change is None else parameter + change

    def add_(self, rates: Mapping[str, float | Tensor], accepted: Truth) -> None:
        """theta <- theta + rate p where accepted, rate by parameter name; without waiting for the device.

        To be called under torch.no_grad().
        """
        if is_known(accepted) and not accepted:
            return
        kept = None if is_known(accepted) else forced(accepted)[0]
        for name, change in self._vector.items():
            moved = rates[name] * change if kept is None else keep(change, kept, rates[name])
            self.parameters[name].add_(moved)
        for layer, form, contracted in self._only_factored():
            inputs = form.inputs if kept is None else keep(form.inputs, kept)
            for local in form.parameters:
                name = layer.parameters[local]
                rate, change = rates[name], contracted
                # alpha= takes plain numbers only; where a rate may be either, both must round alike
                if kept is not None:
                    rate, change = 1.0, keep(contracted, kept, rate)
                elif isinstance(rate, Tensor):
                    rate, change = 1.0, rate * contracted
                if local == form.weight:
                    self.parameters[name].addmm_(change.t(), inputs, alpha=-rate)
                else:
                    self.parameters[name].addmv_(
                        change.t(), ones(len(change), change.dtype, change.device), alpha=-rate
                    )


def _formed(
    rows: Rows | None, coefficients: Tensor | None, base: Vector | None, scales: Mapping[str, Scale] | None
) -> Vector:
    """p itself."""
    if rows is None or coefficients is None:
        assert base is not None
        return base
    product = rows.rmatvec(coefficients)
    if scales is not None:
        product = {name: value * scales[name] for name, value in product.items()}
    return {name: -value if base is None else base[name] - value for name, value in product.items()}


def _displaced_linear(
    module: nn.Module, form: OuterRows, contracted: Tensor, call: Call | None, piece: int
) -> Callable[[Tensor], Tensor]:
    """forward of a Linear layer at theta + p: z(v) - (v V^T + 1) Hbar."""
    plain = type(module).forward

    def forward(input: Tensor) -> Tensor:
        if (
            call is not None
            and form.inner is not None
            and call.inputs_intact
            and call.outputs_intact
            and not (input.requires_grad and torch.is_grad_enabled())  # someone differentiates in the inputs
            and _same_memory(input, call.inputs)
        ):
            start = form.layout.offset(piece)
            inner = form.inner[start : start + input.shape[0]].to(contracted.dtype)
            return torch.addmm(call.outputs.detach(), inner, contracted, alpha=-1)
        outputs: Tensor = plain(module, input)
        if form.weight is None:
            return outputs - contracted.sum(0)
        return outputs.addmm_(form.input_gram(input).t(), contracted, alpha=-1)

    return forward


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
