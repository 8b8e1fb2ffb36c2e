"""Plain chains of Linear layers and activations, run and differentiated by hand.

    z_l = W_l v_l + b_l,   v_{l+1} = phi_l(z_l),   outputs = z_L, or v_{L+1} if an activation comes last

A chain needs no autograd graph: h_l = (h_{l+1} W_{l+1}) phi'(z_l) carries any number of columns back by one
product per layer (the paper's Algorithm 5). An `nn.Sequential`, with or without `nn.Flatten` and `Scale` in front,
is a chain by its structure, whatever the data: `read_chain` returns it, and a pass is a `ChainCapture`. Any other
model, and one with frozen parameters, is run by `woodbury.model.capture`, which uses `chain_rows` where the graph
of a pass is a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury._process import has_global_hook, hooks_of
from woodbury._vector import Parts
from woodbury.layers.forms import OuterSum, linear
from woodbury.layers.outer import OuterRows, layout_of
from woodbury.layers.rules import has_own_parameters, linear_rows
from woodbury.model.plan import Layer, Plan, plan_layers
from woodbury.modules import Scale, Sine

aten = torch.ops.aten


class Activation(NamedTuple):
    """The functions (module, z) -> phi(z) and (module, z, v = phi(z), h) -> h phi'(z)."""

    forward: Callable[[Any, Tensor], Tensor]
    backward: Callable[[Any, Tensor, Tensor, Tensor], Tensor]


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: Activation(nn.Sigmoid.forward, lambda module, z, v, h: aten.sigmoid_backward.default(h, v)),
    nn.Tanh: Activation(nn.Tanh.forward, lambda module, z, v, h: aten.tanh_backward.default(h, v)),
    nn.ReLU: Activation(
        lambda module, z: torch.relu(z), lambda module, z, v, h: aten.threshold_backward.default(h, v, 0)
    ),
    nn.SiLU: Activation(lambda module, z: F.silu(z), lambda module, z, v, h: aten.silu_backward.default(h, z)),
    nn.GELU: Activation(
        lambda module, z: F.gelu(z, approximate=module.approximate),
        lambda module, z, v, h: aten.gelu_backward.default(h, z, approximate=module.approximate),
    ),
    nn.Softplus: Activation(
        lambda module, z: F.softplus(z, module.beta, module.threshold),
        lambda module, z, v, h: aten.softplus_backward.default(h, z, module.beta, module.threshold),
    ),
    nn.ELU: Activation(
        lambda module, z: F.elu(z, module.alpha),
        lambda module, z, v, h: aten.elu_backward.default(h, module.alpha, 1.0, 1.0, False, z),
    ),
    nn.LeakyReLU: Activation(
        lambda module, z: F.leaky_relu(z, module.negative_slope),
        lambda module, z, v, h: aten.leaky_relu_backward.default(h, z, module.negative_slope, False),
    ),
    Scale: Activation(Scale.forward, lambda module, z, v, h: h * module.factor.to(h.dtype)),
    Sine: Activation(Sine.forward, lambda module, z, v, h: h * (module.omega * torch.cos(module.omega * z))),
}


