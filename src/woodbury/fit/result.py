"""What `woodbury.fit` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

REASONS = {
    "tolerance": "the tolerance is reached",
    "steps": "all steps are taken",
    "epochs": "all epochs are over",
    "seconds": "the time is up",
    "stalled": "nothing moves any more",
    "validation": "the validation loss has stopped falling",
    "callback": "the callback asked to stop",
    "interrupted": "interrupted",
}


@dataclass
class Fit:
    """What `woodbury.fit` reached. The model holds the best parameters."""

    # of the model as it is; with a sampler on samples drawn at the end, with a loader the mean over the last epoch
    loss: float = math.inf
    steps: int = 0
    seconds: float = 0.0  # without those of the callback
    samples: int = 0  # per step, at the end
    reason: str = "running"  # or why it stopped: one of `REASONS`
    # per step, with a loader per epoch: step, seconds, loss before it or its mean, samples, ...
    history: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def state_dict(self) -> dict[str, Any]:
        """What `fit(..., resume=...)` needs to go on: plain numbers, lists and tensors, for torch.save."""
        return {**self.state, "steps": self.steps, "seconds": self.seconds, "samples": self.samples} | {
            "history": [dict(record) for record in self.history]
        }

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3g} after {self.steps} steps, {self.seconds:.1f} s, {self.samples} samples per "
            f"step: {REASONS.get(self.reason, self.reason)}"
        )
