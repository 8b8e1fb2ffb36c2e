"""woodbury beside Adam and SGD on `woodbury.bench.problems`, with the same epochs and the same CPU time.

Every run is one record, a plain dictionary. Adam and SGD (momentum 0.9) are run at four rates that decay linearly
to 0, and the one with the lowest training loss (median over the seeds) counts; Adam also at a constant 1e-3.
woodbury has the same settings everywhere: those of `woodbury.fit`.

At equal seconds woodbury takes

    steps = Adam's steps x (Adam's seconds per step) / (woodbury's seconds per step)

both from the runs over the whole epochs with the same seed. Seconds are CPU time of the process, which must have
one thread; the losses of a curve are evaluated outside of them.
"""

from __future__ import annotations

import importlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from woodbury.bench.problems import CLASSIFICATION, PROBLEMS, REGRESSION, Pair, Problem, Task
from woodbury.experiments.errors import DataError, one_line
from woodbury.optim import GaussNewton

ADAM_CONSTANT, ADAM, SGD, WOODBURY = "adam-1e-3", "adam", "sgd", "woodbury"
EQUAL_SECONDS = "woodbury-seconds"  # woodbury with the CPU seconds of Adam
METHODS = (ADAM_CONSTANT, ADAM, SGD, WOODBURY)
CURVE_POINTS = 12  # of a run, at most
WITHIN = 1.5  # times the loss of tuned Adam: the bar on every problem

Record = dict[str, Any]
Train = Callable[..., object]  # (model, loss, loader, *, epochs, steps, seed, callback), as `train_default`


# -- samples and the figures of a model -----------------------------------------------------------------------


class _Samples(Dataset[Pair]):
    """Samples that are taken from the tensors by one look for the whole batch."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> Pair:
        return self.pair[0][index], self.pair[1][index]

    def __getitems__(self, indices: list[int]) -> Pair:
        return self.pair[0][indices], self.pair[1][indices]


def batches(pair: Pair, size: int, seed: int) -> DataLoader[Pair]:
    """Shuffled batches, the last of an epoch smaller; the order depends on the seed alone."""
    order = torch.Generator().manual_seed(seed)
    return DataLoader(_Samples(pair), size, shuffle=True, generator=order, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


def evaluate(model: nn.Module, loss: nn.Module, pair: Pair, kind: str) -> tuple[float, float]:
    """The mean loss over all samples, and the share of wrong answers (of a regression the loss again)."""
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
    """The class: of one logit 0 or 1, in the shape of the targets."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs > 0).to(outputs.dtype)


class Watch:
    """Called after every step: counts them and evaluates the loss now and then, outside of the time of the run."""

    def __init__(self, evaluate_loss: Callable[[], float], every: int) -> None:
        self.evaluate_loss, self.every = evaluate_loss, every
        self.steps = 0
        self.curve: list[tuple[float, float]] = []  # CPU seconds, loss
        self.outside = 0.0
        self.started = time.process_time()

    @property
    def seconds(self) -> float:
        """CPU seconds since the start, without the evaluations."""
        return time.process_time() - self.started - self.outside

    def __call__(self, *ignored: object) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            seconds, before = self.seconds, time.process_time()
            self.curve.append((seconds, self.evaluate_loss()))
            self.outside += time.process_time() - before


# -- the methods ----------------------------------------------------------------------------------------------


def first_order(
    optimizer: torch.optim.Optimizer, decay: bool
) -> Callable[[nn.Module, nn.Module, DataLoader[Pair], int, Watch], None]:
    """The usual loop, with the rate decayed linearly to 0 over all steps or constant."""

    def train(model: nn.Module, loss: nn.Module, loader: DataLoader[Pair], epochs: int, watch: Watch) -> None:
        total, rates = epochs * len(loader), [group["lr"] for group in optimizer.param_groups]
        for _ in range(epochs):
            for inputs, targets in loader:
                if decay:
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate * (1 - watch.steps / total)
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
                watch()

    return train


