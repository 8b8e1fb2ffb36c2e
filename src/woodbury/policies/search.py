"""Search policies: which p to take from a ladder of dampings, and how far to go along it.

A policy is a frozen dataclass, as a damping policy is; what it remembers from step to step is state of the
optimizer. `woodbury.policies.curved` does the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from woodbury._choice import check_number

LONGEST, SHORTEST = 2.0, 2.0**-20  # lengths alpha
MOST_RUNGS = 12  # all their subsets are tried


@dataclass(frozen=True)
class CurvedSearch:
    """A step for precision: a ladder of dampings, a bent path, and a deep line search on the true loss.

    1. p_j = -(B + lambda_j I)^{-1} g for lambda_j = rungs_j trace(K), from one Gram matrix. On the samples that
       judge the step (`held_out=`, else the batch) p = sum_j c_j p_j minimises the quadratic model over c >= 0:
       where these are other samples, c leaves out what the batch has only memorised.
       After steps that kept what the model promised there are up to two more: one for lambda = deep trace(K),
       where 1e-16 is about the least that float64 can factor, and one that continues it by 1, 2, 4 or 8
       iterations of conjugate gradients on B p = -g, preconditioned by (B + lambda I)^{-1}. Each step that gains
       0.7 of the promised decrease goes one further, each that gains less than 0.4 of it one back.
    2. theta(alpha) = theta + alpha p + alpha^2 b with b = -(B + lambda_b I)^{-1} J^T H y'' / 2, y'' the second
       derivative of the outputs along p (geodesic acceleration, Transtrum and Sethna 2012, for any loss).
    3. alpha by the true loss of the judging samples, along the bent and the straight path, from the last alpha on
       by factors of 2; none better than alpha = 0: the step is rejected.
    4. With `held_out=` the point theta + d found is corrected up to twice, as long as the true loss falls:
       d <- d - (B + lambda_b I)^{-1} J^T H (y(theta + d) - y - alpha J p), a chord iteration towards the outputs
       y + alpha J p that p is for. If that gained, the bent path is corrected at 2 alpha, and so on. (Where the
       batch judges itself there are none: they take more time than they save.)

    Dampings are relative to the trace of K, so that the scale of the loss or of the outputs does not matter. After
    three steps in a row that each gain less than 1 % of the loss, one step goes along the best single rung: from a
    bad start the search would creep along. For the same reason a step of length 2^-12 or less leaves out the
    smallest rung from then on, until one of length 1/4 or more brings it back. Where the targets are of quite
    another scale than what the parameters produce (30 times), the first step moves the one layer that takes away
    most of the loss.

    It is for full or large batches and for samplers, in float64 (or float32 with gram_dtype=torch.float64). In
    small noisy batches use a damping policy instead.

    Args:
        rungs: dampings lambda_j / trace(K), from large to small.
        bend: damping lambda_b / trace(K) of the bend; None for the straight path alone. One that is a rung as well
            costs no factorisation.
        first: damping lambda / trace(K) of a first step in one layer; None for none. Not with `held_out=`.
        deep: see 1.; None for none. There is none with weight decay, blocks, curvature from part of the batch, or
            in float32.
    """

    rungs: tuple[float, ...] = (1e-3, 1e-6, 1e-9, 1e-12, 1e-15)
    bend: float | None = 1e-12
    first: float | None = 1e-6
    deep: float | None = 1e-16

    def __post_init__(self) -> None:
        if not isinstance(self.rungs, tuple | list):
            raise TypeError(f"CurvedSearch: rungs must be a tuple of dampings, got {self.rungs!r}")
        object.__setattr__(self, "rungs", tuple(self.rungs))
        if not 1 <= len(self.rungs) <= MOST_RUNGS:
            raise ValueError(f"CurvedSearch: rungs must hold 1 to {MOST_RUNGS} dampings, got {len(self.rungs)}")
        named = [(f"rungs[{index}]", value) for index, value in enumerate(self.rungs)]
        named += [(name, getattr(self, name)) for name in ("bend", "first", "deep")]
        for name, value in named:
            if value is not None:
                check_number(f"CurvedSearch: {name}", value, above=0)
        if any(smaller >= larger for larger, smaller in zip(self.rungs, self.rungs[1:], strict=False)):
            raise ValueError(f"CurvedSearch: rungs must fall, from large to small, got {self.rungs}")


class Length(NamedTuple):
    """How far to go along a path, and what that gains."""

    length: float  # alpha; 0 if nothing is better than staying
    bent: bool
    decrease: float  # f(theta) - f(theta(alpha))


STAY = Length(0.0, False, 0.0)


def find_length(decrease: Callable[[float, bool], float], start: float, bends: bool) -> Length:
    """The best of the lengths start 2^k on the way downhill from `start`, along the bent and the straight path.

    decrease(alpha, bent) is f(theta) - f(theta(alpha)). Where the loss at `start` is no lower than at 0, shorter
    lengths follow until one is; then longer or shorter ones as long as they are better.
    """
    known: dict[float, Length] = {}
    paths = (True, False) if bends else (False,)

    def at(length: float) -> Length:
        if length not in known:
            trials = [Length(length, bent, decrease(length, bent)) for bent in paths]
            known[length] = max(
                trials, key=lambda own: own.decrease if own.decrease == own.decrease else -math.inf
            )
        return known[length]

    best = at(min(max(start, SHORTEST), LONGEST))
    while not best.decrease > 0 and best.length / 2 >= SHORTEST:
        best = at(best.length / 2)
    for factor in (2.0, 0.5):
        while SHORTEST <= factor * best.length <= LONGEST:
            trial = at(factor * best.length)
            if not trial.decrease > best.decrease:
                break
            best = trial
    return best if best.decrease > 0 else STAY
