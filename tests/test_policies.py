"""Policies as plain data."""

import dataclasses
import json

import pytest

import woodbury
from woodbury.policies.plain import POLICIES, change, from_plain, to_plain


def example(name):
    """A policy whose fields are not the defaults."""
    if name == "CurvedSearch":
        return woodbury.CurvedSearch(rungs=(1e-3, 1e-5), bend=None, deep=1e-7)
    return POLICIES[name](initial=0.3, floor=0.02)


def test_every_damping_policy_that_woodbury_exports_is_in_the_table():
    exported = [getattr(woodbury, name) for name in woodbury.__all__]
    policies = {
        kind.__name__: kind for kind in exported if dataclasses.is_dataclass(kind) and hasattr(kind, "next")
    }
    assert policies.items() <= POLICIES.items() and len(policies) >= 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_survives_json(name):
    plain = to_plain(example(name))
    assert list(plain) == [name] and set(plain[name]) == {
        field.name for field in dataclasses.fields(POLICIES[name])
    }
    assert from_plain(json.loads(json.dumps(plain))) == example(name)


def test_fields_without_a_name_are_those_of_levenberg_marquardt():
    assert from_plain({"initial": 0.1, "boost": 2.0}) == woodbury.LevenbergMarquardt(initial=0.1, boost=2.0)
    assert from_plain({}) == from_plain({"LevenbergMarquardt": {}}) == woodbury.LevenbergMarquardt()


@pytest.mark.parametrize("value", [0.5, None, "full", [0.9, 0.999]])
def test_other_settings_stay_as_they_are(value):
    assert to_plain(value) == from_plain(value) == value


@pytest.mark.parametrize(
    "plain, message",
    [
        ({"Newton": {"initial": 1.0}}, "there is no policy 'Newton', only LevenbergMarquardt, Constant"),
        ({"Constant": {"initial": 1.0, "boost": 2.0}}, "Constant has no field 'boost', only initial, floor"),
        ({"Constant": {}}, "Constant needs its field 'initial'"),
        ({"initial": 1.0, "bost": 2.0}, "LevenbergMarquardt has no field 'bost', only initial, boost"),
    ],
)
def test_an_unknown_policy_or_field_is_named(plain, message):
    with pytest.raises(TypeError, match=message):
        from_plain(plain)


@pytest.mark.parametrize(
    "value, fields, expected",
    [
        (
            woodbury.LevenbergMarquardt(boost=2.0),
            {"initial": 10},
            woodbury.LevenbergMarquardt(initial=10, boost=2.0),
        ),
        ({"boost": 2.0}, {"initial": 10}, woodbury.LevenbergMarquardt(initial=10, boost=2.0)),
        ({"Constant": {"initial": 2}}, {"floor": 0.5}, POLICIES["Constant"](2, 0.5)),
        (2, {"floor": 0.5}, POLICIES["Constant"](2.0, 0.5)),
    ],
)
def test_fields_of_a_policy_can_be_changed(value, fields, expected):
    assert change("damping", value, fields) == expected


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("damping", woodbury.LevenbergMarquardt(), "LevenbergMarquardt has no field 'bost', only initial, boost"),
        ("momentum", 0.9, "momentum has no field 'bost': it is 0.9"),
        ("damping", True, "damping has no field 'bost': it is True"),
        ("blocks", "full", "blocks has no field 'bost': it is 'full'"),
    ],
)
def test_a_field_that_a_setting_does_not_have_is_named(setting, value, message):
    with pytest.raises(TypeError, match=message):
        change(setting, value, {"bost": 2.0})
