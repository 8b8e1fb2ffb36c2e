"""Probabilities of classes from the posterior, against dense matrices by autograd, loops and quadrature."""

import math

import numpy as np
import pytest
import torch

import bounds
from test_posterior import PRIOR, Dense, bound_of, jacobians, make, make_posterior, new_inputs
from woodbury.posterior.laplace import SHARES, left_out, mean_softmax, share_by_left_out

NAMES = ["softmax", "softmax-two-classes", "softmax-weighted", "few-parameters-softmax"]
every_name = pytest.mark.parametrize("name", NAMES)


def by_pairs(mean, covariance):
    """The formula of `Posterior.probabilities`, one sample and one pair of classes at a time."""
    rows = []
    for m, V in zip(mean.tolist(), covariance.tolist(), strict=True):
        weights = []
        for k in range(len(m)):
            pairs = [V[j][j] + V[k][k] - 2 * V[j][k] for j in range(len(m))]
            gaps = [(m[j] - m[k]) / math.sqrt(1 + math.pi / 8 * max(own, 0)) for j, own in enumerate(pairs)]
            weights.append(1 / sum(math.exp(own) for own in gaps))
        rows.append([own / sum(weights) for own in weights])
    return torch.tensor(rows, dtype=torch.float64)


def masses(problem):
    """What log p of each class is multiplied by in the loss of each sample, (n, C)."""
    loss, rows = problem.loss, []
    for target in problem.targets.tolist():
        count = problem.model(problem.inputs[:1]).shape[1]
        weight = [1.0] * count if loss.weight is None else loss.weight.tolist()
        row = [loss.label_smoothing / count * own for own in weight]
        row[target] += (1 - loss.label_smoothing) * weight[target]
        rows.append([0.0] * count if target == loss.ignore_index else row)
    return torch.tensor(rows, dtype=torch.float64)


def without_each(problem, dense):
    """Mean and covariance of the logits of each sample, by the dense P without this sample."""
    J, means, covariances = jacobians(problem.model, problem.inputs), [], []
    for own, m, targets in zip(J, problem.model(problem.inputs).detach(), masses(problem), strict=True):
        once = min(1.0, float(targets.sum()))
        p = m.softmax(0)
        H = once * (torch.diag(p) - torch.outer(p, p))
        V = own @ torch.linalg.solve(dense.P - own.T @ H @ own, own.T)
        means.append(m + V @ (once * (p - targets / targets.sum())) if once else m)
        covariances.append(V)
    return torch.stack(means), torch.stack(covariances)


@every_name
def test_samples_left_out_are_those_of_the_dense_posterior(name):
    problem = make(name)
    dense, posterior = Dense(problem, PRIOR), make_posterior(problem)
    expected = without_each(problem, dense)
    with torch.no_grad():
        found = left_out(problem.model(problem.inputs), posterior.covariance(problem.inputs), masses(problem))
    # `left_out` takes 1 - 1e-6 of H: V' has at most 1e-6 |V' H| |V'| less, and |H| <= 1
    bound = bound_of(dense) + 2e-6 * float(torch.linalg.matrix_norm(expected[1], 2).max())
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=0, atol=bound * float(reference.abs().max()))
    chances = [by_pairs(expected[0], share * expected[1]) for share in SHARES]
    losses = [-float((masses(problem) * own.log()).sum()) for own in chances]
    assert posterior.share == SHARES[losses.index(min(losses))]
    torch.testing.assert_close(posterior._data.class_masses, masses(problem))


@every_name
def test_probabilities_are_the_formula_by_pairs_at_the_dense_covariance(name):
    problem = make(name)
    dense, posterior = Dense(problem, PRIOR), make_posterior(problem)
    x = new_inputs(problem)
    J = jacobians(problem.model, x)
    for share in (0.0, 0.5, 1.0):
        posterior.share = share
        covariance = J @ torch.linalg.solve(dense.P, J.flatten(0, 1).T).T.reshape(J.shape).mT
        expected = by_pairs(problem.model(x).detach(), share * covariance)
        found = posterior.probabilities(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=bound_of(dense) * float(covariance.abs().max()))
        torch.testing.assert_close(found.sum(1), torch.ones(5).double(), rtol=bounds.rounding(3), atol=0)
    posterior.share = 0.0
    torch.testing.assert_close(posterior.probabilities(x), problem.model(x).detach().softmax(1))


def test_two_classes_are_close_to_the_mean_of_a_sigmoid():
    # |sigmoid(x) - Phi(sqrt(pi / 8) x)| <= d for all x, and the mean of a Phi is a Phi: it errs by 2 d at most
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    d = float((x.sigmoid() - torch.special.ndtr(math.sqrt(math.pi / 8) * x)).abs().max())
    nodes, weights = (torch.from_numpy(own) for own in np.polynomial.hermite_e.hermegauss(80))
    for m in (-4.0, -1.0, 0.0, 2.0, 6.0):
        for v in (0.1, 1.0, 5.0, 20.0):
            mean = torch.tensor([[0.3, 0.3 + m]], dtype=torch.float64)
            covariance = torch.tensor([[[0.0, 0.0], [0.0, v]]], dtype=torch.float64) + 0.7  # which both share
            exact = float((weights * (m + math.sqrt(v) * nodes).sigmoid()).sum() / weights.sum())
            assert abs(float(mean_softmax(mean, covariance)[0, 1]) - exact) < 2 * d < 0.04


def test_a_sample_that_alone_determines_a_direction_can_be_left_out():
    mean = torch.zeros(1, 2, dtype=torch.float64)
    covariance = 2 * torch.eye(2, dtype=torch.float64).unsqueeze(0)  # V H has the eigenvalue 1
    m, V = left_out(mean, covariance, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert m.isfinite().all() and V.isfinite().all() and V[0, 0, 0] > 1e4


@pytest.mark.parametrize("name", ["squared", "tokens"])
def test_losses_without_classes_are_refused(name):
    problem = make(name)
    with pytest.raises(ValueError, match="probabilities are for CrossEntropyLoss and outputs"):
        make_posterior(problem).probabilities(new_inputs(problem))


def test_the_gaussian_is_too_wide_where_classes_are_separable():
    """Ten samples of one class, one logit w, a prior of variance 100: by quadrature, and by the Gaussian."""
    w = np.linspace(-60, 200, 200_001)
    logarithm = -10 * np.logaddexp(0, -w) - 0.01 * w**2 / 2
    density = np.exp(logarithm - logarithm.max())
    exact = float((density / (1 + np.exp(w))).sum() / density.sum())
    m = float(w[logarithm.argmax()])
    p = 1 / (1 + math.exp(-m))
    V = torch.tensor([[[0.0, 0.0], [0.0, 1 / (10 * p * (1 - p) + 0.01)]]], dtype=torch.float64)
    by_gaussian = float(mean_softmax(torch.tensor([[0.0, m]], dtype=torch.float64), V)[0, 0])
    assert round(exact, 3) == 0.010 and round(by_gaussian, 3) == 0.126
    mean, targets = torch.tensor([[0.0, m]] * 10).double(), torch.tensor([[0.0, 1.0]] * 10).double()
    share = share_by_left_out(mean, V.expand(10, 2, 2), targets)
    assert float(mean_softmax(mean[:1], share * V)[0, 0]) < 2 * exact
