"""The problems of `bench problems`: small models on small data, each as an everyday user would meet it.

Data is the same for every seed; the seed chooses the initial weights and the order of the batches. Data sets come
from scikit-learn, MNIST and covtype from the data folder of `woodbury.experiments.files`, the rest is drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from woodbury.experiments.data import load_dataset, split, standardise
from woodbury.experiments.models import mlp

REGRESSION, CLASSIFICATION = "regression", "classification"
ADAM_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SGD_RATES = (1e-2, 3e-2, 1e-1, 3e-1)

Pair = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Task:
    """A problem as one run gets it."""

    model: nn.Module
    loss: nn.Module  # with the mean over a batch
    train: Pair
    test: Pair


@dataclass(frozen=True)
class Problem:
    """A model, its data and what every method gets alike: the batch, the epochs and four rates to choose from."""

    name: str
    kind: str  # of the test figure: the mean loss of a regression, the share of wrong answers of a classification
    model: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    data: Callable[[Path | None], tuple[Pair, Pair]]  # data folder -> training and test samples
    batch: int
    epochs: int
    adam_rates: tuple[float, ...] = ADAM_RATES
    sgd_rates: tuple[float, ...] = SGD_RATES
    by_name_only: bool = False  # too long for a run of all problems

    def make(self, seed: int, data_dir: Path | None = None) -> Task:
        """The data, which is the same for all seeds, and a model whose initial weights depend on the seed alone.

        Raises DataError where a file of the data folder is absent, ImportError where scikit-learn is.
        """
        train, test = self.data(data_dir)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        return Task(model, self.loss(), train, test)


# -- data -----------------------------------------------------------------------------------------------------


def _scikit(name: str) -> tuple[Tensor, Tensor, str]:
    """Inputs and targets in float64, and the description, of one of scikit-learn's own data sets."""
    from sklearn import datasets

    content = getattr(datasets, f"load_{name}")()
    return torch.from_numpy(content.data).double(), torch.from_numpy(content.target), content.DESCR


def _parted(inputs: Tensor, targets: Tensor, test_share: float = 0.25) -> tuple[Pair, Pair]:
    """Training and test samples, always the same ones; inputs standardised by the training samples."""
    train, test = split(len(inputs), round(len(inputs) * (1 - test_share)))
    train_inputs, test_inputs = standardise(inputs[train], inputs[test])
    return (train_inputs, targets[train]), (test_inputs, targets[test])


def _with_scaled_targets(train: Pair, test: Pair) -> tuple[Pair, Pair]:
    """The same with targets standardised by the training samples."""
    train_targets, test_targets = standardise(train[1], test[1])
    return (train[0], train_targets), (test[0], test_targets)


@cache
def _digits(data_dir: Path | None) -> tuple[Pair, Pair]:
    data = load_dataset("digits", data_dir)
    return (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)


