"""Running a model once and keeping what the rows need: layer inputs, and where to send columns back.

Nothing is hung on tensors or modules: `capture` returns a value, and its keys are names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from woodbury import _batch, _random
from woodbury.chain import ACTIVATIONS, Back, rows_along
from woodbury.functional import Forward, Pass, agree, grads_of_many, written_rows
from woodbury.layers.attention import attention_rows, linear_maps
from woodbury.layers.embeddings import EmbeddingRows
from woodbury.layers.forms import ExplicitRows, OuterRows, RowForm, concatenate_forms
from woodbury.layers.registry import as_form
from woodbury.layers.rules import has_own, linear_rows, sequence_rows
from woodbury.layers.shared import SharedRows
from woodbury.layers.sums import Place, Use, sum_uses, whole
from woodbury.plan import Layer, Plan


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """The default forward: model(inputs)."""
    outputs: Tensor = model(inputs)
    return outputs


@dataclass
class Call:
    """One use of parameters during a captured forward pass: a call of a layer, or of a linear map inside one."""

    layer: Layer
    given: tuple[Tensor, ...]  # the tensors it was called with, attached to the graph
    outputs: Tensor
    edge: GradientEdge  # where gradients in the outputs arrive, also if they are changed in place later
    versions: tuple[int, ...]  # of the inputs and the output at the time of the call
    maps: tuple[Place | None, Place | None] | None = None  # W and b of a linear map caught inside a layer

    def __post_init__(self) -> None:
        self.inputs = self.given[0].detach()  # the first of them

    @property
    def inputs_intact(self) -> bool:
        if len(self.given) == 1:
            return self.given[0]._version == self.versions[0]
        return all(tensor._version == version for tensor, version in zip(self.given, self.versions, strict=False))

    @property
    def outputs_intact(self) -> bool:
        return self.outputs._version == self.versions[-1]

    @property
    def parameters(self) -> list[str]:
        """Names of what it uses."""
        if self.maps is None:
            return list(self.layer.parameters.values())
        return [place.name for place in self.maps if place is not None]

    def form(self, window: slice | None, grads: Tensor, dtype: torch.dtype) -> RowForm:
        """The rows for gradients (n, k, ...) in the outputs, of some samples, in the type of the parameters."""
        inputs = [tensor.detach() for tensor in self.given]
        cast = grads.dtype != dtype
        if cast:  # the pass ran under autocast: rows are wanted in the parameters' own precision
            grads = grads.to(dtype)
            inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
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
        if cast and isinstance(form, OuterRows):
            form = replace(form, affine=False)  # not to those digits
        return form.restrict(layer.parameters)

    def places(self, plan: Plan) -> dict[str, Place]:
        """The form's own names -> where in which parameter (by its name in the model) the rows belong."""
        if self.maps is not None:
            return {own: place for own, place in zip(("weight", "bias"), self.maps, strict=True) if place}
        return {own: whole(full, plan.parameters[full].shape) for own, full in self.layer.parameters.items()}


