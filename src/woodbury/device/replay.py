"""A step function replayed from CUDA graphs where that is possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from woodbury.device import recording
from woodbury.device.recording import Key, Recording, Recordings


class StepFunction(ABC):
    """One step, as a function of tensors that live on a device."""

    device: torch.device
    dtype: torch.dtype  # of the learning rates
    inputs: Any
    targets: Tensor | None
    rates: list[Any]  # the learning rate of each parameter group
    moving: dict[str, Any]  # the state that every step replaces, as tensors on the device

    @abstractmethod
    def key(self) -> Key | None:
        """What must be the same for a recording to be valid; None where no graph can read the batch."""

    @abstractmethod
    def can_be_recorded(self) -> bool:
        """Whether everything lies on the device."""

    @abstractmethod
    def draw(self) -> Tensor | None:
        """The order of the samples, drawn anew; None for the order they have."""

    @abstractmethod
    def run(
        self, inputs: Any, targets: Tensor | None, rates: list[Tensor], state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The numbers of a step on these buffers, and the new state."""

    @abstractmethod
    def recording(self, succeeded: bool | None) -> None:
        """Before a recording (None), and after it: it computes nothing, and leaves no numbers behind."""

    @abstractmethod
    def commit(self, state: dict[str, Any], launch: Callable[[], Tensor]) -> None:
        """Take the step by a function that may be called again if it was interrupted."""


class Replay:
    """Takes steps from recordings: after two ordinary ones of a kind the third is recorded, and replayed."""

    def __init__(self) -> None:
        self.recordings = Recordings()

    def take(self, step: StepFunction) -> bool:
        """Whether the step was taken from a recording, made first if it is time; else take an ordinary one."""
        key = step.key()
        if key is None:
            return False
        found = self.recordings.find(key)
        if found is None:
            if not self.recordings.is_due(key, step.device):
                return False
            if not step.can_be_recorded():
                self.recordings.give_up()
                return False
        order = step.draw()
        if found is None:
            found = self._record(step)
            if found is None:
                return False
            self.recordings.add(key, found)
        for name, value in step.moving.items():
            recording.overwrite(found.state[name], value)
        found.load(step.inputs, step.targets, order, step.rates)
        graph, numbers, launched = found.graph, found.numbers, False

        def launch() -> Tensor:
            nonlocal launched
            # in one line: an interrupt falls before it or after it
            launched = launched or graph.replay() is None  # type: ignore[func-returns-value]
            return numbers.clone()

        step.commit(found.state, launch)
        return True

    def _record(self, step: StepFunction) -> Recording | None:
        """A recording of the step; None, and no further tries, for what no graph holds: a wait for the device."""
        step.recording(None)
        succeeded = False
        try:
            made = recording.record(
                step.inputs,
                step.targets,
                rates=step.rates,
                state=step.moving,
                device=step.device,
                dtype=step.dtype,
                run=step.run,
            )
            succeeded = True
            return made
        except RuntimeError:
            self.recordings.give_up()
            return None
        finally:
            step.recording(succeeded)

    def ordinary_step_ended(self, device: torch.device, drew_numbers: bool) -> None:
        """Note what an ordinary step has shown: its size, and whether it draws random numbers."""
        self.recordings.ordinary_step_ended(device)
        if drew_numbers:
            self.recordings.give_up()
