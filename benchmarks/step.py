"""The time of a step relative to `torch.optim.SGD` on the same batch: the paper's networks and two small ones."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.common import (
    Batch,
    Command,
    Network,
    Step,
    first_order_step,
    median_seconds,
    medians_within,
    own_optimizer,
    own_step,
    positive,
    sgd_step,
    table,
    take_step,
)
from woodbury.fit.training import DAMPING, MEMORY, METRIC, MOMENTUM

REFERENCE = "sgd"
INTERLEAVED = ("smw-ng", "smw-ng-bd", "smw-gn")
# Tens of times slower: timed after the others and less often, so that they do not disturb the caches.
SLOW = ("hf", "kfac")
_SLOW_SECONDS = 8.0  # of timing for each of these

# CG iterations: the mean over the runs in docs/results (webspam: those on covtype).
NETWORKS = {
    "mnist": Network((784, 500, 10), 60, 30, iterations=15),
    "cifar10": Network((3072, 400, 400, 10), 100, 50, iterations=24),
    "webspam": Network((254, 400, 400, 1), 60, 30, nn.BCEWithLogitsLoss, iterations=17),
}
# Bound by the number of operations, not by arithmetic; the whole batch enters the curvature.
SMALL_NETWORKS = {
    "20-50-3": Network((20, 50, 3), 60, 60),
    "8-50-50-1": Network((8, 50, 50, 1), 64, 64, nn.MSELoss),
}
# smw-gn as `woodbury.fit` trains with it, by parts: timed on the small networks.
_MOMENTUM: dict[str, Any] = {"momentum": MOMENTUM, "damping": DAMPING}
_MEMORY = _MOMENTUM | {"memory": MEMORY, "metric": METRIC}
TRAINING: dict[str, dict[str, Any]] = {"smw-gn-momentum": _MOMENTUM, "smw-gn-memory": _MEMORY}

Ratios = dict[str, dict[str, float]]  # {network: {optimizer: median time of a step over that of SGD}}


def bench_step(repeats: int, in_module: bool = False) -> Ratios:
    """The ratios of all optimizers; KFAC inverts its factors at every step.

    in_module: put the layers into a module with its own forward, which runs through autograd.
    """
    ratios = {}
    for key, network in (NETWORKS | SMALL_NETWORKS).items():
        network = replace(network, in_module=in_module)
        batch = network.batch()
        steps = {REFERENCE: sgd_step(network, batch)}
        steps["adam"] = first_order_step(torch.optim.Adam, network, batch, lr=1e-3)
        steps |= {name: own_step(name, network, batch) for name in INTERLEAVED}
        if key in SMALL_NETWORKS:
            steps |= {name: own_step("smw-gn", network, batch, **settings) for name, settings in TRAINING.items()}
        seconds = median_seconds(steps, repeats)
        for name in SLOW:
            seconds |= medians_within({name: own_step(name, network, batch)}, _SLOW_SECONDS, repeats)
        ratios[key] = _over_sgd(seconds)
    return ratios


def bench_doors(repeats: int) -> Ratios:
    """The same for steps on a batch, from a closure and in an unchanged loop."""
    ratios = {}
    for key, network in NETWORKS.items():
        batch = network.batch()
        steps = {REFERENCE: sgd_step(network, batch)}
        for name in ("smw-ng", "smw-gn"):
            steps[f"{name}, step(x, y)"] = own_step(name, network, batch)
            steps[f"{name}, step(closure)"] = _closure_step(name, network, batch)
            watching = own_optimizer(name, network, watch=True)
            steps[f"{name}, watch=True"] = partial(take_step, watching, watching.model, watching.loss, batch)
        ratios[key] = _over_sgd(median_seconds(steps, repeats))
    return ratios


def _closure_step(name: str, network: Network, batch: Batch) -> Step:
    optimizer = own_optimizer(name, network)

    def closure() -> None:
        optimizer.zero_grad()
        optimizer.loss(optimizer.model(batch[0]), batch[1]).backward()

    return partial(optimizer.step, closure)


def _over_sgd(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value / seconds[REFERENCE] for name, value in seconds.items()}


# -- the command ----------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = "timed steps per optimizer (default 200)"
    parser.add_argument("--repeats", type=positive, default=200, metavar="NUMBER", help=text)
    text = "put the layers into a module with its own forward, which is slower"
    parser.add_argument("--module", action="store_true", help=text)
    text = "steps on a batch, from a closure and in an unchanged loop (watch=True) instead (1 minute)"
    parser.add_argument("--doors", action="store_true", help=text)


def _run(options: argparse.Namespace) -> Ratios:
    return bench_doors(options.repeats) if options.doors else bench_step(options.repeats, options.module)


def step_table(ratios: Ratios) -> str:
    """Optimizers by networks."""
    names = dict.fromkeys(name for row in ratios.values() for name in row)
    rows = [{"optimizer": name} | {key: row.get(name) for key, row in ratios.items()} for name in names]
    return table("CPU time of a step divided by that of torch.optim.SGD", rows)


COMMAND = Command(
    "time of a step over SGD's, on the paper's networks and small ones (2 minutes)", _run, step_table, _add_options
)
