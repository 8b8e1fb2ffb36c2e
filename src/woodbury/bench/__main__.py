"""The command line of the measurements: `python -m woodbury.bench`, or `woodbury bench`."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from woodbury.bench.draw import draw
from woodbury.bench.gpu import PARTS, bench_gpu
from woodbury.bench.laplacian import bench_laplacian
from woodbury.bench.models import bench_models
from woodbury.bench.peer_steps import PEERS
from woodbury.bench.peers import OWN, PROBLEMS, bench_peers
from woodbury.bench.problems import PROBLEMS as TRAINED
from woodbury.bench.processes import bench_processes
from woodbury.bench.rivals import METHODS, WOODBURY, Record, bench_problems
from woodbury.bench.scale import bench_scale
from woodbury.bench.standings import faults, read_records, summarise
from woodbury.bench.step import bench_doors, bench_step
from woodbury.bench.tables import (
    guard_table,
    laplacian_table,
    model_table,
    peer_tables,
    problems_tables,
    processes_tables,
    scale_table,
    step_table,
)
from woodbury.experiments.config import installed_versions, this_machine
from woodbury.experiments.errors import one_line
from woodbury.experiments.storage import round_numbers

_DESCRIPTION = (
    "Measure the cost of a step, or of training. This needs torch alone; `draw` needs matplotlib, and most of "
    "`problems` scikit-learn. Times on a CPU are CPU times of one thread: unless OMP_NUM_THREADS is 1, the "
    "program starts itself again with that setting."
)


def main(arguments: Sequence[str] | None = None, program: str = "python -m woodbury.bench") -> int:
    """Run one of the commands and return its exit status; `program` is its name in help texts."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser(program)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    if options.one_thread and os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "woodbury.bench", *arguments], env=environment).returncode
    print(options.run(options))
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_DESCRIPTION)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], str], text: str, one_thread: bool = True
    ) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(run=run, one_thread=one_thread)
        return subparser

    step = command(
        "step", _step, "time of a step on the paper's networks, relative to torch.optim.SGD (2 minutes)"
    )
    text = "timed steps per optimizer (default 200)"
    step.add_argument("--repeats", type=_repeats, default=200, metavar="NUMBER", help=text)
    text = "put the layers into a module with its own forward, which is slower"
    step.add_argument("--module", action="store_true", help=text)
    text = "steps on a batch, from a closure and in an unchanged loop (watch=True) instead (1 minute)"
    step.add_argument("--doors", action="store_true", help=text)
    text = "growth of the cost with n, N1, N2, classes and width, beside the paper's cost table (10 minutes)"
    scale = command("scale", _scale, text)
    text = "steps of other libraries beside woodbury's, where they are installed (15 minutes with all of them)"
    peers = command("peers", _peers, text)
    text = "CPU seconds per peer (default 60)"
    peers.add_argument("--limit", type=_seconds, default=60.0, metavar="SECONDS", help=text)
    for option, names in (("--peer", [*OWN, *PEERS]), ("--problem", list(PROBLEMS))):
        text = f"measure only this one; may be repeated. One of: {'; '.join(names)}"
        peers.add_argument(option, action="append", choices=names, metavar="NAME", help=text)
    text = "woodbury.laplacian beside nested forward mode: passes and steps in 2 and 5 dimensions (1 minute)"
    laplacian = command("laplacian", _laplacian, text)
    text = "steps on a transformer with a bare parameter and dropout, an LSTM and a GRU beside Adam's (2 minutes)"
    models = command("models", _models, text)
    text = "a step on 1, 2 and 4 processes: seconds by phase, bytes beside DDP's, a cost model (4 minutes)"
    processes = command("processes", _processes, text)
    for subparser in (scale, peers, laplacian, models, processes):
        subparser.add_argument("--quick", action="store_true", help="tiny networks, to check that it runs")
    text = "steps on a CUDA device, with and without a recording, up to 10^9 parameters; prints JSON (3 minutes)"
    gpu = command("gpu", _gpu, text, one_thread=False)
    text = f"one or more of {', '.join(PARTS)} (default: all)"
    gpu.add_argument("parts", nargs="*", type=_part, metavar="PART", help=text)
    text = "training with woodbury beside Adam and SGD, untuned and tuned, on small problems (20 minutes)"
    problems = command("problems", _problems, text)
    _add_problems(problems)
    for subparser in (step, scale, peers, laplacian, models, gpu, problems, processes):
        subparser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    text = "figures bench-step.png, bench-scale.png and so on from the JSON of those commands"
    figures = command("draw", _draw, text, one_thread=False)
    figures.add_argument(
        *("files",),
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what a command printed with --json, or the records.jsonl of problems",
    )
    text = "folder for the figures (default: the current one)"
    figures.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help=text)
    return parser


