"""When a step is recorded and what a recording holds for; on the CPU, with a stand-in for the CUDA graph."""

import copy

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from changes import CHANGES, Scaled
from woodbury.device import recording, scalars
from woodbury.device.recording import Graph, Key, Recordings
from woodbury.optim import recorded
from woodbury.optim.problems import Request
from woodbury.optim.recorded import RecordedStep, fingerprint_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_statistics(monkeypatch):
    """There are none of a device's memory here."""
    monkeypatch.setattr(recording, "bytes_ever_allocated", lambda device: 0)


def record_graph(run, device):
    """Takes the place of `recording.record_graph`: a replay runs the step again, on the same buffers."""
    numbers = torch.zeros(6, dtype=torch.float64)

    def replay():
        numbers.copy_(run())

    return Graph(replay, numbers, ())


def on_a_device(state, device):
    """The moving state as another device than the CPU has it."""
    moving = {"damping": torch.as_tensor(state["damping"], dtype=torch.float64)}
    return moving | {name: state[name] for name in ("momentum",) if name in state}


def replay(optimizer, problem):
    request = Request(problem.inputs, problem.targets)
    step = RecordedStep(optimizer._context(), optimizer._problems, request, optimizer._doubts)
    return optimizer.last if step.replay(optimizer._recordings, optimizer._done) else None


def refuse(number):
    raise AssertionError("a number of a step was looked at: a device would have been waited for")


@pytest.mark.parametrize("curvature_samples", [4, None])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "dense"])
@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
def test_replayed_steps_are_the_ordinary_ones(method, settings, curvature_samples, monkeypatch):
    for name in ("__bool__", "__float__"):
        monkeypatch.setattr(scalars.Number, name, refuse)
    monkeypatch.setattr(recording, "record_graph", record_graph)
    monkeypatch.setattr(recorded, "moving_state", on_a_device)
    problem, same = problems.make("softmax"), problems.make("softmax")
    settings |= {"curvature_samples": curvature_samples, "seed": 0}
    ordinary, replaying = (method(p.model, p.loss, **settings) for p in (problem, same))
    bound, replayed = bounds.of_verify(ordinary, problem.inputs, problem.targets, steps=8), 0
    for step in range(8):
        if step == 5:
            ordinary.param_groups[0]["lr"] = replaying.param_groups[0]["lr"] = 0.25
        a = ordinary.step(problem.inputs, problem.targets)
        info = replay(replaying, same)
        replayed += info is not None
        b = info or replaying.step(same.inputs, same.targets)
        assert b.as_dict() == pytest.approx(a.as_dict(), rel=bounds.of_info(a, bound))
    assert replayed == 8 - recording.WARM_UP - (1 if "momentum" in settings else 0)  # the first has none to move
    assert reference.model_error(same.model, problem.model) <= bound


def test_what_no_graph_can_hold_leaves_the_draws_alone(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "record_graph", fail)
    problem = problems.make("softmax")
    optimizer = woodbury.NaturalGradient(problem.model, problem.loss, curvature_samples=4, seed=0)
    before = optimizer.state["generator"].clone()
    for _ in range(recording.WARM_UP + 2):
        assert replay(optimizer, problem) is None
    assert torch.equal(optimizer.state["generator"], before)
    assert isinstance(optimizer.state["damping"], float) and optimizer._recordings._given_up


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fingerprint_sees_what_changes_the_numbers(change, monkeypatch):
    model = Scaled().double()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), curvature_samples=5)

    def fingerprint():
        return fingerprint_of(optimizer._context(), optimizer._problems, optimizer._plan(), {})

    optimizer.step(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    before = fingerprint()
    assert before == fingerprint() and hash(before) == hash(fingerprint())
    change(model, optimizer, monkeypatch)
    assert fingerprint() != before


def test_a_step_is_due_after_two_of_its_kind_and_four_shapes_are_held():
    recordings = Recordings()
    for shape in range(6):
        due = [recordings.is_due(Key("same", shape), CPU) for _ in range(3)]
        assert due == [False, False, shape < 4]
        if due[-1]:
            recordings.add(Key("same", shape), object())
    recordings.add(Key("other", 0), object())  # lets the others go
    assert recordings.find(Key("same", 0)) is None and recordings.find(Key("other", 0)) is not None
    recordings.give_up()
    assert recordings.find(Key("other", 0)) is None and not recordings.is_due(Key("other", 0), CPU)


def test_large_steps_are_not_due(monkeypatch):
    allocated = iter(range(0, 100 * 2**30, 2 * 2**30))
    monkeypatch.setattr(recording, "bytes_ever_allocated", lambda device: next(allocated))
    recordings = Recordings()
    for _ in range(4):
        assert not recordings.is_due(Key("large", 0), CPU)
        recordings.ordinary_step_ended(CPU)


def test_only_batches_a_graph_can_read_have_a_shape():
    x, y = torch.randn(4, 3), torch.zeros(4)
    assert recording.shape_of(x, y, CPU) == recording.shape_of(x.clone(), y, CPU)
    assert recording.shape_of((x, 2.0), y, CPU) != recording.shape_of((x, 3.0), y, CPU)
    assert recording.shape_of(x, None, CPU) != recording.shape_of(x, y, CPU)
    for inputs in (x.to_sparse(), (x, x.numpy()), (x, object()), x.to("meta")):
        assert recording.shape_of(inputs, y, CPU) is None


def test_a_copy_starts_without_recordings():
    optimizer = woodbury.GaussNewton(nn.Linear(2, 1), nn.MSELoss())
    optimizer._recordings.add(Key("a", 0), object())
    assert copy.deepcopy(optimizer)._recordings.find(Key("a", 0)) is None