def train_default(
    model: nn.Module,
    loss: nn.Module,
    loader: DataLoader[Pair],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    callback: Callable[..., object],
) -> None:
    """woodbury's default: momentum, and a rate that decays linearly to 0."""
    total = steps if steps is not None else (epochs or 0) * len(loader)
    curvature_samples = min(loader.batch_size or 32, 32)
    optimizer = GaussNewton(
        *(model, loss),
        lr=0.3,
        momentum=0.9,
        curvature_samples=curvature_samples,
        fallback="autograd",
        seed=seed,
    )
    for step, (inputs, targets) in enumerate(_first(loader, total)):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / total)
        optimizer.step(inputs, targets)
        callback()


def _first(loader: DataLoader[Pair], count: int) -> Iterator[Pair]:
    """So many batches, by as many rounds through the loader as that takes."""
    while count > 0:
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                return


def load_train(path: str | None) -> Train:
    """The function that `module:function` names, in place of woodbury's default."""
    if path is None:
        return train_default
    module, _, name = path.partition(":")
    train: Train = getattr(importlib.import_module(module), name)
    return train


# -- one run --------------------------------------------------------------------------------------------------


def _run(
    problem: Problem,
    task: Task,
    train: Callable[[DataLoader[Pair], Watch], object],
    total: int,
    **labels: Any,
) -> Record:
    """The record of one run; an error of the run is written down in it."""
    start, _ = evaluate(task.model, task.loss, task.train, problem.kind)
    watch = Watch(
        lambda: evaluate(task.model, task.loss, task.train, problem.kind)[0],
        max(1, math.ceil(total / CURVE_POINTS)),
    )
    failure = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.started = time.process_time()
        try:
            train(batches(task.train, problem.batch, labels["seed"]), watch)
        except Exception as error:  # what a user would see; the other runs go on
            failure = f"{type(error).__name__}: {one_line(error)}"
        seconds = watch.seconds
    train_loss, _ = evaluate(task.model, task.loss, task.train, problem.kind)
    test_loss, test_figure = evaluate(task.model, task.loss, task.test, problem.kind)
    return {
        "problem": problem.name,
        "kind": problem.kind,
        **labels,
        "epochs": watch.steps / math.ceil(len(task.train[0]) / problem.batch),
        "steps": watch.steps,
        "seconds": seconds,
        "start_loss": start,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "test_figure": test_figure,
        "test_samples": len(task.test[0]),
        "finite": all(bool(parameter.isfinite().all()) for parameter in task.model.parameters()),
        "error": failure,
        "warnings": sorted({one_line(entry.message) for entry in caught if isinstance(entry.message, Warning)}),
        "curve": [[0.0, start], *map(list, watch.curve)],
    }


def run_first_order(
    problem: Problem, method: str, rate: float, seed: int, data_dir: Path | None = None, decay: bool = True
) -> Record:
    """Adam or SGD with momentum 0.9 over all epochs."""
    task = problem.make(seed, data_dir)
    parameters = task.model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, rate, momentum=0.9) if method == SGD else torch.optim.Adam(parameters, rate)
    )
    loop = first_order(optimizer, decay)
    return _run(
        problem,
        task,
        lambda loader, watch: loop(task.model, task.loss, loader, problem.epochs, watch),
        total=problem.epochs * math.ceil(len(task.train[0]) / problem.batch),
        method=method,
        rate=rate,
        seed=seed,
    )


def train_with_woodbury(
    problem: Problem,
    seed: int,
    data_dir: Path | None = None,
    train: Train = train_default,
    steps: int | None = None,
    method: str = WOODBURY,
) -> Record:
    """woodbury with its default settings over all epochs, or over so many steps."""
    task = problem.make(seed, data_dir)
    budget = {"epochs": problem.epochs} if steps is None else {"steps": steps}
    total = steps or problem.epochs * math.ceil(len(task.train[0]) / problem.batch)
    torch.manual_seed(seed)
    return _run(
        problem,
        task,
        lambda loader, watch: train(task.model, task.loss, loader, **budget, seed=seed, callback=watch),
        total=total,
        method=method,
        rate=None,
        seed=seed,
    )


