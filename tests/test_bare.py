"""Parameters past the layer rules: those that are added or multiplied have rows; others take expanded weights."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import bounds
import reference
import woodbury
from checks import silence
from fuzz.models import Parts, drawn
from test_layers import CLASSES, LOSS, METHODS, check_directions, check_rows, shaken
from woodbury import _random
from woodbury._vector import flatten
from woodbury.model.fallback import Pass, WrittenRows
from woodbury.model.plan import plan_layers

N, LENGTH, WIDTH = 5, 3, 4


def headed(run, outputs=CLASSES, **parts):
    return Parts(run, **parts, head=nn.Linear(WIDTH, outputs))


def vision(repeats=False):
    """A small ViT: class token, position table, an encoder layer with layer scale, read at the token."""

    def run(m, x):
        token = m.token.repeat(len(x), 1, 1) if repeats else m.token.expand(len(x), -1, -1)
        x = torch.cat([token, m.patch(x)], dim=1) + m.places
        return m.head((x + m.scale * m.block(x))[:, 0])

    block = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    parts = drawn(token=(1, 1, WIDTH), places=(1, LENGTH + 1, WIDTH), scale=WIDTH)
    return headed(run, patch=nn.Linear(WIDTH, WIDTH), block=block, **parts)


def language(places="table"):
    """A small GPT over LENGTH of up to 6 words, causal, with a table of places or an embedding of them."""

    def run(m, x):
        t = x.shape[1]
        order = torch.arange(t).unsqueeze(0) if places == "embedding of one row" else torch.arange(t)
        shift = m.places[:t] if places == "table" else m.places(order)
        mask = nn.Transformer.generate_square_subsequent_mask(t, dtype=m.norm_bias.dtype)
        x = m.block(m.words(x) + shift, src_mask=mask, is_causal=True)
        x = F.layer_norm(x, (WIDTH,), m.norm_weight, m.norm_bias)
        return m.head(x).transpose(1, 2)

    parts = drawn(norm_weight=WIDTH, norm_bias=WIDTH)
    parts["places"] = nn.Parameter(torch.randn(6, WIDTH)) if places == "table" else nn.Embedding(6, WIDTH)
    block = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    words = nn.Embedding(CLASSES, WIDTH)
    head.weight = words.weight
    return Parts(run, words=words, block=block, head=head, **parts)


def affine(outputs=CLASSES):
    """gain x + shift on the inputs themselves, single numbers and a table, some used twice."""

    def run(m, x):
        x = torch.tanh(m.gain * x + m.shift + m.places)
        return m.head((x * m.gain - m.shift).mean(1))

    return headed(run, outputs, **drawn(gain=WIDTH, shift=(), places=(LENGTH, 1), unused=2))


def computed():
    """Values computed from parameters: a temperature, a gate, a product of tables, a table read backwards."""

    def run(m, x):
        low, high = m.gate.chunk(2)
        x = m.inner(x) + (m.left @ m.right).flip(0)
        x = torch.addcmul(x, torch.sigmoid(high), torch.sin(x)) - torch.sigmoid(low)
        return m.head((x / m.heat.exp()).mean(1)) * 2 + 1 / (1 + m.heat.square())

    parts = drawn(heat=1, gate=2 * WIDTH, left=(LENGTH, 2), right=(2, WIDTH))
    return headed(run, **parts, inner=nn.Linear(WIDTH, WIDTH))


def masked():
    """A token in place of entries that are left out."""
    run = lambda m, x: m.head(torch.tanh(torch.where(x[..., :1] > 0, x, m.token)).mean(1))  # noqa: E731
    return headed(run, **drawn(token=WIDTH))


def filled():
    """The same by masked_fill, with a token of one number, and a table without some of its entries."""

    def run(m, x):
        places = m.places.expand(len(x), -1, -1).masked_fill(x > 1, 0.0)
        return m.head((torch.tanh(x.masked_fill(x[..., :1] > 0, m.token)) * places).mean(1))

    return headed(run, **drawn(token=(), places=(1, LENGTH, WIDTH)))


def in_place():
    """Writes into the activations."""
    run = lambda m, x: m.head(torch.tanh(m.inner(x).add_(m.shift, alpha=0.5)).mean(1))  # noqa: E731
    return headed(run, inner=nn.Linear(WIDTH, WIDTH), **drawn(shift=(LENGTH, WIDTH)))


def positions_first():
    """Samples on the second axis, where nothing but the check of the rows shows it if t = n."""

    def run(m, x):
        x = torch.tanh(x.transpose(0, 1) * m.scale).cumsum(0) + m.start.expand(x.shape[1], len(x), WIDTH)
        return m.head(torch.tanh(x).mean(0))

    return headed(run, **drawn(scale=WIDTH, start=(1, 1, WIDTH)))


def shared():
    """One parameter of two modules, each of which uses it, and of the model."""

    def run(m, x):
        return m.head(torch.tanh(m.b(torch.tanh(m.a(x)))).mean(1) + m.gain)

    gain = nn.Parameter(torch.rand(WIDTH))
    parts = {name: Parts(lambda m, x: x * m.gain, gain=gain) for name in ("a", "b")}
    return headed(run, gain=gain, **parts)


SEQUENCES = {
    "vision": vision,
    "vision, repeated token": lambda: vision(repeats=True),
    "affine": affine,
    "computed": computed,
    "masked": masked,
    "filled": filled,
    "in place": in_place,
    "positions first": positions_first,
    "shared": shared,
}
LANGUAGE = {name: partial(language, name) for name in ("table", "embedding", "embedding of one row")}
MODELS = SEQUENCES | LANGUAGE


def batch(name, n, length=LENGTH):
    if name in LANGUAGE:
        return torch.randint(CLASSES, (n, length)), torch.randint(CLASSES, (n, length))
    return torch.randn(n, length, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (n,))


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_steps_of_bare_parameters_are_the_dense_ones(name):
    """With as many samples as positions, where an axis of positions looks like that of samples."""
    model = shaken(MODELS[name]().double())
    inputs, targets = batch(name, LENGTH)
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [2, 0])


@pytest.mark.parametrize("index, name", list(enumerate(MODELS)))
def test_steps_of_bare_parameters_need_no_fallback_at_any_batch_size(index, name):
    """Of both methods in turn."""
    kind = list(METHODS)[index % 2]
    model = shaken(MODELS[name]().double())
    optimizer = METHODS[kind](model, LOSS, damping=1.0, blocks="layer" if kind == "empirical" else "full")
    for n in (N, LENGTH, 1):  # t = n comes late
        inputs, targets = batch(name, n)
        assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)
        optimizer.step(inputs, targets)
    assert optimizer._plan().findings.fallback_method is None


def test_dropout_leaves_bare_parameters_their_rule():
    for kind, method in METHODS.items():
        model = vision().double()
        model.block.dropout.p = model.block.dropout1.p = 0.5
        model.block.self_attn.dropout = 0.3
        optimizer = method(model, LOSS, damping=0.1, fallback="autograd")
        inputs, targets = batch("vision", N)
        assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets), kind
        optimizer.step(inputs, targets)
        assert optimizer._plan().findings.fallback_method is None


@pytest.mark.parametrize("index, name", list(enumerate(MODELS)))
def test_bare_parameters_under_autocast(index, name):
    """Rows have the type of the parameters, and what bfloat16 leaves of their digits; both methods in turn."""
    kind = list(METHODS)[1 - index % 2]
    model = MODELS[name]()
    inputs, targets = batch(name, N)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    plain = flatten(METHODS[kind](model, LOSS, damping=1.0).direction(inputs, targets, subset=[3, 1]))
    optimizer = METHODS[kind](model, LOSS, damping=1.0, autocast=torch.bfloat16)
    p = flatten(optimizer.direction(inputs, targets, subset=[3, 1]))
    assert p.dtype == torch.float32
    assert reference.relative_error(p, plain) <= 16 * torch.finfo(torch.bfloat16).eps


def indexed(by_place=False):
    """A row of a table for each sample, chosen by the sample, or a table whose row i goes to sample i."""

    def run(m, x):
        x = x.mean(1)
        return m.head(torch.tanh(x + (m.table[: len(x)] if by_place else m.table[x[:, 0].long()])))

    return headed(run, **drawn(table=(N, WIDTH)))


def product():
    """A bare matrix: no sum and no product entry by entry."""
    return Parts(lambda m, x: x.mean(1) @ m.weight, **drawn(weight=(WIDTH, CLASSES)))


def both():
    """A bare parameter and a matrix of one module: only the second needs the fallback."""
    parts = drawn(gain=WIDTH, weight=(WIDTH, CLASSES))
    return Parts(lambda m, x: torch.tanh(m.gain * x.mean(1)) @ m.weight, **parts)


def affine_and_product():
    """The first module's parameters are bare, that of the second is not."""
    model = nn.Sequential(affine(WIDTH), product())
    model[1].run = lambda m, x: x @ m.weight
    return model


