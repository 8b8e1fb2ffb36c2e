"""The command line of the measurements: `python -m benchmarks`, from the root of a checkout."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu, laplacian, models, peers, processes, scale, standings, step
from benchmarks.common import Command
from woodbury.experiments.storage import round_numbers

_DESCRIPTION = (
    "Measure the cost of a step, or of training. This needs torch alone; `draw` needs matplotlib, and most of "
    "`problems` scikit-learn. Times on a CPU are CPU times of one thread: unless OMP_NUM_THREADS is 1, the "
    "program starts itself again with that setting."
)
MEASUREMENTS = {
    "step": step.COMMAND,
    "gpu": gpu.COMMAND,
    "scale": scale.COMMAND,
    "peers": peers.COMMAND,
    "problems": standings.COMMAND,
    "processes": processes.COMMAND,
    "laplacian": laplacian.COMMAND,
    "models": models.COMMAND,
}
FIGURES = {name: command.draw for name, command in MEASUREMENTS.items() if command.draw is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Command = options.command
    if command.one_thread and os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=environment).returncode
    try:
        result = command.run(options)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(json.dumps(round_numbers(result)) if options.json else command.table(result))
    return 1 if result.get("faults") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_DESCRIPTION)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in (MEASUREMENTS | {"draw": DRAW}).items():
        subparser = commands.add_parser(name, help=command.text, description=command.text)
        subparser.set_defaults(command=command)
        subparser.add_argument("--json", action="store_true", help="print one JSON object on one line, the last")
        command.add_options(subparser)
    return parser


# -- figures --------------------------------------------------------------------------------------------------


def _add_draw_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=list(FIGURES), metavar="COMMAND", help=f"one of {', '.join(FIGURES)}")
    text = "what the command printed with --json (of step several runs), or the records.jsonl of problems"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)
    text = "folder for the figure (default: the current one)"
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help=text)


def _draw(options: argparse.Namespace) -> dict[str, Any]:
    read = standings.read_records if options.kind == "problems" else _read_result
    results = [read(path) for path in options.files]
    path = options.out / f"bench-{options.kind}.png"
    options.out.mkdir(parents=True, exist_ok=True)
    FIGURES[options.kind](results).savefig(path, dpi=130)
    return {"figure": str(path)}


def _read_result(path: Path) -> Any:
    return json.loads(path.read_text().splitlines()[-1])


DRAW = Command(
    "bench-step.png, bench-scale.png and so on, from what that command printed with --json",
    _draw,
    lambda result: str(result["figure"]),
    _add_draw_options,
    one_thread=False,
)

if __name__ == "__main__":
    raise SystemExit(main())
