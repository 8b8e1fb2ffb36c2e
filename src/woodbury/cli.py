"""The command `woodbury`."""

import difflib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as ProgressBar
    from rich.table import Table

    from woodbury.experiments import report
    from woodbury.experiments.config import PRESETS, RunConfig
    from woodbury.experiments.data import DATASETS
    from woodbury.experiments.train import Progress, train
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] in ("woodbury", "torch"):
        raise
    raise SystemExit(f'The command line needs {error.name}: pip install "woodbury[experiments]"') from None

from woodbury.optim import OPTIMIZERS

app = typer.Typer(
    help="Second-order optimizers for PyTorch: compare them, measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure what a step costs.", no_args_is_help=True)
app.add_typer(bench, name="bench")

console = Console()


def main() -> None:
    """Run the command line."""
    app()


@app.command("list")
def list_names() -> None:
    """Name the data sets and the optimizers."""
    data_sets = Table("data set", "what it is", box=None, header_style="bold")
    for name, load in DATASETS.items():
        data_sets.add_row(name, _first_line(load))
    optimizers = Table("optimizer", "what it is", box=None, header_style="bold")
    for name, make in OPTIMIZERS.items():
        optimizers.add_row(name, _first_line(make))
    console.print(data_sets)
    console.print()
    console.print(optimizers)


@app.command()
def compare(
    dataset: Annotated[str, typer.Argument(help="Data set, one of those `woodbury list` names.")],
    optimizers: Annotated[
        str, typer.Option(help="Optimizers, separated by commas.")
    ] = "smw-gn,smw-ng,smw-ng-bd,sgd",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per optimizer, with seeds 0, 1, ...")] = 3,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs per run.", show_default="the preset's")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs; each comparison adds one to it.")] = Path("runs"),
) -> None:
    """Train several optimizers on one data set, print a table and draw a figure."""
    _check_name("data set", dataset, DATASETS)
    names = list(dict.fromkeys(name.strip() for name in optimizers.split(",") if name.strip()))
    if not names:
        _fail("no optimizer given: --optimizers takes names separated by commas")
    for name in names:
        _check_name("optimizer", name, OPTIMIZERS)

    preset = PRESETS[dataset]
    runs = {name: [preset.run(dataset, name, seed, epochs) for seed in range(seeds)] for name in names}
    try:
        folder = _new_folder(out, dataset)
        _train_all(runs, folder)
        results = report.load_runs(folder)
        _print_summary(report.summarise(results))
        figure, _ = report.save(report.draw(results), folder / "comparison")
    except OSError as error:
        _fail(f"cannot write to {error.filename or out}: {error.strerror or error}")
    console.print(f"figure [bold]{figure}[/] (and .svg), run folders in [bold]{folder}[/]", soft_wrap=True)


@bench.command("step")
def bench_step(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object {net: {optimizer: ratio}}.")
    ] = False,
) -> None:
    """Cost of a step on the paper's three networks, in steps of torch.optim.SGD on the same batch."""
    # A process of its own: the thread count must be set before torch is imported to hold for BLAS too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "woodbury.bench", "step", "--json"]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        raise typer.Exit(finished.returncode)
    ratios: dict[str, dict[str, float]] = json.loads(finished.stdout)
    if as_json:
        print(json.dumps(ratios))
        return
    nets = list(ratios)
    table = Table(
        "optimizer", title="CPU time of a step / CPU time of a torch.optim.SGD step", title_justify="left"
    )
    for net in nets:
        table.add_column(net, justify="right")
    for name in dict.fromkeys(name for net in nets for name in ratios[net]):
        table.add_row(name, *(f"{ratios[net][name]:.2f}" if name in ratios[net] else "-" for net in nets))
    console.print(table)


def _train_all(runs: dict[str, list[RunConfig]], folder: Path) -> None:
    """Train every run into a folder of its own below `folder`, one bar per optimizer."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:>9}  damping {task.fields[damping]:>8}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with ProgressBar(*columns, console=console) as bars:
        tasks = {name: bars.add_task(name, start=False, total=None, loss="", damping="") for name in runs}
        for name, configs in runs.items():
            bars.start_task(tasks[name])
            for index, config in enumerate(configs):

                def show(now: Progress, name: str = name, index: int = index, runs: int = len(configs)) -> None:
                    bars.update(
                        tasks[name],
                        total=runs * now.steps,
                        completed=index * now.steps + now.step,
                        loss=_short(now.loss),
                        damping=_short(now.damping),
                    )

                train(config, folder / f"{name}-seed{config.seed}", show)


def _print_summary(summaries: list[report.Summary]) -> None:
    seeds = max(summary.seeds for summary in summaries)
    table = Table(
        "optimizer", title=f"After training (median over {seeds} seeds)" if seeds > 1 else "After training"
    )
    for heading in ("train loss", "test error", "seconds", "final damping"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        table.add_row(
            summary.optimizer,
            _short(summary.train_loss),
            f"{100 * summary.test_error:.2f} %",
            f"{summary.seconds:.2f}",
            _short(summary.damping),
        )
    console.print(table)


def _new_folder(out: Path, dataset: str) -> Path:
    """Create and return the first of `out/dataset-1`, `out/dataset-2`, ... that does not exist."""
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = out / f"{dataset}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    """End with a message that suggests the nearest known name unless `name` is known."""
    known = list(known)
    if name in known:
        return
    nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}"
    _fail(f"unknown {what} '{name}'; {hint}")


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and end with status 2, the status of wrong usage."""
    typer.echo(f"woodbury: {message}", err=True)
    raise typer.Exit(2)


def _short(value: float) -> str:
    """Three digits, or a dash for an optimizer without the quantity."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def _first_line(described: object) -> str:
    """The first line of the docstring; a partial shows that of its function and the arguments it sets."""
    if isinstance(described, partial):
        arguments = ", ".join(f"{name}={value!r}" for name, value in described.keywords.items())
        return f"{_first_line(described.func)} With {arguments}."
    return (described.__doc__ or "").strip().split("\n")[0]


if __name__ == "__main__":
    main()
