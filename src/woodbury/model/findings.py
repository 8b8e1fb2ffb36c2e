"""What passes through a model have shown about it: read anywhere, and written here.

The two counts of passes alone are set by `woodbury.quadratic.passes`, which makes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MANY_PASSES = 20  # of a step, from which on it says so
_MAX_CHECKED = 256  # shapes, and kinds of uses, that are remembered


@dataclass
class Findings:
    """What passes through a model have shown about it."""

    compiled: bool | None = None  # whether the model runs compiled code; None until a pass has shown it
    is_chain: bool | None = None  # whether a pass over a batch was one along a chain; None until one has shown it
    uncapturable: dict[str, str] = field(default_factory=dict)  # layers whose calls cannot be captured, and why
    checked_bare: set[Hashable] = field(default_factory=set)  # uses of bare parameters whose rows were right
    wrong_bare: dict[Hashable, int] = field(default_factory=dict)  # and how often they were wrong
    fallback_method: str | None = None  # the one that worked, as `woodbury.model.fallback` names it
    checked_rows: set[tuple[str, torch.Size]] = field(default_factory=set)  # its methods and shapes found right
    checked_curve: bool = False  # whether second derivatives by forward mode were compared with differences
    can_exchange: bool | None = None  # whether all uses of parameters are by modules; None until a pass shows it
    forward_order: int = 2  # how often forward mode differentiates the model, until it has failed to
    warned: bool = False  # whether someone was told how many passes a step takes
    warned_of_mixing: bool = False  # whether someone was told that a later look found samples mixed
    passes: int = 0  # how many, over more than one sample
    parts: int = 0  # how many steps with curvature samples that are part of the batch
    quiet_buffers: dict[int, Tensor] = field(default_factory=dict)  # large ones that no pass changes, by id

    def note_compiled(self, compiled: bool) -> None:
        self.compiled = compiled

    def note_chain(self, is_chain: bool) -> None:
        self.is_chain = is_chain

    def leave_out(self, obstacles: Mapping[str, str]) -> None:
        """Calls of these layers cannot be captured, for these reasons."""
        self.uncapturable.update(obstacles)

    def note_bare(self, uses: Mapping[str, Hashable], wrong: Collection[str], shape: torch.Size) -> None:
        """Rows of the uses of bare parameters were right for columns of a shape, but for the wrong ones."""
        if len(self.checked_bare) + len(self.wrong_bare) >= _MAX_CHECKED:
            self.checked_bare.clear()
            self.wrong_bare.clear()
        for name, use in uses.items():
            if name in wrong:
                self.wrong_bare[use] = self.wrong_bare.get(use, 0) + 1
            else:
                self.checked_bare.add((use, shape))

    def note_method(self, method: str, shape: torch.Size | None = None) -> None:
        """A method of the fallback gave rows; those for columns of this shape were right."""
        self.fallback_method = method
        if shape is not None:
            if len(self.checked_rows) >= _MAX_CHECKED:
                self.checked_rows.clear()
            self.checked_rows.add((method, shape))

    def note_exchange(self, can_exchange: bool) -> None:
        self.can_exchange = can_exchange

    def note_curve(self, agrees: bool) -> None:
        """Second derivatives by forward mode were compared with differences."""
        self.checked_curve = True
        if not agrees:
            self.lower_forward_order(1)

    def lower_forward_order(self, order: int) -> None:
        """Forward mode differentiates the model no more often than this."""
        self.forward_order = min(order, self.forward_order)

    def take_over(self, earlier: Findings) -> None:
        """What was said about the model as it was need not be said again."""
        self.warned = earlier.warned

    def warn_of_passes(self, count: int, text: str) -> None:
        """Say once that a step takes many passes, and why."""
        if count > _MANY_PASSES and not self.warned:
            self.warned = True
            message = f"a step takes the time of {count} passes through the model: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def warn_of_mixing(self, reason: str) -> None:
        """Say once that samples look mixed after they did not."""
        if not self.warned_of_mixing:
            self.warned_of_mixing = True
            message = f"{reason}. An earlier look found nothing, so that the steps go on; they may be wrong"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
