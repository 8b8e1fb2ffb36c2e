"""Data sets by name: each is one function that returns training and test tensors.

The functions `read_...` turn the bytes of a published file, whose checksum was compared before, into tensors.
"""

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from woodbury.experiments.files import DataError, DataFile, Files


@dataclass(frozen=True)
class Dataset:
    """A classification problem with standardised features.

    Two classes take one output and targets (N, 1) of float32, 0 or 1; more classes take targets (N,) of int64.
    """

    train_inputs: Tensor  # (N, features) float32
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int

    def loss(self) -> nn.Module:
        """The cross entropy of a network's outputs before the softmax or logistic function."""
        return nn.BCEWithLogitsLoss() if self.classes == 2 else nn.CrossEntropyLoss()


DATASETS: dict[str, Callable[[Files], Dataset]] = {}


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    """The data set of that name, from the files in `data_dir` or as `woodbury.experiments.files` says.

    Raises DataError for an unknown name and for files that are absent or damaged.
    """
    if name not in DATASETS:
        raise DataError(f"unknown data set '{name}'; there are: {', '.join(DATASETS)}")
    return DATASETS[name](Files(name, data_dir))


def dataset(load: Callable[[Files], Dataset]) -> Callable[[Files], Dataset]:
    """Enter the decorated function into `DATASETS` by its name; the first line of its docstring describes it."""
    DATASETS[load.__name__] = load
    return load


def standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in float32, shifted and scaled so that the training features have mean 0 and variance 1.

    A feature that is constant in training is only shifted.
    """
    scaled_train = torch.empty(train.shape, dtype=torch.float32, device="cpu")
    scaled_test = torch.empty(test.shape, dtype=torch.float32, device="cpu")
    width = 64  # features at a time, so that no float64 copy of everything is needed
    for first in range(0, train.shape[1], width):
        columns = slice(first, first + width)
        values = train[:, columns].to(torch.float64, copy=True)
        constant = (values == values[0]).all(dim=0)
        # Rounding in the mean of equal numbers would leave a constant feature almost, but not quite, zero.
        mean = torch.where(constant, values[0], values.mean(dim=0))
        values -= mean
        scale = values.square().mean(dim=0).sqrt().masked_fill_(constant, 1.0)
        scaled_train[:, columns] = values.div_(scale)
        scaled_test[:, columns] = (test[:, columns].double() - mean) / scale
    return scaled_train, scaled_test


def split(rows: int, train_rows: int) -> tuple[Tensor, Tensor]:
    """Indices of `train_rows` random rows for training and of the others for testing, always the same."""
    order = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return order[:train_rows], order[train_rows:]


def split_dataset(inputs: Tensor, targets: Tensor, train_rows: int) -> Dataset:
    """The data set of two classes of files without an official test set: `split` chooses the training rows."""
    train, test = split(len(inputs), train_rows)
    train_inputs, test_inputs = standardise(inputs[train], inputs[test])
    return Dataset(train_inputs, targets[train], test_inputs, targets[test], classes=2)


def read_idx(content: bytearray) -> Tensor:
    """The array in an idx file, the format of MNIST: 0, 0, 8 (for bytes), number of dimensions, sizes, values."""
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


def read_cifar(content: bytearray) -> tuple[Tensor, Tensor]:
    """Pixels (N, 3072) and labels (N,) from CIFAR-10's records of one label and three colour planes."""
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return records[:, 1:], records[:, 0].long()


def read_covtype(content: bytearray) -> tuple[Tensor, Tensor]:
    """Features (N, 54) and classes 1 to 7 (N,) from lines of 55 integers, separated by commas."""
    import numpy

    table = numpy.fromstring(bytes(content.rstrip()).replace(b"\n", b","), dtype=numpy.int32, sep=",")
    values = torch.from_numpy(table).view(-1, 55)
    return values[:, :-1], values[:, -1].long()


