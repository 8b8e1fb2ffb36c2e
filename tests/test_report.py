"""Reports from run folders that the tests write by hand, against numbers computed here."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import numpy as np

from woodbury.experiments import report
from woodbury.experiments.config import RunConfig
from woodbury.experiments.errors import RunFolderError
from woodbury.experiments.storage import with_checksum
from woodbury.policies import from_plain, to_plain

LM = {"initial": 1.0, "boost": 1.01, "drop": 0.99, "threshold": 0.25, "floor": 1e-3}


def write_run(
    folder: Path,
    optimizer: str = "smw-gn",
    seed: int = 0,
    losses: Sequence[float | None] = (2.0, 1.0),  # after each epoch, from epoch 0 on
    *,
    dataset: str = "digits",
    settings: dict[str, Any] | None = None,
    errors: Sequence[float] | None = None,
    planned: int | None = None,
    steps_per_epoch: int = 4,
    seconds_per_epoch: float = 0.5,
    dampings: Sequence[float | None] | None = None,  # of each step
    ratios: Sequence[float | None] | None = None,
    extra_steps: int = 0,  # of an epoch that was not finished
    **config: Any,
) -> Path:
    folder.mkdir(parents=True)
    damped = optimizer not in ("sgd", "adam")
    if settings is None:
        settings = {"lr": 0.1, **({"damping": LM, "seed": seed} if damped else {})}
    epochs = len(losses) - 1
    RunConfig(
        dataset=dataset,
        optimizer=optimizer,
        settings={name: to_plain(from_plain(value)) for name, value in settings.items()},
        widths=(4, 3, 2),
        batch_size=config.pop("batch_size", 60),
        epochs=epochs if planned is None else planned,
        seed=seed,
        **config,
    ).save(folder)
    records: list[dict[str, Any]] = []
    steps = epochs * steps_per_epoch + extra_steps
    if dampings is None:
        dampings = [0.9**step if damped else None for step in range(1, steps + 1)]
    if ratios is None:
        ratios = [0.5 if damped else None] * steps

    def evaluation(epoch: int) -> None:
        records.append(
            {
                "kind": "epoch",
                "epoch": epoch,
                "step": epoch * steps_per_epoch,
                "seconds": epoch * seconds_per_epoch,
                "train_loss": losses[epoch],
                "train_error": 0.5,
                "test_loss": losses[epoch],
                "test_error": errors[epoch] if errors is not None else 0.9 / (1 + epoch),
            }
        )

    evaluation(0)
    for step in range(1, steps + 1):
        epoch = (step - 1) // steps_per_epoch + 1
        seconds = step / steps_per_epoch * seconds_per_epoch
        values = {"loss": 1 / step, "damping": dampings[step - 1], "ratio": ratios[step - 1]}
        records.append(
            {"kind": "step", "epoch": epoch, "step": step, "seconds": seconds, **values, "accepted": step % 3 > 0}
        )
        if step % steps_per_epoch == 0:
            evaluation(epoch)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def page_data(runs: Sequence[report.Run]) -> list[dict[str, Any]]:
    """The numbers inside the page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.html(runs), re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_summary_is_the_median_over_seeds(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.3, 0.1, 0.2)):
        write_run(tmp_path / f"a{seed}", seed=seed, losses=[1.0, loss], errors=[0.9, 0.1 * loss])
    write_run(tmp_path / "b", "sgd", losses=[1.0, 0.5, 0.7], errors=[0.9, 0.2, 0.3], seconds_per_epoch=3.0)
    newton, sgd = report.summarise(report.load([tmp_path]))
    assert (newton.dataset, newton.optimizer, newton.label, newton.seeds) == ("digits", "smw-gn", "smw-gn", 3)
    assert (newton.train_loss, newton.seconds, newton.epochs) == (0.2, 0.5, 1)
    assert newton.test_error == pytest.approx(0.02)
    assert newton.damping == 0.9**4
    assert newton.seconds_per_step == 0.5 / 4
    assert (sgd.label, sgd.train_loss, sgd.test_error, sgd.best_test_error) == ("sgd", 0.7, 0.3, 0.2)
    assert math.isnan(sgd.damping)


