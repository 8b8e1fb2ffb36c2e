"""The damping policies by themselves and as plain data; the guard; damping relative to the scale of K."""

import dataclasses
import json
import math
import pydoc

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from woodbury.optimizers import OPTIMIZERS
from woodbury.policies.damping import FORGETTING, next_scale
from woodbury.policies.guard import LEAST, RUNAWAY, WARM_UP, Course
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


# -- steps that run away --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "course, decrease, loss, rate, allowed",
    [
        (Course(1.0, 1.0, 1.0), -0.99, 0.5, 1.0, True),  # a rise by less than the level
        (Course(1.0, 1.0, 1.0), -1.01, 0.5, 1.0, False),
        (Course(1.0, 1.0, 1.0), -1.9, 2.0, 1.0, True),  # or than the loss of the batch
        (Course(1.0, 1.0, 1.0), -3.0, 0.5, 0.3, True),  # a rate below 1 goes that far only
        (Course(1.0, 1.0, 1.0), -1.01, 0.5, 2.0, False),
        (Course(1.0, 1.0, 0.1), -0.01, 0.5, 1.0, False),  # running away: no rise at all
        (Course(1.0, 1.0, 0.1), 0.01, 0.5, 1.0, True),
        (Course(1.0, -3.0, -3.0), -2.9, -3.0, 1.0, True),  # a loss may be negative
        (Course(1.0, 1.0, 1.0), math.nan, 0.5, 1.0, False),
    ],
)
def test_what_a_step_may_do(course, decrease, loss, rate, allowed):
    assert course._replace(steps=WARM_UP).allows(decrease, loss, rate, 1.0) is allowed
    assert course._replace(steps=WARM_UP - 1).allows(decrease, loss, rate, 1.0)


def test_running_away_is_far_above_the_best():
    assert not Course(1.0, 0.1 * (1 + RUNAWAY) - 1e-9, 0.1, WARM_UP).runs_away()
    assert Course(1.0, 0.1 * (1 + RUNAWAY) + 1e-9, 0.1, WARM_UP).runs_away()
    assert not Course(1.0, 0.1 * (1 + RUNAWAY) + 1e-9, 0.1, WARM_UP - 1).runs_away()
    # next to nothing beside the first loss
    assert not Course(1.0, LEAST * RUNAWAY - 1e-9, 1e-9, WARM_UP).runs_away()


@pytest.mark.filterwarnings("ignore")
def test_a_rate_of_one_in_noisy_batches_does_not_run_away():
    torch.manual_seed(1)
    inputs = torch.randn(1200, 4)
    targets = inputs[:, :1].sin() + inputs[:, 1:2] * inputs[:, 2:3] + 0.5 * torch.randn(1200, 1)
    targets = (targets - targets.mean()) / targets.std()
    model = problems.network(4, 64, 64, 1, seed=1, dtype=torch.float32)  # without a guard it ends at 5
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), lr=1.0, curvature_samples=0.5)
    for _ in range(4):
        for batch in torch.randperm(1200).split(32):
            optimizer.step(inputs[batch], targets[batch])
    with torch.no_grad():
        assert nn.functional.mse_loss(model(inputs), targets).item() < 1.0  # that of a constant
    assert all(own.isfinite().all() for own in model.parameters())


def test_a_step_that_raises_the_loss_too_far_is_rejected_and_without_a_guard_taken():
    for guard, moves in ((1.0, False), (None, True)):
        torch.manual_seed(0)
        model, inputs = nn.Linear(1, 1).double(), torch.ones(4, 1, dtype=torch.float64)
        optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1e-3, momentum=0.9, guard=guard)
        for _ in range(WARM_UP):
            optimizer.step(inputs, torch.zeros(4, 1, dtype=torch.float64))
        # a huge earlier step, which momentum repeats: the loss rises by far more than its level
        optimizer.state["momentum"] = {name: torch.full_like(own, 1e3) for name, own in model.named_parameters()}
        optimizer.state["damping"] = 1e3
        before = model.weight.item()
        info = optimizer.step(inputs, torch.zeros(4, 1, dtype=torch.float64))
        assert bool(info.accepted) is moves and (model.weight.item() != before) is moves


