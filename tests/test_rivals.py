"""KFAC: exact where theory says so, its damping and averages against formulas written out.

Hessian-free: the stopping rule of CG, and models that no layer rule covers.
"""

import copy

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from woodbury._vector import flatten
from woodbury.linalg import minimize_quadratic


def batch(n, features, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = {"dtype": torch.float64, "generator": generator}
    return torch.randn(n, features, **draw), torch.randn(n, outputs, **draw)


def kronecker_block(averages, outputs, width):
    """A (x) G as a matrix over (weight row-major, bias), from entries written out."""
    A, G = averages["inputs"], averages["grads"]
    dense = torch.einsum("op,ij->oipj", G, A)  # (o, i + 1, o, i + 1)
    order = [(o, i) for o in range(outputs) for i in range(width)] + [(o, width) for o in range(outputs)]
    index = torch.tensor([o * (width + 1) + i for o, i in order])
    return dense.reshape(outputs * (width + 1), -1)[index][:, index]


@pytest.mark.parametrize("name", ["softmax", "logistic", "logistic-many", "squared", "a linear network"])
def test_one_sample_and_a_linear_network_are_exact(name):
    """A (x) G is the diagonal block of the Gauss-Newton matrix by dense autograd, for every layer."""
    if name == "a linear network":
        model, loss, (x, t) = (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(),
            nn.MSELoss(),
            batch(9, 3, 2),
        )
    else:
        model, loss, x, t = problems.make(name)
        x, t = x[:1], t[:1]
    B = reference.curvature_matrix(reference.per_sample(model, loss, x, t), "gauss-newton")
    optimizer, start = woodbury.KFAC(model, loss), 0
    optimizer.step(x, t)
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear):
            stop = start + sum(own.numel() for own in module.parameters())
            ours = kronecker_block(optimizer.state["averages"][layer], module.out_features, module.in_features)
            assert reference.relative_error(ours, B[start:stop, start:stop]) <= bounds.rounding(stop - start)
            start = stop


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_step_is_factored_tikhonov_written_out(weight_decay):
    """p = -(G + sqrt(lambda) / pi I)^-1 [gW gb] (A + pi sqrt(lambda) I)^-1, factors by a loop over samples."""
    problem = problems.make("softmax")
    subset, damping = [5, 0, 2, 3], 0.2
    optimizer = woodbury.KFAC(problem.model, problem.loss, damping=damping, weight_decay=weight_decay)
    p = optimizer.direction(problem.inputs, problem.targets, subset=subset)
    first, second = problem.model[0], problem.model[2]
    wanted = dict(problem.model.named_parameters())
    value = problem.loss(problem.model(problem.inputs), problem.targets)
    grads = dict(zip(wanted, torch.autograd.grad(value, list(wanted.values())), strict=True))
    A, G, one = {"0": 0, "2": 0}, {"0": 0, "2": 0}, torch.ones(1, dtype=torch.float64)
    for i in subset:
        x = problem.inputs[i]
        z = first(x).detach()
        v = problem.model[1](z)
        loss_at = lambda y, i=i: problem.loss(y, problem.targets[i])  # noqa: E731
        H = torch.autograd.functional.hessian(loss_at, second(v).detach())
        through = torch.autograd.functional.jacobian(lambda z: second(problem.model[1](z)), z)
        for name, inputs, block in (("0", x, through.T @ H @ through), ("2", v, H)):
            a = torch.cat([inputs, one])
            A[name] = A[name] + torch.outer(a, a) / len(subset)
            G[name] = G[name] + block / len(subset)
    root = (damping + weight_decay) ** 0.5
    for name in A:
        pi = ((A[name].trace() / len(A[name])) / (G[name].trace() / len(G[name]))).sqrt()
        weight, bias = f"{name}.weight", f"{name}.bias"
        rows = torch.cat([grads[weight], grads[bias][:, None]], 1)
        rows = rows + weight_decay * torch.cat([wanted[weight], wanted[bias][:, None]], 1).detach()
        left = torch.linalg.inv(G[name] + root / pi * torch.eye(len(G[name])).double())
        right = torch.linalg.inv(A[name] + root * pi * torch.eye(len(A[name])).double())
        condition = bounds.condition(G[name], root / pi) * bounds.condition(A[name], root * pi)
        found = torch.cat([p[weight], p[bias][:, None]], 1)
        assert reference.relative_error(found, -left @ rows @ right) <= bounds.rounding(rows.numel(), condition)