@dataclass
class Capture:
    """A forward pass with what it left behind at each layer."""

    plan: Plan
    model: nn.Module
    forward: Forward
    inputs: Any
    raw: Tensor  # the outputs in the model's own shape
    outputs: Tensor  # (n, C), attached to the graph
    calls: list[Call]  # in the order they were made

    @cached_property
    def chain(self) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
        return chain_of(self)

    def call_of(self, layer: Layer) -> Call | None:
        """The call of a layer that was called once."""
        calls = [call for call in self.calls if call.layer.name == layer.name]
        return calls[0] if len(calls) == 1 else None

    def rows(self, segments: Sequence[Tensor]) -> dict[str, RowForm]:
        """Back-propagate columns and return the rows of every module whose parameters were used.

        segments are columns (m, k, C) for consecutive samples, from the first on. Row (i, a) is the
        derivative of columns[i, a] . outputs[i] in the module's parameters. The last thing to ask of a capture:
        the graph is freed on the way back.
        """
        self.check_inputs()
        if self.chain is not None:
            return rows_along(*self.chain, segments)
        unseen = unseen_parameters(self)
        if unseen and self.plan.fallback is None:
            name, layer = next(iter(unseen.items()))
            raise ValueError(
                f"parameter {name!r} is used outside the forward call of its module {layer!r}, where no rule sees "
                "it (directly, or because the network is differentiated in its inputs). Two ways out: call the "
                "module itself, or pass fallback='autograd'"
            )
        start, pieces = 0, []
        for columns in segments:
            last = columns is segments[-1]
            pieces.append(self._rows_by_autograd(columns, start, unseen, last))
            start += len(columns)
        return pieces[0] if len(pieces) == 1 else concatenate_forms(pieces)

    def check_inputs(self) -> None:
        """Raise if a layer's input is no longer what the layer saw."""
        for call in self.calls:
            if not call.inputs_intact:
                raise ValueError(
                    f"the input of layer {call.layer.name!r} was changed in place after the layer had used it: "
                    "write into new memory instead (out of place, or .clone())"
                )

    def _rows_by_autograd(
        self, columns: Tensor, start: int, unseen: Collection[str], last: bool
    ) -> dict[str, RowForm]:
        """Rows for any model: one backward pass, batched over the columns; written out where no rule sees all."""
        plan = self.plan
        window, own_columns = None, columns
        if len(columns) < len(self.outputs):
            window = slice(start, start + len(columns))
            padded = columns.new_zeros(len(self.outputs), *columns.shape[1:])
            padded[window] = columns
            columns = padded
        written = {plan.block_of[name][0] for name in (*plan.rest, *unseen)}
        forms: dict[str, RowForm] = {}
        names = [full for block in plan.owned if block in written for full in plan.owned[block].values()]
        if names:
            parameters = {name: plan.parameters[name] for name in names}
            made = Pass(self.model, self.forward, self.inputs, self.outputs)
            modes = tuple(module.training for module in self.model.modules())
            if modes != plan.findings.modes:
                plan.findings.way, plan.findings.modes = None, modes
            rows, plan.findings.way = written_rows(
                made, parameters, own_columns, start, plan.findings.way, plan.max_bytes
            )
            for block in written:
                own = {local: rows[full].flatten(0, 1) for local, full in plan.owned[block].items()}
                forms[block] = ExplicitRows(own)
        calls = [
            call for call in self.calls if any(plan.block_of[name][0] not in written for name in call.parameters)
        ]
        uses: dict[str, list[Use]] = {}
        grads = self._grads([call.edge for call in calls], columns, keep=not last)
        for call, grad in zip(calls, grads, strict=True):
            if grad is not None:
                for block, use in self._by_block(call, call.form(window, grad, plan.dtype)).items():
                    uses.setdefault(block, []).append(use)
        for block, names_of in plan.owned.items():
            if block in uses and block not in written:
                shapes = {local: plan.parameters[full].shape for local, full in names_of.items()}
                forms[block] = sum_uses(uses[block], shapes, plan.max_bytes)
        return {block: forms[block] for block in plan.owned if block in forms}

    def _by_block(self, call: Call, form: RowForm) -> dict[str, Use]:
        """The rows of a call, split by the modules its parameters belong to."""
        if isinstance(form, SharedRows | EmbeddingRows) and self.plan.max_bytes is not None:
            form = replace(form, max_bytes=self.plan.max_bytes)
        uses: dict[str, dict[str, Place]] = {}
        for own, place in call.places(self.plan).items():
            block, local = self.plan.block_of[place.name]
            uses.setdefault(block, {})[own] = place._replace(name=local)
        if isinstance(form, OuterRows) and set(uses) != {call.layer.name}:
            form = replace(form, affine=False)  # its module moves by more, or other, parameters than its own
        if len(uses) == 1:
            return {block: Use(form, places) for block, places in uses.items()}
        return {block: Use(form.restrict(places), places) for block, places in uses.items()}

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_i J_i^T weights_i for weights (n, C), as a dictionary over all trainable parameters."""
        parameters = self.plan.parameters
        grads = torch.autograd.grad(
            self.outputs, list(parameters.values()), weights, retain_graph=True, materialize_grads=True
        )
        return dict(zip(parameters, grads, strict=True))

    def _grads(self, edges: Sequence[GradientEdge], columns: Tensor, keep: bool) -> Sequence[Tensor | None]:
        """Gradients in the layer outputs, (n, k, *output shape) each; None where no output depends on one."""
        if not edges:
            return []
        if columns.shape[1] == 1:
            grads = torch.autograd.grad(self.outputs, edges, columns[:, 0], retain_graph=keep, allow_unused=True)
            return [None if grad is None else grad.unsqueeze(1) for grad in grads]
        many = grads_of_many(self.outputs, edges, columns.transpose(0, 1))
        return [None if grad is None else grad.transpose(0, 1) for grad in many]


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


def _obstacle(name: str, given: Tensor, outputs: Tensor, samples: int) -> str | None:
    """Why a call cannot be captured: it must see one sample per entry of its first axis, in plain autograd."""
    if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
        return (
            f"layer {name!r} is called inside a torch.func transform, where its rows cannot be captured: "
            "use torch.autograd.grad(..., create_graph=True) instead, or pass fallback='autograd'"
        )
    for what, tensor in (("input", given), ("output", outputs)):
        shape = tensor.shape
        if not shape or shape[0] != samples:
            return (
                f"layer {name!r} has an {what} of shape {tuple(tensor.shape)} in a batch of {samples} samples: "
                "the first axis must be the sample axis. Bring it there (what is the same for all samples: "
                ".expand(n, ...)), or pass fallback='autograd'"
            )
    return None


def _substitute(plan: Plan, layer: Layer, outputs: Tensor, maps: Any, cast: bool) -> str | None:
    """Why a call cannot be captured: it must use the very parameters of the plan, as they are or all cast."""
    same = True
    if maps is None:
        own = layer.module._parameters
        for local, full in layer.parameters.items():
            used = plan.parameters[full]
            same = same and own.get(local) is used and used.requires_grad
    else:
        for place in maps:
            if place is not None:
                used = plan.parameters[place.name]
                same = same and used.requires_grad
    if not same:
        return (
            f"layer {layer.name!r} is called with other parameters than its own (torch.func.functional_call), or "
            "with its own frozen for the call: use .detach() on values instead, or pass fallback='autograd'"
        )
    if outputs.dtype != used.dtype and used.dtype.itemsize > outputs.dtype.itemsize and not cast:
        return (
            f"layer {layer.name!r} gives {outputs.dtype} with parameters of {used.dtype} (torch.autocast "
            "inside the model?): leave that out, or pass fallback='autograd'"
        )
    return None


def capture(plan: Plan, model: nn.Module, forward: Forward, inputs: Any, samples: int) -> Capture:
    """Run forward(model, inputs) with gradients on, keeping every layer's input and output."""
    calls: list[Call] = []
    cast = torch.is_autocast_enabled(next(iter(plan.parameters.values())).device.type)
    obstacles: list[str] = []

    def keep(layer: Layer, given: tuple[Tensor, ...], outputs: Tensor, maps: Any = None) -> None:
        """Note a call; one that cannot be captured is left to the fallback, if there is one."""
        constant = not outputs.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
        if constant or layer.name in plan.findings.unfit:  # constant: called under torch.no_grad()
            return
        obstacle = _obstacle(layer.name, given[0], outputs, samples) or _substitute(
            plan, layer, outputs, maps, cast
        )
        if obstacle is None:
            versions = (*(tensor._version for tensor in given), outputs._version)
            calls.append(Call(layer, given, outputs, get_gradient_edge(outputs), versions, maps))
        elif plan.fallback is None:
            obstacles.append(obstacle)  # raised once the model is through: it may have things to put back
        else:
            plan.findings.unfit.add(layer.name)

    def recording(layer: Layer) -> Callable[..., Any]:
        plain = type(layer.module).forward

        def layer_forward(*args: Any, **kwargs: Any) -> Tensor:
            outputs: Tensor = plain(layer.module, *args, **kwargs)
            given = args
            if kwargs:
                order = list(signature(plain).parameters)
                names = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
                given = (*args, *(kwargs[name] for name in names))
            keep(layer, tuple(tensor for tensor in given if isinstance(tensor, Tensor)), outputs)
            return outputs

        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            names = {id(parameter): name for name, parameter in plan.parameters.items()}
            with linear_maps(samples, names, lambda given, outputs, maps: keep(layer, (given,), outputs, maps)):
                return plain(layer.module, *args, **kwargs)

        return attention_forward if layer.rule is attention_rows else layer_forward

    with replaced_forward({layer.module: recording(layer) for layer in plan.layers}), torch.enable_grad():
        outputs = forward(model, inputs)
    if obstacles:
        raise ValueError(obstacles[0])
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
    with torch.enable_grad():
        if outputs.dtype in (torch.bfloat16, torch.float16) and outputs.dtype != plan.dtype:
            flat = outputs = outputs.to(plan.dtype)  # of a pass under autocast
        if outputs.dim() != 2:
            flat = outputs.reshape(samples, -1)
    return Capture(plan, model, forward, inputs, outputs.detach(), flat, calls)