# for `test_sharing.py`
PAST_THE_RULES = {indexed: "table", product: "weight", both: "weight", affine_and_product: r"1\.weight"}


def test_a_table_with_a_row_per_sample_is_no_bare_parameter():
    """Its outputs depend on the place in the batch: the check of the samples sees it, whatever gives the rows."""
    inputs, targets = batch("affine", N)
    for fallback in (None, "autograd"):
        with pytest.raises(ValueError, match=r"samples change when run apart|covers parameter 'table'"):
            woodbury.rows(indexed(True).double(), LOSS, inputs, targets, fallback=fallback)


def disguised():
    """Positions that are spread over as many entries as there are samples before they meet a sample."""

    def run(m, x):
        weights = torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype).unsqueeze(1)
        return m.head(torch.tanh(x + m.place.expand(x.shape[1], WIDTH) * weights).mean(1))

    return headed(run, **drawn(place=(1, WIDTH)))


@pytest.mark.parametrize("n", [N, LENGTH])
def test_an_axis_that_only_looks_like_that_of_samples_gives_no_wrong_rows(n):
    model = disguised().double()
    inputs, targets = batch("affine", n)
    if n == LENGTH:
        with pytest.raises(ValueError, match="no layer rule covers parameter 'place'"):
            woodbury.rows(model, LOSS, inputs, targets)
    else:
        check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [0, 2], fallback="autograd")


