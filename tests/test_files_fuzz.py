"""The short forms of `python -m tests.fuzz.files`, with what it can see, and of `python -m tests.soak.kill`."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from fuzz.files import Fuzzer, commanded
from woodbury.runs import config


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_damaged_files_give_the_right_result_or_are_refused(fuzzer):
    found = {number: fuzzer.case(0, number) for number in range(80)}
    assert {number: case for number, case in found.items() if case.outcome in ("wrong", "crashed")} == {}
    counts = Counter(case.outcome for case in found.values())
    assert counts["refused"] > 60  # so the damage was there
    assert {case.target for case in found.values() if case.outcome == "open"} <= {
        name for name, target in fuzzer.targets.items() if not target.checked
    }


def test_a_whole_file_is_right_and_one_that_is_empty_or_cut_is_refused_or_right(fuzzer):
    for name, target in fuzzer.targets.items():
        if target.read is commanded:
            continue  # the same files, drawn, which takes a while
        whole = (fuzzer.root / name / target.file).read_bytes()
        assert fuzzer.judge(name, whole) == ("right", ""), name
        for content in (b"", whole[: len(whole) // 2], whole[:-1], b"\0" * len(whole)):
            outcome, detail = fuzzer.judge(name, content)
            assert outcome in ("right", "refused") or (outcome == "open" and not target.checked), (name, detail)


def test_a_case_is_the_same_every_time(fuzzer, tmp_path):
    other = Fuzzer(tmp_path)
    for number in range(5):
        first, second = fuzzer.case(3, number), other.case(3, number)
        assert (first.target, first.damage, first.outcome) == (second.target, second.damage, second.outcome)
    for name, target in fuzzer.targets.items():
        one, two = ((each.root / name / target.file).read_bytes() for each in (fuzzer, other))
        assert one == two, name


def test_the_fuzzer_sees_a_result_that_is_wrong(fuzzer, monkeypatch):
    """With the checksum switched off it must find what it was for."""
    sha256 = json.loads((fuzzer.root / "config" / "config.json").read_text())["sha256"]
    monkeypatch.setattr(config, "_checksum", lambda fields: sha256)
    outcomes = Counter(fuzzer.case(0, number, "config").outcome for number in range(100))
    assert outcomes["wrong"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened():
    # in a process of its own: one that has run a model has threads, and must not be forked
    arguments = ["--kills", "4", "--fit-kills", "4", "--seed", "1"]
    program = f"import sys; from tests.soak.kill import main; sys.exit(main({arguments}))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 kills") == done.stdout.count("all equal") == 2  # of commands, and of fits