@cache
def _digit_images(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Digits as (N, 1, 8, 8) with pixels from 0 to 1."""
    inputs, labels, _ = _scikit("digits")
    train, test = split(len(inputs), 1347)
    images = (inputs / 16).float().unflatten(1, (1, 8, 8))
    return (images[train], labels[train].long()), (images[test], labels[test].long())


@cache
def _digits_twice(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Pixels from 0 to 1, as inputs and as targets."""
    (train, _), (test, _) = ((images.flatten(1), labels) for images, labels in _digit_images(data_dir))
    return (train, train), (test, test)


@cache
def _mnist(data_dir: Path | None) -> tuple[Pair, Pair]:
    data = load_dataset("mnist", data_dir)
    return (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)


def _mnist_part(data_dir: Path | None) -> tuple[Pair, Pair]:
    """The first 4,000 images for training and the first 4,000 of the test set."""
    train, test = _mnist(data_dir)
    return _head(train, 4000), _head(test, 4000)


@cache
def _covtype(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Class 2 against the rest, 6,000 samples for training and 6,000 for testing."""
    data = load_dataset("covtype", data_dir)
    train, test = (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)
    return _head(train, 6000), _head(test, 6000)


def _head(pair: Pair, count: int) -> Pair:
    return pair[0][:count].clone(), pair[1][:count].clone()  # a view would hold on to all of it


@cache
def _diabetes_raw(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Targets as they are published, 25 to 346."""
    inputs, targets, _ = _scikit("diabetes")
    return _parted(inputs, targets.float().unsqueeze(1))


@cache
def _diabetes(data_dir: Path | None) -> tuple[Pair, Pair]:
    return _with_scaled_targets(*_diabetes_raw(data_dir))


@cache
def _breast_cancer(data_dir: Path | None) -> tuple[Pair, Pair]:
    inputs, labels, _ = _scikit("breast_cancer")
    return _parted(inputs, labels.float().unsqueeze(1))


@cache
def _noisy(data_dir: Path | None) -> tuple[Pair, Pair]:
    """y = sin x_1 + x_2 x_3 + noise of standard deviation 1/2: 2,400 samples for training, as many for testing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pairs = []
        for _ in ("train", "test"):
            X = torch.randn(2400, 4)
            pairs.append((X, X[:, :1].sin() + X[:, 1:2] * X[:, 2:3] + 0.5 * torch.randn(2400, 1)))
    mean, deviation = pairs[0][1].mean(), pairs[0][1].std()
    train, test = ((X, (y - mean) / deviation) for X, y in pairs)
    return train, test


@cache
def _friedman(data_dir: Path | None) -> tuple[Pair, Pair]:
    """10 sin(pi x_1 x_2) + 20 (x_3 - 1/2)^2 + 10 x_4 + 5 x_5 + noise, of ten inputs: Friedman's first function."""
    draws = torch.Generator().manual_seed(2)
    x = torch.rand(4000, 10, generator=draws, dtype=torch.float64)
    y = 10 * (math.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y += torch.randn(4000, generator=draws, dtype=torch.float64)
    return _with_scaled_targets(*_parted(x, y.unsqueeze(1), test_share=0.5))


@cache
def _adding(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Sequences of 10 numbers from 0 to 1, two of them marked by a second channel; the target is their sum."""
    length, draws = 10, torch.Generator().manual_seed(3)
    values = torch.rand(2000, length, generator=draws)
    marked = torch.rand(2000, length, generator=draws).argsort(1)[:, :2]
    marks = torch.zeros(2000, length).scatter_(1, marked, 1.0)
    inputs, targets = torch.stack([values, marks], 2), values.gather(1, marked).sum(1, keepdim=True)
    return (inputs[:1000], targets[:1000]), (inputs[1000:], targets[1000:])


SYMBOLS, LENGTH, REPEATS = 4, 12, 7


@cache
def _repeats(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Sequences of 12 symbols; the class is how often the first one occurs again."""
    draws = torch.Generator().manual_seed(4)
    tokens = torch.randint(SYMBOLS, (2400, LENGTH), generator=draws)
    classes = (tokens[:, 1:] == tokens[:, :1]).sum(1).clamp_(max=REPEATS)
    return (tokens[:1200], classes[:1200]), (tokens[1200:], classes[1200:])


LETTERS, CONTEXT = "abcdefghijklmnopqrstuvwxyz", 8
_DESCRIBED = ("iris", "digits", "wine", "breast_cancer", "diabetes", "linnerud")


@cache
def _text(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Contexts of 8 letters and the letter that follows, in scikit-learn's descriptions of its data sets.

    27 symbols: anything but a letter counts as a space. The last tenth of the text is for testing.
    """
    text = " ".join(_scikit(name)[2] for name in _DESCRIBED).lower()
    words = "".join(letter if letter in LETTERS else " " for letter in text).split()
    codes = torch.tensor([LETTERS.find(letter) + 1 for letter in " ".join(words)])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    contexts, following = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    end = round(0.9 * len(windows))
    return (contexts[:end], following[:end]), (contexts[end + CONTEXT :], following[end + CONTEXT :])


# -- models ---------------------------------------------------------------------------------------------------


def _layers(activation: Callable[[], nn.Module], *widths: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*modules[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


class _LastState(nn.Module):
    """The output of the last time step of a recurrent layer through a Linear layer."""

    def __init__(self, recurrent: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        states: Tensor = self.recurrent(inputs)[0]
        out: Tensor = self.head(states[:, -1])
        return out


class _Attention(nn.Module):
    """Embeddings of tokens and places, Transformer layers, the mean over places, a Linear layer."""

    def __init__(self, symbols: int, length: int, classes: int, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]).expand_as(tokens))
        for layer in self.layers:
            states = layer(states)
        out: Tensor = self.head(states.mean(1))
        return out


def _letters() -> nn.Module:
    symbols = len(LETTERS) + 1
    return nn.Sequential(nn.Embedding(symbols, 16), nn.Flatten(), *_layers(nn.Tanh, 16 * CONTEXT, 128, symbols))


# -- the list -------------------------------------------------------------------------------------------------

_ALL = (
    Problem(
        *("digits", CLASSIFICATION, lambda: _layers(nn.ReLU, 64, 64, 10), nn.CrossEntropyLoss, _digits),
        batch=32,
        epochs=10,
    ),
    Problem(
        *("mnist", CLASSIFICATION, lambda: mlp((784, 500, 10), torch.initial_seed()), nn.CrossEntropyLoss),
        data=_mnist_part,
        batch=60,
        epochs=5,
    ),
    Problem(
        *("mnist-full", CLASSIFICATION, lambda: mlp((784, 500, 10), torch.initial_seed()), nn.CrossEntropyLoss),
        data=_mnist,
        batch=120,
        epochs=5,
        by_name_only=True,
    ),
    Problem("cnn", CLASSIFICATION, _cnn, nn.CrossEntropyLoss, _digit_images, batch=32, epochs=10),
    Problem(
        *("covtype", CLASSIFICATION, lambda: _layers(nn.ReLU, 54, 64, 64, 1), nn.BCEWithLogitsLoss, _covtype),
        batch=64,
        epochs=10,
    ),
    Problem(
        *("breast-cancer", CLASSIFICATION, lambda: _layers(nn.Tanh, 30, 16, 1), nn.BCEWithLogitsLoss),
        data=_breast_cancer,
        batch=32,
        epochs=60,
    ),
    Problem(
        *("transformer", CLASSIFICATION, lambda: _Attention(SYMBOLS, LENGTH, REPEATS + 1), nn.CrossEntropyLoss),
        data=_repeats,
        batch=32,
        epochs=8,
    ),
    Problem("letters", CLASSIFICATION, _letters, nn.CrossEntropyLoss, _text, batch=64, epochs=6),
    Problem(
        *("diabetes", REGRESSION, lambda: _layers(nn.Tanh, 10, 32, 1), nn.MSELoss, _diabetes),
        batch=32,
        epochs=60,
    ),
    Problem(
        *("raw-scale", REGRESSION, lambda: _layers(nn.Tanh, 10, 32, 1), nn.MSELoss, _diabetes_raw),
        batch=32,
        epochs=60,
        adam_rates=(3e-2, 1e-1, 3e-1, 1.0),
        sgd_rates=(3e-5, 1e-4, 3e-4, 1e-3),
    ),
    Problem(
        *("noisy", REGRESSION, lambda: _layers(nn.Tanh, 4, 64, 64, 1), nn.MSELoss, _noisy),
        batch=32,
        epochs=24,
    ),
    Problem(
        *("friedman", REGRESSION, lambda: _layers(nn.ReLU, 10, 64, 64, 1), nn.MSELoss, _friedman),
        batch=32,
        epochs=16,
    ),
    Problem(
        *("autoencoder", REGRESSION, lambda: _layers(nn.Tanh, 64, 32, 8, 32, 64), nn.MSELoss, _digits_twice),
        batch=32,
        epochs=20,
    ),
    Problem(
        *("lstm", REGRESSION, lambda: _LastState(nn.LSTM(2, 32, batch_first=True), 32, 1), nn.MSELoss, _adding),
        batch=32,
        epochs=15,
    ),
)
PROBLEMS = {problem.name: problem for problem in _ALL}
