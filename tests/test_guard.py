"""Steps that run away: the guard, its warning, and damping relative to the scale of K."""

import math

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from woodbury.policies.damping import FORGETTING, next_scale
from woodbury.policies.guard import LEAST, RUNAWAY, SMOOTHING, WARM_UP, Course


def test_the_level_is_the_smoothed_loss_and_the_best_its_least():
    course = Course.read((), 2.0)
    assert course == (2.0, 2.0, 2.0, 0)
    level, best = 2.0, 2.0
    for count, loss in enumerate((1.0, 3.0, 0.5), start=1):
        course = course.after(loss)
        level = (1 - SMOOTHING) * level + SMOOTHING * loss
        best = min(best, level)
        assert course == pytest.approx((2.0, level, best, count), rel=bounds.rounding(1, steps=count))
    assert Course.read(list(course), 7.0) == course


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
