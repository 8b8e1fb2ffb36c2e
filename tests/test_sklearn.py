"""`LMRegressor` and `LMClassifier`: scikit-learn's own checks, and their numbers against plain autograd."""

import pickle
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.datasets import load_iris, make_friedman1, make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import bounds
import reference
import sklearn_diabetes
from benchmarks import estimators
from checks import silence
from woodbury.sklearn import LMClassifier, LMRegressor

QUICK = {"hidden_layer_sizes": 3, "restarts": 1, "max_iter": 8}
CHECKS = [own for kind in (LMRegressor, LMClassifier) for own in estimator_checks_generator(kind(**QUICK))]
NAMES = [f"{type(own).__name__}-{check.func.__name__}" for own, check in CHECKS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(CHECKS)), ids=NAMES)
def test_checks_of_scikit_learn(index):
    estimator, check = CHECKS[index]
    check(estimator)


@pytest.fixture(scope="module")
def noisy():
    """A fit to 300 samples of friedman1 with noise of deviation 1, and 2000 others."""
    X, y = make_friedman1(300, noise=1.0, random_state=3)
    return LMRegressor(random_state=0).fit(X, y), (X, y), make_friedman1(2000, noise=1.0, random_state=4)


def test_the_noise_is_found_and_the_error_bars_hold(noisy):
    regressor, _, (X, y) = noisy
    # about 100 parameters are determined, so 200 of 300 samples tell about the noise: 5 % standard error
    assert 0.75 < regressor.noise_std_ < 1.25
    mean, std = regressor.predict(X, return_std=True)
    inside = np.mean(np.abs(mean - y) < 2 * std)
    assert 0.90 < inside < 0.985  # of normal errors 95.4 %; the model was fitted to 300 samples only
    assert regressor.score(X, y) > 0.9  # the noise alone leaves 0.96
    assert (std > regressor.noise_std_).all()


def dense_posterior(estimator, X, weights, hessian):
    """P and the diagonal of the prior, with hessian(outputs) of the likelihood of a sample."""
    model, prior = estimator.model_, estimator.posterior_.prior
    delta = reference.flat([torch.full_like(own, prior[name]) for name, own in model.named_parameters()]).detach()
    inputs, P = standardised(estimator, X), torch.diag(delta)
    for J, x, weight in zip(reference.jacobians(model, inputs, len(X)), inputs, weights, strict=True):
        P = P + float(weight) * J.T @ hessian(model(x).detach()) @ J
    return P, delta


def standardised(estimator, X):
    return torch.from_numpy((X - estimator._x_mean) / estimator._x_scale)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_standard_deviations_are_those_of_the_dense_posterior(weighted, outputs):
    random = np.random.RandomState(0)
    X, other = random.randn(40, 3), random.randn(6, 3)
    y = np.sin(X[:, :outputs]) + 0.2 * random.randn(40, outputs)
    weights = random.randint(1, 4, 40) if weighted else None
    regressor = LMRegressor((4,), restarts=1, random_state=0).fit(X, y, weights)
    mean, std = regressor.predict(other, return_std=True)
    assert mean.shape == std.shape == (6, outputs)
    noise = regressor.posterior_.noise
    counts = np.ones(40) if weights is None else weights
    P, delta = dense_posterior(regressor, X, counts, lambda y: torch.eye(outputs).double() / noise)
    J = torch.stack(reference.jacobians(regressor.model_, standardised(regressor, other), 6))
    variance = (J @ torch.linalg.inv(P) @ J.mT).diagonal(dim1=1, dim2=2).numpy()
    expected = np.sqrt(variance + noise) * regressor._y_scale
    np.testing.assert_allclose(std, expected, rtol=bounds.of_solve(P, delta.min()))
    noise_std = noise**0.5 * regressor._y_scale
    np.testing.assert_allclose(regressor.noise_std_, noise_std, rtol=bounds.rounding(1))


