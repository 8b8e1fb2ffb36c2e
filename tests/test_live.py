"""The page that follows runs while they go on."""

import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import woodbury
from test_cli import invoke
from woodbury.experiments import report
from woodbury.experiments.errors import RunFolderError
from woodbury.experiments.watch import watch


def recorder(folder: Path) -> woodbury.Recorder:
    return woodbury.Recorder(folder, problem="waves", method="mine")


def test_the_page_is_written_again_whenever_records_were_added(tmp_path: Path) -> None:
    """Between two looks, which the test takes turns with, the loop records what it is told to."""
    looks = 0
    pages = tmp_path / "page"

    def wait(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert seconds == 0.5
        if looks == 3:
            record.step(loss=2.0)
            record.epoch(train_loss=0.1234)
        if looks == 6:
            record.epoch(train_loss=0.0567)
        if looks == 9:
            record.close()
            with recorder(tmp_path / "runs" / "b") as other:
                other.epoch(train_loss=0.0089)

    seen = watch([tmp_path / "runs"], pages, 0.5, wait)
    first = next(seen)
    assert isinstance(first, RunFolderError) and "does not exist" in str(first) and looks == 0
    record = recorder(tmp_path / "runs" / "a")
    second = next(seen)
    assert isinstance(second, RunFolderError) and "no run has a result yet" in str(second) and looks == 1
    for number, at in (("0.1234", 3), ("0.0567", 6), ("0.0089", 9)):
        page = next(seen)
        assert page == pages / "report.html" and looks == at
        assert number in page.read_text(encoding="utf-8")
    assert [path.name for path in pages.iterdir()] == ["report.html"]  # no figures while runs go on


def test_only_a_page_that_is_watched_reloads_itself(tmp_path: Path) -> None:
    with recorder(tmp_path / "a") as record:
        record.epoch(train_loss=1.0)
    runs = report.load([tmp_path])
    assert "const REFRESH = 2.5;" in report.html(runs, refresh=2.5)
    assert "const REFRESH = null;" in report.html(runs)


def test_ctrl_c_ends_the_watch_with_the_ordinary_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "const REFRESH = 1.5;" in page
        if len(waits) == 3:
            raise KeyboardInterrupt

    with recorder(tmp_path / "a") as record:
        record.epoch(train_loss=1.0)
    monkeypatch.setattr(time, "sleep", wait)
    result = invoke("report", "--watch", tmp_path, "--every", 1.5)
    assert result.exit_code == 0 and waits == [1.5] * 3
    assert result.output.count("watching: open") == 1
    assert "const REFRESH = null;" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {"report.html", "records.json", "waves.png", "waves.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_ctrl_c_before_any_run_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    result = invoke("report", "--watch", tmp_path / "absent")
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"woodbury: {tmp_path / 'absent'} does not exist"
