"""Steps of other libraries beside woodbury's: seconds, memory, and the difference between the two p.

In one process per peer, its step and woodbury's are timed in turns, from the same parameters on the same batch; p
is the change of the parameters in the first step. A second process measures memory: by how much the peak of the
resident set in a first step exceeds what was resident just before it.
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
from woodbury.optimizers import OPTIMIZERS

_START_SECONDS = 45.0  # for a process to import libraries and build its model
_BUSY_FACTOR = 3.0  # wall time over CPU time that a process may take on a busy machine
_ROUNDS = 30  # of timing, at most
_OWN_STEPS = 3  # of woodbury per round

# An allocator that holds on to freed memory hides a part of the next peak. With these settings mimalloc (torch's
# own on ARM) and glibc return it at once; that takes time, so memory is not measured in the timed process.
RETURNS_MEMORY = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Problem:
    """A network of linear layers and sigmoids, a loss and a batch; the whole batch enters the curvature."""

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


# Our own steps as peers of themselves: for their memory, and to see how far the clock finds equals apart.
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

    An entry is what `describe` and `measure` return together. limit: CPU seconds of timing per peer. names and
    problems choose some of `PEERS` and `PROBLEMS`.
    """
    known = OWN | PEERS
    result: dict[str, Any] = {"machine": this_machine(), "versions": installed_versions(), "limit": limit}
    result["problems"] = {}
    for key in problems or PROBLEMS:
        problem = (SMALL if small else PROBLEMS)[key]
        entries = []
        for name in names or known:
            say(f"{key}: {name} ...")
            entry = describe(known[name], problem)
            if entry["status"] == "ok":
                entry |= _run_process(key, name, limit, small, memory=False)
            if entry["status"] == "ok":
                entry["memory"] = _run_process(key, name, limit, small, memory=True).get("memory")
            entries.append(entry)
            outcome = f"{1e3 * entry['seconds']:.1f} ms" if entry["status"] == "ok" else entry["status"]
            say(f"{key}: {name}: {outcome}")
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
    """What is known of a peer before it runs; "status" is "ok" if it is installed."""
    entry: dict[str, Any] = {
        "peer": peer.name,
        "computes": peer.computes_for(problem.loss()),
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
    """Time the step of a peer in turns with woodbury's, in this process.

    Returns "seconds" and "woodbury" (medians of CPU time), their "ratio", "difference" (|p - p'| / |p|, None if
    the peer computes another p) and "rounds" (0 if the limit allowed only the first step, which is slower).
    """
    _warm_up(peer, warmup)
    own = _own_step(peer.versus)
    batch = problem.batch()
    theirs, ours = problem.task(batch), problem.task(batch)
    step = peer.make(theirs)
    start = _flat(theirs.model)
    started = time.process_time()
    first = _step_seconds(step, theirs.model, start)
    if first > limit:
        return {"status": f"over {limit:g} s"}
    p = _flat(theirs.model) - start
    own_step = own(ours)
    own_step()
    own_p = _flat(ours.model) - start
    seconds: list[float] = []
    own_seconds = [_step_seconds(own_step, ours.model, start) for _ in range(_OWN_STEPS)]
    while len(seconds) < _ROUNDS:
        elapsed = time.process_time() - started
        if elapsed + first > limit or (len(seconds) >= 5 and elapsed > limit / 4):
            break
        seconds.append(_step_seconds(step, theirs.model, start))
        own_seconds += [_step_seconds(own_step, ours.model, start) for _ in range(_OWN_STEPS)]
    same = peer.computes_for(ours.loss) in (GN, NG)
    middle, own_middle = median(seconds or [first]), median(own_seconds)
    return {
        "seconds": middle,
        "woodbury": own_middle,
        "ratio": middle / own_middle,
        "difference": float((p - own_p).norm() / own_p.norm()) if same else None,
        "rounds": len(seconds),
    }


def measure_memory(problem: Problem, peer: Peer, warmup: Problem) -> int | None:
    """Bytes that a first step of a peer takes at its peak, in a process started with `RETURNS_MEMORY`.

    None if the system does not report memory or the allocator holds on to what is freed.
    """
    _warm_up(peer, warmup)
    step = peer.make(problem.task(problem.batch()))
    _return_free_memory()
    if not _sees_memory():
        return None
    before = _reset_peak()
    step()
    return max(0, _status("VmHWM") - before)


def _warm_up(peer: Peer, problem: Problem) -> None:
    """Take a first step, in which libraries load much of themselves."""
    for make in (_own_step(peer.versus), peer.make):
        make(problem.task(problem.batch()))()


def try_measure(key: str, name: str, limit: float, small: bool, memory: bool = False) -> dict[str, Any]:
    """What `measure` returns, or {"memory": bytes}; {"status": reason} if the peer fails."""
    _limit_memory()
    problem, peer = (SMALL if small else PROBLEMS)[key], (OWN | PEERS)[name]
    try:
        if memory:
            return {"memory": measure_memory(problem, peer, SMALL[key])}
        return measure(problem, peer, limit, SMALL[key])
    except MemoryError:
        return {"status": "out of memory"}
    except Exception as error:  # of any library
        message = one_line(error)
        if "allocate" in message or "bad_alloc" in message:
            return {"status": "out of memory"}
        return {"status": f"failed: {type(error).__name__}: {message[:200]}"}


def _run_process(key: str, name: str, limit: float, small: bool, memory: bool) -> dict[str, Any]:
    """What `try_measure` returns in a new process."""
    program = "import sys; from woodbury.bench import peers; peers.main(sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", program, key, name, str(limit)]
    command += [str(int(flag)) for flag in (small, memory)]
    environment = os.environ | RETURNS_MEMORY if memory else None
    timeout = _BUSY_FACTOR * limit + _START_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return {"status": f"over {limit:g} s"}
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    if done.returncode == -9:  # killed by the kernel
        return {"status": "out of memory"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": f"failed: {last[:200]}"}


def main(arguments: Sequence[str]) -> None:
    """The process of one peer: prints one JSON object."""
    key, name, limit, small, memory = arguments
    print(json.dumps(try_measure(key, name, float(limit), small == "1", memory == "1")))


def _limit_memory() -> None:
    """Let allocations beyond nine tenths of the free memory fail, before the kernel kills the process."""
    available = available_bytes(torch.device("cpu"))
    try:
        import resource
    except ImportError:  # not on Windows
        return
    if available is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.9 * available), resource.RLIM_INFINITY))


def _step_seconds(step: Step, model: nn.Module, start: Tensor) -> float:
    """CPU seconds of a step from the parameters `start`."""
    with torch.no_grad():
        offset = 0
        for parameter in model.parameters():
            parameter.copy_(start[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
    started = time.process_time()
    step()
    return time.process_time() - started


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def _return_free_memory() -> None:
    """Free memory that a process holds would hide a part of the next step's peak."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _sees_memory() -> bool:
    """Whether the resident set grows by a new tensor and shrinks when it is freed."""
    size = 2**24
    try:
        before = _reset_peak()
        torch.ones(size // 4)
        return _status("VmHWM") - before > 0.9 * size and _status("VmRSS") - before < 0.1 * size
    except OSError:  # a system without such files
        return False


def _reset_peak() -> int:
    """Bytes resident now; the peak starts again from there."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
