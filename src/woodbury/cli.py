"""The command `woodbury`."""

import difflib
import math
import os
import platform
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import torch
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as ProgressBar
    from rich.table import Table

    from woodbury.bench.__main__ import main as measure
    from woodbury.experiments import report
    from woodbury.experiments.config import RunConfig
    from woodbury.experiments.data import DATASETS, Dataset, load_dataset
    from woodbury.experiments.errors import DataError, RunFolderError, one_line, printable
    from woodbury.experiments.folders import folder_to_resume, new_folder, run_folder
    from woodbury.experiments.models import network_name
    from woodbury.experiments.presets import PAPER, PRESETS
    from woodbury.experiments.storage import read_json
    from woodbury.experiments.train import (
        CHECKPOINT_SECONDS,
        InterruptedRunError,
        Progress,
        stop_on_signal,
        train,
    )
    from woodbury.experiments.watch import EVERY, watch
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] in ("woodbury", "torch"):
        raise
    raise SystemExit(f'The command line needs {error.name}: pip install "woodbury[experiments]"') from None

from woodbury._group import Group, LostProcessError, all_processes
from woodbury._version import __version__
from woodbury.optimizers import OPTIMIZERS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

console = Console()

_INTERRUPTED = 130  # the status of a program ended by Ctrl-C
_LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # what torchrun puts into the environment
_PATIENCE = timedelta(minutes=30)  # of a process that waits for another, which may be loading data


