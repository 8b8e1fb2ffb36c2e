"""One use of parameters during a pass: the inputs and outputs of a layer, and its rows; `Notes` hold them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from woodbury.layers.forms import RowForm
from woodbury.layers.maps import maps_inside, recurrent_forward, recurrent_obstacle, rows_of_map, watch_linear_maps
from woodbury.layers.positions import own_outputs
from woodbury.layers.rules import GIVE_VIEWS, WEIGHT_AND_BIAS, Rule, as_form
from woodbury.layers.sums import Place
from woodbury.model.plan import Layer, Plan


@dataclass
class Call:
    """One use of parameters during a captured forward pass: a call of a layer, or of a linear map inside one."""

    layer: Layer
    arguments: tuple[Tensor, ...]  # the tensors it was called with, attached to the graph
    outputs: Tensor
    edge: GradientEdge  # where gradients in the outputs arrive, also if they are changed in place later
    versions: tuple[int, ...]  # of the inputs and the output at the time of the call
    places: Mapping[str, Place]  # the form's own names -> where, in a parameter of the model, the rows belong
    rule: Rule  # of the layer, or of a linear map inside it
    given: Any = None  # all that the layer was called with, in any nesting

    def __post_init__(self) -> None:
        self.inputs = self.arguments[0].detach()  # of the first argument

    @property
    def inputs_intact(self) -> bool:
        pairs = zip(self.arguments, self.versions, strict=False)
        return all(tensor._version == version for tensor, version in pairs)

    @property
    def is_intact(self) -> bool:
        """Whether inputs and outputs are still what they were at the call."""
        return self.inputs_intact and self.outputs._version == self.versions[-1]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters it uses."""
        return [place.name for place in self.places.values()]

    def form(self, grads: Tensor, dtype: torch.dtype) -> RowForm:
        """The rows for gradients (n, k, ...) in the outputs; of the parameters' dtype."""
        inputs = [tensor.detach() for tensor in self.arguments]
        cast = grads.dtype != dtype
        if cast:  # the pass ran under autocast; rows have the type of the parameters
            grads = grads.to(dtype)
            inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
        module = self.layer.module
        try:
            form = as_form(self.rule(module, inputs[0] if len(inputs) == 1 else tuple(inputs), grads))
        except ValueError as error:
            raise ValueError(f"layer {self.layer.name!r}: {error}") from None
        missing = set(self.places) - set(form.parameters)
        if missing:
            raise ValueError(
                f"the rule for {type(module).__name__} gives no rows for parameter "
                f"{self.places[missing.pop()].name!r}: make it cover every parameter of the layer"
            )
        if cast:
            form = form.only_rows()  # W v + b of a low-precision pass has fewer digits
        return form.restrict(self.places)


