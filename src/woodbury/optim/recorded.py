"""Steps taken from CUDA graphs: a step as a function of tensors on a device, recorded, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from woodbury._batch import Batch
from woodbury.device import fingerprint, recording
from woodbury.device.recording import Key, Recording, Recordings
from woodbury.device.scalars import as_double, to_device
from woodbury.linalg import matmul_precision
from woodbury.model.plan import Plan
from woodbury.optim.faults import Doubts
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.problems import Context, Problems, Request, count_samples
from woodbury.optim.step import Step
from woodbury.optim.transaction import Transaction


class RecordedStep:
    """The step of a batch that a recording may hold: after two ordinary ones of a kind the third is recorded."""

    def __init__(self, context: Context, problems: Problems, request: Request, doubts: Doubts) -> None:
        problems.check_surroundings(context)
        self.context, self._problems, self._request, self._doubts = context, problems, request, doubts
        self._device = context.device
        self._plan = problems.structure.read(context.model, context.groups)
        self._rates = [group["lr"] for group in context.groups]
        self._moving = moving_state(context.state, self._device)
        self._samples = count_samples(request.inputs, request.targets)
        self._curvature_samples = problems.curvature_count(context, self._samples)

    def replay(self, recordings: Recordings, done: Callable[[StepInfo], None]) -> bool:
        """Whether the step was taken from a recording, made first if it is time; else take an ordinary one.

        `done` hears of the step as part of the move, perhaps twice.
        """
        key = self._key()
        if key is None:
            return False
        found = recordings.find(key)
        if found is None:
            if not recordings.is_due(key, self._device):
                return False
            if any(parameter.device != self._device for parameter in self.context.model.parameters()):
                recordings.give_up()
                return False
        order = self._problems.draw_order(self.context, self._samples, self._curvature_samples)
        if found is None:
            try:
                found = self._record()
            except RuntimeError:  # what no graph holds: a wait for the device
                recordings.give_up()
                return False
            recordings.add(key, found)
        for name, value in self._moving.items():
            recording.overwrite(found.state[name], value)
        found.load(self._request.inputs, self._request.targets, order, self._rates)
        graph, launched = found.graph, False

        def finish() -> None:
            nonlocal launched
            # in one line: an interrupt falls before it or after it
            launched = launched or graph.replay() is None
            done(StepInfo.later(graph.results.clone()))

        self.context.state.update(found.state)
        self.context.transaction.commit(finish)
        return True

    def _key(self) -> Key | None:
        """What must be the same for a recording to be valid; None where no graph can read the batch."""
        shape = recording.shape_of(self._request.inputs, self._request.targets, self._device)
        if shape is None:
            return None
        fixed = fingerprint_of(self.context, self._problems, self._plan, self._moving)
        return Key(fixed, (shape, self._curvature_samples))

    def _record(self) -> Recording:
        """A recording of the step, which computes nothing yet and leaves no numbers behind."""
        transaction, dtype = self.context.transaction, torch.promote_types(self._plan.dtype, torch.float32)
        batch = self._request.inputs, self._request.targets
        transaction.watch(self._plan, None)
        try:
            return Recording(*batch, self._rates, self._moving, self._device, dtype, self._run)
        except BaseException:
            transaction.undo()
            raise
        finally:
            self.context.state.update(self._moving)

    def _run(self, inputs: Any, targets: Tensor | None, rates: list[Tensor], state: dict[str, Any]) -> Tensor:
        """The numbers of a step on these buffers, whose state becomes the new one."""
        current = self.context.state
        current.update(state)
        batch = Batch(inputs, targets, self._samples, self._curvature_samples)
        context = replace(self.context, transaction=Transaction(current))
        posed = self._problems.problem(context, self._plan, batch, self._request, rates)
        numbers = Step(context, *posed, self._doubts).take(lambda info: None)._numbers
        # the others have their defaults: nothing with a search is recorded
        shown = torch.stack([as_double(value) for value in numbers[: len(Numbers._fields) - 3]])
        recording.overwrite(state, {name: current[name] for name in state})
        return shown


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
        *(matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
        fingerprint.of_value(settings.damping),
        fingerprint.of_function(settings.forward),
        fingerprint.of_model(context.model),
        fingerprint.of_model(settings.loss),
    )
