"""The command line of the measurements: `python -m benchmarks`, from the root of a checkout."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import beside, deepxde, equations, gpu, laplacian, noise, peers, processes, rivals, scale, step
from benchmarks.common import Command, round_numbers, table

_DESCRIPTION = (
    "Measure the cost of a step, or of training. This needs torch alone; regressors, classifiers and most of "
    "`problems` need scikit-learn. Times on a CPU are CPU times of one thread: unless "
    "OMP_NUM_THREADS is 1, the program starts itself again with that setting."
)


def _estimators(kind: str, ours: str) -> Command:
    def run(options: argparse.Namespace) -> dict[str, Any]:
        from benchmarks.estimators import compare  # which needs scikit-learn

        return compare(kind)

    title = f"{ours} beside {kind} of scikit-learn, five folds"
    return Command(f"{title} (10 minutes)", run, lambda result: table(title, result["rows"], left=2))


COMMANDS = {
    "step": step.COMMAND,
    "gpu": gpu.COMMAND,
    "scale": scale.COMMAND,
    "peers": peers.COMMAND,
    "problems": rivals.COMMAND,
    "noise": noise.COMMAND,
    "regressors": _estimators("regressors", "LMRegressor"),
    "classifiers": _estimators("classifiers", "LMClassifier"),
    "processes": processes.COMMAND,
    "laplacian": laplacian.COMMAND,
    "equations": equations.COMMAND,
    "deepxde": deepxde.COMMAND,
    "beside": beside.COMMAND,
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_DESCRIPTION)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=entry.text, description=entry.text)
        subparser.set_defaults(command=entry)
        subparser.add_argument("--json", action="store_true", help="print one JSON object on one line, the last")
        entry.add_options(subparser)
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


if __name__ == "__main__":
    raise SystemExit(main())
