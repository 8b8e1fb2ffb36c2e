"""Parameters that are added to or multiplied with what the samples give: their rows, without a fallback."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import reference
import woodbury
from fuzz.models import Parts, drawn
from test_layers import CLASSES, LOSS, METHODS, check_directions, check_rows, shaken
from woodbury._vector import flatten
from woodbury.layers import ExplicitRows

N, LENGTH, WIDTH = 5, 3, 4


class Vision(nn.Module):
    """A small ViT: class token, position table, an encoder layer with layer scale, read at the token."""

    def __init__(self, token="expand"):
        super().__init__()
        self.patch, self.kind = nn.Linear(WIDTH, WIDTH), token
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        n = len(x)
        token = self.token.expand(n, -1, -1) if self.kind == "expand" else self.token.repeat(n, 1, 1)
        x = torch.cat([token, self.patch(x)], dim=1) + self.places
        return self.head((x + self.scale * self.block(x))[:, 0])


class Language(nn.Module):
    """A small GPT over LENGTH of up to 6 words, causal, with a table of places or an embedding of them."""

    def __init__(self, places="table"):
        super().__init__()
        self.words, self.kind = nn.Embedding(CLASSES, WIDTH), places
        self.places = nn.Parameter(torch.randn(6, WIDTH)) if places == "table" else nn.Embedding(6, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
        self.norm_weight = nn.Parameter(torch.rand(WIDTH))
        self.norm_bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        t = x.shape[1]
        order = torch.arange(t).unsqueeze(0) if self.kind == "embedding of one row" else torch.arange(t)
        places = self.places[:t] if self.kind == "table" else self.places(order)
        mask = nn.Transformer.generate_square_subsequent_mask(t, dtype=self.norm_bias.dtype)
        x = self.block(self.words(x) + places, src_mask=mask, is_causal=True)
        x = F.layer_norm(x, (WIDTH,), self.norm_weight, self.norm_bias)
        return self.head(x).transpose(1, 2)


def headed(run, outputs=CLASSES, **parts):
    return Parts(run, **parts, head=nn.Linear(WIDTH, outputs))


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
    "vision": Vision,
    "vision, repeated token": lambda: Vision("repeat"),
    "affine": affine,
    "computed": computed,
    "masked": masked,
    "filled": filled,
    "in place": in_place,
    "positions first": positions_first,
    "shared": shared,
}
LANGUAGE = {name: partial(Language, name) for name in ("table", "embedding", "embedding of one row")}


def batch(name, n, length=LENGTH):
    if name in LANGUAGE:
        return torch.randint(CLASSES, (n, length)), torch.randint(CLASSES, (n, length))
    return torch.randn(n, length, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (n,))


@pytest.mark.parametrize("name", [*SEQUENCES, *LANGUAGE])
def test_rows_and_steps_of_bare_parameters_are_the_dense_ones(name):
    """With as many samples as positions, where an axis of positions looks like that of samples."""
    torch.manual_seed(0)
    model = shaken({**SEQUENCES, **LANGUAGE}[name]().double())
    inputs, targets = batch(name, LENGTH)
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [2, 0])


@pytest.mark.parametrize("index, name", enumerate([*SEQUENCES, *LANGUAGE]))
def test_steps_of_bare_parameters_need_no_fallback_at_any_batch_size(index, name):
    """Of both methods in turn."""
    torch.manual_seed(0)
    kind = list(METHODS)[index % 2]
    model = shaken({**SEQUENCES, **LANGUAGE}[name]().double())
    optimizer = METHODS[kind](model, LOSS, damping=1.0, blocks="layer" if kind == "empirical" else "full")
    for n in (N, LENGTH, 1):  # t = n comes late
        inputs, targets = batch(name, n)
        assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)
        optimizer.step(inputs, targets)
    assert optimizer._plan().findings.fallback_method is None


def test_dropout_leaves_bare_parameters_their_rule():
    torch.manual_seed(0)
    for kind, method in METHODS.items():
        model = Vision().double()
        model.block.dropout.p = model.block.dropout1.p = 0.5
        model.block.self_attn.dropout = 0.3
        optimizer = method(model, LOSS, damping=0.1, fallback="autograd")
        inputs, targets = batch("vision", N)
        assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets), kind
        optimizer.step(inputs, targets)
        assert optimizer._plan().findings.fallback_method is None


@pytest.mark.parametrize("index, name", enumerate([*SEQUENCES, *LANGUAGE]))
def test_bare_parameters_under_autocast(index, name):
    """Rows have the type of the parameters, and what bfloat16 leaves of their digits; both methods in turn."""
    torch.manual_seed(0)
    kind = list(METHODS)[1 - index % 2]
    model = {**SEQUENCES, **LANGUAGE}[name]()
    inputs, targets = batch(name, N)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    plain = flatten(METHODS[kind](model, LOSS, damping=1.0).direction(inputs, targets, subset=[3, 1]))
    optimizer = METHODS[kind](model, LOSS, damping=1.0, autocast=torch.bfloat16)
    p = flatten(optimizer.direction(inputs, targets, subset=[3, 1]))
    assert p.dtype == torch.float32
    assert reference.relative_error(p, plain) <= 16 * torch.finfo(torch.bfloat16).eps


class Indexed(nn.Module):
    """A row of a table for each sample, chosen by the sample, and a table whose row i goes to sample i."""

    def __init__(self, by_place=False):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(N, WIDTH)), nn.Linear(WIDTH, CLASSES)
        self.by_place = by_place

    def forward(self, x):
        x = x.mean(1)
        return self.head(torch.tanh(x + self.table[: len(x)] if self.by_place else x + self.table[x[:, 0].long()]))


class Product(Parts):
    """A bare matrix: no sum and no product entry by entry."""

    def __init__(self):
        super().__init__(lambda m, x: x.mean(1) @ m.weight, weight=nn.Parameter(torch.randn(WIDTH, CLASSES)))


class Both(Parts):
    """A bare parameter and a matrix of one module: only the second needs the fallback."""

    def __init__(self):
        gain, weight = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(WIDTH, CLASSES))
        super().__init__(lambda m, x: torch.tanh(m.gain * x.mean(1)) @ m.weight, gain=gain, weight=weight)


@pytest.mark.parametrize("make", [Indexed, Product, Both])
def test_other_uses_are_left_to_the_fallback_or_refused_by_name(make):
    torch.manual_seed(0)
    model = make().double()
    inputs, targets = batch("affine", N)
    name = "table" if make is Indexed else "weight"
    message = rf"no layer rule covers parameter '{name}' of {make.__name__}.*fallback="
    with pytest.raises(ValueError, match=message):
        woodbury.rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [1, 3], fallback="autograd")


def test_a_table_with_a_row_per_sample_is_no_bare_parameter():
    """Its outputs depend on the place in the batch: the check of the samples sees it, whatever gives the rows."""
    torch.manual_seed(0)
    inputs, targets = batch("affine", N)
    for fallback in (None, "autograd"):
        with pytest.raises(ValueError, match=r"samples change when run apart|covers parameter 'table'"):
            woodbury.rows(Indexed(True).double(), LOSS, inputs, targets, fallback=fallback)


def disguised():
    """Positions that are spread over as many entries as there are samples before they meet a sample."""

    def run(m, x):
        weights = torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype).unsqueeze(1)
        return m.head(torch.tanh(x + m.place.expand(x.shape[1], WIDTH) * weights).mean(1))

    return headed(run, **drawn(place=(1, WIDTH)))


@pytest.mark.parametrize("n", [N, LENGTH])
def test_an_axis_that_only_looks_like_that_of_samples_gives_no_wrong_rows(n):
    torch.manual_seed(0)
    model = disguised().double()
    inputs, targets = batch("affine", n)
    if n == LENGTH:
        with pytest.raises(ValueError, match="no layer rule covers parameter 'place'"):
            woodbury.rows(model, LOSS, inputs, targets)
    else:
        check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [0, 2], fallback="autograd")


def test_a_model_with_bare_parameters_and_others_keeps_both_ways():
    torch.manual_seed(0)
    model = nn.Sequential(affine(WIDTH), Product()).double()
    model[1].run = lambda m, x: x @ m.weight
    inputs, targets = batch("affine", N)
    check_directions(model, LOSS, inputs, targets, [1, 3], fallback="autograd")
    forms = woodbury.rows(model, LOSS, inputs, targets, fallback="autograd").forms
    assert isinstance(forms["0"], ExplicitRows) and isinstance(forms["1"], ExplicitRows)
