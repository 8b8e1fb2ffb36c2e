"""Random problems against the dense reference: a short form of `make fuzz-api`, and cases that once failed."""

from itertools import islice

import pytest
import torch

import woodbury
from fuzz.api import FAILURES, Trial, run_case

SEED, COUNT, AT_ONCE = 2026, 24, 12

# Kinds of problem that failed once and have no test of their own: a case of seed 3, its features, what was wrong.
KNOWN = {
    889: ("PReLU bare fallback", "PReLU behind a parameter without a rule: wrong rows, or a crash"),
    139: ("LogCosh", "predicted of a registered loss whose Hessian is 1e-91"),
    669: ("RNN-positions-first", "samples mixed by a recurrent layer that wants positions first"),
}


def failures(results):
    return [f"{r.number}: {r.outcome}: {r.detail}" for r in results if r.outcome in FAILURES]


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_problems_are_right_or_refused(first):
    assert failures([run_case(SEED, number) for number in range(first, first + AT_ONCE)]) == []


@pytest.mark.parametrize("number", KNOWN)
def test_cases_that_once_failed(number):
    features, _ = KNOWN[number]
    result = run_case(3, number)
    # else the generator draws another problem: choose a new number
    assert set(features.split()) <= result.features and failures([result]) == []


def test_a_wrong_direction_is_seen(monkeypatch):
    plain = woodbury.GaussNewton.direction

    def wrong(self, *args, **kwargs):
        return {name: 1.001 * value for name, value in plain(self, *args, **kwargs).items()}

    monkeypatch.setattr(woodbury.GaussNewton, "direction", wrong)
    results = (run_case(SEED, number) for number in range(20))
    seen = (r for r in results if r.outcome == "wrong" and r.detail.startswith("direction: relative error 0.001"))
    assert len(list(islice(seen, 2))) == 2


def test_a_touched_gradient_is_seen(monkeypatch):
    plain = woodbury.NaturalGradient.direction

    def untidy(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return result

    monkeypatch.setattr(woodbury.NaturalGradient, "direction", untidy)
    shown = [number for number in range(20) if Trial(SEED, number).options.method == "NaturalGradient"]
    results = (run_case(SEED, number) for number in shown)
    assert any(r.outcome == "wrong" and r.detail.startswith("direction changed grad") for r in results)
