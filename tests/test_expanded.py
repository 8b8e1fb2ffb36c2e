"""Rows by expanded weights, against a loop over single samples, for every kind of use that they take."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import bounds
import reference
import woodbury
from fuzz.models import Parts, drawn
from woodbury import _random
from woodbury.model.fallback import Pass, WrittenRows
from woodbury.model.plan import plan_layers

N, T, WIDTH = 5, 3, 4


def written():
    """A network of bare matrices, as many equations are written, with a position table and a class token."""

    def run(m, x):
        x = torch.cat([m.token.expand(len(x), 1, -1), x + m.places[: x.shape[1]]], 1)
        return torch.einsum("nti,io->nto", torch.tanh(x @ m.first + m.shift), m.second.exp())

    return Parts(run, **drawn(first=(WIDTH, 6), shift=6, second=(6, 2), places=(9, WIDTH), token=(1, 1, WIDTH)))


def tokens():
    def run(m, x):
        x = torch.tanh(m.words(x) + m.places(torch.arange(T)))
        return m.head(x.reshape(-1, WIDTH)).reshape(len(x), -1)  # samples and positions on one axis

    return Parts(run, words=nn.Embedding(7, WIDTH), places=nn.Embedding(T, WIDTH), head=nn.Linear(WIDTH, 2))


def second_derivatives(model, x):
    x = x.detach().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return u * slope[:, :1] - 0.1 * bend[:, :1] + slope[:, 1:2].square()


def run(model, x):
    return model(x)


def network():
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


SAMPLES, SEQUENCES, IMAGES = (N, WIDTH), (N, T, WIDTH), (N, WIDTH, 6, 6)
CASES = {
    "linear": (network, SAMPLES, run),
    "second derivatives": (network, SAMPLES, second_derivatives),
    "positions": (network, SEQUENCES, run),
    "bare matrices": (written, SEQUENCES, run),
    "embeddings": (tokens, None, run),
    "convolution": (lambda: nn.Conv2d(WIDTH, 6, 3, groups=2, padding=1), IMAGES, run),
    "transposed convolution": (lambda: nn.ConvTranspose1d(T, 2, 3, stride=2), SEQUENCES, run),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)), SEQUENCES, run),
    "group norm": (lambda: nn.GroupNorm(2, WIDTH), IMAGES, run),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 3), SAMPLES, lambda model, x: model(x, x.sin())),
    "prelu": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.PReLU(3)), SAMPLES, run),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 3)), SAMPLES, run),
    "in place": (lambda: nn.Linear(WIDTH, WIDTH), SEQUENCES, lambda m, x: F.linear(x, m.weight).add_(m.bias)),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 2)), SAMPLES, run),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_by_expanded_weights_are_those_of_a_loop_over_samples(name):
    make, shape, forward = CASES[name]
    model = make().double()
    x = torch.randint(7, (N, T)) if shape is None else torch.randn(*shape, dtype=torch.float64)
    before = _random.snapshot(torch.device("cpu"))
    outputs = forward(model, x).reshape(N, -1)
    parameters = dict(model.named_parameters())
    columns = torch.randn(N, 2, outputs.shape[1], dtype=torch.float64)
    taken = Pass(plan_layers(model, parameters, True), forward, x, outputs, random=before)
    again, rows = WrittenRows(taken, parameters, columns).by_expansion()
    # a few hundred terms at most, of size about 1
    bound = bounds.rounding(1000)
    assert not any(own.requires_grad for own in rows.values())
    assert reference.relative_error(again, outputs.detach()) <= bound
    for sample in range(N):
        for column in range(2):
            value = columns[sample, column] @ outputs[sample]
            grads = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
            for (own, parameter), grad in zip(parameters.items(), grads, strict=True):
                expected = torch.zeros_like(parameter) if grad is None else grad
                scale = max(1.0, float(expected.abs().max()))
                found = rows[own][sample, column]
                assert float((found - expected).abs().max()) <= bound * scale, (name, own)
                assert name != "second derivatives" or found.is_contiguous()  # they are multiplied without a copy


def test_uses_that_mix_samples_or_hide_them_give_other_outputs_or_an_error():
    """What `WrittenRows.compute` notices: it takes another method then."""
    model = nn.LSTM(WIDTH, 3, proj_size=2, batch_first=True).double()
    x = torch.randn(*SEQUENCES, dtype=torch.float64)
    outputs = model(x)[0].reshape(N, -1)
    parameters = dict(model.named_parameters())
    taken = Pass(plan_layers(model, parameters, True), lambda model, x: model(x)[0], x, outputs)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        WrittenRows(taken, parameters, torch.ones(N, 1, outputs.shape[1]).double()).by_expansion()


def test_a_model_that_maps_over_samples_itself_takes_another_method():
    """Otherwise every sample would meet the copies of all: n^2 of them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(N, 2, dtype=torch.float64)

    def mapped(model, x):
        return torch.func.vmap(lambda own: torch.func.jvp(model, (own,), (torch.ones_like(own),))[1])(x)

    parameters = dict(model.named_parameters())
    taken = Pass(plan_layers(model, parameters, True), mapped, x, mapped(model, x))
    with pytest.raises(RuntimeError, match="maps over samples by itself"):
        WrittenRows(taken, parameters, torch.ones(N, 1, 1).double()).by_expansion()
    own = woodbury.rows(model, None, x, forward=mapped, fallback="autograd").dense()
    slope = woodbury.rows(model, None, x, forward=lambda m, x: woodbury.laplacian(m, x).gradient.sum(-1)).dense()
    assert float((own - slope).abs().max()) <= bounds.rounding(20) * float(slope.abs().max())
