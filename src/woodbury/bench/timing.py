"""Networks, steps of optimizers as functions, and their median time: parts of every measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.experiments.models import mlp
from woodbury.optimizers import OPTIMIZERS

Step = Callable[[], object]


class _Module(nn.Module):
    """A module with its own forward."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


@dataclass(frozen=True)
class Network:
    """A network of Linear layers and sigmoids with its batch sizes."""

    widths: tuple[int, ...]
    samples: int  # N1
    curvature_samples: int  # N2
    iterations: int  # of CG in a step of Hessian-free
    in_module: bool = False  # the layers inside a module with its own forward, so that they form no known chain

    def build(self) -> nn.Module:
        layers = mlp(self.widths, seed=0)
        return _Module(layers) if self.in_module else layers

    def loss(self) -> nn.Module:
        return nn.BCEWithLogitsLoss() if self.widths[-1] == 1 else nn.CrossEntropyLoss()

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(self.samples, self.widths[0])
        if self.widths[-1] == 1:
            return inputs, torch.randint(2, (self.samples, 1)).float()
        return inputs, torch.randint(self.widths[-1], (self.samples,))


def sgd_step(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor, lr: float = 0.1) -> Step:
    """The usual loop: zero_grad, loss, backward, step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def optimizer_step(name: str, network: Network, inputs: Tensor, targets: Tensor, **settings: Any) -> Step:
    """A step of one of the optimizers by name; Hessian-free takes exactly the network's CG iterations."""
    settings |= {"lr": 0.1, "curvature_samples": network.curvature_samples}
    if name == "hf":
        settings |= {"max_iterations": network.iterations, "progress": 0.0}
    optimizer = OPTIMIZERS[name](network.build().to(inputs.device), network.loss(), **settings)
    return lambda: optimizer.step(inputs, targets)


def median_seconds(
    steps: dict[str, Step],
    repeats: int,
    warmup: int = 10,
    block: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds per call of each function, by the clock (default: CPU time).

    The functions take turns, `repeats` times; each turn is `block` calls in a row.
    """
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = clock()
            for _ in range(block):
                step()
            times[name].append((clock() - start) / block)
    return {name: median(values) for name, values in times.items()}


def medians_within(steps: dict[str, Step], seconds: float, most: int) -> dict[str, float]:
    """The same with as many turns as fit in about so many seconds, at most `most`."""
    once = sum(median_seconds(steps, 1, warmup=1).values())
    return median_seconds(steps, max(1, min(most, round(seconds / max(once, 1e-9)))), warmup=0)
