"""A step of several processes: seconds, and bytes beside those of DDP's gradient reduction.

Each process has one thread and its part of the batch. Where there are more processes than cores they share these.
Of the timed steps the fastest quarter counts: on a machine that others use too the rest tells more of these.
"""

import itertools
import json
import os
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.common import Command, Network, Step, add_quick, own_optimizer, say, table

NETWORKS = {"mnist": Network((784, 500, 10), 256, 64), "cifar10": Network((3072, 400, 400, 10), 256, 64)}
QUICK = {"tiny": Network((12, 8, 4), 16, 8)}
METHODS = ("smw-ng", "smw-gn")
COUNTS = (1, 2, 4)


def _measure(rank: int, processes: int, folder: str, networks: dict[str, Network], repeats: int) -> None:
    """One process: every network and method; the first writes the result."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(minutes=5)
    torch.distributed.init_process_group("gloo", store, patience, world_size=processes, rank=rank)
    entries = []
    for (name, network), method in itertools.product(networks.items(), METHODS):
        batch = [whole.tensor_split(processes)[rank] for whole in network.batch()]
        share = network.curvature_samples / network.samples if method == "smw-gn" else 1.0
        optimizer = own_optimizer(method, network, curvature_samples=share)
        group = optimizer._problems.group
        for _ in range(3):
            optimizer.step(*batch)
        before = group.bytes_given
        optimizer.step(*batch)
        entry = {"network": name, "method": method, "processes": processes}
        entry["bytes"] = group.bytes_given - before
        entry["ddp_bytes"] = 4 * network.parameters if processes > 1 else 0
        entry["seconds"] = _fastest_quarter(partial(optimizer.step, *batch), repeats)
        entries.append(entry)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(entries))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _fastest_quarter(step: Step, repeats: int) -> float:
    """Mean seconds of a step over the fastest quarter of them; all processes begin each together."""
    seconds = []
    for _ in range(repeats):
        torch.distributed.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return fmean(sorted(seconds)[: max(1, repeats // 4)])


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


def processes_table(result: dict[str, Any]) -> str:
    rows = [
        {
            **{key: entry[key] for key in ("network", "method", "processes")},
            "milliseconds": 1e3 * entry["seconds"],
            "kilobytes": entry["bytes"] / 1e3,
            "DDP's kilobytes": entry["ddp_bytes"] / 1e3,
        }
        for entry in result["processes"]
    ]
    title = f"A step, one thread per process on {result['cores']} cores; bytes that each puts into collectives"
    return table(title, rows, left=2)


COMMAND = Command(
    "a step on 1, 2 and 4 processes: seconds, and bytes beside DDP's (4 minutes)",
    lambda options: bench_processes(3 if options.quick else 40, options.quick),
    processes_table,
    add_quick,
)
