"""Steps from a loop of the user's own: `step(closure)`, and `loss.backward(); optimizer.step()` with watch=True.

Hooks on the model note what it was called with and give its outputs a tape (`woodbury.loop.tape`), which notes
the operations up to `backward`. From the two follows what `step(inputs, targets)` would have been given.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _random
from woodbury.loop.calls import ModelCall, SeenBatch, differentiable, join, versions_of
from woodbury.loop.seen import (
    FUNCTIONS,
)
from woodbury.loop.tape import LossesInside, Node, Taped, tape
from woodbury.model.compiled import WrittenCall

UNWATCHED = (
    "step() without a batch, whose inputs must hold at least one tensor, and no loss.backward() was watched since "
    "the last step. Ways out: write optimizer.step(inputs, targets), without backward; optimizer.step(closure), "
    "where the closure computes the loss and calls backward; or watch=True when the optimizer is made, before the "
    "model is called"
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

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None, self._name)


class Watcher:
    """Notes the calls of a model and the backward passes of losses, from its making on until `close`."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], *, runs_backward: bool) -> None:
        self._model = model
        self._probe = min(parameters, key=lambda parameter: parameter.numel())
        self._runs_backward = runs_backward  # a closure's own need not be run: the step has one
        self._calls: list[ModelCall] = []  # whose loss was sent back since the last step
        self._open: list[tuple[ModelCall, LossesInside]] = []  # calls that are running
        self._gradient: Tensor | None = None  # of the probe, after the last backward pass
        self._off = False
        self._looks_inside = True  # until the model has shown that it computes no loss
        self._version: int | None = None  # of that gradient
        self._handles: list[Any] = []
        self._open_hooks()

    def _open_hooks(self) -> None:
        WrittenCall.put_on(self._model)  # a loop may compile the model, around these hooks
        self._handles = [
            self._model.register_forward_pre_hook(_Hook(self, "_before"), with_kwargs=True),
            self._model.register_forward_hook(_Hook(self, "_after"), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        WrittenCall.take_off(self._model)
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, calls of the model are not noted, and it has no hooks of ours: it may be a plain chain."""
        self._off = True
        self.close()
        try:
            yield
        finally:
            self._open_hooks()
            self._off = False

    # -- hooks -------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._off or not torch.is_grad_enabled() or self._open:
            return
        random = _random.snapshot(self._probe.device)
        call = ModelCall(args, dict(kwargs), random, module.training, versions_of(args, kwargs))
        inside = LossesInside(FUNCTIONS, lambda root, run: self._hear(call, root, run))
        if self._looks_inside:
            inside.__enter__()
        self._open.append((call, inside))

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if self._off or not self._open:
            return None
        call, inside = self._open.pop()
        if self._looks_inside:
            inside.__exit__(None, None, None)
        if outputs is None:  # the model raised
            return None
        call.is_tensor = isinstance(outputs, Tensor)
        call.outputs = [leaf for leaf in inside.inputs if leaf.requires_grad]
        if call.outputs:
            call.inside = True
            return None
        found = differentiable(outputs)
        call.outputs = found
        self._looks_inside = not (isinstance(outputs, Tensor) and outputs.dim())
        if not found:
            return None

        def hears(root: Node, run: Callable[[], Any]) -> None:
            self._hear(call, root, run)

        if isinstance(outputs, Tensor):
            return tape(outputs, hears)
        known = {id(leaf) for leaf in found}
        return pytree.tree_map(lambda leaf: tape(leaf, hears) if id(leaf) in known else leaf, outputs)

    def _hear(self, call: ModelCall, root: Node, run: Callable[[], Any]) -> None:
        """A backward pass from a loss of a call starts."""
        if self._off:
            run()
            return
        bases = root.bases()
        if call.root is not None:
            raise ValueError("two backward passes through one call of the model: add the losses up first")
        if len(bases) != 1:
            raise ValueError(
                "the loss depends on several outputs of the model, or on two calls of it: a step needs a loss of "
                "one tensor of outputs, from one call (join the inputs, or return one tensor)"
            )
        if root.strangers():
            raise ValueError(
                "the loss depends on tensors with a gradient beside the outputs of the model: a penalty on the "
                "weights (use weight_decay= of the optimizer instead), or parameters outside of the model"
            )
        if root.tensor.numel() != 1:
            raise ValueError(f"backward from a loss of shape {tuple(root.tensor.shape)}: it must be one number")
        self._check_gradients_before()
        if self._runs_backward:
            run()
        else:
            self._probe.grad = torch.zeros_like(self._probe)  # clipping shows itself by its trace
        call.root = root
        base = bases[0]
        same = [
            leaf.data_ptr() == base.tensor.data_ptr() and leaf.shape == base.tensor.shape for leaf in call.outputs
        ]
        call.place = same.index(True) if True in same else 0
        self._calls.append(call)
        own = self._probe.grad
        self._gradient = None if own is None else own.detach().clone()
        self._version = None if own is None else own._version

    def _check_gradients_before(self) -> None:
        """Drop calls of before zero_grad, and raise where gradients are there that nobody watched."""
        own = self._probe.grad
        if own is None or not bool(own.any()):
            if self._runs_backward or own is None:
                self._calls.clear()
            return
        if not self._calls or self._gradient is None:
            raise ValueError(
                "parameters hold gradients of a backward pass that was not watched, or of the step before: call "
                "zero_grad() after each step, and add losses up before one backward pass. In a closure, gradients "
                "cannot be accumulated: pass watch=True for that"
            )
        self._changed_by(own)

    # -- what a step asks --------------------------------------------------------------------------------

    def clear(self) -> None:
        self._calls.clear()
        self._gradient = None

    def _changed_by(self, own: Tensor) -> float:
        """The factor by which the gradient of the probe was multiplied since the last backward pass.

        Warns of clipping, and raises if it was changed in another way.
        """
        before = self._gradient
        assert before is not None
        if torch.equal(own, before):
            return 1.0
        size = float(before.square().sum())
        factor = float((own * before).sum()) / size if size else 0.0
        if factor <= 0 or float((own - factor * before).abs().max()) > 1e-3 * abs(factor) * math.sqrt(size):
            raise ValueError(
                "gradients were changed between loss.backward() and step(), or come from another loss as well (a "
                "penalty with a backward pass of its own?): a step is that of the watched loss alone. For a "
                "penalty on the weights use weight_decay="
            )
        power = math.log2(factor)
        if abs(power - round(power)) < 1e-6:
            return 2.0 ** round(power)  # GradScaler has taken its scale back
        self._warn_of_clipping()
        return 1.0

    def _warn_of_clipping(self) -> None:
        warnings.warn(
            "gradients were clipped before step(): a second-order step does not use them and is not shorter for "
            "it. Leave clipping out (Lightning: gradient_clip_val=None, Trainer: max_grad_norm=0); the damping "
            "and the guard bound a step",
            RuntimeWarning,
            stacklevel=2,
        )

    def take(self, known: nn.Module, count: int) -> SeenBatch:
        """The batch and the loss of the calls since the last step, for its `count`-th step; forgets them."""
        calls, own = self._calls, self._probe.grad
        if not calls:
            raise ValueError(UNWATCHED)
        factor = 1.0
        if not self._runs_backward:
            if own is None or own._version != self._version:
                self._warn_of_clipping()
            self._probe.grad = None
        elif own is not None and self._gradient is not None:
            factor = self._changed_by(own)
        self._calls = []
        for call in calls:
            call.check_unchanged(self._model)
        return join(calls, factor, known, count)


def run_closure(
    model: nn.Module, parameters: Iterable[Tensor], closure: Callable[[], Any], known: nn.Module, count: int
) -> SeenBatch:
    """The batch and the loss of a closure; it is run once, and its backward pass is not."""
    watcher = Watcher(model, list(parameters), runs_backward=False)
    try:
        with torch.enable_grad():
            value = closure()
        if not watcher._calls and isinstance(value, Taped):  # a closure that only returns the loss
            value.backward()
        if not watcher._calls:
            raise ValueError(
                "the closure called no loss.backward() on a loss of this model's outputs: it must call the model, "
                "compute the loss from its outputs and call backward (torch.autograd.backward is not seen). Or "
                "write optimizer.step(inputs, targets)"
            )
        if len(watcher._calls) > 1:
            raise ValueError(
                "the closure calls the model and backward more than once: a step needs one loss of one call. With "
                "watch=True several backward passes before a step are added up"
            )
        return watcher.take(known, count)
    finally:
        watcher.close()