@pytest.mark.parametrize("name", ["softmax", "logistic", "squared", "one-layer"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("refresh", [1, 3])
def test_predicted_decrease_is_that_of_its_own_model(name, weight_decay, refresh):
    """m(0) - m(p) = -g.p - p (A (x) G) p / 2 with the factors that were inverted, as a dense matrix."""
    problem = problems.make(name)
    settings = {"lr": 0.1, "damping": 0.1, "weight_decay": weight_decay, "refresh": refresh}
    optimizer = woodbury.KFAC(problem.model, problem.loss, **settings)
    used = None
    for step in range(1, 6):
        theta = reference.theta(problem.model)
        g = reference.gradient(*problem)
        p = flatten(optimizer.direction(problem.inputs, problem.targets))
        info = optimizer.step(problem.inputs, problem.targets)
        if step <= 3 or step % refresh == 0:
            used = copy.deepcopy(optimizer.state["averages"])
        modules = {layer: problem.model.get_submodule(layer) for layer in used}
        blocks = [kronecker_block(used[name], own.out_features, own.in_features) for name, own in modules.items()]
        B = torch.block_diag(*blocks)
        predicted = -(g + weight_decay * theta) @ p - 0.5 * p @ B @ p - 0.5 * weight_decay * p @ p
        bound = bounds.of_solve(B, 0.1 + weight_decay)
        assert abs(info.predicted - predicted) <= bound * (g + weight_decay * theta).norm() * p.norm()
        assert abs(info.step_norm - p.norm()) <= bound * p.norm() and info.predicted > 0
        moved = reference.theta(problem.model) - theta
        assert (moved - 0.1 * p).norm() <= bound * p.norm() + bounds.rounding(1) * theta.norm()


def test_averages_follow_the_schedule_of_martens_and_grosse():
    """After step t the average is w old + (1 - w) new with w = min(1 - 1/t, decay)."""
    x, t = batch(8, 3, 2)
    optimizer = woodbury.KFAC(nn.Linear(3, 2).double(), nn.MSELoss(), decay=0.7)
    expected = torch.zeros(4, 4).double()
    for step in range(1, 8):
        part = x[step - 1 : step + 1]
        a = torch.cat([part, torch.ones(2, 1).double()], 1)
        weight = min(1 - 1 / step, 0.7)
        expected = weight * expected + (1 - weight) * a.T @ a / 2
        optimizer.step(part, t[step - 1 : step + 1])
        found = optimizer.state["averages"][""]["inputs"]
        assert reference.relative_error(found, expected) <= bounds.rounding(len(part), steps=step)


def test_inverses_are_taken_at_the_refresh_interval_and_the_first_three_steps():
    problem = problems.make("softmax")
    optimizer = woodbury.KFAC(problem.model, problem.loss, refresh=5)
    changed, before = [], None
    for step in range(1, 12):
        optimizer.step(problem.inputs, problem.targets)
        now = optimizer.state["inverses"]["0"]["grads"]
        if before is None or not torch.equal(now, before):
            changed.append(step)
        before = now
    assert changed == [1, 2, 3, 5, 10]


def test_a_frozen_weight_is_a_constant():
    model = nn.Linear(3, 2).double()
    model.weight.requires_grad_(False)
    x, t = batch(6, 3, 2)
    p = woodbury.KFAC(model, nn.MSELoss(), damping=0.1).direction(x, t)
    assert list(p) == ["bias"]
    # A = 1 and G = h I with h = 2 / C = 1: pi = 1 and p = -g / (1 + sqrt(0.1))^2
    g = (2 / 2) * (model(x) - t).mean(0)
    assert reference.relative_error(p["bias"], -g / (1 + 0.1**0.5) ** 2) <= bounds.rounding(x.numel())


@pytest.mark.parametrize("seed", [0, 1, 3, 6])
@pytest.mark.parametrize("refresh", [1, 20])
def test_factors_that_cannot_be_inverted_make_a_rejected_step_and_are_not_used_later(seed, refresh):
    """Rank-deficient inputs of size 100 at lambda = 1e-12 in float32: Cholesky fails in most steps."""
    torch.manual_seed(seed)
    x, t = torch.randn(40, 3) @ torch.randn(3, 60) * 100, torch.randint(4, (40,))
    model = nn.Sequential(nn.Linear(60, 30), nn.Tanh(), nn.Linear(30, 4))
    policy = woodbury.LevenbergMarquardt(initial=1e-12, floor=0)
    optimizer = woodbury.KFAC(model, nn.CrossEntropyLoss(), damping=policy, refresh=refresh)
    failed = 0
    for _ in range(8):
        before = reference.theta(model)
        info = optimizer.step(x, t)
        after = reference.theta(model)
        if len(optimizer.state["inverses"]) < 2:
            failed += 1
            assert not info.accepted and torch.equal(before, after)
        for inverses in optimizer.state["inverses"].values():
            assert inverses["inputs"].diagonal().min() > 0  # none of those kept is a failed one
    assert failed


def test_a_batch_that_overflows_leaves_the_averages_alone():
    x, t = torch.randn(6, 4), torch.randint(3, (6,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = woodbury.KFAC(model, nn.CrossEntropyLoss())
    assert not optimizer.step(1e25 * x, t).accepted  # before there are any averages
    assert optimizer.step(x, t).accepted
    state = copy.deepcopy(optimizer.state["averages"])
    info = optimizer.step(1e25 * x, t)
    assert torch.isfinite(info.loss) and not info.accepted
    assert all(torch.equal(state[a][b], optimizer.state["averages"][a][b]) for a in state for b in state[a])
    assert optimizer.state["factor_steps"] == 1 and optimizer.step(x, t).accepted


def test_a_parameter_frozen_or_thawed_on_the_way_starts_its_layer_anew():
    problem = problems.make("softmax")
    optimizer = woodbury.KFAC(problem.model, problem.loss, refresh=10)
    for _ in range(5):
        optimizer.step(problem.inputs, problem.targets)
    for frozen in (True, False):
        problem.model[0].bias.requires_grad_(not frozen)
        assert optimizer.step(problem.inputs, problem.targets).accepted
        assert len(optimizer.state["averages"]["0"]["inputs"]) == (5 if frozen else 6)


def test_ignored_targets_leave_the_scale_of_the_mean():
    """One sample that counts beside a copy of it that does not: A (x) G is the exact block."""
    model = problems.mlp(4, 3, bias=False).double()
    inputs, targets = torch.randn(1, 4).double().expand(2, -1), torch.tensor([1, -100])
    loss = nn.CrossEntropyLoss()
    optimizer = woodbury.KFAC(model, loss, damping=1e-3)
    p, alone = (flatten(optimizer.direction(inputs[:n], targets[:n])) for n in (2, 1))
    bound = bounds.of_step(model, loss, inputs[:1], targets[:1], damping=1e-3)
    assert reference.relative_error(p, alone) <= bound
    with pytest.raises(ValueError, match="every target of the batch is ignored"):
        optimizer.step(inputs, torch.tensor([-100, -100]))


@pytest.mark.parametrize("method", [woodbury.KFAC, woodbury.HessianFree])
@pytest.mark.parametrize("given", [{"momentum": 0.9}, {"blocks": "full"}, {"fallback": "autograd"}])
def test_arguments_that_a_method_fixes_are_refused_by_their_names(method, given):
    with pytest.raises(TypeError, match=f"{method.__name__} has no argument '{next(iter(given))}'"):
        method(nn.Linear(3, 2), nn.MSELoss(), **given)


# -- Hessian-free --------------------------------------------------------------------------------------


def test_progress_rule_stops_early_and_where_martens_says():
    """The first i with i > k, phi_i < 0 and (phi_i - phi_{i-k}) / phi_i < k eps, k = max(10, i / 10)."""
    root, b = torch.randn(60, 62).double(), torch.randn(60).double()
    A = root @ root.T + 0.1 * torch.eye(60).double()
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
