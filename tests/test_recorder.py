"""Runs that loops of one's own record: written, read back, resumed and refused, against what was passed."""

import math
import os
import signal
import time
from statistics import median
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import problems
import processes
import woodbury
from run_folders import contents
from woodbury.runs import recorder as module
from woodbury.runs.config import RunConfig, RunFolderError
from woodbury.runs.records import is_complete, load

EPOCHS, BATCHES = 3, 4
RUN = {"problem": "waves", "method": "mine"}


def start(folder, method="mine", seed=0, **more):
    return woodbury.Recorder(folder, problem="waves", method=method, seed=seed, **more)


def numbers_of(folder):
    (run,) = load([folder])
    return [record["step"] for record in run.steps]


def assert_refused(folder, message, **asked):
    """A recorder of this folder is refused, and changes nothing."""
    before = contents(folder)
    with pytest.raises(RunFolderError, match=message) as raised:
        woodbury.Recorder(folder, **asked)
    assert str(folder) in str(raised.value) and contents(folder) == before


def problem(seed):
    torch.manual_seed(seed)
    inputs = torch.randn(40, 3)
    return problems.mlp(3, 5, 1), nn.MSELoss(), inputs, inputs[:, :1].sin()


def loop(folder, method, seed, **more):
    """Train as a user would; what was told to the recorder in each step and each epoch."""
    model, loss, inputs, targets = problem(seed)
    newton = woodbury.GaussNewton(model, loss)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = []
    epochs = []
    with start(folder, method, seed, settings={"lr": 0.01}) as record:
        for _ in range(EPOCHS):
            for batch in torch.arange(40).split(40 // BATCHES):
                if method == "newton":
                    steps.append(newton.step(inputs[batch], targets[batch]).as_dict())
                    record.step(newton.last)
                else:
                    adam.zero_grad()
                    value = loss(model(inputs[batch]), targets[batch])
                    value.backward()
                    adam.step()
                    steps.append({"loss": value.item()})
                    record.step(loss=value, lr=0.01)
            with record.paused(), torch.no_grad():
                now = loss(model(inputs), targets)
            epochs.append({"train_loss": now.item(), "test_loss": 2 * now.item(), **more})
            record.epoch(**{**epochs[-1], "train_loss": now})
    return steps, epochs


@pytest.mark.parametrize("method", ["newton", "adam"])
def test_what_a_loop_records_is_read_back(method, tmp_path):
    steps, epochs = loop(tmp_path / "run", method, seed=3)
    (run,) = load([tmp_path / "run"])
    config = run.config
    assert (config.dataset, config.optimizer, config.seed, config.recorded) == ("waves", method, 3, True)
    assert config.settings == {"lr": 0.01} and config.versions["torch"] == torch.__version__
    assert [record["step"] for record in run.steps] == list(range(1, EPOCHS * BATCHES + 1))
    assert [record["epoch"] for record in run.steps] == [1 + step // BATCHES for step in range(EPOCHS * BATCHES)]
    for record, told in zip(run.steps, steps, strict=True):
        assert {name: record[name] for name in told} == told
    assert all(("damping" in record) == (method == "newton") for record in run.steps)
    assert [(record["epoch"], record["step"]) for record in run.epochs] == [(1, 4), (2, 8), (3, 12)]
    for record, told in zip(run.epochs, epochs, strict=True):
        assert {name: record[name] for name in told} == told and "test_error" not in record
    seconds = [record["seconds"] for record in run.steps]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] <= run.epochs[-1]["seconds"]
    assert is_complete(tmp_path / "run")


def test_numbers_of_any_kind_are_read(tmp_path):
    with start(tmp_path) as record:
        record.step(loss=torch.tensor(0.5), accepted=True, samples=40)
        record.step(loss=math.nan, damping=3, ratio=None)
        record.epoch(train_loss=1, epoch=0.5)
    (run,) = load([tmp_path])
    first, second = run.steps
    assert {**first, "seconds": 0} == {
        **{"kind": "step", "epoch": 1, "step": 1, "seconds": 0},
        **{"loss": 0.5, "accepted": True, "samples": 40},
    }
    assert (second["step"], second["loss"], second["damping"]) == (2, None, 3) and "ratio" not in second
    assert run.epochs[0]["epoch"] == 0.5 and (record.steps, record.epochs) == (2, 0.5)


# -- the clock


@pytest.fixture
def clock(monkeypatch):
    """Lets time pass by a call, and by a second in each write."""
    now = [100.0]

    def pass_time(seconds):
        now[0] += seconds

    write = module.Records.write
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.Records, "write", lambda *arguments: (pass_time(1.0), write(*arguments)))
    yield pass_time


