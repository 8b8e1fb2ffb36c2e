"""woodbury beside Adam and SGD on `benchmarks.problems`, with the same epochs and with the same CPU time.

Every run is one record, a plain dictionary. Adam and SGD (momentum 0.9) run at four rates that decay linearly to
0, Adam also at a constant 1e-3. woodbury has the same settings everywhere: those of `train_default`. In equal
seconds it is given as its budget the CPU seconds of Adam's run over all epochs with the same seed (the median over
its rates). It keeps to them by the clock: where other work takes part of the machine it gets less than Adam got.
Seconds are CPU time of the process, which must have one thread. Losses are evaluated outside of them.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import Batch, say
from benchmarks.problems import CLASSIFICATION, PROBLEMS, Problem
from woodbury.experiments.errors import DataError, one_line
from woodbury.fit import fit

ADAM_CONSTANT, ADAM, SGD, WOODBURY = "adam-1e-3", "adam", "sgd", "woodbury"
METHODS = (ADAM_CONSTANT, ADAM, SGD, WOODBURY)
EQUAL_SECONDS = "woodbury-seconds"  # the method of a record: woodbury in the CPU seconds of Adam
CURVE_POINTS, CURVE_SAMPLES = 12, 6000  # of a run, at most
_DEARER = 4  # a step of woodbury than one of Adam, about: for the places of the curve's points

Record = dict[str, Any]
Train = Callable[..., object]  # called like `train_default`


# -- samples, and what a model makes of them ------------------------------------------------------------------


class _Samples(Dataset[Batch]):
    """Samples of a pair of tensors, a batch of them by one indexing operation."""

    def __init__(self, pair: Batch) -> None:
        self.pair = pair
        self.drawn = 0  # so far

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitems__(self, indices: list[int]) -> Batch:
        self.drawn += len(indices)
        return self.pair[0][indices], self.pair[1][indices]


def batches(pair: Batch, size: int, seed: int) -> DataLoader[Batch]:
    """Shuffled batches, the last one of an epoch smaller; their order depends on the seed alone."""
    order = torch.Generator().manual_seed(seed)
    return DataLoader(_Samples(pair), size, shuffle=True, generator=order, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


def evaluate(model: nn.Module, loss: nn.Module, pair: Batch, kind: str) -> tuple[float, float]:
    """The mean loss over all samples, in eval mode, and the share of wrong answers (of a regression the loss)."""
    was_training = model.training
    model.eval()
    total, wrong, count = 0.0, 0, len(pair[0])
    with torch.no_grad():
        for inputs, targets in zip(*(values.split(2000) for values in pair), strict=True):
            outputs = model(inputs)
            total += float(loss(outputs, targets)) * len(inputs)
            if kind == CLASSIFICATION:
                answers = outputs.argmax(1) if outputs.shape[1] > 1 else outputs > 0  # of one logit: 0 or 1
                wrong += int((answers != targets).sum())
    model.train(was_training)
    return total / count, wrong / count if kind == CLASSIFICATION else total / count


class Watch:
    """Called after every step: counts steps, now and then evaluates the loss, and takes the time without that."""

    def __init__(self, evaluate_loss: Callable[[], float], every: int) -> None:
        self.evaluate_loss, self.every = evaluate_loss, every
        self.steps = 0
        self.curve: list[list[float]] = []  # CPU seconds, loss
        self.start()

    def start(self) -> None:
        """Start the clock."""
        self._started, self._outside = time.process_time(), 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds since the start, without those of the evaluations."""
        return time.process_time() - self._started - self._outside

    def __call__(self, *ignored: object) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            seconds, before = self.seconds, time.process_time()
            self.curve.append([seconds, self.evaluate_loss()])
            self._outside += time.process_time() - before


# -- the methods ----------------------------------------------------------------------------------------------


def train_default(model: nn.Module, loss: nn.Module, loader: DataLoader[Batch], **settings: Any) -> None:
    """`woodbury.fit` as it is, for so many `epochs` or `seconds`, with a `seed` and a `callback`."""
    fit(model, loss, loader, progress=False, **settings)


