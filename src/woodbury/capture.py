"""Running a model once and keeping what the rows need: layer inputs, and where to send columns back.

Nothing is hung on tensors or modules: `capture` returns a value, and its keys are names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from woodbury.layers.forms import ExplicitRows, Layout, OuterRows, RowForm, concatenate_forms
from woodbury.layers.registry import as_form
from woodbury.layers.rules import linear_rows
from woodbury.plan import Layer, Plan

Forward = Callable[[nn.Module, Any], Tensor]


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """The default forward: model(inputs)."""
    outputs: Tensor = model(inputs)
    return outputs


@dataclass
class Call:
    """One call of a layer during a captured forward pass."""

    given: Tensor  # the input, attached to the graph
    inputs: Tensor  # the input, detached
    outputs: Tensor
    edge: GradientEdge  # where gradients in the outputs arrive, also if they are changed in place later
    versions: tuple[int, int]  # of input and output at the time of the call

    @property
    def inputs_intact(self) -> bool:
        return self.given._version == self.versions[0]

    @property
    def outputs_intact(self) -> bool:
        return self.outputs._version == self.versions[1]


@dataclass
class Capture:
    """A forward pass with what it left behind at each layer."""

    plan: Plan
    raw: Tensor  # the outputs in the model's own shape
    outputs: Tensor  # (n, C), attached to the graph
    calls: dict[str, Call]  # by layer name

    @cached_property
    def chain(self) -> list[Link] | None:
        return chain_of(self)

    def rows(self, segments: Sequence[Tensor]) -> dict[str, RowForm]:
        """Back-propagate columns and return the rows of every layer that was called.

        segments are columns (m, k, C) for consecutive samples, from the first on. Row (i, a) is the
        derivative of columns[i, a] . outputs[i] in the layer's parameters.
        """
        self.check_inputs()
        if self.chain is not None:
            return self._rows_along(self.chain, segments)
        misused = misused_parameters(self)
        if misused and self.plan.fallback is None:
            layer, name = next(iter(misused.items()))
            raise ValueError(
                f"parameter {name!r} is used outside the forward call of its module {layer!r}, where no rule sees "
                "it (directly, or because the network is differentiated in its inputs). Two ways out: call the "
                "module itself, and once, or pass fallback='autograd'"
            )
        start, pieces = 0, []
        for columns in segments:
            pieces.append(self._rows_by_autograd(columns, start, misused))
            start += len(columns)
        return pieces[0] if len(pieces) == 1 else concatenate_forms(pieces)

    def check_inputs(self) -> None:
        """Raise if a layer's input is no longer what the layer saw."""
        for name, call in self.calls.items():
            if not call.inputs_intact:
                raise ValueError(
                    f"the input of layer {name!r} was changed in place after the layer had used it: "
                    "write into new memory instead (out of place, or .clone())"
                )

    def _rows_by_autograd(self, columns: Tensor, start: int, misused: Collection[str]) -> dict[str, RowForm]:
        """Rows for any model: one backward pass, batched over the columns; written out for misused layers."""
        window = slice(start, start + len(columns))
        part = len(columns) < len(self.outputs)
        if part:
            padded = columns.new_zeros(len(self.outputs), *columns.shape[1:])
            padded[window] = columns
            columns = padded
        called = [layer for layer in self.plan.layers if layer.name in self.calls and layer.name not in misused]
        grads = self._grads([self.calls[layer.name].edge for layer in called], columns)
        forms: dict[str, RowForm] = {}
        for layer, grad in zip(called, grads, strict=True):
            if grad is None:
                continue
            inputs = self.calls[layer.name].inputs
            if part:
                inputs, grad = inputs[window], grad[window]
            try:
                form = as_form(layer.rule(layer.module, inputs, grad))
            except ValueError as error:
                raise ValueError(f"layer {layer.name!r}: {error}") from None
            missing = set(layer.parameters) - set(form.parameters)
            if missing:
                raise ValueError(
                    f"the rule for {type(layer.module).__name__} gives no rows for parameter "
                    f"{layer.parameters[missing.pop()]!r}: make it cover every parameter of the layer"
                )
            forms[layer.name] = form.restrict(layer.parameters)
        for layer in self.plan.layers:
            if layer.name in misused:
                own = {local: self.plan.parameters[name] for local, name in layer.parameters.items()}
                forms[layer.name] = self._explicit_rows(own, columns, window)
        for name in self.plan.rest:
            forms[name] = self._explicit_rows({name: self.plan.parameters[name]}, columns, window)
        return forms

    def _rows_along(self, chain: Sequence[Link], segments: Sequence[Tensor]) -> dict[str, RowForm]:
        """Rows of a plain chain z_1 -> v_2 = phi(z_1) -> z_2 ..., last layer first in `chain`.

        h_l = (h_{l+1} W_{l+1}) phi'(z_l) for all rows of all segments at once: one product a layer (the
        paper's Algorithm 5, for many right-hand sides).
        """
        layout = Layout(tuple((columns.shape[0], columns.shape[1]) for columns in segments))
        flat = [columns.flatten(0, 1) for columns in segments]
        grads = flat[0] if len(flat) == 1 else torch.cat(flat)  # h (r, C)
        forms: dict[str, RowForm] = {}
        for index, link in enumerate(chain):
            layer, call = link.layer, self.calls[link.layer.name]
            inputs = call.inputs
            if layout.samples < inputs.shape[0]:
                inputs = inputs[: layout.samples]
            bias = None if layer.module.bias is None else "bias"
            form = OuterRows(inputs, grads, layout, bias=bias, affine=True)
            forms[layer.name] = form.restrict(layer.parameters)
            if index + 1 < len(chain):
                weight = layer.module.weight
                assert isinstance(weight, Tensor)
                below = self.calls[chain[index + 1].layer.name]
                if link.slope is not None:
                    slope = link.slope(inputs)
                else:
                    slope = torch.autograd.grad(call.given, [below.edge], torch.ones_like(call.given))[0]
                if not layout.is_plain:
                    slope = slope.index_select(0, layout.sample_of_row(slope.device))
                grads = grads.mm(weight.detach()).mul_(slope[: grads.shape[0]])
        return {link.layer.name: forms[link.layer.name] for link in reversed(chain)}

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_i J_i^T weights_i for weights (n, C), as a dictionary over all trainable parameters."""
        parameters = self.plan.parameters
        grads = torch.autograd.grad(
            self.outputs, list(parameters.values()), weights, retain_graph=True, materialize_grads=True
        )
        return dict(zip(parameters, grads, strict=True))

    def _grads(self, edges: Sequence[GradientEdge], columns: Tensor) -> Sequence[Tensor | None]:
        """Gradients in the layer outputs, (n, k, *output shape) each; None where no output depends on one."""
        if not edges:
            return []
        if columns.shape[1] == 1:
            grads = torch.autograd.grad(self.outputs, edges, columns[:, 0], retain_graph=True, allow_unused=True)
            return [None if grad is None else grad.unsqueeze(1) for grad in grads]
        grads = torch.autograd.grad(
            self.outputs,
            edges,
            columns.transpose(0, 1),
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        return [None if grad is None else grad.transpose(0, 1) for grad in grads]

    def _explicit_rows(
        self, parameters: Mapping[str, nn.Parameter], columns: Tensor, window: slice
    ) -> ExplicitRows:
        """Rows (m k, *shape) written out by a backward pass per sample: exact for any model."""
        n, k, width = columns.shape
        rows = []
        for i in range(window.start, window.stop):
            seeds = torch.zeros(k, n, width, dtype=columns.dtype, device=columns.device)
            seeds[:, i] = columns[i]
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                self.outputs,
                list(parameters.values()),
                seeds,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            rows.append(grads)
        return ExplicitRows(
            {
                name: torch.cat([p.new_zeros(k, *p.shape) if grad is None else grad for grad in column]).detach()
                for (name, p), column in zip(parameters.items(), zip(*rows, strict=True), strict=True)
            }
        )


@contextmanager
def replaced_forward(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Inside, each module computes the given function in place of its `forward`; its hooks still run."""
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward  # past Module.__setattr__, which looks for parameters
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


