"""Reports from run folders that the tests write by hand, against numbers computed here."""

import json
import math
import re
from statistics import median
from unittest.mock import patch

import pytest

pytest.importorskip("matplotlib")

import numpy as np

from run_folders import contents
from woodbury.policies.plain import from_plain, to_plain
from woodbury.runs import report
from woodbury.runs.config import RunConfig, RunFolderError
from woodbury.runs.medians import groups_of, looks_of
from woodbury.runs.panels import panels_of

FIELDS = {"initial": 1.0, "boost": 1.01, "drop": 0.99, "threshold": 0.25, "floor": 1e-3}
LM = {"LevenbergMarquardt": FIELDS}


def write_run(
    folder,
    optimizer="smw-gn",
    seed=0,
    losses=(2.0, 1.0),  # after each epoch, from epoch 0 on
    *,
    dataset="digits",
    settings=None,
    errors=None,
    planned=None,
    steps_per_epoch=4,
    seconds_per_epoch=0.5,
    dampings=None,  # of each step
    ratios=None,
    extra_steps=0,  # of an epoch that was not finished
    **config,
):
    folder.mkdir(parents=True, exist_ok=True)
    damped = optimizer not in ("sgd", "adam")
    if settings is None:
        settings = {"lr": 0.1, **({"damping": LM, "seed": seed} if damped else {})}
    settings = {name: to_plain(from_plain(value)) for name, value in settings.items()}
    epochs = len(losses) - 1
    config = {"widths": (4, 3, 2), "batch_size": 60, "epochs": epochs if planned is None else planned, **config}
    RunConfig(dataset, optimizer, settings, seed=seed, **config).save(folder)
    records = []
    for step in range(epochs * steps_per_epoch + extra_steps + 1):
        epoch = math.ceil(step / steps_per_epoch)
        place = {"epoch": epoch, "step": step, "seconds": step / steps_per_epoch * seconds_per_epoch}
        if step > 0:
            damping = dampings[step - 1] if dampings else 0.9**step if damped else None
            ratio = ratios[step - 1] if ratios else 0.5 if damped else None
            values = {"loss": 1 / step, "damping": damping, "ratio": ratio, "accepted": step % 3 > 0}
            records.append({"kind": "step", **place, **values})
        if step % steps_per_epoch == 0:
            loss, error = losses[epoch], errors[epoch] if errors else 0.9 / (1 + epoch)
            values = {"train_loss": loss, "train_error": 0.5, "test_loss": loss, "test_error": error}
            records.append({"kind": "epoch", **place, **values})
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def page_data(runs):
    """What is on the page but its charts, which take a second or two to draw."""
    with patch.object(report, "charts", lambda *_: {}):
        page = report.html(runs)
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def curves_of(path, label="smw-gn"):
    """The curves of one method by quantity."""
    groups = groups_of(report.load([path]))
    index = [group.label for group in groups].index(label)
    return {panel.quantity: panel.curves[index] for panel in panels_of(groups) if panel.curves[index]}


def ends_by_label(runs):
    """The table of the page: of each method the texts by column."""
    tables = [section["ends"] for section in page_data(runs)]
    return {row[0]: dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["rows"]}


def panels_at(path):
    """The description from which the figure and the page are drawn."""
    return {panel.quantity: panel for panel in panels_of(groups_of(report.load([path])))}


# -- numbers


