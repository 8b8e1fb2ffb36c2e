"""`LMRegressor` beside the regressors of scikit-learn, all with their defaults: five folds, scores and times.

python examples/lm_regressor.py             # about two minutes
python examples/lm_regressor.py --seed 7    # other draws, folds and starts
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from woodbury.sklearn import LMRegressor

Data = tuple[np.ndarray, np.ndarray]


def smooth_function(seed: int) -> Data:
    """sin(3 a) cos(2 b) + c exp(-d^2) on 500 points of a cube, without noise."""
    inputs = np.random.RandomState(seed).uniform(-1, 1, (500, 4))
    a, b, c, d = inputs.T
    return inputs, np.sin(3 * a) * np.cos(2 * b) + c * np.exp(-(d**2))


PROBLEMS = {
    "diabetes": lambda seed: load_diabetes(return_X_y=True),
    "friedman1, noise 1": lambda seed: make_friedman1(500, noise=1.0, random_state=seed),
    "friedman1, no noise": lambda seed: make_friedman1(500, noise=0.0, random_state=seed),
    "smooth, 4 inputs": smooth_function,
}


def regressors(seed: int) -> dict[str, object]:
    """Defaults throughout; MLPRegressor is given standardised inputs and targets, which the others do not need."""
    return {
        "LMRegressor": LMRegressor(random_state=seed),
        "HistGradientBoosting": HistGradientBoostingRegressor(random_state=seed),
        "MLPRegressor": TransformedTargetRegressor(
            make_pipeline(StandardScaler(), MLPRegressor(random_state=seed)), transformer=StandardScaler()
        ),
    }


def score(regressor: object, data: Data, seed: int, folds: int = 5) -> dict[str, float]:
    """Means over folds: R^2, root of the mean squared error, seconds of a fit, share of targets within two std."""
    X, y = data
    rows = []
    for train, test in KFold(folds, shuffle=True, random_state=seed).split(X):
        own = clone(regressor)
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLPRegressor says that 200 iterations are not enough
            own.fit(X[train], y[train])
        seconds, inside = time.perf_counter() - started, np.nan
        predicted = own.predict(X[test])
        if isinstance(own, LMRegressor):
            inside = np.mean(np.abs(predicted - y[test]) < 2 * own.predict(X[test], return_std=True)[1])
        error = np.sqrt(np.mean((predicted - y[test]) ** 2))
        rows.append((r2_score(y[test], predicted), error, seconds, inside))
    return dict(zip(("r2", "rmse", "seconds", "inside"), np.mean(rows, axis=0), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of data, folds and starts")
    parser.add_argument("--only", help="one of the problems, by the start of its name")
    seed, only = (arguments := parser.parse_args()).seed, arguments.only
    print(f"{'':20} {'':22} {'R^2':>8} {'RMSE':>9} {'s a fit':>8} {'within 2 std':>13}")
    for problem, make in PROBLEMS.items():
        if only and not problem.startswith(only):
            continue
        for name, regressor in regressors(seed).items():
            result = score(regressor, make(seed), seed)
            inside = "" if np.isnan(result["inside"]) else f"{result['inside']:.1%}"
            numbers = f"{result['r2']:8.4f} {result['rmse']:9.4g} {result['seconds']:8.2f} {inside:>13}"
            print(f"{problem:20} {name:22} {numbers}", flush=True)


if __name__ == "__main__":
    main()