# Nodes of the autograd graph that act on each number by itself.
_ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sigmoid", "Tanh", "Relu", "Silu", "Gelu", "Elu", "LeakyRelu", "Softplus", "Hardtanh", "Hardswish"),
        *("Mish", "LogSigmoid", "Sin", "Cos", "Exp", "Celu", "NativeDropout", "Pow", "Neg"),
        *("Mul", "Div", "Add", "Sub"),  # with a constant: they have one parent then
    )
)
# Those whose derivative is one operation in v = phi(z) alone; autograd gives the others.
_BY_OUTPUT: dict[str, type[nn.Module]] = {
    "SigmoidBackward0": nn.Sigmoid,
    "TanhBackward0": nn.Tanh,
    "ReluBackward0": nn.ReLU,
}


def chain_of(capture: Capture) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
    """Layers, their inputs and the ways back between them if outputs = z_L and every v_{l+1} = phi(z_l).

    phi may be any function of each number by itself.

    Read off the autograd graph of this very pass: the walk from the outputs must meet nothing but the
    plan's Linear layers and one-input elementwise nodes. None for any other model.
    """
    plan = capture.plan
    if plan.rest or plan.tied:
        return None
    owners = {call.edge.node: call for call in capture.calls}
    calls: list[Call] = []  # last first
    nodes: list[list[str]] = []  # names of those below each layer
    node, shape = capture.outputs.grad_fn, capture.outputs.shape
    while node is not None:
        call = owners.get(node)
        if call is None:
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if not calls or len(parents) != 1 or node.name() not in _ELEMENTWISE:
                return None
            nodes[-1].append(node.name())
            node = parents[0]
            continue
        given = call.given[0]
        # an elementwise node may still broadcast, which the shape gives away
        if call.layer.rule is not linear_rows or given.dim() != 2 or call.outputs.shape != shape:
            return None
        if not has_own(call.layer.module) or given._backward_hooks or call.outputs._backward_hooks:
            return None  # what autograd sees there is more than W v + b
        calls.append(call)
        nodes.append([])
        node, shape = given.grad_fn, given.shape
        if node is None and given.requires_grad:
            return None
    if not len({call.layer.name for call in calls}) == len(calls) == len(capture.calls):
        return None
    backs = [_back(call, below, names) for call, below, names in zip(calls, calls[1:], nodes, strict=False)]
    calls = calls[::-1]
    return [call.layer for call in calls], [call.inputs for call in calls], backs[::-1]