Back = Callable[[Tensor], Tensor]  # gradients in v = phi(z), (n, o) -> gradients in z
# (the layer's own forward, its input) -> its output at other parameters
MovedForward = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def chain_rows(
    layers: Sequence[Layer],
    weights: Sequence[Tensor],
    layer_inputs: Sequence[Tensor],
    backs: Sequence[Back],
    segments: Sequence[Tensor],
) -> dict[str, OuterRows]:
    """Rows of a chain, from the inputs v (n, i) of its layers and gradients h (r, o) in their outputs.

    segments are columns (m, k, C), or (m, C) for one per sample, of consecutive samples. backs belong to the
    activations between layers, and to one after the last layer if there is one.
    """
    samples = layer_inputs[0].shape[0]
    layout = layout_of(tuple([(c.shape[0], c.shape[1] if c.dim() == 3 else 1) for c in segments]))
    flat = [columns.flatten(0, 1) if columns.dim() == 3 else columns for columns in segments]
    grads = [flat[0] if len(flat) == 1 else torch.cat(flat)]
    is_plain = layout.samples == samples and layout.is_plain

    def apply(back: Back, own: Tensor) -> Tensor:
        if is_plain:
            return back(own)
        slopes = back(own.new_ones(samples, own.shape[1]))
        layout.multiply_(own, slopes if layout.samples == samples else slopes[: layout.samples])
        return own

    if len(backs) == len(weights):
        *backs, last = backs
        grads = [apply(last, grads[0].clone())]
    for matrix, back in zip(reversed(weights), reversed(backs), strict=False):
        grads.append(apply(back, grads[-1].mm(matrix)))
    forms: dict[str, OuterRows] = {}
    for layer, inputs, own in zip(layers, layer_inputs, reversed(grads), strict=True):
        weight = "weight" if "weight" in layer.parameters else None
        bias = "bias" if "bias" in layer.parameters else None
        inputs = inputs if inputs.shape[0] == layout.samples else inputs[: layout.samples]
        forms[layer.name] = OuterRows(inputs, own, layout, weight, bias, affine=True)
    return forms


@dataclass(frozen=True, eq=False)
class Chain:
    """A model that is a chain by its structure."""

    plan: Plan
    modules: tuple[nn.Module, ...]  # all of them
    layers: tuple[Layer, ...]
    weights: tuple[nn.Parameter, ...]  # one per layer
    biases: tuple[nn.Parameter | None, ...]
    activations: tuple[nn.Module, ...]  # after each layer; after the last one there may be none
    before: tuple[nn.Module, ...]  # the first layer: Flatten and Scale

    @cached_property
    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """v -> W v + b of each layer."""
        pairs = zip(self.weights, self.biases, strict=True)
        return [partial(linear, weight=weight, bias=bias) for weight, bias in pairs]

    def is_current(self) -> bool:
        """Whether the modules of a plan that is current still compute W v + b, and run without hooks."""
        if has_global_hook():
            return False
        for layer, bias in zip(self.layers, self.biases, strict=True):
            if layer.module._parameters.get("bias") is not bias:
                return False
        for own in self.before:
            if isinstance(own, nn.Flatten) and (own.start_dim, own.end_dim) != (1, -1):
                return False
        for module in self.modules:
            kind = type(module)
            # a forward of its own, or one replaced for the whole class
            if any(hooks_of(module)) or "forward" in module.__dict__ or kind.forward is not _FORWARDS.get(kind):
                return False
        return True

    def takes(self, inputs: Any) -> bool:
        """Whether a batch, flattened, holds vectors of the right size, and of the parameters' type and device."""
        weight = self.weights[0]
        return (
            type(inputs) is Tensor
            and (inputs.dim() == 2 or (inputs.dim() > 2 and any(type(own) is nn.Flatten for own in self.before)))
            and inputs.numel() == inputs.shape[0] * weight.shape[1]
            and inputs.dtype == weight.dtype
            and inputs.device == weight.device
            and not inputs.requires_grad
        )

    def run(self, inputs: Tensor) -> ChainCapture:
        """A pass over a batch (n, i), or one that flattens to it. Call it under torch.no_grad()."""
        for module in self.before:
            if type(module) is Scale:
                inputs = module.forward(inputs)
            elif inputs.dim() > 2:
                inputs = inputs.flatten(1)
        layer_inputs, sums = [inputs], []
        for index, apply in enumerate(self.maps):
            z = apply(layer_inputs[-1])
            sums.append(z)
            if index < len(self.activations):
                layer_inputs.append(self.activate(index, z))
        return ChainCapture(self, layer_inputs, sums)

    def activate(self, index: int, z: Tensor) -> Tensor:
        """The input of layer index + 1, from z of layer index."""
        module = self.activations[index]
        return ACTIVATIONS[type(module)].forward(module, z)


