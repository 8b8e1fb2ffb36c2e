"""Inside skorch: fits, grid search and pickles, with the optimizers of this package."""

import pickle

import pytest
import torch
from torch import nn

import reference
import woodbury

pytest.importorskip("skorch")
np = pytest.importorskip("numpy")


class Network(nn.Module):
    def __init__(self, hidden=8, outputs=3):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, x):
        return self.layers(x)


def data():
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(60, 5)).astype(np.float32)
    return inputs, (inputs[:, 0] + inputs[:, 1] > 0).astype(np.int64), inputs[:, :1] * inputs[:, 1:2]


def net_of(kind, **settings):
    import woodbury.skorch

    return getattr(woodbury.skorch, kind)(Network, train_split=None, verbose=0, **settings)


def classifier(**settings):
    given = {"optimizer": woodbury.GaussNewton, "lr": 0.5, "batch_size": 20, "max_epochs": 5, **settings}
    return net_of("NeuralNetClassifier", criterion=nn.CrossEntropyLoss, **given)


def test_a_classifier_takes_the_steps_of_a_plain_loop():
    inputs, labels, _ = data()
    net = classifier(optimizer__damping=0.5, optimizer__seed=0, optimizer__curvature_samples=10)
    net.fit(inputs, labels)
    model = Network()
    settings = {"lr": 0.5, "damping": 0.5, "seed": 0, "curvature_samples": 10}
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), **settings)
    for _ in range(5):
        for start in range(0, 60, 20):
            part = slice(start, start + 20)
            optimizer.step(torch.tensor(inputs[part]), torch.tensor(labels[part]))
    assert torch.equal(reference.theta(net.module_), reference.theta(model))
    assert net.history[-1, "train_loss"] < net.history[0, "train_loss"] and net.score(inputs, labels) > 0.9


def test_a_regressor_fits():
    inputs, _, values = data()
    settings = {"optimizer": woodbury.NaturalGradient, "optimizer__damping": 0.1, "lr": 0.3}
    net = net_of("NeuralNetRegressor", module__outputs=1, batch_size=60, max_epochs=40, **settings)
    net.fit(inputs, values)
    assert net.history[-1, "train_loss"] < 0.2 * net.history[0, "train_loss"]


def test_pickles_go_on():
    inputs, labels, _ = data()
    net = classifier()
    net.fit(inputs, labels)
    other = pickle.loads(pickle.dumps(net))
    assert np.array_equal(net.predict_proba(inputs), other.predict_proba(inputs))
    net.partial_fit(inputs, labels)
    other.partial_fit(inputs, labels)
    assert torch.equal(reference.theta(net.module_), reference.theta(other.module_))


def test_grid_search_reaches_the_settings():
    from sklearn.model_selection import GridSearchCV

    inputs, labels, _ = data()
    grid = {"lr": [1e-6, 0.5], "optimizer__damping": [0.1, 1.0]}
    search = GridSearchCV(classifier(max_epochs=2), grid, cv=2, scoring="accuracy").fit(inputs, labels)
    assert search.best_params_["lr"] == 0.5
    net = classifier().initialize()
    net.set_params(lr=0.25, optimizer__momentum=0.5)
    assert net.optimizer_.param_groups[0]["lr"] == 0.25 and net.optimizer_.param_groups[0]["momentum"] == 0.5


def test_other_optimizers_are_made_as_ever():
    inputs, labels, _ = data()
    net = classifier(optimizer=torch.optim.Adam, lr=0.01)
    net.fit(inputs, labels)
    assert isinstance(net.optimizer_, torch.optim.Adam)


@pytest.mark.slow
def test_the_example_runs():
    import skorch_digits

    assert skorch_digits.main(epochs=2) > 0.8
