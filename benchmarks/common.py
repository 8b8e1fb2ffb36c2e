"""What the measurements share: networks, steps as functions, their median times, and tables."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]
Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Command:
    """A measurement on the command line. A result with "faults" ends with status 1."""

    text: str  # what it measures and for how long, for --help
    run: Callable[[argparse.Namespace], dict[str, Any]]
    table: Callable[[Any], str]  # the result as plain text
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    one_thread: bool = True


def add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a step or two each, to check that it runs")


def positive(text: str) -> int:
    """The value of an option that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def say(line: str) -> None:
    """A line about how far a measurement has come; what it found goes to stdout."""
    print(line, file=sys.stderr, flush=True)


def round_numbers(value: Any) -> Any:
    """The value with every float in it rounded to five digits, and None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return value


# -- networks and steps ---------------------------------------------------------------------------------------


def chain(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    """Linear layers of these widths with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class _OwnForward(nn.Sequential):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs)


@dataclass(frozen=True)
class Network:
    """A network of Linear layers and sigmoids with its loss and batch sizes."""

    widths: tuple[int, ...]
    samples: int  # N1
    curvature_samples: int  # N2
    loss_type: type[nn.Module] = nn.CrossEntropyLoss
    iterations: int = 15  # of CG in a step of Hessian-free
    in_module: bool = False  # the layers inside a module with its own forward, so that they form no known chain

    @property
    def name(self) -> str:
        return "-".join(map(str, self.widths))

    @property
    def parameters(self) -> int:
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths))

    def build(self) -> nn.Module:
        """The network, always with the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = chain(nn.Sigmoid, *self.widths)
        return _OwnForward(layers) if self.in_module else layers

    def batch(self, device: str = "cpu") -> Batch:
        """Random inputs and targets, always the same."""
        draws, outputs = torch.Generator().manual_seed(1), self.widths[-1]
        inputs = torch.randn(self.samples, self.widths[0], generator=draws)
        if self.loss_type is nn.CrossEntropyLoss:
            targets = torch.randint(outputs, (self.samples,), generator=draws)
        elif self.loss_type is nn.BCEWithLogitsLoss:
            targets = torch.randint(2, (self.samples, outputs), generator=draws).float()
        else:
            targets = torch.randn(self.samples, outputs, generator=draws)
        return inputs.to(device), targets.to(device)


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, loss: nn.Module, batch: Batch) -> None:
    """What the usual loop does with a batch."""
    optimizer.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def first_order_step(kind: type[torch.optim.Optimizer], network: Network, batch: Batch, **settings: Any) -> Step:
    model = network.build().to(batch[0].device)
    return partial(take_step, kind(model.parameters(), **settings), model, network.loss_type(), batch)


def sgd_step(network: Network, batch: Batch) -> Step:
    """The step that others are measured in."""
    return first_order_step(torch.optim.SGD, network, batch, lr=0.1)


def own_optimizer(name: str, network: Network, device: str | torch.device = "cpu", **settings: Any) -> Any:
    """One of `woodbury.optimizers.OPTIMIZERS`; Hessian-free takes exactly the network's CG iterations."""
    from woodbury.optimizers import OPTIMIZERS  # `benchmarks.trajectories` runs with commits that may lack it

    settings = {"lr": 0.1, "curvature_samples": network.curvature_samples} | settings
    if name == "hf":
        settings |= {"max_iterations": network.iterations, "progress": 0.0}
    return OPTIMIZERS[name](network.build().to(device), network.loss_type(), **settings)


def own_step(name: str, network: Network, batch: Batch, **settings: Any) -> Step:
    return partial(own_optimizer(name, network, batch[0].device, **settings).step, *batch)


# -- times ----------------------------------------------------------------------------------------------------


def median_seconds(
    steps: Mapping[str, Step],
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


def medians_within(steps: Mapping[str, Step], seconds: float, most: int = 200) -> dict[str, float]:
    """The same with as many turns as fit in about so many seconds, at most `most`."""
    once = sum(median_seconds(steps, 1, warmup=1).values())
    return median_seconds(steps, max(1, min(most, round(seconds / max(once, 1e-9)))), warmup=0)


# -- tables ---------------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[Mapping[str, object]], left: int = 1) -> str:
    """The title, the headings, a rule and the rows {heading: cell}; the first `left` columns are aligned left.

    Headings may have several lines. A number has three digits; None, and a cell that a row lacks, is a "-".
    """
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    height = max((len(heading.split("\n")) for heading in headings), default=0)
    columns: list[list[str]] = []
    for heading in headings:
        head = heading.split("\n")
        above = [""] * (height - len(head)) + head
        cells = [_cell(row.get(heading)) for row in rows]
        width = max(map(len, above + cells))
        align = str.ljust if len(columns) < left else str.rjust
        columns.append([align(line, width) for line in [*above, "-" * width, *cells]])
    return "\n".join([title, "", *("  ".join(line).rstrip() for line in zip(*columns, strict=True))])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
