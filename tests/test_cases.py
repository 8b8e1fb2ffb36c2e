"""The choice of test cases: no pair of values is lost."""

from itertools import combinations, product

import pytest

import cases

SIZES = [(1,), (3, 2), (2, 2, 2), (20, 2, 2, 3), (5, 2, 2, 3, 2, 2), (3, 4, 5), (1, 1, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_occurs(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in zip("abcdef", sizes, strict=False)]
    chosen = cases.all_pairs(*axes)
    for first, second in combinations(range(len(axes)), 2):
        assert {(case[first], case[second]) for case in chosen} == set(product(axes[first], axes[second]))
    assert len(set(chosen)) == len(chosen) and cases.all_pairs(*axes) == chosen


@cases.every_pair(letter={"first": "a", "second": "b"}, number=[1, None], kind=[int, float])
def test_a_test_gets_the_values_and_their_names(letter, number, kind, request):
    name = {"a": "first", "b": "second"}[letter]
    assert request.node.callspec.id == f"{name}-{number}-{kind.__name__}"
