"""Hessian-free: the stopping rule of CG, and models that no layer rule covers."""

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from fuzz.models import Parts
from woodbury._vector import flatten
from woodbury.linalg import minimize_quadratic


def quadratic(size):
    root = torch.randn(size, size + 2, dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(size).double(), torch.randn(size, dtype=torch.float64)


@pytest.mark.parametrize("warm", [False, True])
def test_quadratic_is_minimised_and_its_value_reported(warm):
    A, b = quadratic(12)
    start = torch.randn(12).double() if warm else torch.zeros(12).double()
    found = minimize_quadratic(lambda x: A @ x, b, start, progress=0.0, max_iterations=200)
    bound = bounds.of_solve(A, 0.1)
    assert reference.relative_error(found.x, torch.linalg.solve(A, -b)) <= bound
    value = 0.5 * found.x @ A @ found.x + b @ found.x
    assert abs(found.value - value) <= bounds.rounding(len(A) ** 2) * b.norm() * found.x.norm()


def test_progress_rule_stops_early_and_where_martens_says():
    """The first i with i > k, phi_i < 0 and (phi_i - phi_{i-k}) / phi_i < k eps, k = max(10, i / 10)."""
    A, b = quadratic(60)
    eps, values = 5e-3, [0.0]
    for i in range(1, 60):
        x = minimize_quadratic(lambda x: A @ x, b, torch.zeros(60).double(), progress=0.0, max_iterations=i).x
        values.append(float(0.5 * x @ A @ x + b @ x))
    expected = next(
        i
        for i in range(1, 60)
        if i > (k := max(10, i // 10)) and values[i] < 0 and (values[i] - values[i - k]) / values[i] < k * eps
    )
    found = minimize_quadratic(lambda x: A @ x, b, torch.zeros(60).double(), progress=eps, max_iterations=200)
    assert found.iterations == expected < 59


def pictures():
    layers = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    inputs, targets = torch.randn(5, 1, 4, 4).double(), torch.randint(3, (5,))
    return nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), inputs, targets


def reused():
    """A layer called twice, and a head that shares its weight."""
    model = Parts(lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    return model.double(), nn.MSELoss(), torch.randn(5, 4).double(), torch.randn(5, 4).double()


@pytest.mark.parametrize("make", [pictures, reused])
def test_any_model_has_the_dense_step_without_a_rule(make):
    model, loss, inputs, targets = make()
    optimizer = woodbury.HessianFree(model, loss, damping=0.1, progress=0.0, max_iterations=300)
    expected, B, _ = reference.dense_direction(model, loss, inputs, targets, [0, 3], 0.1, "gauss-newton")
    p = optimizer.direction(inputs, targets, subset=[0, 3])
    assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B, 0.1)
    infos = [optimizer.step(inputs, targets) for _ in range(10)]
    assert 0 < optimizer.iterations <= 300
    assert infos[0].accepted and infos[-1].loss < infos[0].loss