def test_seconds_leave_out_pauses_and_the_recorder_itself(tmp_path, clock):
    record = start(tmp_path)
    clock(50.0)  # before the block
    with record:
        clock(0.25)
        record.step(loss=1.0)
        clock(0.5)
        with record.paused():
            clock(8.0)
            with record.paused():
                clock(8.0)
            record.epoch(train_loss=1.0)
            clock(8.0)
            assert record.seconds == 0.75
        clock(2.0)
        assert record.seconds == 2.75
        record.step(loss=1.0)
        clock(1.0)
        record.epoch(train_loss=1.0)
    (run,) = load([tmp_path])
    assert [step["seconds"] for step in run.steps] == [0.25, 2.75]
    assert [epoch["seconds"] for epoch in run.epochs] == [0.75, 3.75]


# -- numbers on a device


def test_no_number_is_read_from_a_device_before_the_hundredth_step_or_an_epoch(tmp_path, monkeypatch):
    reads = []
    item = Tensor.item
    monkeypatch.setattr(module, "on_device", lambda tensor: True)
    monkeypatch.setattr(Tensor, "item", lambda tensor: (reads.append(1), item(tensor))[1])
    running = torch.zeros(())
    model, loss, inputs, targets = problem(0)
    optimizer = woodbury.GaussNewton(model, loss)
    infos = [optimizer.step(inputs, targets) for _ in range(99)]
    reads.clear()
    with pytest.raises(KeyboardInterrupt), start(tmp_path) as record:
        for info in infos:
            running += 1  # in place: each record must keep its own value
            record.step(info, total=running)
        assert reads == [] and (tmp_path / "records.jsonl").read_bytes() == b""
        record.step(total=running)
        assert len(reads) >= 100 and (tmp_path / "records.jsonl").read_bytes().count(b"\n") == 100
        record.step(total=running)
        record.step(loss=0.5)  # a plain number waits behind it
        assert (tmp_path / "records.jsonl").read_bytes().count(b"\n") == 100
        record.epoch(train_loss=torch.tensor(2.0))
        record.step(total=running)  # still on the device when the loop ends early
        raise KeyboardInterrupt
    (run,) = load([tmp_path])
    assert [step.get("total") for step in run.steps] == [*range(1, 100), 99, 99, None, 99]
    assert [step["step"] for step in run.steps] == list(range(1, 104))
    assert run.steps[50]["damping"] > 0 and run.epochs[0]["train_loss"] == 2.0


# -- interrupted and resumed


def test_ctrl_c_leaves_a_folder_that_can_be_read_and_resumed(tmp_path, clock):
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "damping": woodbury.LevenbergMarquardt()}
    with pytest.raises(KeyboardInterrupt), start(tmp_path, settings=settings) as record:
        record.step(loss=3.0)
        record.epoch(train_loss=2.0)
        clock(4.0)
        record.step(loss=1.5)
        raise KeyboardInterrupt
    assert not is_complete(tmp_path) and numbers_of(tmp_path) == [1, 2]
    with start(tmp_path, settings=settings, resume=True) as record:
        assert (record.steps, record.epochs, record.seconds) == (2, 1, 4.0)
        record.step(loss=1.0)
        record.epoch(train_loss=1.0)
    assert is_complete(tmp_path)
    (run,) = load([tmp_path])
    steps = [(step["step"], step["epoch"], step["loss"]) for step in run.steps]
    assert steps == [(1, 1, 3), (2, 2, 1.5), (3, 2, 1)]
    assert [(epoch["epoch"], epoch["step"]) for epoch in run.epochs] == [(1, 1), (2, 3)]
    with start(tmp_path, settings=settings, resume=True) as record:  # a complete run can go on too
        assert not is_complete(tmp_path)
        record.epoch(train_loss=0.5)
    assert is_complete(tmp_path) and len(load([tmp_path])[0].epochs) == 3


