"""The damping policies by themselves."""

import math

import pytest
import torch

import woodbury
from woodbury.damping import as_damping


def test_default_damping_has_the_papers_constants_and_thresholds():
    rule = woodbury.LevenbergMarquardt()
    assert (rule.initial, rule.boost, rule.drop, rule.threshold, rule.floor) == (1.0, 1.01, 0.99, 0.25, 1e-3)
    cases = [(-math.inf, 1.01), (math.nan, 1.01), (0.2499, 1.01), (0.25, 1.0), (0.75, 1.0), (0.7501, 0.99)]
    for ratio, factor in cases:
        assert rule.next(2.0, ratio) == 2.0 * factor
        # the same rule on 0-dim tensors, as on a GPU
        assert rule.next(torch.tensor(2.0).double(), torch.tensor(ratio).double()) == 2.0 * factor


def test_a_number_is_a_constant():
    rule = as_damping(0.5)
    assert (rule.initial, rule.floor) == (0.5, 0.0)
    assert rule.next(0.7, -math.inf) == 0.5


@pytest.mark.parametrize(
    "settings",
    [{"initial": 0}, {"boost": 0.9}, {"drop": 1.1}, {"drop": 0}, {"threshold": 0.5}, {"floor": -1}],
)
def test_senseless_constants_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        woodbury.LevenbergMarquardt(**settings)