# -- one problem, all methods and seeds -----------------------------------------------------------------------


def equal_steps(adam: Sequence[Record], woodbury: Record) -> int:
    """Steps of woodbury in the CPU time of Adam's run: the median of its runs with the same seed, at any rate."""
    seconds = median(record["seconds"] for record in adam)
    return max(1, round(seconds / (woodbury["seconds"] / max(1, woodbury["steps"]))))


def run_problem(
    problem: Problem,
    seeds: Sequence[int],
    methods: Sequence[str] = METHODS,
    data_dir: Path | None = None,
    train: Train = train_default,
    earlier: Sequence[Record] = (),
    say: Callable[[str], object] = lambda line: None,
) -> list[Record]:
    """The records of all methods and seeds; `earlier` are records of rivals that need not be run again."""
    _warm_up(problem, data_dir, train)
    records: list[Record] = []
    for seed in seeds:
        mine = [
            record
            for record in earlier
            if record["seed"] == seed and record["method"] in (ADAM_CONSTANT, ADAM, SGD)
        ]
        ready = {record["method"] for record in mine}
        if ADAM_CONSTANT in methods and ADAM_CONSTANT not in ready:
            mine.append(
                run_first_order(problem, ADAM, 1e-3, seed, data_dir, decay=False) | {"method": ADAM_CONSTANT}
            )
        if ADAM in methods and ADAM not in ready:
            mine += [run_first_order(problem, ADAM, rate, seed, data_dir) for rate in problem.adam_rates]
        if WOODBURY in methods:
            mine.append(train_with_woodbury(problem, seed, data_dir, train))
            adam = [record for record in mine if record["method"] in (ADAM, ADAM_CONSTANT)]
            if adam:
                steps = equal_steps(adam, mine[-1])
                mine.append(train_with_woodbury(problem, seed, data_dir, train, steps, EQUAL_SECONDS))
        if SGD in methods and SGD not in ready:
            mine += [run_first_order(problem, SGD, rate, seed, data_dir) for rate in problem.sgd_rates]
        for record in mine:
            if record["error"]:
                say(f"{problem.name}, {record['method']}, seed {seed}: {record['error']}")
        records += mine
    return records


def _warm_up(problem: Problem, data_dir: Path | None, train: Train) -> None:
    """A few steps of each method, in which torch loads much of itself."""
    for method in (ADAM, SGD):
        run_first_order(_cut(problem, 2 * problem.batch), method, 1e-3, 0, data_dir)
    train_with_woodbury(_cut(problem, 2 * problem.batch), 0, data_dir, train)


def _cut(problem: Problem, samples: int) -> Problem:
    """The problem with one epoch over its first samples."""

    def data(data_dir: Path | None) -> tuple[Pair, Pair]:
        train, test = problem.data(data_dir)
        return (train[0][:samples], train[1][:samples]), (test[0][:samples], test[1][:samples])

    return replace(problem, data=data, epochs=1)


def guard_problem(
    problem: Problem, seeds: Sequence[int], data_dir: Path | None = None, train: Train = train_default
) -> list[Record]:
    """woodbury's runs alone, over all epochs."""
    return [train_with_woodbury(problem, seed, data_dir, train) for seed in seeds]


# -- all problems ---------------------------------------------------------------------------------------------


def chosen_problems(names: Sequence[str]) -> list[Problem]:
    """The problems of these names, or all but the long ones."""
    if names:
        return [PROBLEMS[name] for name in names]
    return [problem for problem in PROBLEMS.values() if not problem.by_name_only]