def test_summary_is_the_median_over_seeds_where_a_diverged_one_counts_as_the_worst(tmp_path):
    for seed, loss in enumerate((0.3, 0.1, 0.2)):
        write_run(tmp_path / f"a{seed}", seed=seed, losses=[1.0, loss], errors=[0.9, 0.1 * loss])
    write_run(tmp_path / "b", "sgd", losses=[1.0, 0.5, 0.7], errors=[0.9, 0.2, 0.3], seconds_per_epoch=3.0)
    for seed, loss in enumerate((0.1, None, None)):
        write_run(tmp_path / f"c{seed}", "adam", seed=seed, losses=[1.0, loss])
    assert [section["title"] for section in page_data(report.load([tmp_path]))] == ["digits"]
    ends = ends_by_label(report.load([tmp_path]))
    newton, sgd, adam = ends.values()
    assert list(ends) == ["smw-gn", "sgd", "adam"]
    assert (newton["train loss"], newton["seconds"], newton["epochs"]) == ("0.200", "0.500", "1")
    assert (newton["test error"], newton["seeds"]) == ("2.00 %", "3")
    assert (newton["damping"], newton["ms / step"]) == ("0.656", "125")  # 0.9^4, and 0.5 s for four steps
    assert (sgd["train loss"], sgd["test error"], sgd["best test error"]) == ("0.700", "30.00 %", "20.00 %")
    assert sgd["damping"] == "–" and (adam["train loss"], adam["seeds"]) == ("diverged", "3")
    curve = curves_of(tmp_path, "adam")["train_loss"]
    assert (curve.low[-1], curve.middle[-1], curve.high[-1]) == (0.1, math.inf, math.inf)


def test_damping_and_ratio_are_drawn_over_epochs(tmp_path):
    generator = np.random.default_rng(1)
    ratios = generator.normal(0.5, 1.0, size=(3, 80))
    dampings = generator.uniform(0.1, 1, size=(3, 80))
    for seed in range(3):
        settings = {"losses": [2.0, 1.0, 0.5], "steps_per_epoch": 40, "dampings": dampings[seed].tolist()}
        of_steps = [*ratios[seed, :-1].tolist(), None]  # -inf is null in a record
        write_run(tmp_path / f"{seed}", seed=seed, ratios=of_steps, **settings)
    curves = curves_of(tmp_path)
    assert curves["damping"].epochs == pytest.approx(np.arange(1, 81) / 40)
    assert curves["damping"].middle == pytest.approx(np.median(dampings, axis=0))
    assert curves["damping"].high == pytest.approx(dampings.max(axis=0))
    # a twentieth of 80 steps: two before and two after the step itself
    ratios[:, -1] = -9.0
    smooth = np.array([[median(ratios[seed, max(0, at - 2) : at + 3]) for at in range(80)] for seed in range(3)])
    middle, low = np.median(smooth, axis=0), smooth.min(axis=0)
    assert curves["ratio"].middle == pytest.approx(middle)
    assert curves["ratio"].low == pytest.approx(low)


def test_an_unfinished_run_is_drawn_up_to_its_last_record(tmp_path):
    write_run(tmp_path / "0", seed=0, losses=[2.0, 1.0, 0.5, 0.25])
    write_run(tmp_path / "1", seed=1, losses=[2.2, 1.2], planned=3, extra_steps=2)
    (ends,) = ends_by_label(report.load([tmp_path])).values()
    assert (ends["seeds"], ends["epochs"], ends["train loss"]) == ("1 of 2", "3", "0.250")
    curves = curves_of(tmp_path)
    assert curves["train_loss"].seeds == [2, 2, 1, 1]
    assert curves["train_loss"].middle == [2.1, 1.1, 0.5, 0.25]
    assert curves["damping"].seeds == [2] * 6 + [1] * 6
    # in its first epoch it has no seconds per step, and no curve over steps
    write_run(tmp_path / "first" / "1", "hf", losses=[2.0], planned=1, extra_steps=2)
    assert "ms / step" not in ends_by_label(report.load([tmp_path / "first"]))["hf"]
    assert set(curves_of(tmp_path / "first", "hf")) == {"train_loss", "test_error"}


