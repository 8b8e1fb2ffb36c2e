"""What a pass through the model leaves: the inputs of layers, and the graph through which columns go back.

Nothing stays on tensors or modules: `capture` returns a value, and its keys are names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from woodbury import _random
from woodbury._vector import Vector
from woodbury.layers import recurrent
from woodbury.layers.attention import attention_rows, watch_linear_maps
from woodbury.layers.forms import ExplicitRows, RowForm, concatenate_forms
from woodbury.layers.norms import instance_norm_rows
from woodbury.layers.positions import own_outputs
from woodbury.layers.rules import WEIGHT_AND_BIAS, linear_rows, turned_linear_rows
from woodbury.layers.sums import Place, Use, sum_uses
from woodbury.model import tangents
from woodbury.model.bare import Bare, find_bare
from woodbury.model.call import Call
from woodbury.model.chain import Back, ChainCapture, MovedForward, chain_rows
from woodbury.model.fallback import Forward, Pass, grads_of_many, written_rows
from woodbury.model.graph import PassGraph, chain_of, fewest_digits, runs_compiled, unseen_parameters
from woodbury.model.plan import Layer, Plan
from woodbury.products import jacobian_products, transposed_jacobian_product

_MANY_PASSES = 20  # of a step, from which on it says so
_COMMON_NAMES = tuple(f".{name}" for name in WEIGHT_AND_BIAS)


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """The default forward: model(inputs)."""
    outputs: Tensor = model(inputs)
    return outputs


def calls_model(forward: Forward) -> bool:
    """Whether a forward is the default one, as it is or wrapped."""
    return unwrap(forward) is call_model


@dataclass
class GraphCapture:
    """A forward pass that autograd followed, with the calls of every layer."""

    plan: Plan
    model: nn.Module
    forward: Forward
    inputs: Any
    raw: Tensor  # the outputs in the model's own shape
    outputs: Tensor  # (n, C), attached to the graph
    calls: list[Call]  # in the order they were made
    autocast: torch.dtype | None = None  # the type of passes through the model, if not that of its parameters
    random: _random.Snapshot | None = None  # the random state before the pass, for a fallback that repeats it
    obstacles: Mapping[str, str] = field(default_factory=dict)  # layers whose calls were not captured, and why

    @cached_property
    def chain(self) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
        return chain_of(self.plan, self.outputs, self.calls)

    @cached_property
    def precision(self) -> torch.dtype:
        """The type whose digits outputs of the pass, and what goes back through it, can be expected to have."""
        return self.autocast or fewest_digits(self.outputs)

    def call_of(self, layer: str) -> Call | None:
        """The inputs and outputs of a layer, if it was called once."""
        calls = [call for call in self.calls if call.layer.name == layer]
        return calls[0] if len(calls) == 1 else None

    def rows(self, segments: Sequence[Tensor]) -> Mapping[str, RowForm]:
        """Back-propagate columns and return the rows of every module whose parameters were used.

        segments are columns (m, k, C), or (m, C) for one per sample, of consecutive samples from the first on. Row
        (i, a) is the derivative of columns[i, a] . outputs[i] in the module's parameters. Call it last: it frees
        the graph.
        """
        self.check_inputs()
        if self.chain is not None:
            layers, layer_inputs, backs = self.chain
            weights = [layer.module.get_parameter("weight").detach() for layer in layers]
            return chain_rows(layers, weights, layer_inputs, backs, segments)
        segments = [columns if columns.dim() == 3 else columns.unsqueeze(1) for columns in segments]
        graph = PassGraph.behind(self.outputs)
        unseen = unseen_parameters(self.plan, graph, self.calls)
        while True:
            bare, written = self._without_rules(graph, unseen)
            start, pieces = 0, []
            for columns in segments:
                last = columns is segments[-1]
                piece = self._rows_by_autograd(columns, start, bare, written, last)
                if piece is None:  # rows of bare parameters were wrong, and are not tried again
                    break
                pieces.append(piece)
                start += len(columns)
            else:
                # in other batches an axis may look like that of the samples
                self.plan.findings.uncapturable.update(self.obstacles)
                return pieces[0] if len(pieces) == 1 else concatenate_forms(pieces)

    def _without_rules(self, graph: PassGraph, unseen: Mapping[str, str]) -> tuple[Bare, set[str]]:
        """Where rows come from that no rule gives: bare parameters, and the modules left to the fallback.

        Raises an error that names a parameter where the fallback is needed and there is none.
        """
        plan = self.plan
        hindered = [plan.layer_named[layer] for layer in self.obstacles]
        own = [name for layer in hindered for name in layer.parameters.values()]
        lacking = list(dict.fromkeys([*plan.uncovered, *unseen, *own]))
        blocks = {plan.block_of[name][0] for name in lacking}
        wanted = [full for block in plan.owned if block in blocks for full in plan.owned[block].values()]
        bare = find_bare(plan, graph, wanted, len(self.outputs))
        written = {plan.block_of[name][0] for name in wanted if name not in bare.keys}
        if written and not plan.has_fallback:
            culprits = [name for name in lacking if plan.block_of[name][0] in written]
            # those that tell most first
            culprits.sort(key=lambda name: (name in bare.keys, f".{name}".endswith(_COMMON_NAMES)))
            raise ValueError(self._refusal(culprits, unseen))
        if written:
            bare = bare.restrict([name for name in bare.keys if plan.block_of[name][0] not in written])
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

    def is_bare(self, layer: Layer) -> bool:
        """Whether the rows of a layer's parameters follow from the graph alone, without its calls."""
        graph, names = PassGraph.behind(self.outputs), list(layer.parameters.values())
        return len(find_bare(self.plan, graph, names, len(self.outputs)).keys) == len(names)

    def check_inputs(self) -> None:
        """Raise if the input of a layer was changed in place after the layer used it."""
        for call in self.calls:
            if not call.inputs_intact:
                raise ValueError(
                    f"the input of layer {call.layer.name!r} was changed in place after the layer had used it: "
                    "write into new memory instead (out of place, or .clone())"
                )

    def _rows_by_autograd(
        self, columns: Tensor, start: int, bare: Bare, written: Collection[str], last: bool
    ) -> dict[str, RowForm] | None:
        """Rows of any model, by one backward pass batched over the columns; written out where no rule applies.

        None if rows of bare parameters turned out to be wrong.
        """
        plan = self.plan
        window, own_columns = None, columns
        if len(columns) < len(self.outputs):
            window = slice(start, start + len(columns))
            padded = columns.new_zeros(len(self.outputs), *columns.shape[1:])
            padded[window] = columns
            columns = padded
        forms: dict[str, RowForm] = {}
        bare_blocks = {plan.block_of[name][0] for name in bare.keys}
        names = [full for block in plan.owned if block in written for full in plan.owned[block].values()]
        if names:
            parameters = {name: plan.parameters[name] for name in names}
            forward_pass = self._as_pass
            rows, plan.findings.fallback_method = written_rows(
                forward_pass,
                parameters,
                own_columns,
                start,
                plan.findings.fallback_method,
                plan.max_bytes,
                plan.findings.checked_rows,
                partial(self._warn_of_passes, names),
            )
            forms |= _explicit(plan, written, rows)
        ruled = {block for block in plan.owned if block not in written and block not in bare_blocks}
        calls = [call for call in self.calls if any(plan.block_of[name][0] in ruled for name in call.parameters)]
        uses: dict[str, list[Use]] = {}
        meetings = bare.edges if bare_blocks else []
        unsure = bool(bare_blocks) and not bare.is_checked(plan, own_columns.shape)
        keep_graph = unsure or not last or (bool(bare_blocks) and bare.goes_back_again)
        grads = self._grads([*(call.edge for call in calls), *meetings], columns, keep_graph)
        if bare_blocks:
            rows = bare.rows(plan, grads[len(calls) :], own_columns.shape, window)
            if unsure and not bare.check(plan, rows, self.outputs, own_columns, start, self.precision):
                return None
            forms |= _explicit(plan, bare_blocks, rows)
        for call, grad in zip(calls, grads, strict=False):
            if grad is not None:
                for block, use in self._by_block(
                    call, call.form(window, grad.transpose(0, 1), plan.dtype)
                ).items():
                    uses.setdefault(block, []).append(use)
        for block, names_of in plan.owned.items():
            if block in uses and block in ruled:
                shapes = {local: plan.parameters[full].shape for local, full in names_of.items()}
                forms[block] = sum_uses(uses[block], shapes, plan.max_bytes)
        return {block: forms[block] for block in plan.owned if block in forms}

    def _warn_of_passes(self, names: Sequence[str], count: int, why: str) -> None:
        """Say once that rows of parameters without a rule make a step slow."""
        name = min(names, key=lambda name: f".{name}".endswith(_COMMON_NAMES))  # the first telling one
        block, _ = self.plan.block_of[name]
        self._warn(
            count,
            f"parameter {name!r} of {type(self.model.get_submodule(block)).__name__} {block!r} has no layer rule "
            f"where it is used, and {why}. Ways out: a rule by woodbury.register_layer, layers that have one, "
            "solver='products', which needs no rows, or requires_grad_(False) on it",
        )

    def _warn_of_columns(self, count: int) -> None:
        """Say once that columns go back one at a time."""
        self._warn(
            count,
            "an operation in it cannot be differentiated for several columns of a sample at once. Ways out: "
            "another operation in its place, fewer outputs, or NaturalGradient, which has one column per sample",
        )

    def _warn(self, count: int, text: str) -> None:
        findings = self.plan.findings
        if count > _MANY_PASSES and not findings.warned:
            findings.warned = True
            message = f"a step takes the time of {count} passes through the model: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _by_block(self, call: Call, form: RowForm) -> dict[str, Use]:
        """The rows of a call, split by the modules its parameters belong to."""
        form = form.within(self.plan.max_bytes)
        uses: dict[str, dict[str, Place]] = {}
        for own, place in call.places(self.plan).items():
            block, local = self.plan.block_of[place.name]
            uses.setdefault(block, {})[own] = place._replace(name=local)
        if set(uses) != {call.layer.name}:
            form = form.only_rows()  # the module also depends on parameters of others
        if len(uses) == 1:
            return {block: Use(form, places) for block, places in uses.items()}
        return {block: Use(form.restrict(places), places) for block, places in uses.items()}

    def run_again(self, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Tensor:
        """The outputs of the same batch with `changes` added to the parameters, by parameter name.

        Layers in `forwards` are computed by these functions. Parameters are bit-identical afterwards.
        """
        with (
            moved_model(self.plan, changes, forwards),
            torch.set_grad_enabled(trial_needs_gradients(self.plan, self.forward)),
            casting(self.autocast, self.plan),
        ):
            return self.forward(self.model, self.inputs).detach()

    def push_forward(self, vectors: Sequence[Vector]) -> Tensor:
        """J p of each vector p over all trainable parameters, (k, n, C). Call it before `rows`."""
        plan = self.plan
        if plan.findings.forward_order >= 1:
            with casting(self.autocast, plan):
                images = tangents.push_forward(self._as_pass, plan.parameters, vectors)
            if images is not None:
                return images
            plan.findings.forward_order = 0
        product = jacobian_products(self.outputs, plan.parameters)
        return torch.stack([product(vector) for vector in vectors])

    def second_derivative(self, vector: Vector) -> Tensor:
        """d^2/dt^2 y(theta + t p) at t = 0, (n, C)."""
        plan, outputs = self.plan, self.outputs.detach()

        def run(change: Vector) -> Tensor:
            return self.run_again(change, {}).reshape(outputs.shape)

        if plan.findings.forward_order >= 2:
            with casting(self.autocast, plan):
                curve = tangents.second_derivative(self._as_pass, plan.parameters, vector)
            if curve is not None and not plan.findings.checked_curve:
                plan.findings.checked_curve = True
                if not tangents.agrees_with_differences(curve, run, outputs, self.moved, plan.parameters, vector):
                    curve = None
            if curve is not None:
                return curve
            plan.findings.forward_order = 1
        return tangents.central_difference(run, outputs, plan.parameters, vector)

    @cached_property
    def _as_pass(self) -> Pass:
        return Pass(self.model, self.forward, self.inputs, self.outputs, self.moved, self.random)

    def moved(self, share: float) -> float:
        """max |y(theta + d) - y(theta)| for small changes d of the parameters, by this share of themselves.

        0 where it is not known: the pass draws random numbers and cannot be repeated.
        """
        now = _random.snapshot(self.plan.device)
        with _random.replayed(self.random):
            outputs = self.run_again(small_changes(self.plan, share), {})
        if _random.drawn_since(now):  # other random numbers than those of the pass
            _random.restore(now)
            return 0.0
        return largest_difference(outputs.reshape(self.outputs.shape), self.outputs)

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_i J_i^T weights_i for weights (n, C), as a dictionary over all trainable parameters."""
        return transposed_jacobian_product(self.outputs, self.plan.parameters, weights)

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


# What a pass over a batch leaves, whether autograd followed it or a chain was run by hand.
Capture = GraphCapture | ChainCapture


def _explicit(plan: Plan, blocks: Collection[str], rows: Vector) -> dict[str, RowForm]:
    """Rows (m, k, *shape) of the parameters of some modules, as forms."""
    return {
        block: ExplicitRows(
            {local: rows[full].flatten(0, 1).detach() for local, full in plan.owned[block].items()}
        )
        for block in blocks
    }


@contextmanager
def replaced_forward(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Inside, each module runs its function here in place of `forward`; its hooks still run."""
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward  # not by Module.__setattr__, which looks for parameters
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


def casting(autocast: torch.dtype | None, plan: Plan) -> AbstractContextManager[Any]:
    """A context: the precision of passes through the model."""
    return nullcontext() if autocast is None else torch.autocast(plan.device.type, dtype=autocast)


def trial_needs_gradients(plan: Plan, forward: Forward) -> bool:
    """Whether a pass at theta + p, for its outputs alone, must have gradients on as the one at theta had.

    So where the model itself may take some, and where it would compute other numbers without them: torch's
    attention in eval mode leaves out padded positions then.
    """
    if not calls_model(forward) or plan.has_fallback:
        return True
    return bool(plan.fast_paths) and not all(module.training for module in plan.fast_paths)


@contextmanager
def moved_model(plan: Plan, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Iterator[None]:
    """Inside, `changes` are added to the parameters, and layers in `forwards` are computed by these functions.

    The parameters are bit-identical afterwards.
    """
    before: list[tuple[nn.Parameter, Tensor]] = []
    functions = {}
    for name, moved in forwards.items():
        module = plan.layer_named[name].module
        functions[module] = partial(moved, partial(type(module).forward, module))
    try:
        for name, change in changes.items():
            parameter = plan.parameters[name]
            before.append((parameter, parameter.data))
            parameter.data = parameter.data + change
        with replaced_forward(functions):
            yield
    finally:
        for parameter, data in before:
            parameter.data = data


def small_changes(plan: Plan, share: float) -> Vector:
    """This share of every parameter, entry by entry, with signs at random but the same at each call."""
    generator = torch.Generator().manual_seed(0)
    signs = {name: torch.randn(own.shape, generator=generator).sign() for name, own in plan.parameters.items()}
    return {name: share * own.detach() * signs[name].to(own) for name, own in plan.parameters.items()}


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|, 0 where that is not finite."""
    return float((a - b.detach()).abs().max().nan_to_num(0.0, 0.0))


def _obstacle(name: str, inputs: Tensor, outputs: Tensor, samples: int) -> str | None:
    """Why a call cannot be captured, or None: the first axis must be the sample axis, in plain autograd."""
    if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
        return (
            f"layer {name!r} is called inside a torch.func transform, where its rows cannot be captured: "
            "use torch.autograd.grad(..., create_graph=True) instead, or pass fallback='autograd'"
        )
    for what, tensor in (("input", inputs), ("output", outputs)):
        shape = tensor.shape
        if not shape or shape[0] != samples:
            return (
                f"layer {name!r} has an {what} of shape {tuple(tensor.shape)} in a batch of {samples} samples: "
                "the first axis must be the sample axis. Bring it there (what is the same for all samples: "
                ".expand(n, ...)), or pass fallback='autograd'"
            )
    return None


def _parameter_obstacle(plan: Plan, layer: Layer, outputs: Tensor, maps: Any, cast: bool) -> str | None:
    """Why a call cannot be captured, or None: it must use the parameters of the plan, as they are or cast."""
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


def _check_changes(plan: Plan, before: Sequence[int], after: Sequence[int]) -> None:
    """Raise an error that names a parameter changed in place between two readings of `Plan.versions`."""
    for name, then, now in zip(plan.all_parameters, before, after, strict=True):
        owner = plan.model.get_submodule(name.rpartition(".")[0])
        moved = isinstance(owner, nn.RNNBase) and plan.device.type != "cpu"  # by its flatten_parameters
        if now != then and not moved:
            raise ValueError(
                f"the model changes parameter {name!r} in place during its forward pass (max_norm of an "
                "embedding, or a constraint): a step is defined for a function of parameters that stay as they "
                "are. Change it between steps instead"
            )


def _first_capture(
    plan: Plan,
    model: nn.Module,
    forward: Forward,
    inputs: Any,
    samples: int,
    autocast: torch.dtype | None,
) -> GraphCapture:
    """`capture`, and again without compiled code if the model turns out to run some inside."""
    random, findings = _random.snapshot(plan.device), plan.findings
    findings.compiled = False
    try:
        captured = capture(plan, model, forward, inputs, samples, autocast)
        if not runs_compiled(captured.outputs):
            return captured
        findings.compiled = True
    except BaseException:
        findings.compiled = None  # nothing was shown
        raise
    _random.restore(random)
    return capture(plan, model, forward, inputs, samples, autocast)


def capture(
    plan: Plan,
    model: nn.Module,
    forward: Forward,
    inputs: Any,
    samples: int,
    autocast: torch.dtype | None = None,
) -> GraphCapture:
    """Run forward(model, inputs) with gradients on, keeping every layer's input and output."""
    if plan.findings.compiled is None:
        return _first_capture(plan, model, forward, inputs, samples, autocast)
    calls: list[Call] = []
    obstacles: dict[str, str] = {}
    cast = autocast is not None or torch.is_autocast_enabled(plan.device.type)

    def note_call(
        layer: Layer,
        arguments: tuple[Tensor, ...],
        outputs: Tensor,
        maps: Any = None,
        given: Any = None,
        factor: Tensor | None = None,
    ) -> None:
        """Add a call to `calls`; one that cannot be captured is left to the fallback, if there is one."""
        constant = not outputs.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
        if constant or layer.name in plan.findings.uncapturable or layer.name in obstacles:
            return  # constant: called under torch.no_grad()
        obstacle = _obstacle(layer.name, arguments[0], outputs, samples) or _parameter_obstacle(
            plan, layer, outputs, maps, cast
        )
        if obstacle is None:
            versions = (*(tensor._version for tensor in arguments), outputs._version)
            edge = get_gradient_edge(outputs)
            calls.append(Call(layer, arguments, outputs, edge, versions, maps, given, factor))
        else:
            obstacles[layer.name] = obstacle  # raised where nothing else gives its rows

    def noting_forward(layer: Layer) -> Callable[..., Any]:
        plain = type(layer.module).forward
        gives_views = layer.rule in (linear_rows, turned_linear_rows, instance_norm_rows)

        def layer_forward(*args: Any, **kwargs: Any) -> Tensor:
            outputs: Tensor = plain(layer.module, *args, **kwargs)
            if gives_views and outputs.dim() > 2:
                outputs = own_outputs(outputs)
            arguments = args
            if kwargs:
                order = list(signature(plain).parameters)
                names = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
                arguments = (*args, *(kwargs[name] for name in names))
            tensors = tuple([tensor for tensor in arguments if isinstance(tensor, Tensor)])
            note_call(layer, tensors, outputs, given=arguments)
            return outputs

        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            def report(v: Tensor, z: Tensor, maps: Any) -> None:
                note_call(layer, (v,), z, maps)

            return watch_linear_maps(plain, samples, plan.names, report)(layer.module, *args, **kwargs)

        def by_steps(*args: Any, **kwargs: Any) -> Any:
            def report(use: recurrent.Use) -> None:
                note_call(layer, (use.inputs,), use.outputs, use.places, factor=use.factor)

            given = signature(plain).bind(layer.module, *args, **kwargs).args[1:]
            obstacle = recurrent.recurrent_obstacle(layer.module, given, samples)
            if obstacle is None and layer.name not in plan.findings.uncapturable:
                return recurrent.recurrent_forward(layer.module, plan.names, report, *given)
            if obstacle is not None:
                obstacles[layer.name] = f"layer {layer.name!r} {obstacle}. Or pass fallback='autograd'"
            return plain(layer.module, *args, **kwargs)

        if layer.rule is recurrent.recurrent_rows:
            return by_steps
        return attention_forward if layer.rule is attention_rows else layer_forward

    functions = {layer.module: noting_forward(layer) for layer in plan.layers}
    before = plan.versions()
    # of a device's generator not while a step is recorded, which cannot repeat it
    random = _random.snapshot(plan.device) if plan.has_fallback and plan.device.type == "cpu" else None
    with replaced_forward(functions), torch.enable_grad(), casting(autocast, plan):
        outputs = forward(model, inputs)
    after = plan.versions()
    if after != before:
        _check_changes(plan, before, after)
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
    return GraphCapture(plan, model, forward, inputs, outputs.detach(), flat, calls, autocast, random, obstacles)
