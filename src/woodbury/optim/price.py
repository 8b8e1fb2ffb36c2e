"""How many curvature samples a step can afford: curvature_samples="auto".

For N1 samples, R rows of curvature, P parameters and layers whose inputs and outputs have W numbers together, a
step takes about so many operations beside the 6 N1 P of an SGD step:

    4 R P      columns sent back, and U p_prev
    2 R^2 W    Gram matrix
    R^3 / 3    Cholesky factorisation

R is the largest with a sum of at most 12 N1 P: then a step has the operations of three SGD steps. Steps so small
that they are bound by the number of operations, and not by their size, get more.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

FREE = 4e6  # operations that take no time beside the calls of a step
FEWEST_ROWS = 16


def affordable_rows(samples: int, parameters: Iterable[Tensor]) -> int:
    """R for a batch of so many samples."""
    shapes = [parameter.shape for parameter in parameters]
    size = sum(shape.numel() for shape in shapes)
    width = sum(shape[0] + shape[1:].numel() for shape in shapes if len(shape) > 1)
    budget = 12.0 * samples * size + FREE
    low, high = FEWEST_ROWS, 1 << 20
    while high - low > 1:  # the cost rises with R
        middle = (low + high) // 2
        cost = 4.0 * middle * size + 2.0 * middle**2 * width + middle**3 / 3
        low, high = (middle, high) if cost <= budget else (low, middle)
    return low
