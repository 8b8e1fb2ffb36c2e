"""Data sets: their files, the readers of each form, scaling, splits, and the real data where it is at hand."""

import functools
import gzip
import hashlib
import http.server
import io
import lzma
import math
import os
import re
import struct
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import processes
from woodbury.experiments import data as datasets
from woodbury.experiments.data import DATASETS, load_dataset, split, split_dataset, standardise
from woodbury.experiments.files import ENVIRONMENT_VARIABLE, DataError, DataFile, Files

CONTENT = b"one line\n" * 1000
UNREACHABLE = "http://127.0.0.1:9/table.gz"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def table(url=UNREACHABLE, member=None, archive_sha256=None):
    """A file called `table` whose content is `CONTENT`."""
    return DataFile("table", sha256(CONTENT), url, member, archive_sha256)


def refusal(files, file, parse=bytes):
    """The message, which is one line, of the error that reading a file raises."""
    with pytest.raises(DataError) as caught:
        files.read(file, parse)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """A data folder with an empty folder for the data set `toy`."""
    (tmp_path / "toy").mkdir()
    return tmp_path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no data folder in the environment."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache")
    return tmp_path / "cache" / "toy"


@pytest.fixture
def server(tmp_path):
    """A folder on the local network that notes what is asked of it."""
    root, requests = tmp_path / "published", []
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            requests.append(self.path)

    def publish(name, content):
        (root / name).write_bytes(content)
        return f"{url}/{name}"

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=root)) as listener:
        url = f"http://127.0.0.1:{listener.server_address[1]}"
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        yield SimpleNamespace(url=url, requests=requests, publish=publish)
        listener.shutdown()


# Files in a data folder.


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_is_read_plain_or_compressed(folder, suffix, pack):
    (folder / "toy" / f"table{suffix}").write_bytes(pack(CONTENT))
    assert Files("toy", folder).read(table(), bytes) == CONTENT


def test_the_environment_names_the_folder_unless_an_argument_does(folder, monkeypatch):
    (folder / "toy" / "table").write_bytes(CONTENT)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(folder))
    assert Files("toy").read(table(), bytes) == CONTENT
    with pytest.raises(DataError):
        Files("toy", folder / "elsewhere").read(table(), bytes)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert Files("toy").folder is None


def damaged(pack):
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
    message = refusal(Files("toy", folder), table())
    assert str(folder / "toy" / name) in message and f"its home is {UNREACHABLE}" in message
    if readable is not None:
        assert f"is damaged: expected sha256 {sha256(CONTENT)}, found {sha256(readable)}" in message
    else:  # noticed without a known checksum as well
        assert f"cannot read {folder / 'toy' / name}" in message
        assert refusal(Files("toy", folder), DataFile("table", None, UNREACHABLE)) == message


@pytest.mark.parametrize("dataset", ["toy", "no_such_folder"])
def test_the_error_for_an_absent_file_says_what_to_put_where_without_a_download(folder, monkeypatch, dataset):
    monkeypatch.setattr(Files, "_download", lambda *arguments: pytest.fail("went for the network"))
    message = refusal(Files(dataset, folder), table())
    assert message.startswith(f"{folder / dataset / 'table'} is absent, also with .gz and .xz: ")
    for fact in (UNREACHABLE, "--data-dir", ENVIRONMENT_VARIABLE):
        assert fact in message


def test_an_unreadable_file_is_named(folder, monkeypatch):
    path = folder / "toy" / "table"
    path.write_bytes(CONTENT)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("woodbury.experiments.files._open", refuse)
    assert refusal(Files("toy", folder), table()).startswith(f"cannot read {path}: Permission denied; ")


# Files from the network.


def test_a_file_is_downloaded_once_and_a_damaged_copy_is_named(server, cache):
    file = table(server.publish("table.gz", gzip.compress(CONTENT, mtime=0)))
    for _ in range(2):
        assert Files("toy").read(file, bytes) == CONTENT
    assert server.requests == ["/table.gz"] and [path.name for path in cache.iterdir()] == ["table.gz"]
    (cache / "table.gz").write_bytes(gzip.compress(CONTENT, mtime=0)[:-3])
    assert str(cache / "table.gz") in refusal(Files("toy"), file)
    (cache / "table.gz").unlink()  # the way out
    assert Files("toy").read(file, bytes) == CONTENT and server.requests == ["/table.gz"] * 2


