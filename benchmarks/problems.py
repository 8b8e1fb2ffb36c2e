"""The problems of `python -m benchmarks problems`: small models on small data, as everyday users meet them.

Data is the same for every seed; the seed chooses the initial weights and the order of the batches. MNIST and
covtype are read from the data folder of `woodbury.experiments.files`; other data comes with scikit-learn, or is
drawn here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Batch, chain
from woodbury.experiments.data import load_dataset, split, standardise
from woodbury.experiments.files import ENVIRONMENT_VARIABLE, DataError, Files

REGRESSION, CLASSIFICATION = "regression", "classification"
Data = Callable[["Path | None"], tuple[Batch, Batch]]  # data folder -> training and test samples


@dataclass(frozen=True)
class Task:
    """A problem as one run gets it."""

    model: nn.Module
    loss: nn.Module  # the mean over a batch
    train: Batch
    test: Batch


@dataclass(frozen=True)
class Problem:
    """A model, its data and what every method gets alike: the batch, the epochs and the rates to choose from."""

    model: Callable[[], nn.Module]
    loss: type[nn.Module]
    data: Data
    batch: int
    epochs: int
    adam_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    sgd_rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1, 3e-1)
    by_name_only: bool = False  # too long for a run of all problems

    @property
    def kind(self) -> str:
        """Of the test figure: the mean loss of a regression, the share of wrong answers of a classification."""
        return REGRESSION if self.loss is nn.MSELoss else CLASSIFICATION

    def make(self, seed: int, data_dir: Path | None = None) -> Task:
        """The data, the same for all seeds, and a model whose initial weights depend on the seed alone.

        Raises DataError where a file of the data folder is absent, ModuleNotFoundError where scikit-learn is.
        """
        train, test = _load(self.data, data_dir)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        return Task(model, self.loss(), train, test)


@cache
def _load(data: Data, data_dir: Path | None) -> tuple[Batch, Batch]:
    return data(data_dir)


# -- models ---------------------------------------------------------------------------------------------------


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


_SYMBOLS, _LENGTH, _REPEATS = 4, 12, 7  # of the sequences for it


class _Transformer(nn.Module):
    """Embeddings of symbols and places, one Transformer layer, the mean over places, a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(_SYMBOLS, 32), nn.Embedding(_LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, _REPEATS + 1)

    def forward(self, sequences: Tensor) -> Any:
        places = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
        return self.head(self.layer(self.symbols(sequences) + self.places(places)).mean(1))


class _Recurrent(nn.Module):
    """The output of an LSTM at the last time step, through a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(2, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.inner(inputs)[0][:, -1])


_LETTERS, _CONTEXT = " abcdefghijklmnopqrstuvwxyz", 8


def _letters_network() -> nn.Module:
    layers = chain(nn.Tanh, 16 * _CONTEXT, 128, len(_LETTERS))
    return nn.Sequential(nn.Embedding(len(_LETTERS), 16), nn.Flatten(), *layers)


# -- data -----------------------------------------------------------------------------------------------------


def _from_folder(name: str, count: int | None, data_dir: Path | None) -> tuple[Batch, Batch]:
    """The first samples of a data set from the data folder, for training and for testing; no download."""
    if Files(name, data_dir).folder is None:
        raise DataError(f"neither --data-dir nor {ENVIRONMENT_VARIABLE} names a folder with {name}")
    data = load_dataset(name, data_dir)
    pairs = (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)
    train, test = ((x[:count].clone(), y[:count].clone()) for x, y in pairs)  # a view would hold on to all of it
    return train, test


def _scikit(name: str) -> Any:
    """One of scikit-learn's own data sets: data, target, DESCR."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")()


def _parted(inputs: Tensor, targets: Tensor, train_share: float = 0.75) -> tuple[Batch, Batch]:
    """Training and test samples, always the same ones; inputs standardised by the training samples."""
    train, test = split(len(inputs), round(train_share * len(inputs)))
    train_inputs, test_inputs = standardise(inputs[train], inputs[test])
    return (train_inputs, targets[train]), (test_inputs, targets[test])


def _with_scaled_targets(train: Batch, test: Batch) -> tuple[Batch, Batch]:
    """The same with targets standardised by those of the training samples."""
    train_targets, test_targets = standardise(train[1], test[1])
    return (train[0], train_targets), (test[0], test_targets)


def _halves(inputs: Tensor, targets: Tensor) -> tuple[Batch, Batch]:
    middle = len(inputs) // 2
    return (inputs[:middle], targets[:middle]), (inputs[middle:], targets[middle:])


