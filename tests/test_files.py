"""Files that are damaged, cut, hostile or of another version: a right result, or one line that names the file."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import processes
from fuzz.files import DATA, Fuzzer, commanded, stop_after, tiny_config
from run_folders import assert_one_line, assert_same_end, contents, invoke
from woodbury._files import sealed, unsealed
from woodbury.experiments import train as training
from woodbury.experiments.files import DataError
from woodbury.experiments.train import InterruptedRunError, train
from woodbury.runs import config, report
from woodbury.runs.config import FORMAT, RunConfig, RunFolderError
from woodbury.runs.records import Records

STEPS = 12  # after which the unfinished run stands


def unfinished(folder, optimizer="smw-gn"):
    with pytest.raises(InterruptedRunError):
        train(tiny_config(optimizer), folder, data=DATA, stop=stop_after(STEPS))
    return folder


def resume(folder):
    train(tiny_config(), folder, data=DATA, resume=True)


def refusal(call, *facts):
    """The call raises an error of one line that states these facts."""
    with pytest.raises((RunFolderError, DataError)) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2000
    for fact in facts:
        assert str(fact) in message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(), folder, data=DATA)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A complete run to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 95, -1])
def test_a_checkpoint_that_was_cut_is_refused_with_the_way_out(length, whole, tmp_path):
    folder = unfinished(tmp_path / "run")
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:length])
    before = contents(folder)
    refusal(lambda: resume(folder), path, "is damaged", "delete checkpoint.pt to train from the start")
    assert contents(folder) == before  # a refusal changes nothing
    path.unlink()
    resume(folder)
    assert_same_end(folder, whole)


@dataclasses.dataclass
class _RunsCode:
    path: Path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_checkpoint_cannot_run_code_and_is_not_unpickled_unless_its_checksum_agrees(tmp_path, monkeypatch):
    folder = unfinished(tmp_path / "run")
    path = folder / "checkpoint.pt"
    path.write_bytes(sealed("checkpoint", FORMAT, {"model": _RunsCode(tmp_path / "made")}))
    refusal(lambda: resume(folder), path, "delete checkpoint.pt to train from the start")
    assert not (tmp_path / "made").exists()
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("unpickled"))
    refusal(lambda: resume(folder), path, "is damaged")


def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path):
    """Its records are others; a network of other sizes is named by torch."""
    folder, other = unfinished(tmp_path / "run"), unfinished(tmp_path / "other", "smw-ng")
    before = (folder / "records.jsonl").read_bytes()
    shutil.copy(other / "checkpoint.pt", folder)
    refusal(lambda: resume(folder), "cannot resume from", "records.jsonl has changed since the checkpoint")
    values = unsealed((other / "checkpoint.pt").read_bytes(), "checkpoint", FORMAT)
    values["model"]["0.bias"] = torch.zeros(5)
    (folder / "checkpoint.pt").write_bytes(sealed("checkpoint", FORMAT, values))
    refusal(lambda: resume(folder), "cannot resume from", "0.bias", "delete checkpoint.pt to train from the start")
    assert (folder / "records.jsonl").read_bytes() == before


def test_want_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch):
    """Or someone would be told to delete a good checkpoint."""
    folder = unfinished(tmp_path / "run")

    def full(*arguments, **options):
        raise MemoryError

    for place, name in ((torch, "load"), (torch.nn.Module, "load_state_dict")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(MemoryError):
                resume(folder)
    resume(folder)


# -- one process at a time, and the end of a run ---------------------------------------------------------------


def test_a_second_process_does_not_train_in_the_same_folder(tmp_path):
    folder = unfinished(tmp_path / "run")
    before = contents(folder)
    with Records(folder):
        refusal(lambda: resume(folder), f"{folder} is in use, by another process")
    assert contents(folder) == before
    resume(folder)


def test_a_checkpoint_goes_only_after_the_end_is_on_disk(tmp_path, monkeypatch):
    """Else a power cut could leave neither; and what `complete` has checksums of is there before it."""
    folder = unfinished(tmp_path / "run")
    seen = []
    mark, unlink = training.mark_complete, Path.unlink

    def note(act):
        return lambda *arguments, **options: (seen.append(set(contents(folder))), act(*arguments, **options))[1]

    monkeypatch.setattr(training, "mark_complete", note(mark))
    monkeypatch.setattr(Path, "unlink", note(unlink))
    resume(folder)
    before = {"checkpoint.pt", "config.json", "model.pt", "records.jsonl"}
    assert seen == [before, before | {"complete"}]
    assert set(contents(folder)) == before - {"checkpoint.pt"} | {"complete"}


def test_a_damaged_model_of_a_complete_run_is_named(whole, copied):
    path = copied / "model.pt"
    good = path.read_bytes()
    for name in ("records.jsonl", "model.pt"):  # as sha256sum writes it
        line = f"{hashlib.sha256((copied / name).read_bytes()).hexdigest()}  {name}\n"
        assert line in (copied / "complete").read_text()
    for place in (0, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 64]) + good[place + 1 :])
        refusal(lambda: resume(copied), path, "is damaged", "delete complete, and the run counts as unfinished")
    path.unlink()
    refusal(lambda: resume(copied), path, "delete complete, and the run counts as unfinished")
    (copied / "complete").unlink()  # the way out
    resume(copied)
    assert_same_end(copied, whole)


# -- configurations and records --------------------------------------------------------------------------------


def rewrite_config(folder, **changes):
    """Change a configuration together with its checksum."""
    dataclasses.replace(RunConfig.load(folder), **changes).save(folder)


def test_a_changed_value_of_a_configuration_is_noticed_and_other_spacing_is_not(whole, copied):
    path = copied / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"lr": 0.3', '"lr": 0.8'))
    refusal(lambda: RunConfig.load(copied), path, "is damaged", "put back a whole copy")
    path.write_text(text.replace("\n", "\r\n").replace("    ", "\t"))  # an editor did this
    assert RunConfig.load(copied) == RunConfig.load(whole)


@pytest.mark.parametrize(
    "content", ["", "null", "5", "[" * 10**5, "\ufeff{}", f'{{"format": {FORMAT}}}', "\0" * 9, "[]"]
)
def test_a_file_that_is_no_file_of_a_run_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    refusal(lambda: report.load([tmp_path]), tmp_path / "config.json", "is damaged")


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json"])
def test_a_file_of_another_format_is_refused_by_its_number(name, tmp_path):
    folder = unfinished(tmp_path / "run")
    newer = json.dumps({"format": FORMAT + 1, "what": "nobody knows"}).encode()
    (folder / name).write_bytes(newer if name == "config.json" else sealed("checkpoint", FORMAT + 1, {"what": 1}))
    before = contents(folder)
    versions = f"another version of woodbury (format {FORMAT + 1}, this one reads {FORMAT})"
    refusal(lambda: resume(folder), folder / name, versions)
    assert contents(folder) == before


def test_the_records_of_an_unfinished_run_are_read_up_to_the_cut(tmp_path):
    folder = unfinished(tmp_path / "run")
    (run,) = report.load([folder])
    path = folder / "records.jsonl"
    content = path.read_bytes()
    for length in range(len(content), len(content) // 2, -37):
        path.write_bytes(content[:length])
        (shorter,) = report.load([folder])
        assert len(shorter.steps) + len(shorter.epochs) == content[:length].count(b"\n")
        assert shorter.steps == run.steps[: len(shorter.steps)]
        assert shorter.epochs == run.epochs[: len(shorter.epochs)]


def test_records_after_the_checkpoint_go_and_a_change_before_it_stops_the_resume(whole, tmp_path):
    folder = unfinished(tmp_path / "run")
    path = folder / "records.jsonl"
    good = path.read_bytes()
    for bad in (good.replace(b": 0.", b": 1.", 1), good[:-1]):
        path.write_bytes(bad)
        refusal(lambda: resume(folder), folder / "checkpoint.pt", "records.jsonl has changed since")
        assert path.read_bytes() == bad
    path.write_bytes(good + good.splitlines(keepends=True)[-1] + b'{"kind": "st')
    resume(folder)
    assert_same_end(folder, whole)


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "[" * 100_000, "[1, 2]", "5", "null", "9" * 5000, '{"step": 1}'),
        *('{"kind": "other", "step": 1}', '{"kind": [], "step": 1}'),
    ],
)
def test_a_line_of_an_unfinished_run_that_is_no_record_is_named(line, copied, tmp_path):
    (copied / "complete").unlink()
    path = copied / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for number in (1, len(lines) + 1):
        path.write_text("".join([*lines[: number - 1], f"{line}\n", *lines[number - 1 :]]))
        result = invoke("report", copied, "--out", tmp_path / "out")
        assert_one_line(result, f"{path} is damaged: line {number} is not the record of a step or an epoch")
    assert not (tmp_path / "out").exists()


# -- names in tables, figures and pages ------------------------------------------------------------------------

MARKUP = [
    *("[red]a[/red]", "[/]", "[link=x]", "$\\frac$", "a$b$c_{"),
    *("_hidden", "<b>&amp;", "](x)`|`", "../up", "日本"),
]


def test_markup_in_names_is_text_everywhere(whole, tmp_path):
    """In the table on the console, in the figure and its file name, and in the page; the folders have it too."""
    runs, out = tmp_path / "[runs]", tmp_path / "[bold]out"
    for index, name in enumerate(MARKUP):
        copy = Path(shutil.copytree(whole, runs / f"{index}"))
        rewrite_config(copy, dataset="[/]$x_{../../up", optimizer=name, settings={"note": name})
    result = invoke("report", runs, "--out", out)
    assert result.exit_code == 0, result.output
    for name in MARKUP:
        assert name in result.output
    assert "[bold]out" in result.output.replace("\n", "")
    stem = "%5b%2f%5d%24x_%7b..%2f..%2fup"
    assert {path.name for path in out.iterdir()} == {"report.html", f"{stem}.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"[runs]", "[bold]out"}
    figure = report.draw(report.load([runs]))
    labels = [text.get_text().replace("\\$", "$").strip() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == sorted(MARKUP)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<b>&amp;" not in page and "\\u003cb>&amp;" in page


def test_names_that_are_alike_or_long_or_not_printable_are_told_apart_and_shown_as_text(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "draw", lambda runs: None)  # only the names matter
    monkeypatch.setattr(report, "image", lambda figure: b"")
    for index, dataset in enumerate(("x/y", "x:y", "\x1b[2Ja\n")):
        for letter in ("a", "b"):
            settings = {f"s{k}": letter * 90 for k in range(90)}
            copy = Path(shutil.copytree(whole, tmp_path / f"{letter}{index}"))
            rewrite_config(copy, dataset=dataset, optimizer="\x1b[31mred", settings=settings)
    for table in report.ends_tables(report.load([tmp_path])).values():
        assert len(table["rows"]) == 2 and all(len(row[0]) <= 200 for row in table["rows"])
    result = invoke("report", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.output.replace("\n", "").isprintable()
    figures = {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".png"}
    assert figures == {"x%2fy.png", "x%3ay.png", "%1b%5b2Ja%a.png"}


@pytest.mark.parametrize("name", ["dig\nits", "\x1b[2J", "x" * 10_000, "[/red]", "../etc"])
@pytest.mark.parametrize(
    "command", [["train"], ["compare"], ["reproduce"], ["report"], ["train", "digits", "--set"]]
)
def test_a_hostile_argument_ends_in_one_line(command, name, tmp_path):
    result = invoke(*command, name, "--out", tmp_path / "runs")
    assert_one_line(result)
    assert not (tmp_path / "runs").exists()


# -- the short forms of `python -m tests.fuzz.files`, with what it can see, and of `tests.soak.kill` -------------


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


# -- determinism -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_with_the_same_command_end_bit_identically(tmp_path):
    """Forked and started: the order of sets differs."""
    arguments = ["train", "digits", "--epochs", "1", "--seed", "5", "--out"]
    forked = processes.run_alone(processes.command, *arguments, tmp_path / "first", OMP_NUM_THREADS=1)
    assert forked.returncode == 0, forked.stderr
    command, environment = [sys.executable, "-m", "woodbury"], {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*command, *arguments, str(tmp_path / "second")]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    first, second = (tmp_path / name / "digits-1" / "smw-gn-seed5" for name in ("first", "second"))
    assert_same_end(first, second)