@dataclass
class ChainCapture:
    """A pass along a chain: v_l (n, i), the inputs of its layers and after them the outputs, and z_l (n, o)."""

    chain: Chain
    layer_inputs: list[Tensor]
    sums: list[Tensor]

    def __post_init__(self) -> None:
        last = self.sums if len(self.layer_inputs) == len(self.sums) else self.layer_inputs
        self.outputs = self.raw = last[-1]  # (n, C)

    @property
    def plan(self) -> Plan:
        return self.chain.plan

    def rows(self, segments: Sequence[Tensor]) -> dict[str, OuterRows]:
        """Rows of every layer for columns (m, k, C), or (m, C), of consecutive samples."""
        inputs = self.layer_inputs[: len(self.sums)]
        return chain_rows(self.chain.layers, self.chain.weights, inputs, self._backs(), segments)

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_i J_i^T weights_i for weights (n, C), as a dictionary over all trainable parameters."""
        gradient: dict[str, Tensor] = {}
        for layer, form in zip(self.chain.layers, self.rows([weights]).values(), strict=True):
            # one row per sample, to be summed
            total = OuterSum(form.inputs, form.grads, form.weight, form.bias)
            gradient |= {layer.parameters[local]: value for local, value in total.dense().items()}
        return {name: gradient[name] for name in self.plan.parameters}

    def call_of(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """The inputs and outputs of the first layer; in a trial pass no other gets the same inputs again."""
        first = self.chain.layers[0].name
        return (self.layer_inputs[0], self.sums[0]) if layer == first else None

    def run_again(self, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Tensor:
        """The outputs with `changes` added to the parameters; `forwards` compute the layers they name."""
        chain, v, parameters = self.chain, self.layer_inputs[0], self.plan.parameters
        moved: dict[str, Tensor] = {}
        if changes:
            before: list[Tensor] = [parameters[name] for name in changes]
            moved = dict(zip(changes, torch._foreach_add(before, [*changes.values()]), strict=True))
        for index, layer in enumerate(chain.layers):
            forward = forwards.get(layer.name)
            if forward is not None:
                z = forward(chain.maps[index], v)
            else:
                names = layer.parameters
                weight = moved.get(names["weight"], chain.weights[index])
                z = linear(v, weight, moved.get(names.get("bias", ""), chain.biases[index]))
            v = chain.activate(index, z) if index < len(chain.activations) else z
        return v

    def push_forward(self, vectors: Sequence[Parts]) -> Tensor:
        """J p of each vector, (k, n, C): z' = W v' + W' v + b', v' = phi'(z) z'."""
        below: Tensor | None = None  # v', (k, n, i)
        for index, layer in enumerate(self.chain.layers):
            names = layer.parameters.items()
            change = {local: torch.stack([vector[full] for vector in vectors]) for local, full in names}
            below = self._moved(index, below, change, self.layer_inputs[index])
            if index < len(self.chain.activations):
                below = below * self._slope(index)
        assert below is not None
        return below

    def second_derivative(self, vector: Parts) -> Tensor:
        """d^2/dt^2 of the outputs along a vector: z'' = W v'' + 2 W' v', v'' = phi'(z) z'' + phi''(z) z'^2."""
        first: Tensor | None = None  # v', (n, i)
        second: Tensor | None = None  # v''
        for index, layer in enumerate(self.chain.layers):
            change = {local: vector[full] for local, full in layer.parameters.items()}
            z1 = self._moved(index, first, change, self.layer_inputs[index])
            z2 = torch.zeros_like(z1)
            if first is not None and second is not None:
                z2 = 2 * first @ change["weight"].T + second @ self.chain.weights[index].detach().T
            first, second = z1, z2
            if index < len(self.chain.activations):
                slope, curve = self._slope(index), self._curve(index)
                first, second = slope * z1, slope * z2 + curve * z1.square()
        assert second is not None
        return second

    def _moved(self, index: int, below: Tensor | None, change: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """z' of a layer: W v' + W' v + b' for v' = below, zero for None."""
        image = inputs @ change["weight"].mT
        if below is not None:
            image = image + below @ self.chain.weights[index].detach().T
        return image + change["bias"].unsqueeze(-2) if "bias" in change else image

    def _slope(self, index: int) -> Tensor:
        """phi'(z) of an activation."""
        return self._backs()[index](torch.ones_like(self.sums[index]))

    def _curve(self, index: int) -> Tensor:
        """phi''(z) of an activation."""
        module = self.chain.activations[index]
        activation = ACTIVATIONS[type(module)]
        with torch.enable_grad():
            z = self.sums[index].detach().requires_grad_()
            (slope,) = torch.autograd.grad(activation.forward(module, z).sum(), z, create_graph=True)
            if not slope.requires_grad:
                return torch.zeros_like(z)
            (curve,) = torch.autograd.grad(slope.sum(), z, materialize_grads=True)
        return curve

    def check_inputs(self) -> None:
        """Nothing can have changed them."""

    def _backs(self) -> list[Back]:
        triples = zip(self.chain.activations, self.sums, self.layer_inputs[1:], strict=False)
        return [partial(ACTIVATIONS[type(module)].backward, module, z, v) for module, z, v in triples]


def read_chain(plan: Plan, model: nn.Module) -> Chain | None:
    """The chain that an `nn.Sequential`, nested or not, is; None if a layer or activation is not known here."""
    if plan.uncovered or plan.tied or type(model) is not nn.Sequential:
        return None
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]  # in the order of the calls
    layers = {id(layer.module): layer for layer in plan.layers if layer.rule is linear_rows}
    leaves = [module for module in modules if type(module) not in (nn.Sequential, nn.Identity)]
    before = tuple(takewhile(lambda module: isinstance(module, nn.Flatten | Scale), leaves))
    linear, activations = leaves[len(before) :: 2], leaves[len(before) + 1 :: 2]
    parameters = list(model.parameters())
    if not (
        linear
        and len({id(module) for module in linear}) == len(linear) == len(plan.layers)
        and all(type(own) is nn.Linear and id(own) in layers and has_own_parameters(own) for own in linear)
        and all(type(module) in ACTIVATIONS for module in activations)
        and all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in parameters)
        and len(plan.parameters) == len(parameters)
    ):
        return None
    chain = Chain(
        plan,
        modules=tuple(modules),
        layers=tuple(layers[id(module)] for module in linear),
        weights=tuple(cast(nn.Parameter, module.weight) for module in linear),
        biases=tuple(cast("nn.Parameter | None", module.bias) for module in linear),
        activations=tuple(activations),
        before=before,
    )
    return chain if chain.is_current() else None


