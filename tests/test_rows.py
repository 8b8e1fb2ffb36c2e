"""U against a loop over single samples: Gram, products, dense, and the capture's refusals."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import problems
import woodbury
from fuzz.models import Parts, drawn
from test_layers import check_rows
from woodbury.model.capture import GraphCapture


@problems.every_problem
def test_rows_equal_a_loop_over_samples(name):
    check_rows(*problems.make(name))


def chain(function):
    """A chain of Linear layers that is no nn.Sequential, with any function between them."""
    layers = {"a": nn.Linear(5, 6), "b": nn.Linear(6, 4), "c": nn.Linear(4, 3)}
    return Parts(lambda m, x: m.c(function(m.b(function(m.a(x))))), **layers)


BETWEEN = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu in place": torch.relu_,
    "gelu": F.gelu,
    "scaled": lambda z: 2 * torch.tanh(0.5 * z) + 1,
    "square": lambda z: z**2,
    "product with itself": lambda z: z * z,
    "identity": lambda z: z,
    "softmax": lambda z: z.softmax(1),
    "norm": lambda z: F.layer_norm(z, z.shape[1:]),
    "broadcast over features": lambda z: torch.tanh(z) * torch.arange(z.shape[1]).to(z),
    "skip": lambda z: z + torch.tanh(z),
    "mask": lambda z: z * (torch.arange(z.shape[1]) % 2).to(z),
}


@pytest.mark.parametrize("between", list(BETWEEN))
def test_rows_are_exact_whatever_stands_between_the_layers(between):
    """Chains have a way of their own through the columns; what is no chain must not be taken for one."""
    problem = problems.make("softmax-probabilities")
    problem.model = chain(BETWEEN[between]).double()
    check_rows(*problem)


def overwriting():
    """Changes a layer's input after the layer has used it."""

    def run(m, x):
        h = torch.tanh(m.a(x))
        y = m.b(h)
        h.add_(1.0)
        return y

    return Parts(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def folded():
    """Folds positions into the sample axis."""
    return Parts(lambda m, x: m.inner(x.reshape(-1, 2)).reshape(len(x), -1), inner=nn.Linear(2, 1))


def mixing(mix):
    return Parts(lambda m, x: m.b(torch.tanh(mix(m.a(x)))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))


class Forgetful(Parts):
    """Has a rule that leaves one of its parameters out."""


@woodbury.register_layer(Forgetful)
def forgetful_rows(layer, inputs, grads):
    return {"gain": inputs.unsqueeze(1) * grads}


def through(pool):
    """An embedding of positions that enters otherwise than by a sum or a product with what the samples give."""

    def run(m, x):
        return m.head(pool(torch.maximum(x.unsqueeze(-1), m.place(torch.arange(x.shape[1])))))

    with torch.random.fork_rng():
        torch.manual_seed(0)  # it is made when tests are collected; with other numbers `place` might win nowhere
        return Parts(run, place=nn.Embedding(5, 2), head=nn.Linear(2, 3))


def over_samples(layer, name):
    """A layer that takes the samples for features or channels."""
    return Parts(lambda m, x: m.head(getattr(m, name)(x)), **{name: layer}, head=nn.Linear(4, 3))


def by_transform():
    return Parts(lambda m, x: torch.func.jvp(m.layer, (x,), (torch.ones_like(x),))[1], layer=nn.Linear(4, 3))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


MSE = nn.MSELoss()
VECTORS, SQUARE, IMAGES = (5, 4), (5, 5), (5, 2, 3, 3)
DEPENDS = "depend on what layer '{}' gives for another"
POWER = Parts(lambda m, x: x.abs() ** m.gain, **drawn(gain=3))
STATELESS = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
SHIFTED = Forgetful(lambda m, x: m.gain * x + m.shift, **drawn(gain=3, shift=3))


@pytest.mark.parametrize(
    "model, shape, message",
    [
        (
            nn.Sequential(nn.Linear(4, 3), POWER),
            VECTORS,
            r"'1\.gain' of Parts.*register_layer.*fallback='autograd'",
        ),
        (overwriting(), VECTORS, r"input of layer 'b' was changed in place"),
        (nn.Linear(4, 3).requires_grad_(False), VECTORS, "no trainable parameter"),
        (folded(), VECTORS, r"layer 'inner' has an input of shape \(10, 2\) in a batch of 5 samples"),
        (mixing(lambda h: h - h.mean(0)), VECTORS, DEPENDS.format("a")),
        (mixing(lambda h: h.flip(0)), VECTORS, DEPENDS.format("a")),
        (mixing(lambda h: h.cumsum(0)), VECTORS, DEPENDS.format("a")),
        (through(lambda h: h.mean(1)), SQUARE, DEPENDS.format("place")),
        (through(lambda h: h[:, 0]), SQUARE, DEPENDS.format("place")),
        (through(lambda h: h.mean(1)), VECTORS, r"layer 'place' has an input of shape \(4,\)"),
        (over_samples(nn.LayerNorm(VECTORS), "norm"), VECTORS, "layer 'norm' gives for one sample depends on"),
        (over_samples(nn.Conv1d(5, 5, 1), "a"), VECTORS, "layer 'a' gives for one sample depends on the inputs"),
        (nn.Sequential(nn.BatchNorm2d(2), nn.Flatten()), IMAGES, r"BatchNorm2d '0' is in training mode.*eval"),
        (nn.Sequential(nn.Linear(4, 3), STATELESS).eval(), VECTORS, r"BatchNorm1d '1' .* keeps no statistics"),
        (nn.Sequential(nn.Linear(4, 3), SHIFTED), VECTORS, r"no rows for parameter '1\.shift'"),
        (by_transform(), VECTORS, r"layer 'layer' is called inside a torch.func transform"),
    ],
)
def test_models_whose_rows_would_be_wrong_are_refused_by_name(model, shape, message):
    with pytest.raises(ValueError, match=message):
        woodbury.rows(model, MSE, torch.randn(shape), None)


def test_sample_axis_must_come_first_and_curvature_be_known():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="curvature"):
        woodbury.rows(model, MSE, torch.randn(5, 4), None, curvature="newton")
    with pytest.raises(ValueError, match="first axis"):
        woodbury.rows(model, MSE, torch.randn(5, 4), None, forward=lambda m, x: m(x).T)


SETTINGS = [{}, {"fallback": "autograd"}, {"momentum": 0.9}, {"search": woodbury.CurvedSearch()}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_leaves_neither_its_pass_nor_its_optimizer_to_the_garbage_collector(settings, monkeypatch):
    """A capture holds the graph of a pass: memory must not wait for it.

    And an optimizer that it frees while another records a CUDA graph would end that recording.
    """
    passes, plain = [], GraphCapture.rows

    def rows(captured, segments):
        passes.append(weakref.ref(captured))
        return plain(captured, segments)

    monkeypatch.setattr(GraphCapture, "rows", rows)
    layer = Doubled(8, 12) if "fallback" in settings else nn.Conv1d(1, 2, 3)
    model, batch = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)), (torch.randn(6, 1, 8), torch.randn(6, 2))
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **settings)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        for _ in range(3):
            optimizer.step(*batch)
            optimizer.direction(*batch)
        assert len(passes) > 2 and all(reference() is None for reference in passes[1:])  # the first looks around
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
