"""A step of several processes: seconds of each phase, bytes beside DDP's gradient reduction, and a cost model.

Each process has one thread and its part of the batch. Where there are more processes than cores they share these.
Of the timed steps the fastest quarter counts: on a machine that others use too the rest tells more of these.

The model is of the seconds of a step on P processes, with N1 samples, N2 of them curvature samples with R columns
each, m = N2 R factor rows, z = N1 - N2 gradient rows, n parameters, n' of them not in the first layer, and w_in
inputs and w_out outputs of all layers:

    passes    a + b (6 N1 n + 2 m n') / P               forward, backward, rows, p, trial
    Gram      c 2 (N1 N2 w_in + m (m + z) w_out) / P    K[:, own rows]
    solve     d (m^3 / 3 + m (m + z))                   the same on every process
    talk      P > 1: e messages log2(P) + f bytes       bytes a process sends in rings: to gather x bytes of each
                                                        process (P - 1) x, to sum x bytes 2 x (P - 1) / P

a to f, none negative, are fitted to the measured phases by least squares of relative errors. Where P processes
share fewer cores, passes, Gram and solve are multiplied by P / cores.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from woodbury._group import Group
from woodbury.bench.timing import Network
from woodbury.displacement import Displacement
from woodbury.experiments.models import parameter_count
from woodbury.optim import sample_space, smw
from woodbury.optim.joint import JointRows
from woodbury.optim.passes import Passes
from woodbury.optimizers import OPTIMIZERS

NETWORKS = {
    "mnist": Network((784, 500, 10), 256, 64, 0),
    "cifar10": Network((3072, 400, 400, 10), 256, 64, 0),
}
QUICK = {"tiny": Network((12, 8, 4), 16, 8, 0)}
METHODS = ("smw-ng", "smw-gn")
COUNTS = (1, 2, 4)
EXTRAPOLATED = (8, 64, 1024)
# What processes exchange costs as fitted, or (not measured) 20 microseconds a message and 10 GB/s.
TALK: dict[str, dict[str, float]] = {"fitted": {}, "assumed": {"latency": 2e-5, "byte": 1e-10}}
_INTERFACE = Path("/proc/net/dev")
# phase: what of the code is timed as it; the innermost that is running counts
PHASES: dict[str, list[tuple[Any, str]]] = {
    "passes and rows": [(smw, "linearize")],
    "gather rows": [(JointRows, "__init__"), (JointRows, "_factor_forms")],
    "Gram": [(sample_space, "gram_of")],
    "gather Gram": [(JointRows, "joined")],
    "solve": [(sample_space, "solve_in_sample_space")],
    "p": [(Displacement, "add_"), (Displacement, "squared_norm"), (Displacement, "dense")],
    "sum p": [(Group, "sum_vector")],
    "trial": [(Passes, "decrease_on")],
    "agree": [(Group, "sums"), (Group, "of_first"), (Group, "gather_numbers")],
}
REST = "other"
_COMPUTED = ("passes and rows", "p", "trial", REST)
_TALKED = ("gather rows", "gather Gram", "sum p", "agree")


class Stopwatch:
    """Seconds, bytes and messages by phase; what runs inside another phase is not counted there."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.messages = 0
        self._stack: list[str] = []
        self._last = (0.0, 0, 0)
        self.totals: dict[str, list[float]] = {}

    def _turn(self) -> None:
        """Add what has passed since the last turn to the phase that is running."""
        given = 0 if self.group is None else self.group.bytes_given
        now = (time.perf_counter(), given, self.messages)
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

    def measure(self, step: Callable[[], object]) -> dict[str, list[float]]:
        """[seconds, bytes given, messages] of a step by phase."""
        self.totals = {}
        with self.phase(REST):
            step()
        return self.totals

    @contextmanager
    def attached(self, group: Group) -> Iterator[None]:
        """Inside, the phases are timed where they happen."""
        self.group = group
        saved = [(owner, name, getattr(owner, name)) for places in PHASES.values() for owner, name in places]
        everywhere: Any = Group
        run = everywhere._run
        try:
            for phase, places in PHASES.items():
                for owner, name in places:
                    setattr(owner, name, self._timed(phase, getattr(owner, name)))

            def counted(group: Group, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
                self.messages += 1
                return run(group, collective, *args, **options)

            everywhere._run = counted
            yield
        finally:
            everywhere._run = run
            for owner, name, function in saved:
                setattr(owner, name, function)

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*args, **options)

        return timed


