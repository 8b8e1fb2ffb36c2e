"""The damping policies by themselves, and policies as plain data."""

import dataclasses
import json
import math
import pydoc

import pytest
import torch

import woodbury
from woodbury.optimizers import OPTIMIZERS
from woodbury.policies.plain import POLICIES, change, from_plain, to_plain


def test_default_damping_has_the_papers_constants_and_thresholds():
    rule = woodbury.LevenbergMarquardt()
    assert (rule.initial, rule.boost, rule.drop, rule.threshold, rule.floor) == (1.0, 1.01, 0.99, 0.25, 1e-3)
    cases = [(-math.inf, 1.01), (math.nan, 1.01), (0.2499, 1.01), (0.25, 1.0), (0.75, 1.0), (0.7501, 0.99)]
    for ratio, factor in cases:
        assert rule.next(2.0, ratio) == 2.0 * factor
        # the same rule on 0-dim tensors, as on a GPU
        assert rule.next(torch.tensor(2.0).double(), torch.tensor(ratio).double()) == 2.0 * factor


@pytest.mark.parametrize("kind", ["smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac"])
@pytest.mark.parametrize("policy", [woodbury.LevenbergMarquardt(), woodbury.Constant(0.5, floor=0.25)])
def test_the_current_damping_is_that_of_the_next_step_and_can_be_set(kind, policy):
    inputs, targets = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    optimizer = OPTIMIZERS[kind](torch.nn.Linear(3, 2).double(), torch.nn.MSELoss(), damping=policy)
    assert optimizer.current_damping == policy.initial + policy.floor
    for damping in (None, 0.75, 7):
        if damping is not None:
            optimizer.current_damping = damping
            # value + floor is rounded twice
            assert optimizer.current_damping == pytest.approx(damping, rel=4e-16, abs=0)
        for _ in range(3):
            expected = optimizer.current_damping
            assert optimizer.step(inputs, targets).damping == expected
    # a policy goes on from there, a constant stays
    value = 7 - policy.floor
    for _ in range(3):
        value = value if isinstance(policy, woodbury.Constant) else policy.next(value, 1.0)
    assert optimizer.current_damping == pytest.approx(value + policy.floor, rel=1e-14, abs=0)


@pytest.mark.parametrize(
    "value, message",
    [(0.0, "more than 0"), (5e-4, "at least 0.001, the floor"), (math.inf, "finite"), ("1", "must be a number")],
)
def test_a_senseless_current_damping_is_refused_and_changes_nothing(value, message):
    optimizer = woodbury.GaussNewton(torch.nn.Linear(3, 2), torch.nn.MSELoss())
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.current_damping = value
    assert optimizer.current_damping == 1.001


def test_a_search_has_no_damping_to_set():
    optimizer = woodbury.GaussNewton(torch.nn.Linear(3, 2), torch.nn.MSELoss(), search=woodbury.CurvedSearch())
    with pytest.raises(AttributeError, match="rungs"):
        optimizer.current_damping = 0.1


def test_help_shows_the_damping_and_the_fields_of_a_step():
    assert "lambda of the next step" in pydoc.render_doc(woodbury.GaussNewton)
    shown = pydoc.render_doc(woodbury.StepInfo)
    for field in dataclasses.fields(woodbury.StepInfo):
        assert f"{field.name}: " in shown.partition("Attributes:")[2].partition("Methods")[0], field.name


# -- as plain data --------------------------------------------------------------------------------------


def example(name):
    """A policy whose fields are not the defaults."""
    if name == "CurvedSearch":
        return woodbury.CurvedSearch(rungs=(1e-3, 1e-5), bend=None, deep=1e-7)
    return POLICIES[name](initial=0.3, floor=0.02)


def test_every_damping_policy_that_woodbury_exports_is_in_the_table():
    exported = [getattr(woodbury, name) for name in woodbury.__all__]
    policies = {own.__name__: own for own in exported if dataclasses.is_dataclass(own) and hasattr(own, "next")}
    assert policies.items() <= POLICIES.items() and len(policies) >= 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_survives_json(name):
    plain = to_plain(example(name))
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}
    assert list(plain) == [name] and set(plain[name]) == fields
    assert from_plain(json.loads(json.dumps(plain))) == example(name)


LM = woodbury.LevenbergMarquardt()
UNKNOWN = [
    (from_plain, ({"Newton": {"initial": 1.0}},), "no policy 'Newton', only LevenbergMarquardt, Constant"),
    (from_plain, ({"Constant": {"initial": 1, "boost": 2}},), "Constant has no field 'boost', only initial, f"),
    (from_plain, ({"Constant": {}},), "Constant.*'initial'"),
    (from_plain, ({"initial": 1.0},), "there is no policy 'initial', only LevenbergMarquardt"),
    (from_plain, ({"Constant": {"initial": 1.0}, "floor": 2.0},), "there is no policy 'Constant', 'floor', only"),
    (change, ("damping", LM, {"bost": 2}), "LevenbergMarquardt has no field 'bost', only initial, boost"),
    (change, ("momentum", 0.9, {"bost": 2}), "momentum has no field 'bost': it is 0.9"),
    (change, ("damping", True, {"bost": 2}), "damping has no field 'bost': it is True"),
    (change, ("blocks", "full", {"bost": 2}), "blocks has no field 'bost': it is 'full'"),
]


@pytest.mark.parametrize("call, arguments, message", UNKNOWN)
def test_an_unknown_policy_or_field_is_named(call, arguments, message):
    with pytest.raises(TypeError, match=message):
        call(*arguments)


@pytest.mark.parametrize(
    "value, fields, expected",
    [
        (woodbury.LevenbergMarquardt(boost=2), {"floor": 0.5}, woodbury.LevenbergMarquardt(boost=2, floor=0.5)),
        ({"Constant": {"initial": 2}}, {"floor": 0.5}, POLICIES["Constant"](2, 0.5)),
        (2, {"floor": 0.5}, POLICIES["Constant"](2.0, 0.5)),
    ],
)
def test_fields_of_a_policy_can_be_changed(value, fields, expected):
    assert change("damping", value, fields) == expected