class Device(str, Enum):
    """Where to train."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    """Precision of parameters and data."""

    float32 = "float32"
    float64 = "float64"


DataSetName = Annotated[str, typer.Argument(help="Name of a data set, see `woodbury list`.")]
Optimizers = Annotated[str, typer.Option(help="Names of optimizers, separated by commas.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs per run.", show_default="the preset's")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs per optimizer, with seeds 0, 1, ...")]
Out = Annotated[Path, typer.Option(help="Folder in which each command creates a folder for its runs.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data files, one folder per data set; with it nothing is downloaded.",
        show_default="the environment variable WOODBURY_DATA; without it files are downloaded",
    ),
]
OnDevice = Annotated[Device, typer.Option(help="Where to train.")]
InDtype = Annotated[Dtype, typer.Option(help="Precision of parameters and data.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue in the newest folder that holds these runs, from their last checkpoints."
    ),
]
CheckpointSeconds = Annotated[
    float, typer.Option(min=0.0, help="Time between two checkpoints; 0 saves one after every step.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the optimizer, e.g. momentum=0.9, or a field of one, e.g. damping.initial=10: it "
        "changes what --set damping= gives before or after it, or else the default. May be repeated.",
    ),
]


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
    """Second-order optimizers for PyTorch: train with them, compare them, measure them."""


@app.command("list")
def list_names() -> None:
    """List the data sets, the optimizers and the presets of the paper."""
    described: dict[str, Mapping[str, object]] = {"data set": DATASETS, "optimizer": OPTIMIZERS}
    tables = [Table(kind, "description", box=None, header_style="bold") for kind in described]
    for table, entries in zip(tables, described.values(), strict=True):
        for name, entry in entries.items():
            table.add_row(name, (entry.__doc__ or "").strip().split("\n")[0])
    presets = Table(
        "preset", "network", "batch size", "curvature samples", "epochs", box=None, header_style="bold"
    )
    for name, preset in PAPER.items():
        numbers = (preset.batch_size, preset.curvature_samples, preset.epochs)
        presets.add_row(name, network_name(preset.widths), *map(str, numbers))
    for table in (*tables, presets):
        console.print(table)
        console.print()


@app.command("train")
def train_one(
    dataset: DataSetName,
    optimizer: Annotated[str, typer.Option(help="Name of an optimizer, see `woodbury list`.")] = "smw-gn",
    epochs: Epochs = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate.", show_default="the preset's")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per step.", show_default="the preset's")
    ] = None,
    settings: Settings = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights, the batches and the curvature samples.")
    ] = 0,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    device: OnDevice = Device.cpu,
    dtype: InDtype = Dtype.float32,
    resume: Resume = False,
    checkpoint_seconds: CheckpointSeconds = CHECKPOINT_SECONDS,
) -> None:
    """Train one optimizer on one data set and write a report."""
    _check_name("data set", dataset, DATASETS)
    _check_name("optimizer", optimizer, OPTIMIZERS)
    values = _read_settings(settings or [])
    if lr is not None:
        values["lr"] = lr
    with _one_line_errors(out), _processes(device) as (group, where):
        try:
            config = PRESETS[dataset].config(
                dataset,
                optimizer,
                seed,
                epochs=epochs,
                batch_size=batch_size,
                settings=values,
                device=where,
                dtype=dtype.value,
            )
            _try_step(config)
        except Exception as error:  # any error here comes from a setting
            _fail(f"{optimizer}: {one_line(error)}")
        _train_and_report([config], out, data_dir, resume, checkpoint_seconds, group)


@app.command()
def compare(
    dataset: DataSetName,
    optimizers: Optimizers = "smw-gn,smw-ng,smw-ng-bd,sgd",
    seeds: Seeds = 3,
    epochs: Epochs = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    device: OnDevice = Device.cpu,
    dtype: InDtype = Dtype.float32,
    resume: Resume = False,
    checkpoint_seconds: CheckpointSeconds = CHECKPOINT_SECONDS,
) -> None:
    """Train several optimizers on one data set and write a report that compares them."""
    _check_name("data set", dataset, DATASETS)
    names = list(dict.fromkeys(name.strip() for name in optimizers.split(",") if name.strip()))
    if not names:
        _fail("no optimizer given: --optimizers takes names separated by commas")
    for name in names:
        _check_name("optimizer", name, OPTIMIZERS)
    with _one_line_errors(out), _processes(device) as (group, where):
        configs = [
            PRESETS[dataset].config(dataset, name, seed, epochs=epochs, device=where, dtype=dtype.value)
            for seed in range(seeds)
            for name in names
        ]
        _train_and_report(configs, out, data_dir, resume, checkpoint_seconds, group)


@app.command()
def reproduce(
    preset: Annotated[str, typer.Argument(help=f"Experiment of the paper: {', '.join(PAPER)}.")],
    optimizers: Optimizers = "smw-gn,smw-ng,smw-ng-bd,hf,kfac,sgd",
    seeds: Seeds = 1,
    epochs: Epochs = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    device: OnDevice = Device.cpu,
    dtype: InDtype = Dtype.float32,
    resume: Resume = False,
    checkpoint_seconds: CheckpointSeconds = CHECKPOINT_SECONDS,
) -> None:
    """Repeat an experiment of the paper: its network, batch sizes, learning rates and damping rule.

    covtype is not in the paper; it uses the settings of webspam.
    """
    _check_name("preset", preset, PAPER)
    compare(preset, optimizers, seeds, epochs, out, data_dir, device, dtype, resume, checkpoint_seconds)


@app.command("report")
def report_runs(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, folders that hold run folders, or the records.json of a report."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report.", show_default="the folder of the first run")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--watch", help="Write the page again while the records grow; it reloads itself. Ctrl-C ends."
        ),
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="With --watch: seconds between two looks at the records.")
    ] = EVERY,
) -> None:
    """Write figures and a page for finished or unfinished runs."""
    folder = out if out is not None else runs[0].parent if runs[0].is_file() else runs[0]
    with _one_line_errors(folder):
        if live:
            _watch(runs, folder, every)
        _report(runs, folder)


@app.command(
    "bench",
    add_help_option=False,  # all arguments, --help too, go to the program of the measurements
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def bench(context: typer.Context) -> None:
    """Measure the cost of a step; see `woodbury bench --help`."""
    raise typer.Exit(measure(context.args, program="woodbury bench"))


# -- parts of the commands ------------------------------------------------------------------------------------


@contextmanager
def _processes(device: Device) -> Iterator[tuple[Group, str]]:
    """The processes that torchrun has started, or this one alone, and the name of the device."""
    where = _available(device)
    if not all(name in os.environ for name in _LAUNCHED) or torch.distributed.is_initialized():
        yield all_processes(), where
        return
    if device is Device.cuda:
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= devices:
            _fail(f"--nproc-per-node is more than the {devices} CUDA devices here: start one process per device")
        torch.cuda.set_device(local)
    backend = "nccl" if device is Device.cuda else "gloo"
    torch.distributed.init_process_group(backend, timeout=_PATIENCE)
    yield all_processes(), where
    torch.distributed.destroy_process_group()  # after an error the end of the process does it: others may wait


def _train_and_report(
    configs: Sequence[RunConfig],
    out: Path,
    data_dir: Path | None,
    resume: bool,
    checkpoint_seconds: float,
    group: Group,
) -> None:
    """Train all runs into one folder below `out` and report on them, after Ctrl-C on what there is.

    Of several processes the first alone shows and writes anything.
    """
    data, folder = _prepare(configs, out, data_dir, resume, group)
    finished = True
    with stop_on_signal() as stop, _progress_bars(configs, group.rank == 0) as show:
        for config in configs:
            try:
                run = run_folder(folder, config)
                train(
                    config,
                    run,
                    partial(show, config),
                    data=data,
                    resume=resume,
                    stop=stop,
                    checkpoint_seconds=checkpoint_seconds,
                )
            except InterruptedRunError:
                finished = False
                break
    with group.together():  # torchrun ends all processes when one of them has ended without success
        if group.rank == 0:
            _report([folder], folder)
            if not finished:
                _say(f"interrupted: the same command with --resume continues in {folder}")
    if not finished:
        raise typer.Exit(_INTERRUPTED)


def _prepare(
    configs: Sequence[RunConfig], out: Path, data_dir: Path | None, resume: bool, group: Group
) -> tuple[Dataset, Path]:
    """The data set, and the folder for the runs."""
    dataset = configs[0].dataset
    folder: Path | None = None
    with group.together():
        if group.rank == 0:
            data = load_dataset(dataset, data_dir)  # may fail: before a folder is created
            folder = folder_to_resume(out, configs) if resume else None
            if resume and folder is None:
                _say(f"nothing to resume in {out}: starting in a new folder")
            folder = folder or new_folder(out, dataset)
    with group.together():
        if group.rank > 0:  # by now the files are there
            data = load_dataset(dataset, data_dir)
    return data, group.object_of_first(folder)


def _report(paths: Sequence[Path], folder: Path) -> None:
    """Print the table, write the figures and the page."""
    runs = report.load(paths)
    _print_summary(report.summarise(runs))
    written = report.write(runs, folder)
    page = next(path for path in written if path.suffix == ".html")
    console.print(f"wrote [bold]{escape(str(page))}[/], with figures and records beside it", soft_wrap=True)


def _watch(paths: Sequence[Path], folder: Path, seconds: float) -> None:
    """Keep the page up to date until Ctrl-C."""
    is_open = False
    with suppress(KeyboardInterrupt):
        for result in watch(paths, folder, seconds, time.sleep):
            if isinstance(result, RunFolderError):
                _say(f"waiting: {result}")
            elif not is_open:
                is_open = True
                _say(f"watching: open {result} in a browser; Ctrl-C ends")


@contextmanager
def _progress_bars(configs: Sequence[RunConfig], visible: bool = True) -> Iterator[Any]:
    """Show one progress bar per optimizer, for its current run; yields a function of a run and its `Progress`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:>9}  damping {task.fields[damping]:>8}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    seeds: dict[str, list[int]] = {}
    for config in configs:
        seeds.setdefault(config.optimizer, []).append(config.seed)
    with ProgressBar(*columns, console=console, disable=not visible) as bars:
        tasks = {name: bars.add_task(name, start=False, total=None, loss="", damping="") for name in seeds}
        current: dict[str, int] = {}  # optimizer -> seed of its current run

        def show(config: RunConfig, now: Progress) -> None:
            name, task = config.optimizer, tasks[config.optimizer]
            if current.get(name) != config.seed:
                current[name] = config.seed
                number, runs = seeds[name].index(config.seed) + 1, len(seeds[name])
                label = f"{name} {number}/{runs}" if runs > 1 else name
                bars.reset(task, total=now.steps, completed=now.step, description=label)
            bars.update(task, completed=now.step, loss=_short(now.loss), damping=_short(now.damping))

        yield show


