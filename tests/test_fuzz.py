"""Random problems against the dense reference: a short form of `make fuzz-api`, and cases that once failed."""

import pytest
import torch

import woodbury
from fuzz.api import FAILURES, run_case, run_misuse
from fuzz.misuse import MISUSES

SEED, COUNT, AT_ONCE = 2026, 144, 12

# (seed, case) that failed once, with what was wrong
KNOWN_SEEDS = {}


def failures(results):
    return [f"{r.number}: {r.outcome}: {r.detail}" for r in results if r.outcome in FAILURES]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_problems_are_right_or_refused(first):
    assert failures([run_case(SEED, number) for number in range(first, first + AT_ONCE)]) == []


@pytest.mark.parametrize("seed,number", KNOWN_SEEDS)
def test_cases_that_once_failed(seed, number):
    assert failures([run_case(seed, number)]) == []


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused(name):
    assert failures([run_misuse(name)]) == []


def test_a_wrong_direction_is_seen(monkeypatch):
    plain = woodbury.GaussNewton.direction

    def wrong(self, *args, **kwargs):
        return {name: 1.001 * value for name, value in plain(self, *args, **kwargs).items()}

    monkeypatch.setattr(woodbury.GaussNewton, "direction", wrong)
    results = [run_case(SEED, number) for number in range(40)]
    seen = [r for r in results if r.outcome == "wrong" and r.detail.startswith("direction: relative error 0.001")]
    assert len(seen) >= 3


def test_a_changed_buffer_and_a_touched_gradient_are_seen(monkeypatch):
    plain = woodbury.NaturalGradient.direction

    def untidy(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return result

    monkeypatch.setattr(woodbury.NaturalGradient, "direction", untidy)
    results = [run_case(SEED, number) for number in range(40)]
    assert any(r.outcome == "wrong" and r.detail.startswith("direction changed grad") for r in results)
