"""Files are there whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from woodbury._files import write_whole
from woodbury.runs.storage import RunFolderError, printable, round_numbers


def test_the_content_is_on_disk_before_it_takes_the_name_and_the_name_before_the_call_ends(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(Path(old).parent), replace(old, new)))
    write_whole(tmp_path / "file", b"content")
    assert calls == [len(b"content"), tmp_path, "folder"]


def test_a_file_is_replaced_and_what_a_kill_left_behind_goes(tmp_path):
    (tmp_path / ".unfinished").write_bytes(b"half a file")
    for content in (b"first", bytearray(b"second, and longer"), b""):
        write_whole(tmp_path / "file", content)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == content


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


def test_a_message_is_one_printable_line_of_bounded_length():
    for text in ("two\nlines\r\n", "\x1b[31m\a\0", "x" * 10**6, "\ud800\u202e", "\n" * 10**5):
        assert str(RunFolderError(text)).isprintable() and len(str(RunFolderError(text))) <= 2000
    assert printable("as it is: é 日本 'a'") == "as it is: é 日本 'a'"