def test_units_of_inputs_and_targets_do_not_matter():
    random = np.random.RandomState(0)
    X = random.randn(60, 3)
    y = np.tanh(X[:, 0] * X[:, 1]) + 0.1 * random.randn(60)
    plain = LMRegressor((5,), random_state=0).fit(X, y)
    scaled = LMRegressor((5,), random_state=0).fit(1e3 * X + 7, 1e-4 * y - 5)
    mean, std = plain.predict(X, return_std=True)
    other, other_std = scaled.predict(1e3 * X + 7, return_std=True)
    # as the targets lie 5e4 of their deviations from zero they keep 11 digits, and the fit loses some of them
    np.testing.assert_allclose((other + 5) * 1e4, mean, atol=1e-4)
    np.testing.assert_allclose(other_std * 1e4, std, rtol=1e-4)


def small_data():
    random = np.random.RandomState(0)
    X = random.randn(40, 2)
    return X, np.tanh(X[:, 0] - X[:, 1]) + 0.1 * random.randn(40)


SMALL = {"hidden_layer_sizes": (4,), "restarts": 1, "max_iter": 12, "random_state": 0}
UNITS = [2.0**-565, 2.0**565, 2.0**-1000, 2.0**1000]  # 1e-170, 1e170, 1e-301, 1e301: they round nothing


@cache
def small_fit(weighted):
    return LMRegressor(**SMALL).fit(*small_data(), np.arange(1, 41) if weighted else None)


@pytest.mark.filterwarnings("error", "ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("of_x, of_y", [*((x, 1.0) for x in UNITS), *((1.0, y) for y in UNITS), UNITS[:2]])
def test_units_far_from_1_change_nothing(of_x, of_y):
    """With and without weights in turn."""
    weighted = of_x > 1 or of_y < 1
    (X, y), plain = small_data(), small_fit(weighted)
    other = LMRegressor(**SMALL).fit(X * of_x, y * of_y, np.arange(1, 41) if weighted else None)
    mean, std = plain.predict(X, return_std=True)
    other_mean, other_std = other.predict(X * of_x, return_std=True)
    np.testing.assert_array_equal(other_mean / of_y, mean)
    np.testing.assert_array_equal(other_std / of_y, std)
    assert other.noise_std_ / of_y == plain.noise_std_


def test_columns_of_different_units_and_constant_ones():
    X, y = small_data()
    units = np.array([2.0**-565, 2.0**565])
    Y = np.stack([y, np.full(40, 2.0), X[:, 0]], axis=1)
    of_y = [1.0, 2.0**600, 2.0**-600]
    means = LMRegressor(**SMALL).fit(X * units, Y * of_y).predict(X * units) / of_y
    np.testing.assert_array_equal(means, LMRegressor(**SMALL).fit(X, Y).predict(X))
    np.testing.assert_allclose(means[:, 1], 2.0, rtol=1e-3)


def test_one_sample_is_refused():
    X, y = small_data()
    with pytest.raises(ValueError, match=r"1 sample.* a minimum of 2 is required by LMRegressor"):
        LMRegressor(**SMALL).fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="sample_weight is zero for all but 1 samples; give 2"):
        LMRegressor(**SMALL).fit(X, y, np.eye(40)[0])
    with pytest.raises(ValueError, match="zero"):
        LMRegressor(**SMALL).fit(X, y, np.zeros(40))
    pair = LMRegressor(**SMALL).fit(X[:2], y[:2])
    assert all(np.isfinite(own).all() for own in pair.predict(X, return_std=True))


