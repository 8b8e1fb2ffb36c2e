"""Random problems against the dense reference: a short form of `make fuzz-api`, and cases that once failed."""

import pytest
import torch

import woodbury
from fuzz.api import FAILURES, run_case, run_misuse
from fuzz.misuse import MISUSES

SEED, COUNT, AT_ONCE = 2026, 144, 12

# (seed, case) that failed once, and what was wrong. They hold for the random numbers that the generator draws
# today: whoever changes what it draws, or in which order, finds other cases here.
KNOWN_SEEDS = {
    (3, 120): "PReLU behind a parameter without a rule, one column per sample: crash",
    (3, 335): "PReLU behind a parameter without a rule, as many columns as samples: wrong rows",
    (3, 769): "PReLU behind a parameter without a rule, one column per sample: crash",
    (3, 139): "predicted of a registered loss whose Hessian is 1e-91",
    (3, 1840): "step_norm at small damping",
    (3, 1941): "step_norm at small damping",
    (3, 100): "one parameter under two names in one module, counted twice",
    (3, 230): "one parameter under two names in one module, counted twice",
    (3, 1010): "one parameter under two names in one module, counted twice",
    (3, 140): "a list with one entry per sample",
    (3, 669): "a list with one entry per sample",
    (3, 20): "samples mixed by a sum over those before",
    (3, 57): "samples mixed in the middle of the batch",
    (3, 83): "samples mixed by a batch norm that raises on one sample",
    (3, 153): "samples mixed with the one before",
    (3, 350): "samples mixed by a recurrent layer that wants positions first",
    (3, 780): "samples sorted in the batch",
    (3, 1321): "softmax over the batch",
    (0, 465): "samples mixed with the one before, seen by few of them, with the fallback and subset=",
    (3, 498): "ratio of a TransformerEncoder in eval mode with padded positions",
    (3, 1): "an option of Embedding or EmbeddingBag where no rule is asked",
    (3, 200): "an option of Embedding or EmbeddingBag where no rule is asked",
    (3, 210): "an option of Embedding or EmbeddingBag where no rule is asked",
    (3, 14): "pos_weight of shape (C, 1)",
    (3, 95): "a registered loss with values (n, C)",
    (3, 77): "running statistics changed",
    (3, 823): "running statistics changed",
    (3, 1085): "running statistics changed",
    (3, 34): "a layer on sequences followed by an activation in place, refused",
    (3, 380): "a layer on sequences followed by an activation in place, refused",
    (3, 373): "a registered layer that uses its parameter twice, refused",
    (3, 1152): "attention with a frozen input projection",
}


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
    results = [run_case(SEED, number) for number in range(20)]
    seen = [r for r in results if r.outcome == "wrong" and r.detail.startswith("direction: relative error 0.001")]
    assert len(seen) >= 2


def test_a_touched_gradient_is_seen(monkeypatch):
    plain = woodbury.NaturalGradient.direction

    def untidy(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return result

    monkeypatch.setattr(woodbury.NaturalGradient, "direction", untidy)
    results = [run_case(SEED, number) for number in range(20)]
    assert any(r.outcome == "wrong" and r.detail.startswith("direction changed grad") for r in results)
