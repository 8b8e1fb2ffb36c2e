"""What the paper proves, in numbers: Lemma 1, Theorem 1, and quadratic convergence where it is expected."""

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from woodbury._vector import flatten


def small_nonconvex_problem():
    inputs = torch.randn(24, 3).double()
    targets = torch.sin(inputs.sum(1, keepdim=True)) + 0.3 * torch.randn(24, 1).double()
    return problems.mlp(3, 4, 1).double(), nn.MSELoss(), inputs, targets


def test_lemma_1_predicted_decrease_bounds_gradient_times_step():
    """m(0) - m(p) >= lambda |p|^2 >= c1 |g| |p| with c1 = lambda / (beta + lambda)."""
    for name in problems.PROBLEMS:
        problem = problems.make(name)
        solve = reference.dense_system(problem.model, problem.loss, problem.inputs, problem.targets, [0, 1, 2])
        for kind, method in (("gauss-newton", woodbury.GaussNewton), ("empirical", woodbury.NaturalGradient)):
            _, B, g = solve(1.0, kind)
            beta = torch.linalg.eigvalsh(B)[-1]
            for damping in (1e-3, 0.1, 10.0):
                optimizer = method(problem.model, problem.loss, lr=0.0, damping=damping)
                info = optimizer.step(problem.inputs, problem.targets, subset=[0, 1, 2])
                slack = 1 + bounds.of_solve(B, damping)
                assert info.predicted * slack >= damping * info.step_norm**2
                assert info.predicted * slack >= damping / (beta + damping) * g.norm() * info.step_norm


@pytest.mark.parametrize(
    "method", [woodbury.GaussNewton, pytest.param(woodbury.NaturalGradient, marks=pytest.mark.slow)]
)
def test_theorem_1_semi_stochastic_variant_converges_to_a_stationary_point(method):
    """Full gradients, random S2, theta moves only if rho >= eta: f never rises and |g| falls below 1e-6.

    f is a non-convex loss plus an l2 term, which the method treats as part of f and of the model.
    """
    decay = 0.05
    model, loss, inputs, targets = small_nonconvex_problem()
    loader = [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
    optimizer = method(
        model,
        loss,
        damping=woodbury.LevenbergMarquardt(boost=1.5, drop=0.7),
        curvature_samples=12,
        accept=0.1,
        weight_decay=decay,
        seed=0,
    )

    def objective():
        theta = reference.flat(list(model.parameters())).detach()
        return (loss(model(inputs), targets) + decay / 2 * theta @ theta).item()

    def gradient_norm():
        theta = reference.flat(list(model.parameters())).detach()
        return float((reference.gradient(model, loss, inputs, targets) + decay * theta).norm())

    before, rejected, start = objective(), 0, gradient_norm()
    for step in range(4000):
        rejected += not optimizer.step(inputs, targets, full=loader).accepted
        after = objective()
        assert after <= before * (1 + bounds.rounding(len(targets)))
        before = after
        if step % 10 == 0 and gradient_norm() < 1e-6:
            break
    assert start > 0.1
    assert gradient_norm() < 1e-6
    assert rejected > 0  # so the threshold had an effect


def test_semi_stochastic_step_uses_the_full_gradient_and_the_batch_curvature():
    model, loss, inputs, targets = small_nonconvex_problem()
    loader = [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
    batch, subset = slice(3, 9), [4, 0, 2]
    for kind, method in (("gauss-newton", woodbury.GaussNewton), ("empirical", woodbury.NaturalGradient)):
        optimizer = method(model, loss, damping=0.1)
        samples = reference.per_sample(model, loss, inputs[batch][subset], targets[batch][subset])
        B = reference.curvature_matrix(samples, kind)
        g = reference.gradient(model, loss, inputs, targets)
        expected = torch.linalg.solve(B + 0.1 * torch.eye(len(g)).double(), -g)
        p = optimizer.direction(inputs[batch], targets[batch], subset=subset, full=loader)
        assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B, 0.1)
        before = loss(model(inputs), targets).detach()
        info = optimizer.step(inputs[batch], targets[batch], subset=subset, full=loader)
        after = loss(model(inputs), targets).detach()
        torch.testing.assert_close(info.loss, before)
        torch.testing.assert_close(info.predicted, -g @ expected - 0.5 * expected @ B @ expected)
        torch.testing.assert_close(info.ratio, (before - after) / info.predicted)


def test_overparameterised_regression_reaches_machine_precision_in_twenty_steps():
    inputs = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    targets = torch.sin(3 * inputs)
    model = problems.mlp(1, 40, 40, 1).double()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1e-12)
    losses = [optimizer.step(inputs, targets).loss.item() for _ in range(20)]
    final = nn.MSELoss()(model(inputs), targets).item()
    assert losses[0] > 0.1
    assert final <= 1e-24


def test_damping_follows_the_ratio():
    model, loss, inputs, targets = small_nonconvex_problem()
    rule = woodbury.LevenbergMarquardt(boost=2.0, drop=0.5)
    optimizer = woodbury.GaussNewton(model, loss, damping=rule)
    for _ in range(30):
        before = float(optimizer.state["damping"])
        info = optimizer.step(inputs, targets)
        factor = 2.0 if info.ratio < 0.25 else 0.5 if info.ratio > 0.75 else 1.0
        assert float(optimizer.state["damping"]) == pytest.approx(factor * before, rel=bounds.rounding(1), abs=0)
        assert float(info.damping) == pytest.approx(before + rule.floor, rel=bounds.rounding(1), abs=0)