@pytest.mark.parametrize("random_state", [None, 0])
def test_generators_of_torch_are_left_alone(random_state):
    X, y = small_data()
    before = torch.get_rng_state()
    regressor = LMRegressor(**{**SMALL, "random_state": random_state}).fit(X, y, np.ones(40))
    regressor.predict(X, return_std=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again = LMRegressor(**SMALL).fit(X, y).predict(X)
    torch.manual_seed(6)
    np.testing.assert_array_equal(LMRegressor(**SMALL).fit(X, y).predict(X), again)


def test_a_smooth_function_without_noise_is_found():
    X, y = estimators.smooth_function(5, 500)
    regressor = LMRegressor(random_state=0).fit(X[:300], y[:300])
    assert 1 - regressor.score(X[300:], y[300:]) < 1e-3  # 3 % of the deviation; boosted trees have 20 %


def test_noise_is_not_memorised():
    random = np.random.RandomState(0)
    X, y = random.randn(80, 6), random.randn(80)
    regressor = LMRegressor(random_state=0).fit(X, y)
    new = random.randn(500, 6)
    assert np.std(regressor.predict(new)) < 0.6  # of a target of deviation 1 that does not depend on X
    assert regressor.noise_std_ > 0.6


def test_it_works_in_pipelines_searches_and_pickles(noisy):
    regressor, (X, y) = small_fit(False), small_data()
    again = pickle.loads(pickle.dumps(regressor))
    for a, b in zip(again.predict(X, return_std=True), regressor.predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    pipeline = make_pipeline(MinMaxScaler(), LMRegressor(restarts=1, max_iter=20, random_state=0))
    search = GridSearchCV(pipeline, {"lmregressor__hidden_layer_sizes": [(2,), (4, 3)]}, cv=2)
    _, (X, y), _ = noisy
    assert search.fit(X[:80], y[:80]).best_score_ > 0


@pytest.mark.parametrize(
    "parameters, message",
    [
        *(({"hidden_layer_sizes": own}, "hidden_layer_sizes must be a whole") for own in ((0,), True, "20", 0)),
        ({"restarts": 0}, "restarts must be a whole number"),
        ({"max_iter": 2.5}, "max_iter must be a whole number"),
        ({"tol": -1.0}, "tol must not be negative"),
    ],
)
@pytest.mark.parametrize("kind", [LMRegressor, LMClassifier])
def test_wrong_parameters_are_named(kind, parameters, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
        kind(**parameters).fit(np.ones((3, 2)), np.arange(3))


@pytest.mark.parametrize("name, problem", [("regressors", "diabetes"), ("classifiers", "iris")])
def test_estimators_are_compared(name, problem):
    kind = estimators.KINDS[name]
    X, y = kind.problems[problem](0)
    own = next(iter(kind.estimators(0, X.shape[1]).values())).set_params(restarts=1, max_iter=15)
    chosen = np.random.RandomState(0).permutation(len(X))[:120]
    result = estimators.score(kind, own, (X[chosen], y[chosen]), 0, folds=2)
    assert result.pop("seconds") > 0
    if name == "regressors":
        assert 0.1 < result["R^2"] < 0.8 and 0.85 < result["inside 95 %"] <= 1 and 40 < result["error"] < 80
    else:
        assert 0 < result["log loss"] < 0.4 and result["accuracy"] > 0.9 and result["calibration error"] < 0.2


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr(sklearn_diabetes, "LMRegressor", partial(LMRegressor, restarts=1))
    assert sklearn_diabetes.main(folds=2) > 0.4 and "within two standard deviations" in capsys.readouterr().out


def test_a_fit_that_did_not_converge_says_so_where_it_was_called():
    X, y = small_data()
    with pytest.warns(ConvergenceWarning, match="the evidence still rises after 10 steps; raise max_iter") as seen:
        LMRegressor(**SMALL | {"max_iter": 10}).fit(X, y)
    assert seen[0].filename == __file__
    with silence():
        assert 10 < LMRegressor(**SMALL | {"max_iter": 150}).fit(X, y).n_iter_ < 150


def test_noise_alone_gives_the_mean_and_a_warning_where_fit_was_called():
    draws = np.random.RandomState(0)
    X, y = draws.normal(size=(40, 30)), draws.normal(size=40)
    with pytest.warns(UserWarning, match="finds nothing but the mean") as seen:
        regressor = LMRegressor(5, random_state=0).fit(X, y)
    assert seen[0].filename == __file__
    np.testing.assert_allclose(regressor.predict(draws.normal(size=(9, 30))), y.mean(), atol=1e-3)


# -- classes ------------------------------------------------------------------------------------------------------


def flipped_moons(count, seed):
    """Two classes, a tenth of their labels wrong."""
    X, y = make_moons(count, noise=0.2, random_state=seed)
    return X, np.where(np.random.RandomState(seed).rand(count) < 0.1, 1 - y, y)


@pytest.fixture(scope="module")
def moons():
    return LMClassifier(random_state=0).fit(*flipped_moons(300, 0)), flipped_moons(2000, 1)


def test_probabilities_are_calibrated_where_labels_are_wrong(moons):
    classifier, (X, y) = moons
    probabilities = classifier.predict_proba(X)
    sure, right = probabilities.max(1), classifier.predict(X) == y
    assert abs(sure.mean() - right.mean()) < 0.05  # 300 samples tell the share of wrong labels to 0.02
    line = LogisticRegression().fit(*flipped_moons(300, 0))
    assert log_loss(y, probabilities) < 0.95 * log_loss(y, line.predict_proba(X))
    assert classifier.score(X, y) == right.mean() > 0.84  # of 0.9 that can be had


def test_predictions_far_away_are_less_sure_than_those_of_the_network(moons):
    classifier, _ = moons
    classifier = pickle.loads(pickle.dumps(classifier))
    classifier.posterior_.share = 1.0
    far = np.array([[30.0, 30.0], [-30.0, 20.0], [0.0, -40.0]])
    network = classifier.model_(standardised(classifier, far)).softmax(1).max(1).values.detach().numpy()
    assert (classifier.predict_proba(far).max(1) < network).all()


def test_labels_of_three_classes_may_be_words():
    """And one hidden layer a number."""
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"], dtype=object)
    numbers = LMClassifier((4,), restarts=1, random_state=0).fit(X[::2], y[::2])
    words = LMClassifier(4, restarts=1, random_state=0).fit(X[::2], names[y[::2]])
    np.testing.assert_array_equal(words.classes_, names)
    np.testing.assert_array_equal(words.predict(X), names[numbers.predict(X)])
    np.testing.assert_array_equal(words.predict_proba(X), numbers.predict_proba(X))
    np.testing.assert_array_equal(words.predict_log_proba(X), np.log(words.predict_proba(X)))
    assert words.score(X[1::2], names[y[1::2]]) > 0.9


def test_weights_of_samples_are_those_of_the_dense_posterior():
    X, y = flipped_moons(40, 2)
    weights = np.random.RandomState(0).randint(0, 4, 40)
    classifier = LMClassifier((3,), restarts=1, random_state=0).fit(X, y, weights)

    def hessian(outputs):
        p = outputs.softmax(0)
        return torch.diag(p) - torch.outer(p, p)

    P, delta = dense_posterior(classifier, X, weights, hessian)
    last = standardised(classifier, X[-1:])
    (J,) = reference.jacobians(classifier.model_, last, 1)
    expected = J @ torch.linalg.solve(P, J.T)
    found = classifier.posterior_.covariance(last)[0]
    bound = bounds.of_solve(P, delta.min()) * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_one_class_is_refused():
    X, y = small_data()
    with pytest.raises(ValueError, match="needs two classes at least, and all labels are 'a'"):
        LMClassifier(**SMALL).fit(X, ["a"] * 40)
    with pytest.raises(ValueError, match="needs two classes at least, and all labels are 1"):
        LMClassifier(**SMALL).fit(X, [0] * 20 + [1] * 20, [0] * 20 + [1] * 20)
    with pytest.raises(ValueError, match="labels hold None: leave out"):
        LMClassifier(**SMALL).fit(X, ["a", "b", None, "b"] * 10)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        LMClassifier(**SMALL).fit(X, y)