_KNOWN: tuple[type[nn.Module], ...] = (nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, *ACTIVATIONS)
_FORWARDS = {kind: kind.forward for kind in _KNOWN}


@dataclass
class Structure:
    """The layers to train, and whether they form a chain."""

    has_fallback: bool
    by_layers: bool
    max_bytes: int | None
    chain: Chain | None = field(default=None, init=False)  # the model as a chain, if its structure is one
    names: list[list[str]] = field(default_factory=list, init=False)  # of the trained parameters in each group
    groups: tuple[tuple[int, ...], ...] = field(default=(), init=False)  # the ids of the parameters in each group
    _plan: Plan | None = field(default=None, init=False)
    _left_out: dict[int, nn.Parameter] = field(default_factory=dict, init=False)  # by the groups at first

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
            others = {id(parameter): parameter for name, parameter in named.items() if name not in trained}
            self._left_out = others if self._plan is None else self._left_out
            new = [names[own] for own in others.keys() - self._left_out.keys() if others[own].requires_grad]
            if new and any(own not in names for group in ids for own in group):
                raise ValueError(
                    f"parameter {min(new)!r} is not one of the optimizer's, and one of those is no longer in the "
                    "model: something was replaced. Make a new optimizer, or call add_param_group"
                )
            named = {name: parameter for name, parameter in named.items() if name in trained}
        plan = plan_layers(model, named, self.has_fallback, self.by_layers, self.max_bytes)
        if self._plan is not None:
            plan.findings.warned = self._plan.findings.warned  # about the model as it was
        self._plan = plan
        self.groups = ids
        self.names = [[plan.names[own] for own in group if own in plan.names] for group in ids]
        self.chain = read_chain(plan, model) if self.by_layers else None
        return plan
