"""`LMRegressor` and `LMClassifier` beside estimators of scikit-learn, on data that it brings: five folds.

Defaults throughout, with standardised inputs where they matter. Scores are of all predictions together, each made
without the fold of its sample; seconds are CPU time of one fit.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets, ensemble, linear_model, neural_network
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.gaussian_process import GaussianProcessRegressor, kernels
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.common import say
from woodbury.sklearn import LMClassifier, LMRegressor

SEED = 1  # of data, folds and starts
FOLDS, WITHIN = 5, 1.96  # 95 % of normal errors lie within so many standard deviations
BINS = 10  # of the calibration error: the mean of |accuracy - probability| over bins of the largest probability

Data = tuple[np.ndarray, np.ndarray]


def smooth_function(seed: int, count: int = 400) -> Data:
    """sin(3 a) cos(2 b) + c exp(-d^2) on points of a cube, without noise."""
    inputs = np.random.RandomState(seed).uniform(-1, 1, (count, 4))
    a, b, c, d = inputs.T
    return inputs, np.sin(3 * a) * np.cos(2 * b) + c * np.exp(-(d**2))


def flipped_moons(seed: int) -> Data:
    inputs, labels = datasets.make_moons(400, noise=0.2, random_state=seed)
    return inputs, np.where(np.random.RandomState(seed).rand(400) < 0.1, 1 - labels, labels)


def two_digits(seed: int) -> Data:
    inputs, labels = datasets.load_digits(return_X_y=True)
    chosen = np.isin(labels, [3, 8])
    return inputs[chosen], labels[chosen]


REGRESSIONS: dict[str, Callable[[int], Data]] = {
    "diabetes": lambda seed: datasets.load_diabetes(return_X_y=True),
    "linear": lambda seed: datasets.make_regression(200, 20, n_informative=10, noise=50.0, random_state=seed),
    "friedman1": lambda seed: datasets.make_friedman1(400, noise=1.0, random_state=seed),
    "friedman2": lambda seed: datasets.make_friedman2(400, noise=125.0, random_state=seed),
    "friedman3": lambda seed: datasets.make_friedman3(400, noise=0.1, random_state=seed),
    "smooth": smooth_function,
}
CLASSIFICATIONS: dict[str, Callable[[int], Data]] = {
    "breast-cancer": lambda seed: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda seed: datasets.load_wine(return_X_y=True),
    "iris": lambda seed: datasets.load_iris(return_X_y=True),
    "digits-3-8": two_digits,
    "moons": flipped_moons,
}


def regressors(seed: int, columns: int) -> dict[str, Any]:
    signal = kernels.ConstantKernel() * kernels.RBF(np.ones(columns), (1e-2, 1e4))
    process = GaussianProcessRegressor(signal + kernels.WhiteKernel(0.1, (1e-8, 10.0)), normalize_y=True)
    network = neural_network.MLPRegressor(max_iter=1000, early_stopping=True, random_state=seed)
    network = make_pipeline(StandardScaler(), network)
    return {
        "LMRegressor": LMRegressor(random_state=seed),
        "GaussianProcess": make_pipeline(StandardScaler(), process),
        "RidgeCV": make_pipeline(StandardScaler(), linear_model.RidgeCV(np.logspace(-3, 3, 13))),
        "HistGradientBoosting": ensemble.HistGradientBoostingRegressor(random_state=seed),
        "MLPRegressor": TransformedTargetRegressor(network, transformer=StandardScaler()),
    }


def classifiers(seed: int, columns: int) -> dict[str, Any]:
    logistic = linear_model.LogisticRegressionCV(scoring="neg_log_loss", max_iter=3000)
    network = neural_network.MLPClassifier(max_iter=1000, random_state=seed)  # far worse if stopped early
    return {
        "LMClassifier": LMClassifier(random_state=seed),
        "LogisticRegressionCV": make_pipeline(StandardScaler(), logistic),
        "HistGradientBoosting": ensemble.HistGradientBoostingClassifier(random_state=seed),
        "MLPClassifier": make_pipeline(StandardScaler(), network),
    }


def predictions(estimator: Any, inputs: np.ndarray) -> np.ndarray:
    """Probabilities (n, classes), means (n, 1), or means and standard deviations (n, 2)."""
    if hasattr(estimator, "predict_proba"):
        return np.asarray(estimator.predict_proba(inputs))
    try:
        return np.stack(estimator.predict(inputs, return_std=True), axis=1)
    except TypeError:
        return np.stack([estimator.predict(inputs)], axis=1)


def score_regression(targets: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    errors = abs(predicted[:, 0] - targets)
    square = float(np.mean(errors**2))
    scores = {"R^2": 1 - square / float(np.var(targets)), "error": square**0.5}
    if predicted.shape[1] == 2:
        scores["inside 95 %"] = float(np.mean(errors < WITHIN * predicted[:, 1]))
    return scores


def score_classification(targets: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    sure, right = predicted.max(1), np.unique(targets)[predicted.argmax(1)] == targets
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gap = sum(abs(float((sure - right)[bins == own].sum())) for own in range(BINS))
    scores = {"log loss": float(log_loss(targets, predicted)), "accuracy": float(np.mean(right))}
    return scores | {"calibration error": gap / len(targets)}


class Kind(NamedTuple):
    problems: dict[str, Callable[[int], Data]]
    estimators: Callable[[int, int], dict[str, Any]]  # of a seed and the number of inputs
    folds: type[KFold] | type[StratifiedKFold]
    score: Callable[[np.ndarray, np.ndarray], dict[str, float]]


KINDS = {
    "regressors": Kind(REGRESSIONS, regressors, KFold, score_regression),
    "classifiers": Kind(CLASSIFICATIONS, classifiers, StratifiedKFold, score_classification),
}


def score(kind: Kind, estimator: Any, data: Data, seed: int, folds: int = FOLDS) -> dict[str, float]:
    (X, y), tests, found, seconds = data, [], [], 0.0
    for train, test in kind.folds(folds, shuffle=True, random_state=seed).split(X, y):
        own, started = clone(estimator), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of iterations that were not enough
            own.fit(X[train], y[train])
        seconds += (time.process_time() - started) / folds
        tests.append(test)
        found.append(predictions(own, X[test]))
    return kind.score(y[np.concatenate(tests)], np.concatenate(found)) | {"seconds": seconds}


def compare(name: str) -> dict[str, Any]:
    kind, rows = KINDS[name], []
    for problem, load in kind.problems.items():
        X, y = load(SEED)
        for estimator, own in kind.estimators(SEED, X.shape[1]).items():
            say(f"{problem}, {estimator} ...")
            rows.append({"data": problem, "": estimator, **score(kind, own, (X, y), SEED)})
    return {"rows": rows}
