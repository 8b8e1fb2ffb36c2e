"""A step of an optimizer as a function that can be recorded into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from woodbury._batch import Batch
from woodbury.device import fingerprint, recording
from woodbury.device.recording import Key
from woodbury.device.replay import StepFunction
from woodbury.device.scalars import as_double, to_device
from woodbury.linalg import full_precision
from woodbury.model.plan import Plan
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.problems import Context, Problems, Request, count_samples

Take = Callable[[Plan, Batch, list[Any]], StepInfo]  # an ordinary step with these learning rates


class RecordedStep(StepFunction):
    """The step of a batch; see `woodbury.device.replay`."""

    def __init__(
        self,
        context: Context,
        problems: Problems,
        request: Request,
        take: Take,
        done: Callable[[StepInfo], None],
    ) -> None:
        problems.check_surroundings(context)
        self._context, self._problems, self._take = context, problems, take
        self.inputs, self.targets, self.device = request.inputs, request.targets, context.device
        self.plan = problems.plan(context)
        self.dtype = torch.promote_types(self.plan.dtype, torch.float32)
        self.rates = [group["lr"] for group in context.groups]
        self.moving = moving_state(context.state, self.device)
        self._samples = count_samples(self.inputs, self.targets)
        self._curvature_samples = problems.curvature_count(context, self._samples)
        self._done = done

    def key(self) -> Key | None:
        shape = recording.shape_of(self.inputs, self.targets, self.device)
        if shape is None:
            return None
        fixed = fingerprint_of(self._context, self._problems, self.plan, self.moving)
        return Key(fixed, (shape, self._curvature_samples))

    def can_be_recorded(self) -> bool:
        return all(parameter.device == self.device for parameter in self._context.model.parameters())

    def draw(self) -> Tensor | None:
        if self._curvature_samples == self._samples:
            return None
        state = self._context.state
        order, state["generator"] = self._problems.orders.draw(self._samples, state["generator"], self.device)
        return order

    def run(
        self, inputs: Any, targets: Tensor | None, rates: list[Tensor], state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        own = self._context.state
        own.update(state)
        batch = Batch(inputs, targets, self._samples, self._curvature_samples)
        numbers = self._take(self.plan, batch, rates)._numbers
        # the others have their defaults: nothing with a search is recorded
        shown = torch.stack([as_double(value) for value in numbers[: len(Numbers._fields) - 3]])
        return shown, {name: own[name] for name in state}

    def recording(self, succeeded: bool | None) -> None:
        if succeeded is None:
            self._context.transaction.watch(self.plan, None)
            return
        if not succeeded:
            self._context.transaction.undo()
        self._context.state.update(self.moving)

    def commit(self, state: dict[str, Any], launch: Callable[[], Tensor]) -> None:
        self._context.state.update(state)

        def finish() -> None:
            self._done(StepInfo.later(launch()))

        self._context.transaction.commit(finish)


def moving_state(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The state that every step replaces, as tensors on the device."""
    moving: dict[str, Any] = {"damping": to_device(state["damping"], device)}
    if "scale" in state:
        moving["scale"] = to_device(state["scale"], device)
    if "momentum" in state:
        moving["momentum"] = {name: part.to(device) for name, part in state["momentum"].items()}
    return moving


def fingerprint_of(context: Context, problems: Problems, plan: Plan, moving: Mapping[str, Any]) -> Hashable:
    """All that the numbers of a step depend on beside its batch, the learning rates and the moving state."""
    settings = context.settings
    groups = [(float(group["momentum"]), float(group["weight_decay"])) for group in context.groups]
    return (
        *(fingerprint.Same(plan), problems.structure.groups, tuple(groups), tuple(moving)),
        *(settings.accept, settings.curvature_samples, settings.blocks, settings.solver),
        *(settings.autocast, settings.max_bytes, settings.gram_dtype),
        *(full_precision.settings(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
        fingerprint.of_value(settings.damping),
        fingerprint.of_function(settings.forward),
        fingerprint.of_model(context.model),
        fingerprint.of_model(settings.loss),
    )
