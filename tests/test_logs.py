"""Logs for TensorBoard and W&B: what arrives there, against what the steps said."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bounds
import woodbury
from woodbury.logs import Log, TensorBoard, WandB

FIELDS = ("loss", "damping", "ratio", "predicted", "step_norm", "accepted", "length", "share", "bent")


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


class Fake:
    """Takes the place of a writer of TensorBoard and of a run of W&B: keeps what it is given."""

    def __init__(self, *place, **settings):
        self.lines, self.is_closed = {}, False

    def log(self, numbers, step):
        self.lines.setdefault(step, {}).update(numbers)

    def add_scalar(self, name, value, step):
        self.log({name: value}, step)

    def close(self):
        self.is_closed = True

    finish = close


def test_tensorboard_and_wandb_get_the_numbers_of_the_steps(monkeypatch):
    """With the packages themselves docs/tracking.md runs, where they are installed."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Fake))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Fake))
    wanted, run = Fake(), Fake()
    for step, numbers in train(ListLog()):
        wanted.log(numbers, step)
    logs = TensorBoard("board"), WandB(project="tests"), WandB(run)
    for log in logs:
        with log:
            train(log)
    writers = logs[0].writer, logs[1].run, run
    assert all(own.lines == wanted.lines for own in writers)
    assert [own.is_closed for own in writers] == [True, True, False]  # a run that was given stays open
    with pytest.raises(TypeError, match="project"):
        WandB(run, project="tests")


@pytest.mark.parametrize(("name", "log"), [("tensorboard", TensorBoard), ("wandb", WandB)])
def test_without_the_library_a_log_says_what_to_install(name, log, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        log()
