"""The short form of `python -m tests.fuzz.files`, and what it has found."""

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from fuzz.files import DAMAGES, Fuzzer, commanded, damaged, digest, drawn

FAILED = ("wrong", "crashed")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_damaged_files_give_the_right_result_or_are_refused(fuzzer: Fuzzer) -> None:
    found = {number: fuzzer.case(0, number) for number in range(400)}
    assert {number: case for number, case in found.items() if case.outcome in FAILED} == {}
    counts = Counter(case.outcome for case in found.values())
    assert counts["refused"] > 300  # so the damage was there
    assert counts["open"] < 20


def test_every_file_that_is_empty_or_cut_in_half_is_refused_or_right(fuzzer: Fuzzer) -> None:
    import random

    from woodbury.experiments.errors import DataError, RunFolderError

    for name, target in fuzzer.targets.items():
        if target.use in (drawn, commanded):
            continue  # the same files, drawn, which takes a while
        whole = (fuzzer.root / name / target.file).read_bytes()
        for content in (
            b"",
            whole[: len(whole) // 2],
            whole[:-1],
            b"\0" * len(whole),
            random.Random(0).randbytes(999),
        ):
            try:
                result = fuzzer._use(name, content)
            except (RunFolderError, DataError) as error:
                assert str(error).isprintable()
            else:
                shorter = target.first_lines or not target.checked
                assert result == fuzzer.whole(name) or shorter, (name, content[:20])


def test_a_flip_in_any_header_of_a_model_is_refused_or_changes_nothing(fuzzer: Fuzzer) -> None:
    """Found by the fuzzer: a local header that Python's zipfile reads and torch does not."""
    from woodbury.experiments.errors import RunFolderError

    content = (fuzzer.root / "model" / "model.pt").read_bytes()
    refused = 0
    for place in [*range(64), *range(len(content) - 160, len(content))]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            assert fuzzer._use("model", bytes(flipped)) == fuzzer.whole("model")
        except RunFolderError as error:
            refused += "model.pt is damaged" in str(error)
    assert refused > 30


def test_a_case_is_the_same_every_time(fuzzer: Fuzzer, tmp_path: Path) -> None:
    other = Fuzzer(tmp_path)
    for number in range(5):
        first, second = fuzzer.case(3, number), other.case(3, number)
        assert (first.target, first.damage, first.outcome) == (second.target, second.damage, second.outcome)
    for name, target in fuzzer.targets.items():
        one, two = ((each.root / name / target.file).read_bytes() for each in (fuzzer, other))
        assert one == two, name


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_changes_a_file(name: str) -> None:
    import random

    content = b"".join(b'{"line": %d}\n' % number for number in range(100))
    changed = set()
    for seed in range(20):
        copy = bytearray(content)
        DAMAGES[name](copy, random.Random(seed))
        changed.add(bytes(copy))
    assert len(changed - {content}) > 5
    assert damaged(content, random.Random(0))[0] != content


def test_the_fuzzer_sees_a_result_that_is_wrong(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checksums switched off it must find what they were for."""
    from woodbury.experiments import checkpoint, config, runs

    monkeypatch.setattr(checkpoint, "_checksum", lambda version, content: "0" * 64)
    monkeypatch.setattr(config, "check_seal", lambda values, path: None)
    monkeypatch.setattr(runs, "check_seal", lambda values, path: None)
    outcomes = Counter(fuzzer.case(0, number, "config").outcome for number in range(150))
    outcomes += Counter(fuzzer.case(0, number, "compact").outcome for number in range(150))
    assert outcomes["wrong"] > 0
    assert digest(1.0) != digest(1)
