"""The command `woodbury`."""

import difflib
import inspect
import json
import os
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

try:
    import torch
    import typer
    from rich import progress as bars
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from woodbury.experiments.data import DATASETS, load_dataset
    from woodbury.experiments.files import DataError
    from woodbury.experiments.presets import PAPER, PRESETS, try_settings
    from woodbury.experiments.train import CHECKPOINT_SECONDS, InterruptedRunError, Progress, stop_on_signal, train
    from woodbury.runs import report
    from woodbury.runs.config import RunConfig, folder_to_resume, new_folder, run_folder
    from woodbury.runs.storage import RunFolderError, one_line, printable
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] in ("woodbury", "torch"):
        raise
    raise SystemExit(f'The command line needs {error.name}: pip install "woodbury[experiments]"') from None

from woodbury._version import __version__
from woodbury.optimizers import OPTIMIZERS
from woodbury.parallel.group import LostProcessError, all_processes

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()

_INTERRUPTED = 130  # the status of a program ended by Ctrl-C
_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun puts into the environment
_PATIENCE = timedelta(minutes=30)  # of a process that waits for another, which may be loading data

DataSetName = Annotated[str, typer.Argument(help="Name of a data set, see `woodbury list`.")]
Optimizers = Annotated[str, typer.Option(help="Names of optimizers, separated by commas.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs per optimizer, with seeds 0, 1, ...")]


@dataclass(frozen=True)
class Options:
    """The options that all commands that train have."""

    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs per run.", show_default="the preset's")] = None
    out: Annotated[Path, typer.Option(help="Where each command creates a folder for its runs.")] = Path("runs")
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the data files, one folder per data set; with it nothing is downloaded.",
            show_default="the environment variable WOODBURY_DATA; without it files are downloaded",
        ),
    ] = None
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to train.")] = "cpu"
    dtype: Annotated[Literal["float32", "float64"], typer.Option(help="Of parameters and data.")] = "float32"
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in the newest folder with these runs, from their checkpoints.")
    ] = False
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.0, help="Time between two checkpoints; 0 saves one after every step.")
    ] = CHECKPOINT_SECONDS

    def config(self, dataset: str, optimizer: str, seed: int, **more: Any) -> RunConfig:
        """A run of these options on a data set, with the preset of the data set."""
        return PRESETS[dataset].config(
            dataset, optimizer, seed, epochs=self.epochs, device=self.device, dtype=self.dtype, **more
        )


def _training_command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function as a command; its last argument `options` becomes an option for each field of `Options`."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(function).parameters.values()
        shared = inspect.signature(Options).parameters

        def command(**given: Any) -> None:
            options = Options(**{field: given.pop(field) for field in shared})
            with _one_line_errors(options.out), _processes(options.device):
                function(**given, options=options)

        command.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
        app.command(name, help=function.__doc__)(command)
        return function

    return enter


def main() -> None:
    """Run the command line."""
    app(prog_name="woodbury")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"woodbury {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Second-order optimizers for PyTorch: train with them and compare them."""


@app.command("list")
def list_names() -> None:
    """List the data sets, the optimizers and the presets of the paper."""
    for kind, entries in {"data set": DATASETS, "optimizer": OPTIMIZERS}.items():
        first_lines = [(entry.__doc__ or "").strip().split("\n")[0] for entry in entries.values()]
        _print_table([kind, "description"], zip(entries, first_lines, strict=True), words=2, box=None)
    presets = []
    for name, preset in PAPER.items():
        numbers = (preset.batch_size, preset.curvature_samples, preset.epochs)
        presets.append([name, "-".join(map(str, preset.widths)), *map(str, numbers)])
    _print_table(["preset", "network", "batch size", "curvature samples", "epochs"], presets, box=None)