def bench_problems(
    names: Sequence[str] = (),
    seeds: int = 3,
    methods: Sequence[str] = METHODS,
    jobs: int = 1,
    data_dir: Path | None = None,
    guard: bool = False,
    epochs: int | None = None,
    woodbury: str | None = None,
    earlier: Sequence[Record] = (),
    say: Callable[[str], object] = lambda line: None,
    keep: Callable[[Sequence[Record]], object] = lambda records: None,
) -> list[Record]:
    """The records of all runs, by problem.

    A problem whose data is absent is left out, and `say` gets a line with its name. `epochs` cuts all runs short;
    `woodbury` names a function `module:function` in place of `train_default`; `keep` gets the records of each
    problem when it is done. With several jobs, problems are run by as many processes.
    """
    work = [
        (problem.name, seeds, tuple(methods), data_dir, guard, epochs, woodbury, _of(problem.name, earlier))
        for problem in chosen_problems(names)
    ]
    results: dict[str, list[Record]] = {}
    for name, records, lines in _answers_of(work, jobs):
        for line in lines:
            say(line)
        if records:
            say(f"{name}: {len(records)} runs, {sum(record['seconds'] for record in records):.0f} CPU seconds")
            keep(records)
        results[name] = records
    return [record for job in work for record in results[job[0]]]


