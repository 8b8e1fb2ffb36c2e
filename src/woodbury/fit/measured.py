"""What a training run measures beside its steps: gradients by plain autograd, and the time of an SGD step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from woodbury import _batch, _random
from woodbury.fit.sources import Data
from woodbury.optim import GaussNewton
from woodbury.products import loss_of


@contextmanager
def _without_a_trace(optimizer: GaussNewton) -> Iterator[None]:
    """Buffers of the model and random numbers afterwards are what they were before."""
    buffers = [(own, own.clone()) for own in optimizer.model.buffers()]
    random = _random.snapshot(optimizer.param_groups[0]["params"][0].device)
    try:
        yield
    finally:
        _random.restore(random)
        with torch.no_grad():
            for own, value in buffers:
                own.copy_(value)


def _gradient(optimizer: GaussNewton, batch: Data) -> list[tuple[Tensor, Tensor]]:
    """Parameters with the gradient of the loss, by autograd."""
    parameters = [own for group in optimizer.param_groups for own in group["params"]]
    with torch.enable_grad():
        loss = loss_of(optimizer.loss, optimizer.forward(optimizer.model, batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [(own, slope) for own, slope in zip(parameters, gradients, strict=True) if slope is not None]


def sgd_seconds(optimizer: GaussNewton, batch: Data) -> float:
    """The CPU time of a pass forward and back with an update, the least of three. Nothing changes."""
    times = []
    with _without_a_trace(optimizer):
        for _ in range(3):
            started = time.process_time()
            moved = [torch.add(own.detach(), slope, alpha=-0.1) for own, slope in _gradient(optimizer, batch)]
            times.append(time.process_time() - started)
            del moved
    return max(min(times), 1e-6)  # the clock may be coarse


def gradients_of_halves(optimizer: GaussNewton, batch: Data) -> tuple[Tensor, Tensor] | None:
    """g_a and g_b of the two halves of a batch, None for a single sample. Nothing changes."""
    inputs, targets = batch
    samples = _batch.sample_count(inputs)
    half = samples // 2
    if not half:
        return None
    gradients = []
    with _without_a_trace(optimizer):
        for window in (slice(0, half), slice(half, 2 * half)):
            own = _batch.part(inputs, window, samples), None if targets is None else targets[window]
            gradients.append(torch.cat([slope.flatten() for _, slope in _gradient(optimizer, own)]))
    return gradients[0], gradients[1]
