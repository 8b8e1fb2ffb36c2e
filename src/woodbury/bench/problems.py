"""The problems of `bench problems`: small models on small data, as everyday users meet them.

Data is the same for every seed; the seed chooses the initial weights and the order of the batches. MNIST and
covtype are read from the data folder of `woodbury.experiments.files`; other data comes with scikit-learn, or is
drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.experiments.data import load_dataset, split, standardise
from woodbury.experiments.errors import DataError
from woodbury.experiments.files import ENVIRONMENT_VARIABLE, Files
from woodbury.experiments.models import mlp

REGRESSION, CLASSIFICATION = "regression", "classification"
ADAM_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SGD_RATES = (1e-2, 3e-2, 1e-1, 3e-1)

Pair = tuple[Tensor, Tensor]  # inputs and targets
Data = Callable[["Path | None"], tuple[Pair, Pair]]  # data folder -> training and test samples


@dataclass(frozen=True)
class Task:
    """A problem as one run gets it."""

    model: nn.Module
    loss: nn.Module  # the mean over a batch
    train: Pair
    test: Pair


@dataclass(frozen=True)
class Problem:
    """A model, its data and what every method gets alike: the batch, the epochs and the rates to choose from."""

    name: str
    kind: str  # of the test figure: the mean loss of a regression, the share of wrong answers of a classification
    model: Callable[[], nn.Module]
    loss: type[nn.Module]
    data: Data
    batch: int
    epochs: int
    adam_rates: tuple[float, ...] = ADAM_RATES
    sgd_rates: tuple[float, ...] = SGD_RATES
    by_name_only: bool = False  # too long for a run of all problems

    def make(self, seed: int, data_dir: Path | None = None) -> Task:
        """The data, the same for all seeds, and a model whose initial weights depend on the seed alone.

        Raises DataError where a file of the data folder is absent, ModuleNotFoundError where scikit-learn is.
        """
        train, test = self.data(data_dir)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        return Task(model, self.loss(), train, test)


PROBLEMS: dict[str, Problem] = {}


def problem(
    name: str, kind: str, model: Callable[[], nn.Module], loss: type[nn.Module], **settings: Any
) -> Callable[[Data], Data]:
    """Enter the problem whose data the decorated function gives, once per process, into `PROBLEMS`."""

    def enter(data: Data) -> Data:
        PROBLEMS[name] = Problem(name, kind, model, loss, cache(data), **settings)
        return data

    return enter


# -- models ---------------------------------------------------------------------------------------------------


def _layers(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    """Linear layers of these widths with an activation between them."""
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*modules[:-1])


def _paper_network() -> nn.Module:
    """784-500-10 with sigmoids, as in the paper."""
    return mlp((784, 500, 10), torch.initial_seed())


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


class _Recurrent(nn.Module):
    """The output of an LSTM at the last time step, through a Linear layer."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(inputs, width, batch_first=True), nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Any:
        states, _ = self.recurrent(inputs)
        return self.head(states[:, -1])


class _Transformer(nn.Module):
    """Embeddings of symbols and places, one Transformer layer, the mean over places, a Linear layer."""

    def __init__(self, symbols: int, length: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, classes)

    def forward(self, sequences: Tensor) -> Any:
        places = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
        return self.head(self.layer(self.symbols(sequences) + self.places(places)).mean(1))


# -- parts of the data ----------------------------------------------------------------------------------------


def _from_folder(name: str, data_dir: Path | None) -> tuple[Pair, Pair]:
    """A data set of `woodbury.experiments.data`; without a data folder an error, and no download."""
    if Files(name, data_dir).folder is None:
        raise DataError(f"neither --data-dir nor {ENVIRONMENT_VARIABLE} names a folder with {name}")
    data = load_dataset(name, data_dir)
    return (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)


def _head(pair: Pair, count: int) -> Pair:
    return pair[0][:count].clone(), pair[1][:count].clone()  # a view would hold on to all of it


