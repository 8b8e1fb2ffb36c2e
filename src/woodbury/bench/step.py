"""The time of a step relative to `torch.optim.SGD` on the same batch, for the paper's three networks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from woodbury.bench.timing import Network, Step, median_seconds, medians_within, optimizer_step, sgd_step
from woodbury.optimizers import OPTIMIZERS

REFERENCE = "sgd"
INTERLEAVED = ("smw-ng", "smw-ng-bd", "smw-gn")
# Tens of times slower: timed after the others and less often, so that they do not disturb the caches.
SLOW = ("hf", "kfac")
_SLOW_SECONDS = 8.0  # of timing for each of these

# CG iterations: the mean over the runs in docs/results (webspam: those on covtype).
NETWORKS = {
    "mnist": Network((784, 500, 10), 60, 30, iterations=15),
    "cifar10": Network((3072, 400, 400, 10), 100, 50, iterations=24),
    "webspam": Network((254, 400, 400, 1), 60, 30, iterations=17),
}


def bench_doors(repeats: int) -> dict[str, dict[str, float]]:
    """The same for steps on a batch, from a closure and in an unchanged loop."""
    ratios = {}
    for key, network in NETWORKS.items():
        torch.manual_seed(0)
        batch = network.batch()
        steps = {REFERENCE: sgd_step(network.build(), network.loss(), *batch)}
        for name in ("smw-ng", "smw-gn"):
            steps[f"{name}, step(x, y)"] = optimizer_step(name, network, *batch)
            steps[f"{name}, step(closure)"] = _loop_step(name, network, *batch, watch=False)
            steps[f"{name}, watch=True"] = _loop_step(name, network, *batch, watch=True)
        seconds = median_seconds(steps, repeats)
        ratios[key] = {name: value / seconds[REFERENCE] for name, value in seconds.items()}
    return ratios


def _loop_step(name: str, network: Network, inputs: Tensor, targets: Tensor, watch: bool) -> Step:
    """A step in a loop of the user's own: a closure, or with `watch` the usual lines."""
    model, loss = network.build(), network.loss()
    settings = {"lr": 0.1, "curvature_samples": network.curvature_samples, "watch": watch}
    optimizer = OPTIMIZERS[name](model, loss, **settings)

    def backward() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()

    def watched() -> None:
        backward()
        optimizer.step()

    return watched if watch else lambda: optimizer.step(backward)


def bench_step(repeats: int, in_module: bool = False) -> dict[str, dict[str, float]]:
    """{network: {optimizer: median step time over that of SGD}}; KFAC inverts its factors at every step.

    in_module: put the layers into a module with its own forward, which runs through autograd.
    """
    ratios = {}
    for key, network in NETWORKS.items():
        network = replace(network, in_module=in_module)
        torch.manual_seed(0)
        batch = network.batch()
        steps = {REFERENCE: sgd_step(network.build(), network.loss(), *batch)}
        steps |= {name: optimizer_step(name, network, *batch) for name in INTERLEAVED}
        seconds = median_seconds(steps, repeats)
        for name in SLOW:
            step = optimizer_step(name, network, *batch)
            seconds |= medians_within({name: step}, _SLOW_SECONDS, repeats)
        ratios[key] = {name: value / seconds[REFERENCE] for name, value in seconds.items()}
    return ratios
