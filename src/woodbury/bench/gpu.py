"""Steps on a CUDA device, in float32 without TF32, against an eager `torch.optim.SGD` step on the same batch.

small      784-500-10, N1/N2 = 60/30: eager (capture=False), and recorded into a CUDA graph (the default)
large      604 million parameters, N1/N2 = 4096/1024
largest    10^9 parameters, N1 = N2 = 1000, with the residual of (B + lambda I) p = -g by products
long       10000 steps of the small network: does a step get slower, does memory grow?
precision  time and error of p with the Gram matrix and its solve in float32 and in float64
mixed      67 million parameters, N1/N2 = 1024/256: passes in bfloat16 (autocast), Gram matrix and solve in float32
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from woodbury import _vector
from woodbury.bench.timing import Network, Step, median_seconds, optimizer_step, sgd_step
from woodbury.optimizers import OPTIMIZERS

SMALL = Network((784, 500, 10), 60, 30, iterations=15)
LARGE = Network((16384, 16384, 16384, 4096, 10), 4096, 1024, iterations=15)
LARGEST = Network((16384, 16384, 16384, 16384, 12288, 10), 1000, 1000, iterations=15)
DEVICE = "cuda"


def bench_gpu(parts: Sequence[str]) -> dict[str, Any]:
    """{"device", "torch", part: numbers}."""
    if not torch.cuda.is_available():
        raise SystemExit("bench gpu needs a CUDA device, and torch finds none here")
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in parts:
        result[part] = PARTS[part]()
        torch.cuda.empty_cache()
    return result


def small() -> dict[str, Any]:
    """Microseconds of each kind of step, and the ratio to eager SGD."""
    steps = {"sgd": _sgd(SMALL)}
    for name in ("smw-ng", "smw-ng-bd", "smw-gn"):
        steps[name] = _step(name, SMALL, capture=False)
        steps[f"{name} recorded"] = _step(name, SMALL)
    seconds = _medians(steps, rounds=30, block=50)
    return {name: {"us": 1e6 * value, "over_sgd": value / seconds["sgd"]} for name, value in seconds.items()}


def _one_step(network: Network, gram_dtype: torch.dtype | None) -> dict[str, Any]:
    """Seconds of a step of SGD and of NG, peak memory of the latter, and the relative residual of its p."""
    rounds: dict[str, list[float]] = {"sgd": [], "smw-ng": []}
    inputs, targets = _batch(network)
    model = network.build().to(DEVICE)
    loss = network.loss()
    settings = {"lr": 1e-3, "curvature_samples": network.curvature_samples, "gram_dtype": gram_dtype}
    optimizer = OPTIMIZERS["smw-ng"](model, loss, **settings)
    steps: dict[str, Step] = {
        "sgd": sgd_step(model, loss, inputs, targets, lr=1e-3),
        "smw-ng": partial(optimizer.step, inputs, targets),
    }
    for index in range(6):
        for name, step in steps.items():
            model.zero_grad()  # gradients that SGD left are not part of the next step's memory
            torch.cuda.reset_peak_memory_stats()
            elapsed = _seconds(step)
            if index:
                rounds[name].append(elapsed)
    peak = torch.cuda.max_memory_allocated() / 2**30
    seconds = {name: median(times) for name, times in rounds.items()}
    residual = float(optimizer.verify(inputs, targets))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples": network.samples,
        "curvature_samples": network.curvature_samples,
        "gram_dtype": str(gram_dtype or torch.float32),
        "seconds": seconds,
        "ratio": seconds["smw-ng"] / seconds["sgd"],
        "peak_gib": peak,
        "residual": residual,
    }


def long(steps: int = 10_000) -> dict[str, Any]:
    """Microseconds per step in the first and the last thousand steps, and the growth of memory in bytes."""
    result: dict[str, Any] = {}
    for kind, capture in (("eager", False), ("recorded", True)):
        step = _step("smw-ng", SMALL, capture=capture)
        for _ in range(100):
            step()
        before = torch.cuda.memory_allocated()
        thousands = [_seconds(step, 1000) for _ in range(steps // 1000)]
        result[kind] = {
            "us_first_1000": 1e6 * thousands[0],
            "us_last_1000": 1e6 * thousands[-1],
            "bytes_gained": torch.cuda.memory_allocated() - before,
        }
    return result


def precision() -> dict[str, Any]:
    """For smw-gn with a small damping: time of a step, and relative error of p against all in float64."""
    network = Network((784, 500, 10), 512, 256, iterations=15)
    inputs, targets = _batch(network)
    exact = _direction(network, inputs.double(), targets, torch.float64, {})
    kinds: dict[str, dict[str, Any]] = {"float32": {}, "gram float64": {"gram_dtype": torch.float64}}
    steps, errors = {"sgd": _sgd(network)}, {}
    for name, settings in kinds.items():
        p = _direction(network, inputs, targets, torch.float32, settings)
        errors[name] = float((p.double() - exact).norm() / exact.norm())
        steps[name] = _step("smw-gn", network, **settings)
    seconds = _medians(steps, rounds=5, block=5)
    return {
        name: {"us": 1e6 * seconds[name], "error": errors[name], "over_sgd": seconds[name] / seconds["sgd"]}
        for name in kinds
    }


def _direction(
    network: Network, inputs: Tensor, targets: Tensor, dtype: torch.dtype, settings: dict[str, Any]
) -> Tensor:
    model = network.build().to(DEVICE, dtype)
    optimizer = OPTIMIZERS["smw-gn"](model, network.loss(), damping=1e-4, **settings)
    subset = torch.arange(network.curvature_samples)
    return _vector.flatten(optimizer.direction(inputs, targets, subset=subset))


def mixed() -> dict[str, Any]:
    """Milliseconds of steps in float32 and with passes in bfloat16, and the relative error of p in the latter."""
    network = Network((8192, 4096, 8192, 10), 1024, 256, iterations=15)
    inputs, targets = _batch(network)
    model, loss = network.build().to(DEVICE), network.loss()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)

    def sgd(cast: bool) -> None:
        plain.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=cast):
            value = loss(model(inputs), targets)
        value.backward()
        plain.step()

    steps: dict[str, Step] = {"sgd": partial(sgd, False), "sgd bfloat16": partial(sgd, True)}
    subset = torch.arange(network.curvature_samples)
    directions = []
    settings = {"lr": 1e-3, "curvature_samples": network.curvature_samples}
    for name, dtype in (("smw-ng", None), ("smw-ng bfloat16", torch.bfloat16)):
        optimizer = OPTIMIZERS["smw-ng"](network.build().to(DEVICE), loss, autocast=dtype, **settings)
        directions.append(_vector.flatten(optimizer.direction(inputs, targets, subset=subset)))
        steps[name] = partial(optimizer.step, inputs, targets)
    seconds = _medians(steps, rounds=7, block=5)
    error = float((directions[1] - directions[0]).norm() / directions[0].norm())
    result: dict[str, Any] = {name: {"ms": 1e3 * value} for name, value in seconds.items()}
    return result | {"error_of_p": error}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "small": small,
    "large": partial(_one_step, LARGE, None),
    # A row has 10^9 numbers, and products of rows need more digits.
    "largest": partial(_one_step, LARGEST, torch.float64),
    "long": long,
    "precision": precision,
    "mixed": mixed,
}


def _batch(network: Network) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs, targets = network.batch()
    return inputs.to(DEVICE), targets.to(DEVICE)


def _sgd(network: Network) -> Step:
    return sgd_step(network.build().to(DEVICE), network.loss(), *_batch(network))


def _step(name: str, network: Network, **settings: Any) -> Step:
    return optimizer_step(name, network, *_batch(network), **settings)


def _medians(steps: dict[str, Step], rounds: int, block: int) -> dict[str, float]:
    """Median seconds of each step, timed in blocks that take turns."""
    return median_seconds(steps, rounds, warmup=block, block=block, clock=_clock)


def _seconds(step: Step, times: int = 1) -> float:
    """Seconds per step, of several steps in a row."""
    return median_seconds({"": step}, repeats=1, warmup=0, block=times, clock=_clock)[""]


def _clock() -> float:
    """The time, once the device has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()
