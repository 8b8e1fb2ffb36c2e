"""woodbury beside Adam and SGD on `benchmarks.problems`, with the same epochs and with the same CPU time.

Every run is one record, a plain dictionary. Adam and SGD (momentum 0.9) run at four rates that decay linearly to
0, Adam also at a constant 1e-3. woodbury has the same settings everywhere: the defaults of `woodbury.fit`. In
equal seconds it is given as its budget the CPU seconds of Adam's run over all epochs with the same seed (the
median over its rates). It keeps to them by the clock: where other work takes part of the machine it gets less than
Adam got. Seconds are CPU time of the process, which must have one thread. Losses are evaluated outside of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
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

from benchmarks.common import Batch, say, take_step
from benchmarks.problems import CLASSIFICATION, PROBLEMS, Problem, Task
from woodbury._files import one_line
from woodbury.experiments.files import DataError
from woodbury.fit import fit

ADAM_CONSTANT, ADAM, SGD, WOODBURY = "adam-1e-3", "adam", "sgd", "woodbury"
METHODS = (ADAM_CONSTANT, ADAM, SGD, WOODBURY)
EQUAL_SECONDS = "woodbury-seconds"  # the method of a record: woodbury in the CPU seconds of Adam

Record = dict[str, Any]


# -- samples, and what a model makes of them ------------------------------------------------------------------


class _Samples(Dataset[Batch]):
    """Samples of a pair of tensors, a batch of them by one indexing operation."""

    def __init__(self, pair: Batch) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.pair[0][indices], self.pair[1][indices]


def batches(pair: Batch, size: int, seed: int) -> DataLoader[Batch]:
    """Shuffled batches, the last one of an epoch smaller; their order depends on the seed alone."""
    order = torch.Generator().manual_seed(seed)
    return DataLoader(_Samples(pair), size, shuffle=True, generator=order, collate_fn=lambda batch: batch)


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


# -- one run --------------------------------------------------------------------------------------------------


def train_first_order(task: Task, loader: DataLoader[Batch], method: str, rate: float, epochs: int) -> None:
    """The usual loop with Adam or SGD: a constant rate, or one that decays linearly to 0 over all steps."""
    make: Any = partial(torch.optim.SGD, momentum=0.9) if method == SGD else torch.optim.Adam
    optimizer = make(task.model.parameters(), lr=rate)
    step, total = 0, epochs * len(loader)
    for _ in range(epochs):
        for batch in loader:
            if method != ADAM_CONSTANT:
                optimizer.param_groups[0]["lr"] = rate * (1 - step / total)
            take_step(optimizer, task.model, task.loss, batch)
            step += 1


def run(
    problem: Problem, task: Task, method: str, seed: int, rate: float | None = None, seconds: float | None = None
) -> Record:
    """The record of one run, over all epochs of the problem or for so many seconds; an error is part of it."""

    def train_loss() -> float:
        return evaluate(task.model, task.loss, task.train, problem.kind)[0]

    loader = batches(task.train, problem.batch, seed)
    budget: dict[str, Any] = {"epochs": problem.epochs} if seconds is None else {"seconds": seconds}
    start, failure = train_loss(), None
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.process_time()
        try:
            if rate is not None:
                train_first_order(task, loader, method, rate, problem.epochs)
            else:
                fit(task.model, task.loss, loader, seed=seed, progress=False, **budget)
        except Exception as error:  # that of a user's run; the other runs go on
            failure = f"{type(error).__name__}: {one_line(error)}"
        taken = time.process_time() - started
    test_loss, test_figure = evaluate(task.model, task.loss, task.test, problem.kind)
    return {
        "kind": problem.kind,
        "method": method,
        "rate": rate,
        "seed": seed,
        "seconds": taken,
        "start_loss": start,
        "train_loss": train_loss(),
        "test_loss": test_loss,
        "test_figure": test_figure,
        "finite": all(bool(parameter.isfinite().all()) for parameter in task.model.parameters()),
        "error": failure,
        "warnings": sorted({one_line(entry.message) for entry in caught if isinstance(entry.message, Warning)}),
    }


# -- all runs -------------------------------------------------------------------------------------------------


def equal_seconds(adam: Sequence[Record]) -> float:
    """The CPU time of Adam's run, the median over its rates."""
    return median(record["seconds"] for record in adam)


def run_problem(
    problem: Problem, seeds: Sequence[int], methods: Sequence[str] = METHODS, data_dir: Path | None = None
) -> list[Record]:
    rates = {ADAM_CONSTANT: (1e-3,), ADAM: problem.adam_rates, SGD: problem.sgd_rates}
    pairs = [(method, rate) for method in rates if method in methods for rate in rates[method]]
    task = problem.make(0, data_dir)
    # The first steps, in which torch loads much of itself, are not measured.
    inputs, targets = (values[: 2 * problem.batch] for values in task.train)
    for method in methods:
        rate = None if method == WOODBURY else 1e-3
        run(replace(problem, epochs=1), replace(task, train=(inputs, targets)), method, 0, rate)
    records = []
    for seed in seeds:
        make = partial(problem.make, seed, data_dir)
        found = [run(problem, make(), method, seed, rate) for method, rate in pairs]
        adam = [record for record in found if record["method"] == ADAM]
        if WOODBURY in methods:
            found.append(run(problem, make(), WOODBURY, seed))
        if WOODBURY in methods and adam:
            found.append(run(problem, make(), EQUAL_SECONDS, seed, seconds=equal_seconds(adam)))
        records += found
    return records


def bench_problems(names: Sequence[str] = (), jobs: int = 1, **options: Any) -> Iterator[list[Record]]:
    """The records of one problem after the other; by default of all that are not `by_name_only`.

    A problem whose data is absent is left out, with a line on stderr. With several jobs, as many processes run
    problems. options: those of `run_problem`.
    """
    names = names or [name for name, problem in PROBLEMS.items() if not problem.by_name_only]
    work = partial(_bench_problem, **options)
    # New processes, which read OMP_NUM_THREADS before they load torch.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    with pool or nullcontext():
        for name, answer in zip(names, pool.map(work, names) if pool else map(work, names), strict=True):
            if isinstance(answer, str):
                say(f"{name} is left out: {answer}")
                continue
            say(f"{name}: {len(answer)} runs, {sum(record['seconds'] for record in answer):.0f} CPU seconds")
            yield answer


def _bench_problem(name: str, **options: Any) -> list[Record] | str:
    """The records of a problem, or why there are none."""
    try:
        records = run_problem(PROBLEMS[name], **options)
    except DataError as error:
        return one_line(error)
    except ModuleNotFoundError as error:
        return f'it needs {error.name}: pip install "woodbury[experiments]"'
    return [{"problem": name} | record for record in records]
