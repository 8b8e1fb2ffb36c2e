"""Files are there whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from woodbury._files import write_whole


def test_the_content_is_on_disk_before_it_takes_the_name_and_the_name_before_the_call_ends(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note(file):
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
    def fail(*arguments):
        raise error

    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"
