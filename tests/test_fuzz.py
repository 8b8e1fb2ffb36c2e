"""Random problems against the dense reference: a short form of `make fuzz-api`, and cases that once failed."""

from itertools import combinations, islice, product

import pytest
import torch

import cases
import woodbury
from fuzz.api import FAILURES, Trial, run_case

SEED, COUNT, AT_ONCE = 2026, 24, 12

# Kinds of problem that failed once: a case of seed 3 that is one, the features that make it one, what was wrong.
KNOWN = {
    889: ("PReLU bare fallback", "PReLU behind a parameter without a rule: wrong rows, or a crash"),
    139: ("LogCosh", "predicted of a registered loss whose Hessian is 1e-91"),
    16: ("GaussNewton", "step_norm at small damping"),
    100: ("two-names fallback NaturalGradient", "one parameter under two names in one module, counted twice"),
    230: ("two-names fallback GaussNewton", "the same, by layer"),
    664: ("ParameterList fallback", "the same, in a list"),
    64: ("per-sample-list", "a list with one entry per sample"),
    20: ("batch-cumsum", "samples mixed by a sum over those before"),
    57: ("batch-middle", "samples mixed in the middle of the batch"),
    106: ("BatchNorm-train", "samples mixed by a batch norm that raises on one sample"),
    36: ("batch-roll", "samples mixed with the one before"),
    63: ("batch-roll fallback subset", "the same, with the fallback and subset="),
    669: ("RNN-positions-first", "samples mixed by a recurrent layer that wants positions first"),
    238: ("batch-sort", "samples sorted in the batch"),
    37: ("batch-softmax", "softmax over the batch"),
    498: ("TransformerEncoder-padded", "ratio of a TransformerEncoder in eval mode with padded positions"),
    1: ("EmbeddingBag-scale_grad_by_freq", "an option of EmbeddingBag where no rule is asked"),
    200: ("Embedding-max_norm", "an option of Embedding where no rule is asked"),
    210: ("Embedding-scale_grad_by_freq HessianFree", "the same, by products"),
    14: ("pos_weight", "pos_weight of shape (C, 1)"),
    78: ("PerOutput", "a registered loss with values (n, C)"),
    77: ("running-statistics NaturalGradient", "running statistics changed"),
    823: ("running-statistics GaussNewton", "the same, by Gauss-Newton"),
    318: ("Linear-sequence inplace", "a layer on sequences followed by an activation in place, refused"),
    192: ("TwiceInside", "a registered layer that uses its parameter twice, refused"),
    672: ("frozen-in_proj", "attention with a frozen input projection"),
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


# -- the choice of test cases: no pair of values is lost ------------------------------------------------


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
