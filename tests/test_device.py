"""When a step is recorded, on the CPU with a stand-in for the CUDA graph; constants; numbers of a device."""

import copy
import gc
import math
import operator
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from fuzz.models import Parts
from problems import CHANGES, Scaled
from woodbury.device import constants, recording, scalars
from woodbury.device.recording import Graph, Key, Recordings
from woodbury.device.scalars import Number, as_double, as_truth, compute, ratio_where, root, scaled_if, where
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


# -- constants: a bounded number of tensors, and nothing of a model that is gone ------------------------


LOSS = nn.CrossEntropyLoss()
CLASSES = 3


chain = partial(problems.mlp, 4, 5, CLASSES)
vectors = partial(torch.randn, 6, 4)
sentences = partial(torch.randint, 5, (6, 3))


def by_graph():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES))


def living_tensors():
    gc.collect()
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())


@pytest.mark.parametrize(
    "model, make",
    [
        (chain, lambda model: woodbury.GaussNewton(model, LOSS, curvature_samples=0.5)),
        (chain, lambda model: woodbury.KFAC(model, LOSS)),
        (by_graph, lambda model: woodbury.NaturalGradient(model, LOSS, blocks="layer", curvature_samples=0.5)),
    ],
    ids=["gauss-newton", "kfac", "natural gradient"],
)
def test_batches_of_many_sizes_leave_a_bounded_number_of_tensors(model, make):
    """Five functions make constants, and each keeps those of the last 32 sizes."""
    optimizer = make(model())
    inputs, targets = torch.randn(72, 4), torch.randint(CLASSES, (72,))
    before = None
    for size in range(2, 72):
        if size == 42:  # more sizes than are kept
            before = living_tensors()
        optimizer.step(inputs[:size], targets[:size])
    assert living_tensors() - before < 15  # one tensor per size would be 30
    assert len(constants.all_constants()) <= 5 * constants.LIMIT == 5 * 32


def lookup():
    """Layers that need the fallback, attention, and an embedding."""

    def run(m, x):
        h = m.words(x)
        return m.head(m.cell(m.attend(h, h, h)[0])[0][:, -1])

    layers = {"words": nn.Embedding(5, 4), "attend": nn.MultiheadAttention(4, 2, batch_first=True)}
    cell = nn.LSTM(4, 5, proj_size=4, batch_first=True)
    return Parts(run, **layers, cell=cell, head=nn.Linear(4, CLASSES))


@pytest.mark.parametrize(
    "model, inputs, method, options",
    [
        (chain, vectors, woodbury.GaussNewton, {}),
        (chain, vectors, woodbury.NaturalGradient, {"curvature_samples": 3, "momentum": 0.5}),
        (by_graph, vectors, woodbury.GaussNewton, {"curvature_samples": 3}),
        (by_graph, vectors, woodbury.GaussNewton, {"solver": "products"}),
        (lookup, sentences, woodbury.GaussNewton, {"fallback": "autograd"}),
        (lookup, sentences, woodbury.HessianFree, {}),
        (chain, vectors, woodbury.KFAC, {}),
    ],
)
def test_nothing_of_a_model_and_its_optimizer_stays_when_they_are_gone(model, inputs, method, options):
    model = model()
    optimizer = method(model, LOSS, **options)
    batch, targets = inputs(), torch.randint(CLASSES, (6,))
    for _ in range(3):
        info = optimizer.step(batch, targets)
        optimizer.direction(batch, targets)
    optimizer.verify(batch, targets)
    gone = [weakref.ref(entry) for entry in (model, optimizer, batch, *model.modules(), *model.parameters())]
    del model, optimizer, batch, info
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_a_recording_keeps_the_constants_it_reads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: nullcontext())
    cpu, read = torch.device("cpu"), [constants.ones(9, torch.float32, torch.device("cpu"))]

    def run(inputs, targets, rates, state):
        read.append(constants.ones(9, torch.float32, cpu))
        read.append(constants.indices(11, torch.long, cpu))  # made while it is recorded
        return torch.zeros(6)

    recorded = recording.Recording(torch.zeros(2), None, [], {}, cpu, torch.float32, run)
    addresses = {tensor.data_ptr() for tensor in read}
    assert read[0] is read[1]
    read.clear()
    for size in range(100, 101 + constants.LIMIT):
        constants.ones(size, torch.float32, cpu)
        constants.indices(size, torch.long, cpu)
    gc.collect()
    assert addresses <= {tensor.data_ptr() for tensor in recorded.graph.constants}


# -- numbers of a device: arithmetic done later and together, against plain floats ----------------------


COMPARISONS = [operator.gt, operator.ge, operator.lt]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, *COMPARISONS]
NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, math.inf, -math.inf, math.nan])


def numbers(values, device="cpu"):
    """Numbers as another device than the CPU would have them."""
    return [Number(torch.tensor(v, dtype=torch.float64, device=device)) for v in values]


def by_ieee(operation, a, b):
    """On tensors: Python raises where IEEE arithmetic gives inf or nan."""
    return operation(torch.tensor(a, dtype=torch.float64), b).double()


