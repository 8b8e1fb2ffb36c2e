"""Hessian-free: the exact step in the limit, the stopping rule, and the common contract."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import problems
import reference
import woodbury
from cases import every_pair
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
    torch.testing.assert_close(found.x, torch.linalg.solve(A, -b), rtol=1e-6, atol=1e-8)
    assert found.value == pytest.approx(float(0.5 * found.x @ A @ found.x + b @ found.x))


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


@every_pair(
    name=list(problems.PROBLEMS),
    subset={"part": [5, 0, 2, 3], "all": list(range(problems.N))},
    weight_decay=[0.0, 0.1],
)
def test_with_enough_iterations_it_is_the_exact_step(name, subset, weight_decay):
    problem = problems.make(name)
    optimizer = woodbury.HessianFree(
        problem.model, problem.loss, damping=0.1, weight_decay=weight_decay, progress=0.0, max_iterations=300
    )
    for _ in range(2):  # the second starts warm
        theta = reference.flat(list(reference.parameters(problem.model).values())).detach()
        decay = weight_decay * torch.ones_like(theta)
        expected, B, g = reference.dense_direction(
            problem.model,
            problem.loss,
            problem.inputs,
            problem.targets,
            subset,
            0.1,
            "gauss-newton",
            decay=decay,
        )
        p = optimizer.direction(problem.inputs, problem.targets, subset=subset)
        assert reference.relative_error(flatten(p), expected) <= 1e-7
        assert optimizer.verify(problem.inputs, problem.targets, subset=subset) < 1e-7
        info = optimizer.step(problem.inputs, problem.targets, subset=subset)
        predicted = -(g + decay * theta) @ expected - 0.5 * expected @ (B + torch.diag(decay)) @ expected
        torch.testing.assert_close(info.predicted, predicted, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(info.step_norm, expected.norm(), rtol=1e-6, atol=1e-10)


def test_early_termination_predicts_what_its_own_p_gives():
    problem = problems.make("softmax")
    optimizer = woodbury.HessianFree(problem.model, problem.loss, damping=0.01, max_iterations=3)
    _, B, g = reference.dense_direction(
        problem.model, problem.loss, problem.inputs, problem.targets, list(range(7)), 0.01, "gauss-newton"
    )
    p = flatten(optimizer.direction(problem.inputs, problem.targets))
    info = optimizer.step(problem.inputs, problem.targets)
    assert optimizer.iterations == 3
    torch.testing.assert_close(info.predicted, -g @ p - 0.5 * p @ B @ p)


def test_it_takes_models_that_no_layer_rule_covers():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    inputs, targets = torch.randn(5, 1, 4, 4).double(), torch.randint(3, (5,))
    optimizer = woodbury.HessianFree(model, nn.CrossEntropyLoss(), damping=0.1, progress=0.0, max_iterations=300)
    expected, _, _ = reference.dense_direction(
        model, nn.CrossEntropyLoss(), inputs, targets, [0, 3], 0.1, "gauss-newton"
    )
    p = optimizer.direction(inputs, targets, subset=[0, 3])
    assert reference.relative_error(flatten(p), expected) <= 1e-7
    losses = [optimizer.step(inputs, targets).loss.item() for _ in range(10)]
    assert losses[-1] < losses[0]


class Reused(nn.Module):
    """A layer called twice, and a head that shares its weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


def test_layers_called_twice_and_tied_weights_need_no_rule():
    model, loss = Reused().double(), nn.MSELoss()
    inputs, targets = torch.randn(5, 4).double(), torch.randn(5, 4).double()
    optimizer = woodbury.HessianFree(model, loss, damping=0.1, progress=0.0)
    expected, _, _ = reference.dense_direction(model, loss, inputs, targets, [0, 3], 0.1, "gauss-newton")
    p = optimizer.direction(inputs, targets, subset=[0, 3])
    assert reference.relative_error(flatten(p), expected) <= 1e-7
    assert optimizer.step(inputs, targets).accepted


def test_semi_stochastic_step_uses_the_full_gradient():
    problem = problems.make("squared")
    x, t = problem.inputs, problem.targets
    optimizer = woodbury.HessianFree(problem.model, problem.loss, damping=0.1, progress=0.0, max_iterations=300)
    B = reference.curvature_matrix(reference.per_sample(problem.model, problem.loss, x[:3], t[:3]), "gauss-newton")
    g = reference.gradient(problem.model, problem.loss, x, t)
    expected = torch.linalg.solve(B + 0.1 * torch.eye(len(g)).double(), -g)
    p = optimizer.direction(x[:3], t[:3], full=[(x[:4], t[:4]), (x[4:], t[4:])])
    assert reference.relative_error(flatten(p), expected) <= 1e-7


def test_state_copies_and_resume_continue_identically():
    settings = {"curvature_samples": 4, "lr": 0.5}
    problem, other = problems.make("softmax"), problems.make("softmax")
    optimizer = woodbury.HessianFree(problem.model, problem.loss, seed=3, **settings)
    for _ in range(4):
        optimizer.step(problem.inputs, problem.targets)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other.model.load_state_dict(problem.model.state_dict())
    resumed = woodbury.HessianFree(other.model, other.loss, damping=9.0, **settings)
    resumed.damping = optimizer.damping
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), resumed]
    expected = [optimizer.step(problem.inputs, problem.targets).as_dict() for _ in range(3)]
    for twin in twins:
        assert [twin.step(problem.inputs, problem.targets).as_dict() for _ in range(3)] == expected


def test_direction_changes_nothing_and_bad_input_is_refused():
    problem = problems.make("softmax")
    optimizer = woodbury.HessianFree(problem.model, problem.loss, curvature_samples=4)
    optimizer.step(problem.inputs, problem.targets)
    state = pickle.dumps(optimizer.state_dict())
    first = flatten(optimizer.direction(problem.inputs, problem.targets))
    assert torch.equal(first, flatten(optimizer.direction(problem.inputs, problem.targets)))
    with pytest.raises(ValueError, match="nan or inf"):
        optimizer.step(torch.full_like(problem.inputs, torch.nan), problem.targets)
    assert pickle.dumps(optimizer.state_dict()) == state
    for setting in ({"warm_start": 2.0}, {"max_iterations": 0}, {"progress": -1.0}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            woodbury.HessianFree(problem.model, problem.loss, **setting)
