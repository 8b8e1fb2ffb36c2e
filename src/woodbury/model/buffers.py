"""Buffers of a model (running statistics, say), which a pass may change: put back, or as one pass leaves them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from woodbury.device.scalars import Truth, as_truth, is_known

_LARGE = 2**20  # bytes of a buffer that is not copied at every step once passes have left it alone

Holder = dict[str, "Tensor | None"]  # module._buffers


def changing_buffers(model: nn.Module) -> tuple[Holder, ...]:
    """The buffers of the modules that may change theirs in a pass, in the modes they are in."""
    return tuple(module._buffers for module in model.modules() if _may_change(module))


def _may_change(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn.modules."):
        return bool(module._buffers) and (module.training or not isinstance(module, _NormBase))
    return isinstance(module._buffers, dict)  # a scripted module keeps its own


class _Entry(NamedTuple):
    """A buffer and what it held."""

    holder: Holder
    name: str
    tensor: Tensor | None
    values: Tensor | None  # a copy; None for a large buffer that no pass has changed so far

    @staticmethod
    def of(holder: Holder, name: str, quiet: Container[int] = ()) -> _Entry:
        """A buffer now, with a copy unless it is quiet."""
        tensor = holder.get(name)
        if tensor is None or id(tensor) in quiet:
            return _Entry(holder, name, tensor, None)
        return _Entry(holder, name, tensor, tensor.detach().clone())

    def put_back(self) -> None:
        self.holder[self.name] = self.tensor
        if self.tensor is not None and self.values is not None:
            self.tensor.detach().copy_(self.values)
        elif self.tensor is not None:
            warnings.warn(
                f"buffer {self.name!r} is large, no pass through the model had changed it before and one has now: "
                "it could not be put back",
                RuntimeWarning,
                stacklevel=2,
            )


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class Buffers:
    """The buffers of a model before a step, from which every pass of the step starts.

    Passes then repeat each other also where they read what they change (`spectral_norm` in training mode), and an
    accepted step leaves what one pass over its batch leaves.
    """

    def __init__(self, holders: Sequence[Holder], quiet: dict[int, Tensor]) -> None:
        """quiet are the large buffers, by their id, that passes are known to leave alone; it gains some here."""
        self._quiet = quiet
        self._before = [_Entry.of(holder, name, quiet) for holder in holders for name in holder]
        self._versions = [_version(entry.tensor) for entry in self._before]
        self._touched = False
        self._after: list[_Entry] | None = None  # those that a pass over the batch changes

    def _changed(self) -> list[int]:
        return [
            index
            for index, (entry, version) in enumerate(zip(self._before, self._versions, strict=True))
            if entry.holder.get(entry.name) is not entry.tensor or _version(entry.tensor) != version
        ]

    def put_back(self) -> None:
        """Make all buffers what they were before the step."""
        for index in self._changed():
            self._touched = True
            self._before[index].put_back()
            self._versions[index] = _version(self._before[index].tensor)

    def preserved(self, forward: Callable[..., Tensor], inputs: Any) -> Callable[..., Tensor]:
        """forward(model, batch) from the buffers of before; the first pass over `inputs` is what a step leaves."""

        @wraps(forward)
        def run(model: nn.Module, batch: Any) -> Tensor:
            self.put_back()
            outputs = forward(model, batch)
            if batch is inputs and self._after is None:
                self._note()
            return outputs

        return run

    def _note(self) -> None:
        entries = [self._before[index] for index in self._changed()]
        self._after = [_Entry.of(own.holder, own.name) for own in entries]

    def prepare(self, run: Callable[[], Any]) -> None:
        """Find out what an accepted step leaves; `run` makes a pass over the batch, if none was made so far."""
        self.put_back()
        if self._touched and self._after is None:
            with torch.no_grad():
                run()
            self._note()
            self.put_back()
        changed = {id(entry.tensor) for entry in self._after or ()}
        for entry in self._before:
            if entry.tensor is not None and entry.tensor.nbytes > _LARGE and id(entry.tensor) not in changed:
                self._quiet[id(entry.tensor)] = entry.tensor

    def settle(self, accepted: Truth) -> None:
        """Leave what one pass over the batch leaves if the step is accepted, else what was before it."""
        self.put_back()
        if not self._after or accepted is False:
            return
        before = {(id(entry.holder), entry.name): entry.values for entry in self._before}
        for entry in self._after:
            old = before[id(entry.holder), entry.name]
            entry.put_back()
            if not is_known(accepted) and entry.tensor is not None and old is not None:
                entry.tensor.detach().copy_(torch.where(as_truth(accepted), entry.tensor, old))