@dataclass(frozen=True)
class Sizes:
    """What the cost of a step depends on."""

    parameters: int  # n
    behind_first: int  # n'
    inputs: int  # w_in
    outputs: int  # w_out
    samples: int  # N1
    curvature: int  # N2
    columns: int  # R
    width: int = 4  # bytes of a number

    @property
    def factor_rows(self) -> int:  # m
        return self.curvature * self.columns

    @property
    def rows(self) -> int:  # m + z
        return self.factor_rows + self.samples - self.curvature

    def pass_work(self, processes: int) -> float:
        return (6 * self.samples * self.parameters + 2 * self.factor_rows * self.behind_first) / processes

    def gram_work(self, processes: int) -> float:
        inputs, outputs = self.samples * self.curvature * self.inputs, self.factor_rows * self.rows * self.outputs
        return 2 * (inputs + outputs) / processes

    def columns_of_gram(self, processes: int) -> int:
        """Those that are exchanged: the rows of samples outside S2 are one row per process."""
        return self.factor_rows + (processes if self.samples > self.curvature else 0)

    def solve_work(self, processes: int) -> float:
        return self.factor_rows**3 / 3 + self.factor_rows * self.columns_of_gram(processes)

    def bytes_of_rows(self) -> float:
        """Of the factor rows of all processes: inputs of layers per sample, factors at their outputs per row."""
        return self.width * (self.curvature * self.inputs + self.factor_rows * self.outputs)

    def bytes_sent(self, processes: int) -> float:
        """By each process in rings: rows and columns of K gathered, p summed."""
        gathered = self.bytes_of_rows() + self.width * self.factor_rows * self.columns_of_gram(processes)
        return (processes - 1) / processes * (gathered + 2 * self.width * self.parameters)

    def bytes_of_gradients(self, processes: int) -> float:
        """What DDP sends: a sum of the size of the parameters."""
        return 2 * (processes - 1) / processes * self.width * self.parameters


def sizes_of(network: Network, method: str) -> Sizes:
    m, outputs = network.widths, network.widths[-1]
    gauss_newton = method == "smw-gn"
    return Sizes(
        parameters=parameter_count(m),
        behind_first=parameter_count(m[1:]),
        inputs=sum(m[:-1]),
        outputs=sum(m[1:]),
        samples=network.samples,
        curvature=network.curvature_samples if gauss_newton else network.samples,
        columns=outputs - 1 if gauss_newton and outputs > 1 else 1,
    )


# -- measuring -------------------------------------------------------------------------------------------------


def loopback_bytes() -> int | None:
    """What the loopback interface has sent so far; None where the system does not say."""
    try:
        lines = _INTERFACE.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None


