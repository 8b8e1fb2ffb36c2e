"""Noisy data: the test loss of `woodbury.fit` over that of Adam, tuned and stopped early on the same split.

Twenty problems: regressions of 1 to 20 inputs, 50 to 2,000 samples and noise from 1 to 100 % of the signal, and
classes with flipped labels. The test data is as noisy as the training data. Adam has batches of 32 samples, and of
four rates the one with the lowest validation loss counts.
"""

import argparse
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import woodbury
from benchmarks.common import Batch, Command, chain, positive, say, table, take_step
from benchmarks.problems import friedman

RATES = (3e-2, 1e-2, 3e-3, 1e-3)  # of Adam
MOST_STEPS, PATIENCE, BATCH = 5000, 600, 32  # steps in all, and without a lower validation loss
TEST_SAMPLES = 2000
METHODS: dict[str, dict[str, Any]] = {"validation": {"validation": 0.2}, "evidence": {"weight_decay": "evidence"}}


@dataclass(frozen=True)
class Problem:
    """Inputs uniform in (-1, 1), a function of them, and its noise."""

    inputs: int
    samples: int  # for training and validation
    noise: float  # standard deviation over that of the function; for classes: the share of flipped labels
    function: Callable[[Tensor], Tensor]  # (n, inputs) -> (n, outputs), or labels (n,)
    hidden: tuple[int, ...]
    classes: int = 0

    @property
    def loss(self) -> nn.Module:
        return nn.CrossEntropyLoss() if self.classes else nn.MSELoss()

    def draw(self, count: int, seed: int) -> Batch:
        draws = torch.Generator().manual_seed(seed)
        inputs = 2 * torch.rand(count, self.inputs, generator=draws, dtype=torch.float64) - 1
        values = self.function(inputs)
        if not self.classes:
            others = 2 * torch.rand(4000, self.inputs, generator=draws, dtype=torch.float64) - 1
            values = values / self.function(others).std()
            return inputs, values + self.noise * torch.randn(values.shape, generator=draws, dtype=torch.float64)
        flipped = torch.rand(count, generator=draws) < self.noise
        others = torch.randint(1, self.classes, (count,), generator=draws)
        return inputs, torch.where(flipped, (values + others) % self.classes, values)

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            outputs = self.classes or self.draw(2, 0)[1].shape[1]
            return chain(nn.Tanh, self.inputs, *self.hidden, outputs).double()


def _column(values: Tensor) -> Tensor:
    return values.unsqueeze(1)


def _impedance(x: Tensor) -> Tensor:
    """Of a circuit: Friedman's second function, with its inputs mapped to (-1, 1)."""
    x = (x + 1) / 2
    r, w, h, c = 100 * x[:, 0], (40 + 520 * x[:, 1]) * torch.pi, x[:, 2], 1 + 10 * x[:, 3]
    return _column(torch.sqrt(r**2 + (w * h - 1 / (w * c)) ** 2))


def _teacher(x: Tensor) -> Tensor:
    draws = torch.Generator().manual_seed(5)
    first, second = (torch.randn(size, generator=draws, dtype=x.dtype) for size in ((x.shape[1], 6), (6, 1)))
    return torch.tanh(1.5 * x @ first) @ second


def _weights(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(x.shape[1], dtype=x.dtype))


def _rings(x: Tensor) -> Tensor:
    radius = x.norm(dim=1)
    return (radius > 0.5).long() + (radius > 0.9).long()


def _sectors(x: Tensor) -> Tensor:
    """Which of four random directions an input lies closest to."""
    draws = torch.Generator().manual_seed(7)
    return (x @ torch.randn(x.shape[1], 4, generator=draws, dtype=x.dtype)).argmax(1)


