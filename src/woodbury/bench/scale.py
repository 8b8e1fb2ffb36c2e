"""How the cost of a step grows with n, N1, N2, the number of classes and the width, beside the paper's cost table.

The table (section 6) gives the extra cost of a step over the gradient, in O-notation:

    SMW-GN   C N2 n + C^2 N2^2 sum m_l + C^3 N2^3
    SMW-NG   N2 n + N2^2 sum m_l + N2^3
    HF       iterations x N2 n
    KFAC     sum m_l^3 + N2 sum m_l^2

The measured cost is the time of a step minus that of an SGD step on the same batch; the two are timed in turns. An
exponent is the slope of a least-squares line through log cost against log value; "predicted" is the same slope for
the table's expression with every constant set to one. The table covers the direction p only, without N1. Here
every method also evaluates the loss at theta + p on the N1 samples, and the Gram matrix of the SMW methods has
gradient rows of the samples outside S2 beside the factor rows: N1^2 sum m_l.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from woodbury.bench.timing import Network, medians_within, optimizer_step, sgd_step
from woodbury.experiments.models import parameter_count

METHODS = ("smw-gn", "smw-ng", "hf", "kfac")
_SECONDS = 2.5  # of timing per method and point
_REPEATS = 200
_ITERATIONS = 15  # of CG

Sweep = Sequence[tuple[int, Network]]  # the value at each point, and the network there


def _deep(depth: int) -> tuple[int, Network]:
    """n and a network with `depth` hidden layers of 256: n and the sum of the widths grow with the depth."""
    network = Network((256,) * (depth + 1) + (10,), 60, 30, _ITERATIONS)
    return parameter_count(network.widths), network


SWEEPS: dict[str, Sweep] = {
    "n": [_deep(depth) for depth in (1, 2, 4, 8, 16)],
    "N1": [(n, Network((784, 500, 10), n, 32, _ITERATIONS)) for n in (64, 128, 256, 512, 1024)],
    "N2": [(m, Network((784, 500, 10), 256, m, _ITERATIONS)) for m in (16, 32, 64, 128, 256)],
    "C": [(c, Network((784, 500, c), 60, 30, _ITERATIONS)) for c in (5, 10, 20, 40, 80)],
    "width": [(w, Network((w, w, w, 10), 60, 30, _ITERATIONS)) for w in (128, 256, 512, 1024, 2048)],
}
QUICK: dict[str, Sweep] = {
    "n": [_deep(depth) for depth in (1, 2)],
    "N1": [(n, Network((20, 15, 4), n, 5, 3)) for n in (10, 20)],
    "N2": [(m, Network((20, 15, 4), 10, m, 3)) for m in (4, 8)],
    "C": [(c, Network((20, 15, c), 10, 5, 3)) for c in (3, 6)],
    "width": [(w, Network((w, w, 4), 10, 5, 3)) for w in (16, 32)],
}


def predicted_cost(name: str, network: Network) -> float:
    """The extra cost in the paper's table with every constant set to one."""
    m, rows, outputs = network.widths, network.curvature_samples, network.widths[-1]
    n = parameter_count(network.widths)
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


def bench_scale(
    names: Sequence[str] = METHODS, quick: bool = False, say: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """{sweep: {"values", "sgd": seconds, optimizer: {"seconds", "sgd", "exponent", "predicted"}}}.

    The "sgd" of an optimizer are the SGD steps timed in turns with it. quick: tiny networks, a step or two each.
    """
    result = {}
    for sweep, points in (QUICK if quick else SWEEPS).items():
        seconds: dict[str, list[float]] = {name: [] for name in names}
        reference: dict[str, list[float]] = {name: [] for name in names}
        for value, network in points:
            say(f"{sweep} = {value} ...")
            torch.manual_seed(0)
            batch = network.batch()
            for name in names:
                sgd = sgd_step(network.build(), network.loss(), *batch)
                pair = {"sgd": sgd, name: optimizer_step(name, network, *batch)}
                medians = medians_within(pair, 0.01 if quick else _SECONDS, _REPEATS)
                seconds[name].append(medians[name])
                reference[name].append(medians["sgd"])
        values = [value for value, _ in points]
        sgd_seconds = [median(times) for times in zip(*reference.values(), strict=True)]
        result[sweep] = {"values": values, "sgd": sgd_seconds} | {
            name: {
                "seconds": seconds[name],
                "sgd": reference[name],
                "exponent": _slope(values, beyond_sgd(seconds[name], reference[name])),
                "predicted": _slope(values, [predicted_cost(name, net) for _, net in points]),
            }
            for name in names
        }
    return result


def _slope(values: Sequence[float], costs: Sequence[float]) -> float:
    return round(exponent(values, costs), 2) + 0.0  # no -0.0


def beyond_sgd(times: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Time of a step minus that of SGD's, at least a hundredth of SGD's (a smaller difference is noise)."""
    return [max(time - base, 0.01 * base) for time, base in zip(times, reference, strict=True)]
