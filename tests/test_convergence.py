"""What the paper proves, in numbers: Lemma 1, Theorem 1, and quadratic convergence where it is expected."""

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury


def test_lemma_1_predicted_decrease_bounds_gradient_times_step():
    """m(0) - m(p) >= lambda |p|^2 >= c1 |g| |p| with c1 = lambda / (beta + lambda)."""
    for name in ("softmax", "squared-sum", "pictures", "tokens-ignored"):
        problem = problems.make(name)
        solve = reference.dense_system(*problem, [0, 1, 2])
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
    inputs = torch.randn(24, 3).double()
    targets = torch.sin(inputs.sum(1, keepdim=True)) + 0.3 * torch.randn(24, 1).double()
    model, loss = problems.mlp(3, 4, 1).double(), nn.MSELoss()
    loader = [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
    settings = {"curvature_samples": 12, "accept": 0.1, "weight_decay": decay, "seed": 0}
    policy = woodbury.LevenbergMarquardt(boost=1.5, drop=0.7)
    optimizer = method(model, loss, damping=policy, **settings)

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
    assert start > 0.1 and gradient_norm() < 1e-6
    assert rejected > 0  # so the threshold had an effect


def test_overparameterised_regression_reaches_machine_precision_in_twenty_steps():
    inputs = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    targets = torch.sin(3 * inputs)
    model = problems.mlp(1, 40, 40, 1).double()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1e-12)
    losses = [optimizer.step(inputs, targets).loss.item() for _ in range(20)]
    final = nn.MSELoss()(model(inputs), targets).item()
    assert losses[0] > 0.1 and final <= 1e-24