def read_libsvm(content: bytearray, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """Features (rows, features) and targets (rows, 1) from lines `label index:value ...` with labels +1 and -1.

    Indices start at 1; features that a line leaves out are zero. Raises ValueError for other content: no checksum
    of such a file is known.
    """
    import numpy
    from sklearn.datasets import load_svmlight_file

    try:
        stream = io.BytesIO(content)
        values, labels = load_svmlight_file(stream, n_features=features, dtype=numpy.float32, zero_based=False)
    except OverflowError as error:  # of an index
        raise ValueError(str(error)) from None
    are_right = len(labels) == rows and numpy.isin(labels, (-1, 1)).all() and numpy.isfinite(values.data).all()
    if not are_right:
        raise ValueError(f"not {rows} rows of finite numbers with labels +1 and -1")
    return torch.from_numpy(values.toarray()), _binary(torch.from_numpy(labels) > 0)


def _binary(positive: Tensor) -> Tensor:
    """Targets (N, 1) for one output: 1 where `positive`."""
    return positive.float().unsqueeze(1)


@dataset
def digits(files: Files) -> Dataset:
    """Handwritten digits, 8 x 8 pixels, 1,347 for training and 450 for testing (ships with scikit-learn)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=450, stratify=labels, random_state=0)
    train_pixels, test_pixels, train_labels, test_labels = map(torch.from_numpy, parts)
    train_inputs, test_inputs = standardise(train_pixels, test_pixels)
    return Dataset(train_inputs, train_labels.long(), test_inputs, test_labels.long(), classes=10)


_MNIST = {  # images for training and for testing, and their labels
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataset
def mnist(files: Files) -> Dataset:
    """Handwritten digits, 28 x 28 pixels, 60,000 for training and 10,000 for testing."""
    home = "https://ossci-datasets.s3.amazonaws.com/mnist"
    parts = (DataFile(name, sha256, f"{home}/{name}.gz") for name, sha256 in _MNIST.items())
    train, test, train_labels, test_labels = (files.read(part, read_idx) for part in parts)
    train_inputs, test_inputs = standardise(train.flatten(1), test.flatten(1))
    return Dataset(train_inputs, train_labels.long(), test_inputs, test_labels.long(), classes=10)


_CIFAR_ARCHIVE = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR = {  # five batches for training, one for testing
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


@dataset
def cifar10(files: Files) -> Dataset:
    """Colour images of 10 classes, 3 x 32 x 32 pixels, 50,000 for training and 10,000 for testing."""
    home = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    batches = []
    for name, sha256 in _CIFAR.items():
        file = DataFile(name, sha256, home, f"cifar-10-batches-bin/{name}", _CIFAR_ARCHIVE)
        batches.append(files.read(file, read_cifar))
    pixels, labels = zip(*batches[:-1], strict=True)
    test_pixels, test_labels = batches[-1]
    train_inputs, test_inputs = standardise(torch.cat(pixels), test_pixels)
    return Dataset(train_inputs, torch.cat(labels), test_inputs, test_labels, classes=10)


_COVTYPE = DataFile(
    "covtype.data",
    "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
    "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz",
)


@dataset
def covtype(files: Files) -> Dataset:
    """Forest cover, class 2 against the rest, 54 features, 300,000 for training and 281,012 for testing."""
    inputs, classes = files.read(_COVTYPE, read_covtype)
    return split_dataset(inputs, _binary(classes == 2), train_rows=300_000)


# No published checksum is known: the check is that the file has the published shape and labels.
_WEBSPAM = DataFile(
    "webspam_wc_normalized_unigram.svm",
    None,
    "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/webspam_wc_normalized_unigram.svm.xz",
)


@dataset
def webspam(files: Files) -> Dataset:
    """Web pages, spam or not, 254 word counts, 300,000 for training and 50,000 for testing."""
    inputs, targets = files.read(_WEBSPAM, lambda content: read_libsvm(content, rows=350_000, features=254))
    return split_dataset(inputs, targets, train_rows=300_000)