def _check_call(name: str, given: Tensor, outputs: Tensor, samples: int) -> None:
    """Raise unless the layer saw one sample per entry of its first axis, in plain autograd."""
    if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
        raise ValueError(
            f"layer {name!r} is called inside a torch.func transform, where its rows cannot be captured: "
            "use torch.autograd.grad(..., create_graph=True) instead"
        )
    for what, tensor in (("input", given), ("output", outputs)):
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            raise ValueError(
                f"layer {name!r} has an {what} of shape {tuple(tensor.shape)} in a batch of {samples} samples: "
                "the first axis must be the sample axis"
            )


def capture(plan: Plan, model: nn.Module, forward: Forward, inputs: Any, samples: int) -> Capture:
    """Run forward(model, inputs) with gradients on, keeping every layer's input and output."""
    calls: dict[str, Call] = {}

    def recording(layer: Layer) -> Callable[..., Tensor]:
        plain = type(layer.module).forward

        def layer_forward(*args: Any, **kwargs: Any) -> Tensor:
            outputs: Tensor = plain(layer.module, *args, **kwargs)
            if layer.name in calls:
                raise ValueError(
                    f"layer {layer.name!r} is called more than once in a forward pass: its rows would be wrong"
                )
            given = args[0] if args else next(iter(kwargs.values()))
            _check_call(layer.name, given, outputs, samples)
            versions = (given._version, outputs._version)
            calls[layer.name] = Call(given, given.detach(), outputs, get_gradient_edge(outputs), versions)
            return outputs

        return layer_forward

    with replaced_forward({layer.module: recording(layer) for layer in plan.layers}), torch.enable_grad():
        outputs = forward(model, inputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model must return a tensor, got {type(outputs).__name__}; use forward=")
    if outputs.dim() == 0 or outputs.shape[0] != samples:
        raise ValueError(
            f"the model returned outputs of shape {tuple(outputs.shape)} for {samples} samples: "
            "the first axis must be the sample axis"
        )
    if not outputs.requires_grad:
        raise ValueError("the outputs do not depend on any trainable parameter")
    flat = outputs
    if outputs.dim() != 2:
        with torch.enable_grad():
            flat = outputs.reshape(samples, -1)
    return Capture(plan, outputs.detach(), flat, calls)


# Nodes of the autograd graph that act on each number by itself.
_ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sigmoid", "Tanh", "Relu", "Silu", "Gelu", "Elu", "LeakyRelu", "Softplus", "Hardtanh", "Hardswish"),
        *("Mish", "LogSigmoid", "Sin", "Cos", "Exp", "Celu", "NativeDropout", "Pow", "Neg"),
        *("Mul", "Div", "Add", "Sub"),  # with a constant: they have one parent then
    )
)
# phi'(z) from v = phi(z), where that is one operation; autograd gives the others.
_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "SigmoidBackward0": lambda v: torch.addcmul(v, v, v, value=-1),  # v - v^2
    "TanhBackward0": lambda v: 1 - v * v,
    "ReluBackward0": torch.sign,  # v > 0
}