def _measure(rank: int, processes: int, folder: str, networks: dict[str, Network], repeats: int) -> None:
    """One process: every network and method; the first writes the result."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(minutes=5),
    )
    entries = []
    for (name, network), method in itertools.product(networks.items(), METHODS):
        torch.manual_seed(0)
        inputs, targets = (whole.tensor_split(processes)[rank] for whole in network.batch())
        sizes = sizes_of(network, method)
        settings: dict[str, Any] = {"lr": 0.1, "curvature_samples": sizes.curvature / sizes.samples}
        optimizer = OPTIMIZERS[method](network.build(), network.loss(), **settings)
        gradients = torch.zeros(sizes.parameters)

        def step(optimizer: Any = optimizer, inputs: Any = inputs, targets: Any = targets) -> None:
            optimizer.step(inputs, targets)

        def reduce(gradients: torch.Tensor = gradients) -> None:
            if processes > 1:
                torch.distributed.all_reduce(gradients)

        for _ in range(3):
            step()
        watch, runs = Stopwatch(), []
        with watch.attached(optimizer._group):
            for _ in range(repeats):
                torch.distributed.barrier()
                runs.append(watch.measure(step))
        fastest = sorted(runs, key=_seconds)[: max(1, repeats // 4)]
        names = dict.fromkeys(phase for run in runs for phase in run)

        def mean(place: int, phase: str, runs: Any = fastest) -> float:
            return sum(run.get(phase, [0.0, 0, 0])[place] for run in runs) / len(runs)

        entries.append(
            {
                "network": name,
                "method": method,
                "processes": processes,
                "seconds": sum(mean(0, phase) for phase in names),
                "phases": {phase: mean(0, phase) for phase in names},
                "bytes": {phase: mean(1, phase) for phase in names},
                "messages": sum(mean(2, phase) for phase in names),
                "ddp_bytes": gradients.nbytes if processes > 1 else 0,
                "ddp_seconds": _seconds_of(reduce, repeats),
                "loopback": _loopback(step, max(2, repeats // 3), processes),
                "ddp_loopback": _loopback(reduce, max(2, repeats // 3), processes),
            }
        )
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(entries))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _seconds(run: dict[str, list[float]]) -> float:
    return sum(own[0] for own in run.values())


def _seconds_of(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.distributed.barrier()
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return median(sorted(times)[: max(1, repeats // 4)])


def _loopback(function: Callable[[], object], calls: int, processes: int) -> float | None:
    """Bytes on the loopback interface per call and process: the least of five, as others may use it meanwhile."""
    counts = []
    for _ in range(5):
        torch.distributed.barrier()
        before = loopback_bytes()
        torch.distributed.barrier()
        for _ in range(calls):
            function()
        torch.distributed.barrier()
        after = loopback_bytes()
        torch.distributed.barrier()
        if before is None or after is None:
            return None
        counts.append((after - before) / calls / processes)
    return min(counts)


def bench_processes(
    repeats: int = 40, quick: bool = False, say: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """{"cores", "networks", "processes": an entry per network, method and count, "model", "pays"}."""
    networks, counts = (QUICK, COUNTS[:2]) if quick else (NETWORKS, COUNTS)
    entries: list[dict[str, Any]] = []
    for count in counts:
        say(f"{count} processes ...")
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(
                _measure, (count, folder, networks, repeats), nprocs=count, start_method="spawn"
            )
            entries += json.loads((Path(folder) / "result.json").read_text())
    cores = os.cpu_count() or 1
    model = fit_model(entries, networks, cores)
    return {
        "cores": cores,
        "networks": {name: list(network.widths) for name, network in networks.items()},
        "processes": entries,
        "model": model,
        "pays": where_it_pays(model, networks),
    }


# -- the model -------------------------------------------------------------------------------------------------


def least_squares(matrix: Sequence[Sequence[float]], goal: Sequence[float]) -> list[float]:
    """x >= 0 with the least |A x - b|^2: the best over all sets of columns (there are two or three)."""
    a, b = torch.tensor(matrix, dtype=torch.float64), torch.tensor(goal, dtype=torch.float64)
    best: tuple[float, list[float]] = (float(b @ b), [0.0] * a.shape[1])
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            part = a[:, columns]
            found = torch.linalg.lstsq(part, b.unsqueeze(1), driver="gelsd").solution.squeeze(1)
            if bool((found >= 0).all()):
                rest = float((part @ found - b).square().sum())
                if rest < best[0]:
                    whole = [0.0] * a.shape[1]
                    for column, value in zip(columns, found.tolist(), strict=True):
                        whole[column] = value
                    best = (rest, whole)
    return best[1]


def fit_model(entries: Sequence[dict[str, Any]], networks: dict[str, Network], cores: int) -> dict[str, float]:
    """Seconds per unit of each term, fitted phase by phase, with the largest relative error of a whole step."""

    def fit(
        terms: Callable[[Sizes, dict[str, Any]], list[float]], phases: Sequence[str], alone: bool = True
    ) -> list[float]:
        matrix, goal = [], []
        for entry in entries:
            seconds = sum(entry["phases"].get(phase, 0.0) for phase in phases)
            if seconds > 0 and (alone or entry["processes"] > 1):
                own = terms(sizes_of(networks[entry["network"]], entry["method"]), entry)
                matrix.append([term / seconds for term in own])
                goal.append(1.0)
        return least_squares(matrix, goal) if matrix else [0.0, 0.0]

    def crowd(entry: dict[str, Any]) -> float:
        return max(1.0, entry["processes"] / cores)

    fixed, passes = fit(lambda s, e: [crowd(e), crowd(e) * s.pass_work(e["processes"])], _COMPUTED)
    (gram,) = fit(lambda s, e: [crowd(e) * s.gram_work(e["processes"])], ["Gram"])
    (solve,) = fit(lambda s, e: [crowd(e) * s.solve_work(e["processes"])], ["solve"])
    latency, byte = fit(
        lambda s, e: [e["messages"] * math.log2(e["processes"]), s.bytes_sent(e["processes"])],
        _TALKED,
        alone=False,
    )
    messages = [entry["messages"] for entry in entries if entry["processes"] > 1]
    model = {
        "fixed": fixed,
        "pass": passes,
        "gram": gram,
        "solve": solve,
        "latency": latency,
        "byte": byte,
        "messages": float(median(messages)) if messages else 0.0,
    }
    errors = []
    for entry in entries:
        sizes = sizes_of(networks[entry["network"]], entry["method"])
        parts = predict(model, sizes, entry["processes"], cores)
        errors.append(abs(sum(parts.values()) / entry["seconds"] - 1))
    return {**model, "largest_error": max(errors), "median_error": median(errors)}


def predict(model: dict[str, float], sizes: Sizes, processes: int, cores: int | None = None) -> dict[str, float]:
    """Seconds of a step by the model; cores: how many the processes share, by default one each."""
    crowd = 1.0 if cores is None else max(1.0, processes / cores)
    talk = model["messages"] * math.log2(processes) if processes > 1 else 0.0
    return {
        "fixed": crowd * model["fixed"],
        "passes": crowd * model["pass"] * sizes.pass_work(processes),
        "Gram": crowd * model["gram"] * sizes.gram_work(processes),
        "solve": crowd * model["solve"] * sizes.solve_work(processes),
        "latency": model["latency"] * talk,
        "bytes": model["byte"] * sizes.bytes_sent(processes),
    }


RULES = {"N2 fixed": None, "N2 = N1 / 4": 0.25}  # how the curvature samples grow with the batch
_LARGEST = 2**24  # samples of a batch to look at


def scaled(network: Network, method: str, rule: str, samples: int) -> Sizes:
    """The sizes of a batch of so many samples, with the curvature samples by a rule."""
    share = RULES[rule]
    curvature = network.curvature_samples if share is None else max(1, round(share * samples))
    own = sizes_of(network, method)
    return replace(own, samples=samples, curvature=min(curvature, samples))


def efficiency(model: dict[str, float], sizes: Sizes, processes: int) -> float:
    """Seconds of one process over P times those of P."""
    one, many = (sum(predict(model, sizes, count).values()) for count in (1, processes))
    return one / (processes * many)


def smallest_batch(
    model: dict[str, float], network: Network, method: str, rule: str, processes: int
) -> int | None:
    """The smallest power of two of samples at which P processes are at least half as efficient as one.

    None where none up to 2^24 is.
    """
    samples = 32
    while samples <= _LARGEST:
        if efficiency(model, scaled(network, method, rule, samples), processes) >= 0.5:
            return samples
        samples *= 2
    return None


def where_it_pays(model: dict[str, float], networks: dict[str, Network]) -> list[dict[str, Any]]:
    """`smallest_batch` for each network, method, rule, cost of the exchange and number of devices."""
    rows: list[dict[str, Any]] = []
    for name, method, rule, talk, devices in itertools.product(networks, METHODS, RULES, TALK, EXTRAPOLATED):
        samples = smallest_batch(model | TALK[talk], networks[name], method, rule, devices)
        row = {"network": name, "method": method, "rule": rule, "talk": talk}
        rows.append({**row, "devices": devices, "samples": samples})
    return rows