def _of(name: str, records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(record for record in records if record["problem"] == name)


def _answers_of(work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[tuple[str, list[Record], list[str]]]:
    if jobs == 1:
        yield from (_one(*job) for job in work)
        return
    # New processes, which read OMP_NUM_THREADS before they load torch.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(_one, *job) for job in work]))


def _one(
    name: str,
    seeds: int,
    methods: tuple[str, ...],
    data_dir: Path | None,
    guard: bool,
    epochs: int | None,
    woodbury: str | None,
    earlier: tuple[Record, ...],
) -> tuple[str, list[Record], list[str]]:
    """A problem's name, its records and lines to say: what one process does."""
    problem, train, lines = PROBLEMS[name], load_train(woodbury), list[str]()
    if epochs is not None:
        problem = replace(problem, epochs=min(epochs, problem.epochs))
    try:
        problem.data(data_dir)
    except DataError as error:
        return name, [], [f"{name} is left out: {error}"]
    except ModuleNotFoundError as error:
        return name, [], [f'{name} is left out: it needs {error.name}: pip install "woodbury[experiments]"']
    if guard:
        records = guard_problem(problem, range(seeds), data_dir, train)
    else:
        records = run_problem(problem, range(seeds), methods, data_dir, train, earlier, lines.append)
    return name, records, lines


# -- what the records say -------------------------------------------------------------------------------------


def read_records(path: Path) -> list[Record]:
    """The records of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """{"problems": one row per problem, "counts": on how many of them woodbury reaches a bar}."""
    names = dict.fromkeys(record["problem"] for record in records)
    rows = {name: _row([record for record in records if record["problem"] == name]) for name in names}
    return {"problems": rows, "counts": _counts(rows)}


def _row(records: Sequence[Record]) -> dict[str, Any]:
    """One problem: per method the median over the seeds, and woodbury's ratios to tuned Adam."""
    row: dict[str, Any] = {"kind": records[0]["kind"]}
    for method in dict.fromkeys(record["method"] for record in records):
        runs = [record for record in records if record["method"] == method]
        rates = dict.fromkeys(record["rate"] for record in runs)
        by_rate = {rate: [run for run in runs if run["rate"] == rate] for rate in rates}
        rate = min(by_rate, key=lambda rate: _median(by_rate[rate], "train_loss"))
        figures = [_finite(run["test_figure"]) for run in by_rate[rate]]
        ordered = sorted(rate for rate in rates if rate is not None)
        row[method] = {
            "rate": rate,
            "edge": len(ordered) > 1 and rate in (ordered[0], ordered[-1]),
            "train_loss": _median(by_rate[rate], "train_loss"),
            "test": fmean(figures),
            "test_spread": (min(figures), max(figures)),
            "test_variance": variance(figures) if len(figures) > 1 and max(figures) < math.inf else 0.0,
            "test_samples": runs[0]["test_samples"],
            "seeds": len(figures),
            "seconds": _median(by_rate[rate], "seconds"),
            "steps": _median(by_rate[rate], "steps"),
            "errors": sum(run["error"] is not None for run in runs),
        }
    if ADAM in row:
        for method in (WOODBURY, EQUAL_SECONDS):
            if method in row:
                row[method]["ratio"] = row[method]["train_loss"] / row[ADAM]["train_loss"]
                row[method]["seconds_ratio"] = row[method]["seconds"] / row[ADAM]["seconds"]
    return row


def _finite(value: float | None) -> float:
    """The value as it orders runs: one that overflowed is the worst."""
    return math.inf if value is None or math.isnan(value) else value


def _median(runs: Sequence[Record], key: str) -> float:
    return median(_finite(run[key]) for run in runs)


def _counts(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """{bar: (problems that reach it, problems it is asked of)}."""
    epochs = [row[WOODBURY] for row in rows.values() if "ratio" in row.get(WOODBURY, {})]
    seconds = [row for row in rows.values() if "ratio" in row.get(EQUAL_SECONDS, {})]
    regressions = [row for row in seconds if row["kind"] == REGRESSION]
    classifications = [row for row in seconds if row["kind"] == CLASSIFICATION]
    constant = [row for row in rows.values() if WOODBURY in row and ADAM_CONSTANT in row]
    return {
        "train loss not above tuned Adam's, equal epochs": _share(entry["ratio"] <= 1 for entry in epochs),
        f"within {WITHIN} times of it": _share(entry["ratio"] <= WITHIN for entry in epochs),
        "train loss not above tuned Adam's, equal seconds, regressions": _share(
            row[EQUAL_SECONDS]["ratio"] <= 1 for row in regressions
        ),
        "test error not above tuned Adam's beyond noise, equal seconds, classifications": _share(
            not above_beyond_noise(row[EQUAL_SECONDS], row[ADAM]) for row in classifications
        ),
        "train loss below Adam's at 1e-3, equal epochs": _share(
            row[WOODBURY]["train_loss"] < row[ADAM_CONSTANT]["train_loss"] for row in constant
        ),
        "train loss below Adam's at 1e-3, equal seconds": _share(
            row[EQUAL_SECONDS]["train_loss"] < row[ADAM_CONSTANT]["train_loss"]
            for row in constant
            if EQUAL_SECONDS in row
        ),
    }


def noise(entry: dict[str, Any], reference: dict[str, Any]) -> float:
    """Two standard errors of the difference between two mean test errors.

    error^2 = v / n + v' / n' + q (1 - q) / N: variances v over n seeds, and the chance of the N test samples,
    which both share, at the error q of the reference.
    """
    seeds = sum(part["test_variance"] / part["seeds"] for part in (entry, reference))
    share = reference["test"]
    return 2 * math.sqrt(seeds + share * (1 - share) / reference["test_samples"])


def above_beyond_noise(entry: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Whether the mean test error lies above that of the reference by more than `noise`."""
    above: bool = entry["test"] > reference["test"] + noise(entry, reference)
    return above


def _share(answers: Iterable[bool]) -> tuple[int, int]:
    values = list(answers)
    return sum(values), len(values)


def guard_faults(records: Sequence[Record]) -> list[str]:
    """One line per run that raised, ended above its starting loss or left a parameter that is not finite."""
    faults = []
    for record in records:
        name = f"{record['problem']}, seed {record['seed']}"
        if record["error"]:
            faults.append(f"{name}: {record['error']}")
        elif not record["finite"]:
            faults.append(f"{name}: a parameter is not finite")
        elif not record["train_loss"] <= record["start_loss"]:
            faults.append(f"{name}: loss {record['start_loss']:.4g} -> {record['train_loss']:.4g}")
    return faults