def test_evaluations_within_an_epoch_are_drawn_where_they_were_made(tmp_path):
    folder = write_run(tmp_path / "0", losses=[2.0, 1.0])
    lines = (folder / "records.jsonl").read_text().splitlines()
    half = {**json.loads(lines[0]), "epoch": 0.5, "step": 2, "seconds": 0.2, "train_loss": 1.5}
    (folder / "records.jsonl").write_text("\n".join([*lines[:3], json.dumps(half), *lines[3:]]) + "\n")
    curve = curves_of(folder)["train_loss"]
    assert (curve.epochs, curve.middle) == ([0, 0.5, 1], [2.0, 1.5, 1.0])


# -- reading


def test_runs_are_found_one_and_two_levels_down_and_counted_once(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "digits-1" / "sgd-seed0", "sgd")
    write_run(runs / "digits-1" / "sgd-seed1", "sgd", seed=1)
    write_run(runs / "adam-seed0", "adam", losses=[2.0, 1.23456789, 0.5])
    fresh = write_run(runs / "fresh", seed=1)
    (fresh / "records.jsonl").write_text("")  # no result yet: left out
    assert len(report.load([runs / "digits-1" / "sgd-seed0"])) == 1
    assert len(report.load([runs / "digits-1"])) == 2 and len(report.load([runs])) == 3
    assert len(report.load([runs, runs / "digits-1", runs / ".." / "runs" / "adam-seed0"])) == 3


def test_optimizers_have_one_order_and_one_look_in_every_report(tmp_path):
    names = ["adam", "zeta", "sgd", "kfac", "alpha", "hf", "smw-ng-bd", "smw-ng", "smw-gn"]
    for index, name in enumerate(names):
        for seed in (1, 0):
            write_run(tmp_path / "runs" / f"{index}-{seed}", name, seed=seed)
    runs = report.load([tmp_path / "runs"])
    ordered = ["smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac", "sgd", "adam", "alpha", "zeta"]
    found = [(run.config.optimizer, run.config.seed) for run in runs]
    assert found == [(name, s) for name in ordered for s in (0, 1)]
    looks = {group.label: group.look for group in groups_of(runs)}
    assert len(set(looks.values())) == len(ordered)
    for group in groups_of([run for run in runs if run.config.optimizer in ("adam", "hf")]):
        assert group.look == looks[group.label]
    many = [f"method {number}" for number in range(30)]
    assert len(set(looks_of(many))) == 30 and looks_of(["smw-gn", *many])[0] == looks_of(["smw-gn"])[0]


def test_the_same_optimizer_with_other_settings_is_labelled_by_what_differs(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", "sgd", seed=seed, settings={"lr": 0.1, "momentum": 0.9})
        write_run(tmp_path / f"b{seed}", "sgd", seed=seed, settings={"lr": 0.01, "momentum": 0.9})
        other = {"LevenbergMarquardt": {**FIELDS, "boost": 2.0}}
        write_run(tmp_path / f"c{seed}", settings={"damping": other, "seed": seed}, seed=seed)
        write_run(tmp_path / f"d{seed}", settings={"damping": LM, "seed": seed}, seed=seed)
        rule = {"Constant": {"initial": 1.0, "floor": 1e-3}}
        write_run(tmp_path / f"f{seed}", "smw-ng", settings={"damping": rule, "seed": seed}, seed=seed)
    write_run(tmp_path / "e", "adam", batch_size=30)
    runs = report.load([tmp_path])
    assert [(label, row["seeds"]) for label, row in ends_by_label(runs).items()] == [
        ("smw-gn damping.boost=2.0", "2"),
        ("smw-gn damping.boost=1.01", "2"),
        ("smw-ng", "2"),
        ("sgd lr=0.1", "2"),
        ("sgd lr=0.01", "2"),
        ("adam", "1"),
    ]
    settings = page_data(runs)[0]["settings"]
    rows = {name: values for name, *values in settings["differing"]}
    assert set(rows) == {"lr", "damping", "damping.boost", "batch_size"}
    assert rows["lr"] == ["–", "–", "–", "0.1", "0.01", "0.1"]
    assert len({group.look for group in groups_of(runs)}) == 6


def test_a_path_that_cannot_be_read_is_named_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("not JSON")
    fresh = write_run(tmp_path / "fresh")
    (fresh / "records.jsonl").unlink()
    messages = {"absent": "does not exist", "empty": "holds no run folders", "note.txt": "holds no run folders"}
    for name, message in {**messages, "fresh": "no run has a result yet"}.items():
        path = tmp_path / name
        with pytest.raises(RunFolderError, match=message) as raised:
            report.load([path])
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)


