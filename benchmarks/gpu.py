"""Steps on a CUDA device, in float32 without TF32, against an eager `torch.optim.SGD` step on the same batch.

small      784-500-10, N1/N2 = 60/30: eager (capture=False), and recorded into a CUDA graph (the default)
large      604 million parameters, N1/N2 = 4096/1024
largest    10^9 parameters, N1 = N2 = 1000, with the residual of (B + lambda I) p = -g by products
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.common import Command, Network, median_seconds, own_optimizer, own_step, sgd_step, take_step

SMALL = Network((784, 500, 10), 60, 30)
LARGE = Network((16384, 16384, 16384, 4096, 10), 4096, 1024)
LARGEST = Network((16384, 16384, 16384, 16384, 12288, 10), 1000, 1000)
DEVICE = "cuda"
ROUNDS, BLOCK = 30, 50  # of timing small steps: they take turns, so many in a row


def small() -> dict[str, Any]:
    """Microseconds of each kind of step, and the ratio to eager SGD."""
    batch = SMALL.batch(DEVICE)
    steps = {"sgd": sgd_step(SMALL, batch)}
    for name in ("smw-ng", "smw-ng-bd", "smw-gn"):
        steps[name] = own_step(name, SMALL, batch, capture=False)
        steps[f"{name} recorded"] = own_step(name, SMALL, batch)
    seconds = median_seconds(steps, ROUNDS, warmup=BLOCK, block=BLOCK, clock=_clock)
    return {name: {"us": 1e6 * value, "over_sgd": value / seconds["sgd"]} for name, value in seconds.items()}


def _one_step(network: Network, gram_dtype: torch.dtype | None) -> dict[str, Any]:
    """Seconds of a step of SGD and of NG, peak memory of the latter, and the relative residual of its p."""
    batch, optimizer = (
        network.batch(DEVICE),
        own_optimizer("smw-ng", network, DEVICE, lr=1e-3, gram_dtype=gram_dtype),
    )
    model = optimizer.model
    steps: dict[str, Any] = {
        "sgd": partial(take_step, torch.optim.SGD(model.parameters(), lr=1e-3), model, optimizer.loss, batch),
        "smw-ng": partial(optimizer.step, *batch),
    }
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(6):
        for name, step in steps.items():
            model.zero_grad()  # gradients that SGD left are not part of the next step's memory
            torch.cuda.reset_peak_memory_stats()
            rounds[name] += median_seconds({"": step}, repeats=1, warmup=0, clock=_clock).values()
    peak = torch.cuda.max_memory_allocated() / 2**30
    seconds = {name: median(times[1:]) for name, times in rounds.items()}
    return {
        "parameters": network.parameters,
        "samples": network.samples,
        "curvature_samples": network.curvature_samples,
        "gram_dtype": str(gram_dtype or torch.float32),
        "seconds": seconds,
        "ratio": seconds["smw-ng"] / seconds["sgd"],
        "peak_gib": peak,
        "residual": float(optimizer.verify(*batch)),
    }


def _clock() -> float:
    """The time, once the device has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "small": small,
    "large": partial(_one_step, LARGE, None),
    # A row has 10^9 numbers, and products of rows need more digits.
    "largest": partial(_one_step, LARGEST, torch.float64),
}


def bench_gpu(parts: Sequence[str]) -> dict[str, Any]:
    """{"device", "torch", part: numbers}."""
    if not torch.cuda.is_available():
        raise SystemExit("gpu needs a CUDA device, and torch finds none here")
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in parts:
        result[part] = PARTS[part]()
        torch.cuda.empty_cache()
    return result


def _part(text: str) -> str:
    if text not in PARTS:  # `choices` would not let a list be empty
        raise argparse.ArgumentTypeError(f"no part {text!r}: one of {', '.join(PARTS)}")
    return text


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = f"one or more of {', '.join(PARTS)} (default: all)"
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=text)


COMMAND = Command(
    "steps on a CUDA device, with and without a recording, up to 10^9 parameters (3 minutes)",
    lambda options: bench_gpu(options.parts or list(PARTS)),
    partial(json.dumps, indent=2),
    _add_options,
    one_thread=False,
)
