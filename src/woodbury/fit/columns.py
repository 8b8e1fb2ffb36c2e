"""Input columns that lie far from (-1, 1): where a fit would suffer, one warning names them and the way out.

A column with values from c - h to c + h is far if its deviation is above 6 (h above 10, if it is uniform), or h
below 1/6, or |c| above 3 h. For a smooth function of two inputs, 200 samples, noise 0.1 (error 0.0035 with h = 1,
c = 0) one column with h = 30, h = 0.1 or c = 3 h makes the error 10, 20 or 6 times as large; h = 10 does not.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

from torch import Tensor, nn

from woodbury.model.fallback import Forward

WIDEST, NARROWEST, FARTHEST = 6.0, 1 / 6, 3.0
FEWEST_SAMPLES, MOST_SAMPLES = 20, 10_000  # that are looked at


class _SeenError(Exception):
    """Ends a pass at the first layer."""


def warn_of_columns(model: nn.Module, forward: Forward, inputs: Any) -> None:
    """Warn if the first layer that holds numbers is a Linear, and columns of what it gets are far."""
    seen = _first_inputs(model, forward, inputs)
    if seen is None or seen.dim() not in (2, 3) or len(seen) < FEWEST_SAMPLES:
        return
    columns = (seen if seen.dim() == 2 else seen[:, 0])[:MOST_SAMPLES]  # of several positions the first
    far = _far_columns(columns)
    if far:
        worst = columns[:, max(far, key=lambda own: float(columns[:, own].abs().max()))]
        shown = ", ".join(map(str, far[:8])) + (", ..." if len(far) > 8 else "")
        warnings.warn(
            f"fit: column(s) {shown} of the inputs lie far from (-1, 1), as from {float(worst.min()):.4g} to "
            f"{float(worst.max()):.4g}, and the fit may suffer: put scales around the network, "
            "torch.nn.Sequential(woodbury.Scale.inputs(x), network, woodbury.Scale.targets(y))",
            stacklevel=5,
        )


def _first_inputs(model: nn.Module, forward: Forward, inputs: Any) -> Tensor | None:
    """What a first Linear gets; None where something else with parameters or buffers comes first."""
    found: list[Tensor] = []

    def stop(module: nn.Module, given: tuple[Any, ...]) -> NoReturn:
        if isinstance(module, nn.Linear) and len(given) == 1:
            found.append(given[0].detach().clone())
        raise _SeenError

    leaves = [own for own in model.modules() if own._parameters or own._buffers]
    hooks = [own.register_forward_pre_hook(stop) for own in leaves]
    try:
        forward(model, inputs)
    except Exception:  # any but _SeenError comes again in the first step
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _far_columns(columns: Tensor) -> list[int]:
    """Without those that are mostly at one end, as of one-hot vectors and pixels, unless these are wide."""
    low, high = columns.amin(0), columns.amax(0)
    half, middle = (high - low) / 2, columns.median(0).values
    is_spread = (middle > low) & (middle < high)
    is_far = is_spread & ((half < NARROWEST) | ((high + low).abs() / 2 > FARTHEST * half))
    far: list[int] = (is_far | (columns.std(0, correction=0) > WIDEST)).nonzero().flatten().tolist()
    return far