@given(st.lists(NUMBERS, min_size=3, max_size=3), st.sampled_from(BINARY), st.sampled_from(BINARY))
@settings(deadline=None)
def test_operators_are_those_of_plain_numbers(values, first, second):
    a, b, c = numbers(values)
    bound = {"rtol": bounds.rounding(1), "atol": 0.0, "equal_nan": True}
    for left, right, expected in (
        (a, b, by_ieee(first, values[0], values[1])),
        (a, values[1], by_ieee(first, values[0], values[1])),
    ):
        value = first(left, right)
        torch.testing.assert_close(as_double(value), expected, **bound)
        if first not in COMPARISONS:
            again = by_ieee(second, float(expected), values[2])
            torch.testing.assert_close(as_double(second(value, c)), again, **bound)
    swapped = by_ieee(first, values[0], torch.tensor(values[1], dtype=torch.float64))
    torch.testing.assert_close(as_double(first(values[0], b)), swapped, **bound)


@given(st.lists(NUMBERS, min_size=3, max_size=3))
@settings(deadline=None)
def test_choices_roots_and_magnitudes_are_those_of_plain_numbers(values):
    a, b, c = numbers(values)
    x, y, z = values
    truth, both = x > y, (x > y) & (y > z)
    assert bool(as_truth(a > b)) == truth and bool(as_truth((a > b) & (b > c))) == both
    assert bool(as_truth(True & (b > c))) == (y > z)
    expected = {
        "where": (where(a > b, c, 2.0), z if truth else 2.0),
        "constants": (where(a > b, 0.99, 1.01), 0.99 if truth else 1.01),
        "magnitude": (abs(a), abs(x)),
        "root": (root(a), math.nan if math.isnan(x) else math.sqrt(max(x, 0.0))),
        "ratio": (ratio_where(b > 0, a, b, -math.inf), x / y if y > 0 else -math.inf),
    }
    for name, (value, known) in expected.items():
        assert float(value) == pytest.approx(known, rel=bounds.rounding(1), abs=0, nan_ok=True), name


def test_a_number_is_a_tensor_to_torch_and_to_tensors():
    a, b = numbers([2.0, 3.0])
    vector = torch.arange(3, dtype=torch.float32)
    for value in (vector * (a + b), (a + b) * vector, torch.mul(vector, a + b)):
        assert torch.equal(value, 5 * vector)
    assert torch.equal((a + b) - vector, 5 - vector) and vector.clone().add_(a).dtype == torch.float32
    both = torch.stack([torch.as_tensor(x) for x in compute(a, b)])
    assert torch.equal(torch.stack([a.tensor(), b.tensor()]), both) and float(torch.tensor(2.0) * a) == 4.0


def test_a_number_answers_as_its_tensor_where_more_is_asked():
    (a,) = numbers([2.0])
    assert float((a + 1).clamp(max=2.5)) == 2.5 and float(-a) == -2.0 and float(a**2) == 4.0
    assert float(torch.where((a > 1) | (a > 5), a, 0.0)) == 2.0 and not bool(~(a > 1))
    with pytest.raises(AttributeError):
        a.nothing  # noqa: B018


@every_pair(rate=[1.0, 2, 0.5, torch.tensor(0.5, dtype=torch.float64)], holds=[True, False])
def test_values_are_zero_where_the_truth_does_not_hold_whatever_they_were(rate, holds):
    values = torch.tensor([1.0, -2.0]) if holds else torch.tensor([math.nan, math.inf])
    result = scaled_if(torch.tensor(holds), values, rate)
    assert torch.equal(result, values * float(rate) if holds else torch.zeros(2))
    assert result.dtype == torch.float32


def test_a_long_sum_is_computed_in_doubles():
    (total,) = numbers([0.0])
    for _ in range(5000):
        total = total + 1.0
    assert float(total) == 5000.0
    norm = Number(torch.tensor(1e25))  # whatever it comes from
    assert float(norm * norm) == pytest.approx(1e50, rel=bounds.rounding(1, dtype=torch.float32))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("values", [(1.5, -2.0, 3.0), (0.0, 0.0, 1.0), (math.nan, 1.0, 2.0), (math.inf, -1, 0.0)])
def test_one_kernel_gives_what_ordinary_operations_give(values):
    def arithmetic(a, b, c):
        ratio = ratio_where((abs(a + b) < math.inf) & (b > 0), a, b, -math.inf)
        scaled = where(ratio >= 0.25, where(ratio > 0.75, 0.99, 1.0), 1.01) * c
        return ratio, scaled, root(a) - 2 / c, (a == b) & (c >= 1), 3 - a * b

    together = compute(*arithmetic(*numbers(values, "cuda")))
    kernels = len(scalars._kernels)
    assert scalars._kernels_work
    for one, expected in zip(together, arithmetic(*numbers(values, "cuda")), strict=True):
        torch.testing.assert_close(one.double(), as_double(expected), equal_nan=True, rtol=1e-15, atol=0)
    compute(*arithmetic(*numbers([v + 1 for v in values], "cuda")))
    assert len(scalars._kernels) == kernels  # the same arithmetic on other numbers is the same kernel


@pytest.mark.gpu
@on_gpu
@every_pair(rate=[1.0, 2, 0.3, torch.tensor(0.3, dtype=torch.float64)], holds=[0.0, 1.0])
def test_the_kernel_that_scales_rounds_as_torch_does(rate, holds):
    values = torch.randn(50, 7, device="cuda")
    if not holds:
        values[0] = math.nan
    rate = rate.cuda() if isinstance(rate, torch.Tensor) else rate
    result = scaled_if(torch.tensor(holds, dtype=torch.float64, device="cuda"), values, rate)
    assert torch.equal(result, values * rate if holds else torch.zeros_like(values))
