"""The command `woodbury`."""

import json
import math
import platform
import signal
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

try:
    import torch
    import typer
    from rich import progress as bars
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from typer import Argument, Option

    from woodbury._files import one_line, printable
    from woodbury._process import stop_on_signal
    from woodbury.experiments.data import DATASETS, load_dataset
    from woodbury.experiments.files import DataError
    from woodbury.experiments.presets import PAPER, PRESETS, try_settings
    from woodbury.experiments.train import InterruptedRunError, train
    from woodbury.runs import report
    from woodbury.runs.config import RunConfig, RunFolderError, folder_to_resume, new_folder, run_folder
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] in ("woodbury", "torch"):
        raise
    raise SystemExit(f'The command line needs {error.name}: pip install "woodbury[experiments]"') from None

from woodbury._version import __version__
from woodbury.optimizers import OPTIMIZERS

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()

_INTERRUPTED = 130  # the status of a program ended by Ctrl-C
PRESET = "the preset's"  # a default that depends on the data set


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
        bool, Option("--version", help="Show the versions and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Second-order optimizers for PyTorch: train with them and compare them."""


@app.command("list")
def list_names() -> None:
    """List the data sets and the optimizers."""
    for kind, entries in {"data set": DATASETS, "optimizer": OPTIMIZERS}.items():
        first_lines = [(entry.__doc__ or "").strip().split("\n")[0] for entry in entries.values()]
        _print_table([kind, "description"], zip(entries, first_lines, strict=True), words=2, box=None)


def _training_command(name: str, optimizers: str, seeds: int, known: Collection[str], text: str) -> None:
    """Enter a command that trains, with its default optimizers and number of seeds and the data sets it knows."""

    def command(
        dataset: Annotated[str, Argument(help=f"One of {', '.join(known)}.")],
        optimizers: Annotated[
            str, Option("--optimizers", "--optimizer", help="Names, separated by commas; see `woodbury list`.")
        ] = optimizers,
        seeds: Annotated[int, Option(min=1, help="Runs per optimizer, with --seed and those after it.")] = seeds,
        seed: Annotated[
            int, Option(min=0, max=2**62, help="Seed of the weights, the batches and the curvature samples.")
        ] = 0,
        epochs: Annotated[int | None, Option(min=1, help="Epochs per run.", show_default=PRESET)] = None,
        batch_size: Annotated[int | None, Option(min=1, help="Samples per step.", show_default=PRESET)] = None,
        lr: Annotated[float | None, Option(min=0.0, help="Learning rate.", show_default=PRESET)] = None,
        settings: Annotated[
            list[str] | None,
            Option(
                "--set",
                metavar="NAME=VALUE",
                help="A setting, e.g. momentum=0.9 or damping.initial=10; repeatable.",
            ),
        ] = None,
        out: Annotated[Path, Option(help="Where each command creates a folder for its runs.")] = Path("runs"),
        data_dir: Annotated[
            Path | None,
            Option(
                help="Folder with the data files, one folder per data set; without it files are downloaded.",
                show_default="the environment variable WOODBURY_DATA",
            ),
        ] = None,
        device: Annotated[Literal["cpu", "cuda"], Option(help="Where to train.")] = "cpu",
        dtype: Annotated[Literal["float32", "float64"], Option(help="Of parameters and data.")] = "float32",
        resume: Annotated[
            bool, Option("--resume", help="Go on in the newest folder with these runs, from their checkpoints.")
        ] = False,
    ) -> None:
        with _one_line_errors(out):
            if device == "cuda" and not torch.cuda.is_available():
                _fail("--device cuda: torch finds no CUDA device here; use --device cpu")
            _check_name("data set", dataset, known)
            changed = _read_settings(settings or []) | ({} if lr is None else {"lr": lr})
            fields = {"epochs": epochs, "batch_size": batch_size, "device": device, "dtype": dtype}
            runs = product(range(seed, seed + seeds), _names(optimizers))
            configs = [_config(dataset, optimizer, seed, changed, fields) for seed, optimizer in runs]
            _train_and_report(configs, out, data_dir, resume)

    app.command(name, help=text)(command)


_training_command("train", "smw-gn", 1, DATASETS, "Train on one data set and write a report.")
_training_command(
    "compare", "smw-gn,smw-ng,smw-ng-bd,sgd", 3, DATASETS, "Train several optimizers and compare them."
)
_training_command(
    "reproduce",
    "smw-gn,smw-ng,smw-ng-bd,hf,kfac,sgd",
    1,
    PAPER,
    "Repeat an experiment of the paper: its network, batch sizes, learning rates and damping rule. "
    "covtype is not in the paper; it uses the settings of webspam.",
)


@app.command("report")
def report_runs(
    runs: Annotated[list[Path], Argument(help="Run folders, or folders that hold run folders.")],
    out: Annotated[
        Path | None, Option(help="Folder for the report.", show_default="the folder of the first run")
    ] = None,
) -> None:
    """Write figures and a page for finished or unfinished runs."""
    with _one_line_errors(out or runs[0]):
        _report(runs, out or runs[0])


# -- parts of the commands ------------------------------------------------------------------------------------


def _names(optimizers: str) -> list[str]:
    """The optimizers that an option names."""
    names = list(dict.fromkeys(name.strip() for name in optimizers.split(",") if name.strip()))
    if not names:
        _fail("no optimizer given: --optimizers takes names separated by commas")
    for name in names:
        _check_name("optimizer", name, OPTIMIZERS)
    return names


def _config(
    dataset: str, optimizer: str, seed: int, settings: Mapping[str, Any], fields: Mapping[str, Any]
) -> RunConfig:
    """A run with the preset of the data set and what was asked for; ends with a message if it cannot be."""
    try:
        config = PRESETS[dataset].config(dataset, optimizer, seed, settings, **fields)
        try_settings(config)
    except Exception as error:  # any error here comes from a setting
        _fail(f"{optimizer}: {one_line(error)}")
    return config


def _train_and_report(configs: Sequence[RunConfig], out: Path, data_dir: Path | None, resume: bool) -> None:
    """Train all runs into one folder below `out` and report on them, after Ctrl-C on what there is."""
    data = load_dataset(configs[0].dataset, data_dir)  # may fail: before a folder is created
    begun = folder_to_resume(out, configs) if resume else None
    folder = begun or new_folder(out, configs[0].dataset)
    finished = True
    try:
        with stop_on_signal(signal.SIGINT, signal.SIGTERM) as stop, _progress_bar(len(configs)) as show:
            for index, config in enumerate(configs):
                shown = partial(show, index, config)
                train(config, run_folder(folder, config), shown, data=data, resume=resume, stop=stop)
    except InterruptedRunError:
        finished = False
    _report([folder], folder)
    if not finished:
        _say(f"interrupted: the same command with --resume continues in {folder}")
        raise typer.Exit(_INTERRUPTED)


def _report(paths: Sequence[Path], folder: Path) -> None:
    runs = report.load(paths)
    for dataset, ends in report.ends_tables(runs).items():
        _print_table(ends["columns"], ends["rows"], title=escape(printable(f"{dataset}: medians over seeds")))
    page, *_ = report.write(runs, folder)
    console.print(f"wrote [bold]{escape(str(page))}[/], with a figure per data set beside it", soft_wrap=True)


@contextmanager
def _progress_bar(runs: int) -> Iterator[Callable[..., None]]:
    """Show one bar over all runs; yields a function of the number of a run, the run and where it stands."""
    columns = (*bars.Progress.get_default_columns(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console) as shown:
        task = shown.add_task("", total=None)

        def show(index: int, config: RunConfig, step: int, steps: int, loss: float, damping: float) -> None:
            damped = f", damping {damping:8.3g}" if math.isfinite(damping) else ""
            text = f"{config.optimizer} seed {config.seed}: loss {loss:9.3g}{damped}"
            shown.update(task, description=text, total=runs * steps, completed=index * steps + step)

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
        if not equals:
            _fail(f"--set takes NAME=VALUE, got '{entry}'")
        try:
            settings[name] = json.loads(text)
        except (ValueError, RecursionError):
            settings[name] = text
    return settings


@contextmanager
def _one_line_errors(out: Path) -> Iterator[None]:
    """End with one line and status 2 after an error that a user can resolve."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: _say(str(message))
            yield
    except (DataError, RunFolderError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot read or write {error.filename or out}: {one_line(error)}")


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    """Unless `name` is known, end with a message that says which are."""
    if name not in known:
        _fail(f"unknown {what} '{name}'; there are: {', '.join(known)}")


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and end with status 2, the status of wrong usage."""
    _say(message)
    raise typer.Exit(2)


def _say(message: str) -> None:
    typer.echo(f"woodbury: {printable(message)}", err=True)
