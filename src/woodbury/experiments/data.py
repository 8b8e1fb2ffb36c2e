"""Data sets by name: each is one function that returns training and test tensors.

The functions `read_...` turn the bytes of a published file into tensors and raise ValueError for other content.
"""

import io
import math
import re
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from woodbury.experiments.files import DataError, DataFile, Files, Home


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

    @property
    def features(self) -> int:
        """Number of inputs of a network."""
        return self.train_inputs.shape[1]

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
    scaled_train = torch.empty(train.shape, dtype=torch.float32)
    scaled_test = torch.empty(test.shape, dtype=torch.float32)
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
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return order[:train_rows], order[train_rows:]


def split_dataset(inputs: Tensor, targets: Tensor, train_rows: int) -> Dataset:
    """The data set of two classes whose training rows `split` chooses."""
    train, test = split(len(inputs), train_rows)
    train_inputs, test_inputs = standardise(inputs[train], inputs[test])
    return Dataset(train_inputs, targets[train], test_inputs, targets[test], classes=2)


def read_idx(content: bytearray) -> Tensor:
    """The array in an idx file, the format of MNIST: 0, 0, 8 (for bytes), number of dimensions, sizes, values."""
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise ValueError("not an idx file of bytes")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise ValueError(f"an idx file of shape {shape} with {len(content) - start} values")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def read_cifar(content: bytearray) -> tuple[Tensor, Tensor]:
    """Pixels (N, 3072) and labels (N,) from CIFAR-10's records of one label and three colour planes."""
    record = 1 + 3 * 32 * 32
    if not content or len(content) % record:
        raise ValueError(f"{len(content)} bytes are not whole records of {record}")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record)
    labels = records[:, 0].long()
    if labels.max() > 9:
        raise ValueError(f"a label of {int(labels.max())} among the classes 0 to 9")
    return records[:, 1:], labels


def read_covtype(content: bytearray) -> tuple[Tensor, Tensor]:
    """Features (N, 54) and classes 1 to 7 (N,) from lines of 55 integers, separated by commas."""
    import numpy

    columns = 55
    text = bytes(content.rstrip())
    if text.translate(None, b"0123456789,-\r\n") or re.search(rb"[0-9]{10}", text):  # ten digits overflow int32
        raise ValueError("something other than integers of at most nine digits")
    rows = text.count(b"\n") + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's word for a text that it does not read to its end
        try:
            table = numpy.fromstring(text.replace(b"\n", b","), dtype=numpy.int32, sep=",")
        except DeprecationWarning:
            raise ValueError("something other than integers") from None
    if table.size != rows * columns:
        raise ValueError(f"{table.size} integers in {rows} lines, not {columns} in each")
    values = torch.from_numpy(table).view(-1, columns)
    classes = values[:, -1].long()
    if classes.min() < 1 or classes.max() > 7:
        raise ValueError("a class outside 1 to 7")
    return values[:, :-1], classes