class Notes:
    """The calls of a pass over a batch, noted as layers are called; and why some cannot be captured, by layer."""

    def __init__(self, plan: Plan, samples: int, cast: bool) -> None:
        self.calls: list[Call] = []  # in the order they were made
        self.obstacles: dict[str, str] = {}
        self._plan, self._samples, self._cast = plan, samples, cast  # cast: whether the pass runs under autocast

    def forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        """What runs in place of `forward` of each layer, to note its calls."""
        return {layer.module: partial(self._runner(layer), layer) for layer in self._plan.layers}

    def _runner(self, layer: Layer) -> Callable[..., Any]:
        if layer.rule is not maps_inside:
            return self._run_layer
        return self._run_attention if isinstance(layer.module, nn.MultiheadAttention) else self._run_by_steps

    def _run_layer(self, layer: Layer, *args: Any, **kwargs: Any) -> Tensor:
        plain = type(layer.module).forward
        outputs: Tensor = plain(layer.module, *args, **kwargs)
        if outputs.dim() > 2 and layer.rule in GIVE_VIEWS:
            outputs = own_outputs(outputs)
        if kwargs:
            bound = signature(plain).bind(layer.module, *args, **kwargs)
            args = (*bound.args[1:], *bound.kwargs.values())
        tensors = tuple([tensor for tensor in args if isinstance(tensor, Tensor)])
        self._note(layer, tensors, outputs, layer.places, layer.rule, given=args)
        return outputs

    def _run_attention(self, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        plain, report = type(layer.module).forward, partial(self._note_map, layer)
        return watch_linear_maps(plain, self._samples, self._plan.names, report)(layer.module, *args, **kwargs)

    def _run_by_steps(self, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        plain = type(layer.module).forward
        given = signature(plain).bind(layer.module, *args, **kwargs).args[1:]
        obstacle = recurrent_obstacle(layer.module, given, self._samples)
        if obstacle is not None:
            self._leave_out(layer, obstacle)
        elif layer.name not in self._plan.findings.uncapturable:
            return recurrent_forward(layer.module, self._plan.names, partial(self._note_map, layer), *given)
        return plain(layer.module, *args, **kwargs)

    def _note_map(
        self,
        layer: Layer,
        inputs: Tensor,
        outputs: Tensor,
        maps: tuple[Place | None, Place | None],
        factor: Tensor | None = None,
    ) -> None:
        """Note z = W v + b inside a layer, with the places of W and b."""
        places = {own: place for own, place in zip(WEIGHT_AND_BIAS, maps, strict=True) if place is not None}
        self._note(layer, (inputs,), outputs, places, partial(rows_of_map, places, factor))

    def _note(
        self,
        layer: Layer,
        tensors: tuple[Tensor, ...],
        outputs: Tensor,
        places: Mapping[str, Place],
        rule: Rule,
        given: Any = None,
    ) -> None:
        """Add a call to `calls`; one that cannot be captured is left to the fallback, if there is one."""
        constant = not outputs.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
        if constant or layer.name in self._plan.findings.uncapturable or layer.name in self.obstacles:
            return  # constant: called under torch.no_grad()
        obstacle = self._obstacle(layer, tensors[0], outputs, places)
        if obstacle is not None:
            self._leave_out(layer, obstacle)
            return
        versions = (*(tensor._version for tensor in tensors), outputs._version)
        edge = get_gradient_edge(outputs)
        self.calls.append(Call(layer, tensors, outputs, edge, versions, places, rule, given))

    def _leave_out(self, layer: Layer, obstacle: str) -> None:
        """An error with this reason is raised where nothing else gives the rows of the layer."""
        self.obstacles[layer.name] = f"layer {layer.name!r} {obstacle}. Or pass fallback='autograd'"

    def _obstacle(self, layer: Layer, inputs: Tensor, outputs: Tensor, places: Mapping[str, Place]) -> str | None:
        """Why a call cannot be captured, as the end of a sentence; or None."""
        if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
            return (
                "is called inside a torch.func transform, where its rows cannot be captured: use "
                "torch.autograd.grad(..., create_graph=True) instead"
            )
        for what, tensor in (("input", inputs), ("output", outputs)):
            shape = tensor.shape
            if not shape or shape[0] != self._samples:
                return (
                    f"has an {what} of shape {tuple(shape)} in a batch of {self._samples} samples: the first axis "
                    "must be the sample axis. Bring it there (what is the same for all samples: .expand(n, ...))"
                )
        own, plain = layer.module._parameters, places is layer.places
        for local, place in places.items():
            used = self._plan.parameters[place.name]
            if not used.requires_grad or (plain and own.get(local) is not used):
                return (
                    "is called with other parameters than its own (torch.func.functional_call), or with its own "
                    "frozen for the call: use .detach() on values instead"
                )
        if outputs.dtype != used.dtype and used.dtype.itemsize > outputs.dtype.itemsize and not self._cast:
            return (
                f"gives {outputs.dtype} with parameters of {used.dtype} (torch.autocast inside the model?): pass "
                "autocast=torch.bfloat16 to the optimizer, or leave that out"
            )
        return None