@_training_command("train")
def train_one(
    dataset: DataSetName,
    optimizer: Annotated[str, typer.Option(help="Name of an optimizer, see `woodbury list`.")] = "smw-gn",
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate.", show_default="the preset's")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per step.", show_default="the preset's")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the optimizer, e.g. momentum=0.9, or a field of one, e.g. damping.initial=10: it "
            "changes what --set damping= gives before or after it, or else the default. May be repeated.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights, the batches and the curvature samples.")
    ] = 0,
    *,
    options: Options,
) -> None:
    """Train one optimizer on one data set and write a report."""
    _check_name("data set", dataset, DATASETS)
    _check_name("optimizer", optimizer, OPTIMIZERS)
    values = _read_settings(settings or [])
    if lr is not None:
        values["lr"] = lr
    try:
        config = options.config(dataset, optimizer, seed, batch_size=batch_size, settings=values)
        try_settings(config)
    except Exception as error:  # any error here comes from a setting
        _fail(f"{optimizer}: {one_line(error)}")
    _train_and_report([config], options)


@_training_command("compare")
def compare(
    dataset: DataSetName,
    optimizers: Optimizers = "smw-gn,smw-ng,smw-ng-bd,sgd",
    seeds: Seeds = 3,
    *,
    options: Options,
) -> None:
    """Train several optimizers on one data set and write a report that compares them."""
    _check_name("data set", dataset, DATASETS)
    names = list(dict.fromkeys(name.strip() for name in optimizers.split(",") if name.strip()))
    if not names:
        _fail("no optimizer given: --optimizers takes names separated by commas")
    for name in names:
        _check_name("optimizer", name, OPTIMIZERS)
    configs = [options.config(dataset, name, seed) for seed in range(seeds) for name in names]
    _train_and_report(configs, options)


@_training_command("reproduce")
def reproduce(
    preset: Annotated[str, typer.Argument(help=f"Experiment of the paper: {', '.join(PAPER)}.")],
    optimizers: Optimizers = "smw-gn,smw-ng,smw-ng-bd,hf,kfac,sgd",
    seeds: Seeds = 1,
    *,
    options: Options,
) -> None:
    """Repeat an experiment of the paper: its network, batch sizes, learning rates and damping rule.

    covtype is not in the paper; it uses the settings of webspam.
    """
    _check_name("preset", preset, PAPER)
    compare(preset, optimizers, seeds, options=options)


@app.command("report")
def report_runs(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report.", show_default="the folder of the first run")
    ] = None,
) -> None:
    """Write figures and a page for finished or unfinished runs."""
    with _one_line_errors(out or runs[0]):
        _report(runs, out or runs[0])


# -- parts of the commands ------------------------------------------------------------------------------------