def test_the_error_of_a_failed_download_says_what_to_put_where(server, cache):
    not_there = f"{server.url}/table.gz"
    nobody = f"http://127.0.0.1:{processes.free_port()}/table.gz"
    for url, reason in [(not_there, "404"), (nobody, "refused")]:
        message = refusal(Files("toy"), table(url))
        assert message.startswith(f"cannot download {url}: ") and reason in message
        for fact in ("<folder>/toy/table", "--data-dir", ENVIRONMENT_VARIABLE):
            assert fact in message


def test_the_error_without_pooch_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    message = refusal(Files("toy"), table())
    assert "downloading needs pooch: pip install" in message and ENVIRONMENT_VARIABLE in message


def archive(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def plain(name, content=CONTENT):
    return tarfile.TarInfo(name), content


def test_an_archive_gives_the_one_member_that_is_asked_for(server, cache):
    published = archive(plain("../outside"), plain("/outside"), plain("batches/other"), plain("batches/table"))
    file = table(server.publish("batches.tar.gz", published), "batches/table", sha256(published))
    for _ in range(2):
        assert Files("toy").read(file, bytes) == CONTENT
    assert server.requests == ["/batches.tar.gz"]
    found = [own for own in cache.parent.parent.rglob("*") if own.name in ("table", "outside")]
    unpacked = [own.relative_to(cache) for own in found]
    assert unpacked == [Path("batches.tar.gz.untar/batches/table")]


@pytest.mark.parametrize(
    ("published", "is_known", "fault"),
    [
        (archive(plain("batches/table")), False, "cannot download .*hash"),  # nothing of it is unpacked
        (archive(plain("./batches/other")), True, "cannot read .*batches/table"),
        (archive(plain("batches/table", b"another")), True, f"{sha256(CONTENT)}, found {sha256(b'another')}"),
        (b"not an archive", True, "cannot download .*batches/table in it"),
    ],
)
def test_an_archive_with_another_content_is_named(server, cache, published, is_known, fault):
    url = server.publish("batches.tar.gz", published)
    file = table(url, "batches/table", sha256(published if is_known else b"another"))
    assert re.search(fault, refusal(Files("toy"), file))
    assert is_known or list(cache.iterdir()) == []


# Readers.


def idx(values):
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return bytearray(header + bytes(values.flatten().tolist()))


def covtype_lines(rows, end="\n"):
    return bytearray(("\n".join(",".join(map(str, row)) for row in rows) + end).encode())


WEBSPAM_LINES = b"+1 1:0.5 254:0.25\n-1 \n-1 2:0.125 3:1e-3\n+1 254:1\n-1 7:2\n"


def test_readers_give_what_was_written():
    pytest.importorskip("sklearn")
    for shape in ((5,), (3, 2, 4)):
        values = torch.randint(256, shape, dtype=torch.uint8)
        assert torch.equal(datasets.read_idx(idx(values)), values)
    pixels, labels = torch.randint(256, (4, 3072), dtype=torch.uint8), [3, 0, 9, 1]
    records = b"".join(bytes([label, *row.tolist()]) for label, row in zip(labels, pixels, strict=True))
    found, classes = datasets.read_cifar(bytearray(records))
    assert torch.equal(found, pixels) and classes.dtype == torch.int64 and classes.tolist() == labels
    rows = torch.randint(-500, 8000, (6, 55))
    rows[:, -1] = torch.tensor([1, 2, 3, 7, 2, 5])
    for end in ("\n", ""):
        found, classes = datasets.read_covtype(covtype_lines(rows.tolist(), end))
        assert torch.equal(found.long(), rows[:, :-1]) and classes.tolist() == [1, 2, 3, 7, 2, 5]
    found, targets = datasets.read_libsvm(bytearray(WEBSPAM_LINES), rows=5, features=254)
    expected = torch.zeros(5, 254)
    expected[0, 0], expected[0, 253], expected[2, 1], expected[2, 2] = 0.5, 0.25, 0.125, 1e-3
    expected[3, 253], expected[4, 6] = 1.0, 2.0
    assert found.dtype == targets.dtype == torch.float32 and torch.equal(found, expected)
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
        datasets.read_libsvm(bytearray(content), rows=5, features=254)


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
    train, test = (torch.randint(256, (rows, 130), dtype=torch.uint8).to(dtype) for rows in (50, 20))
    train[:, 7] = 3
    train[:, 100] = 255
    train[0, 101], train[1:, 101] = 1, 0
    copy = train.clone()
    mean, deviation = train.double().numpy().mean(axis=0), train.double().numpy().std(axis=0)
    deviation[deviation == 0] = 1.0
    for values, raw in zip(standardise(train, test), (train, test), strict=True):
        assert values.dtype == torch.float32
        expected = (raw.double().numpy() - mean) / deviation
        numpy.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, train), "the argument was changed"