def record_and_be_killed(folder):
    record = woodbury.Recorder(folder, **RUN)
    record.epoch(train_loss=2.0, epoch=0)
    for _ in range(7):
        record.step(loss=1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_the_current_line_at_most(tmp_path):
    done = processes.run_alone(record_and_be_killed, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert numbers_of(tmp_path) == list(range(1, 8))
    with (tmp_path / "records.jsonl").open("ab") as file:  # killed in the middle of the next one
        file.write(b'{"kind": "step", "ep')
    with start(tmp_path, resume=True) as record:
        record.step(loss=1.0)
    assert numbers_of(tmp_path) == list(range(1, 9))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["write", "flush"])
def test_ctrl_c_within_a_write_damages_nothing_though_the_loop_goes_on(method, after, tmp_path):
    """It arrives before, or after, the call of one method of the file."""
    with start(tmp_path) as record:
        record.epoch(train_loss=1.0, epoch=0)
        record.step(loss=1.0)
        records = record._records
        file, records._file = records._file, Mock(wraps=records._file, closed=False)

        def interrupt(*arguments):
            getattr(records._file, method).side_effect = None  # once
            if after:
                getattr(file, method)(*arguments)
            raise KeyboardInterrupt

        getattr(records._file, method).side_effect = interrupt
        with pytest.raises(KeyboardInterrupt):
            record.step(loss=2.0)
        record.step(loss=3.0)
        record.epoch(train_loss=0.5)
    assert numbers_of(tmp_path) == [1, 3]


def test_a_new_run_that_recorded_nothing_can_be_started_again(tmp_path):
    for method in ("first", "second"):
        with pytest.raises(RuntimeError), start(tmp_path, method):
            raise RuntimeError
    assert RunConfig.load(tmp_path).optimizer == "second"
    with woodbury.Recorder(tmp_path / "new", **RUN, resume=True) as record:
        record.epoch(train_loss=1.0)  # nothing to resume: a start
    assert len(load([tmp_path / "new"])) == 1


# -- refusals


def test_a_folder_with_records_is_refused_with_the_ways_out(tmp_path):
    with start(tmp_path, settings={"lr": 0.1}) as record:
        record.step(loss=1.0)
        record.epoch(train_loss=1.0)
    assert_refused(tmp_path, r"resume=True .* or delete it, or give another folder", **RUN)
    run = {**RUN, "settings": {"lr": 0.1}, "resume": True}
    for asked, message in (
        ({"problem": "others"}, "it has dataset waves, and others was asked for"),
        ({"method": "adam"}, "it has optimizer mine, and adam was asked for"),
        ({"seed": 1}, "it has seed 0, and 1 was asked for"),
        ({"settings": {"lr": 0.2}}, "it has settings lr 0.1, and 0.2 was asked for"),
        ({"settings": {}}, "it has settings lr 0.1, and None was asked for"),
    ):
        assert_refused(tmp_path, message, **{**run, **asked})
    (tmp_path / "config.json").unlink()
    assert_refused(tmp_path, r"it has no config\.json", **run)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_of_woodbury_train_is_never_touched(resume, tmp_path):
    RunConfig("waves", "mine", {}, widths=(3, 1), batch_size=4, epochs=2, seed=0).save(tmp_path)
    (tmp_path / "records.jsonl").touch()
    assert_refused(tmp_path, r"it has widths \[3, 1\], and \[\] was asked for", **RUN, resume=resume)


@pytest.mark.parametrize("change", ["digit", "lost line"])
def test_changed_records_of_a_complete_run_are_not_resumed(change, tmp_path):
    with start(tmp_path) as record:
        record.epoch(train_loss=1.25)
        record.epoch(train_loss=0.5)
    path = tmp_path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] if change == "lost line" else b"".join(lines).replace(b"1.25", b"1.35"))
    assert_refused(tmp_path, r"records\.jsonl is damaged: its SHA-256 does not agree", **RUN, resume=True)
    (tmp_path / "complete").unlink()  # the way out
    assert len(load([tmp_path])[0].epochs) == len(path.read_bytes().splitlines())