def read_libsvm(content: bytearray, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """Features (rows, features) and targets (rows, 1) from lines `label index:value ...` with labels +1 and -1.

    Indices start at 1; features that a line leaves out are zero.
    """
    import numpy
    from sklearn.datasets import load_svmlight_file

    try:
        values, labels = load_svmlight_file(
            io.BytesIO(content), n_features=features, dtype=numpy.float32, zero_based=False
        )
    except OverflowError:
        raise ValueError(f"an index far beyond the {features} features") from None
    if len(labels) != rows:
        raise ValueError(f"{len(labels)} rows instead of {rows}")
    if not numpy.isin(labels, (-1, 1)).all():
        raise ValueError("a label other than +1 and -1")
    if not numpy.isfinite(values.data).all():
        raise ValueError("a value that is not a finite number")
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


def _mnist_file(name: str, sha256: str, home_sha256: str) -> DataFile:
    return DataFile(name, sha256, Home(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", home_sha256))


_MNIST = [  # images for training and for testing, and their labels
    _mnist_file(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    _mnist_file(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    _mnist_file(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    _mnist_file(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
]


@dataset
def mnist(files: Files) -> Dataset:
    """Handwritten digits, 28 x 28 pixels, 60,000 for training and 10,000 for testing."""
    train, test, train_labels, test_labels = (files.read(file, read_idx) for file in _MNIST)
    train_inputs, test_inputs = standardise(train.flatten(1), test.flatten(1))
    return Dataset(train_inputs, train_labels.long(), test_inputs, test_labels.long(), classes=10)


# The sha256 of the archive is the one that other projects record; its members have the published md5.
_CIFAR_HOME = Home(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


def _cifar_file(name: str, sha256: str) -> DataFile:
    return DataFile(name, sha256, _CIFAR_HOME, member=f"cifar-10-batches-bin/{name}")


_CIFAR_TRAIN = [
    _cifar_file("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    _cifar_file("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    _cifar_file("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    _cifar_file("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    _cifar_file("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
]
_CIFAR_TEST = _cifar_file("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b")


@dataset
def cifar10(files: Files) -> Dataset:
    """Colour images of 10 classes, 3 x 32 x 32 pixels, 50,000 for training and 10,000 for testing."""
    pixels, labels = zip(*(files.read(file, read_cifar) for file in _CIFAR_TRAIN), strict=True)
    test_pixels, test_labels = files.read(_CIFAR_TEST, read_cifar)
    train_inputs, test_inputs = standardise(torch.cat(pixels), test_pixels)
    return Dataset(train_inputs, torch.cat(labels), test_inputs, test_labels, classes=10)


_COVTYPE = DataFile(
    "covtype.data",
    "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
    Home(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz",
        "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
    ),
)


@dataset
def covtype(files: Files) -> Dataset:
    """Forest cover, class 2 against the rest, 54 features, 300,000 for training and 281,012 for testing.

    There is no official test set: `split` chooses the training rows.
    """
    inputs, classes = files.read(_COVTYPE, read_covtype)
    return split_dataset(inputs, _binary(classes == 2), train_rows=300_000)


_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"


def _libsvm_file(name: str, sha256: str) -> DataFile:
    return DataFile(name, sha256, Home(_LIBSVM + name, sha256))


# No published checksum is known: the check is that the file has the published shape and labels.
_WEBSPAM = DataFile(
    "webspam_wc_normalized_unigram.svm", None, Home(_LIBSVM + "webspam_wc_normalized_unigram.svm.xz", None)
)


@dataset
def webspam(files: Files) -> Dataset:
    """Web pages, spam or not, 254 word counts, 300,000 for training and 50,000 for testing.

    There is no official test set: `split` chooses the training rows.
    """
    inputs, targets = files.read(_WEBSPAM, partial(read_libsvm, rows=350_000, features=254))
    return split_dataset(inputs, targets, train_rows=300_000)


_W8A = _libsvm_file("w8a", "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2")


@dataset
def w8a(files: Files) -> Dataset:
    """Web pages of one category (3 %) or not, 300 keywords, 40,000 for training and 9,749 for testing.

    `split` takes both parts from the official training file; the official test file is not used.
    """
    inputs, targets = files.read(_W8A, partial(read_libsvm, rows=49_749, features=300))
    return split_dataset(inputs, targets, train_rows=40_000)


_A9A_TRAIN = _libsvm_file("a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906")
_A9A_TEST = _libsvm_file("a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9")


@dataset
def a9a(files: Files) -> Dataset:
    """Census records, high income or not, 123 binary features, 32,561 for training and 16,281 for testing."""
    inputs, targets = files.read(_A9A_TRAIN, partial(read_libsvm, rows=32_561, features=123))
    test, test_targets = files.read(_A9A_TEST, partial(read_libsvm, rows=16_281, features=123))
    train_inputs, test_inputs = standardise(inputs, test)
    return Dataset(train_inputs, targets, test_inputs, test_targets, classes=2)
