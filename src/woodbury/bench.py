"""Measurements that need torch alone: `python -m woodbury.bench step`.

`step` gives the cost of one step against `torch.optim.SGD` on the same batch, for the paper's three
networks. All optimizers run in one process, those of comparable cost interleaved; the figure is the ratio of
the medians of CPU time. Threads other than the one that computes would spoil CPU time, so the process must
have been started with OMP_NUM_THREADS=1; if it was not, it starts itself again that way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.optim import OPTIMIZERS

REFERENCE = "sgd"
COMPARED = ("smw-ng", "smw-ng-bd", "smw-gn")
# Tens of times the cost of the others: timed after them, less often, so that they leave the caches alone.
SLOW = ("hf", "kfac")
_SLOW_SECONDS = 8.0  # of timing spent on each of these, about


@dataclass(frozen=True)
class Network:
    """A network of the paper with its batch sizes."""

    widths: tuple[int, ...]
    samples: int  # N1
    curvature_samples: int  # N2
    iterations: int  # of CG in a step of Hessian-free: the mean over the runs in docs/results

    def build(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
        return nn.Sequential(*layers[:-1])

    def loss(self) -> nn.Module:
        return nn.BCEWithLogitsLoss() if self.widths[-1] == 1 else nn.CrossEntropyLoss()

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(self.samples, self.widths[0])
        if self.widths[-1] == 1:
            return inputs, torch.randint(2, (self.samples, 1)).float()
        return inputs, torch.randint(self.widths[-1], (self.samples,))


NETWORKS = {
    "mnist": Network((784, 500, 10), 60, 30, iterations=15),
    "cifar10": Network((3072, 400, 400, 10), 100, 50, iterations=13),
    "webspam": Network((254, 400, 400, 1), 60, 30, iterations=5),
}


def _sgd_step(network: Network, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    """The plain loop everybody writes: zero_grad, loss, backward, step."""
    model, loss = network.build(), network.loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _step(name: str, network: Network, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    settings: dict[str, Any] = {"lr": 0.1, "curvature_samples": network.curvature_samples}
    if name == "hf":
        settings |= {"max_iterations": network.iterations, "progress": 0.0}
    optimizer = OPTIMIZERS[name](network.build(), network.loss(), **settings)
    return lambda: optimizer.step(inputs, targets)


def median_seconds(steps: dict[str, Callable[[], object]], repeats: int, warmup: int = 10) -> dict[str, float]:
    """Median CPU seconds of each function, called in turn `repeats` times."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


def bench_step(repeats: int) -> dict[str, dict[str, float]]:
    """{network: {optimizer: median step time over that of SGD}}."""
    ratios = {}
    for key, network in NETWORKS.items():
        torch.manual_seed(0)
        batch = network.batch()
        steps = {REFERENCE: _sgd_step(network, *batch)}
        steps |= {name: _step(name, network, *batch) for name in COMPARED}
        seconds = median_seconds(steps, repeats)
        for name in SLOW:
            step = _step(name, network, *batch)
            once = median_seconds({name: step}, 1, warmup=1)[name]
            fewer = max(1, min(repeats, round(_SLOW_SECONDS / once)))
            seconds |= median_seconds({name: step}, fewer, warmup=0)
        ratios[key] = {name: round(value / seconds[REFERENCE], 3) for name, value in seconds.items()}
    return ratios


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m woodbury.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="step cost against torch.optim.SGD on the paper's networks")
    step.add_argument("--json", action="store_true", help="print one object {net: {optimizer: ratio}}")
    step.add_argument("--repeats", type=int, default=200, help="timed steps of each optimizer (default 200)")
    chosen = parser.parse_args(arguments)
    if chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        given = sys.argv[1:] if arguments is None else arguments
        return subprocess.run([sys.executable, "-m", "woodbury.bench", *given], env=environment).returncode
    ratios = bench_step(chosen.repeats)
    if chosen.json:
        print(json.dumps(ratios))
    else:
        for network, row in ratios.items():
            print(f"{network:8}", "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