def test_a_folder_has_one_recorder_at_a_time(tmp_path):
    with start(tmp_path) as record:
        record.epoch(train_loss=1.0)
        with pytest.raises(RunFolderError, match="in use, by another process or a recorder that was not closed"):
            start(tmp_path, resume=True)
        record.epoch(train_loss=0.5)
    for call in (lambda: record.step(loss=1.0), lambda: record.epoch(train_loss=1.0), record.__enter__):
        with pytest.raises(RunFolderError, match="closed: another with resume=True goes on"):
            call()
    assert len(load([tmp_path])[0].epochs) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 0.5}, "integer"),
        ({"settings": {"lr": math.inf}}, "not JSON compliant"),
        ({"settings": {"model": nn.ReLU()}}, "not 'ReLU'"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_written(arguments, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        woodbury.Recorder(tmp_path / "run", **{**RUN, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_number_is_named_and_leaves_no_record(tmp_path):
    no_number = "must be a number or a tensor with one element, got"
    with start(tmp_path) as record:
        record.step(loss=1.0)
        record.epoch(train_loss=1.0)
        for method, arguments, message in (
            (record.step, {"info": 0.5}, r"such as loss=0\.5, not float"),
            (record.step, {"loss": torch.ones(2)}, f"loss {no_number} tensor"),
            (record.step, {"loss": "low"}, f"loss {no_number} 'low'"),
            (record.step, {"kind": 1}, "'kind' is counted here: give the number another name"),
            (record.step, {"step": 2}, "'step' is counted here"),
            (record.epoch, {"train_loss": None}, "train_loss must be a number"),
            (record.epoch, {"train_loss": [1]}, "train_loss must be a number or a tensor"),
            (record.epoch, {"train_loss": 1, "epoch": 1}, "epoch must be above 1, the last one, got 1"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                method(**arguments)
        record.step(loss=0.5)
    assert numbers_of(tmp_path) == [1, 2] and len(load([tmp_path])[0].epochs) == 1


# -- what a report makes of it


@pytest.fixture
def report():
    pytest.importorskip("matplotlib")
    from woodbury.runs import report

    return report


def test_the_report_draws_recorded_runs_beside_those_of_train(tmp_path, report):
    from test_report import ends_by_label, page_data, write_run

    told = {}
    for seed in range(2):
        for method in ("newton", "adam"):
            told[method, seed] = loop(tmp_path / f"{method}-{seed}", method, seed, test_error=0.25)[1]
    write_run(tmp_path / "sgd", "sgd", dataset="waves")
    runs = report.load([tmp_path])
    rows = ends_by_label(runs)
    assert list(rows) == ["sgd", "adam", "newton"]
    for method in ("newton", "adam"):
        ends = [told[method, seed][-1]["train_loss"] for seed in range(2)]
        assert float(rows[method]["train loss"]) == pytest.approx(median(ends), rel=5e-3)  # three digits
        assert [rows[method][name] for name in ("test error", "seeds", "epochs")] == ["25.00 %", "2", str(EPOCHS)]
    (section,) = page_data(runs)
    assert "test loss" not in section["ends"]["columns"] and dict(section["facts"])["batch"] == "60 samples"
    assert "of a recorded loop all but its pauses." in section["note"]
    assert report.draw(runs).get_suptitle().startswith("waves: network 4-3-2, batches of 60")


def test_the_figure_has_panels_for_what_was_measured(tmp_path, report):
    from test_report import ends_by_label, panels_at

    measured = {"a": {}, "b": {}, "c": {"test_loss": 2.0}, "d": {"test_loss": 2.0, "test_error": 0.5}}
    panels = {"a": [], "b": ["damping", "ratio"], "c": ["test_loss"], "d": ["test_error"]}
    for name, numbers in measured.items():
        with start(tmp_path / name, name) as record:
            if name == "b":
                record.step(damping=1.0, ratio=0.5)
            record.epoch(train_loss=1.0, **numbers)
        assert list(panels_at(tmp_path / name)) == ["train_loss", *panels[name]]
    figure = report.draw(load([tmp_path]))
    shown = [panel.get_title(loc="left") for panel in figure.axes]
    ratio = "Reduction ratio ρ, running median"
    assert shown == [*["Train loss"] * 2, "Damping", *["Test error, %"] * 2, ratio, *["Test loss"] * 2]
    assert figure.get_suptitle() == "waves"  # neither network nor batch size is known
    rows = ends_by_label(load([tmp_path]))
    assert rows["a"]["test loss"] == rows["c"]["test error"] == "–"
    assert (rows["c"]["test loss"], rows["d"]["test error"]) == ("2.00", "50.00 %")
    assert not any("test" in column for column in ends_by_label(load([tmp_path / "a"]))["a"])


def test_seeds_meet_at_epochs_however_many_steps_they_took_or_recorded(tmp_path):
    pytest.importorskip("numpy")
    from woodbury.runs.medians import curves_of, ends_of, groups_of

    for seed, steps in enumerate((2, 5, 0)):
        with start(tmp_path / str(seed), seed=seed) as record:
            for epoch in range(4):
                for _ in range(steps):
                    record.step(damping=1.0 + seed)
                more = {"test_loss": 10.0 + epoch} if epoch % 2 else {}
                record.epoch(train_loss=seed + epoch / 8, **more)
    (group,) = groups_of(load([tmp_path]))
    curves = {name: own for name, (own,) in curves_of([group]).items()}
    train, test = curves["train_loss"], curves["test_loss"]
    assert train is not None and test is not None and curves["test_error"] is None
    assert (train.epochs, train.seeds, train.middle) == ([1, 2, 3, 4], [3] * 4, [1.0, 1.125, 1.25, 1.375])
    assert (test.epochs, test.middle) == ([2, 4], [11.0, 13.0])
    ends = ends_of(group)
    assert (len(group.ended), {run.epochs[-1]["epoch"] for run in group.ended}) == (3, {4})
    assert (median(ends["train_loss"]), median(ends["test_loss"]), median(ends["damping"])) == (1.375, 13.0, 1.5)
    assert len(ends["seconds_per_step"]) == 2 and min(ends["seconds_per_step"]) > 0
