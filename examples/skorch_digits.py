"""skorch: exact Gauss-Newton steps inside scikit-learn's grid search.

Run it: python examples/skorch_digits.py (half a minute)
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV

import woodbury
import woodbury.skorch


class Network(torch.nn.Module):
    def __init__(self, hidden: int = 50) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 10)
        )

    def forward(self, x):
        return self.layers(x)


def main(epochs: int = 5) -> float:
    torch.manual_seed(0)
    inputs, targets = load_digits(return_X_y=True)
    net = woodbury.skorch.NeuralNetClassifier(
        Network,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=woodbury.GaussNewton,
        optimizer__momentum=0.9,
        optimizer__curvature_samples=0.5,
        lr=0.1,
        batch_size=60,
        max_epochs=epochs,
        train_split=None,
        verbose=0,
    )
    search = GridSearchCV(net, {"module__hidden": [20, 50], "lr": [0.03, 0.1]}, cv=3, scoring="accuracy")
    search.fit((inputs / 16).astype(np.float32), targets)
    print(f"best {search.best_params_}: accuracy {search.best_score_:.1%}")
    return float(search.best_score_)


if __name__ == "__main__":
    main()
