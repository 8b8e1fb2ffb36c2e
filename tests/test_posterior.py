"""The posterior and the tangent kernel against dense matrices by plain autograd; and laplace-torch where it is."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

import bounds
import error_bars
import problems
import reference
import woodbury
from fuzz.models import Parts
from woodbury.posterior import TrainingData

# losses whose Hessian is the curvature, with a likelihood behind them; both more and fewer rows than parameters
NAMES = [
    *("softmax", "softmax-two-classes", "softmax-weighted", "softmax-sum", "logistic-many", "logistic-sum"),
    *("squared", "squared-sum", "one-layer", "residual", "pictures", "sentences", "tokens", "pixels", "counts"),
    *("conv-squared", "few-parameters", "few-parameters-softmax", "half"),
]


def half(outputs, targets):
    """|y|^2 / 2 of the first output and a linear term in the others: a gradient outside the curvature's range."""
    return (outputs - targets)[:, 0].square() / 2 + (outputs * targets)[:, 1:].sum(1)


OWN = {
    "conv-squared": lambda: problems.Problem(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        nn.MSELoss(),
        torch.randn(7, 2, 3, 3),
        torch.randn(7, 3),
    ),
    "few-parameters": lambda: problems.Problem(
        problems.mlp(2, 2, 2), nn.MSELoss(), torch.randn(11, 2), torch.randn(11, 2)
    ),
    "few-parameters-softmax": lambda: problems.Problem(
        problems.mlp(2, 2, 3), nn.CrossEntropyLoss(), torch.randn(11, 2), torch.randint(3, (11,))
    ),
    "half": lambda: problems.Problem(
        problems.mlp(3, 4, 2), problems.Own(half), torch.randn(7, 3), torch.randn(7, 2)
    ),
}
PRIOR, NOISE = 0.7, 0.3
every_name = pytest.mark.parametrize("name", NAMES)


def make(name):
    return problems.make(OWN.get(name, name))


def new_inputs(problem, count=5):
    torch.manual_seed(1)
    like = problem.inputs
    if like.is_floating_point():
        return torch.randn(count, *like.shape[1:], dtype=like.dtype)
    return torch.randint(6, (count, *like.shape[1:]))


def jacobians(model, inputs):
    """(n, C, p)."""
    return torch.stack(reference.jacobians(model, inputs, len(inputs)))


class Dense:
    """Everything in parameter space, from the loss module as a sum and plain autograd."""

    def __init__(self, problem, prior, noise=NOISE, like=None):
        """like: one of the same problem, whose Jacobians are taken."""
        model, data, names = problem.model, (problem.inputs, problem.targets), reference.parameters(problem.model)
        prior = prior if isinstance(prior, dict) else dict.fromkeys(names, prior)
        self.theta = reference.theta(model)
        self.delta = reference.flat([torch.full_like(own, prior[name]) for name, own in names.items()]).detach()
        summed = copy.copy(problem.loss)
        summed.reduction = "sum"
        is_squared = isinstance(summed, nn.MSELoss)
        factor = 1 / (2 * noise) if is_squared else 1.0
        outputs = model(problem.inputs).detach()
        self.nll = factor * float(summed(outputs, problem.targets))
        if is_squared:
            self.nll += outputs.numel() / 2 * math.log(2 * math.pi * noise)
        self.samples = samples = reference.per_sample(model, summed, *data) if like is None else like.samples
        self.P = torch.diag(self.delta) + factor * sum(J.T @ H @ J for J, _, H in samples)
        self.gradients = factor * torch.stack([J.T @ r for J, r, _ in samples])  # of the likelihood

    @property
    def log_evidence(self):
        scatter = float(self.theta @ (self.delta * self.theta))
        ratio = float(torch.logdet(self.P) - self.delta.log().sum())
        return -self.nll - scatter / 2 - ratio / 2


def bound_of(dense):
    return bounds.of_solve(dense.P, dense.delta.min())


def close(actual, expected, bound):
    """Numbers, or tensors relative to their largest entry."""
    scale = float(torch.as_tensor(expected).detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound * scale)


def priors(model):
    return {name: 0.5 + index / 3 for index, name in enumerate(reference.parameters(model))}


def make_posterior(problem, prior=PRIOR, noise=NOISE):
    noise = noise if isinstance(problem.loss, nn.MSELoss) else "evidence"
    return woodbury.posterior(problem.model, problem.loss, problem.inputs, problem.targets, prior, noise)


