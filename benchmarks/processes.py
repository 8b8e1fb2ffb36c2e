"""A step of several processes: seconds of each phase, bytes beside DDP's gradient reduction, and a cost model.

Each process has one thread and its part of the batch. Where there are more processes than cores they share these.
Of the timed steps the fastest quarter counts: on a machine that others use too the rest tells more of these.

The model is of the seconds of a step on P processes, with N1 samples, N2 of them curvature samples with R columns
each, m = N2 R factor rows, z = N1 - N2 gradient rows, n parameters, n' of them not in the first layer, and w_in
inputs and w_out outputs of all layers:

    passes    a + b (6 N1 n + 2 m n') / P               forward, backward, rows, p, trial
    Gram      c 2 (N1 N2 w_in + m (m + z) w_out) / P    K[:, own rows]
    solve     d (m^3 / 3 + m (m + P))                   the same on every process
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.common import Command, Network, Step, add_quick, figure, say, table
from woodbury._group import Group
from woodbury.displacement import Displacement
from woodbury.optim import sample_space, smw
from woodbury.optim.joint import JointRows
from woodbury.optim.passes import Passes
from woodbury.optimizers import OPTIMIZERS

NETWORKS = {"mnist": Network((784, 500, 10), 256, 64), "cifar10": Network((3072, 400, 400, 10), 256, 64)}
QUICK = {"tiny": Network((12, 8, 4), 16, 8)}
METHODS = ("smw-ng", "smw-gn")
COUNTS = (1, 2, 4)
EXTRAPOLATED = (8, 64, 1024)
# What processes exchange costs as fitted, or (not measured) 20 microseconds a message and 10 GB/s.
TALK: dict[str, dict[str, float]] = {"fitted": {}, "assumed": {"latency": 2e-5, "byte": 1e-10}}
RULES = {"N2 fixed": None, "N2 = N1 / 4": 0.25}  # how the curvature samples grow with the batch
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

Entry = dict[str, Any]
Model = dict[str, float]


# -- measuring ------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds, bytes and messages by phase; what runs inside another phase is not counted there."""

    def __init__(self, group: Group | None = None) -> None:
        self.group, self.messages = group, 0
        self._stack: list[str] = []
        self._last = (0.0, 0, 0)
        self.totals: dict[str, list[float]] = {}

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

    def measure(self, step: Step) -> dict[str, list[float]]:
        """[seconds, bytes given, messages] of a step by phase."""
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
        sizes = sizes_of(network, method)
        settings: dict[str, Any] = {"lr": 0.1, "curvature_samples": sizes.curvature / sizes.samples}
        optimizer = OPTIMIZERS[method](network.build(), network.loss(), **settings)
        gradients = torch.zeros(sizes.parameters)
        step = partial(optimizer.step, *batch)
        reduce = partial(torch.distributed.all_reduce, gradients)
        for _ in range(3):
            step()
        entry = {"network": name, "method": method, "processes": processes}
        entry |= _phases(Stopwatch(optimizer._group), step, repeats)
        entry["ddp_bytes"] = gradients.nbytes if processes > 1 else 0
        entry["loopback"] = _loopback(step, max(2, repeats // 3), processes)
        entry["ddp_loopback"] = _loopback(reduce, max(2, repeats // 3), processes)
        entries.append(entry)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(entries))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _phases(watch: Stopwatch, step: Step, repeats: int) -> Entry:
    """Means over the fastest quarter of the steps: seconds and bytes by phase, and the number of messages."""
    runs = []
    with watch.attached():
        for _ in range(repeats):
            torch.distributed.barrier()
            runs.append(watch.measure(step))
    fastest = sorted(runs, key=_seconds)[: max(1, repeats // 4)]

    def means(place: int) -> dict[str, float]:
        phases = dict.fromkeys(phase for run in runs for phase in run)
        return {phase: fmean(run[phase][place] if phase in run else 0.0 for run in fastest) for phase in phases}

    seconds = means(0)
    return {
        "seconds": sum(seconds.values()),
        "phases": seconds,
        "bytes": means(1),
        "messages": sum(means(2).values()),
    }


def _seconds(run: dict[str, list[float]]) -> float:
    return sum(own[0] for own in run.values())


def loopback_bytes() -> int | None:
    """What the loopback interface has sent so far; None where the system does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    numbers = next((line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")), None)
    return None if numbers is None else int(numbers[8])


def _loopback(function: Step, calls: int, processes: int) -> float | None:
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
        if before is None or after is None:
            return None
        counts.append((after - before) / calls / processes)
    return min(counts)


def bench_processes(repeats: int = 40, quick: bool = False) -> dict[str, Any]:
    """{"cores", "processes": an entry per network, method and count, "model", "pays"}."""
    networks, counts = (QUICK, COUNTS[:2]) if quick else (NETWORKS, COUNTS)
    entries: list[Entry] = []
    for count in counts:
        say(f"{count} processes ...")
        with tempfile.TemporaryDirectory() as folder:
            arguments = (count, folder, networks, repeats)
            multiprocessing.start_processes(_measure, arguments, nprocs=count, start_method="spawn")
            entries += json.loads((Path(folder) / "result.json").read_text())
    cores = os.cpu_count() or 1
    model = fit_model(entries, networks, cores)
    return {"cores": cores, "processes": entries, "model": model, "pays": where_it_pays(model, networks)}


# -- the model ------------------------------------------------------------------------------------------------


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

    def pass_work(self, processes: int) -> float:
        return (6 * self.samples * self.parameters + 2 * self.factor_rows * self.behind_first) / processes

    def gram_work(self, processes: int) -> float:
        rows = self.factor_rows + self.samples - self.curvature  # m + z
        inputs, outputs = self.samples * self.curvature * self.inputs, self.factor_rows * rows * self.outputs
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


def sizes_of(network: Network, method: str) -> Sizes:
    m, outputs, gauss_newton = network.widths, network.widths[-1], method == "smw-gn"
    return Sizes(
        parameters=network.parameters,
        behind_first=replace(network, widths=m[1:]).parameters,
        inputs=sum(m[:-1]),
        outputs=sum(m[1:]),
        samples=network.samples,
        curvature=network.curvature_samples if gauss_newton else network.samples,
        columns=outputs - 1 if gauss_newton and outputs > 1 else 1,
    )


def predict(model: Model, sizes: Sizes, processes: int, cores: int | None = None) -> dict[str, float]:
    """Seconds of a step by the model; cores: how many the processes share, by default one each."""
    crowd = _crowd(processes, cores)
    talk = model["messages"] * math.log2(processes) if processes > 1 else 0.0
    return {
        "fixed": crowd * model["fixed"],
        "passes": crowd * model["pass"] * sizes.pass_work(processes),
        "Gram": crowd * model["gram"] * sizes.gram_work(processes),
        "solve": crowd * model["solve"] * sizes.solve_work(processes),
        "latency": model["latency"] * talk,
        "bytes": model["byte"] * sizes.bytes_sent(processes),
    }


def _crowd(processes: int, cores: int | None) -> float:
    return 1.0 if cores is None else max(1.0, processes / cores)


def fit_model(entries: Sequence[Entry], networks: dict[str, Network], cores: int) -> Model:
    """Seconds per unit of each term, fitted phase by phase, with the relative errors of whole steps."""

    def fit(phases: Sequence[str], terms: Callable[[Entry, Sizes, int], list[float]]) -> list[float]:
        matrix = []
        for entry in entries:
            seconds = sum(entry["phases"].get(phase, 0.0) for phase in phases)
            if seconds > 0:
                own = terms(entry, sizes_of(networks[entry["network"]], entry["method"]), entry["processes"])
                matrix.append([term / seconds for term in own])
        return least_squares(matrix, [1.0] * len(matrix))

    fixed, passes = fit(_COMPUTED, lambda _, s, P: [_crowd(P, cores), _crowd(P, cores) * s.pass_work(P)])
    (gram,) = fit(["Gram"], lambda _, s, P: [_crowd(P, cores) * s.gram_work(P)])
    (solve,) = fit(["solve"], lambda _, s, P: [_crowd(P, cores) * s.solve_work(P)])
    latency, byte = fit(_TALKED, lambda entry, s, P: [entry["messages"] * math.log2(P), s.bytes_sent(P)])
    messages = float(median(entry["messages"] for entry in entries if entry["processes"] > 1))
    model = {"fixed": fixed, "pass": passes, "gram": gram, "solve": solve, "latency": latency, "byte": byte}
    model["messages"] = messages
    errors = []
    for entry in entries:
        sizes = sizes_of(networks[entry["network"]], entry["method"])
        seconds = sum(predict(model, sizes, entry["processes"], cores).values())
        errors.append(abs(seconds / entry["seconds"] - 1))
    return {**model, "largest_error": max(errors), "median_error": median(errors)}


def least_squares(matrix: Sequence[Sequence[float]], goal: Sequence[float]) -> list[float]:
    """x >= 0 with the least |A x - b|^2: the best over all sets of columns (there are two or three)."""
    a, b = torch.tensor(matrix, dtype=torch.float64), torch.tensor(goal, dtype=torch.float64)
    best = torch.zeros(a.shape[1], dtype=torch.float64)
    for chosen in itertools.product((False, True), repeat=a.shape[1]):
        columns = [column for column, is_chosen in enumerate(chosen) if is_chosen]
        x = torch.zeros_like(best)
        x[columns] = torch.linalg.lstsq(a[:, columns], b.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        if bool((x >= 0).all()) and (a @ x - b).norm() < (a @ best - b).norm():
            best = x
    numbers: list[float] = best.tolist()
    return numbers


def scaled(network: Network, method: str, rule: str, samples: int) -> Sizes:
    """The sizes of a batch of so many samples, with the curvature samples by a rule."""
    share = RULES[rule]
    curvature = network.curvature_samples if share is None else max(1, round(share * samples))
    return replace(sizes_of(network, method), samples=samples, curvature=min(curvature, samples))


def efficiency(model: Model, sizes: Sizes, processes: int) -> float:
    """Seconds of one process over P times those of P."""
    one, many = (sum(predict(model, sizes, count).values()) for count in (1, processes))
    return one / (processes * many)


def smallest_batch(model: Model, network: Network, method: str, rule: str, processes: int) -> int | None:
    """The smallest power of two of samples at which P processes are at least half as efficient as one.

    None where none up to 2^24 is.
    """
    for samples in (2**power for power in range(5, 25)):
        if efficiency(model, scaled(network, method, rule, samples), processes) >= 0.5:
            return samples
    return None


def where_it_pays(model: Model, networks: dict[str, Network]) -> list[Entry]:
    """`smallest_batch` for each network, method, rule, cost of the exchange and number of devices."""
    rows: list[Entry] = []
    for name, method, rule, talk in itertools.product(networks, METHODS, RULES, TALK):
        row: Entry = {"network": name, "method": method, "rule": rule, "exchange": talk}
        for devices in EXTRAPOLATED:
            row[f"{devices} devices"] = smallest_batch(model | TALK[talk], networks[name], method, rule, devices)
        rows.append(row)
    return rows


# -- tables and the figure ------------------------------------------------------------------------------------


def processes_tables(result: dict[str, Any]) -> str:
    """Milliseconds by phase, kilobytes beside DDP's, and where many devices pay by the model."""
    times, moved = [], []
    for entry in result["processes"]:
        head = {key: entry[key] for key in ("network", "method", "processes")}
        milliseconds = {phase.replace(" ", "\n"): 1e3 * seconds for phase, seconds in entry["phases"].items()}
        times.append({**head, "all": 1e3 * entry["seconds"], **milliseconds})
        if entry["processes"] > 1:
            counts = {phase: entry["bytes"].get(phase, 0) for phase in _TALKED}
            counts |= {"all": sum(entry["bytes"].values()), "DDP": entry["ddp_bytes"]}
            counts |= {"all, loopback": entry["loopback"], "DDP, loopback": entry["ddp_loopback"]}
            kilobytes = {
                name.replace(" ", "\n"): None if count is None else count / 1e3 for name, count in counts.items()
            }
            moved.append({**head, **kilobytes, "messages": entry["messages"]})
    title = f"Milliseconds of a step by phase, one thread per process on {result['cores']} cores"
    tables = [table(title, times, left=2)]
    title = "Kilobytes that a process puts into collectives per step, and that the loopback interface sends for it"
    tables.append(table(title, moved, left=2))
    title = 'By the model: the smallest batch on which so many devices are half as efficient as one; "-": none'
    tables.append(table(title, result["pays"], left=4))
    return "\n\n".join([*tables, "fitted: " + ", ".join(f"{key} {x:.3g}" for key, x in result["model"].items())])


def draw_processes(runs: Sequence[dict[str, Any]]) -> Any:
    """Seconds by phase and bytes beside DDP's, as measured; below, how well devices are used, by the model."""
    result = runs[-1]
    entries, name = result["processes"], result["processes"][-1]["network"]
    network = (NETWORKS | QUICK)[name]
    whole, panels = figure(12, 8, 2, 2)
    _draw_stacks(panels[0], entries, "phases", [*PHASES, REST], 1e3)
    panels[0].set_title(f"measured: ms of a step by phase, {result['cores']} cores", loc="left", fontsize=11)
    shared = [entry for entry in entries if entry["processes"] > 1]
    _draw_stacks(panels[1], shared, "bytes", _TALKED, 1e-6)
    for place, entry in enumerate(shared):
        panels[1].hlines(entry["ddp_bytes"] / 1e6, place - 0.4, place + 0.4, color="black")
    title = "measured: MB that a process gives per step (lines: DDP's gradients)"
    panels[1].set_title(title, loc="left", fontsize=11)
    samples = [2**power for power in range(5, 21)]
    for panel, (talk, changed) in zip(panels[2:], TALK.items(), strict=True):
        for (place, devices), method in itertools.product(enumerate(EXTRAPOLATED), METHODS):
            sizes = [scaled(network, method, "N2 fixed", count) for count in samples]
            values = [efficiency(result["model"] | changed, own, devices) for own in sizes]
            style = "-" if method == METHODS[0] else "--"
            panel.plot(samples, values, style, color=f"C{place}", label=f"{devices} devices, {method}")
        panel.axhline(0.5, color="#444444", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("samples per step, of all devices")
        title = f"extrapolated: efficiency on {name}, N2 {network.curvature_samples}; exchange as {talk}"
        panel.set_title(title, loc="left", fontsize=11)
    panels[2].legend(fontsize=8, frameon=False)
    return whole


def _draw_stacks(panel: Any, entries: Sequence[Entry], key: str, phases: Sequence[str], unit: float) -> None:
    """A bar per entry, its phases on top of each other."""
    bottoms = [0.0] * len(entries)
    for place, phase in enumerate(phases):
        heights = [unit * entry[key].get(phase, 0.0) for entry in entries]
        panel.bar(range(len(entries)), heights, bottom=bottoms, color=f"C{place}", label=phase)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    labels = ["{network}\n{method}\n{processes}".format(**entry) for entry in entries]
    panel.set_xticks(range(len(entries)), labels, fontsize=7)
    panel.legend(fontsize=7.5, frameon=False, ncols=2)


COMMAND = Command(
    "a step on 1, 2 and 4 processes: seconds by phase, bytes beside DDP's, a cost model (4 minutes)",
    lambda options: bench_processes(3 if options.quick else 40, options.quick),
    processes_tables,
    add_quick,
    draw_processes,
)