# for --woodbury: what the parts of a step give
without_memory = partial(train_default, memory=0)
without_metric = partial(train_default, metric=None)
without_both = partial(train_default, memory=0, metric=None)
one_batch = partial(train_default, batches_per_step=1)
growing = partial(train_default, batches_per_step="grow")


def train_first_order(
    model: nn.Module,
    loss: nn.Module,
    loader: DataLoader[Batch],
    *,
    method: str,
    rate: float,
    epochs: int,
    callback: Callable[[], object],
) -> None:
    """The usual loop with Adam or SGD: a constant rate, or one that decays linearly to 0 over all steps."""
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, rate, momentum=0.9) if method == SGD else torch.optim.Adam(parameters, rate)
    )
    step, total = 0, epochs * len(loader)
    for _ in range(epochs):
        for inputs, targets in loader:
            if method != ADAM_CONSTANT:
                optimizer.param_groups[0]["lr"] = rate * (1 - step / total)
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            callback()
            step += 1


def load_train(path: str | None) -> Train:
    """`train_default`, or the function that `module:function` names."""
    if path is None:
        return train_default
    module, _, name = path.partition(":")
    train: Train = getattr(importlib.import_module(module), name)
    return train


# -- one run --------------------------------------------------------------------------------------------------


class Runs:
    """The runs of one problem, each a record."""

    def __init__(self, name: str, problem: Problem, data_dir: Path | None = None, train: Train = train_default):
        self.name, self.problem, self.data_dir, self.train = name, problem, data_dir, train
        samples, _ = problem.data(data_dir)
        self.steps = problem.epochs * math.ceil(len(samples[0]) / problem.batch)

    def first_order(self, method: str, rate: float, seed: int) -> Record:
        """Adam, or SGD with momentum 0.9, over all epochs."""
        train = partial(train_first_order, method=method, rate=rate, epochs=self.problem.epochs)
        return self._run(train, self.steps, method, rate, seed)

    def woodbury(self, seed: int, seconds: float | None = None) -> Record:
        """woodbury over all epochs or, where they are given, for so many seconds."""
        torch.manual_seed(seed)
        if seconds is None:
            train = partial(self.train, epochs=self.problem.epochs, seed=seed)
            return self._run(train, self.steps, WOODBURY, None, seed)
        train = partial(self.train, seconds=seconds, seed=seed)
        return self._run(train, math.ceil(self.steps / _DEARER), EQUAL_SECONDS, None, seed)

    def warm_up(self, methods: Sequence[str]) -> None:
        """Take first steps, in which torch loads much of itself."""
        (inputs, targets), test = self.problem.data(self.data_dir)
        few = inputs[: 2 * self.problem.batch], targets[: 2 * self.problem.batch]
        small = Runs(self.name, replace(self.problem, data=lambda _: (few, test), epochs=1), train=self.train)
        for method in methods:
            small.woodbury(0) if method == WOODBURY else small.first_order(method, 1e-3, 0)

    def _run(self, train: Train, steps: int, method: str, rate: float | None, seed: int) -> Record:
        """The record of one run of about so many steps; an error in it becomes part of the record."""
        task, kind = self.problem.make(seed, self.data_dir), self.problem.kind

        def train_loss(samples: int | None = None) -> float:
            pair = task.train[0][:samples], task.train[1][:samples]
            return evaluate(task.model, task.loss, pair, kind)[0]

        start, failure = train_loss(), None
        loader = batches(task.train, self.problem.batch, seed)
        samples: Any = loader.dataset
        watch = Watch(partial(train_loss, CURVE_SAMPLES), math.ceil(steps / CURVE_POINTS))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.start()
            try:
                train(task.model, task.loss, loader, callback=watch)
            except Exception as error:  # that of a user's run; the other runs go on
                failure = f"{type(error).__name__}: {one_line(error)}"
            seconds = watch.seconds
        test_loss, test_figure = evaluate(task.model, task.loss, task.test, kind)
        return {
            "problem": self.name,
            "kind": kind,
            "method": method,
            "rate": rate,
            "seed": seed,
            "epochs": samples.drawn / len(samples),
            "steps": watch.steps,
            "seconds": seconds,
            "start_loss": start,
            "train_loss": train_loss(),
            "test_loss": test_loss,
            "test_figure": test_figure,
            "test_samples": len(task.test[0]),
            "finite": all(bool(parameter.isfinite().all()) for parameter in task.model.parameters()),
            "error": failure,
            "warnings": sorted(
                {one_line(entry.message) for entry in caught if isinstance(entry.message, Warning)}
            ),
            "curve": [[0.0, start], *watch.curve],
        }