def test_a_loss_that_runs_away_gives_one_warning_that_names_ways_out():
    model, inputs = nn.Linear(1, 1).double(), torch.randn(8, 1, dtype=torch.float64)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    optimizer.step(inputs, torch.zeros(8, 1, dtype=torch.float64))
    with pytest.warns(RuntimeWarning, match="runs away.*Ways out: a smaller lr.*woodbury.fit") as caught:
        for scale in range(1, 40):
            optimizer.step(inputs, torch.full((8, 1), 10.0 * scale, dtype=torch.float64))
    assert len([own for own in caught if "runs away" in str(own.message)]) == 1


# -- relative damping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [woodbury.GaussNewton, woodbury.NaturalGradient])
@pytest.mark.parametrize("solver", ["cholesky", "cg"])
@pytest.mark.parametrize("name", ["softmax", "squared"])
def test_relative_damping_is_in_units_of_the_trace_of_the_gram_matrix(optimizer, solver, name):
    model, loss, inputs, targets = problems.make(name, torch.float64)
    kind = "gauss-newton" if optimizer is woodbury.GaussNewton else "empirical"
    gram = woodbury.rows(model, loss, inputs, targets, curvature=kind).gram()
    trace, iterations = gram.trace().item(), len(gram) if solver == "cg" else 1  # that round, at most
    policy = woodbury.LevenbergMarquardt(initial=0.05, floor=0.01, relative=True)
    relative = optimizer(model, loss, damping=policy, solver=solver)
    absolute = optimizer(model, loss, damping=0.06 * trace, solver=solver)
    ours, theirs = (reference.flat(list(own.direction(inputs, targets).values())) for own in (relative, absolute))
    bound = bounds.of_step(model, loss, inputs, targets, 0.06 * trace, iterations, curvature=kind)
    assert reference.relative_error(ours, theirs) <= bound
    assert relative.verify(inputs, targets) <= (bound if solver == "cholesky" else 1e-6)
    info = relative.step(inputs, targets)
    of_trace = bounds.rounding(len(ours))
    assert info.damping.item() == pytest.approx(0.06 * trace, rel=of_trace)
    assert relative.state["scale"] == pytest.approx(trace, rel=of_trace)


def test_the_scale_forgets_slowly():
    assert next_scale(2.0, None) == 2.0 and next_scale(2.0, 1.0) == 2.0
    assert next_scale(0.1, 2.0) == FORGETTING * 2.0 and next_scale(0.0, None) == 1.0


def test_targets_in_other_units_leave_relative_steps_alike():
    """A linear model with zero weights: outputs, and so all steps, scale with the targets."""
    paths = []
    for unit in (1.0, 1e3):
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        inputs = torch.randn(20, 3, dtype=torch.float64)
        targets = unit * (inputs.sum(1, keepdim=True) + 1)
        policy = woodbury.LevenbergMarquardt(initial=0.1, relative=True)
        own = woodbury.GaussNewton(model, nn.MSELoss(), damping=policy)
        for _ in range(5):
            own.step(inputs, targets)
        paths.append(reference.flat([value.detach() / unit for value in model.parameters()]))
    bound = bounds.rounding(len(inputs), 1 + 1 / own.current_damping, steps=5)  # relative to the trace
    assert reference.relative_error(*paths) <= bound


def test_relative_damping_is_refused_where_there_is_no_gram_matrix():
    policy = woodbury.LevenbergMarquardt(relative=True)
    for make in (woodbury.KFAC, woodbury.HessianFree):
        with pytest.raises(ValueError, match="relative=False"):
            make(nn.Linear(2, 1), nn.MSELoss(), damping=policy)
    with pytest.raises(ValueError, match="relative=False"):
        woodbury.GaussNewton(nn.Linear(2, 1), nn.MSELoss(), damping=policy, solver="products")
    with pytest.raises(TypeError, match="relative"):
        woodbury.LevenbergMarquardt(relative=1)