class Link(NamedTuple):
    """A layer of a chain, and phi' of the activation between it and the layer below, if it is simple."""

    layer: Layer
    slope: Callable[[Tensor], Tensor] | None


def chain_of(capture: Capture) -> list[Link] | None:
    """The layers from last to first if outputs = z_L and every v_{l+1} is an elementwise function of z_l.

    Read off the autograd graph of this very pass: the walk from the outputs must meet nothing but the
    plan's Linear layers and one-input elementwise nodes. None for any other model.
    """
    owners = {call.edge.node: name for name, call in capture.calls.items()}
    layers = {layer.name: layer for layer in capture.plan.layers}
    chain: list[Link] = []
    between: list[str] = []  # names of the nodes since the last layer
    node, shape = capture.outputs.grad_fn, capture.outputs.shape
    while node is not None:
        name = owners.get(node)
        if name is None:
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            between.append(node.name())
            if not chain or len(parents) != 1 or between[-1] not in _ELEMENTWISE:
                return None
            node = parents[0]
            continue
        layer, call = layers[name], capture.calls[name]
        # an elementwise node may still broadcast, which the shape gives away
        if layer.rule is not linear_rows or call.inputs.dim() != 2 or call.outputs.shape != shape:
            return None
        if chain:
            chain[-1] = Link(chain[-1].layer, _SLOPES.get(between[0]) if len(between) == 1 else None)
        chain.append(Link(layer, None))
        node, shape, between = call.given.grad_fn, call.given.shape, []
        if node is None and call.given.requires_grad:
            return None
    return chain if len(chain) == len(capture.calls) and not capture.plan.rest else None


