"""What `woodbury.fit` returns."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from woodbury.fit import plot

REASONS = {
    "tolerance": "the tolerance is reached",
    "steps": "all steps are taken",
    "epochs": "all epochs are over",
    "seconds": "the time is up",
    "stalled": "nothing moves any more",
    "validation": "the validation loss has stopped falling",
    "evidence": "the evidence has stopped rising",
    "callback": "the callback asked to stop",
    "interrupted": "interrupted",
}


@dataclass(repr=False)
class Fit:
    """What `woodbury.fit` reached. The model holds the best parameters.

    loss, validation, metrics, best_step and samples are about the model as it was returned. They are measured anew
    at the end, in evaluation mode; losses without weight decay.
    """

    # of the data; with a sampler of samples drawn at the end, with a loader of the batches of an epoch
    loss: float = math.inf
    validation: float | None = None  # the loss on the validation data, if there is any
    metrics: dict[str, float] = field(default_factory=dict)  # by name, those of `fit(metrics=...)`
    best_step: int = 0  # the step that led to the parameters
    steps: int = 0
    seconds: float = 0.0  # without those of the callback
    samples: int = 0  # of that step
    reason: str = "running"  # or why it stopped: one of `REASONS`
    # per step, with a loader per epoch: step, seconds, loss before it or its mean, samples, ...
    history: list[dict[str, Any]] = field(default_factory=list)
    # validation=0.2: indices of the samples trained on, and of the others
    split: tuple[Tensor, Tensor] | None = None
    # weight_decay="evidence": the variance of the noise, for squared error; for robust losses their sum over the
    # count of predicted numbers less effective_parameters
    noise: float | None = None
    effective_parameters: float | None = None  # weight_decay="evidence": how many the data determines
    log_evidence: float | None = None
    state: dict[str, Any] = field(default_factory=dict)
    make_posterior: Callable[[], Any] | None = None  # weight_decay="evidence": for `woodbury.posterior(fit)`

    def state_dict(self) -> dict[str, Any]:
        """What `fit(..., resume=...)` needs to go on: plain numbers, lists and tensors, for torch.save."""
        history = [dict(record) for record in self.history]
        so_far = {"steps": self.steps, "seconds": self.seconds, "history": history}
        return {"samples": self.samples, **self.state, **so_far}

    def plot(self) -> Any:
        """Losses, best step, metrics, and length and samples of steps where they change: a matplotlib Figure."""
        return plot.draw(self)

    def _repr_html_(self) -> str:
        page = f"<p>{html.escape(str(self))}</p>"
        with suppress(ImportError):  # of matplotlib
            self.plot().savefig(picture := io.BytesIO(), dpi=100)
            page += f'<img src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
        return page

    @property
    def metrics_shown(self) -> str:
        return "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())

    def __str__(self) -> str:
        validation = (
            "" if self.validation is None else f", validation {self.validation:.3g} (step {self.best_step})"
        )
        samples = f"{self.samples} samples per step"
        if self.split is not None:
            samples += f", {len(self.split[1])} others for validation"
        judged = f"loss {self.loss:.3g}{validation}{self.metrics_shown}"
        reason = REASONS.get(self.reason, self.reason)
        return f"{judged} after {self.steps} steps, {self.seconds:.1f} s, {samples}: {reason}"

    def __repr__(self) -> str:
        return f"<Fit: {self}>"