# -- rows by expanded weights, for every kind of use that they take -------------------------------------


def written():
    """A network of bare matrices, as many equations are written, with a position table and a class token."""

    def run(m, x):
        x = torch.cat([m.token.expand(len(x), 1, -1), x + m.places[: x.shape[1]]], 1)
        return torch.einsum("nti,io->nto", torch.tanh(x @ m.first + m.shift), m.second.exp())

    return Parts(run, **drawn(first=(WIDTH, 6), shift=6, second=(6, 2), places=(9, WIDTH), token=(1, 1, WIDTH)))


def tokens():
    def run(m, x):
        x = torch.tanh(m.words(x) + m.places(torch.arange(LENGTH)))
        return m.head(x.reshape(-1, WIDTH)).reshape(len(x), -1)  # samples and positions on one axis

    return Parts(run, words=nn.Embedding(7, WIDTH), places=nn.Embedding(LENGTH, WIDTH), head=nn.Linear(WIDTH, 2))


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


SAMPLES, POSITIONS, IMAGES = (N, WIDTH), (N, LENGTH, WIDTH), (N, WIDTH, 6, 6)
CASES = {
    "linear": (network, SAMPLES, run),
    "second derivatives": (network, SAMPLES, second_derivatives),
    "positions": (network, POSITIONS, run),
    "bare matrices": (written, POSITIONS, run),
    "embeddings": (tokens, None, run),
    "convolution": (lambda: nn.Conv2d(WIDTH, 6, 3, groups=2, padding=1), IMAGES, run),
    "transposed convolution": (lambda: nn.ConvTranspose1d(LENGTH, 2, 3, stride=2), POSITIONS, run),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)), POSITIONS, run),
    "group norm": (lambda: nn.GroupNorm(2, WIDTH), IMAGES, run),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 3), SAMPLES, lambda model, x: model(x, x.sin())),
    "prelu": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.PReLU(3)), SAMPLES, run),
    **{
        f"weight norm along {dim}": (
            partial(lambda d: parametrizations.weight_norm(nn.Linear(WIDTH, 3), dim=d), dim),
            SAMPLES,
            run,
        )
        for dim in (0, 1, None)
    },
    "in place": (lambda: nn.Linear(WIDTH, WIDTH), POSITIONS, lambda m, x: F.linear(x, m.weight).add_(m.bias)),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 2)), SAMPLES, run),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_by_expanded_weights_are_those_of_a_loop_over_samples(name):
    make, shape, forward = CASES[name]
    model = make().double()
    x = torch.randint(7, (N, LENGTH)) if shape is None else torch.randn(*shape, dtype=torch.float64)
    before = _random.snapshot(torch.device("cpu"))
    outputs = forward(model, x).reshape(N, -1)
    parameters = dict(model.named_parameters())
    columns = torch.randn(N, 2, outputs.shape[1], dtype=torch.float64)
    taken = Pass(plan_layers(model, parameters, True), forward, x, outputs, random=before)
    watch = nullcontext() if name == "bilinear" else silence()  # which torch maps by a loop over the samples
    with patch("woodbury.model.fallback.no_batching_warnings", nullcontext()), watch:
        again, rows = WrittenRows(taken, parameters, columns).by_expansion()
    # a few hundred terms at most, of size about 1
    bound = bounds.rounding(1000)
    assert not any(own.requires_grad for own in rows.values())
    assert reference.relative_error(again, outputs.detach()) <= bound
    jacobians = reference.rows_of(outputs, list(parameters.values())).unflatten(0, outputs.shape)
    expected = (columns @ jacobians).split([own.numel() for own in parameters.values()], 2)
    for own, theirs in zip(parameters, expected, strict=True):
        found, scale = rows[own], max(1.0, float(theirs.abs().max()))
        assert float((found.reshape(theirs.shape) - theirs).abs().max()) <= bound * scale, (name, own)
        assert name != "second derivatives" or found[0, 0].is_contiguous()  # they are multiplied without a copy
