"""Files that are damaged, cut, hostile or of another version: a right result, or one line that names the file."""

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import processes
from woodbury import cli
from woodbury.experiments import report
from woodbury.experiments import train as training
from woodbury.experiments.config import RunConfig
from woodbury.experiments.data import Dataset, read_covtype, read_libsvm
from woodbury.experiments.errors import DataError, RunFolderError
from woodbury.experiments.files import DataFile, Files, Home
from woodbury.experiments.presets import PRESETS
from woodbury.experiments.train import InterruptedRunError, train

STEPS = 12  # after which the unfinished run stands


def tiny_data() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
    return Dataset(inputs[:40], targets[:40], inputs[40:], targets[40:], classes=3)


DATA = tiny_data()


def tiny_run(optimizer: str = "smw-gn", **settings: Any) -> RunConfig:
    """A run of 20 steps, 5 to an epoch."""
    preset = PRESETS["digits"]
    config = preset.config("digits", optimizer, seed=1, epochs=4, batch_size=8, settings=settings)
    return dataclasses.replace(config, widths=(6, 4, 3))


def stop_after(steps: int) -> Callable[[], bool]:
    calls = iter(range(1, 10**9))
    return lambda: next(calls) >= steps


def unfinished(folder: Path, optimizer: str = "smw-gn") -> Path:
    with pytest.raises(InterruptedRunError):
        train(tiny_run(optimizer), folder, data=DATA, stop=stop_after(STEPS))
    return folder