@every_name
def test_covariance_evidence_and_influence_equal_the_dense_ones(name):
    """With one prior for all parameters, or one by tensor, in turn."""
    problem = make(name)
    prior = priors(problem.model) if NAMES.index(name) % 2 else PRIOR
    dense, posterior = Dense(problem, prior), make_posterior(problem, prior)
    assert abs(posterior.log_evidence - dense.log_evidence) <= bound_of(dense) * max(1, abs(dense.log_evidence))
    x = new_inputs(problem)
    J = jacobians(problem.model, x)
    covariance = J @ torch.linalg.solve(dense.P, J.flatten(0, 1).T).T.reshape(J.shape).mT
    close(posterior.covariance(x), covariance, bound_of(dense))
    variance = covariance.diagonal(dim1=1, dim2=2)
    close(posterior.variance(x), variance.reshape(problem.model(x).shape), bound_of(dense))
    # the term of each sample in the loss as it was given, which divides by problem.count
    samples = reference.per_sample(problem.model, problem.loss, problem.inputs, problem.targets)
    gradients = [J.T @ r for J, r, _ in samples]
    scale = 1 if reference.is_sum(problem.loss) else problem.count / len(problem.targets)
    expected = -scale * torch.stack(gradients) @ torch.linalg.solve(dense.P, dense.gradients.T)
    close(posterior.influence(problem.inputs, problem.targets), expected, bound_of(dense))


def test_influence_is_the_derivative_in_the_weight_of_a_sample():
    """A linear model with squared error: the minimum is known for all weights of the samples."""
    x, t = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    new, goal = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    ones = torch.ones(9, 1).double()
    design = torch.cat([x, ones], 1)

    def losses(weights):
        W = (design.T * weights) @ design / NOISE + PRIOR * torch.eye(4).double()
        solution = torch.linalg.solve(W, (design.T * weights) @ t / NOISE)
        outputs = torch.cat([new, ones[:4]], 1) @ solution
        return (outputs - goal).square().mean(1), solution

    weights = torch.ones(9).double()
    derivative = torch.autograd.functional.jacobian(lambda w: losses(w)[0], weights)
    model, solution = nn.Linear(3, 2).double(), losses(weights)[1]
    with torch.no_grad():
        model.weight.copy_(solution[:3].T)
        model.bias.copy_(solution[3])
    posterior = woodbury.posterior(model, nn.MSELoss(), x, t, PRIOR, NOISE)
    close(posterior.influence(new, goal), derivative, bounds.of_solve(design.T @ design / NOISE, PRIOR))


