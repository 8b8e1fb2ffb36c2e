"""A step of several processes: seconds of each phase, and bytes beside those of DDP's gradient reduction.

Each process has one thread and its part of the batch. Where there are more processes than cores they share these.
Of the timed steps the fastest quarter counts: on a machine that others use too the rest tells more of these.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.common import Command, Network, Step, add_quick, say, table
from woodbury.optim import step as one_step
from woodbury.optimizers import OPTIMIZERS
from woodbury.parallel.group import Group
from woodbury.quadratic import sample_space
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.joint import JointRows
from woodbury.quadratic.objective import OnPieces
from woodbury.quadratic.quadratic import Quadratic

NETWORKS = {"mnist": Network((784, 500, 10), 256, 64), "cifar10": Network((3072, 400, 400, 10), 256, 64)}
QUICK = {"tiny": Network((12, 8, 4), 16, 8)}
METHODS = ("smw-ng", "smw-gn")
COUNTS = (1, 2, 4)
# phase: what of the code is timed as it; the innermost that is running counts
PHASES: dict[str, list[tuple[Any, str]]] = {
    "passes and rows": [(one_step, "linearize")],
    "gather rows": [(JointRows, "__init__"), (JointRows, "_factor_forms")],
    "Gram": [(Quadratic, "gram")],
    "gather Gram": [(JointRows, "joined")],
    "solve": [(sample_space, "solve_in_sample_space")],
    "p": [(Displacement, "add_"), (Displacement, "squared_norm"), (Displacement, "dense")],
    "sum p": [(Group, "sum_vector")],
    "trial": [(OnPieces, "decrease")],
    "agree": [(Group, "sums"), (Group, "of_first"), (Group, "gather_numbers")],
}
REST = "other"
_TALKED = ("gather rows", "gather Gram", "sum p", "agree")

Totals = dict[str, list[float]]  # seconds, bytes and messages by phase


class Stopwatch:
    """Seconds, bytes and messages by phase; what runs inside another phase is not counted there."""

    def __init__(self, group: Group | None = None) -> None:
        self.group, self.messages = group, 0
        self._stack: list[str] = []
        self._last = (0.0, 0, 0)
        self.totals: Totals = {}

    def _turn(self) -> None:
        """Add what has passed since the last turn to the phase that is running."""
        now = (time.perf_counter(), 0 if self.group is None else self.group.bytes_given, self.messages)
        if self._stack:
            total = self.totals.setdefault(self._stack[-1], [0.0, 0, 0])
            for place, (after, before) in enumerate(zip(now, self._last, strict=True)):
                total[place] += after - before
        self._last = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def measure(self, step: Step) -> Totals:
        self.totals = {}
        with self.phase(REST):
            step()
        return self.totals

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the phases are timed and messages counted where they happen."""
        run = Group._run

        def counted(group: Group, *args: Any, **options: Any) -> Any:
            self.messages += 1
            return run(group, *args, **options)

        with ExitStack() as changes:
            changes.enter_context(patch.object(Group, "_run", counted))
            for phase, places in PHASES.items():
                for owner, name in places:
                    changes.enter_context(patch.object(owner, name, self._timed(phase, getattr(owner, name))))
            yield

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*args, **options)

        return timed