def _add_problems(problems: argparse.ArgumentParser) -> None:
    """The options of `problems`."""
    text = f"these alone (default: all but mnist-full). One or more of: {', '.join(TRAINED)}"
    problems.add_argument("--only", nargs="+", choices=list(TRAINED), default=[], metavar="NAME", help=text)
    text = f"one or more of {', '.join(METHODS)} (default: all)"
    problems.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=text)
    text = "seeds of the initial weights and of the order of batches (default 3, with --guard 10)"
    problems.add_argument("--seeds", type=_repeats, metavar="NUMBER", help=text)
    text = "at most so many epochs, to check that it runs"
    problems.add_argument("--epochs", type=_repeats, metavar="NUMBER", help=text)
    text = "processes, each with one thread (default 1)"
    problems.add_argument("--jobs", type=_repeats, default=1, metavar="NUMBER", help=text)
    text = "folder with MNIST and covtype (default: that of WOODBURY_DATA); without it these are left out"
    problems.add_argument("--data-dir", type=Path, metavar="FOLDER", help=text)
    text = "folder for records.jsonl, summary.json, table.txt, bench-problems.png (default runs/problems)"
    problems.add_argument("--out", type=Path, default=Path("runs/problems"), metavar="FOLDER", help=text)
    text = "run woodbury alone; status 1 if a run raises, ends above its start or leaves a parameter not finite"
    problems.add_argument("--guard", action="store_true", help=text)
    text = "the records.jsonl of an earlier run: its runs of Adam and SGD are not made again"
    problems.add_argument("--rivals", type=Path, metavar="FILE", help=text)
    # To try other settings: module:function, called like `woodbury.bench.rivals.train_default`.
    problems.add_argument("--woodbury", dest="train", help=argparse.SUPPRESS)


# -- the commands: each returns what to print -----------------------------------------------------------------


def _step(options: argparse.Namespace) -> str:
    result = bench_doors(options.repeats) if options.doors else bench_step(options.repeats, options.module)
    return _format(result, step_table, options.json)


def _scale(options: argparse.Namespace) -> str:
    return _format(bench_scale(quick=options.quick, say=_say), scale_table, options.json)


def _peers(options: argparse.Namespace) -> str:
    result = bench_peers(options.limit, options.peer or (), options.problem or (), options.quick, _say)
    return _format(result, peer_tables, options.json)


def _laplacian(options: argparse.Namespace) -> str:
    return _format(bench_laplacian(quick=options.quick), laplacian_table, options.json)


def _models(options: argparse.Namespace) -> str:
    return _format(bench_models(quick=options.quick), model_table, options.json)


def _processes(options: argparse.Namespace) -> str:
    result = bench_processes(3 if options.quick else 40, quick=options.quick, say=_say)
    return _format(result, processes_tables, options.json)


def _gpu(options: argparse.Namespace) -> str:
    return _format(bench_gpu(options.parts or list(PARTS)), partial(json.dumps, indent=2), options.json)


def _problems(options: argparse.Namespace) -> str:
    methods = [WOODBURY] if options.guard else options.methods
    try:
        earlier = read_records(options.rivals) if options.rivals else []
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / ("guard.jsonl" if options.guard else "records.jsonl")
        with path.open("w") as file:
            for records in bench_problems(
                names=options.only,
                seeds=options.seeds or (10 if options.guard else 3),
                methods=methods,
                jobs=options.jobs,
                data_dir=options.data_dir,
                epochs=options.epochs,
                train=options.train,
                earlier=earlier,
                say=_say,
            ):
                file.writelines(json.dumps(round_numbers(record)) + "\n" for record in records)
                file.flush()
    except OSError as error:
        _fail(f"{error.filename}: {one_line(error)}")
    except ValueError as error:
        _fail(f"{options.rivals} holds no records: {one_line(error)}")
    records = read_records(path)
    if not records:
        _fail("bench problems: the data of all these problems is absent")
    return _guard_result(records, options) if options.guard else _problems_result(records, path, options)


def _problems_result(records: Sequence[Record], path: Path, options: argparse.Namespace) -> str:
    """Writes the summary, the table and the figure beside the records."""
    summary = {"machine": this_machine(), "versions": installed_versions()} | summarise(records)
    for name, as_json in (("table.txt", False), ("summary.json", True)):
        (path.parent / name).write_text(_format(summary, problems_tables, as_json) + "\n")
    try:
        draw([path], path.parent)
    except ModuleNotFoundError as error:
        _say(f'no figure: that needs {error.name}: pip install "woodbury[experiments]"')
    return _format(summary, problems_tables, options.json)


def _guard_result(records: Sequence[Record], options: argparse.Namespace) -> str:
    """Status 1 if a run has a fault."""
    lines = faults(records)
    result = json.dumps({"runs": len(records), "faults": lines}) if options.json else guard_table(records, lines)
    if lines:
        print(result)
        raise SystemExit(1)
    return result


def _draw(options: argparse.Namespace) -> str:
    try:
        return "\n".join(map(str, draw(options.files, options.out)))
    except ModuleNotFoundError as error:
        _fail(f'bench draw needs {error.name}: pip install "woodbury[experiments]"')
    except OSError as error:
        _fail(f"{error.filename}: {one_line(error)}")
    except ValueError as error:  # not JSON, or not that of a measurement
        _fail(one_line(error))


def _format(result: dict[str, Any], as_table: Callable[[Any], str], as_json: bool) -> str:
    result = round_numbers(result)
    return json.dumps(result) if as_json else as_table(result)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    """One line on stderr and status 2, the status of wrong usage."""
    _say(f"woodbury: {message}")
    raise SystemExit(2)


# -- values of arguments --------------------------------------------------------------------------------------


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"no part {text!r}: one of {', '.join(PARTS)}")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
