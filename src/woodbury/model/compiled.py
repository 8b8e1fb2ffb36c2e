"""Models that torch.compile has compiled: a step runs them as they were written.

Compiled code cannot be looked into: its backward pass runs once, for one column, and what a step exchanges in a
layer to capture its input would be compiled anew at every step. Outside of a step the model stays compiled.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._process import ForAllThreads
from woodbury.model.fallback import Forward
from woodbury.model.plan import Plan

# Inside, compiled modules and functions run as they were written.
uncompiled = ForAllThreads(lambda: torch.compiler.set_stance("force_eager"))


def written_model(model: Any) -> Any:
    """The module inside what torch.compile returns for it, and anything else as it is."""
    inside = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
    return inside if isinstance(inside, nn.Module) else model


def run_as_written(plan: Plan, forward: Forward) -> Forward:
    """forward(model, inputs) without compiled code, where the model has some."""

    @wraps(forward)
    def run(model: nn.Module, inputs: Any) -> Tensor:
        if not plan.findings.compiled:
            return forward(model, inputs)
        with uncompiled:
            return forward(model, inputs)

    return run
