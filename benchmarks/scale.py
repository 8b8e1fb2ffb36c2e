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

import math
from collections.abc import Sequence
from statistics import linear_regression, median
from typing import Any

from benchmarks.common import Command, Network, add_quick, medians_within, own_step, say, sgd_step, table

METHODS = ("smw-gn", "smw-ng", "hf", "kfac")
_SECONDS = 2.5  # of timing per method and point

Sweep = Sequence[tuple[int, Network]]  # the value at each point, and the network there


def _deep(depth: int) -> tuple[int, Network]:
    """n and a network with `depth` hidden layers of 256: n and the sum of the widths grow with the depth."""
    network = Network((256,) * (depth + 1) + (10,), 60, 30)
    return network.parameters, network


SWEEPS: dict[str, Sweep] = {
    "n": [_deep(depth) for depth in (1, 2, 4, 8, 16)],
    "N1": [(n, Network((784, 500, 10), n, 32)) for n in (64, 128, 256, 512, 1024)],
    "N2": [(m, Network((784, 500, 10), 256, m)) for m in (16, 32, 64, 128, 256)],
    "C": [(c, Network((784, 500, c), 60, 30)) for c in (5, 10, 20, 40, 80)],
    "width": [(w, Network((w, w, w, 10), 60, 30)) for w in (128, 256, 512, 1024, 2048)],
}


def predicted_cost(name: str, network: Network) -> float:
    """The extra cost in the paper's table with every constant set to one."""
    m, rows, n = network.widths, network.curvature_samples, network.parameters
    if name == "hf":
        return float(network.iterations * rows * n)
    if name == "kfac":
        return float(sum(width**3 for width in m) + rows * sum(width**2 for width in m))
    if name == "smw-gn":
        rows *= m[-1]
    return float(rows * n + rows**2 * sum(m) + rows**3)


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the least-squares line through (log value, log cost)."""
    return linear_regression([math.log(value) for value in values], [math.log(cost) for cost in costs]).slope


def beyond_sgd(times: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Time of a step minus that of SGD's, at least a hundredth of SGD's (a smaller difference is noise)."""
    return [max(time - base, 0.01 * base) for time, base in zip(times, reference, strict=True)]


def bench_scale(quick: bool = False) -> dict[str, dict[str, Any]]:
    """{sweep: {"values", "sgd": seconds, optimizer: {"seconds", "sgd", "exponent", "predicted"}}}.

    The "sgd" of an optimizer are the SGD steps timed in turns with it. quick: two points, a step or two each.
    """
    return {sweep: _sweep(sweep, points[:2] if quick else points, quick) for sweep, points in SWEEPS.items()}


def _sweep(sweep: str, points: Sweep, quick: bool) -> dict[str, Any]:
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for value, network in points:
        say(f"{sweep} = {value} ...")
        batch = network.batch()
        for name in METHODS:
            steps = {"sgd": sgd_step(network, batch), name: own_step(name, network, batch)}
            pairs[name].append(medians_within(steps, 0.01 if quick else _SECONDS))
    values = [value for value, _ in points]
    result: dict[str, Any] = {"values": values}
    result["sgd"] = [median(pair["sgd"] for pair in at_point) for at_point in zip(*pairs.values(), strict=True)]
    for name in METHODS:
        seconds, reference = [pair[name] for pair in pairs[name]], [pair["sgd"] for pair in pairs[name]]
        result[name] = {
            "seconds": seconds,
            "sgd": reference,
            "exponent": _rounded(exponent(values, beyond_sgd(seconds, reference))),
            "predicted": _rounded(exponent(values, [predicted_cost(name, network) for _, network in points])),
        }
    return result


def _rounded(slope: float) -> float:
    return round(slope, 2) + 0.0  # no -0.0


def scale_table(sweeps: dict[str, dict[str, Any]]) -> str:
    """Optimizers by sweeps: the measured exponent, and in brackets that of the paper's cost table."""
    rows = []
    for name in METHODS:
        row = {"optimizer": name}
        for sweep, points in sweeps.items():
            heading = f"{sweep}\n{points['values'][0]:,} to {points['values'][-1]:,}"
            row[heading] = "{exponent:.2f} ({predicted:.2f})".format(**points[name])
        rows.append(row)
    return table("Exponent of the cost beyond SGD's step: measured (from the paper's cost table)", rows)


COMMAND = Command(
    "growth of the cost with n, N1, N2, classes and width, beside the paper's cost table (10 minutes)",
    lambda options: bench_scale(options.quick),
    scale_table,
    add_quick,
)
