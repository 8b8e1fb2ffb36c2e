"""The step of other libraries beside woodbury's: seconds, memory, and how far apart the two p are.

Every peer gets a process of its own, in which its step and woodbury's are timed in turns from the same
parameters on the same batch; p is what the parameters moved by in the first step. A second process measures
memory: the peak of the resident set during a first step above what it was before, with libraries loaded and model
and batch made. Peers that cannot be imported are reported as such.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._memory import available_bytes
from woodbury.bench.peer_steps import GN, NG, PEERS, Peer, Task
from woodbury.bench.timing import Step
from woodbury.experiments.config import installed_versions, this_machine
from woodbury.experiments.errors import one_line
from woodbury.experiments.models import mlp, network_name, parameter_count
from woodbury.optim import OPTIMIZERS

_START = 45.0  # seconds a process may take to import libraries and make its model
_PATIENCE = 3.0  # how much longer than its CPU time a process may take on a busy machine
_ROUNDS = 30  # of timing, at most
_TURNS = 3  # of woodbury in a round

# What an allocator keeps for later hides a part of the next peak. With these it gives freed memory back at once
# (mimalloc, torch's own on ARM; glibc), which takes time: memory is measured in a process that is not timed.
RETURNS_MEMORY = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Problem:
    """A network of linear layers and sigmoids, its loss and its batch, all of which enters the curvature."""

    widths: tuple[int, ...]
    samples: int
    loss: type[nn.Module]
    damping: float = 1.0

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.samples, self.widths[0], generator=generator)
        if self.loss is nn.CrossEntropyLoss:
            return inputs, torch.randint(self.widths[-1], (self.samples,), generator=generator)
        return inputs, torch.randn(self.samples, self.widths[-1], generator=generator)

    def task(self, batch: tuple[Tensor, Tensor]) -> Task:
        return Task(mlp(self.widths, seed=0), self.loss(), *batch, damping=self.damping)


PROBLEMS = {
    "classes": Problem((784, 500, 10), 60, nn.CrossEntropyLoss),
    "million": Problem((500, 1000, 500, 1), 1000, nn.MSELoss),
}
SMALL = {
    "classes": Problem((8, 6, 3), 5, nn.CrossEntropyLoss),
    "million": Problem((7, 6, 4, 1), 9, nn.MSELoss),
}


def _own_step(name: str) -> Callable[[Task], Step]:
    def make(task: Task) -> Step:
        optimizer = OPTIMIZERS[name](task.model, task.loss, lr=1.0, damping=task.damping)
        return lambda: optimizer.step(task.inputs, task.targets)

    return make


# Our own steps as peers of themselves: what they cost in memory, and what the clock makes of equals.
OWN = {
    "woodbury.GaussNewton": Peer("woodbury.GaussNewton", _own_step("smw-gn"), "smw-gn", GN),
    "woodbury.NaturalGradient": Peer("woodbury.NaturalGradient", _own_step("smw-ng"), "smw-ng", NG),
}


def bench_peers(
    limit: float = 60.0,
    names: Sequence[str] = (),
    problems: Sequence[str] = (),
    small: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """{"machine", "versions", "limit", "problems": {key: {"network", ..., "peers": [entry, ...]}}}.

    An entry is what `describe` and `measure` return together. limit is for the timing of each peer, in CPU
    seconds. names and problems choose some of `PEERS` and `PROBLEMS`.
    """
    known = OWN | PEERS
    chosen = [known[name] for name in names] if names else list(known.values())
    result: dict[str, Any] = {"machine": this_machine(), "versions": installed_versions(), "limit": limit}
    result["problems"] = {}
    for key in problems or PROBLEMS:
        problem = (SMALL if small else PROBLEMS)[key]
        entries = []
        for peer in chosen:
            say(f"{key}: {peer.name} ...")
            entry = describe(peer, problem)
            if entry["status"] == "ok":
                entry |= _in_own_processes(key, peer.name, limit, small)
            entries.append(entry)
            told = entry["status"] if entry["status"] != "ok" else f"{1e3 * entry['seconds']:.1f} ms"
            say(f"{key}: {peer.name}: {told}")
        result["problems"][key] = {
            "network": network_name(problem.widths),
            "loss": problem.loss.__name__,
            "samples": problem.samples,
            "parameters": parameter_count(problem.widths),
            "damping": problem.damping,
            "peers": entries,
        }
    return result


def describe(peer: Peer, problem: Problem) -> dict[str, Any]:
    """What is known of a peer before it runs; "status" is "ok" if its modules are there."""
    entry: dict[str, Any] = {
        "peer": peer.name,
        "computes": peer.computed(problem.loss()),
        "versus": peer.versus,
        "package": peer.package,
        "status": "ok",
    }
    try:
        if peer.package is not None:
            entry["version"] = importlib.metadata.version(peer.package)
        for module in peer.modules:
            if importlib.util.find_spec(module.split(".")[0]) is None:
                raise ModuleNotFoundError(module)
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        entry["status"] = f"not installed: pip install {peer.package}"
    return entry


def measure(problem: Problem, peer: Peer, limit: float, warmup: Problem) -> dict[str, Any]:
    """Time a peer beside woodbury's step in this process.

    Returns "seconds" and "woodbury" (medians of CPU time), their "ratio", "difference" (|p - p'| / |p|, None
    where the peer computes another p) and "rounds" (0 if there was time for the first step alone, which is not
    warmed up).
    """
    _warm_up(peer, warmup)
    own = _own_step(peer.versus)
    batch = problem.batch()
    theirs, ours = problem.task(batch), problem.task(batch)
    step = peer.make(theirs)
    start = _flat(theirs.model)
    begun = time.process_time()
    first = _timed(step, theirs.model, start)
    if first > limit:
        return {"status": f"over {limit:g} s"}
    moved = _flat(theirs.model) - start
    step_beside = own(ours)
    step_beside()
    expected = _flat(ours.model) - start
    seconds: list[float] = []
    beside = [_timed(step_beside, ours.model, start) for _ in range(_TURNS)]
    while len(seconds) < _ROUNDS:
        elapsed = time.process_time() - begun
        if elapsed + first > limit or (len(seconds) >= 5 and elapsed > limit / 4):
            break
        seconds.append(_timed(step, theirs.model, start))
        beside += [_timed(step_beside, ours.model, start) for _ in range(_TURNS)]
    rounds = len(seconds)
    seconds = seconds or [first]  # no time for a second step
    same = peer.computed(ours.loss) in (GN, NG)
    return {
        "seconds": median(seconds),
        "woodbury": median(beside),
        "ratio": median(seconds) / median(beside),
        "difference": float((moved - expected).norm() / expected.norm()) if same else None,
        "rounds": rounds,
    }


def measure_memory(problem: Problem, peer: Peer, warmup: Problem) -> int | None:
    """Bytes that a first step of a peer takes at its peak, in a process started with `RETURNS_MEMORY`.

    None where the system does not tell or the allocator keeps what is freed.
    """
    _warm_up(peer, warmup)
    step = peer.make(problem.task(problem.batch()))
    _return_free_memory()
    if not _memory_is_seen():
        return None
    before = _reset_peak()
    step()
    return max(0, _status("VmHWM") - before)


def _warm_up(peer: Peer, problem: Problem) -> None:
    """Libraries load much of themselves on first use."""
    for make in (_own_step(peer.versus), peer.make):
        make(problem.task(problem.batch()))()


def work(key: str, name: str, limit: float, small: bool, memory: bool = False) -> dict[str, Any]:
    """`measure`, or {"memory": bytes}, with what may go wrong in a peer as its "status"; for its own process."""
    _keep_within_memory()
    problem, peer = (SMALL if small else PROBLEMS)[key], (OWN | PEERS)[name]
    try:
        if memory:
            return {"memory": measure_memory(problem, peer, SMALL[key])}
        return measure(problem, peer, limit, SMALL[key])
    except MemoryError:
        return {"status": "out of memory"}
    except Exception as error:  # a peer may fail as it likes
        words = one_line(error)
        if "allocate" in words or "bad_alloc" in words:
            return {"status": "out of memory"}
        return {"status": f"failed: {type(error).__name__}: {words[:200]}"}


def _in_own_processes(key: str, name: str, limit: float, small: bool) -> dict[str, Any]:
    """`measure` in one process and, where that went well, "memory" from another."""
    entry = _in_own_process(key, name, limit, small, memory=False)
    if "status" not in entry:
        entry["memory"] = _in_own_process(key, name, limit, small, memory=True).get("memory")
    return entry


def _in_own_process(key: str, name: str, limit: float, small: bool, memory: bool) -> dict[str, Any]:
    program = "import sys; from woodbury.bench import peers; peers.main(sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", program, key, name, str(limit)]
    command += [str(int(flag)) for flag in (small, memory)]
    environment = os.environ | RETURNS_MEMORY if memory else None
    patience = _PATIENCE * limit + _START
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, env=environment)
    except subprocess.TimeoutExpired:
        return {"status": f"over {limit:g} s"}
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    if done.returncode == -9:  # the kernel's way to say it
        return {"status": "out of memory"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": f"failed: {last[:200]}"}


def main(arguments: Sequence[str]) -> None:
    """The process of one peer: prints one JSON object."""
    key, name, limit, small, memory = arguments
    print(json.dumps(work(key, name, float(limit), small == "1", memory == "1")))


def _keep_within_memory() -> None:
    """Let allocations beyond nine tenths of what is free now fail, before the kernel ends the process."""
    available = available_bytes(torch.device("cpu"))
    try:
        import resource
    except ImportError:  # not on Windows
        return
    if available is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.9 * available), resource.RLIM_INFINITY))


def _timed(step: Step, model: nn.Module, start: Tensor) -> float:
    """CPU seconds of a step from the given parameters."""
    with torch.no_grad():
        offset = 0
        for parameter in model.parameters():
            parameter.copy_(start[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
    begun = time.process_time()
    step()
    return time.process_time() - begun


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def _return_free_memory() -> None:
    """What is kept for later would hide a part of the next step's peak."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _memory_is_seen() -> bool:
    """Whether the resident set grows by a new tensor and shrinks when it is freed."""
    size = 2**24
    try:
        before = _reset_peak()
        torch.ones(size // 4)
        return _status("VmHWM") - before > 0.9 * size and _status("VmRSS") - before < 0.1 * size
    except OSError:  # a system without such files
        return False


def _reset_peak() -> int:
    """Bytes resident now, from where the peak counts again."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
