"""Files are there whole or not at all."""

import os
from pathlib import Path

import pytest

from woodbury.experiments.storage import round_numbers, write_whole


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for content in (b"first", bytearray(b"second, and longer"), b""):
        write_whole(tmp_path / "file", content)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == content


def test_the_content_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.fstat(file).st_size), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(Path(old).parent), replace(old, new)))
    write_whole(tmp_path / "file", b"content")
    assert calls == [len(b"content"), tmp_path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_numbers_are_rounded_to_what_json_can_hold() -> None:
    values = {"a": [1 / 3, float("nan"), float("-inf")], "b": (123456.7, 7, True, None, "text")}
    assert round_numbers(values) == {"a": [0.33333, None, None], "b": [123460.0, 7, True, None, "text"]}
