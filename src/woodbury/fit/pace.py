"""How long a step on all samples of a pair takes, before the first one, and on how many one fits in the time.

With R rows, P parameters, s = min(R, P), and layers whose inputs and outputs have W numbers together, a step takes

    2 R s P (R > P, parameter space) or 2 R^2 W (sample space)     for the matrix
    s^3                                                            for each factorisation

operations. The machine is timed with products of matrices, which run three times as fast as a factorisation: its
s^3 / 3 operations count three times.
"""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from woodbury._process import level_of_caller
from woodbury.fit.sources import Data
from woodbury.optim import GaussNewton

FEWEST_STEPS = 5  # on all samples that must fit in the time, or a step has fewer of them
STEPS = 40  # that fit in then
LEAST = 64  # samples of a step
SLOW = 0.5  # seconds of a step
SLOWEST = 1e9  # operations per second of any machine: where these do, none is timed


class Pace:
    """What steps on samples of a pair take, as far as products of matrices and factorisations go."""

    def __init__(self, optimizer: GaussNewton, data: Data, samples: int) -> None:
        trained = [own for group in optimizer.param_groups for own in group["params"]]
        self.samples, self.size = samples, sum(own.numel() for own in trained)
        self.width = sum(own.shape[0] + own[0].numel() for own in trained if own.dim() > 1)
        self.columns = _columns(data[1])
        search = optimizer.settings.search
        self.factorisations = 1 if search is None else len(search.rungs)
        self.dtype = optimizer.settings.gram_dtype or trained[0].dtype
        self.is_known = trained[0].device.type == "cpu"

    def operations(self, samples: int) -> float:
        """Of one step on so many samples."""
        rows = float(samples * self.columns)
        small = min(rows, self.size)
        matrix = 2 * rows * (self.size**2 if rows > self.size else rows * self.width)
        return matrix + self.factorisations * small**3

    def operations_per_second(self) -> float:
        """The best of short tries, which other programs disturb least."""
        matrix, best = torch.ones(256, 256, dtype=self.dtype, device="cpu"), math.inf
        for _ in range(20):
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            best = min(best, time.perf_counter() - started)
        return 2 * 256**3 / best

    def seconds_beyond(self, seconds: float | None, steps: int) -> float | None:
        """The seconds of a step on all samples, if so many steps do not fit in the time."""
        work = self.operations(self.samples)
        if not seconds or not self.is_known or steps * work <= SLOWEST * seconds:
            return None
        needed = work / self.operations_per_second()
        return needed if steps * needed > seconds else None

    def warn_of_slow_steps(self) -> None:
        """Where time is not limited: say so if a step takes long."""
        needed = self.seconds_beyond(SLOW, 1)
        if needed is not None:
            warnings.warn(
                f"fit: a step on all {self.samples} samples takes about {needed:.2g} s. Mini-batches take a small "
                "part of it, where digits do not matter: fit(model, loss, loader, epochs=20)",
                stacklevel=level_of_caller(),
            )

    def samples_for(self, share: float) -> int:
        """Samples whose step takes this share of one on all of them; half of all at most."""
        most, work = self.samples // 2, share * self.operations(self.samples)
        return max(min(LEAST, most), bisect_right(range(1, most + 1), work, key=self.operations))


def _columns(targets: Any) -> int:
    """Rows of each sample, as far as targets show them: one per number, and one less than classes per label."""
    if not isinstance(targets, Tensor) or not targets.numel():
        return 1
    numbers = targets[0].numel()
    return numbers if targets.is_floating_point() else numbers * max(1, int(targets.max()))
