"""The command `problems`: woodbury beside Adam and SGD, with the same epochs and with the same CPU time.

Every run is one record, a plain dictionary; docs/benchmarks.md says what the methods are. Where woodbury has the
CPU seconds of Adam (the median over its rates) it keeps to them by the clock: where other work takes part of the
machine it gets less than Adam got.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.common import Batch, Command, positive, round_numbers, say, table, take_step
from benchmarks.problems import CLASSIFICATION, PROBLEMS, REGRESSION, Problem, Task
from woodbury._files import one_line
from woodbury.experiments import train
from woodbury.experiments.files import DataError
from woodbury.fit import fit
from woodbury.runs.config import installed_versions, this_machine

ADAM_CONSTANT, ADAM, SGD, WOODBURY = "adam-1e-3", "adam", "sgd", "woodbury"
METHODS = (ADAM_CONSTANT, ADAM, SGD, WOODBURY)
EQUAL_SECONDS = "woodbury-seconds"  # the method of a record: woodbury in the CPU seconds of Adam

Record = dict[str, Any]


# -- samples, and what a model makes of them ------------------------------------------------------------------


def batches(pair: Batch, size: int, seed: int) -> DataLoader[Any]:
    """Shuffled batches, the last one of an epoch smaller; their order depends on the seed alone."""
    samples, order = TensorDataset(*pair), torch.Generator().manual_seed(seed)
    indices = BatchSampler(RandomSampler(samples, generator=order), size, drop_last=False)
    return DataLoader(samples, None, sampler=indices, generator=order)  # a batch by one indexing operation


def evaluate(model: nn.Module, loss: nn.Module, pair: Batch, kind: str) -> tuple[float, float]:
    """The mean loss over all samples, in eval mode, and the share of wrong answers (of a regression the loss)."""
    was_training = model.training
    value, error = train.evaluate(model.eval(), loss, *pair)
    model.train(was_training)
    return value, value if kind == REGRESSION else error


# -- one run --------------------------------------------------------------------------------------------------


def train_first_order(task: Task, loader: DataLoader[Any], method: str, rate: float, epochs: int) -> None:
    """The usual loop with Adam or SGD: a constant rate, or one that decays linearly to 0 over all steps."""
    make: Any = partial(torch.optim.SGD, momentum=0.9) if method == SGD else torch.optim.Adam
    optimizer, total = make(task.model.parameters(), lr=rate), epochs * len(loader)
    schedule = LambdaLR(optimizer, lambda step: 1.0 if method == ADAM_CONSTANT else 1 - step / total)
    for _ in range(epochs):
        for batch in loader:
            take_step(optimizer, task.model, task.loss, batch)
            schedule.step()


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
        adam = [record["seconds"] for record in found if record["method"] == ADAM]
        if WOODBURY in methods:
            found.append(run(problem, make(), WOODBURY, seed))
        if WOODBURY in methods and adam:
            found.append(run(problem, make(), EQUAL_SECONDS, seed, seconds=median(adam)))
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


# -- what the records say ---------------------------------------------------------------------------------------


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """What the records say, by problem and over all of them:

        {"problems": {name: {"kind", method: entry}}, "faults": lines}

    The rate of a method is the one with the lowest training loss, a median over the seeds. Its entry has

        train_loss, seconds                      medians over the seeds
        test, test_range                         mean, smallest and largest over the seeds
        rate, edge                               the rate, and whether it is the lowest or highest tried
        ratio, seconds_ratio                     train_loss and seconds over those of tuned Adam (woodbury alone)
    """
    rows: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault(record["problem"], {"kind": record["kind"]})
        groups.setdefault((record["problem"], record["method"]), []).append(record)
    for (problem, method), runs in groups.items():
        rows[problem][method] = _entry(runs)
    for row in rows.values():
        for method in (WOODBURY, EQUAL_SECONDS):
            if method in row and ADAM in row:
                row[method]["ratio"] = row[method]["train_loss"] / row[ADAM]["train_loss"]
                row[method]["seconds_ratio"] = row[method]["seconds"] / row[ADAM]["seconds"]
    return {"problems": rows, "faults": faults(records)}


def _entry(records: Sequence[Record]) -> dict[str, Any]:
    rates = sorted({record["rate"] for record in records if record["rate"] is not None})
    by_rate = {rate: [record for record in records if record["rate"] == rate] for rate in rates or [None]}
    losses = {rate: median(figure_of(run, "train_loss") for run in runs) for rate, runs in by_rate.items()}
    rate = min(losses, key=losses.__getitem__)
    runs = by_rate[rate]
    tests = [figure_of(run, "test_figure") for run in runs]
    return {
        "rate": rate,
        "edge": len(rates) > 1 and rate in (rates[0], rates[-1]),
        "train_loss": losses[rate],
        "seconds": median(run["seconds"] for run in runs),
        "test": fmean(tests),
        "test_range": (min(tests), max(tests)),
    }


def figure_of(record: Record, key: str) -> float:
    """A figure of a run, infinity if it is not a number or the run ended with an error."""
    value = record[key]
    return math.inf if value is None or math.isnan(value) or record["error"] is not None else float(value)


def faults(records: Sequence[Record]) -> list[str]:
    """One line per run of woodbury that raised, left a parameter not finite, or ended above its starting loss."""
    lines = []
    for record in records:
        start, end = record["start_loss"], figure_of(record, "train_loss")
        fault = record["error"]
        if fault is None and not record["finite"]:
            fault = "a parameter is not finite"
        elif fault is None and end > start:
            fault = f"the loss rose from {start:.4g} to {end:.4g}"
        if fault is not None and record["method"] in (WOODBURY, EQUAL_SECONDS):
            lines.append(f"{record['problem']}, {record['method']}, seed {record['seed']}: {fault}")
    return lines


# -- tables ---------------------------------------------------------------------------------------------------

_TITLES = {ADAM_CONSTANT: "Adam 1e-3", ADAM: "Adam tuned", SGD: "SGD tuned"}
_TITLES |= {WOODBURY: "woodbury, equal epochs", EQUAL_SECONDS: "woodbury, equal seconds"}


def problems_tables(summary: dict[str, Any]) -> str:
    """Training losses, test figures and, below them, the faults."""
    training, test = [], []
    for name, row in summary["problems"].items():
        losses = {"problem": name, "kind": row["kind"]}
        figures = dict(losses)
        for method, text in _TITLES.items():
            entry, heading = row.get(method, {}), text.replace(", ", "\n").replace(" ", "\n")
            losses[heading] = entry.get("train_loss")
            if method in (ADAM, SGD):
                losses[f"{heading}\nrate"] = f"{entry['rate']:g}{'*' * entry['edge']}" if entry else None
            if method in (WOODBURY, EQUAL_SECONDS):
                losses[f"{heading}\nx loss"] = entry.get("ratio")
                losses[f"{heading}\nx time"] = entry.get("seconds_ratio")
            figures[text] = _test(row["kind"], entry) if entry else None
        training.append(losses)
        test.append(figures)
    title = "Training loss, median over the seeds; *: the edge of the rates tried; x: over those of tuned Adam"
    tables = [table(title, training, left=2)]
    tables.append(table("Test error or test loss, mean (smallest to largest) over the seeds", test, left=2))
    return "\n\n".join([*tables, *summary["faults"]])


def _test(kind: str, entry: dict[str, Any]) -> str:
    """2.4 % (2.2 to 2.9), or a loss without %."""
    unit, factor = (" %", 100) if kind == CLASSIFICATION else ("", 1)
    mean, low, high = (f"{factor * value:.3g}" for value in (entry["test"], *entry["test_range"]))
    return f"{mean}{unit} ({low} to {high})"


# -- the command ----------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = f"these alone (default: all but mnist-full). One or more of: {', '.join(PROBLEMS)}"
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), default=[], metavar="NAME", help=text)
    text = f"one or more of {', '.join(METHODS)} (default: all)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=text)
    text = "seeds of the initial weights and of the order of batches (default 3)"
    parser.add_argument("--seeds", type=positive, default=3, metavar="NUMBER", help=text)
    text = "processes, each with one thread (default 1)"
    parser.add_argument("--jobs", type=positive, default=1, metavar="NUMBER", help=text)
    text = "folder with MNIST and covtype (default: that of WOODBURY_DATA); without it these are left out"
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help=text)
    text = "folder for records.jsonl, a line per run (default runs/problems)"
    parser.add_argument("--out", type=Path, default=Path("runs/problems"), metavar="FOLDER", help=text)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """The summary; status 1 if a run of woodbury has a fault. The records go to a folder."""
    wanted = {"seeds": range(options.seeds), "methods": options.methods, "data_dir": options.data_dir}
    options.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    with (options.out / "records.jsonl").open("w") as file:
        for found in bench_problems(options.only, options.jobs, **wanted):
            file.writelines(json.dumps(round_numbers(record)) + "\n" for record in found)
            file.flush()
            records += found
    if not records:
        raise SystemExit("problems: the data of all these problems is absent")
    return {"machine": this_machine(), "versions": installed_versions()} | summarise(records)


COMMAND = Command(
    "training beside tuned Adam and SGD, on small problems (20 minutes)", _run, problems_tables, _add_options
)
