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
from woodbury.bench.scale import bench_scale
from woodbury.bench.step import bench_step
from woodbury.bench.tables import laplacian_table, model_table, peer_tables, scale_table, step_table
from woodbury.experiments.errors import one_line
from woodbury.experiments.storage import round_numbers

_DESCRIPTION = (
    "Measure the cost of a step. This needs torch alone; `draw` needs matplotlib. Times on a CPU are medians of "
    "the CPU time of one thread: unless OMP_NUM_THREADS is 1, the program starts itself again with that setting."
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
    for subparser in (scale, peers, laplacian, models):
        subparser.add_argument("--quick", action="store_true", help="tiny networks, to check that it runs")
    text = "steps on a CUDA device, with and without a recording, up to 10^9 parameters; prints JSON (3 minutes)"
    gpu = command("gpu", _gpu, text, one_thread=False)
    text = f"one or more of {', '.join(PARTS)} (default: all)"
    gpu.add_argument("parts", nargs="*", type=_part, metavar="PART", help=text)
    for subparser in (step, scale, peers, laplacian, models, gpu):
        subparser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    text = "figures bench-step.png, bench-scale.png, bench-peers.png from the JSON that those commands print"
    figures = command("draw", _draw, text, one_thread=False)
    figures.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.json", help="what a command printed with --json"
    )
    text = "folder for the figures (default: the current one)"
    figures.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help=text)
    return parser


# -- the commands: each returns what to print -----------------------------------------------------------------


def _step(options: argparse.Namespace) -> str:
    return _format(bench_step(options.repeats, options.module), step_table, options.json)


def _scale(options: argparse.Namespace) -> str:
    return _format(bench_scale(quick=options.quick, say=_say), scale_table, options.json)


def _peers(options: argparse.Namespace) -> str:
    result = bench_peers(options.limit, options.peer or (), options.problem or (), options.quick, _say)
    return _format(result, peer_tables, options.json)


def _laplacian(options: argparse.Namespace) -> str:
    return _format(bench_laplacian(quick=options.quick), laplacian_table, options.json)


def _models(options: argparse.Namespace) -> str:
    return _format(bench_models(quick=options.quick), model_table, options.json)


def _gpu(options: argparse.Namespace) -> str:
    return _format(bench_gpu(options.parts or list(PARTS)), partial(json.dumps, indent=2), options.json)


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