@contextmanager
def _processes(device: str) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has; ends with a message if the device is not there."""
    on_gpu, launched = device == "cuda", os.environ.keys() >= _LAUNCHED
    if on_gpu and not torch.cuda.is_available():
        _fail("--device cuda: torch finds no CUDA device here; use --device cpu")
    if on_gpu and launched:
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= devices:
            _fail(f"--nproc-per-node is more than the {devices} CUDA devices here: start one process per device")
        torch.cuda.set_device(local)
    if launched:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    yield
    if launched:  # after an error the end of the process does it: others may wait
        torch.distributed.destroy_process_group()


def _train_and_report(configs: Sequence[RunConfig], options: Options) -> None:
    """Train all runs into one folder below `out` and report on them, after Ctrl-C on what there is.

    Of several processes the first alone shows and writes anything.
    """
    group, dataset, finished = all_processes(), configs[0].dataset, True
    for is_first in (True, False):  # for the others the files are there by then
        with group.together():
            if (group.rank == 0) is is_first:
                data = load_dataset(dataset, options.data_dir)  # may fail: before a folder is created
    with group.together():
        folder = _folder(configs, options) if group.rank == 0 else Path()
    folder = group.object_of_first(folder)
    shared: dict[str, Any] = {"resume": options.resume, "checkpoint_seconds": options.checkpoint_seconds}
    try:
        with stop_on_signal() as stop, _progress_bars(configs, group.rank == 0) as show:
            for config in configs:
                train(config, run_folder(folder, config), partial(show, config), data=data, stop=stop, **shared)
    except InterruptedRunError:
        finished = False
    with group.together():  # torchrun ends all processes when one of them has ended without success
        if group.rank == 0:
            _report([folder], folder)
            if not finished:
                _say(f"interrupted: the same command with --resume continues in {folder}")
    if not finished:
        raise typer.Exit(_INTERRUPTED)


def _folder(configs: Sequence[RunConfig], options: Options) -> Path:
    """The folder for the runs: a new one, or with --resume one that has some of them."""
    folder = folder_to_resume(options.out, configs) if options.resume else None
    if options.resume and folder is None:
        _say(f"nothing to resume in {options.out}: starting in a new folder")
    return folder or new_folder(options.out, configs[0].dataset)


def _report(paths: Sequence[Path], folder: Path) -> None:
    """Print the table, write the figures and the page."""
    runs = report.load(paths)
    for dataset, ends in report.ends_tables(runs).items():
        _print_table(ends["columns"], ends["rows"], title=escape(printable(f"{dataset}: medians over seeds")))
    page, *_ = report.write(runs, folder)
    console.print(f"wrote [bold]{escape(str(page))}[/], with figures beside it", soft_wrap=True)


@contextmanager
def _progress_bars(configs: Sequence[RunConfig], visible: bool) -> Iterator[Callable[[RunConfig, Progress], None]]:
    """Show one progress bar per optimizer, over its seeds; yields a function of a run and its `Progress`."""
    columns = (*bars.Progress.get_default_columns(), bars.TimeElapsedColumn())
    seeds = Counter(config.optimizer for config in configs)
    with bars.Progress(
        *columns, bars.TextColumn("{task.fields[numbers]}"), console=console, disable=not visible
    ) as shown:
        tasks = {name: shown.add_task(name, start=False, total=None, numbers="") for name in seeds}

        def show(config: RunConfig, now: Progress) -> None:
            task, runs = tasks[config.optimizer], seeds[config.optimizer]
            before = config.seed % runs  # several seeds are 0, 1, ...
            shown.start_task(task)
            damping = f"{now.damping:.3g}".replace("nan", "-")  # of an optimizer without damping
            shown.update(
                task,
                total=runs * now.steps,
                completed=before * now.steps + now.step,
                numbers=f"loss {now.loss:9.3g}  damping {damping:>8}",
            )

        yield show


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **look: Any) -> None:
    """Print texts; all columns but the first few, which hold words, are numbers."""
    table = Table(header_style="bold", **look)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right")
    for row in rows:
        table.add_row(*(escape(printable(text)) for text in row))
    console.print(table, "")


def _read_settings(entries: Iterable[str]) -> dict[str, Any]:
    """Entries NAME=VALUE or NAME.FIELD=VALUE as a dictionary; a value that is not JSON is a string."""
    settings: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) > 2 or not all(part.isidentifier() for part in parts):
            _fail(f"--set takes NAME=VALUE, got '{entry}'")
        try:
            settings[name.strip()] = json.loads(text)
        except (ValueError, RecursionError):
            settings[name.strip()] = text
    return settings


@contextmanager
def _one_line_errors(out: Path) -> Iterator[None]:
    """End with one line and status 2 after an error that a user can resolve; a warning is one line too.

    One line and status 1 where another process has failed.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: _say(str(message))
            yield
    except LostProcessError as error:
        _say(" ".join(str(error).split()))
        raise typer.Exit(1) from None
    except (DataError, RunFolderError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write to {error.filename or out}: {one_line(error)}")


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    """Unless `name` is known, end with a message that suggests the nearest known name."""
    if name not in known:
        nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}"
        _fail(f"unknown {what} '{name}'; {hint}")


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and end with status 2, the status of wrong usage."""
    _say(message)
    raise typer.Exit(2)


def _say(message: str) -> None:
    typer.echo(f"woodbury: {printable(message)}", err=True)


if __name__ == "__main__":
    main()