def _scikit(name: str) -> Any:
    """One of scikit-learn's own data sets: data, target, DESCR."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")()


def _parted(inputs: Tensor, targets: Tensor, train_share: float = 0.75) -> tuple[Pair, Pair]:
    """Training and test samples, always the same ones; inputs standardised by the training samples."""
    train, test = split(len(inputs), round(train_share * len(inputs)))
    train_inputs, test_inputs = standardise(inputs[train], inputs[test])
    return (train_inputs, targets[train]), (test_inputs, targets[test])


def _with_scaled_targets(train: Pair, test: Pair) -> tuple[Pair, Pair]:
    """The same with targets standardised by those of the training samples."""
    train_targets, test_targets = standardise(train[1], test[1])
    return (train[0], train_targets), (test[0], test_targets)


def _halves(inputs: Tensor, targets: Tensor) -> tuple[Pair, Pair]:
    middle = len(inputs) // 2
    return (inputs[:middle], targets[:middle]), (inputs[middle:], targets[middle:])


# -- classifications ------------------------------------------------------------------------------------------


@problem(
    *("digits", CLASSIFICATION, lambda: _layers(nn.ReLU, 64, 64, 10), nn.CrossEntropyLoss), batch=32, epochs=10
)
def _digits(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Handwritten digits, 8 x 8 pixels, 1,347 for training."""
    data = load_dataset("digits", data_dir)
    return (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)


@problem("cnn", CLASSIFICATION, _cnn, nn.CrossEntropyLoss, batch=32, epochs=10)
def _images(data_dir: Path | None) -> tuple[Pair, Pair]:
    """The same as images (N, 1, 8, 8), pixels from 0 to 1."""
    digits = _scikit("digits")
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target)
    train, test = split(len(images), 1347)
    return (images[train], labels[train].long()), (images[test], labels[test].long())


@problem("mnist", CLASSIFICATION, _paper_network, nn.CrossEntropyLoss, batch=60, epochs=5)
def _some_of_mnist(data_dir: Path | None) -> tuple[Pair, Pair]:
    """The first 4,000 images for training and the first 4,000 of the test set."""
    train, test = _from_folder("mnist", data_dir)
    return _head(train, 4000), _head(test, 4000)


@problem(
    *("mnist-full", CLASSIFICATION, _paper_network, nn.CrossEntropyLoss), batch=120, epochs=5, by_name_only=True
)
def _mnist(data_dir: Path | None) -> tuple[Pair, Pair]:
    """All 60,000 images."""
    return _from_folder("mnist", data_dir)