def _digits(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Handwritten digits, 8 x 8 pixels, 1,347 for training."""
    data = load_dataset("digits", data_dir)
    return (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)


def _images(data_dir: Path | None) -> tuple[Batch, Batch]:
    """The same as images (N, 1, 8, 8), pixels from 0 to 1."""
    digits = _scikit("digits")
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target)
    train, test = split(len(images), 1347)
    return (images[train], labels[train].long()), (images[test], labels[test].long())


def _pixels(data_dir: Path | None) -> tuple[Batch, Batch]:
    """The pixels of the digits as inputs and as targets."""
    (train, _), (test, _) = _images(data_dir)
    return (train.flatten(1), train.flatten(1)), (test.flatten(1), test.flatten(1))


def _table(name: str, data_dir: Path | None) -> tuple[Batch, Batch]:
    """One of scikit-learn's tables with one target, as published.

    breast_cancer: two classes, 30 features, 427 samples for training. diabetes: its progress, 25 to 346, from 10
    features, 332 samples for training.
    """
    content = _scikit(name)
    return _parted(torch.from_numpy(content.data), torch.from_numpy(content.target).float().unsqueeze(1))


def _diabetes(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Progress of diabetes with standardised targets."""
    return _with_scaled_targets(*_table("diabetes", data_dir))


def _repeats(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Sequences of 12 symbols out of 4; the class is how often the first one occurs again, at most 7."""
    sequences = torch.randint(_SYMBOLS, (2400, _LENGTH), generator=torch.Generator().manual_seed(4))
    return _halves(sequences, (sequences[:, 1:] == sequences[:, :1]).sum(1).clamp(max=_REPEATS))


def _text(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Contexts of 8 letters and the letter that follows, in scikit-learn's descriptions of its own data sets.

    Anything but a letter counts as a space. The last tenth of the text is for testing.
    """
    described = ("iris", "digits", "wine", "breast_cancer", "diabetes", "linnerud")
    text = " ".join(_scikit(name).DESCR for name in described).lower()
    words = "".join(letter if letter in _LETTERS else " " for letter in text).split()
    windows = torch.tensor([_LETTERS.index(letter) for letter in " ".join(words)]).unfold(0, _CONTEXT + 1, 1)
    contexts, following = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    end = round(0.9 * len(windows))
    start = end + _CONTEXT  # no letter of the training text
    return (contexts[:end], following[:end]), (contexts[start:], following[start:])


def _noisy(data_dir: Path | None) -> tuple[Batch, Batch]:
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


def friedman(x: Tensor) -> Tensor:
    """10 sin(pi x_1 x_2) + 20 (x_3 - 1/2)^2 + 10 x_4 + 5 x_5, as a column: Friedman's first function."""
    wave = 10 * torch.sin(torch.pi * x[:, :1] * x[:, 1:2])
    return wave + 20 * (x[:, 2:3] - 0.5) ** 2 + 10 * x[:, 3:4] + 5 * x[:, 4:5]


def _noisy_friedman(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Friedman's first function of ten inputs, and noise."""
    draws = torch.Generator().manual_seed(2)
    x = torch.rand(4000, 10, generator=draws, dtype=torch.float64)
    y = friedman(x) + torch.randn(4000, 1, generator=draws, dtype=torch.float64)
    return _with_scaled_targets(*_parted(x, y, train_share=0.5))


def _adding(data_dir: Path | None) -> tuple[Batch, Batch]:
    """Sequences of 10 numbers from 0 to 1, two of them marked in a second channel; the target is their sum."""
    count, length, draws = 2000, 10, torch.Generator().manual_seed(3)
    values = torch.rand(count, length, generator=draws)
    marked = torch.rand(count, length, generator=draws).argsort(1)[:, :2]
    marks = torch.zeros(count, length).scatter_(1, marked, 1.0)
    return _halves(torch.stack([values, marks], 2), values.gather(1, marked).sum(1, keepdim=True))


# -- the problems ---------------------------------------------------------------------------------------------

_CE, _BCE, _MSE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss
_paper_network = partial(chain, nn.Sigmoid, 784, 500, 10)
_diabetes_network = partial(chain, nn.Tanh, 10, 32, 1)
_few_of_mnist, _all_of_mnist = partial(_from_folder, "mnist", 4000), partial(_from_folder, "mnist", None)
_covtype = partial(_from_folder, "covtype", 6000)  # class 2 against the rest
_raw_rates: dict[str, Any] = {"adam_rates": (3e-2, 1e-1, 3e-1, 1.0), "sgd_rates": (1e-4, 3e-4, 1e-3, 3e-3)}
PROBLEMS = {
    # by name: model, loss, data, batch, epochs
    "digits": Problem(partial(chain, nn.ReLU, 64, 64, 10), _CE, _digits, 32, 10),
    "cnn": Problem(_cnn, _CE, _images, 32, 10),
    "mnist": Problem(_paper_network, _CE, _few_of_mnist, 60, 5),
    "mnist-full": Problem(_paper_network, _CE, _all_of_mnist, 120, 5, by_name_only=True),
    "covtype": Problem(partial(chain, nn.ReLU, 54, 64, 64, 1), _BCE, _covtype, 64, 10),
    "breast-cancer": Problem(partial(chain, nn.Tanh, 30, 16, 1), _BCE, partial(_table, "breast_cancer"), 32, 60),
    "transformer": Problem(_Transformer, _CE, _repeats, 32, 8),
    "letters": Problem(_letters_network, _CE, _text, 64, 6),
    "raw-scale": Problem(_diabetes_network, _MSE, partial(_table, "diabetes"), 32, 60, **_raw_rates),
    "diabetes": Problem(_diabetes_network, _MSE, _diabetes, 32, 60),
    "noisy": Problem(partial(chain, nn.Tanh, 4, 64, 64, 1), _MSE, _noisy, 32, 24),
    "friedman": Problem(partial(chain, nn.ReLU, 10, 64, 64, 1), _MSE, _noisy_friedman, 32, 16),
    "autoencoder": Problem(partial(chain, nn.Tanh, 64, 32, 8, 32, 64), _MSE, _pixels, 32, 20),
    "lstm": Problem(_Recurrent, _MSE, _adding, 32, 15, (3e-3, 1e-2, 3e-2, 1e-1)),
}
