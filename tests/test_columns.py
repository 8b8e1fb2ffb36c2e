"""Sampled columns of S: unbiased, with the exact gradient, and the system that a step then solves."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import problems
import reference
import woodbury
from cases import every_pair
from woodbury.curvature import CURVATURES, SampledGaussNewtonMatrix
from woodbury.losses.factors import dense_factor, sampled_factor
from woodbury.losses.rules import loss_rule

NAMES = ["softmax", "softmax-weighted", "squared", "logistic-many", "tokens-likelihood", "counts-by-rate"]


def exact_factor(name):
    """S of every sample of a problem, its H and its r."""
    problem = problems.make(name)
    rule = loss_rule(problem.loss)
    with torch.no_grad():
        outputs = problem.model(problem.inputs)
    prepared, flat = rule.prepare(problem.loss, outputs, problem.targets), outputs.flatten(1)
    factor = CURVATURES["gauss-newton"].factor(rule, problem.loss, flat, prepared)
    columns = factor.columns()
    return factor, columns.mT @ columns, rule.residual(problem.loss, flat, prepared)


def all_signs(count):
    return [torch.tensor(signs, dtype=torch.float64) for signs in product((-1.0, 1.0), repeat=count)]


def random_factor(samples, columns, outputs):
    """S and e with S e = r for any S, some columns far larger than others."""
    torch.manual_seed(columns)
    matrix = torch.randn(samples, columns, outputs).double() * torch.logspace(-2, 1, columns).double().view(-1, 1)
    e = torch.randn(samples, columns).double()
    r = torch.einsum("nkm,nk->nm", matrix, e)
    return dense_factor(matrix, r), matrix.mT @ matrix, r


@pytest.mark.parametrize("name", [*NAMES, "any"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_mean_over_all_signs_is_the_hessian_and_the_residual_is_exact_for_each(name, count):
    factor, H, r = random_factor(3, 6, 4) if name == "any" else exact_factor(name)
    assert len(H) != factor.width  # samples and columns are not to be confused
    total = torch.zeros_like(H)
    for signs in all_signs(factor.width):
        sampled = sampled_factor(factor, count, signs.expand(len(H), -1))
        columns = sampled.columns()
        assert columns.shape[1] == sampled.width == count
        total += columns.mT @ columns
        image = sampled.matvec(sampled.e)
        torch.testing.assert_close(image if sampled.rest is None else image + sampled.rest, r)
    torch.testing.assert_close(total / 2**factor.width, H)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_error_is_that_of_pairs_of_columns_in_the_same_group(count):
    """E |S~ S~^T - H|^2; groups are read off the columns, which are linear in the signs."""
    factor, H, _ = random_factor(2, 6, 4)
    S, e = factor.columns().mT, factor.e  # (n, m, k)
    u = e / e.norm(dim=1, keepdim=True)
    T = S @ (torch.eye(6).double() - u.unsqueeze(2) * u.unsqueeze(1))
    first, *others = sampled_factor(factor, count, torch.ones(2, 6).double()).columns().unbind(1)
    torch.testing.assert_close(first, (S @ u.unsqueeze(2)).squeeze(2))
    group = torch.zeros(2, 6, dtype=torch.long)
    for i in range(6):
        signs = torch.ones(2, 6).double()
        signs[:, i] = -1
        changed = sampled_factor(factor, count, signs).columns()[:, 1:]
        change = torch.stack([(a - b).norm(dim=1) for a, b in zip(changed.unbind(1), others, strict=True)], 1)
        group[:, i] = change.argmax(1)
        torch.testing.assert_close(change.amax(1), 2 * T[:, :, i].norm(dim=1))
    products = T.mT @ T
    pairs = torch.einsum("ni,nj->nij", *[products.diagonal(dim1=1, dim2=2)] * 2) + products.square()
    pairs[:, range(6), range(6)] = 0
    expected = (pairs * (group.unsqueeze(2) == group.unsqueeze(1))).sum((1, 2))
    errors = []
    for signs in all_signs(6):
        columns = sampled_factor(factor, count, signs.expand(2, -1)).columns()
        errors.append((columns.mT @ columns - H).square().sum((1, 2)))
    torch.testing.assert_close(torch.stack(errors).mean(0), expected)


def test_columns_are_dealt_out_by_size():
    """One group per column and none left over: nothing is random any more."""
    factor, H, _ = random_factor(3, 6, 4)
    torch.manual_seed(0)
    for _ in range(5):
        signs = 2.0 * torch.randint(2, (3, 6)).double() - 1
        columns = sampled_factor(factor, 7, signs).columns()
        torch.testing.assert_close(columns.mT @ columns, H)


def test_the_mean_over_many_draws_is_the_hessian_within_its_standard_error():
    torch.manual_seed(0)
    loss, outputs, targets = nn.CrossEntropyLoss(), 2 * torch.randn(3, 20).double(), torch.tensor([0, 4, 19])
    rule, draws = loss_rule(loss), 2000
    p = outputs.softmax(1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    for count in (1, 4):
        estimates = []
        for seed in range(draws):
            columns = SampledGaussNewtonMatrix(count, seed).factor(rule, loss, outputs, targets).columns()
            estimates.append(columns.mT @ columns)
        stacked = torch.stack(estimates)
        # a mean of independent draws is off by their standard deviation over sqrt(draws); 6 of these
        bound = 6 * ((stacked - H).square().sum((2, 3)).mean(0) / draws).sqrt()
        assert ((stacked.mean(0) - H).norm(dim=(1, 2)) < bound).all()
        assert (bound < 0.5 * H.norm(dim=(1, 2))).all()  # it says something


def build(problem, **options):
    return woodbury.GaussNewton(problem.model, problem.loss, **{"damping": 0.1, "seed": 1} | options)


def flatten(vector):
    return torch.cat([value.flatten() for value in vector.values()])


@pytest.mark.parametrize("name", list(problems.PROBLEMS))
@pytest.mark.parametrize("more", [0, 5])
def test_as_many_columns_as_there_are_give_the_exact_step(name, more):
    problem = problems.make(name)
    with torch.no_grad():
        shape = problem.model(problem.inputs).shape
    count = loss_rule(problem.loss).column_count(shape) + more
    exact = build(problem).direction(problem.inputs, problem.targets)
    sampled = build(problem, columns=count).direction(problem.inputs, problem.targets)
    for key, value in exact.items():
        assert torch.equal(sampled[key], value)


@every_pair(
    name=NAMES,
    columns=[1, 2],
    subset=[[5, 0, 2, 3], list(range(problems.N))],
    options=[{}, {"blocks": "layer"}, {"solver": "products", "solver_tolerance": 1e-13}, {"momentum": 0.5}],
)
def test_the_step_solves_the_sampled_system(name, columns, subset, options):
    problem = problems.make(name)
    optimizer = build(problem, columns=columns, **options)
    optimizer.step(problem.inputs, problem.targets, subset=subset)
    shown = optimizer.direction(problem.inputs, problem.targets, subset=subset)
    assert optimizer.verify(problem.inputs, problem.targets, subset=subset) < 1e-10
    samples = reference.per_sample(problem.model, problem.loss, problem.inputs[subset], problem.targets[subset])
    S = optimizer.curvature._drawn
    if S is None:  # this loss has no more columns than that
        assert columns >= loss_rule(problem.loss).column_count(problem.model(problem.inputs).shape)
        return
    S = S.columns()
    M = len(subset) / problems.N  # of a sum
    if not reference.is_sum(problem.loss):
        M = problems.Problem(problem.model, problem.loss, None, problem.targets[subset]).count
    B = sum((own @ J).T @ (own @ J) for own, (J, _, _) in zip(S, samples, strict=True)) / M
    if "blocks" in options:
        B = B * reference.block_mask(problem.model)
    g = reference.gradient(problem.model, problem.loss, problem.inputs, problem.targets)
    if "momentum" in options:
        g = g - 0.1 * 0.5 * flatten(optimizer.state["momentum"])
    expected = torch.linalg.solve(B + 0.1 * torch.eye(len(B)).double(), -g)
    assert reference.relative_error(flatten(shown), expected) < 1e-10


@pytest.mark.parametrize("name", list(problems.PROBLEMS))
def test_the_gradient_is_exact(name):
    """p = -g / lambda up to B / lambda; verify measures the rest of it."""
    problem = problems.make(name)
    g = reference.gradient(problem.model, problem.loss, problem.inputs, problem.targets)
    for columns in (1, 2):
        p = build(problem, columns=columns, damping=1e12, curvature_samples=0.6).direction(
            problem.inputs, problem.targets
        )
        # lmax(B) is below 1e3 in all of them
        assert reference.relative_error(-1e12 * flatten(p), g) < 1e-9
    optimizer = build(problem, columns=2, curvature_samples=0.6)
    for _ in range(2):
        assert optimizer.verify(problem.inputs, problem.targets) < 1e-10
        optimizer.step(problem.inputs, problem.targets)


def test_full_takes_the_gradient_of_the_loader():
    problem = problems.make("softmax")
    loader = [(problem.inputs, problem.targets)]
    subset = torch.arange(4)
    part = problem.inputs[subset], problem.targets[subset]
    optimizer = build(problem, columns=2)
    p = flatten(optimizer.direction(*part, full=loader))
    samples = reference.per_sample(problem.model, problem.loss, *part)
    S = optimizer.curvature._drawn.columns()
    B = sum((own @ J).T @ (own @ J) for own, (J, _, _) in zip(S, samples, strict=True)) / 4
    g = reference.gradient(problem.model, problem.loss, problem.inputs, problem.targets)
    expected = torch.linalg.solve(B + 0.1 * torch.eye(len(B)).double(), -g)
    assert reference.relative_error(p, expected) < 1e-10


def test_draws_repeat_with_the_seed_differ_between_steps_and_survive_state_dict_and_copies():
    problem, twin = problems.make("softmax"), problems.make("softmax")
    optimizer = build(problem, columns=2, lr=0.3)
    other = build(twin, columns=2, lr=0.3)
    batch = problem.inputs, problem.targets
    first, again = flatten(optimizer.direction(*batch)), flatten(optimizer.direction(*batch))
    assert torch.equal(first, again)  # nothing changes
    before = optimizer.curvature.seed
    theta = flatten(reference.parameters(problem.model)).detach()
    optimizer.step(*batch)
    assert optimizer.curvature.seed == before  # the step that was shown
    moved = flatten(reference.parameters(problem.model)).detach()
    torch.testing.assert_close(moved, theta + 0.3 * first)
    optimizer.direction(*batch)
    assert optimizer.curvature.seed != before
    other.step(*batch)
    assert torch.equal(flatten(reference.parameters(twin.model)), moved)
    fresh = build(twin, columns=2, seed=77, lr=0.3)
    fresh.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    expected = flatten(optimizer.direction(*batch))
    assert torch.equal(flatten(fresh.direction(*batch)), expected)
    assert torch.equal(flatten(copied.direction(*batch)), expected)
    assert not torch.equal(flatten(build(twin, columns=2, seed=78).direction(*batch)), expected)


def test_columns_can_be_changed_later():
    problem = problems.make("softmax")
    optimizer = build(problem, columns=1)
    exact = flatten(build(problem).direction(problem.inputs, problem.targets))
    assert reference.relative_error(flatten(optimizer.direction(problem.inputs, problem.targets)), exact) > 1e-3
    assert optimizer._recordings is None
    optimizer.columns = None
    assert torch.equal(flatten(optimizer.direction(problem.inputs, problem.targets)), exact)
    assert optimizer._recordings is not None
    with pytest.raises(ValueError, match="columns must be a whole number, at least 1"):
        optimizer.columns = 0
    assert optimizer.columns is None


@pytest.mark.parametrize("columns", [0, -1, 1.5, True, "2"])
def test_a_number_of_columns_that_makes_no_sense_is_refused(columns):
    with pytest.raises(ValueError, match="columns must be a whole number, at least 1"):
        build(problems.make("softmax"), columns=columns)


def test_columns_are_refused_where_there_are_none_to_choose_from():
    problem = problems.make("softmax")
    with pytest.raises(ValueError, match="NaturalGradient takes no columns"):
        woodbury.NaturalGradient(problem.model, problem.loss, columns=2)
    with pytest.raises(ValueError, match="search= and columns="):
        build(problem, columns=2, search=woodbury.CurvedSearch())


def test_a_step_with_sampled_columns_trains():
    torch.manual_seed(0)
    model = problems.mlp(6, 12, 20).double()
    inputs = torch.randn(60, 6).double()
    targets = (inputs @ torch.randn(6, 20).double()).argmax(1)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), columns=3, damping=0.1, accept=0.0, seed=0)
    losses = [float(optimizer.step(inputs, targets).loss) for _ in range(25)]
    assert losses[-1] < 0.3 * losses[0]
