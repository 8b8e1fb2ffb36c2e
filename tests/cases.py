"""Combinations in which every pair of values occurs: most of what a full cross finds, in far fewer cases."""

from collections.abc import Mapping
from itertools import combinations, product

import pytest

# How many random examples a test draws that takes a second for ten: few each time, more in CI.
every_count = pytest.mark.parametrize("examples", [8, pytest.param(25, marks=pytest.mark.slow)])


def all_pairs(*axes):
    """Tuples with a value of each axis, such that any two values of different axes meet in one of them.

    Greedy: the next tuple is the first of those that bring the most new pairs together. The same axes always give
    the same tuples; two axes give their full cross.
    """
    places = [range(len(values)) for values in axes]
    left = {((a, i), (b, j)) for a, b in combinations(range(len(axes)), 2) for i in places[a] for j in places[b]}
    chosen = []
    while left:
        best = max(product(*places), key=lambda place: len(_pairs(place) & left))
        left -= _pairs(best)
        chosen.append(tuple(values[i] for values, i in zip(axes, best, strict=True)))
    return chosen


def _pairs(place):
    return set(combinations(enumerate(place), 2))


def every_pair(**axes):
    """Parametrise a test over `all_pairs`; an axis is a list of values, or a dict to them from their names."""
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(_name(value), value) for value in values]
        for values in axes.values()
    ]
    cases = [
        pytest.param(*(value for _, value in case), id="-".join(name for name, _ in case))
        for case in all_pairs(*named)
    ]
    return pytest.mark.parametrize(list(axes), cases)


def _name(value):
    return getattr(value, "__name__", str(value))
