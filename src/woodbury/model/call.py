"""One use of parameters during a pass: the inputs and outputs of a layer, and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from woodbury import _batch
from woodbury.layers.forms import RowForm
from woodbury.layers.registry import as_form
from woodbury.layers.rules import sequence_rows
from woodbury.layers.sums import Place, whole_parameter
from woodbury.model.plan import Layer, Plan


@dataclass
class Call:
    """One use of parameters during a captured forward pass: a call of a layer, or of a linear map inside one."""

    layer: Layer
    arguments: tuple[Tensor, ...]  # the tensors it was called with, attached to the graph
    outputs: Tensor
    edge: GradientEdge  # where gradients in the outputs arrive, also if they are changed in place later
    versions: tuple[int, ...]  # of the inputs and the output at the time of the call
    maps: tuple[Place | None, Place | None] | None = None  # W and b of a linear map inside a layer
    given: Any = None  # all that the layer was called with, in any nesting
    factor: Tensor | None = None  # on gradients in the outputs of a linear map

    def __post_init__(self) -> None:
        self.inputs = self.arguments[0].detach()  # of the first argument

    @property
    def inputs_intact(self) -> bool:
        if len(self.arguments) == 1:
            return self.arguments[0]._version == self.versions[0]
        return all(
            tensor._version == version for tensor, version in zip(self.arguments, self.versions, strict=False)
        )

    @property
    def is_intact(self) -> bool:
        """Whether inputs and outputs are still what they were at the call."""
        return self.inputs_intact and self.outputs._version == self.versions[-1]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters it uses."""
        if self.maps is None:
            return list(self.layer.parameters.values())
        return [place.name for place in self.maps if place is not None]

    def form(self, window: slice | None, grads: Tensor, dtype: torch.dtype) -> RowForm:
        """The rows of a window of samples, for gradients (n, k, ...) in the outputs; of the parameters' dtype."""
        inputs = [tensor.detach() for tensor in self.arguments]
        cast = grads.dtype != dtype
        if cast:  # the pass ran under autocast; rows have the type of the parameters
            grads = grads.to(dtype)
            inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
        if self.factor is not None:
            grads = grads * self.factor.unsqueeze(1)
        if window is not None:
            samples = len(self.outputs)
            inputs = [_batch.part(tensor, window, samples) for tensor in inputs]
            grads = grads[window]
        if self.maps is not None:
            shape = torch.Size((self.outputs.shape[-1], inputs[0].shape[-1]))
            weight, bias = self.maps
            return sequence_rows(inputs[0], grads, shape, weight and "weight", bias and "bias")
        layer = self.layer
        try:
            form = as_form(layer.rule(layer.module, inputs[0] if len(inputs) == 1 else tuple(inputs), grads))
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from None
        missing = set(layer.parameters) - set(form.parameters)
        if missing:
            raise ValueError(
                f"the rule for {type(layer.module).__name__} gives no rows for parameter "
                f"{layer.parameters[missing.pop()]!r}: make it cover every parameter of the layer"
            )
        if cast:
            form = form.only_rows()  # W v + b of a low-precision pass has fewer digits
        return form.restrict(layer.parameters)

    def places(self, plan: Plan) -> dict[str, Place]:
        """The form's own names -> the place in a parameter (by its name in the model) where the rows belong."""
        if self.maps is not None:
            return {own: place for own, place in zip(("weight", "bias"), self.maps, strict=True) if place}
        return {
            own: whole_parameter(full, plan.parameters[full].shape) for own, full in self.layer.parameters.items()
        }