@problem(
    *("covtype", CLASSIFICATION, lambda: _layers(nn.ReLU, 54, 64, 64, 1), nn.BCEWithLogitsLoss),
    batch=64,
    epochs=10,
)
def _some_of_covtype(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Forest cover, class 2 against the rest: 6,000 samples for training and 6,000 for testing."""
    train, test = _from_folder("covtype", data_dir)
    return _head(train, 6000), _head(test, 6000)


@problem(
    *("breast-cancer", CLASSIFICATION, lambda: _layers(nn.Tanh, 30, 16, 1), nn.BCEWithLogitsLoss),
    batch=32,
    epochs=60,
)
def _breast_cancer(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Two classes, 30 features, 427 samples for training."""
    content = _scikit("breast_cancer")
    return _parted(torch.from_numpy(content.data), torch.from_numpy(content.target).float().unsqueeze(1))


_SYMBOLS, _LENGTH, _REPEATS = 4, 12, 7


@problem(
    *("transformer", CLASSIFICATION, lambda: _Transformer(_SYMBOLS, _LENGTH, _REPEATS + 1), nn.CrossEntropyLoss),
    batch=32,
    epochs=8,
)
def _repeats(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Sequences of 12 symbols out of 4; the class is how often the first one occurs again, at most 7."""
    sequences = torch.randint(_SYMBOLS, (2400, _LENGTH), generator=torch.Generator().manual_seed(4))
    return _halves(sequences, (sequences[:, 1:] == sequences[:, :1]).sum(1).clamp(max=_REPEATS))


_LETTERS, _CONTEXT = " abcdefghijklmnopqrstuvwxyz", 8
_DESCRIBED = ("iris", "digits", "wine", "breast_cancer", "diabetes", "linnerud")


def _letters_network() -> nn.Module:
    layers = _layers(nn.Tanh, 16 * _CONTEXT, 128, len(_LETTERS))
    return nn.Sequential(nn.Embedding(len(_LETTERS), 16), nn.Flatten(), *layers)


@problem("letters", CLASSIFICATION, _letters_network, nn.CrossEntropyLoss, batch=64, epochs=6)
def _text(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Contexts of 8 letters and the letter that follows, in scikit-learn's descriptions of its own data sets.

    Anything but a letter counts as a space. The last tenth of the text is for testing.
    """
    text = " ".join(_scikit(name).DESCR for name in _DESCRIBED).lower()
    words = "".join(letter if letter in _LETTERS else " " for letter in text).split()
    windows = torch.tensor([_LETTERS.index(letter) for letter in " ".join(words)]).unfold(0, _CONTEXT + 1, 1)
    contexts, following = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    end = round(0.9 * len(windows))
    start = end + _CONTEXT  # no letter of the training text
    return (contexts[:end], following[:end]), (contexts[start:], following[start:])


# -- regressions ----------------------------------------------------------------------------------------------


def _diabetes_network() -> nn.Module:
    return _layers(nn.Tanh, 10, 32, 1)


@problem(
    *("raw-scale", REGRESSION, _diabetes_network, nn.MSELoss),
    batch=32,
    epochs=60,
    adam_rates=(3e-2, 1e-1, 3e-1, 1.0),
    sgd_rates=(1e-4, 3e-4, 1e-3, 3e-3),
)
def _raw_diabetes(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Progress of diabetes from 10 features, 332 samples for training; targets as published, 25 to 346."""
    content = _scikit("diabetes")
    return _parted(torch.from_numpy(content.data), torch.from_numpy(content.target).float().unsqueeze(1))


@problem("diabetes", REGRESSION, _diabetes_network, nn.MSELoss, batch=32, epochs=60)
def _diabetes(data_dir: Path | None) -> tuple[Pair, Pair]:
    """The same with standardised targets."""
    return _with_scaled_targets(*_raw_diabetes(data_dir))


@problem("noisy", REGRESSION, lambda: _layers(nn.Tanh, 4, 64, 64, 1), nn.MSELoss, batch=32, epochs=24)
def _noisy(data_dir: Path | None) -> tuple[Pair, Pair]:
    """y = sin x_1 + x_2 x_3 + noise of standard deviation 1/2: 2,400 samples for training, as many for testing."""
    pairs = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for _ in ("train", "test"):
            X = torch.randn(2400, 4)
            pairs.append((X, X[:, :1].sin() + X[:, 1:2] * X[:, 2:3] + 0.5 * torch.randn(2400, 1)))
    mean, deviation = pairs[0][1].mean(), pairs[0][1].std()
    train, test = ((X, (y - mean) / deviation) for X, y in pairs)
    return train, test


@problem("friedman", REGRESSION, lambda: _layers(nn.ReLU, 10, 64, 64, 1), nn.MSELoss, batch=32, epochs=16)
def _friedman(data_dir: Path | None) -> tuple[Pair, Pair]:
    """10 sin(pi x_1 x_2) + 20 (x_3 - 1/2)^2 + 10 x_4 + 5 x_5 + noise, of ten inputs: Friedman's first function."""
    draws = torch.Generator().manual_seed(2)
    x = torch.rand(4000, 10, generator=draws, dtype=torch.float64)
    y = 10 * (math.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y += torch.randn(4000, generator=draws, dtype=torch.float64)
    return _with_scaled_targets(*_parted(x, y.unsqueeze(1), train_share=0.5))


@problem("autoencoder", REGRESSION, lambda: _layers(nn.Tanh, 64, 32, 8, 32, 64), nn.MSELoss, batch=32, epochs=20)
def _pixels(data_dir: Path | None) -> tuple[Pair, Pair]:
    """The pixels of the digits as inputs and as targets."""
    (train, _), (test, _) = _images(data_dir)
    return (train.flatten(1), train.flatten(1)), (test.flatten(1), test.flatten(1))


@problem(
    *("lstm", REGRESSION, lambda: _Recurrent(2, 32, 1), nn.MSELoss),
    batch=32,
    epochs=15,
    adam_rates=(3e-3, 1e-2, 3e-2, 1e-1),
)
def _adding(data_dir: Path | None) -> tuple[Pair, Pair]:
    """Sequences of 10 numbers from 0 to 1, two of them marked in a second channel; the target is their sum."""
    count, length, draws = 2000, 10, torch.Generator().manual_seed(3)
    values = torch.rand(count, length, generator=draws)
    marked = torch.rand(count, length, generator=draws).argsort(1)[:, :2]
    marks = torch.zeros(count, length).scatter_(1, marked, 1.0)
    return _halves(torch.stack([values, marks], 2), values.gather(1, marked).sum(1, keepdim=True))