def test_curves_are_medians_and_bands_reach_from_smallest_to_largest(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    losses = generator.uniform(0.1, 2, size=(4, 6))
    errors = generator.uniform(0.01, 0.5, size=(4, 6))
    for seed in range(4):
        write_run(tmp_path / f"{seed}", seed=seed, losses=losses[seed].tolist(), errors=errors[seed].tolist())
    runs = report.load([tmp_path])
    curves = page_data(runs)[0]["entries"][0]["curves"]
    for name, values in (("train_loss", losses), ("test_error", errors)):
        assert curves[name]["epochs"] == [0, 1, 2, 3, 4, 5]
        assert curves[name]["seconds"] == [0, 0.5, 1, 1.5, 2, 2.5]
        assert curves[name]["middle"] == pytest.approx(np.median(values, axis=0), rel=1e-4)
        assert curves[name]["low"] == pytest.approx(values.min(axis=0), rel=1e-4)
        assert curves[name]["high"] == pytest.approx(values.max(axis=0), rel=1e-4)
        assert curves[name]["seeds"] == [4] * 6

    panels = {(panel.get_title(loc="left"), panel.get_xlabel()): panel for panel in report.draw(runs).axes}
    line = panels["Train loss", "epochs"].lines[0]
    assert np.asarray(line.get_ydata()) == pytest.approx(np.median(losses, axis=0))
    line = panels["Test error, %", "seconds of training"].lines[0]
    assert np.asarray(line.get_ydata()) == pytest.approx(100 * np.median(errors, axis=0))
    assert np.asarray(line.get_xdata()) == pytest.approx(0.5 * np.arange(6))
    band = panels["Train loss", "epochs"].collections[0].get_paths()[0].vertices
    assert {round(float(y), 9) for _, y in band} == {
        round(float(y), 9) for y in [*losses.min(axis=0), *losses.max(axis=0)]
    }


def test_damping_and_ratio_are_drawn_over_epochs(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    ratios = generator.normal(0.5, 1.0, size=(3, 80))
    dampings = generator.uniform(0.1, 1, size=(3, 80))
    for seed in range(3):
        write_run(
            tmp_path / f"{seed}",
            seed=seed,
            losses=[2.0, 1.0, 0.5],
            steps_per_epoch=40,
            dampings=dampings[seed].tolist(),
            ratios=[*ratios[seed, :-1].tolist(), None],  # -inf is null in a record
        )
    curves = page_data(report.load([tmp_path]))[0]["entries"][0]["curves"]
    assert curves["damping"]["epochs"] == pytest.approx(np.arange(1, 81) / 40)
    assert curves["damping"]["middle"] == pytest.approx(np.median(dampings, axis=0), rel=1e-4)
    assert curves["damping"]["high"] == pytest.approx(dampings.max(axis=0), rel=1e-4)
    # a twentieth of 80 steps: two before and two after the step itself
    ratios[:, -1] = -np.inf
    smooth = np.array([[median(ratios[seed, max(0, at - 2) : at + 3]) for at in range(80)] for seed in range(3)])
    assert curves["ratio"]["middle"] == pytest.approx(np.clip(np.median(smooth, axis=0), -0.5, 1.5), rel=1e-4)
    assert curves["ratio"]["low"] == pytest.approx(np.clip(smooth.min(axis=0), -0.5, 1.5), rel=1e-4)


def test_a_diverged_seed_counts_as_the_worst(tmp_path: Path) -> None:
    for seed, end in enumerate((0.1, 0.2, None)):
        write_run(tmp_path / f"a{seed}", seed=seed, losses=[1.0, 0.5, end])
    for seed, end in enumerate((0.1, None, None)):
        write_run(tmp_path / f"b{seed}", "sgd", seed=seed, losses=[1.0, 0.5, end])
    runs = report.load([tmp_path])
    newton, sgd = report.summarise(runs)
    assert (newton.train_loss, newton.seeds) == (0.2, 3)
    assert (sgd.train_loss, sgd.seeds) == (math.inf, 3)
    first, second = (entry["curves"]["train_loss"] for entry in page_data(runs)[0]["entries"])
    assert (first["low"][-1], first["middle"][-1], first["high"][-1]) == (0.1, 0.2, None)
    assert (second["low"][-1], second["middle"][-1], second["high"][-1]) == (0.1, None, None)


def test_of_an_unfinished_run_the_last_record_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seed=0, losses=[2.0, 1.0, 0.5, 0.25])
    write_run(tmp_path / "1", seed=1, losses=[2.2, 1.2], planned=3, extra_steps=2)
    runs = report.load([tmp_path])
    (summary,) = report.summarise(runs)
    assert (summary.seeds, summary.seeds_started, summary.epochs, summary.train_loss) == (1, 2, 3, 0.25)
    curves = page_data(runs)[0]["entries"][0]["curves"]
    assert curves["train_loss"]["seeds"] == [2, 2, 1, 1]
    assert curves["train_loss"]["middle"] == [2.1, 1.1, 0.5, 0.25]
    assert curves["damping"]["seeds"] == [2] * 6 + [1] * 6


def test_a_run_in_its_first_epoch_takes_the_length_of_an_epoch_from_another(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "smw-gn", losses=[2.0, 1.0])
    write_run(tmp_path / "1", "hf", losses=[2.0], planned=1, extra_steps=2)
    runs = report.load([tmp_path])
    assert math.isnan(report.summarise(runs)[1].seconds_per_step)
    assert page_data(runs)[0]["entries"][1]["curves"]["damping"]["epochs"] == [0.25, 0.5]
    assert "damping" not in page_data(report.load([tmp_path / "1"]))[0]["entries"][0]["curves"]


def test_evaluations_within_an_epoch_are_drawn_where_they_were_made(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "0", losses=[2.0, 1.0])
    lines = (folder / "records.jsonl").read_text().splitlines()
    half = {**json.loads(lines[0]), "epoch": 0.5, "step": 2, "seconds": 0.2, "train_loss": 1.5}
    (folder / "records.jsonl").write_text("\n".join([*lines[:3], json.dumps(half), *lines[3:]]) + "\n")
    curve = page_data(report.load([folder]))[0]["entries"][0]["curves"]["train_loss"]
    assert (curve["epochs"], curve["middle"]) == ([0, 0.5, 1], [2.0, 1.5, 1.0])


# -- reading


def test_runs_are_found_one_and_two_levels_down_and_counted_once(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "digits-1" / "sgd-seed0", "sgd")
    write_run(tmp_path / "runs" / "digits-1" / "sgd-seed1", "sgd", seed=1)
    write_run(tmp_path / "runs" / "adam-seed0", "adam")
    runs = tmp_path / "runs"
    assert len(report.load([runs / "digits-1" / "sgd-seed0"])) == 1
    assert len(report.load([runs / "digits-1"])) == 2
    assert len(report.load([runs])) == 3
    assert len(report.load([runs, runs / "digits-1", runs / ".." / "runs" / "adam-seed0"])) == 3


def test_optimizers_have_one_order_and_one_look_in_every_report(tmp_path: Path) -> None:
    names = ["adam", "zeta", "sgd", "kfac", "alpha", "hf", "smw-ng-bd", "smw-ng", "smw-gn"]
    for index, name in enumerate(names):
        for seed in (1, 0):
            write_run(tmp_path / "runs" / f"{index}-{seed}", name, seed=seed)
    runs = report.load([tmp_path / "runs"])
    ordered = ["smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac", "sgd", "adam", "alpha", "zeta"]
    assert [(run.config.optimizer, run.config.seed) for run in runs] == [
        (name, s) for name in ordered for s in (0, 1)
    ]
    looks = {entry["label"]: entry["look"] for entry in page_data(runs)[0]["entries"]}
    assert len({tuple(look.values()) for look in looks.values()}) == len(ordered)
    for entry in page_data([run for run in runs if run.config.optimizer in ("adam", "hf")])[0]["entries"]:
        assert entry["look"] == looks[entry["label"]]


def test_the_same_optimizer_with_other_settings_is_labelled_by_what_differs(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", "sgd", seed=seed, settings={"lr": 0.1, "momentum": 0.9})
        write_run(tmp_path / f"b{seed}", "sgd", seed=seed, settings={"lr": 0.01, "momentum": 0.9})
        write_run(tmp_path / f"c{seed}", settings={"damping": {**LM, "boost": 2.0}, "seed": seed}, seed=seed)
        # one of them as older versions wrote it
        rule = LM if seed else {"LevenbergMarquardt": LM}
        write_run(tmp_path / f"d{seed}", settings={"damping": rule, "seed": seed}, seed=seed)
        rule = {"Constant": {"initial": 1.0, "floor": 1e-3}}
        write_run(tmp_path / f"f{seed}", "smw-ng", settings={"damping": rule, "seed": seed}, seed=seed)
    write_run(tmp_path / "e", "adam", batch_size=30)
    runs = report.load([tmp_path])
    summaries = report.summarise(runs)
    assert [(summary.label, summary.seeds) for summary in summaries] == [
        ("smw-gn damping.boost=1.01", 2),
        ("smw-gn damping.boost=2.0", 2),
        ("smw-ng", 2),
        ("sgd lr=0.01", 2),
        ("sgd lr=0.1", 2),
        ("adam", 1),
    ]
    (section,) = page_data(runs)
    assert set(section["differing"]) == {"lr", "damping", "damping.boost", "batch_size"}
    assert len({tuple(entry["look"].values()) for entry in section["entries"]}) == 6


def test_a_line_cut_off_at_the_end_is_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", losses=[2.0, 1.0])
    whole = report.load([folder])
    with (folder / "records.jsonl").open("a") as records:
        records.write('{"kind": "step", "epoch": 2, "st')
    assert report.load([folder]) == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:2], lines[2][:10], *lines[3:]], "line 3 is not JSON"),
        (
            lambda lines: [*lines[:-1], lines[-1][:10] + "\n"],
            "line 6 is not JSON",
        ),  # cut, yet with its end of line
        (lambda lines: [*lines[:1], "\n", *lines[1:]], "line 2 is not JSON"),
        (lambda lines: ["[1, 2]\n", *lines], "line 1 is not the record of a step or an epoch"),
        (lambda lines: ['{"kind": "epoch", "epoch": 0}\n', *lines], "line 1 has no number 'step'"),
        (lambda lines: [lines[0].replace("2.0", '"two"'), *lines[1:]], "line 1 has no number 'train_loss'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "records.jsonl"
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    with pytest.raises(RunFolderError) as raised:
        report.load([tmp_path])
    assert str(raised.value) == f"{path} is damaged: {message}"


def test_a_path_that_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("not JSON")
    (tmp_path / "list.json").write_text("[]")
    old = write_run(tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**config, "format": 1}))
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.json").write_text("{")
    fresh = write_run(tmp_path / "fresh")
    (fresh / "records.jsonl").unlink()
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(with_checksum({"groups": []})))
    for path, message in {
        tmp_path / "absent": "does not exist",
        tmp_path / "empty": "holds no run folders",
        tmp_path / "note.txt": "is damaged, or no file of a run",
        tmp_path / "list.json": "it is no JSON object",
        old: "another version",
        damaged: "is damaged",
        fresh: "no run has a result yet",
        odd: "is no records.json: it lists no runs",
    }.items():
        with pytest.raises(RunFolderError, match=message) as raised:
            report.load([path])
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_run_without_a_result_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    fresh = write_run(tmp_path / "fresh", seed=1)
    (fresh / "records.jsonl").write_text("")
    assert [run.config.seed for run in report.load([tmp_path])] == [0]