def misused_parameters(capture: Capture) -> dict[str, str]:
    """Layer -> parameter wherever one reaches the outputs other than through its layer's one call.

    Walks the autograd graph: a parameter covered by a rule must have one use, and none if its module was not
    called (`F.linear(x, layer.weight)` calls no module) or what it gave is not on the way to the outputs (only
    its derivative is, say). A view of a parameter counts by its own uses: the
    derivative of a network in its inputs goes through the transposed weight a second time.
    """
    consumers: dict[Any, list[Any]] = {}
    accumulators: dict[int, Any] = {}
    pending: list[Any] = [capture.outputs.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            consumers.setdefault(following, []).append(node)
            variable = getattr(following, "variable", None)
            if variable is not None:
                accumulators[id(variable)] = following
            if following not in seen:
                seen.add(following)
                pending.append(following)

    def uses(node: Any) -> int:
        total = 0
        for consumer in consumers.get(node, ()):
            parents = [parent for parent, _ in consumer.next_functions if parent is not None]
            total += uses(consumer) if len(parents) == 1 and consumer.name() in _VIEWS else 1
        return total

    found: dict[str, str] = {}
    for layer in capture.plan.layers:
        call = capture.calls.get(layer.name)
        allowed = int(call is not None and call.edge.node in seen)
        for name in layer.parameters.values():
            node = accumulators.get(id(capture.plan.parameters[name]))
            if node is not None and uses(node) > allowed:
                found.setdefault(layer.name, name)
    return found


_VIEWS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Alias", "Expand", "Unsqueeze", "ToCopy")
)


def check_samples_apart(capture: Capture) -> None:
    """Raise if the outputs of the first or the last sample depend on another sample's activations."""
    layers = [layer for layer in capture.plan.layers if layer.name in capture.calls]
    samples = len(capture.outputs)
    if samples < 2 or not layers:
        return
    capture.check_inputs()
    edges = [capture.calls[layer.name].edge for layer in layers]
    for sample, others in ((0, slice(1, None)), (samples - 1, slice(0, samples - 1))):
        seed = torch.zeros_like(capture.outputs)
        seed[sample] = torch.linspace(0.5, 1.5, seed.shape[1])  # not random: the pass must be repeatable
        grads = torch.autograd.grad(capture.outputs, edges, seed, retain_graph=True, allow_unused=True)
        for layer, grad in zip(layers, grads, strict=True):
            if grad is not None and bool((grad[others].abs() > 0).any()):  # nan is another's concern
                raise ValueError(
                    f"the outputs of one sample depend on what layer {layer.name!r} gives for another: rows per "
                    "sample do not exist where the model mixes the samples of a batch"
                )