# -- writing


def test_write_leaves_a_figure_and_a_page_in_its_folder_the_same_every_time(tmp_path):
    versions = {"python": "3.12", "torch": "2.11"}
    runs = report.load([write_run(tmp_path / "run", dataset="../mnist", versions=versions)])
    out = tmp_path / "new" / "out"
    page, figure = report.write(runs, out)
    before = contents(out)
    assert [page.name, figure.name] == ["report.html", "..%2fmnist.png"] == sorted(before, reverse=True)
    assert b'["software", "python 3.12, torch 2.11"]' in before["report.html"]
    assert not re.search(rb"https?:|//[a-z]+\.[a-z]|@import|url\((?!#)", before["report.html"])  # no address
    assert before[figure.name].startswith(b"\x89PNG")
    report.write(runs, out)
    with pytest.raises(OSError):
        report.write(runs, page / "out")
    assert contents(out) == before


def test_thinning_keeps_the_first_and_the_last_step_and_little_else(tmp_path):
    dampings = [0.999**step for step in range(10_000)]
    folder = write_run(tmp_path, losses=[2.0] + 10 * [1.0], steps_per_epoch=1000, dampings=dampings)
    curve = curves_of(folder)["damping"]
    steps = np.round(1000 * np.array(curve.epochs))
    assert (steps[0], steps[-1]) == (1, 10_000) and 200 <= len(steps) <= 300 and set(np.diff(steps)) <= {40, 41}
    assert curve.middle == pytest.approx([dampings[int(step) - 1] for step in steps])


# -- axes, which the figure and the page share


def test_the_figure_shows_what_the_page_shows(tmp_path):
    """The same description, drawn by matplotlib; of two curves that coincide the upper one has gaps."""
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", seed=seed, losses=[2.0, 1.0 + seed, 0.5], errors=[0.9, 0.02, 0.0])
    write_run(tmp_path / "b", "hf", losses=[2.0, 2.0, 0.5], ratios=[None] + [0.5] * 7, seconds_per_epoch=50.0)
    runs = report.load([tmp_path])
    figure, panels = report.draw(runs), panels_of(groups_of(runs))
    drawn = {(place.get_title(loc="left"), place.get_xlabel()): place for place in figure.axes}
    described = {(panel.title, x.title): (panel, along, x) for panel in panels for along, x in panel.x.items()}
    assert drawn.keys() == described.keys() and len(figure.axes) == 6
    for name, (panel, along, x) in described.items():
        place, y = drawn[name], panel.y
        assert (place.get_xscale(), place.get_yscale()) == (x.scale, y.scale)
        assert [*place.get_xlim(), *place.get_ylim()] == pytest.approx([x.low, x.high, y.low, y.high])
        for axis, side in ((x, place.xaxis), (y, place.yaxis)):
            labels = [label.get_text() for label in side.get_ticklabels()]
            assert list(zip(side.get_ticklocs(), labels, strict=True)) == axis.ticks
        *guides, below, above = place.lines
        assert [line.get_ydata()[0] for line in guides] == list(panel.y.guides)
        for line, curve in zip((below, above), panel.curves, strict=True):
            assert line.get_xdata() == pytest.approx([max(value, x.least) for value in getattr(curve, along)])
            assert line.get_ydata() == pytest.approx([max(value, y.least) for value in curve.middle])
        assert below.is_dashed() is False and above.is_dashed() is True
        assert above.get_markerfacecolor() == "none" and above.get_markersize() > below.get_markersize()
        band = {round(float(value), 9) for _, value in place.collections[0].get_paths()[0].vertices}
        low, high = panel.curves[0].low, panel.curves[0].high
        assert band == {round(max(value, y.least), 9) for value in [*low, *high]}


