"""How many batches of a loader make up a step: twice as many where their noise asks for it and time allows it.

With the gradients g_a and g_b of the halves of N samples, and the covariance Sigma of the gradient of one sample,

    E |g_a - g_b|^2 / 4 = tr Sigma / N
    E |g_a + g_b|^2 / 4 = tr Sigma / N + |g|^2

Their quotient, the share of noise, is N* / (N + N*) with the noise scale N* = tr Sigma / |g|^2 (McCandlish et al.
2018; the same variance makes the samples of Byrd et al. 2012 grow). Where it is above one half a step has fewer
samples than the noise scale, and twice as many are tried: for good if a step takes at most 1.5 times as long.
"""

from __future__ import annotations

from math import inf
from statistics import median

import torch
from torch import Tensor

from woodbury import _batch, _random
from woodbury.fit.sources import Data
from woodbury.model.buffers import Buffers, changing_buffers
from woodbury.optim import GaussNewton
from woodbury.products import loss_of

MOST_BATCHES = 4  # that make up a step
MOST_NOISE = 0.5  # share of it in |g|^2 that is left alone
DEAREST = 1.5  # of a step on twice the samples, over the time before
WINDOW = 5  # steps whose median time counts
PAUSE = 0.5  # before the noise is looked at again, over the steps so far


class Growth:
    """Says after every step how many batches make up the next one."""

    def __init__(self, optimizer: GaussNewton, most: int = MOST_BATCHES) -> None:
        self.optimizer, self.most = optimizer, most
        self.batches = 1
        self.is_over = False  # whether it has found its number
        self._steps, self._resume = 0, 0
        self._before = inf  # seconds of a step on half the samples
        self._start_window()

    def _start_window(self) -> None:
        self._times: list[float] = []
        self._difference, self._sum = 0.0, 0.0

    def note(self, seconds: float, batch: Data, parts: int) -> None:
        """After a step on so many batches that took so long."""
        self._steps += 1
        is_short = parts < self.batches  # at the end of an epoch, or because batches do not fit together
        if self.is_over or self._steps <= self._resume or is_short:
            return
        self._times.append(seconds)
        halves = gradients_of_halves(self.optimizer, batch) if len(self._times) % 2 == 0 else None
        if halves is not None:
            self._difference += float((halves[0] - halves[1]).square().sum())
            self._sum += float((halves[0] + halves[1]).square().sum())
        if len(self._times) >= WINDOW:
            self._decide()
            self._start_window()

    def _decide(self) -> None:
        now = median(self._times)
        if now > DEAREST * self._before:
            self.batches, self.is_over = self.batches // 2, True
        elif not self._difference > MOST_NOISE * self._sum:
            self._resume = self._steps + int(PAUSE * self._steps)
        elif 2 * self.batches > self.most:
            self.is_over = True
        else:
            self.batches, self._before = 2 * self.batches, now


def gradients_of_halves(optimizer: GaussNewton, batch: Data) -> tuple[Tensor, Tensor] | None:
    """g_a and g_b of the two halves of a batch, by autograd; None for a single sample. Nothing changes."""
    samples = _batch.sample_count(batch[0])
    half = samples // 2
    if not half:
        return None
    model, parameters = optimizer.model, [own for group in optimizer.param_groups for own in group["params"]]
    buffers, gradients = Buffers(changing_buffers(model), {}), []
    try:
        with _random.kept(parameters[0].device), torch.enable_grad():
            for window in (slice(0, half), slice(half, 2 * half)):
                inputs, targets = _batch.part(batch, window, samples)
                loss = loss_of(optimizer.loss, optimizer.forward(model, inputs), targets)
                slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
                gradients.append(torch.cat([slope.flatten() for slope in slopes if slope is not None]))
    finally:
        buffers.put_back()
    return gradients[0], gradients[1]
