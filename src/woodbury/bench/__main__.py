"""The command line of the measurements: `python -m woodbury.bench`; `woodbury bench` hands its arguments to it."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from woodbury.bench.draw import draw
from woodbury.bench.gpu import PARTS, bench_gpu
from woodbury.bench.peer_steps import PEERS
from woodbury.bench.peers import OWN, PROBLEMS, bench_peers
from woodbury.bench.scale import bench_scale
from woodbury.bench.step import bench_step
from woodbury.bench.tables import peer_tables, scale_table, step_table
from woodbury.experiments.errors import one_line
from woodbury.experiments.storage import round_numbers

_DESCRIPTION = """\
What a step costs, measured with torch alone; figures from the measurements need matplotlib.

The CPU figures are medians of CPU time, taken in one process. Threads other than the one that computes would
spoil them, so the process must have been started with OMP_NUM_THREADS=1; if it was not, it starts itself again
that way.
"""


def main(arguments: Sequence[str] | None = None, program: str = "python -m woodbury.bench") -> int:
    """Run one of the commands and return its exit status; `program` is what help calls it."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser(program)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    chosen = parser.parse_args(given)
    if chosen.one_thread and os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "woodbury.bench", *given], env=environment).returncode
    print(chosen.run(chosen))
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_DESCRIPTION)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], str], what: str, one_thread: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run, one_thread=one_thread)
        return added

    step = command("step", _step, "cost of a step on the paper's networks, in steps of torch.optim.SGD")
    what = "timed steps of each optimizer (default 200)"
    step.add_argument("--repeats", type=_count, default=200, metavar="COUNT", help=what)
    step.add_argument("--module", action="store_true", help="the layers inside a module of one's own")
    what = "growth of the step cost with n, N1, N2, classes and width, beside the paper's table (10 minutes)"
    scale = command("scale", _scale, what)
    what = "steps of other libraries beside woodbury's, those that are installed (15 minutes with all of them)"
    peers = command("peers", _peers, what)
    what = "CPU seconds for each peer (default 60)"
    peers.add_argument("--limit", type=_seconds, default=60.0, metavar="SECONDS", help=what)
    for option, names in (("--peer", [*OWN, *PEERS]), ("--problem", list(PROBLEMS))):
        what = f"only this one, may be repeated: {'; '.join(names)}"
        peers.add_argument(option, action="append", choices=names, metavar="NAME", help=what)
    for parsed in (scale, peers):
        parsed.add_argument("--quick", action="store_true", help="tiny networks, to see that it runs")
    what = "steps on a CUDA device: eager, recorded, and up to 10^9 parameters; always JSON"
    gpu = command("gpu", _gpu, what, one_thread=False)
    gpu.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    for parsed in (step, scale, peers, gpu):
        parsed.add_argument("--json", action="store_true", help="print one JSON object on one line")
    what = "bench-step.png, bench-scale.png, bench-peers.png from what the commands above print with --json"
    figures = command("draw", _draw, what, one_thread=False)
    figures.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    figures.add_argument("--out", type=Path, default=Path(), help="folder for the figures (default: this one)")
    return parser


# -- the commands: each returns what to print -----------------------------------------------------------------


def _step(chosen: argparse.Namespace) -> str:
    return _shown(bench_step(chosen.repeats, chosen.module), step_table, chosen.json)


def _scale(chosen: argparse.Namespace) -> str:
    return _shown(bench_scale(quick=chosen.quick, say=_say), scale_table, chosen.json)


def _peers(chosen: argparse.Namespace) -> str:
    result = bench_peers(chosen.limit, chosen.peer or (), chosen.problem or (), chosen.quick, _say)
    return _shown(result, peer_tables, chosen.json)


def _gpu(chosen: argparse.Namespace) -> str:
    return _shown(bench_gpu(chosen.parts or list(PARTS)), lambda result: json.dumps(result, indent=2), chosen.json)


def _draw(chosen: argparse.Namespace) -> str:
    try:
        return "\n".join(map(str, draw(chosen.files, chosen.out)))
    except ModuleNotFoundError as error:
        _fail(f'bench draw needs {error.name}: pip install "woodbury[experiments]"')
    except OSError as error:
        _fail(f"{error.filename}: {one_line(error)}")
    except ValueError as error:  # not JSON, or not ours
        _fail(one_line(error))


def _shown(result: dict[str, Any], as_table: Callable[[Any], str], as_json: bool) -> str:
    result = round_numbers(result)
    return json.dumps(result) if as_json else as_table(result)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    """One line on stderr and status 2, the status of wrong usage."""
    _say(f"woodbury: {message}")
    raise SystemExit(2)


# -- what an argument may be ----------------------------------------------------------------------------------


def _count(text: str) -> int:
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
