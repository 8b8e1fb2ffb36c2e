"""woodbury beside Adam and SGD on `woodbury.bench.problems`, with the same epochs and with the same CPU time.

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
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from woodbury.bench.problems import CLASSIFICATION, PROBLEMS, Pair, Problem, Task
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


class _Samples(Dataset[Pair]):
    """Samples of a pair of tensors, a batch of them by one indexing operation."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.drawn = 0  # so far

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> Pair:
        return self.pair[0][index], self.pair[1][index]

    def __getitems__(self, indices: list[int]) -> Pair:
        self.drawn += len(indices)
        return self.pair[0][indices], self.pair[1][indices]


def batches(pair: Pair, size: int, seed: int) -> DataLoader[Pair]:
    """Shuffled batches, the last one of an epoch smaller; their order depends on the seed alone."""
    order = torch.Generator().manual_seed(seed)
    return DataLoader(_Samples(pair), size, shuffle=True, generator=order, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


def evaluate(model: nn.Module, loss: nn.Module, pair: Pair, kind: str) -> tuple[float, float]:
    """The mean loss over all samples, in eval mode, and the share of wrong answers (of a regression the loss)."""
    was_training = model.training
    model.eval()
    total, wrong, count = 0.0, 0, len(pair[0])
    with torch.no_grad():
        for inputs, targets in zip(*(values.split(2000) for values in pair), strict=True):
            outputs = model(inputs)
            total += float(loss(outputs, targets)) * len(inputs)
            if kind == CLASSIFICATION:
                wrong += int((_answers(outputs) != targets).sum())
    model.train(was_training)
    return total / count, wrong / count if kind == CLASSIFICATION else total / count


def _answers(outputs: Tensor) -> Tensor:
    """The class of each sample; of one logit 0 or 1, in the shape of the targets."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs > 0).to(outputs.dtype)


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


def train_default(
    model: nn.Module,
    loss: nn.Module,
    loader: DataLoader[Pair],
    *,
    epochs: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    callback: Callable[..., object],
    **parts: Any,
) -> None:
    """`woodbury.fit` as it is, for so many epochs or seconds."""
    fit(model, loss, loader, epochs=epochs, seconds=seconds, seed=seed, progress=False, callback=callback, **parts)


# for --woodbury: what the parts of a step give
without_memory = partial(train_default, memory=0)
without_metric = partial(train_default, metric=None)
without_both = partial(train_default, memory=0, metric=None)
one_batch = partial(train_default, batches_per_step=1)
growing = partial(train_default, batches_per_step="grow")


def _first(loader: DataLoader[Pair], count: int) -> Iterator[Pair]:
    """So many batches, in as many rounds through the loader as that takes."""
    while count > 0:
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                return


def train_first_order(
    model: nn.Module,
    loss: nn.Module,
    loader: DataLoader[Pair],
    *,
    optimizer: torch.optim.Optimizer,
    rate: float,
    decay: bool,
    epochs: int,
    callback: Callable[..., object],
) -> None:
    """The usual loop, with a constant rate or one that decays linearly to 0 over all steps."""
    total = epochs * len(loader)
    for step, (inputs, targets) in enumerate(_first(loader, total)):
        if decay:
            optimizer.param_groups[0]["lr"] = rate * (1 - step / total)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        callback()


def load_train(path: str | None) -> Train:
    """`train_default`, or the function that `module:function` names."""
    if path is None:
        return train_default
    module, _, name = path.partition(":")
    train: Train = getattr(importlib.import_module(module), name)
    return train


# -- one run --------------------------------------------------------------------------------------------------


def run_first_order(problem: Problem, method: str, rate: float, seed: int, data_dir: Path | None = None) -> Record:
    """Adam, or SGD with momentum 0.9, over all epochs."""
    task = problem.make(seed, data_dir)
    parameters = task.model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, rate, momentum=0.9) if method == SGD else torch.optim.Adam(parameters, rate)
    )
    train = partial(
        train_first_order, optimizer=optimizer, rate=rate, decay=method != ADAM_CONSTANT, epochs=problem.epochs
    )
    return _run(problem, task, train, _all_steps(problem, task), method=method, rate=rate, seed=seed)


def train_with_woodbury(
    problem: Problem,
    seed: int,
    data_dir: Path | None = None,
    train: Train = train_default,
    seconds: float | None = None,
) -> Record:
    """woodbury over all epochs or, where they are given, for so many seconds."""
    task = problem.make(seed, data_dir)
    torch.manual_seed(seed)
    total = _all_steps(problem, task)
    if seconds is None:
        method, budgeted = WOODBURY, partial(train, epochs=problem.epochs)
    else:
        method, total, budgeted = EQUAL_SECONDS, math.ceil(total / _DEARER), partial(train, seconds=seconds)
    return _run(problem, task, partial(budgeted, seed=seed), total, method=method, rate=None, seed=seed)


def _all_steps(problem: Problem, task: Task) -> int:
    return problem.epochs * math.ceil(len(task.train[0]) / problem.batch)


def _run(problem: Problem, task: Task, train: Train, total: int, **labels: Any) -> Record:
    """The record of one run of about `total` steps; an error in it becomes part of the record."""

    def train_loss(samples: int | None = None) -> float:
        pair = task.train[0][:samples], task.train[1][:samples]
        return evaluate(task.model, task.loss, pair, problem.kind)[0]

    start, failure = train_loss(), None
    loader = batches(task.train, problem.batch, labels["seed"])
    samples: Any = loader.dataset
    watch = Watch(partial(train_loss, CURVE_SAMPLES), math.ceil(total / CURVE_POINTS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.start()
        try:
            train(task.model, task.loss, loader, callback=watch)
        except Exception as error:  # that of a user's run; the other runs go on
            failure = f"{type(error).__name__}: {one_line(error)}"
        seconds = watch.seconds
    test_loss, test_figure = evaluate(task.model, task.loss, task.test, problem.kind)
    return {
        "problem": problem.name,
        "kind": problem.kind,
        **labels,
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
        "warnings": sorted({one_line(entry.message) for entry in caught if isinstance(entry.message, Warning)}),
        "curve": [[0.0, start], *watch.curve],
    }


# -- one problem: all methods and seeds -----------------------------------------------------------------------


def equal_seconds(adam: Sequence[Record]) -> float:
    """The CPU time of Adam's run, the median over its rates."""
    return median(record["seconds"] for record in adam)


def run_problem(
    problem: Problem,
    seeds: Sequence[int],
    methods: Sequence[str] = METHODS,
    data_dir: Path | None = None,
    train: Train = train_default,
    earlier: Sequence[Record] = (),
) -> list[Record]:
    """The records of these methods and seeds; `earlier` are records that need not be made again."""
    rates = {ADAM_CONSTANT: (1e-3,), ADAM: problem.adam_rates, SGD: problem.sgd_rates}
    steps = _all_steps(problem, problem.make(0, data_dir))
    known = {(old["method"], old["rate"], old["seed"]): old for old in earlier if old["steps"] == steps}
    _warm_up(problem, methods, data_dir, train)
    records = []
    for seed in seeds:
        first_order = [
            known.get((method, rate, seed)) or run_first_order(problem, method, rate, seed, data_dir)
            for method in rates
            if method in methods
            for rate in rates[method]
        ]
        records += first_order
        if WOODBURY in methods:
            records.append(train_with_woodbury(problem, seed, data_dir, train))
            adam = [record for record in first_order if record["method"] == ADAM]
            if adam:
                records.append(train_with_woodbury(problem, seed, data_dir, train, equal_seconds(adam)))
    return records


def _warm_up(problem: Problem, methods: Sequence[str], data_dir: Path | None, train: Train) -> None:
    """Take first steps, in which torch loads much of itself."""
    train_samples, test_samples = problem.data(data_dir)
    few = train_samples[0][: 2 * problem.batch], train_samples[1][: 2 * problem.batch]
    small = replace(problem, data=lambda _: (few, test_samples), epochs=1)
    for method in methods:
        if method == WOODBURY:
            train_with_woodbury(small, 0, data_dir, train)
        else:
            run_first_order(small, method, 1e-3, 0, data_dir)


# -- all problems ---------------------------------------------------------------------------------------------


def bench_problems(
    names: Sequence[str] = (),
    seeds: int = 3,
    methods: Sequence[str] = METHODS,
    jobs: int = 1,
    data_dir: Path | None = None,
    epochs: int | None = None,
    train: str | None = None,
    earlier: Sequence[Record] = (),
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[list[Record]]:
    """The records of one problem after the other, as they are done; by default of all that are not `by_name_only`.

    A problem whose data is absent is left out, and `say` gets a line with its name. epochs: at most so many.
    train: the `module:function` in place of `train_default`. With several jobs, as many processes run problems.
    """
    names = names or [name for name, problem in PROBLEMS.items() if not problem.by_name_only]
    work = []
    for name in names:
        known = [record for record in earlier if record["problem"] == name]
        work.append((name, seeds, tuple(methods), data_dir, epochs, train, known))
    for name, records, reason in _do(work, jobs):
        if reason is not None:
            say(f"{name} is left out: {reason}")
            continue
        for record in records:
            if record["error"] is not None:
                say(f"{name}, {record['method']}, seed {record['seed']}: {record['error']}")
        say(f"{name}: {len(records)} runs, {sum(record['seconds'] for record in records):.0f} CPU seconds")
        yield records


Answer = tuple[str, list[Record], "str | None"]  # the problem, its records, or why there are none


def _do(work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Answer]:
    if jobs == 1:
        yield from (_bench_problem(*job) for job in work)
        return
    # New processes, which read OMP_NUM_THREADS before they load torch.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(_bench_problem, *job) for job in work]))


def _bench_problem(
    name: str,
    seeds: int,
    methods: tuple[str, ...],
    data_dir: Path | None,
    epochs: int | None,
    train: str | None,
    earlier: Sequence[Record],
) -> Answer:
    """What one process does."""
    problem = PROBLEMS[name]
    problem = replace(problem, epochs=min(epochs or problem.epochs, problem.epochs))
    try:
        problem.data(data_dir)
    except DataError as error:
        return name, [], one_line(error)
    except ModuleNotFoundError as error:
        return name, [], f'it needs {error.name}: pip install "woodbury[experiments]"'
    return name, run_problem(problem, range(seeds), methods, data_dir, load_train(train), earlier), None
