"""What is kept between steps: a bounded number of tensors, and nothing of a model that is gone."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import problems
import woodbury
from fuzz.models import Parts
from woodbury.device import constants, recording

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