def _back(call: Call, below: Call, nodes: Sequence[str]) -> Back:
    """From gradients in the input of a layer to those in the output of the one below."""
    kind = _BY_OUTPUT.get(nodes[0]) if len(nodes) == 1 else None
    if kind is not None:
        return partial(ACTIVATIONS[kind].backward, None, call.inputs, call.inputs)
    return lambda grads: torch.autograd.grad(call.given[0], [below.edge], grads)[0]


def _graph(outputs: Tensor) -> Iterator[tuple[Any, Any]]:
    """Every edge (node, next node) of the autograd graph behind the outputs."""
    pending: list[Any] = [outputs.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "the model calls torch.utils.checkpoint with use_reentrant=True, which hides the parameters "
                "inside from torch.autograd.grad: pass use_reentrant=False there"
            )
        for following, _ in node.next_functions:
            if following is None:
                continue
            yield node, following
            if following not in seen:
                seen.add(following)
                pending.append(following)


def unseen_parameters(capture: Capture) -> dict[str, str]:
    """Parameter -> its module wherever one reaches the outputs other than through the calls that were captured.

    Walks the autograd graph: a parameter covered by rules must have as many uses as there are captured calls on
    the way to the outputs that use it (`F.linear(x, layer.weight)` calls no module; of a layer perhaps only the
    derivative is on the way). A view of a parameter counts by its own uses: the derivative of a network in its
    inputs goes through the transposed weight a second time.
    """
    consumers: dict[Any, list[Any]] = {}
    accumulators: dict[int, Any] = {}
    seen = {capture.outputs.grad_fn}
    for node, following in _graph(capture.outputs):
        consumers.setdefault(following, []).append(node)
        variable = getattr(following, "variable", None)
        if variable is not None:
            accumulators[id(variable)] = following
        seen.add(following)

    def uses(node: Any) -> int:
        total = 0
        for consumer in consumers.get(node, ()):
            parents = [parent for parent, _ in consumer.next_functions if parent is not None]
            total += uses(consumer) if len(parents) == 1 and consumer.name() in _VIEWS else 1
        return total

    captured = Counter(name for call in capture.calls if call.edge.node in seen for name in call.parameters)
    found: dict[str, str] = {}
    for name, parameter in capture.plan.parameters.items():
        node = accumulators.get(id(parameter))
        if name not in capture.plan.rest and node is not None and uses(node) > captured[name]:
            found[name] = capture.plan.block_of[name][0]
    return found


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "Alias", "Expand", "Unsqueeze", "ToCopy"),
        *("Slice", "Split", "SplitWithSizes", "Select", "Unbind", "Narrow"),
    )
)