# -- all runs -------------------------------------------------------------------------------------------------


def equal_seconds(adam: Sequence[Record]) -> float:
    """The CPU time of Adam's run, the median over its rates."""
    return median(record["seconds"] for record in adam)


def run_problem(
    runs: Runs, seeds: Sequence[int], methods: Sequence[str] = METHODS, earlier: Sequence[Record] = ()
) -> list[Record]:
    """The records of these methods and seeds; `earlier` are records that need not be made again."""
    rates = {ADAM_CONSTANT: (1e-3,), ADAM: runs.problem.adam_rates, SGD: runs.problem.sgd_rates}
    same = [old for old in earlier if (old["problem"], old["steps"]) == (runs.name, runs.steps)]
    known = {(old["method"], old["rate"], old["seed"]): old for old in same}
    runs.warm_up(methods)
    records = []
    for seed in seeds:
        first_order = [
            known.get((method, rate, seed)) or runs.first_order(method, rate, seed)
            for method in rates
            if method in methods
            for rate in rates[method]
        ]
        records += first_order
        if WOODBURY in methods:
            records.append(runs.woodbury(seed))
            adam = [record for record in first_order if record["method"] == ADAM]
            if adam:
                records.append(runs.woodbury(seed, equal_seconds(adam)))
    return records


def bench_problems(
    names: Sequence[str] = (),
    seeds: int = 3,
    methods: Sequence[str] = METHODS,
    jobs: int = 1,
    data_dir: Path | None = None,
    train: str | None = None,
    earlier: Sequence[Record] = (),
) -> Iterator[list[Record]]:
    """The records of one problem after the other; by default of all that are not `by_name_only`.

    A problem whose data is absent is left out, with a line on stderr. train: the `module:function` in place of
    `train_default`. With several jobs, as many processes run problems.
    """
    names = names or [name for name, problem in PROBLEMS.items() if not problem.by_name_only]
    work = partial(
        _bench_problem, seeds=seeds, methods=methods, data_dir=data_dir, train=train, earlier=list(earlier)
    )
    # New processes, which read OMP_NUM_THREADS before they load torch.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    with pool or nullcontext():
        for name, answer in zip(names, pool.map(work, names) if pool else map(work, names), strict=True):
            if isinstance(answer, str):
                say(f"{name} is left out: {answer}")
                continue
            for record in answer:
                if record["error"] is not None:
                    say(f"{name}, {record['method']}, seed {record['seed']}: {record['error']}")
            say(f"{name}: {len(answer)} runs, {sum(record['seconds'] for record in answer):.0f} CPU seconds")
            yield answer


def _bench_problem(
    name: str,
    seeds: int,
    methods: Sequence[str],
    data_dir: Path | None,
    train: str | None,
    earlier: Sequence[Record],
) -> list[Record] | str:
    """The records of a problem, or why there are none."""
    try:
        runs = Runs(name, PROBLEMS[name], data_dir, load_train(train))
    except DataError as error:
        return one_line(error)
    except ModuleNotFoundError as error:
        return f'it needs {error.name}: pip install "woodbury[experiments]"'
    return run_problem(runs, range(seeds), methods, earlier)