PROBLEMS = {
    "sine": Problem(1, 50, 0.1, lambda x: torch.sin(4 * x), (20,)),
    "sinc": Problem(1, 200, 0.3, lambda x: torch.sinc(3 * x), (20,)),
    "jump": Problem(1, 300, 0.2, lambda x: torch.tanh(20 * x) + x, (30,)),
    "chirp": Problem(1, 1000, 0.03, lambda x: torch.sin(6 * x + 4 * x**2), (16, 16)),
    "product": Problem(2, 210, 0.3, lambda x: torch.sin(3 * x[:, :1]) * x[:, 1:], (20, 20)),
    "waves": Problem(2, 500, 0.01, lambda x: torch.sin(3 * x[:, :1] + 2 * torch.cos(2 * x[:, 1:])), (30,)),
    "hill": Problem(2, 1000, 0.5, lambda x: torch.exp(-4 * x.square().sum(1, keepdim=True)), (20, 20)),
    "radius": Problem(3, 400, 1.0, lambda x: torch.cos(4 * x.norm(dim=1, keepdim=True)), (30,)),
    "two outputs": Problem(3, 600, 0.1, lambda x: torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1), (25,)),
    "impedance": Problem(4, 500, 0.1, _impedance, (30,)),
    "few": Problem(4, 80, 0.2, lambda x: _column(x[:, 0] * x[:, 1] + x[:, 2].square()), (15,)),
    "friedman": Problem(5, 300, 0.2, lambda x: friedman((x + 1) / 2), (20, 20)),
    "friedman with idle inputs": Problem(10, 800, 0.2, lambda x: friedman((x + 1) / 2), (30,)),
    "quadratic": Problem(6, 800, 0.05, lambda x: (x @ _weights(x)).square().unsqueeze(1), (40,)),
    "teacher": Problem(8, 1500, 0.03, _teacher, (20,)),
    "linear": Problem(12, 120, 0.5, lambda x: _column(x @ _weights(x)), (20,)),
    "sum of sines": Problem(20, 2000, 0.3, lambda x: torch.sin(3 * x).sum(1, keepdim=True), (25,)),
    "rings": Problem(2, 600, 0.2, _rings, (20, 20), classes=3),
    "checks": Problem(2, 400, 0.1, lambda x: (torch.sin(4 * x).prod(1) > 0).long(), (30,), classes=2),
    "sectors": Problem(10, 1000, 0.1, _sectors, (30,), classes=4),
}


def loss_on(model: nn.Module, loss: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        return float(loss(model(batch[0]), batch[1]))


def run_adam(problem: Problem, model: nn.Module, train: Batch, validation: Batch) -> float:
    """The lowest validation loss of all rates and epochs; the model ends where that was."""
    start, best = copy.deepcopy(model.state_dict()), math.inf
    kept = start
    for rate in RATES:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        draws, lowest, steps, waited = torch.Generator().manual_seed(0), math.inf, 0, 0
        while steps < MOST_STEPS and waited < PATIENCE:
            batches = torch.randperm(len(train[0]), generator=draws).split(BATCH)
            for chosen in batches:
                take_step(optimizer, model, problem.loss, (train[0][chosen], train[1][chosen]))
            now = loss_on(model, problem.loss, validation)
            steps, waited = steps + len(batches), 0 if now < lowest else waited + len(batches)
            lowest = min(lowest, now)
            if now < best:
                best, kept = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


def compare(problem: Problem, seed: int, methods: Sequence[str]) -> dict[str, float]:
    """{method: test loss}, that of Adam among them."""
    data, test = problem.draw(problem.samples, seed), problem.draw(TEST_SAMPLES, seed + 10_000)
    result = {}
    for method in methods:
        model = problem.network(seed)
        woodbury.fit(model, problem.loss, data, seed=seed, progress=False, **METHODS[method])
        result[method] = loss_on(model, problem.loss, test)
    model = problem.network(seed)
    first = woodbury.fit(model, problem.loss, data, seed=seed, steps=0, validation=0.2, progress=False)
    assert first.split is not None
    run_adam(problem, model, *((data[0][part], data[1][part]) for part in first.split))
    return result | {"Adam": loss_on(model, problem.loss, test)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """{problem: {method: the test losses of the seeds over those of Adam}}, and what they amount to."""
    names = options.only.split(",") if options.only else list(PROBLEMS)
    methods = options.methods.split(",")
    result: dict[str, dict[str, list[float]]] = {}
    for name in names:
        losses = [compare(PROBLEMS[name], seed, methods) for seed in range(options.seeds)]
        ratios = {method: [found[method] / found["Adam"] for found in losses] for method in methods}
        result[name] = ratios
        shown = (f"{method} {' '.join(f'{ratio:.3f}' for ratio in each)}" for method, each in ratios.items())
        say(f"{name}: {', '.join(shown)}")
    return {"problems": result, "summary": summary(result)}


def summary(result: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """{method: median and worst of the problems, each by the median of its seeds, and the worst of all runs}."""
    found = {}
    for method in next(iter(result.values())):
        medians = [median(ratios[method]) for ratios in result.values()]
        worst_run = max(ratio for ratios in result.values() for ratio in ratios[method])
        found[method] = {"median": median(medians), "worst": max(medians), "worst run": worst_run}
    return found


def show(result: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = []
    for name, ratios in result["problems"].items():
        row: dict[str, Any] = {"": name}
        for method, each in ratios.items():
            row |= {method: median(each), f"{method}, worst": max(each)}
        rows.append(row)
    total = [{"": method, **numbers} for method, numbers in result["summary"].items()]
    return table("test loss over that of Adam, median of seeds", rows) + "\n\n" + table("over all problems", total)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive, default=3, help="of data and networks (default: 3)")
    parser.add_argument("--only", help=f"problems, separated by commas (default: all): {', '.join(PROBLEMS)}")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas (default: all)")


COMMAND = Command(
    "test loss on twenty noisy problems beside Adam, tuned and stopped early (20 minutes)", run, show, _add_options
)