def check_samples_apart(capture: Capture, first: bool = True) -> None:
    """Raise if the outputs of the first or the last sample depend on another sample's activations.

    A layer may only seem to see samples, where as many positions happen to come first: with a fallback its calls
    are left to that. Then, and the first time, the first sample is also run on its own: mixing may lie past every
    layer.
    """
    for _ in _graph(capture.outputs):  # refuses what autograd cannot see through
        pass
    samples = len(capture.outputs)
    if samples < 2:
        return
    capture.check_inputs()
    for sample, others in ((0, slice(1, None)), (samples - 1, slice(0, samples - 1))):
        seed = torch.zeros_like(capture.outputs)
        seed[sample] = torch.linspace(0.5, 1.5, seed.shape[1])  # not random: the pass must be repeatable
        edges = [call.edge for call in capture.calls]
        if not edges:
            break
        grads = torch.autograd.grad(capture.outputs, edges, seed, retain_graph=True, allow_unused=True)
        for call, grad in zip(list(capture.calls), grads, strict=True):
            if grad is None or not bool((grad[others].abs() > 0).any()):  # nan is another's concern
                continue
            if capture.plan.fallback is None:
                raise ValueError(
                    f"the outputs of one sample depend on what layer {call.layer.name!r} gives for another: rows "
                    "per sample do not exist where the model mixes the samples of a batch"
                )
            capture.plan.findings.unfit.add(call.layer.name)
            capture.calls = [other for other in capture.calls if other.layer is not call.layer]
            first = True
    if first:
        _check_first_alone(capture)


def _check_first_alone(capture: Capture) -> None:
    """The same past every layer that was captured: the first sample must give the same outputs on its own."""
    samples = len(capture.outputs)
    random = _random.snapshot(capture.outputs.device)
    try:
        alone = capture.forward(capture.model, _batch.part(capture.inputs, slice(0, 1), samples))
        drawn = _random.drawn_since(random)
    except Exception:  # whatever a model does not like about one sample
        return
    finally:
        _random.restore(random)
    capture.check_inputs()
    first = capture.outputs[:1].detach()
    if drawn or not bool(torch.isfinite(first).all()):  # nan is another's concern
        return
    # loosely: a GPU computes one sample by other kernels than many
    if not agree(alone.detach().reshape(1, -1), first, digits=0.25):
        raise ValueError(
            f"the outputs of the first sample of {samples} change when it is run on its own: rows per sample do "
            "not exist where the model mixes the samples of a batch, or changes from one run to the next (as "
            "spectral_norm does in training mode; call .eval() on it)"
        )
