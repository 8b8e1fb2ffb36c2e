"""Data sets: their files, the readers of each form, scaling, splits, and the real data where it is at hand."""

import functools
import gzip
import hashlib
import lzma
import math
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import processes
from woodbury.experiments.data import (
    DATASETS,
    Dataset,
    load_dataset,
    read_cifar,
    read_covtype,
    read_idx,
    read_libsvm,
    split,
    split_dataset,
    standardise,
)
from woodbury.experiments.files import ENVIRONMENT_VARIABLE, DataError, DataFile, Files

CONTENT = b"one line\n" * 1000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


TABLE = DataFile("table", sha256(CONTENT), "https://example.org/table.gz")


def refusal(files: Files, file: DataFile = TABLE) -> str:
    """The message, which is one line, of the error that reading a file raises."""
    with pytest.raises(DataError) as caught:
        files.read(file, bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with an empty folder for the data set `toy`."""
    (tmp_path / "toy").mkdir()
    return tmp_path


# Files in a data folder.


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_is_read_plain_or_compressed(folder, suffix, pack):
    (folder / "toy" / f"table{suffix}").write_bytes(pack(CONTENT))
    assert Files("toy", folder).read(TABLE, bytes) == CONTENT


def test_the_environment_names_the_folder_unless_an_argument_does(folder, monkeypatch):
    (folder / "toy" / "table").write_bytes(CONTENT)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(folder))
    assert Files("toy").read(TABLE, bytes) == CONTENT
    with pytest.raises(DataError):
        Files("toy", folder / "elsewhere").read(TABLE, bytes)


def damaged(pack: Callable[[bytes], bytes]) -> bytes:
    packed = bytearray(pack(CONTENT))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


@pytest.mark.parametrize(
    ("name", "stored", "readable"),
    [
        ("table", CONTENT[:-1] + b"!", CONTENT[:-1] + b"!"),
        ("table", CONTENT[:-1], CONTENT[:-1]),
        ("table", b"", b""),
        ("table.gz", gzip.compress(b"another", mtime=0), b"another"),
        ("table.gz", gzip.compress(CONTENT, mtime=0)[:-4], None),
        ("table.gz", damaged(functools.partial(gzip.compress, mtime=0)), None),
        ("table.gz", CONTENT, None),
        ("table.xz", lzma.compress(b"another"), b"another"),
        ("table.xz", lzma.compress(CONTENT)[:-20], None),
        ("table.xz", damaged(lzma.compress), None),
        ("table.xz", CONTENT, None),
    ],
)
def test_a_damaged_file_is_named_with_its_home(folder, name, stored, readable):
    (folder / "toy" / name).write_bytes(stored)
    message = refusal(Files("toy", folder))
    assert str(folder / "toy" / name) in message and f"its home is {TABLE.home}" in message
    if readable is not None:
        assert f"is damaged: expected sha256 {sha256(CONTENT)}, found {sha256(readable)}" in message
    else:  # noticed without a known checksum as well
        assert f"cannot read {folder / 'toy' / name}" in message
        assert refusal(Files("toy", folder), DataFile("table", None, TABLE.home)) == message


@pytest.mark.parametrize("dataset", ["toy", "no_such_folder"])
def test_the_error_for_an_absent_file_or_folder_says_what_to_put_where(folder, monkeypatch, dataset):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    for named, shown in ((folder, folder), (None, Path("<folder>"))):
        message = refusal(Files(dataset, named))
        assert message.startswith(f"{shown / dataset / 'table'} is absent, also with .gz and .xz: ")
        for fact in (TABLE.home, "--data-dir", ENVIRONMENT_VARIABLE):
            assert fact in message


# Readers.


def idx(values: Tensor) -> bytearray:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return bytearray(header + bytes(values.flatten().tolist()))


@pytest.mark.parametrize("shape", [(5,), (3, 2, 4)])
def test_idx_gives_the_array_that_was_written(shape):
    values = torch.randint(256, shape, dtype=torch.uint8)
    assert torch.equal(read_idx(idx(values)), values)


def test_cifar_gives_planes_and_labels():
    pixels = torch.randint(256, (4, 3072), dtype=torch.uint8)
    labels = [3, 0, 9, 1]
    records = b"".join(bytes([label, *row.tolist()]) for label, row in zip(labels, pixels, strict=True))
    found_pixels, found_labels = read_cifar(bytearray(records))
    assert torch.equal(found_pixels, pixels)
    assert found_labels.dtype == torch.int64 and found_labels.tolist() == labels


def covtype_lines(rows: list[list[int]], end: str = "\n") -> bytearray:
    return bytearray(("\n".join(",".join(map(str, row)) for row in rows) + end).encode())


@pytest.mark.parametrize("end", ["\n", ""])
def test_covtype_gives_features_and_classes(end):
    pytest.importorskip("numpy")
    rows = torch.randint(-500, 8000, (6, 55))
    rows[:, -1] = torch.tensor([1, 2, 3, 7, 2, 5])
    features, classes = read_covtype(covtype_lines(rows.tolist(), end))
    assert torch.equal(features.long(), rows[:, :-1])
    assert classes.tolist() == [1, 2, 3, 7, 2, 5]


WEBSPAM_LINES = b"+1 1:0.5 254:0.25\n-1 \n-1 2:0.125 3:1e-3\n+1 254:1\n-1 7:2\n"


def test_libsvm_gives_dense_features_and_one_target_per_row():
    pytest.importorskip("sklearn")
    features, targets = read_libsvm(bytearray(WEBSPAM_LINES), rows=5, features=254)
    expected = torch.zeros(5, 254)
    expected[0, 0], expected[0, 253], expected[2, 1], expected[2, 2] = 0.5, 0.25, 0.125, 1e-3
    expected[3, 253], expected[4, 6] = 1.0, 2.0
    assert features.dtype == targets.dtype == torch.float32
    assert torch.equal(features, expected)
    assert targets.tolist() == [[1.0], [0.0], [0.0], [1.0], [0.0]]


@pytest.mark.parametrize(
    "content",
    [
        WEBSPAM_LINES.removesuffix(b"-1 7:2\n"),
        WEBSPAM_LINES.replace(b"254:0.25", b"255:0.25"),
        WEBSPAM_LINES.replace(b"1:0.5", b"0:0.5"),
        WEBSPAM_LINES.replace(b"+1 254", b"2 254"),
        *(WEBSPAM_LINES.replace(b"0.25", value) for value in (b"a", b"nan", b"-inf", b"1e999", b"")),
        *(
            WEBSPAM_LINES.replace(b"254:0.25", b"%s:0.25" % index)
            for index in (b"99999999999", b"2147483648", b"9" * 30, b"2147483647", b"-1", b"1.5", b"")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how older versions of numpy tell of unreadable numbers
def test_a_libsvm_file_with_other_content_is_refused(content):
    """No checksum of it is published; the other files have one."""
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError):
        read_libsvm(bytearray(content), rows=5, features=254)


def test_webspam_is_checked_by_its_shape(tmp_path):
    pytest.importorskip("sklearn")
    path = tmp_path / "webspam" / "webspam_wc_normalized_unigram.svm.xz"
    path.parent.mkdir()
    path.write_bytes(lzma.compress(WEBSPAM_LINES))
    with pytest.raises(DataError, match=f"{path} is damaged: not 350000 rows of finite numbers"):
        load_dataset("webspam", tmp_path)


# Scaling and splits.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.float64])
def test_standardise_is_what_numpy_computes(dtype):
    numpy = pytest.importorskip("numpy")
    train = torch.randint(256, (50, 130), dtype=torch.uint8)
    train[:, 7] = 3
    train[:, 100] = 255
    train[0, 101], train[1:, 101] = 1, 0
    test = torch.randint(256, (20, 130), dtype=torch.uint8)
    copy = train.clone().to(dtype), test.clone().to(dtype)

    reference, reference_test = train.numpy().astype(float), test.numpy().astype(float)
    mean, deviation = reference.mean(axis=0), reference.std(axis=0)
    deviation[deviation == 0] = 1.0
    results = standardise(*copy)
    for values, expected in zip(results, (reference, reference_test), strict=True):
        assert values.dtype == torch.float32
        numpy.testing.assert_allclose(values.numpy(), (expected - mean) / deviation, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy[0], train.to(dtype)), "the argument was changed"


def test_constants_are_exactly_zero_and_small_deviations_around_large_means_keep_their_digits():
    constants = torch.tensor([0.1, 1 / 3, 1e8 + 0.1, -1e-7], dtype=torch.float64).expand(999, 4)
    scaled, _ = standardise(constants, constants[:1])
    assert scaled.abs().max() == 0
    train = 1e6 + torch.arange(1000, dtype=torch.float64).unsqueeze(1) * 1e-3
    scaled, _ = standardise(train, train)
    assert torch.allclose(scaled.double().std(dim=0, correction=0), torch.ones(1).double(), atol=1e-6)
    assert scaled.double().mean().abs() < 1e-6


def test_a_split_is_complete_without_overlap_and_the_same_every_time():
    train, test = split(1000, 700)
    assert len(train) == 700 and sorted([*train.tolist(), *test.tolist()]) == list(range(1000))
    # The rows themselves belong to the data sets: other ones would be other data sets under the same names.
    assert split(10, 7)[0].tolist() == [4, 1, 7, 5, 3, 9, 0]


def test_the_two_parts_of_a_split_keep_inputs_and_targets_together():
    rows = torch.arange(100.0).unsqueeze(1)
    data = split_dataset(rows, (rows % 3 == 0).float(), train_rows=60)
    train, test = split(100, 60)
    mean, deviation = rows[train].double().mean(), rows[train].double().std(correction=0)
    parts = (data.train_inputs, data.train_targets, train), (data.test_inputs, data.test_targets, test)
    for inputs, targets, rows in parts:
        restored = (inputs.double() * deviation + mean).round().flatten().long()
        assert torch.equal(restored, rows)
        assert torch.equal(targets, (restored % 3 == 0).float().unsqueeze(1))
    assert data.classes == 2 and isinstance(data.loss(), nn.BCEWithLogitsLoss)


# Data sets.


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_described_in_a_line_and_says_where_its_first_file_should_be(name, tmp_path):
    assert (DATASETS[name].__doc__ or "").split("\n")[0].endswith(".")
    with pytest.raises(DataError) as caught:
        load_dataset(f"{name}?", tmp_path)
    assert str(caught.value) == f"unknown data set '{name}?'; there are: {', '.join(DATASETS)}"
    if name != "digits":  # which is part of scikit-learn
        with pytest.raises(DataError) as caught:
            load_dataset(name, tmp_path)
        assert str(caught.value).startswith(str(tmp_path / name)) and "https://" in str(caught.value)


def test_digits_split_is_fixed_stratified_and_complete():
    pytest.importorskip("sklearn")
    first, second = load_dataset("digits"), load_dataset("digits")
    assert torch.equal(first.train_inputs, second.train_inputs)
    assert (len(first.train_inputs), len(first.test_inputs)) == (1347, 450)
    assert isinstance(first.loss(), nn.CrossEntropyLoss)
    share = torch.bincount(first.train_targets) / torch.bincount(
        torch.cat([first.train_targets, first.test_targets])
    )
    assert (share - 1347 / 1797).abs().max() < 0.01


def read_without_extras(folder: Path) -> None:
    for name in ["sklearn", "scipy", "matplotlib", "typer", "rich", "pandas"]:
        for loaded in [module for module in sys.modules if module.split(".")[0] in (name, "woodbury")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]
    from woodbury.experiments import data, files

    readers = {"table": data.read_idx, "batch": data.read_cifar, "lines": data.read_covtype}
    for name, read in readers.items():
        values = files.Files("toy", folder).read(files.DataFile(name, None, ""), read)
        values = values[0] if isinstance(values, tuple) else values
        data.standardise(values, values)


def test_folders_and_their_readers_need_torch_and_numpy_alone(folder):
    (folder / "toy" / "table.xz").write_bytes(lzma.compress(bytes(idx(torch.arange(6).view(2, 3)))))
    (folder / "toy" / "batch.gz").write_bytes(gzip.compress(bytes(2 * 3073)))
    (folder / "toy" / "lines").write_bytes(covtype_lines([[1] * 55]))
    done = processes.run_alone(read_without_extras, folder)
    assert done.returncode == 0, done.stderr


# The real data: (training rows, test rows, features, classes), and how many of each class.

SHAPES = {
    "digits": (1347, 450, 64, 10),
    "mnist": (60_000, 10_000, 784, 10),
    "cifar10": (50_000, 10_000, 3072, 10),
    "covtype": (300_000, 281_012, 54, 2),
    "webspam": (300_000, 50_000, 254, 2),
}
COUNTS = {  # training and test rows of each class
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "cifar10": ([5000] * 10, [1000] * 10),
}
POSITIVES = {"covtype": 283_301}  # in both parts together
NEED_SKLEARN = ("digits", "webspam")


@pytest.fixture(scope="module", params=SHAPES)
def real(request: pytest.FixtureRequest) -> tuple[str, Dataset]:
    """Each data set whose files are there, loaded once."""
    name: str = request.param
    data_folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if name != "digits" and not (data_folder and (Path(data_folder) / name).is_dir()):
        pytest.skip(f"{ENVIRONMENT_VARIABLE} names no folder that has {name}")
    if name in NEED_SKLEARN:
        pytest.importorskip("sklearn")
    return name, load_dataset(name)


def test_real_data_has_the_published_shape_and_classes(real):
    name, data = real
    train_rows, test_rows, features, classes = SHAPES[name]
    assert data.train_inputs.shape == (train_rows, features)
    assert data.test_inputs.shape == (test_rows, features)
    assert (data.features, data.classes) == (features, classes)
    binary = classes == 2
    for targets, rows in ((data.train_targets, train_rows), (data.test_targets, test_rows)):
        assert targets.shape == ((rows, 1) if binary else (rows,))
        assert targets.dtype == (torch.float32 if binary else torch.int64)
        assert targets.unique().tolist() == list(range(classes))
        undecided = data.loss()(torch.zeros(rows, 1 if binary else classes), targets)
        assert undecided.item() == pytest.approx(math.log(classes), rel=1e-4)
    counts = [torch.bincount(targets.flatten().long()) for targets in (data.train_targets, data.test_targets)]
    if name in COUNTS:
        assert tuple(count.tolist() for count in counts) == COUNTS[name]
    if name in POSITIVES:
        assert sum(int(count[1]) for count in counts) == POSITIVES[name]
        shares = [float(count[1] / count.sum()) for count in counts]
        assert shares[0] == pytest.approx(shares[1], rel=0.2)


def test_real_training_features_have_zero_mean_and_unit_variance_or_are_zero(real):
    _, data = real
    assert data.train_inputs.dtype == data.test_inputs.dtype == torch.float32
    assert torch.isfinite(data.test_inputs).all()
    for columns in data.train_inputs.split(64, dim=1):
        values = columns.double()
        constant = (values == 0).all(dim=0)
        assert values.mean(dim=0).abs().max() < 1e-5
        deviation = values.std(dim=0, correction=0)[~constant]
        assert torch.allclose(deviation, torch.ones_like(deviation), atol=1e-5)