def resume(folder: Path, optimizer: str = "smw-gn", **settings: Any) -> None:
    train(tiny_run(optimizer, **settings), folder, data=DATA, resume=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return loaded


def timeless(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_end(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert timeless(first) == timeless(second)


def refusal(call: Callable[[], Any], *facts: str) -> str:
    """The one line of the error that a call raises; it states these facts."""
    with pytest.raises((RunFolderError, DataError)) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2000
    for fact in facts:
        assert fact in message
    return message


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def assert_one_line(result: Result, *facts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.output.startswith("woodbury: ") and len(result.output.splitlines()) == 1
    assert result.output.strip().isprintable()
    for fact in facts:
        assert fact in result.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs without a break, by optimizer."""
    folders = {name: tmp_path_factory.mktemp("whole") / name for name in ("smw-gn", "kfac", "adam")}
    for name, folder in folders.items():
        train(tiny_run(name), folder, data=DATA)
    return folders


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["smw-gn", "kfac", "adam"])
def test_no_flipped_byte_of_a_checkpoint_is_resumed_from(optimizer: str, tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run", optimizer)
    content = (folder / "checkpoint.pt").read_bytes()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for place in range(0, len(content), len(content) // 60):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        (folder / "checkpoint.pt").write_bytes(flipped)
        refusal(
            lambda: resume(folder, optimizer), str(folder / "checkpoint.pt"), "delete it to train from the start"
        )
    (folder / "checkpoint.pt").write_bytes(content)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # a refusal changes nothing


@pytest.mark.parametrize("length", [0, 1, 30, 95, 500, -1])
def test_a_checkpoint_that_was_cut_is_refused(length: int, tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run")
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:length])
    refusal(lambda: resume(folder), str(path), "delete it to train from the start")
    path.unlink()
    resume(folder)  # the way out that the message names
    assert training.is_complete(folder)


def older_form(path: Path) -> None:
    """Rewrite a checkpoint as versions without a checksum wrote it."""
    content = path.read_bytes()
    values = torch.load(io.BytesIO(content[content.index(b"PK\x03\x04") :]), weights_only=True)
    values.pop("records_sha256", None)
    torch.save(values, path)


@pytest.mark.parametrize("optimizer", ["smw-gn", "kfac", "adam"])
def test_a_checkpoint_of_an_older_version_goes_on_and_says_what_was_not_checked(
    optimizer: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = unfinished(tmp_path / "run", optimizer)
    older_form(folder / "checkpoint.pt")
    (folder / "records.crc32").unlink(missing_ok=True)
    with pytest.warns(UserWarning, match=r"checkpoint\.pt was written by an older version of woodbury, without a"):
        resume(folder, optimizer)
    assert_same_end(folder, whole[optimizer])


def test_no_flipped_byte_inside_a_checkpoint_of_an_older_version_is_resumed_from(tmp_path: Path) -> None:
    """torch compares no CRC-32 of its archive, so the package does."""
    folder = unfinished(tmp_path / "run", "kfac")
    path = folder / "checkpoint.pt"
    older_form(path)
    content = path.read_bytes()
    values = torch.load(path, weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for weight in values["model"].values():
            for number in weight.flatten()[:3]:
                place = content.index(number.numpy().tobytes())
                flipped = bytearray(content)
                flipped[place] ^= 1
                path.write_bytes(flipped)
                refusal(lambda: resume(folder, "kfac"), str(path), "has another CRC-32")


def repacked(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the values of a checkpoint and give it a checksum that agrees."""
    from woodbury.experiments.checkpoint import write_checkpoint

    values = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    change(values)
    write_checkpoint(path, values)


def group(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["optimizer"]["param_groups"][0]
    return found


FIELD_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no model": (lambda v: v.pop("model"), "it lacks the field 'model'"),
    "no step": (lambda v: v.pop("step"), "it lacks the field 'step'"),
    "unknown": (lambda v: v.update(extra=1), "it has a field 'extra' that is not known here"),
    "text": (lambda v: v.update(step="12"), "its field 'step' is of type str, not int"),
    "true": (lambda v: v.update(epoch=True), "its field 'epoch' is of type bool, not int"),
    "negative": (lambda v: v.update(done=-1), "its field 'done' is -1"),
    "place": (lambda v: v.update(step=13), "step 13 cannot be batch 2 of 5 in epoch 3 of 4"),
    "late": (lambda v: v.update(epoch=9, step=42), "step 42 cannot be batch 2 of 5 in epoch 9 of 4"),
    "nan": (lambda v: v.update(seconds=float("nan")), "its field 'seconds' is nan"),
    "order": (
        lambda v: v.update(order_of_epoch=torch.zeros(3, dtype=torch.uint8)),
        "'order_of_epoch' has shape (3,)",
    ),
    "no tensor": (lambda v: v.update(order_of_epoch=[1]), "its field 'order_of_epoch' is no tensor"),
    "lost weight": (lambda v: v["model"].pop("0.bias"), "it lacks the parameter '0.bias'"),
    "more weights": (lambda v: v["model"].update(b=torch.ones(1)), "a parameter 'b' that the run does not have"),
    "shape": (
        lambda v: v["model"].update({"0.bias": torch.zeros(5)}),
        "its parameter '0.bias' has shape (5,) and torch.float32, not (4,) and torch.float32",
    ),
    "dtype": (lambda v: v["model"].update({"0.bias": torch.zeros(4).double()}), "torch.float64, not (4,)"),
    "not weights": (lambda v: v.update(model=[1]), "it has no parameters"),
    "no optimizer": (lambda v: v.update(optimizer=None), "its optimizer has no state"),
    "no groups": (lambda v: v["optimizer"].pop("param_groups"), "its optimizer has no param_groups"),
    "two groups": (lambda v: v["optimizer"].update(param_groups=[]), "it has 0 parameter groups, the run has 1"),
    "rate": (lambda v: group(v).update(lr=0.5), "it is of another run: there 'lr' is 0.5, here 0.3"),
    "setting": (lambda v: group(v).update(bost=2.0), "a setting 'bost' that the optimizer does not have here"),
    "damping": (lambda v: v["optimizer"]["state"].pop("damping"), "it lacks the state 'damping'"),
    "bad damping": (lambda v: v["optimizer"]["state"].update(damping="1"), "its state 'damping' is of type str"),
    "no damping": (lambda v: v["optimizer"]["state"].update(damping=float("inf")), "its state 'damping' is inf"),
    "generator": (lambda v: v["optimizer"]["state"].pop("generator"), "it lacks the state 'generator'"),
    "momentum": (
        lambda v: v["optimizer"]["state"]["momentum"].update({"0.bias": torch.zeros(5)}),
        "its state 'momentum' of '0.bias' has shape (5,)",
    ),
    "random numbers": (lambda v: v["order_of_epoch"].fill_(255), "cannot resume from"),
    "records": (
        lambda v: v.update(records=10**15),
        "records.jsonl is shorter than when the checkpoint was written",
    ),
    "other records": (
        lambda v: v.update(records_sha256="0" * 64),
        "records.jsonl has changed since the checkpoint",
    ),
}


@pytest.mark.parametrize("fault", FIELD_FAULTS)
def test_each_field_of_a_checkpoint_is_checked(fault: str, tmp_path: Path) -> None:
    """Also where the checksum agrees: another program, or another version, may have written it."""
    folder = unfinished(tmp_path / "run")
    change, message = FIELD_FAULTS[fault]
    repacked(folder / "checkpoint.pt", change)
    records = (folder / "records.jsonl").read_bytes()
    refusal(lambda: resume(folder), str(folder / "checkpoint.pt"), message, "to train from the start")
    assert (folder / "records.jsonl").read_bytes() == records


def test_a_checkpoint_of_a_later_version_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from woodbury.experiments import checkpoint

    folder = unfinished(tmp_path / "run")
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 2)
        repacked(folder / "checkpoint.pt", lambda values: None)
    refusal(lambda: resume(folder), "it has format 2, from another version of woodbury; this one reads 1")


class _RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("form", ["with a checksum", "older"])
def test_a_checkpoint_cannot_run_code(form: str, tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run")
    buffer = io.BytesIO()
    torch.save({"model": _RunsCode(tmp_path / "made")}, buffer)
    content = buffer.getvalue()
    if form != "older":
        whole = hashlib.sha256(f"1 {len(content)}\n".encode() + content).hexdigest()
        content = f"woodbury checkpoint 1 {whole} {len(content)}\n".encode() + content
    (folder / "checkpoint.pt").write_bytes(content)
    refusal(lambda: resume(folder), str(folder / "checkpoint.pt"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("damping", [{"initial": 10}, {"Constant": {"initial": 2}}, {"boost": 2, "drop": 1}, 3])
def test_a_whole_number_as_damping_is_resumed_from(damping: Any, tmp_path: Path) -> None:
    """It becomes a fraction on the way."""
    config = tiny_run(damping=damping)
    train(config, tmp_path / "whole", data=DATA)
    with pytest.raises(InterruptedRunError):
        train(config, tmp_path / "cut", data=DATA, stop=stop_after(STEPS))
    train(config, tmp_path / "cut", data=DATA, resume=True)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_want_of_memory_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or someone would be told to delete a good checkpoint."""
    folder = unfinished(tmp_path / "run")

    def full(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    for place, name in ((torch, "load"), (training._Run, "_values")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(MemoryError):
                resume(folder)
    resume(folder)


def test_a_second_process_does_not_train_in_the_same_folder(tmp_path: Path) -> None:
    from woodbury.experiments.records import Records

    folder = unfinished(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with Records(folder):
        refusal(lambda: resume(folder), f"another process is training in {folder}")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    resume(folder)


def test_a_run_that_another_process_has_just_ended_is_left_alone(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the look at the folder and the lock."""
    folder = complete_copy(whole, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    answers = iter([False, True, True, True])
    monkeypatch.setattr(training, "is_complete", lambda path: next(answers))
    resume(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_records_with_the_line_ends_of_another_system_are_resumed_and_read(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = unfinished(tmp_path / "run")
    older_form(folder / "checkpoint.pt")
    content = (folder / "records.jsonl").read_bytes().replace(b", ", b",\r")
    (folder / "records.jsonl").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume(folder)
    (run,) = report.load([folder])
    assert len(run.steps) == 20 and run.steps == [record for record in run.steps if record["kind"] == "step"]


def test_a_checkpoint_goes_only_after_the_model_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave neither."""
    folder = unfinished(tmp_path / "run")
    seen = []
    monkeypatch.setattr(
        training, "sync_folder", lambda path: seen.append(sorted(file.name for file in path.iterdir()))
    )
    resume(folder)
    assert seen == [["checkpoint.pt", "config.json", "model.pt", "records.crc32", "records.jsonl"]]


@pytest.mark.parametrize("content", ["", "flipped", "half", "not an archive"])
def test_a_damaged_model_of_a_complete_run_is_named(content: str, whole: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tiny_run(), folder, data=DATA)
    path = folder / "model.pt"
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[good.index(weights(folder)["0.weight"].numpy().tobytes()) + 2] ^= 64
    path.write_bytes({"": b"", "flipped": bytes(flipped), "half": good[:600]}.get(content, content.encode()))
    refusal(lambda: resume(folder), str(path), "delete it to train from the start")
    path.unlink()
    resume(folder)
    assert_same_end(folder, whole["smw-gn"])


# -- settings that did not exist yet, or no longer do ----------------------------------------------------------


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], Any], format: int = 3) -> None:
    """Change a configuration as a version without checksums could have written it."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("sha256", None)
    change(values)
    (folder / "config.json").write_text(json.dumps({**values, "format": format}, indent=2) + "\n")


def test_a_folder_from_before_a_setting_existed_is_resumed_with_its_default(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = unfinished(tmp_path / "digits-1" / "smw-gn-seed1")
    values = json.loads((folder / "config.json").read_text())["settings"]
    assert "gram_dtype" in values and "weight_decay" in values
    for lost in ("gram_dtype", "weight_decay"):
        rewrite_config(folder, lambda values, lost=lost: values["settings"].pop(lost))
    rewrite_config(folder, lambda values: values["settings"]["damping"]["LevenbergMarquardt"].pop("floor"))
    older_form(folder / "checkpoint.pt")
    values = torch.load(folder / "checkpoint.pt", weights_only=True)
    del values["optimizer"]["param_groups"][0]["weight_decay"]
    torch.save(values, folder / "checkpoint.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume(folder)
    assert_same_end(folder, whole["smw-gn"])


def test_a_setting_that_the_optimizer_does_not_have_is_named_on_resume(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run")
    rewrite_config(folder, lambda values: values["settings"].update(tilt=3))
    refusal(lambda: resume(folder), f"cannot resume {folder}", "another version of woodbury", "no setting 'tilt'")


# -- configurations and records --------------------------------------------------------------------------------


def complete_copy(whole: dict[str, Path], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for path in whole["smw-gn"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seed": 1', '"seed": 2'),
        ('"lr": 0.3', '"lr": 0.8'),
        ('"threads": ', '"threads": 1'),
        ("[\n    6", "[\n    7"),
    ],
)
def test_a_changed_value_of_a_configuration_is_noticed(
    old: str, new: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new))
    refusal(lambda: RunConfig.load(folder), str(folder / "config.json"), "has changed since it was written")
    (folder / "config.json").write_text(text.replace("\n", "\r\n").replace("    ", "\t"))  # an editor did this
    assert RunConfig.load(folder) == RunConfig.load(whole["smw-gn"])


def test_a_configuration_without_its_checksum_is_refused_unless_it_is_older(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    rewrite_config(folder, lambda values: None, format=4)
    refusal(lambda: RunConfig.load(folder), "it lacks its checksum")
    rewrite_config(folder, lambda values: None, format=3)
    assert RunConfig.load(folder) == RunConfig.load(whole["smw-gn"])


@pytest.mark.parametrize(
    "content", ["", "null", "[" * 100_000, '{"a": NaN}', "\ufeff{}", '{"format": 4}', "\0" * 99]
)
def test_a_configuration_that_is_no_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    refusal(lambda: RunConfig.load(tmp_path), str(tmp_path))


HOSTILE_NAMES = ["", "two\nlines", "bell\a", "\x1b[31mred", "x" * 101, "nul\0", "\u202ereversed", "half \ud800"]


@pytest.mark.parametrize("field", ["dataset", "optimizer", "setting", "value"])
@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_a_name_that_cannot_stand_in_a_table_is_refused(
    field: str, name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = complete_copy(whole, tmp_path / "run")

    def change(values: dict[str, Any]) -> None:
        if field in values:
            values[field] = name
        else:
            values["settings"].update({name: 1} if field == "setting" else {"note": name})

    rewrite_config(folder, change)
    refusal(lambda: report.load([folder]), str(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("widths", [6, size, 3]) for size in (0, -1, 2**70)),
        *((name, value) for name in ("batch_size", "epochs", "evaluations") for value in (0, -5, 2**70)),
        *(("seed", value) for value in (-1, 2**70)),
        ("device", "toaster"),
        ("dtype", "float16"),
        ("versions", {"torch": 2}),
        ("settings", {"lr": 2**70}),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any, whole: dict[str, Path], tmp_path: Path) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    rewrite_config(folder, lambda values: values.update({field: value}))
    refusal(lambda: RunConfig.load(folder), f"{folder} is damaged: its configuration has no proper '{field}'")


def changed_lines(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / "records.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


LINE_FAULTS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "digit": (
        lambda lines: [*lines[:3], lines[3].replace("e-0", "e-1").replace('": 0.', '": 1.'), *lines[4:]],
        "line 4",
    ),
    "lost": (lambda lines: [*lines[:5], *lines[6:]], "line 6"),
    "twice": (lambda lines: [*lines[:5], lines[4], *lines[5:]], "line 6"),
    "exchanged": (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], "line 6"),
    "end": (lambda lines: lines[:-1], "it ends after line"),
    "end of line": (lambda lines: [*lines[:-1], lines[-1].rstrip("\n")], "it ends after line"),
    "empty": (lambda lines: [], "it ends after line 0"),
}


@pytest.mark.parametrize("fault", LINE_FAULTS)
def test_a_change_in_the_records_of_a_complete_run_is_noticed(
    fault: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    change, message = LINE_FAULTS[fault]
    changed_lines(folder, change)
    refusal(lambda: report.load([folder]), str(folder / "records.jsonl"), message)


def test_of_an_unfinished_run_the_first_lines_are_read_and_nothing_else(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run")
    (run,) = report.load([folder])
    changed_lines(folder, lambda lines: [*lines[:-2], lines[-2][:20]])
    (shorter,) = report.load([folder])
    assert shorter.steps == run.steps[: len(shorter.steps)] and len(shorter.steps) in (STEPS - 1, STEPS - 2)
    changed_lines(folder, lambda lines: [lines[0].replace(": 0.", ": 1."), *lines[1:]])
    refusal(lambda: report.load([folder]), "line 1 does not agree with records.crc32")


def test_a_record_changed_before_the_checkpoint_stops_the_resume(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run")
    changed_lines(folder, lambda lines: [lines[0].replace(": 0.", ": 1."), *lines[1:]])
    refusal(
        lambda: resume(folder), str(folder / "checkpoint.pt"), "records.jsonl has changed since the checkpoint"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train_loss", "NaN", "is not JSON"),
        ("train_loss", "Infinity", "is not JSON"),
        ("train_loss", "1e999", "has no number 'train_loss'"),
        ("seconds", "1e999", "has no number 'seconds'"),
        ("seconds", "-1", "has a negative 'seconds'"),
        ("step", "9" * 400, "has no number 'step'"),
        ("step", "9" * 5000, "is not JSON"),
        ("step", "true", "has no number 'step'"),
        ("step", "-1", "has a negative 'step'"),
        ("epoch", "null", "has no number 'epoch'"),
        ("test_error", '"[red]x[/]"', "has no number 'test_error'"),
        ("test_error", "[" * 100_000, "is not JSON"),
        ("kind", '"step\\ud800"', "is not"),
    ],
)
def test_a_number_that_is_none_ends_in_one_line(
    key: str, value: str, message: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    """In a folder without check values, as older versions wrote it or a hand did."""
    folder = complete_copy(whole, tmp_path / "run")
    (folder / "records.crc32").unlink(missing_ok=True)

    def change(lines: list[str]) -> list[str]:
        last = json.loads(lines[-1])
        assert last["kind"] == "epoch"
        return [*lines[:-1], json.dumps({**last, key: "here"}).replace('"here"', value) + "\n"]

    changed_lines(folder, change)
    assert_one_line(invoke("report", folder, "--out", tmp_path / "out"), str(folder / "records.jsonl"), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["damping", "ratio"])
def test_a_text_in_place_of_a_number_of_a_step_is_named(key: str, whole: dict[str, Path], tmp_path: Path) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    (folder / "records.crc32").unlink(missing_ok=True)
    changed_lines(
        folder, lambda lines: [lines[0], json.dumps({**json.loads(lines[1]), key: "x"}) + "\n", *lines[2:]]
    )
    assert_one_line(invoke("report", folder, "--out", tmp_path / "out"), "line 2", f"'{key}'")


def test_steps_out_of_order_are_named(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = complete_copy(whole, tmp_path / "run")
    (folder / "records.crc32").unlink(missing_ok=True)
    changed_lines(folder, lambda lines: [lines[0], lines[3], lines[2], *lines[4:]])
    refusal(lambda: report.load([folder]), "line 3 has step 2 after step 3")


# -- the compact file of a report ------------------------------------------------------------------------------


@pytest.fixture
def compact(whole: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "records.json"
    from woodbury.experiments.runs import compact as as_text

    path.write_text(as_text(report.load([whole["smw-gn"]])))
    return path


def test_a_changed_digit_in_records_json_is_noticed(compact: Path) -> None:
    text = compact.read_text()
    place = text.index('"train_loss":[') + len('"train_loss":[')
    compact.write_text(text[:place] + "8" + text[place:])
    refusal(lambda: report.load([compact]), str(compact), "has changed since it was written")


def test_records_json_of_an_older_version_is_still_read(compact: Path) -> None:
    runs = report.load([compact])
    values = json.loads(compact.read_text())
    values.pop("sha256", None)
    compact.write_text(json.dumps({**values, "format": 3}))
    assert report.load([compact]) == runs
    compact.write_text(json.dumps({**values, "format": 4}))
    refusal(lambda: report.load([compact]), "it lacks its checksum")


@pytest.mark.parametrize("count", [10**12, -1, 2.5, "3", None, True])
def test_a_wrong_count_in_records_json_asks_for_no_memory(count: Any, compact: Path) -> None:
    values = json.loads(compact.read_text())
    values.pop("sha256", None)
    for kind in ("steps", "epochs"):
        columns = values["runs"][0][kind]
        values["runs"][0][kind] = {
            name: column[0] if isinstance(column, list) else column for name, column in columns.items()
        }
        values["runs"][0][kind]["count"] = count
    compact.write_text(json.dumps({**values, "format": 3}))
    refusal(lambda: report.load([compact]), f"{compact} is damaged: run 1")


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 100_000, '{"runs": [NaN]}', '{"format": 4, "runs": [5]}', '{"runs": 5}']
)
def test_a_records_json_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(content)
    refusal(lambda: report.load([tmp_path / "records.json"]), str(tmp_path / "records.json"))


# -- names in tables, figures and pages ------------------------------------------------------------------------

MARKUP = [
    "[red]a[/red]",
    "[/]",
    "[link=x]",
    "$\\frac$",
    "a$b$c_{",
    "_hidden",
    "<b>&amp;",
    "](x)`|`",
    "../up",
    "日本",
]


def test_markup_in_names_is_text_everywhere(whole: dict[str, Path], tmp_path: Path) -> None:
    """In the table on the console, in the figure and its file name, and in the page; the folders have it too."""
    runs, out = tmp_path / "[runs]", tmp_path / "[bold]out"
    for index, name in enumerate(MARKUP):
        copy = complete_copy(whole, runs / f"{index}")
        values = {"dataset": "[/]$x_{../../up", "optimizer": name, "settings": {"note": name}}
        rewrite_config(copy, lambda config, values=values: config.update(values))
    result = invoke("report", runs, "--out", out)
    assert result.exit_code == 0, result.output
    for name in MARKUP:
        assert name in result.output
    assert "[bold]out" in result.output.replace("\n", "")
    stem = "____x__.._.._up"
    assert {path.name for path in out.iterdir()} == {"records.json", "report.html", f"{stem}.png", f"{stem}.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {"[runs]", "[bold]out"}
    figure = report.draw(report.load([runs]))
    labels = [text.get_text().replace("\\$", "$").strip() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == sorted(MARKUP)
    drawn = (out / f"{stem}.svg").read_text(encoding="utf-8")
    assert "<b>" not in drawn
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<b>&amp;" not in page and "\\u003cb>&amp;" in page


def test_two_data_sets_whose_names_give_one_file_name_have_two_figures(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    for folder, dataset in (("a", "x/y"), ("b", "x:y")):
        copy = complete_copy(whole, tmp_path / "runs" / folder)
        rewrite_config(copy, lambda values, dataset=dataset: values.update(dataset=dataset))
    report.write(report.load([tmp_path / "runs"]), tmp_path / "out")
    figures = {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".png"}
    assert figures == {"x_y.png", "x_y-2.png"}


def test_a_label_of_many_settings_is_cut(whole: dict[str, Path], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        copy = complete_copy(whole, tmp_path / folder)
        rewrite_config(
            copy, lambda values, own=folder: values.update(settings={f"s{k}": own * 90 for k in range(90)})
        )
    for summary in report.summarise(report.load([tmp_path])):
        assert len(summary.label) <= 200


@pytest.mark.parametrize("name", ["dig\nits", "\x1b[2J", "x" * 10_000, "[/red]", "../etc"])
@pytest.mark.parametrize(
    "command", [["train"], ["compare"], ["reproduce"], ["report"], ["train", "digits", "--set"]]
)
def test_a_hostile_argument_ends_in_one_line(command: list[str], name: str, tmp_path: Path) -> None:
    result = invoke(*command, name, "--out", tmp_path / "runs")
    assert_one_line(result)
    assert len(result.output) < 2100
    assert not (tmp_path / "runs").exists()


# -- data files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["99999999999", "2147483648", "9" * 30, "2147483647", "-1", "0", "1.5", ""])
def test_a_huge_or_improper_libsvm_index_ends_in_one_line(index: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").write_text(f"1 {index}:1\n")
    file = DataFile("file", None, Home("https://example.org/file", None))
    read = Files("set", tmp_path)
    refusal(lambda: read.read(file, lambda content: read_libsvm(content, 1, 3)), str(tmp_path / "set" / "file"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "", "x"])
def test_a_libsvm_value_that_is_no_finite_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError):
        read_libsvm(bytearray(f"1 1:{value}\n".encode()), 1, 3)
    assert read_libsvm(bytearray(b"-1 3:2.5\n"), 1, 3)[0].tolist() == [[0, 0, 2.5]]


@pytest.mark.parametrize("entry", ["99999999999", "4294967297", "--1", "", "x", "1e3", "0x1"])
def test_a_covtype_entry_that_is_no_integer_is_refused(entry: str) -> None:
    good = ",".join(["7"] * 54) + ",2\n"
    assert read_covtype(bytearray(good.encode()))[0].tolist() == [[7] * 54]
    with pytest.raises(ValueError):
        read_covtype(bytearray(good.replace("7", entry, 1).encode()))


# -- fields of a policy on the command line --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["damping.initial=10"], {"LevenbergMarquardt": {"initial": 10}}),
        (["damping.initial=10", "damping.floor=0.5"], {"LevenbergMarquardt": {"initial": 10, "floor": 0.5}}),
        (["damping.initial=10", "damping.initial=20"], {"LevenbergMarquardt": {"initial": 20}}),
        (
            ['damping={"boost": 2, "initial": 3}', "damping.initial=10"],
            {"LevenbergMarquardt": {"initial": 10, "boost": 2}},
        ),
        (["damping.initial=10", 'damping={"boost": 2}'], {"LevenbergMarquardt": {"initial": 10, "boost": 2}}),
        (
            ['damping={"Constant": {"initial": 2}}', "damping.floor=0.5"],
            {"Constant": {"initial": 2, "floor": 0.5}},
        ),
        (["damping=2", "damping.floor=0.5"], {"Constant": {"initial": 2.0, "floor": 0.5}}),
    ],
)
def test_a_field_of_a_policy_can_be_set(
    entries: list[str], expected: dict[str, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[RunConfig] = []
    monkeypatch.setattr(cli, "_train_and_report", lambda given, *rest: configs.extend(given))
    result = invoke(
        "train", "digits", "--out", tmp_path, *(part for entry in entries for part in ("--set", entry))
    )
    assert result.exit_code == 0, result.output
    ((name, fields),) = expected.items()
    ((saved_name, saved),) = configs[0].settings["damping"].items()
    assert saved_name == name and fields.items() <= saved.items()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("damping.bost=2", "smw-gn: LevenbergMarquardt has no field 'bost', only initial, boost"),
        ("damping.initial=-1", "smw-gn: LevenbergMarquardt: initial must lie between 1e-18 and 1e+18, got -1"),
        ("damping.initial=NaN", "smw-gn: LevenbergMarquardt: initial must be finite"),
        ("momentum.initial=2", "smw-gn: momentum has no field 'initial': it is 0.9"),
        ("dampin.initial=2", "smw-gn: there is no setting 'dampin', only "),
        ("damping.=2", "--set takes NAME=VALUE, got 'damping.=2'"),
        (".initial=2", "--set takes NAME=VALUE, got '.initial=2'"),
        ("damping.initial.x=2", "--set takes NAME=VALUE, got 'damping.initial.x=2'"),
        ("damping=" + "[" * 100_000, "smw-gn: "),
    ],
)
def test_a_field_that_cannot_be_set_is_named(entry: str, message: str, tmp_path: Path) -> None:
    result = invoke("train", "digits", "--set", entry, "--out", tmp_path / "runs")
    assert_one_line(result, f"woodbury: {message}")


def test_the_help_says_how_to_set_a_field() -> None:
    shown = " ".join(invoke("train", "--help").output.replace("│", " ").split())
    assert "damping.initial=10" in shown


# -- determinism -----------------------------------------------------------------------------------------------


def test_two_processes_with_the_same_command_end_bit_identically(tmp_path: Path) -> None:
    """Forked and started: the order of sets differs."""
    arguments = ["train", "digits", "--epochs", "1", "--seed", "5", "--out"]
    forked = processes.run_alone(processes.command, *arguments, tmp_path / "first", OMP_NUM_THREADS=1)
    assert forked.returncode == 0, forked.stderr
    command, environment = [sys.executable, "-m", "woodbury.cli"], {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *arguments, str(tmp_path / "second")], check=True, capture_output=True, env=environment
    )
    first, second = (tmp_path / name / "digits-1" / "smw-gn-seed5" for name in ("first", "second"))
    assert (first / "model.pt").read_bytes() == (second / "model.pt").read_bytes()
    assert_same_end(first, second)


def test_the_command_says_in_one_line_that_a_checkpoint_has_no_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.PRESETS, "digits", dataclasses.replace(PRESETS["digits"], widths=(6, 4, 3)))
    monkeypatch.setattr(cli, "load_dataset", lambda name, data_dir: DATA)
    folder = unfinished(tmp_path / "digits-1" / "smw-gn-seed1")
    older_form(folder / "checkpoint.pt")
    arguments = ["train", "digits", "--epochs", 4, "--batch-size", 8, "--seed", 1, "--out", tmp_path, "--resume"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("woodbury: ")]
    assert "without a checksum" in line
