"""Combinations in which every pair of values occurs: most of what the full product finds, in far fewer cases."""

from collections.abc import Mapping
from itertools import combinations, product

import pytest

# Number of random examples for a test that takes a second for ten of them: few by default, more in CI.
every_count = pytest.mark.parametrize("examples", [3, pytest.param(10, marks=pytest.mark.slow)])


def all_pairs(*axes):
    """Tuples with one value per axis, such that any two values of different axes occur together in one of them.

    Greedy: the next tuple is the first of those with the most new pairs. The same axes give the same tuples;
    two axes give their full product.
    """
    places = [range(len(values)) for values in axes]
    left = {((a, i), (b, j)) for a, b in combinations(range(len(axes)), 2) for i in places[a] for j in places[b]}
    cases = []
    while left:
        best = max(product(*places), key=lambda place: len(_pairs(place) & left))
        left -= _pairs(best)
        cases.append(tuple(values[i] for values, i in zip(axes, best, strict=True)))
    return cases


def _pairs(place):
    return set(combinations(enumerate(place), 2))


def every_pair(**axes):
    """Parametrise a test over `all_pairs`; an axis is a list of values, or a dict from names to values."""
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