def _measure(rank: int, processes: int, folder: str, networks: dict[str, Network], repeats: int) -> None:
    """One process: every network and method; the first writes the result."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(minutes=5)
    torch.distributed.init_process_group("gloo", store, patience, world_size=processes, rank=rank)
    entries = []
    for (name, network), method in itertools.product(networks.items(), METHODS):
        batch = [whole.tensor_split(processes)[rank] for whole in network.batch()]
        share = network.curvature_samples / network.samples if method == "smw-gn" else 1.0
        optimizer = OPTIMIZERS[method](network.build(), network.loss(), lr=0.1, curvature_samples=share)
        gradients = torch.zeros(network.parameters)
        step, reduce = partial(optimizer.step, *batch), partial(torch.distributed.all_reduce, gradients)
        for _ in range(3):
            step()
        entry = {"network": name, "method": method, "processes": processes}
        entry |= _phases(Stopwatch(optimizer._problems.group), step, repeats)
        entry["ddp_bytes"] = gradients.nbytes if processes > 1 else 0
        entry["loopback"] = _loopback(step, max(2, repeats // 3), processes)
        entry["ddp_loopback"] = _loopback(reduce, max(2, repeats // 3), processes)
        entries.append(entry)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(entries))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _phases(watch: Stopwatch, step: Step, repeats: int) -> dict[str, Any]:
    """Means over the fastest quarter of the steps: seconds and bytes by phase, and the number of messages."""
    runs = []
    with watch.attached():
        for _ in range(repeats):
            torch.distributed.barrier()
            runs.append(watch.measure(step))
    runs.sort(key=lambda run: sum(seconds for seconds, _, _ in run.values()))
    fastest, nothing = runs[: max(1, repeats // 4)], [0.0, 0, 0]

    def means(place: int) -> dict[str, float]:
        phases = dict.fromkeys(phase for run in fastest for phase in run)
        return {phase: fmean(run.get(phase, nothing)[place] for run in fastest) for phase in phases}

    seconds, messages = means(0), sum(means(2).values())
    return {"seconds": sum(seconds.values()), "phases": seconds, "bytes": means(1), "messages": messages}


def _loopback(function: Step, calls: int, processes: int) -> float | None:
    """Bytes on the loopback interface per call and process: the least of five, as others may use it meanwhile.

    None where the system does not count them.
    """
    counter, counts = Path("/sys/class/net/lo/statistics/tx_bytes"), []
    if not counter.exists():
        return None
    for _ in range(5):
        torch.distributed.barrier()
        before = int(counter.read_text())
        torch.distributed.barrier()
        for _ in range(calls):
            function()
        torch.distributed.barrier()
        counts.append((int(counter.read_text()) - before) / calls / processes)
    return min(counts)


def bench_processes(repeats: int = 40, quick: bool = False) -> dict[str, Any]:
    """{"cores", "processes": an entry per network, method and number of processes}."""
    networks, counts = (QUICK, COUNTS[:2]) if quick else (NETWORKS, COUNTS)
    entries: list[dict[str, Any]] = []
    for count in counts:
        say(f"{count} processes ...")
        with tempfile.TemporaryDirectory() as folder:
            arguments = (count, folder, networks, repeats)
            multiprocessing.start_processes(_measure, arguments, nprocs=count, start_method="spawn")
            entries += json.loads((Path(folder) / "result.json").read_text())
    return {"cores": os.cpu_count() or 1, "processes": entries}


# -- the command ---------------------------------------------------------------------------------------------


def processes_tables(result: dict[str, Any]) -> str:
    """Milliseconds by phase, and kilobytes beside DDP's."""
    times, moved = [], []
    for entry in result["processes"]:
        head = {key: entry[key] for key in ("network", "method", "processes")}
        milliseconds = {phase.replace(" ", "\n"): 1e3 * seconds for phase, seconds in entry["phases"].items()}
        times.append({**head, "all": 1e3 * entry["seconds"], **milliseconds})
        if entry["processes"] > 1:
            counts = {phase: entry["bytes"].get(phase, 0) for phase in _TALKED}
            counts |= {"all": sum(entry["bytes"].values()), "DDP": entry["ddp_bytes"]}
            if entry["loopback"] is not None:
                counts |= {"all, loopback": entry["loopback"], "DDP, loopback": entry["ddp_loopback"]}
            kilobytes = {name.replace(" ", "\n"): count / 1e3 for name, count in counts.items()}
            moved.append({**head, **kilobytes, "messages": entry["messages"]})
    titles = (
        f"Milliseconds of a step by phase, one thread per process on {result['cores']} cores",
        "Kilobytes that a process puts into collectives per step, and that the loopback interface sends for it",
    )
    tables = [table(title, rows, left=2) for title, rows in zip(titles, (times, moved), strict=True)]
    return "\n\n".join(tables)


COMMAND = Command(
    "a step on 1, 2 and 4 processes: seconds by phase, and bytes beside DDP's (4 minutes)",
    lambda options: bench_processes(3 if options.quick else 40, options.quick),
    processes_tables,
    add_quick,
)