def _print_summary(summaries: list[report.Summary]) -> None:
    datasets = len({summary.dataset for summary in summaries})
    table = Table("optimizer", title="Medians over seeds")
    if datasets > 1:
        table.add_column("data set")
    losses = any(math.isnan(each.test_error) and not math.isnan(each.test_loss) for each in summaries)
    errors = not all(math.isnan(each.test_error) for each in summaries)
    tested = [heading for heading, shown in {"test loss": losses, "test error": errors}.items() if shown]
    for heading in ("epochs", "seeds", "train loss", *tested, "seconds", "damping"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        whole = summary.seeds == summary.seeds_started
        table.add_row(
            escape(summary.label),
            *([escape(summary.dataset)] if datasets > 1 else []),
            f"{summary.epochs:g}",
            f"{summary.seeds}" if whole else f"{summary.seeds} of {summary.seeds_started}",
            _short(summary.train_loss),
            *([_short(summary.test_loss)] if losses else []),
            *([_percent(summary.test_error)] if errors else []),
            f"{summary.seconds:.2f}",
            _short(summary.damping),
        )
    console.print(table)


def _available(device: Device) -> str:
    """The name of the device; ends with a message if it is not there."""
    if device is Device.cuda and not torch.cuda.is_available():
        _fail("--device cuda: torch finds no CUDA device here; use --device cpu")
    return device.value


def _read_settings(entries: Iterable[str]) -> dict[str, Any]:
    """Entries NAME=VALUE or NAME.FIELD=VALUE as a dictionary; a value that is not JSON is a string."""
    settings: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        name = name.strip()
        if not equals or not all(part.isidentifier() for part in name.split(".")) or name.count(".") > 1:
            _fail(f"--set takes NAME=VALUE, got '{entry}'")
        if text.strip().lstrip("-") in ("NaN", "Infinity"):
            _fail(f"--set {entry}: not a finite number")
        try:
            value = read_json(text.encode("utf-8", "surrogateescape"))
        except ValueError:
            value = text
        if isinstance(value, float) and not math.isfinite(value):
            _fail(f"--set {entry}: not a finite number")
        settings[name] = value
    return settings


def _try_step(config: RunConfig) -> None:
    """Raise what these settings would raise in a run, by a step on a random batch of the same size."""
    settings = config.optimizer_settings()
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
    if settings["process_group"] is not None and all_processes().size > 1:
        raise ValueError("process_group is for one process: torchrun starts several that train one model")
    with torch.random.fork_rng(devices=[]):
        inputs, targets = torch.randn(config.batch_size, 2), torch.randint(2, (config.batch_size,))
        model = torch.nn.Linear(2, 2)
        settings["process_group"] = "self"  # each process tries for itself
        OPTIMIZERS[config.optimizer](model, torch.nn.CrossEntropyLoss(), **settings).step(inputs, targets)


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


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Unless `name` is known, end with a message that suggests the nearest known name."""
    known = list(known)
    if name in known:
        return
    nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}"
    _fail(f"unknown {what} '{name}'; {hint}")


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and end with status 2, the status of wrong usage."""
    _say(message)
    raise typer.Exit(2)


def _say(message: str) -> None:
    typer.echo(f"woodbury: {printable(message, 2000)}", err=True)


def _short(value: float) -> str:
    """The value with three digits; a dash for NaN, an optimizer without the quantity."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.2f} %"


if __name__ == "__main__":
    main()