def test_constants_are_exactly_zero_and_small_deviations_around_large_means_keep_their_digits():
    constants = torch.tensor([0.1, 1 / 3, 1e8 + 0.1, -1e-7], dtype=torch.float64).expand(999, 4)
    scaled, _ = standardise(constants, constants[:1])
    assert scaled.abs().max() == 0
    train = 1e6 + torch.arange(1000, dtype=torch.float64).unsqueeze(1) * 1e-3
    scaled, _ = standardise(train, train)
    assert torch.allclose(scaled.double().std(dim=0, correction=0), torch.ones(1).double(), atol=1e-6)
    assert scaled.double().mean().abs() < 1e-6


def test_a_split_is_complete_the_same_every_time_and_keeps_inputs_and_targets_together():
    # The rows themselves belong to the data sets: other ones would be other data sets under the same names.
    assert split(10, 7)[0].tolist() == [4, 1, 7, 5, 3, 9, 0]
    rows = torch.arange(1000.0).unsqueeze(1)
    data = split_dataset(rows, (rows % 3 == 0).float(), train_rows=700)
    train, test = split(1000, 700)
    assert len(train) == 700 and sorted([*train.tolist(), *test.tolist()]) == list(range(1000))
    mean, deviation = rows[train].double().mean(), rows[train].double().std(correction=0)
    parts = (data.train_inputs, data.train_targets, train), (data.test_inputs, data.test_targets, test)
    for inputs, targets, rows in parts:
        restored = (inputs.double() * deviation + mean).round().flatten().long()
        assert torch.equal(restored, rows) and torch.equal(targets, (restored % 3 == 0).float().unsqueeze(1))
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


def read_without_extras(folder):
    for name in ["sklearn", "scipy", "pooch", "tqdm", "requests", "matplotlib", "typer", "rich", "pandas"]:
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
COUNTS = {  # training and test rows of each class; those of the digits are stratified
    "digits": ([133, 136, 133, 137, 136, 136, 136, 134, 131, 135], [45, 46, 44, 46, 45, 46, 45, 45, 43, 45]),
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "cifar10": ([5000] * 10, [1000] * 10),
}
POSITIVES = {"covtype": 283_301}  # in both parts together
NEED_SKLEARN = ("digits", "webspam")


UNPACKED_LONG = {"cifar10": [pytest.mark.slow]}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=UNPACKED_LONG.get(name, ())) for name in SHAPES])
def real(request):
    """Each data set whose files are there, loaded once."""
    name = request.param
    data_folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if name != "digits" and not (data_folder and (Path(data_folder) / name).is_dir()):
        pytest.skip(f"{ENVIRONMENT_VARIABLE} names no folder that has {name}")
    if name in NEED_SKLEARN:
        pytest.importorskip("sklearn")
    return name, load_dataset(name)


def test_real_data_has_the_published_shape_and_classes(real):
    name, data = real
    train_rows, test_rows, features, classes = SHAPES[name]
    assert data.train_inputs.shape == (train_rows, features) and data.test_inputs.shape == (test_rows, features)
    assert data.classes == classes
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
