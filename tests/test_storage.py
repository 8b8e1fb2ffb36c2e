"""Files are there whole or not at all."""

import os
from pathlib import Path

import pytest

from woodbury.runs.storage import (
    RunFolderError,
    checksum,
    printable,
    round_numbers,
    sync_folder,
    with_checksum,
    write_whole,
)


def test_a_file_is_written_and_replaced(tmp_path):
    for content in (b"first", bytearray(b"second, and longer"), b""):
        write_whole(tmp_path / "file", content)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == content


def test_the_content_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(Path(old).parent), replace(old, new)))
    write_whole(tmp_path / "file", b"content")
    assert calls == [len(b"content"), tmp_path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(call, error, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise error

    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_numbers_are_rounded_to_what_json_can_hold():
    values = {"a": [1 / 3, float("nan"), float("-inf")], "b": (123456.7, 7, True, None, "text")}
    assert round_numbers(values) == {"a": [0.33333, None, None], "b": [123460.0, 7, True, None, "text"]}


def test_a_checksum_depends_on_every_value_and_on_nothing_else():
    values = {"a": 1, "b": [1.5, {"c": None}]}
    assert checksum(values) == checksum({"b": [1.5, {"c": None}], "a": 1, "sha256": "anything"})
    others = [{**values, "a": 2}, {**values, "a": 1.0}, {**values, "b": [1.5, {"c": 0}]}, {"a": 1}, {}]
    assert checksum(values) not in map(checksum, others) and len(checksum(values)) == 64
    sealed = with_checksum({"a": (1, 2)})
    assert sealed["a"] == [1, 2] and sealed["sha256"] == checksum(sealed)


def test_a_folder_that_cannot_be_synchronised_is_no_error(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    sync_folder(tmp_path)
    sync_folder(tmp_path / "absent")
    assert len(synced) == 1


def test_a_message_is_one_printable_line_of_bounded_length():
    for text in ("two\nlines\r\n", "\x1b[31m\a\0", "x" * 10**6, "\ud800\u202e", "\n" * 10**5):
        assert printable(text, 100).isprintable() and len(printable(text, 100)) <= 100
        assert str(RunFolderError(text)).isprintable() and len(str(RunFolderError(text))) <= 2000
    assert printable("as it is: é 日本 'a'", 100) == "as it is: é 日本 'a'"