def test_axes_are_logarithmic_where_they_can_and_have_a_place_for_zero(tmp_path):
    write_run(tmp_path / "near" / "a", losses=[2.0, None, -1.0, -3.0], ratios=[None, -9.0] + [30.0] * 10)
    write_run(tmp_path / "near" / "b", "hf", losses=[2.0, 1.0], seconds_per_epoch=2.0)
    write_run(tmp_path / "far" / "a", "sgd", errors=[0.9, 0.0], losses=[2.0, 1.0])
    write_run(tmp_path / "far" / "b", "hf", errors=[0.9, 0.02], losses=[2.0, 1.0], seconds_per_epoch=50.0)
    near, far = panels_at(tmp_path / "near"), panels_at(tmp_path / "far")
    time, far_time = near["train_loss"].x["seconds"], far["train_loss"].x["seconds"]
    assert (time.scale, time.title) == ("linear", "seconds of training")
    assert (far_time.scale, far_time.title) == ("log", "seconds of training, logarithmic")
    error = far["test_error"].y
    for axis, smallest in ((far_time, 0.5), (error, 2.0)):
        assert axis.ticks[0] == (axis.least, "0") and axis.low < axis.least < smallest
    assert far_time.high > 50.0
    loss = near["train_loss"].y
    assert loss.scale == "linear" and [loss.low, loss.high] == pytest.approx([-3.25, 2.25])
    ratio = near["ratio"].y  # always the same, and marks where damping changes
    assert dict(ratio.ticks) == {-0.5: "-0.5", 0: "0", 0.25: "0.25", 0.75: "0.75", 1: "1", 1.5: "1.5"}
    assert ratio.guides == (0.25, 0.75) and (ratio.low, ratio.high) == (-0.5, 1.5)


@pytest.mark.parametrize(
    "losses", [[0.0, 0.0], [2.0, 1e300, 1e308, None], [-1e308, 1e308], [5e-324, 0.0]], ids=str
)
def test_zeros_and_extremes_can_be_drawn_and_an_extreme_counts_as_diverged(tmp_path, losses):
    write_run(tmp_path / "a", "sgd", losses=losses, errors=[0.0] * 4, seconds_per_epoch=1.0)
    write_run(tmp_path / "b", losses=losses, seconds_per_epoch=1e-300, dampings=[5e-324, 1e308] * 6)
    runs = report.load([tmp_path])
    assert len(report.write(runs, tmp_path / "out")) == 2
    (ends,) = report.ends_tables(runs).values()
    diverged = losses[-1] is None or abs(losses[-1]) > 1e300
    assert [row[1] for row in ends["rows"]] == ["diverged" if diverged else "0"] * 2


def test_neither_a_high_start_nor_a_diverging_run_squeezes_the_curves(tmp_path):
    write_run(tmp_path / "start", losses=[2.0, 1.0, 0.1, 0.01], errors=[0.9, 0.05, 0.03, 0.02])
    panels = panels_at(tmp_path / "start")
    assert 5 < panels["test_error"].y.high < 10 and panels["train_loss"].y.high > 2
    write_run(tmp_path / "diverging" / "a", losses=[2.0, 1.0, 0.5, 0.2])
    write_run(tmp_path / "diverging" / "b", "sgd", losses=[2.0, 1e3, 1e30, None])
    assert panels_at(tmp_path / "diverging")["train_loss"].y.high < 100
    write_run(tmp_path / "damping", losses=[2.0, 1.0], dampings=[1, 10, 100, 1000])
    assert panels_at(tmp_path / "damping")["damping"].y.high > 1000  # it is drawn whole
