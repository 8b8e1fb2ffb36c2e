"""Steps from a loop of the user's own: `step(closure)`, and `loss.backward(); optimizer.step()` with watch=True.

Hooks on the model note what it was called with and give its outputs a tape (`woodbury.loop.tape`), which notes
the operations up to `backward`. From the two follows what `step(inputs, targets)` would have been given.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils import _pytree as pytree

from woodbury import _random
from woodbury._process import hooks_of
from woodbury.loop.calls import ModelCall, Seen, differentiable, join
from woodbury.loop.tape import LossesInside, Node, Taped, tape
from woodbury.model.compiled import WrittenCall
from woodbury.model.graph import graph_edges

UNWATCHED = (
    "step() without a batch, whose inputs must hold at least one tensor, and no loss.backward() of this model's "
    "outputs was watched since the last step (torch.autograd.backward is not seen, nor are outputs copied into "
    "another tensor: put parts together by torch.cat). Ways out: write optimizer.step(inputs, targets), without "
    "backward; optimizer.step(closure), where the closure calls the model, computes the loss and calls backward; "
    "or watch=True when the optimizer is made, before the model is called"
)


class _Hook:
    """A hook that does nothing once its watcher is gone; a copy, as of a model that is copied, has none."""

    def __init__(self, watcher: Watcher | None, name: str) -> None:
        self._watcher = None if watcher is None else weakref.ref(watcher)
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        watcher = None if self._watcher is None else self._watcher()
        return None if watcher is None else getattr(watcher, self._name)(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, (None, self._name)


class Watcher:
    """Notes the calls of a model and the backward passes of losses, from its making on until `close`."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._probe = min(parameters, key=lambda parameter: parameter.numel())
        self._open: list[tuple[ModelCall, LossesInside]] = []  # calls that are running
        self._looks_inside = True  # until the model has shown that it computes no loss
        self._handles: list[Any] = []
        self.clear()
        self._open_hooks()

    def clear(self) -> None:
        """Forget what was seen since the last step."""
        self._calls: list[ModelCall] = []  # whose loss was sent back
        self._failure: str | None = None  # why no step can be taken on them
        self._gradient: Tensor | None = None  # of the probe, after the last backward pass
        self._left: list[tuple[int, int, int]] = []  # gradients and parameters after that, see `_identities`
        self._changes: list[Any] = []  # of gradients between backward passes

    def _open_hooks(self) -> None:
        WrittenCall.put_on(self._model)  # a loop may compile the model, around these hooks
        before, after = _Hook(self, "_before"), _Hook(self, "_after")
        self._handles = [
            self._model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        WrittenCall.take_off(self._model)
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, calls of the model are not noted, and it has no hooks of ours: it may be a plain chain."""
        self.close()
        try:
            yield
        finally:
            self._open_hooks()

    # -- hooks -------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or self._open:
            return
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or peek_interpreter_stack() is not None:
            return  # tensors hold no numbers in an export, a trace or a transform of torch.func
        hooks, place = module._forward_hooks, self._handles[1].id
        hooks[place] = hooks.pop(place)  # the last: hooks that were added since belong to the model
        device = self._probe.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        args, kwargs = pytree.tree_map_only(Taped, Tensor.detach, (args, dict(kwargs)))
        call = ModelCall(args, kwargs, _random.snapshot(device), module.training, autocast)
        inside = LossesInside(self, call)
        if self._looks_inside:
            inside.__enter__()
        self._open.append((call, inside))

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self._open:
            return None
        call, inside = self._open.pop()
        if self._looks_inside:
            inside.__exit__(None, None, None)
        if outputs is None:  # the model raised
            return None
        call.is_tensor = isinstance(outputs, Tensor)
        if any(leaf.requires_grad for leaf in inside.inputs):
            call.inside = True
            return None
        places = {id(leaf): place for place, leaf in enumerate(differentiable(outputs))}
        self._looks_inside = not (isinstance(outputs, Tensor) and outputs.dim())

        def taped(leaf: Any) -> Any:
            return tape(leaf, self, call, places[id(leaf)]) if id(leaf) in places else leaf

        return taped(outputs) if isinstance(outputs, Tensor) else pytree.tree_map(taped, outputs)

    # -- backward passes ---------------------------------------------------------------------------------

    def before_backward(self, root: Node) -> None:
        """A backward pass from a loss of these outputs starts. What is wrong about it is said by the next step."""
        if not any(part.grad is not None and bool(part.grad.any()) for part in self._parameters):
            self.clear()  # what was seen before zero_grad
        elif not self._calls:
            self._failure = (
                "parameters hold gradients of a backward pass that was not watched, or of the step before: call "
                "zero_grad() after each step, and add losses up before one backward pass. In a closure, gradients "
                "of before cannot be accumulated: pass watch=True for that"
            )
        self._changes += [self._changes_since(), _hook_counts(self._model, self._parameters)]
        bases = root.bases(self)
        self._failure = self._failure or self._reason_against(root, bases)
        if self._failure is None:
            call = bases[0].call
            call.root, call.base, call.is_sent_back = root, bases[0], True
            self._calls.append(call)

    def _reason_against(self, root: Node, bases: Sequence[Any]) -> str | None:
        if len(bases) != 1:
            return (
                "the loss depends on several outputs of the model, or on two calls of it: a step needs a loss of "
                "one tensor of outputs, from one call (join the inputs, or return one tensor)"
            )
        if bases[0].call.is_sent_back:
            return "two backward passes through one call of the model: add the losses up first"
        if root.tensor.numel() != 1:
            return f"backward from a loss of shape {tuple(root.tensor.shape)}: it must be one number"
        trained = {id(parameter) for parameter in self._parameters}
        if any(_reaches(stranger, trained) for stranger in root.strangers(self)):
            return (
                "the loss depends on the parameters beside the outputs of the model: a penalty on the weights, or "
                "a part that was computed by an autograd.Function, which cannot be looked into. Ways out: "
                "weight_decay= of the optimizer in place of the penalty, and the function inside the model"
            )
        return None

    def after_backward(self, root: Node) -> None:
        gradient = self._probe.grad
        self._gradient = None if gradient is None else gradient.detach().clone()
        self._left = _identities(self._parameters)

    def _changes_since(self) -> list[tuple[bool, int, int]]:
        """Which gradients are the same as after the last backward pass, and what was written into since."""
        now = _identities(self._parameters)
        pairs = zip(self._left or now, now, strict=True)
        return [(a[0] == b[0], b[1] - a[1], b[2] - a[2]) for a, b in pairs]

    # -- what a step asks --------------------------------------------------------------------------------

    def take(self, known: nn.Module) -> Seen:
        """What was done since the last step, which is forgotten; `known` is the loss the optimizer was given."""
        calls, failure = self._calls, self._failure
        changes = [*self._changes, self._changes_since()]
        gradient = self._gradient
        self.clear()
        if failure is not None:
            raise ValueError(failure)
        if not calls:
            raise ValueError(UNWATCHED)
        for call in calls:
            call.check_unchanged(self._model)
        gradients = [parameter.grad for parameter in self._parameters]
        factor = _factor_since(gradient, self._probe.grad)
        scale = 1.0 if factor is None else _meant_by(factor, gradients, calls[-1].root)
        batch = join(calls, scale, known)
        pieces = [batch] if len(calls) == 1 else [join([call], scale, known) for call in calls]
        what = (
            {tuple((node.name, node.hooks) for node in call.root.ancestors(self)) for call in calls},
            changes,
            object() if factor is None else None,  # which is not the same in any other step
        )
        is_touched = any(change != (True, 0, 0) for change in changes[-1])
        cause = "They, or parameters, were changed between loss.backward() and step()" if is_touched else ELSE
        return Seen(batch, pieces, gradients, (factor or 1.0) / scale, what, cause)


ELSE = (
    "Another loss, a penalty say, was sent back as well, or a hook changes gradients, or tensors were written "
    "into unseen, or gradients were removed or left out by backward(inputs=...)"
)
CLIPPED = (
    "gradients were clipped before step(), and a second-order step does not use them: it is that of the loss, "
    "and no shorter. Leave clipping out (Lightning: gradient_clip_val=None, Trainer: max_grad_norm=0); the "
    "damping and the guard bound a step"
)


def _factor_since(before: Tensor | None, after: Tensor | None) -> float | None:
    """What the gradient of one parameter was multiplied by; None if it does not tell."""
    if before is None or after is None:
        return None
    if torch.equal(before, after):
        return 1.0
    size = float(before.double().square().sum())
    factor = float((before.double() * after.double()).sum()) / size if size else 0.0
    precision = 8 * torch.finfo(after.dtype).eps
    if not factor > 0 or not (after - factor * before).norm() <= precision * after.norm():
        return None
    return factor


def _meant_by(factor: float, gradients: Sequence[Tensor | None], root: Node) -> float:
    """What the loss is to be multiplied by if gradients were multiplied by a factor after its backward pass.

    1/c if a GradScaler has taken back its c. Clipped gradients do not count: their norm is a round number, and the
    factor is not 1 over a small whole number, as where someone divides by the number of micro-batches.
    """
    if factor == 1:
        return 1.0
    tensors = [leaf for leaf in root.leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]
    is_scaled = (
        root.name in ("mul", "__mul__") and len(tensors) == 1
    )  # the last operation multiplies by a tensor c
    scale = float(tensors[0]) if is_scaled else 1.0
    single = 8 * torch.finfo(torch.float32).eps  # in which a GradScaler computes
    if abs(scale * factor - 1) <= single:
        return 1 / scale
    present = [gradient.detach() for gradient in gradients if gradient is not None]
    precision = 16 * math.sqrt(len(present)) * max(torch.finfo(gradient.dtype).eps for gradient in present)
    whole = round(1 / factor)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in present))
    more = 1e-6 * factor * scale
    largest = norm + more  # as clip_grad_norm_ has it: norm = largest / (before + 1e-6) before
    is_round = abs(largest - float(f"{largest:.2g}")) <= precision * largest + single * more
    if factor * scale > 1 or not is_round or (whole <= 128 and abs(1 / factor - whole) <= precision * whole):
        return factor
    warnings.warn(CLIPPED, RuntimeWarning, stacklevel=4)
    return 1 / scale


def _identities(parameters: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Of the gradient of each parameter, with its version and that of the parameter."""
    pairs = [(parameter.grad, parameter._version) for parameter in parameters]
    return [(0, 0, count) if grad is None else (id(grad), grad._version, count) for grad, count in pairs]


def _reaches(tensor: Tensor, wanted: set[int]) -> bool:
    """Whether a tensor sends gradients to one of these, by their ids."""
    edges = () if tensor.grad_fn is None else graph_edges(tensor)
    return id(tensor) in wanted or any(id(getattr(below, "variable", None)) in wanted for _, below in edges)


def _hook_counts(model: nn.Module, parameters: Sequence[Tensor]) -> list[int]:
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    counts = [len(hooks) for module in model.modules() for hooks in hooks_of(module)]
    return counts + [len(getattr(parameter, kind, None) or ()) for parameter in parameters for kind in kinds]


def run_closure(
    model: nn.Module, parameters: Sequence[Tensor], closure: Callable[[], Any], known: nn.Module
) -> Seen:
    """What a closure does, which is run once; it leaves no gradients behind."""
    watcher = Watcher(model, parameters)
    try:
        with torch.enable_grad():
            closure()
        return watcher.take(known)
    finally:
        watcher.close()
        for parameter in parameters:
            parameter.grad = None
