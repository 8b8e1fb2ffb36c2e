"""How the cost of a step grows with N2, the number of classes and the width, beside the paper's cost table.

The table (section 6) gives the extra cost of a step over the gradient, in O-notation:

    SMW-GN   C N2 n + C^2 N2^2 sum m_l + C^3 N2^3
    SMW-NG   N2 n + N2^2 sum m_l + N2^3
    HF       iterations x N2 n
    KFAC     sum m_l^3 + N2 sum m_l^2

Measured is the time of a step less that of an SGD step on the same batch. An exponent is the slope of a
least-squares line through log cost against log value; "predicted" is the same slope for the table's expression
with every constant set to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from woodbury.bench.timing import Network, median_within, optimizer_step, sgd_step

_SECONDS = 2.0  # of timing spent on each point
_REPEATS = 200
_ITERATIONS = 15  # of CG

SWEEPS: dict[str, tuple[tuple[int, ...], Callable[[int], Network]]] = {
    "N2": ((16, 32, 64, 128, 256), lambda m: Network((784, 500, 10), 256, m, _ITERATIONS)),
    "C": ((5, 10, 20, 40, 80), lambda c: Network((784, 500, c), 60, 30, _ITERATIONS)),
    "width": ((128, 256, 512, 1024, 2048), lambda w: Network((w, w, w, 10), 60, 30, _ITERATIONS)),
}


def predicted_cost(name: str, network: Network) -> float:
    """The paper's extra cost with every constant one."""
    m, rows, outputs = network.widths, network.curvature_samples, network.widths[-1]
    n = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(m))
    if name == "smw-gn":
        rows *= outputs
    if name in ("smw-gn", "smw-ng", "smw-ng-bd"):
        return float(rows * n + rows**2 * sum(m) + rows**3)
    if name == "hf":
        return float(network.iterations * rows * n)
    return float(sum(width**3 for width in m) + rows * sum(width**2 for width in m))


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the least-squares line through (log value, log cost)."""
    x, y = [math.log(value) for value in values], [math.log(cost) for cost in costs]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def bench_scale(names: Sequence[str] = ("smw-gn", "smw-ng", "hf", "kfac")) -> dict[str, Any]:
    """{sweep: {"values", "sgd": seconds, optimizer: {"seconds", "exponent", "predicted"}}}."""
    result = {}
    for sweep, (values, network_at) in SWEEPS.items():
        networks = [network_at(value) for value in values]
        reference: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for network in networks:
            torch.manual_seed(0)
            batch = network.batch()
            reference.append(median_within(sgd_step(network, *batch), _SECONDS, _REPEATS))
            for name in names:
                step = optimizer_step(name, network, *batch)
                seconds[name].append(median_within(step, _SECONDS, _REPEATS))
        result[sweep] = {"values": list(values), "sgd": _rounded(reference)} | {
            name: {
                "seconds": _rounded(times),
                "exponent": round(exponent(values, _over(times, reference)), 2),
                "predicted": round(exponent(values, [predicted_cost(name, net) for net in networks]), 2),
            }
            for name, times in seconds.items()
        }
    return result


def _over(times: Sequence[float], reference: Sequence[float]) -> list[float]:
    """What a step costs beyond SGD's; a difference lost in noise counts as a hundredth of SGD's step."""
    return [max(time - base, 0.01 * base) for time, base in zip(times, reference, strict=True)]


def _rounded(times: Sequence[float]) -> list[float]:
    return [float(f"{time:.4g}") for time in times]
