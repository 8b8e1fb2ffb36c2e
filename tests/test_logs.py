"""Logs for TensorBoard and W&B: what arrives there, against what the steps said."""

import math
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bounds
import woodbury
from woodbury.logs import Log, TensorBoard, WandB

FIELDS = ("loss", "damping", "ratio", "predicted", "step_norm", "accepted", "length", "share", "bent")
Written = list[tuple[int, dict[str, float]]]


class ListLog(Log):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, step, numbers):
        self.written.append((step, dict(numbers)))


def problem():
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    return model, x, x[:, :1].sin()


def train(log):
    """Four steps and an epoch in a loop of one's own; returns what must have been written."""
    model, x, y = problem()
    optimizer = woodbury.GaussNewton(model, torch.nn.MSELoss())
    expected = []
    for step in range(1, 5):
        info = optimizer.step(x, y)
        log.step(info, rate=torch.tensor(0.5 / step))
        numbers = {f"step/{name}": float(value) for name, value in info.as_dict().items()}
        assert set(numbers) == {f"step/{name}" for name in FIELDS}
        expected.append((step, {**numbers, "step/rate": float(torch.tensor(0.5 / step))}))
    log.epoch(train_loss=0.25, test_loss=None)
    expected.append((4, {"epoch/epoch": 1.0, "epoch/train_loss": 0.25}))
    log.step(loss=3, ratio=math.inf)
    expected.append((5, {"step/loss": 3.0, "step/ratio": math.inf}))
    return expected


def test_a_log_hands_on_what_the_steps_of_a_loop_say():
    with ListLog() as log:
        expected = train(log)
    assert log.written == expected


def test_a_log_hands_on_the_history_of_a_fit_once():
    model, x, y = problem()
    log = ListLog()
    fit = woodbury.fit(model, torch.nn.MSELoss(), (x, y), steps=5, progress=False, callback=log)
    assert [step for step, _ in log.written] == [entry["step"] for entry in fit.history] == [1, 2, 3, 4, 5]
    for (_, numbers), entry in zip(log.written, fit.history, strict=True):
        assert numbers == {f"fit/{name}": float(value) for name, value in entry.items() if name != "step"}


def test_a_log_records_the_steps_and_epochs_of_training():
    model, x, y = problem()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    log = ListLog()
    settings = {"epochs": 3, "validation": (x, y), "progress": False, "record": log, "seed": 0}
    fit = woodbury.fit(model, torch.nn.MSELoss(), loader, **settings)
    epochs = [numbers for _, numbers in log.written if "epoch/epoch" in numbers]
    assert [numbers["epoch/train_loss"] for numbers in epochs] == [entry["loss"] for entry in fit.history]
    assert [numbers["epoch/test_loss"] for numbers in epochs] == [entry["validation"] for entry in fit.history]
    steps = {step: numbers["step/loss"] for step, numbers in log.written if "step/loss" in numbers}
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert fit.history[0]["loss"] == pytest.approx((steps[1] + steps[2]) / 2, rel=bounds.rounding(2))


def test_tensorboard_shows_the_numbers_of_the_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as log:
        expected = train(log)
    events = EventAccumulator(str(tmp_path)).Reload()
    names = events.Tags()["scalars"]
    shown = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    wanted = {}
    for step, numbers in expected:
        for name, value in numbers.items():
            wanted.setdefault(name, []).append((step, float(torch.tensor(value))))  # kept in float32
    assert shown == wanted


def histories(path):
    """The numbers in the file of an offline run, which is a LevelDB log of one block behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, found = path.read_bytes(), 7, []
    assert len(data) < 2**15
    while at < len(data):
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind == 1  # a whole record
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found.append({name: float(value.strip('"')) for name, value in items.items()})
    return found


def test_wandb_gets_the_numbers_of_the_steps(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with WandB(mode="offline", project="tests", dir=tmp_path) as log:
        expected = train(log)
    wandb.teardown()  # the file is whole when the service that writes it has ended
    wanted = {}
    for step, numbers in expected:  # W&B has one line per step
        wanted.setdefault(step, {}).update(numbers)
    shown = {int(numbers["_step"]): numbers for numbers in histories(Path(log.run.settings.sync_file))}
    own = {step: {n: v for n, v in numbers.items() if not n.startswith("_")} for step, numbers in shown.items()}
    assert own == wanted

    run = wandb.init(mode="offline", project="tests", dir=tmp_path)
    with WandB(run) as log:
        train(log)
    run.log({"later": 1.0})  # it is still open
    run.finish()
    with pytest.raises(TypeError, match="project"):
        WandB(run, project="tests")


@pytest.mark.parametrize(("name", "log"), [("tensorboard", TensorBoard), ("wandb", WandB)])
def test_without_the_library_a_log_says_what_to_install(name, log, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        log()