@pytest.mark.parametrize("name", ["squared", "few-parameters", "softmax", "few-parameters-softmax"])
def test_samples_have_the_mean_and_the_covariance_of_the_posterior(name):
    problem = make(name)
    posterior, x = make_posterior(problem), new_inputs(problem, 3)
    count, generator = 300, torch.Generator().manual_seed(3)
    draws = posterior.sample(x, count, generator).flatten(1)
    J = jacobians(problem.model, x).flatten(0, 1)
    covariance = J @ torch.linalg.solve(Dense(problem, PRIOR).P, J.T)
    deviation = covariance.diagonal().sqrt()
    off = (draws.mean(0) - problem.model(x).detach().flatten()) / deviation * count**0.5
    assert off.abs().max() < 5  # standard errors: each is normal
    seen = torch.cov(draws.T) / deviation / deviation.unsqueeze(1)
    expected = covariance / deviation / deviation.unsqueeze(1)
    # the standard error of an entry is sqrt((1 + correlation^2) / count) <= sqrt(2 / count)
    assert (seen - expected).abs().max() < 5 * (2 / count) ** 0.5
    again, once_more = (posterior.sample(x, 2, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(again, once_more)


@pytest.mark.parametrize(
    "name, prior, noise",
    [
        *(
            (name, *chosen)
            for name in ("squared", "few-parameters", "conv-squared", "squared-sum")
            for chosen in (("evidence", "evidence"), ("evidence", NOISE), (PRIOR, "evidence"))
        ),
        ("squared", "by tensor", "evidence"),
        *((name, "evidence", None) for name in ("softmax", "pictures", "few-parameters-softmax", "logistic-many")),
    ],
)
def test_evidence_is_largest_at_what_it_chooses(name, prior, noise):
    """Of a classifier the prior alone. MacKay: prior |theta|^2 = gamma, noise (n C - gamma) = |y - t|^2 there."""
    problem = make(name)
    prior = priors(problem.model) if prior == "by tensor" else prior
    posterior = make_posterior(problem, prior, noise)
    dense = Dense(problem, posterior.prior, posterior.noise)
    close(posterior.log_evidence, dense.log_evidence, bound_of(dense))
    for factor in (0.9, 1.1):
        if prior == "evidence":
            other = Dense(problem, posterior.prior * factor, posterior.noise, dense)
            assert other.log_evidence < posterior.log_evidence
        if noise == "evidence":
            other = Dense(problem, posterior.prior, posterior.noise * factor, dense)
            assert other.log_evidence < posterior.log_evidence
    gamma = len(dense.theta) - float((dense.delta * torch.linalg.inv(dense.P).diagonal()).sum())
    bound = bound_of(dense) * len(dense.theta)  # of gamma
    if prior == "evidence":
        assert abs(posterior.prior * float(dense.theta @ dense.theta) - gamma) <= bound
    if noise == "evidence":
        error = float((problem.model(problem.inputs) - problem.targets).square().sum().detach())
        assert abs(posterior.noise * (problem.targets.numel() - gamma) - error) <= posterior.noise * bound
    assert prior == "evidence" or posterior.prior == prior
    assert noise == "evidence" or posterior.noise == noise


@every_name
def test_kernel_is_the_product_of_jacobians(name):
    problem = make(name)
    x = new_inputs(problem)
    J, other = jacobians(problem.model, problem.inputs), jacobians(problem.model, x)
    bound = bounds.rounding(J.shape[2])
    close(woodbury.kernel(problem.model, problem.inputs), torch.einsum("iap,jbp->iajb", J, J), bound)
    close(woodbury.kernel(problem.model, problem.inputs, x), torch.einsum("iap,jbp->iajb", J, other), bound)


def test_kernel_between_batches_that_use_other_layers():
    def run(m, x):
        return m.c(torch.tanh(m.b(x) if m.other else m.a(x)))

    layers = {"a": nn.Linear(2, 3), "b": nn.Linear(2, 3), "c": nn.Linear(3, 2)}
    model = Parts(run, **layers, other=False).double()
    x1, x2 = torch.randn(3, 2).double(), torch.randn(4, 2).double()
    hidden = [torch.tanh(model.a(x1)), torch.tanh(model.b(x2))]
    shared = hidden[0] @ hidden[1].T + 1  # through the last layer alone
    expected = torch.einsum("ij,ab->iajb", shared, torch.eye(2).double()).detach()
    first = woodbury.rows(model, None, x1)
    model.other = True
    found = first.gram(woodbury.rows(model, None, x2)).reshape(3, 2, 4, 2)
    close(found, expected, bounds.rounding(len(first.dense()[0])))


def test_single_precision_models_have_a_posterior_in_double_precision():
    problem = make("squared")
    noise = 10 * NOISE  # well conditioned
    exact = make_posterior(problem, noise=noise)
    bound = bounds.of_solve(Dense(problem, PRIOR, noise).P, PRIOR, dtype=torch.float32)
    problem.model.float()
    problem.inputs, problem.targets = problem.inputs.float(), problem.targets.float()
    posterior = make_posterior(problem, noise=noise)
    x = new_inputs(problem)
    assert posterior.variance(x).dtype == torch.float64
    # rows of eps(float32) each; the variance is a difference of terms at most P / PRIOR times as large
    close(posterior.variance(x), exact.variance(x.double()), bound)
    assert posterior.sample(x, 2).dtype == torch.float32


def test_model_and_data_may_change_afterwards_and_dropout_is_off():
    """Where the model is right its own probabilities are best (share 0), with labels swapped the widest (1)."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).double()
    model[0].weight.data = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]).double()
    x = torch.randn(20, 3).double()
    t, new, found = (x[:, 0] > 0).long(), x + 1, []
    for changes in (False, True):
        posterior = woodbury.posterior(model, nn.CrossEntropyLoss(), x, t, PRIOR)
        if changes:
            x.neg_()
            model[0].weight.data.mul_(3)
        found.append([posterior.variance(new), posterior.probabilities(new)])
    assert model.training and all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_data_may_be_a_pair_as_in_fit():
    problem = make("squared")
    data = problem.inputs, problem.targets
    pair = woodbury.posterior(problem.model, problem.loss, data, prior=PRIOR, noise=NOISE)
    assert torch.equal(pair.variance(data[0]), make_posterior(problem).variance(data[0]))


def test_many_inputs_are_taken_in_pieces(monkeypatch):
    problem = make("squared")
    posterior, x, bound = make_posterior(problem), new_inputs(problem, 9), bound_of(Dense(problem, PRIOR))
    whole = posterior.variance(x), posterior.influence(x, torch.zeros(9, 2).double())
    drawn = posterior.sample(x, 2, torch.Generator().manual_seed(0))
    monkeypatch.setattr(sys.modules["woodbury.posterior.laplace"], "_NUMBERS_AT_ONCE", 60)
    close(posterior.variance(x), whole[0], bound)
    close(posterior.influence(x, torch.zeros(9, 2).double()), whole[1], bound)
    close(posterior.sample(x, 2, torch.Generator().manual_seed(0)), drawn, bound)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_formed(monkeypatch):
    problem, module = make("squared"), sys.modules["woodbury.posterior.data"]
    monkeypatch.setattr(module, "_WORTH_ASKING", 0)
    monkeypatch.setattr(module, "available_bytes", lambda device: 4 * 8 * 14**2)  # 7 samples, 2 outputs
    make_posterior(problem)
    monkeypatch.setattr(module, "available_bytes", lambda device: 4 * 8 * 14**2 - 1)
    with pytest.raises(MemoryError, match=r"14 rows of the data and 38 parameters .* fewer samples"):
        make_posterior(problem)


def test_a_function_in_place_of_the_model():
    problem = make("squared")
    scaled = woodbury.posterior(
        *(problem.model, problem.loss, {"x": problem.inputs}, problem.targets, PRIOR, NOISE),
        forward=lambda model, batch: 2 * model(batch["x"]),
    )
    J = 2 * jacobians(problem.model, problem.inputs)
    P = J.flatten(0, 1).T @ J.flatten(0, 1) / NOISE + PRIOR * torch.eye(J.shape[2]).double()
    expected = (J @ torch.linalg.inv(P) @ J.mT).diagonal(dim1=1, dim2=2)
    close(scaled.variance({"x": problem.inputs}), expected, bounds.of_solve(P, PRIOR))


REFUSED = {
    "noise without": ({"noise": 0.1}, "softmax", "CrossEntropyLoss has none"),
    "prior of zero": ({"prior": 0.0}, "squared", "prior must be 'evidence' or a precision"),
    "prior by another name": ({"prior": "mackay"}, "squared", "prior must be 'evidence'"),
    "negative noise": ({"noise": -1}, "squared", "noise must be 'evidence' or a variance"),
    "missing tensor": ({"prior": {"0.weight": 1.0}}, "squared", "'0.bias' is missing"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_wrong_arguments_are_named(case):
    arguments, name, message = REFUSED[case]
    problem = make(name)
    with pytest.raises((ValueError, TypeError), match=message):
        woodbury.posterior(problem.model, problem.loss, problem.inputs, problem.targets, **arguments)
    with pytest.raises(ValueError, match="count must be a whole number from 1 on"):
        make_posterior(problem).sample(problem.inputs, 0)


def test_evidence_without_a_maximum_is_refused():
    problem = make("squared")
    exact = problem.model(problem.inputs).detach()
    for prior in ("evidence", PRIOR):
        with pytest.raises(ValueError, match="fits the targets exactly; pass noise="):
            woodbury.posterior(problem.model, problem.loss, problem.inputs, exact, prior)
    for parameter in problem.model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(ValueError, match="all parameters are zero"):
        woodbury.posterior(problem.model, problem.loss, problem.inputs, problem.targets, noise=NOISE)


# laplace-torch, an implementation that shares no code


@pytest.mark.filterwarnings("ignore")
def test_the_example_compares_with_laplace_torch():
    pytest.importorskip("laplace")
    result = error_bars.compare(6, repeats=1)
    for name in ("laplace-torch, full", "laplace-torch, gp"):
        assert result[name]["largest"] < 1e-6
    assert result["laplace-torch, full"]["evidence"] < 1e-6
    assert result["laplace-torch, diag"]["factor"] > 1.1


@pytest.mark.parametrize("name", ["squared", "few-parameters", "softmax", "few-parameters-softmax", "pictures"])
def test_an_update_of_the_evidence_by_tensor_equals_the_dense_one(name):
    """delta_t <- gamma_t / |theta_t|^2, s <- |y - t|^2 / (n C - gamma), gamma_t = p_t - delta_t tr(P^-1)_t."""
    problem = make(name)
    with torch.no_grad():  # biases of norms are zero
        for own in problem.model.parameters():
            own += 0.1 * torch.randn_like(own)
    prior, is_squared = priors(problem.model), isinstance(problem.loss, nn.MSELoss)
    dense = Dense(problem, prior)
    data = TrainingData(problem.model, problem.loss, None, None, problem.inputs, problem.targets)
    update = data.update(prior, NOISE if is_squared else None)
    trace, start, total = torch.linalg.inv(dense.P).diagonal(), 0, 0.0
    for parameter, own in reference.parameters(problem.model).items():
        stop = start + own.numel()
        gamma = own.numel() - prior[parameter] * float(trace[start:stop].sum())
        expected = gamma / float(dense.theta[start:stop].square().sum())
        close(update.precisions[parameter], expected, bound_of(dense) * own.numel() / gamma)
        start, total = stop, total + gamma
    close(update.determined, total, bound_of(dense) * len(dense.theta) / total)
    close(update.log_evidence, dense.log_evidence, bound_of(dense))
    if is_squared:
        error = float((problem.model(problem.inputs) - problem.targets).detach().square().sum())
        left = problem.targets.numel() - total
        close(update.noise, error / left, bound_of(dense) * len(dense.theta) / left)
    else:
        assert update.noise is None