# -- writing


def test_write_leaves_figures_page_and_records_of_each_data_set(tmp_path: Path) -> None:
    write_run(tmp_path / "a", dataset="digits")
    write_run(tmp_path / "b", "sgd", dataset="../mnist")
    runs = report.load([tmp_path])
    paths = report.write(runs, tmp_path / "new" / "out")
    names = {"report.html", "digits.png", "digits.svg", ".._mnist.png", ".._mnist.svg", "records.json"}
    assert {path.name for path in paths} == {path.name for path in (tmp_path / "new" / "out").iterdir()} == names
    assert (tmp_path / "new" / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "out" / "report.html").read_text(encoding="utf-8") == report.html(runs)
    assert [section["title"] for section in page_data(runs)] == ["../mnist", "digits"]


def test_the_same_runs_give_the_same_files(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs" / f"a{seed}", seed=seed, losses=[2.0, 1.0 + seed, 0.1])
    first = report.write(report.load([tmp_path / "runs"]), tmp_path / "first")
    second = report.write(report.load([tmp_path / "runs"]), tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_records_json_gives_the_same_report_again(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    for seed in range(3):
        losses = generator.uniform(0.1, 2, size=4).tolist()
        write_run(tmp_path / "runs" / f"a{seed}", seed=seed, losses=[*losses, None], steps_per_epoch=3)
    write_run(tmp_path / "runs" / "b", "sgd", losses=[2.0, 1.0])
    runs = report.load([tmp_path / "runs"])
    first = report.write(runs, tmp_path / "first")
    again = report.load([tmp_path / "first" / "records.json"])
    assert again == report.load([tmp_path / "first"])
    assert [run.config for run in again] == [run.config for run in runs]
    assert again[0].day == runs[0].day != ""
    for new, old in zip(again, runs, strict=True):
        for reread, original in zip([*new.epochs, *new.steps], [*old.epochs, *old.steps], strict=True):
            assert reread == {
                key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
                for key, value in original.items()
                if key != "kind"
            }
    second = report.write(again, tmp_path / "second")
    same = {path.name for path in first if path.suffix in (".html", ".json")}
    for one, other in zip(first, second, strict=True):
        if one.name in same:
            assert one.read_bytes() == other.read_bytes()


def test_one_report_can_read_records_json_and_run_folders(tmp_path: Path) -> None:
    losses = [2.0, 1.23456789, 0.5]
    for seed in range(2):
        folder = write_run(tmp_path / f"{seed}", seed=seed, losses=losses)
        text = (folder / "records.jsonl").read_text()
        (folder / "records.jsonl").write_text(
            text.replace('"epoch": 1, "step": 4', '"epoch": 0.3333333333, "step": 4')
        )
    report.write(report.load([tmp_path / "0"]), tmp_path / "out")
    runs = report.load([tmp_path / "out" / "records.json", tmp_path / "1"])
    curve = page_data(runs)[0]["entries"][0]["curves"]["train_loss"]
    assert (curve["seeds"], curve["middle"]) == ([2, 2, 2], [2.0, 1.2346, 0.5])


def test_a_run_named_by_its_folder_and_by_its_records_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", losses=[2.0, 1.23456789, 0.5])
    report.write(report.load([folder]), tmp_path / "out")
    runs = report.load([folder, tmp_path / "out" / "records.json"])
    assert len(runs) == 1


def test_thinning_keeps_the_first_and_the_last_step_and_little_else(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        losses=[2.0] + 10 * [1.234567],
        steps_per_epoch=1000,
        dampings=[0.999**step for step in range(10_000)],
    )
    runs = report.load([folder])
    report.write(runs, tmp_path / "out")
    (thin,) = report.load([tmp_path / "out" / "records.json"])
    steps = [record["step"] for record in thin.steps]
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert 200 <= len(steps) <= 300
    assert set(np.diff(steps)) <= {40, 41}
    assert thin.epochs[-1]["train_loss"] == 1.2346
    assert (tmp_path / "out" / "records.json").stat().st_size < 300_000 / 18
    # the figures of both are drawn at the same steps
    whole, thinned = (report.draw(one).axes[2].lines[0] for one in (runs, [thin]))
    assert np.asarray(thinned.get_xdata()) == pytest.approx(np.asarray(whole.get_xdata()))
    assert np.asarray(thinned.get_ydata()) == pytest.approx(np.asarray(whole.get_ydata()), rel=1e-4)


def test_an_unwritable_folder_raises(tmp_path: Path) -> None:
    runs = report.load([write_run(tmp_path / "run")])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        report.write(runs, tmp_path / "file" / "out")
    with pytest.raises(ValueError):
        report.write([], tmp_path / "out")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = report.load([write_run(tmp_path / "run")])
    paths = report.write(runs, tmp_path / "out")
    paths[0].write_text("old")

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        report.write(runs, tmp_path / "out")
    assert paths[0].read_text() == "old"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in paths}


def test_the_page_names_the_software_that_was_installed(tmp_path: Path) -> None:
    write_run(tmp_path / "run", versions={"python": "3.12", "woodbury": "not installed", "torch": "2.11"})
    (section,) = page_data(report.load([tmp_path / "run"]))
    assert dict(section["facts"])["software"] == "python 3.12, torch 2.11"


def test_no_text_can_end_the_script_that_holds_the_data(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "</script><b>", dataset="<i>&", settings={"note": "<!-- </script>"})
    runs = report.load([tmp_path / "run"])
    (section,) = page_data(runs)
    assert section["title"] == "<i>&"
    assert section["entries"][0]["settings"]["note"] == "<!-- </script>"
    assert "<title>woodbury: &lt;i&gt;&amp;</title>" in report.html(runs)


def test_the_page_names_no_address(tmp_path: Path) -> None:
    text = report.html(report.load([write_run(tmp_path / "run")]))
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\((?!#)", text)


# -- figures


def test_the_time_axis_is_logarithmic_where_ends_lie_far_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "near" / "a", losses=[2.0, 1.0, 0.5], seconds_per_epoch=1.0)
    write_run(tmp_path / "near" / "b", "sgd", losses=[2.0, 1.0, 0.5], seconds_per_epoch=5.0)
    write_run(tmp_path / "far" / "a", losses=[2.0, 1.0, 0.5], seconds_per_epoch=1.0)
    write_run(tmp_path / "far" / "b", "hf", losses=[2.0, 1.0, 0.5], seconds_per_epoch=50.0)
    near, far = (report.draw(report.load([tmp_path / name])).axes[1] for name in ("near", "far"))
    assert (near.get_xscale(), near.get_xlabel()) == ("linear", "seconds of training")
    assert (far.get_xscale(), far.get_xlabel()) == ("function", "seconds of training, logarithmic")
    start, one, hundred = far.transData.transform([(0, 1), (1, 1), (100, 1)])[:, 0]
    assert (one - start) / (hundred - start) == pytest.approx(math.log(2) / math.log(101))


def test_two_curves_that_coincide_can_both_be_seen(tmp_path: Path) -> None:
    """Hessian-free takes the steps of SMW-GN: over epochs their curves coincide."""
    for name in ("smw-gn", "hf"):
        write_run(tmp_path / name, name, losses=[2.0, 1.0, 0.5])
    below, above = report.draw(report.load([tmp_path])).axes[0].lines
    assert np.array_equal(below.get_xydata(), above.get_xydata())
    assert below.is_dashed() is False and above.is_dashed() is True
    assert above.get_markerfacecolor() == "none" and above.get_markersize() > below.get_markersize()
    assert above.get_linewidth() < below.get_linewidth()


@pytest.mark.parametrize(("start", "end"), [(2.33, 1.24), (0.9, 0.5), (0.07, 0.06), (140.0, 130.0)])
def test_a_narrow_logarithmic_axis_has_enough_labels(tmp_path: Path, start: float, end: float) -> None:
    write_run(tmp_path / "a", losses=[start, end])
    panel = report.draw(report.load([tmp_path])).axes[0]
    bottom, top = panel.get_ylim()
    assert 3 <= len([tick for tick in panel.get_yticks() if bottom <= tick <= top]) <= 8


def test_the_start_is_not_cut_by_the_edge_of_a_logarithmic_time_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[2.0, 1.0], seconds_per_epoch=1.0)
    write_run(tmp_path / "b", "hf", losses=[2.0, 1.0], seconds_per_epoch=50.0)
    panel = report.draw(report.load([tmp_path])).axes[1]
    left, start, right = panel.transData.transform([(panel.get_xlim()[0], 1), (0, 1), (panel.get_xlim()[1], 1)])
    assert 0.01 < (start[0] - left[0]) / (right[0] - left[0]) < 0.05


def test_labels_say_where_the_ratio_is_cut_off(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[2.0, 1.0], ratios=[None, -9.0, 0.5, 30.0])
    panel = report.draw(report.load([tmp_path])).axes[5]
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert dict(zip(panel.get_yticks(), labels, strict=True)) == {
        -0.5: "≤−0.5",
        0: "0",
        0.25: "0.25",
        0.75: "0.75",
        1: "1",
        1.5: "≥1.5",
    }


def test_an_error_of_zero_has_a_place_on_the_logarithmic_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sgd", losses=[2.0, 1.0, 0.5], errors=[0.9, 0.02, 0.0])
    write_run(tmp_path / "b", "adam", losses=[2.0, 1.0, 0.5], errors=[0.9, 0.04, 0.01])
    figure = report.draw(report.load([tmp_path]))
    panel = figure.axes[2]
    assert (panel.get_title(loc="left"), panel.get_yscale()) == ("Test error, %", "log")
    labels = [label.get_text() for label in panel.get_yticklabels()]
    zero = panel.get_yticks()[labels.index("0")]
    assert np.asarray(panel.lines[0].get_ydata()).tolist() == pytest.approx([90, 2, zero])
    assert panel.get_ylim()[0] < zero < 1


def test_nothing_but_zeros_can_be_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sgd", losses=[0.0, 0.0], errors=[0.0, 0.0])
    assert len(report.write(report.load([tmp_path / "a"]), tmp_path / "out")) == 4


def test_a_start_far_above_the_rest_does_not_squeeze_the_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[2.0, 1.0, 0.1, 0.01], errors=[0.9, 0.05, 0.03, 0.02])
    figure = report.draw(report.load([tmp_path]))
    panels = {panel.get_title(loc="left"): panel for panel in figure.axes}
    assert 5 < panels["Test error, %"].get_ylim()[1] < 10
    assert panels["Train loss"].get_ylim()[1] > 2


def test_a_diverging_run_does_not_squeeze_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[2.0, 1.0, 0.5, 0.2])
    write_run(tmp_path / "b", "sgd", losses=[2.0, 1e3, 1e30, None])
    assert report.draw(report.load([tmp_path])).axes[0].get_ylim()[1] < 100


def test_damping_that_rises_far_above_its_start_is_drawn_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[2.0, 1.0], dampings=[1, 10, 100, 1000])
    assert report.draw(report.load([tmp_path])).axes[2].get_ylim()[1] > 1000


def test_damping_panels_are_drawn_only_if_an_optimizer_has_damping(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "sgd")
    write_run(tmp_path / "b", "smw-gn")
    assert len(report.draw(report.load([tmp_path / "a"])).axes) == 4
    figure = report.draw(report.load([tmp_path]))
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles[2::3] == ["Damping", "Reduction ratio ρ, running median"]
    assert len(figure.axes[2].lines) == 1
    thresholds = [line.get_ydata()[0] for line in figure.axes[5].lines[:2]]
    assert thresholds == [0.25, 0.75]
