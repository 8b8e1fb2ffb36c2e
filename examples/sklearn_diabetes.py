"""scikit-learn: `LMRegressor` on the diabetes data, with error bars and nothing to tune.

Run it: python examples/sklearn_diabetes.py (ten seconds)
"""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_score, train_test_split

from woodbury.sklearn import LMRegressor


def main(folds: int = 5) -> float:
    X, y = load_diabetes(return_X_y=True)
    scores = cross_val_score(LMRegressor(random_state=0), X, y, cv=folds)
    train_X, test_X, train_y, test_y = train_test_split(X, y, random_state=0)
    regressor = LMRegressor(random_state=0).fit(train_X, train_y)
    mean, std = regressor.predict(test_X, return_std=True)
    print(f"R^2 by {folds} folds: {scores.mean():.2f}; noise {regressor.noise_std_:.0f}")
    print(f"targets within two standard deviations: {(abs(mean - test_y) < 2 * std).mean():.0%}")
    return float(scores.mean())


if __name__ == "__main__":
    main()
