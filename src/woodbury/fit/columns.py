"""Columns of inputs and targets where a fit would suffer, as they lie far from (-1, 1): one warning names them.

A column of inputs with values from c - h to c + h is far if its deviation is above 6 (h above 10, if it is
uniform), or h below 1/6, or |c| above 3 h. For a smooth function of two inputs, 200 samples, noise 0.1 (error
0.0035 with h = 1, c = 0) one column with h = 30, h = 0.1 or c = 3 h makes the error 10, 20 or 6 times as large;
h = 10 does not.

A column of targets is far if its root mean square is above 75, and steps have no search, which takes the model
there. For 300 noisy samples and `validation=` targets such as sin + 30 or 100 sin cost little; 20 sin + 100,
1000 sin and 20 sin + 1000 make the error 5 to 30 times as large. Small targets do no harm, except by the evidence,
whose priors begin near 1: below 0.01 (error 0.0035 for targets near 1, 0.007 for 1e-3, 0.1 for 1e-5).
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from woodbury import _random
from woodbury._batch import in_words
from woodbury._process import level_of_caller
from woodbury.jets import Jet
from woodbury.losses.elementwise import Robust, SquaredError
from woodbury.losses.rules import loss_rule
from woodbury.optim import GaussNewton

WIDEST, NARROWEST, FARTHEST = 6.0, 1 / 6, 3.0
LARGEST = 75.0
FEWEST_SAMPLES, MOST_SAMPLES = 20, 10_000  # that are looked at


def warn_of_columns(optimizer: GaussNewton, inputs: Any, targets: Tensor | None, smallest: float = 0.0) -> None:
    """Warn of columns that a Linear meets as they are: of inputs if it is the first layer, of targets the last.

    smallest: the root mean square of targets below which they are too small.
    """
    model, forward = optimizer.model, optimizer.forward
    seen: list[tuple[nn.Module, Tensor]] = []

    def stop(module: nn.Module, given: tuple[Tensor]) -> NoReturn:
        values = given[0].value if isinstance(given[0], Jet) else given[0]
        seen.append((module, values.detach().clone()))
        raise InterruptedError

    def note(module: nn.Module, given: Any, result: Tensor) -> None:
        seen.append((module, result))

    def run(register: str, hook: Any) -> Any:
        """Outputs of the model, if it gets that far, with a hook on what has parameters or buffers."""
        seen.clear()
        hooks = [getattr(own, register)(hook) for own in model.modules() if own._parameters or own._buffers]
        try:
            with suppress(Exception), _random.kept(next(iter(model.parameters())).device):
                return forward(model, inputs).detach()  # errors come again in the first step
        finally:
            for own in hooks:
                own.remove()

    run("register_forward_pre_hook", stop)
    of_inputs = _far_inputs(seen[0][1]) if seen and isinstance(seen[0][0], nn.Linear) else []
    is_regression = isinstance(loss_rule(optimizer.loss), SquaredError | Robust)
    of_targets = _far_targets(targets, smallest) if is_regression and optimizer.settings.search is None else []
    if of_targets:
        outputs = run("register_forward_hook", note)
        last, result = seen[-1] if seen else (model, inputs)
        if outputs is None or not isinstance(last, nn.Linear) or not result.flatten().equal(outputs.flatten()):
            of_targets = []
    parts = [(of_inputs, "inputs"), (of_targets, "targets")]
    named = [
        f"column{'s' if len(columns) > 1 else ''} {in_words(columns)} of the {what}"
        for columns, what in parts
        if columns
    ]
    if named:
        verb = "is" if len(of_inputs) + len(of_targets) == 1 else "are"
        warnings.warn(
            f"fit: {' and '.join(named)} {verb} far from (-1, 1), and fits may suffer: put scales around "
            "the network, torch.nn.Sequential(woodbury.Scale.inputs(x), network, woodbury.Scale.targets(y))",
            stacklevel=level_of_caller(),
        )


def _columns(values: Tensor) -> Tensor | None:
    """(n, columns), of several positions the first; None where there is nothing to judge."""
    is_dense = values.is_floating_point() and values.layout is torch.strided
    if values.dim() not in (2, 3) or len(values) < FEWEST_SAMPLES or not is_dense:
        return None
    columns = values[:MOST_SAMPLES].detach()
    return columns if columns.dim() == 2 else columns[:, 0]


def _far_targets(values: Tensor | None, smallest: float) -> list[int]:
    columns = None if values is None else _columns(values[:, None] if values.dim() == 1 else values)
    if columns is None:
        return []
    squares = columns.double().square().mean(0)
    return ((squares > LARGEST**2) | (squares > 0) & (squares < smallest**2)).nonzero().flatten().tolist()


def _far_inputs(values: Tensor) -> list[int]:
    """Columns mostly at one end, as of one-hot vectors and pixels, are far only if they are wide."""
    columns = _columns(values)
    if columns is None:
        return []
    low, high, middle = columns.amin(0), columns.amax(0), columns.median(0).values
    half, center, is_spread = (high - low) / 2, (high + low) / 2, (middle > low) & (middle < high)
    is_far = (half < NARROWEST) | (center.abs() > FARTHEST * half)
    is_wide = columns.std(0, correction=0) > WIDEST
    return (is_spread & is_far | is_wide).nonzero().flatten().tolist()
