"""What a pass through the model leaves: the inputs of layers, and the graph through which columns go back.

Nothing stays on tensors or modules: `capture` returns a value, and its keys are names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from woodbury import _random
from woodbury._vector import Parts
from woodbury.device import fingerprint
from woodbury.jets import run_layer
from woodbury.layers.forms import Dtype, ExplicitRows, RowForm
from woodbury.layers.sums import Place, Use, sum_uses
from woodbury.model import tangents
from woodbury.model.bare import Bare, find_bare
from woodbury.model.call import Call, Notes
from woodbury.model.chain import Back, MovedForward, chain_rows
from woodbury.model.fallback import Forward, Pass, WrittenRows, grads_of_many, outputs_agree, tells_little
from woodbury.model.graph import chain_of, fewest_digits, runs_compiled, unseen_parameters
from woodbury.model.plan import FAST_PATHS, Layer, Plan
from woodbury.products import transposed_jacobian_product

MIXED = (
    "rows per sample do not exist where the model mixes the samples of a batch (attention, recurrent layers and "
    "transformers need batch_first=True where samples lie along the first axis)"
)


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """The default forward: model(inputs)."""
    return model(inputs)


@dataclass
class GraphCapture(Pass):
    """A forward pass that autograd followed, with the calls of every layer.

    Rows come from layer rules, bare parameters, and for the others the fallback.
    """

    calls: list[Call]  # in the order they were made
    obstacles: Mapping[str, str]  # layers whose calls were not captured, and why
    raw: Tensor  # the outputs in the model's own shape

    @cached_property
    def chain(self) -> tuple[list[Layer], list[Tensor], list[Back]] | None:
        return chain_of(self.plan, self.outputs, self.calls)

    @cached_property
    def precision(self) -> torch.dtype:
        """The type whose digits outputs of the pass, and what goes back through it, can be expected to have."""
        return self.autocast or fewest_digits(self.outputs)

    def call_of(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """The inputs and outputs of a layer that was called once, if they are still what they were then."""
        calls = [call for call in self.calls if call.layer.name == layer]
        return (calls[0].inputs, calls[0].outputs) if len(calls) == 1 and calls[0].is_intact else None

    def rows(self, segments: Sequence[Tensor]) -> Mapping[str, RowForm]:
        """Back-propagate columns and return the rows of every module whose parameters were used.

        segments are columns (m, k, C), or (m, C) for one per sample, of consecutive samples, all together. Row
        (i, a) is the derivative of columns[i, a] . outputs[i] in the module's parameters. Call it last: it frees
        the graph.
        """
        self.check_inputs()
        if self.chain is not None:
            layers, layer_inputs, backs = self.chain
            weights = [layer.module.get_parameter("weight").detach() for layer in layers]
            return chain_rows(layers, weights, layer_inputs, backs, segments)
        (columns,) = segments
        columns = columns if columns.dim() == 3 else columns.unsqueeze(1)
        forms: dict[str, RowForm] | None = None
        while forms is None:  # rows of bare parameters, and of layers, that were wrong are not tried again
            unseen = unseen_parameters(self.plan, self.graph, self.calls)
            forms = self._attempt(columns, *self._without_rules(unseen))
        # in other batches an axis may look like that of the samples
        self.plan.findings.uncapturable |= self.obstacles
        return forms

    def _without_rules(self, unseen: Mapping[str, str]) -> tuple[Bare, list[str]]:
        """Where rows come from that no rule gives: bare parameters, and those left to the fallback.

        Raises an error that names a parameter where the fallback is needed and there is none.
        """
        plan = self.plan
        hindered = [plan.layer_named[layer] for layer in self.obstacles]
        own = [name for layer in hindered for name in layer.parameters.values()]
        lacking = list(dict.fromkeys([*plan.uncovered, *unseen, *own]))
        blocks = {plan.block_of[name][0] for name in lacking}
        wanted = [full for block in plan.owned if block in blocks for full in plan.owned[block].values()]
        bare = find_bare(plan, self.graph, wanted, len(self.outputs))
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
        """The rows; None if those of bare parameters, or of layers, turned out to be wrong.

        If the model reorders samples all are checked: that other batches were right says nothing.
        """
        plan = self.plan
        rows: Parts = {}
        if written:
            rows = WrittenRows(self, {name: plan.parameters[name] for name in written}, columns).compute()
        explicit = {plan.block_of[name][0] for name in (*written, *bare.keys)}
        ruled = plan.owned.keys() - explicit
        calls = [call for call in self.calls if any(plan.block_of[name][0] in ruled for name in call.parameters)]
        unsure = self.reorders or not bare.is_checked(columns.shape)
        keep_graph = unsure or bare.goes_back_again
        edges = [*(call.edge for call in calls), *(meeting.edge for meeting in bare.meetings)]
        grads = self._grads(edges, columns, keep_graph)
        if self.reorders and self.leave(self._mixed(calls, grads, columns)):
            return None
        if bare.keys:
            bare_rows = bare.rows(grads[len(calls) :], columns.shape)
            if unsure and not bare.check(bare_rows, self, columns, self.precision):
                return None
            rows |= bare_rows
        forms = self._by_rules(calls, grads, ruled)
        for block in explicit:  # (n, k, *shape) of each of its parameters
            names = plan.owned[block]
            own = {local: rows[full].flatten(0, 1).detach() for local, full in names.items()}
            forms[block] = ExplicitRows(own)
        return {block: forms[block] for block in plan.owned if block in forms}

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
            seed = columns[:, 0]
            grads = torch.autograd.grad(self.outputs, edges, seed, retain_graph=keep_graph, allow_unused=True)
            return [None if grad is None else grad.unsqueeze(0) for grad in grads]
        return grads_of_many(self.outputs, edges, columns.transpose(0, 1), self._warn_of_columns)

    def _mixed(self, calls: Sequence[Call], grads: Sequence[Tensor | None], columns: Tensor) -> list[Call]:
        """Those where not c_i g_i arrives for c_i columns_i if g_i does for columns_i, for some c."""
        c = torch.linspace(0.5, 1.5, len(columns), device="cpu").to(columns)
        seed = torch.einsum("n,nkc->nc", c, columns).unsqueeze(1)
        again, mixed = self._grads([call.edge for call in calls], seed, keep_graph=True), []
        for call, own, scaled in zip(calls, grads, again, strict=False):
            if own is not None and scaled is not None:
                gap = scaled[0] - torch.einsum("n,kn...->n...", c.to(own), own)
                if bool(gap.abs().max() > torch.finfo(self.precision).eps ** 0.5 * own.abs().sum(0).max()):
                    mixed.append(call)
        return mixed

    def leave(self, mixed: Iterable[Call], late: bool = False) -> bool:
        """Leave layers that mix samples to the fallback or `bare`, or raise; whether there are any. late: warn."""
        left = {call.layer.name: call.layer for call in mixed}
        for name, layer in left.items():
            reason = f"the outputs of one sample depend on what layer {name!r} gives for another: {MIXED}"
            if late:
                reason += ". An earlier look found nothing: steps since then may have been wrong"
            if not self.plan.has_fallback and not self.is_bare(layer):
                raise ValueError(f"{reason}. If it only reorders them, pass fallback='autograd'")
            if late:
                warnings.warn(reason, RuntimeWarning, stacklevel=2)
            self.plan.findings.uncapturable[name] = reason
            self.calls = [call for call in self.calls if call.layer is not layer]
        return bool(left)

    def _warn_of_columns(self, count: int) -> None:
        self.plan.findings.warn_of_passes(
            count,
            "an operation in it cannot be differentiated for several columns of a sample at once. Ways out: "
            "another operation in its place, fewer outputs, or NaturalGradient, which has one column per sample",
        )

    def is_bare(self, layer: Layer) -> bool:
        """Whether the rows of a layer's parameters follow from the graph alone, without its calls."""
        names = list(layer.parameters.values())
        return len(find_bare(self.plan, self.graph, names, len(self.outputs)).keys) == len(names)

    def check_inputs(self) -> None:
        """Raise if the input of a layer was changed in place after the layer used it."""
        for call in self.calls:
            if not call.inputs_intact:
                raise ValueError(
                    f"the input of layer {call.layer.name!r} was changed in place after the layer had used it: "
                    "write into new memory instead (out of place, or .clone())"
                )

    def run_again(self, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Tensor:
        """The outputs of the same batch with `changes` added to the parameters, by parameter name.

        Layers in `forwards` are computed by these functions. Parameters are bit-identical afterwards.
        """
        plan = self.plan
        with torch.set_grad_enabled(trial_needs_gradients(plan, self.forward)), casting(self.autocast, plan):
            if not forwards and self._is_replayed:
                values = {name: own.detach() for name, own in plan.parameters.items()}
                moved = torch._foreach_add([values[name] for name in changes], list(changes.values()))
                values.update(zip(changes, moved, strict=True))
                return self.repeat("outputs", self.run_with, values, self.inputs).detach()
            with moved_model(plan, changes, forwards):
                return self.forward(plan.model, self.inputs).detach()

    @property
    def _is_replayed(self) -> bool:
        """Whether passes on a device are recorded and replayed, with the parameters as arguments."""
        return self.plan.replays.is_used and self.plan.device.type == "cuda" and self._can_exchange

    @property
    def _can_exchange(self) -> bool:
        """Whether `run_with` reaches all uses of the parameters: a function may hold one by itself."""
        findings = self.plan.findings
        if findings.can_exchange is None:
            findings.can_exchange = False  # until it is known, since looking runs the model as well
            findings.can_exchange = self._exchange_agrees()
        return findings.can_exchange

    def _exchange_agrees(self) -> bool:
        """Whether small changes of the parameters show in the outputs of `run_with` as in those of the model."""
        plan, now = self.plan, _random.snapshot(self.plan.device)
        changes = _small_changes(plan, torch.finfo(plan.dtype).eps ** 0.25)
        values = {name: own.detach() + changes[name] for name, own in plan.parameters.items()}
        with torch.set_grad_enabled(trial_needs_gradients(plan, self.forward)), casting(self.autocast, plan):
            exchanged = self.run_with(values).detach()
            _random.restore(now)
            with moved_model(plan, changes, {}):
                moved = self.forward(plan.model, self.inputs).detach()
        _random.restore(now)
        return outputs_agree(exchanged, moved, self)

    def repeat(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.plan.replays(lambda: (name, self.autocast, self._fingerprint), function, *arguments)

    @cached_property
    def _fingerprint(self) -> Hashable:
        return fingerprint.of_model(self.plan.model), fingerprint.of_function(self.forward)

    def push_forward(self, vectors: Sequence[Parts]) -> Tensor:
        """J p of each vector p over all trainable parameters, (k, n, C). Call it before `rows`."""
        if self._is_replayed:
            with casting(self.autocast, self.plan):
                return tangents.push_forward_again(self, vectors)
        return tangents.push_forward(self, vectors)

    def second_derivative(self, vector: Parts) -> Tensor:
        """d^2/dt^2 y(theta + t p) at t = 0, (n, C). Call it with the random numbers of the pass."""
        random = _random.snapshot(self.plan.device)

        def run(change: Parts) -> Tensor:
            _random.restore(random)
            return self.run_again(change, {}).reshape(self.outputs.shape)

        return tangents.second_derivative(self, run, vector, self.precision)

    def moved(self, share: float) -> float:
        """As in `Pass`; not known where the pass draws random numbers and cannot be repeated."""
        now = _random.snapshot(self.plan.device)
        with _random.replayed(self.random):
            outputs = self.run_again(_small_changes(self.plan, share), {}).reshape(self.outputs.shape)
        if _random.drawn_since(now):  # other random numbers than those of the pass
            _random.restore(now)
            return 0.0
        return float((outputs - self.outputs.detach()).abs().max().nan_to_num(0.0, 0.0))

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_i J_i^T weights_i for weights (n, C), as a dictionary over all trainable parameters."""
        return transposed_jacobian_product(self.outputs, self.plan.parameters, weights)


@contextmanager
def replaced_forward(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Inside, each module runs its function here in place of `forward`; its hooks still run."""
    try:
        for module, forward in forwards.items():
            # not by Module.__setattr__, which looks for parameters
            vars(module)["forward"] = partial(run_layer, module, forward)
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
    if unwrap(forward) is not call_model or plan.has_fallback:
        return True
    return any(isinstance(module, FAST_PATHS) and not training for module, _, training, _ in plan.modules)


@contextmanager
def moved_model(plan: Plan, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Iterator[None]:
    """Inside, `changes` are added to the parameters, and layers in `forwards` are computed by these functions."""
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


def _small_changes(plan: Plan, share: float) -> Parts:
    """This share of every parameter, entry by entry, with signs at random but the same at each call."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    kind: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    signs = {name: torch.randn(own.shape, **kind).sign() for name, own in plan.parameters.items()}
    return {name: share * own.detach() * signs[name].to(own) for name, own in plan.parameters.items()}


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


def capture(plan: Plan, forward: Forward, inputs: Any, samples: int, autocast: Dtype = None) -> GraphCapture:
    """Run forward(plan.model, inputs) with gradients on, keeping every layer's input and output.

    The first time, once more without compiled code if the model turns out to run some inside.
    """
    if plan.findings.compiled is not None:
        return _capture(plan, forward, inputs, samples, autocast)
    random = _random.snapshot(plan.device)
    captured = _capture(plan, forward, inputs, samples, autocast)
    plan.findings.compiled = runs_compiled(captured.outputs)
    if not plan.findings.compiled:
        return captured
    _random.restore(random)
    return _capture(plan, forward, inputs, samples, autocast)


def _capture(plan: Plan, forward: Forward, inputs: Any, samples: int, autocast: Dtype) -> GraphCapture:
    notes = Notes(plan, samples, autocast is not None or torch.is_autocast_enabled(plan.device.type))
    before = plan.versions()
    # of a device's generator not while a step is recorded, which cannot repeat it
    random = _random.snapshot(plan.device) if plan.has_fallback and plan.device.type == "cpu" else None
    with replaced_forward(notes.forwards()), torch.enable_grad(), casting(autocast, plan):
        outputs = forward(plan.model, inputs)
    after = plan.versions()
    if after != before:
        _check_changes(plan, before, after)
    _check_outputs(outputs, samples)
    flat = outputs
    with torch.enable_grad():
        if outputs.dtype in (torch.bfloat16, torch.float16) and outputs.dtype != plan.dtype:
            flat = outputs = outputs.to(plan.dtype)  # of a pass under autocast
        if outputs.dim() != 2:
            flat = outputs.reshape(samples, -1)
    raw = outputs.detach()
    return GraphCapture(
        plan, forward, inputs, flat, notes.calls, notes.obstacles, raw, autocast=autocast, random=random
    )


def _check_outputs(outputs: Any, samples: int) -> None:
    """Raise unless a model returned a tensor with one entry per sample that can be differentiated."""
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model must return a tensor, got {type(outputs).__name__}; use forward=")
    if outputs.dim() == 0 or outputs.shape[0] != samples:
        raise ValueError(
            f"the model returned outputs of shape {tuple(outputs.shape)} for {samples} samples: "
            "the first axis must be the sample axis"
        )
    if not outputs.requires_grad:
        raise ValueError("the outputs do not depend on any trainable parameter")
