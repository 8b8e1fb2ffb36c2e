"""Another commit beside the work tree: do the same steps lead to the same parameters, by how many operations?

Both versions run `benchmarks.trajectories`, each in a process of its own. Rounding explains relative differences
up to

    8 max(eps sqrt(size) condition steps, noise)

as in `tests/bounds.py`: size is the number of parameters and rows, condition that of the first system. The noise
is how far the work tree comes from itself when the parameters at the start are a few roundings off, the largest of
three such runs: steps may amplify the errors of those before, and the dampings of a search have no one condition.
Where the noise leaves no digit, nothing is compared (the bound is inf).
"""

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import Command, positive, say, table
from benchmarks.trajectories import NUMBERS, PROBLEMS

Run = Mapping[str, Any]  # what `benchmarks.trajectories.run` returns
ROOT = Path(__file__).parent.parent
WORK_TREE = "work tree"
_FACTOR = 8  # for the sums and products in between
_NO_DIGIT = 0.1
_STARTS = 4  # the one that is compared, and three for the noise


def export(commit: str, folder: Path) -> Path:
    """The folder `src` of a commit, written into this folder."""
    command = ["git", "archive", commit, "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def trajectories(source: Path, **asked: Any) -> Any:
    """What `benchmarks.trajectories` saves when it runs with this version of woodbury."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "result.pt")
        program = [sys.executable, "-W", "ignore", "-m", "benchmarks.trajectories"]
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [*program, str(source), str(file), json.dumps(asked)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{source}: {done.stderr}")
        return torch.load(file)


# -- steps ----------------------------------------------------------------------------------------------------


def difference(a: Any, b: Any) -> float:
    """|a - b| / |a|; of parameters by name the largest. Two that are nan are equal."""
    if isinstance(a, Mapping):
        return max(difference(a[name], b[name]) for name in a)
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if torch.equal(a.nan_to_num(math.pi), b.nan_to_num(math.pi)):
        return 0.0
    ratio = float((a - b).norm() / a.norm())
    return math.inf if math.isnan(ratio) else ratio


def compare(there: Run, here: Run, others: Sequence[Run]) -> dict[int, Any]:
    """{steps: {what: {"difference": ..., "bound": ...}}} of one optimizer in the two versions.

    others: runs of the work tree from starts a few roundings away.
    """
    result: dict[int, Any] = {}
    eps = torch.finfo(torch.float64).eps
    for steps, values in here["steps"].items():
        rounding = eps * math.sqrt(here["size"]) * here["condition"] * steps
        result[steps] = {}
        for what in ("parameters", *NUMBERS):
            noise = max(difference(values[what], other["steps"][steps][what]) for other in others)
            bound = math.inf if noise > _NO_DIGIT else _FACTOR * max(rounding, noise)
            found = difference(there["steps"][steps][what], values[what])
            result[steps][what] = {"difference": found, "bound": bound}
    return result


def bench_beside(commit: str, steps: Sequence[int], only: Sequence[str] = ()) -> dict[str, Any]:
    """The differences of all runs, what is beyond rounding, and what the other commit lacks.

    Faults are differences beyond rounding after the fewest steps, and runs that the work tree cannot do.
    """
    with TemporaryDirectory() as folder:
        source = export(commit, Path(folder))
        say(f"{commit} ...")
        (there,) = trajectories(source, steps=steps, only=only, starts=1)
    say(f"{WORK_TREE} ...")
    here, *others = trajectories(ROOT / "src", steps=steps, only=only, starts=_STARTS)
    result: dict[str, Any] = {"commit": commit, "runs": [], "beyond": [], "lacking": [], "faults": []}
    for key, run in here.items():
        name = ", ".join(key)
        if "error" in run:
            result["faults"].append(f"{name}: the {WORK_TREE} fails: {run['error']}")
        elif "error" in there[key]:
            result["lacking"].append(f"{name}: {there[key]['error']}")
        else:
            compared = compare(there[key], run, [other[key] for other in others])
            result["runs"].append({"problem": key[0], "optimizer": key[1], "steps": compared})
            _note_beyond(result, name, compared)
    return result


def _note_beyond(result: dict[str, Any], name: str, compared: Mapping[int, Any]) -> None:
    for steps, entries in compared.items():
        for what, entry in entries.items():
            if entry["difference"] <= entry["bound"]:
                continue
            text = f"{name}: {what} differs by {entry['difference']:.1e} after {_steps(steps)}, "
            text += f"rounding explains {entry['bound']:.1e}"
            result["beyond"].append(text)
            if steps == min(compared):
                result["faults"].append(text)


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _in_digits(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def beside_table(result: dict[str, Any]) -> str:
    """Runs by numbers of steps: the parameters, the bound on these, the worst of the other numbers; then words."""
    rows = []
    for run in result["runs"]:
        row = {"problem": run["problem"], "optimizer": run["optimizer"]}
        for steps, entries in run["steps"].items():
            row[f"{_steps(steps)}:\nparameters"] = _in_digits(entries["parameters"]["difference"])
            row[f"{steps}:\nbound"] = _in_digits(entries["parameters"]["bound"])
            row[f"{steps}:\ninfo"] = _in_digits(max(entries[name]["difference"] for name in NUMBERS))
        rows.append(row)
    title = f"{result['commit']} beside the {WORK_TREE}: relative differences (info: of {', '.join(NUMBERS)})"
    lines = [f"not in {result['commit']}: {text}" for text in result["lacking"]]
    lines += [f"beyond rounding: {text}" for text in result["beyond"]]
    lines += [f"fault: {text}" for text in result["faults"] if text not in result["beyond"]]
    if not result["beyond"] and not result["faults"]:
        lines.append(f"{len(result['runs'])} runs are equal to rounding")
    return "\n".join([table(title, rows, left=2), "", *lines])


# -- operations -----------------------------------------------------------------------------------------------


def bench_operations(commit: str) -> dict[str, Any]:
    """{"operations": {settings: {version: aten operations of a step}}}."""
    with TemporaryDirectory() as folder:
        counts = {commit: trajectories(export(commit, Path(folder)))}
    counts[WORK_TREE] = trajectories(ROOT / "src")
    names = counts[WORK_TREE]
    return {"operations": {name: {version: counts[version][name] for version in counts} for name in names}}


# -- the command ----------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commit", metavar="COMMIT", help="anything that git knows as one, such as HEAD~3")
    text = "numbers of steps to compare after (default 1,5,20); differences after the fewest of them are faults"
    parser.add_argument("--steps", type=_numbers, default=(1, 5, 20), metavar="NUMBERS", help=text)
    text = ", ".join(PROBLEMS)
    parser.add_argument("--only", nargs="+", default=[], choices=PROBLEMS, metavar="PROBLEM", help=text)
    text = "count the aten operations of a step of GaussNewton on 8-50-50-1 instead (10 seconds)"
    parser.add_argument("--operations", action="store_true", help=text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.operations:
        return bench_operations(options.commit)
    return bench_beside(options.commit, options.steps, options.only)


def _table(result: dict[str, Any]) -> str:
    if "operations" not in result:
        return beside_table(result)
    rows = [{"GaussNewton": name, **counts} for name, counts in result["operations"].items()]
    return table("aten operations of the fifth step, 8-50-50-1, 64 samples", rows)


COMMAND = Command(
    "another commit beside the work tree: parameters after steps of every optimizer on tiny problems (2 minutes)",
    _run,
    _table,
    _add_options,
    one_thread=False,  # its processes have one each
)
