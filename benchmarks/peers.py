"""Steps of other libraries beside woodbury's: seconds, memory, and the difference between the two p.

In one process per peer, its step and woodbury's are timed in turns, from the same parameters on the same batch. p
is the change of the parameters in the first step, memory by how much the peak of the resident set grew in it.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Command, Network, Step, add_quick, positive, say, table
from benchmarks.peer_steps import PEERS, Peer, Task
from woodbury.optimizers import OPTIMIZERS
from woodbury.runs.config import installed_versions, this_machine

_START_SECONDS = 45.0  # for a process to import libraries and build its model
_BUSY_FACTOR = 3.0  # wall time over CPU time that a process may take on a busy machine
_ROUNDS = 30  # of timing, at most
_OWN_STEPS = 3  # of woodbury per round

# The whole batch enters the curvature.
PROBLEMS = {
    "classes": Network((784, 500, 10), 60, 60),
    "million": Network((500, 1000, 500, 1), 1000, 1000, nn.MSELoss),
}
SMALL = {"classes": Network((8, 6, 3), 5, 5), "million": Network((7, 6, 4, 1), 9, 9, nn.MSELoss)}


def make_task(network: Network, damping: float = 1.0) -> Task:
    return Task(network.build(), network.loss_type(), *network.batch(), damping)


def _own_step(name: str) -> Callable[[Task], Step]:
    def make(task: Task) -> Step:
        optimizer = OPTIMIZERS[name](task.model, task.loss, lr=1.0, damping=task.damping)
        return lambda: optimizer.step(task.inputs, task.targets)

    return make


# Our own steps as peers of themselves: for their memory, and to see how far the clock finds equals apart.
OWN = (
    Peer("woodbury.GaussNewton", _own_step("smw-gn"), "smw-gn"),
    Peer("woodbury.NaturalGradient", _own_step("smw-ng"), "smw-ng"),
)
ALL = {peer.name: peer for peer in (*OWN, *PEERS)}


def bench_peers(
    limit: float = 60.0, names: Sequence[str] = (), problems: Sequence[str] = (), small: bool = False
) -> dict[str, Any]:
    """{"machine", "versions", "limit", "problems": {key: {"network", ..., "peers": [entry, ...]}}}.

    An entry has "peer", "status" and, where that is "ok", what `measure` returns. limit: CPU seconds
    of timing per peer. names and problems choose some of `ALL` and `PROBLEMS`.
    """
    result: dict[str, Any] = {"machine": this_machine(), "versions": installed_versions(), "limit": limit}
    result["problems"] = {}
    for key in problems or PROBLEMS:
        network = (SMALL if small else PROBLEMS)[key]
        entries = []
        for name in names or ALL:
            if ALL[name].squares_only and network.loss_type is not nn.MSELoss:
                continue
            entry = {"peer": name} | _run_process(key, name, limit, small)
            entries.append(entry)
            outcome = f"{1e3 * entry['seconds']:.1f} ms" if entry["status"] == "ok" else entry["status"]
            say(f"{key}: {name}: {outcome}")
        result["problems"][key] = {
            "network": network.name,
            "loss": network.loss_type.__name__,
            "samples": network.samples,
            "parameters": network.parameters,
            "peers": entries,
        }
    return result


# -- one peer, in a process of its own ------------------------------------------------------------------------


def measure(peer: Peer, network: Network, limit: float, warmup: Network, damping: float = 1.0) -> dict[str, Any]:
    """Time the step of a peer in turns with woodbury's, in this process.

    Returns "status" and, where that is "ok", "seconds" and "woodbury" (medians of CPU time), their "ratio",
    "difference" (|p - p'| / |p|), "memory" in bytes and "rounds" (0 if the limit allowed only the first step,
    which is slower).
    """
    for make in (_own_step(peer.versus), peer.make):  # in a first step libraries load much of themselves
        make(make_task(warmup))()
    theirs, ours = make_task(network, damping), make_task(network, damping)
    step, own_step = peer.make(theirs), _own_step(peer.versus)(ours)
    start = _flat(theirs.model)
    started, resident = time.process_time(), _peak_bytes()
    first = _step_seconds(step, theirs.model, start)
    memory = _peak_bytes() - resident
    if first > limit:
        return {"status": f"over {limit:g} s"}
    own_step()
    p, own_p = _flat(theirs.model) - start, _flat(ours.model) - start
    seconds: list[float] = []
    own_seconds = [_step_seconds(own_step, ours.model, start) for _ in range(_OWN_STEPS)]
    while len(seconds) < _ROUNDS:
        elapsed = time.process_time() - started
        if elapsed + first > limit or (len(seconds) >= 5 and elapsed > limit / 4):
            break
        seconds.append(_step_seconds(step, theirs.model, start))
        own_seconds += [_step_seconds(own_step, ours.model, start) for _ in range(_OWN_STEPS)]
    middle, own_middle = median(seconds or [first]), median(own_seconds)
    return {
        "status": "ok",
        "seconds": middle,
        "woodbury": own_middle,
        "ratio": middle / own_middle,
        "difference": float((p - own_p).norm() / own_p.norm()),
        "memory": memory,
        "rounds": len(seconds),
    }


def _step_seconds(step: Step, model: nn.Module, start: Tensor) -> float:
    """CPU seconds of a step from the parameters `start`."""
    with torch.no_grad():
        nn.utils.vector_to_parameters(start.float(), model.parameters())
    started = time.process_time()
    step()
    return time.process_time() - started


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def _peak_bytes() -> int:
    """The most bytes that this process ever had resident; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _run_process(key: str, name: str, limit: float, small: bool) -> dict[str, Any]:
    """What `main` prints in a new process, or {"status": why there is nothing}."""
    package = ALL[name].package
    try:
        entry: dict[str, Any] = {} if package is None else {"version": importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {"status": f"not installed: pip install {package}"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", key, name, str(limit), str(int(small))]
    timeout, root = _BUSY_FACTOR * limit + _START_SECONDS, Path(__file__).parent.parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=root)
    except subprocess.TimeoutExpired:
        return {"status": f"over {limit:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"status": f"failed: {last[:200]}"}
    return entry | json.loads(done.stdout.splitlines()[-1])


def main(key: str, name: str, limit: str, small: str) -> None:
    """The process of one peer: prints one JSON object."""
    network = (SMALL if small == "1" else PROBLEMS)[key]
    print(json.dumps(measure(ALL[name], network, float(limit), SMALL[key])))


# -- the command ----------------------------------------------------------------------------------------------


def peer_tables(result: dict[str, Any]) -> str:
    """One table per problem, and below it one line per peer that was not timed."""
    tables = []
    for problem in result["problems"].values():
        rows = [
            {
                "step": entry["peer"],
                "seconds": entry["seconds"],
                "x woodbury": entry["ratio"],
                "MiB": entry["memory"] / 2**20,
                "p differs": entry["difference"],
            }
            for entry in problem["peers"]
            if entry["status"] == "ok"
        ]
        others = [f"{entry['peer']}: {entry['status']}" for entry in problem["peers"] if entry["status"] != "ok"]
        title = "{network}, {loss}, {samples} samples, {parameters:,} parameters".format(**problem)
        tables.append("\n".join([table(title, rows), *others]))
    return "\n\n".join(tables)


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = "CPU seconds per peer (default 60)"
    parser.add_argument("--limit", type=positive, default=60, metavar="SECONDS", help=text)
    for option, names in (("--peer", list(ALL)), ("--problem", list(PROBLEMS))):
        text = f"measure only this one; may be repeated. One of: {'; '.join(names)}"
        parser.add_argument(option, action="append", choices=names, default=[], metavar="NAME", help=text)
    add_quick(parser)


COMMAND = Command(
    "steps of other libraries beside woodbury's, where they are installed (15 minutes with all of them)",
    lambda options: bench_peers(options.limit, options.peer, options.problem, options.quick),
    peer_tables,
    _add_options,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
