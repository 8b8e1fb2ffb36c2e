"""LSTM, GRU, RNN and their cells: outputs are torch's, rows and steps are dense autograd's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bounds
import woodbury
from cases import all_pairs, every_pair
from fuzz.models import Parts
from test_layers import CLASSES, LOSS, METHODS, check_directions, check_ratio, check_rows
from woodbury.layers import ExplicitRows
from woodbury.layers.maps import recurrent_forward

N, LENGTH, FEATURES, WIDTH = 5, 3, 4, 3
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
CELLS["relu"] = partial(nn.RNNCell, nonlinearity="relu")


def reader(kind, start=False, **options):
    """A recurrent layer whose outputs, final states and first states all enter; samples first or second."""

    def run(m, x):
        state = None
        if start:
            state = torch.tanh(m.first(x[:, 0]).unflatten(1, (-1, WIDTH))).transpose(0, 1)
            state = (state, state.sin()) if kind == "lstm" else state
        outputs, last = m.cell(x if cell.batch_first else x.transpose(0, 1), state)
        outputs = outputs if cell.batch_first else outputs.transpose(0, 1)
        last = last[0] * last[1] if kind == "lstm" else last
        return m.head(outputs.cumsum(1).mean(1)) + last.sum((0, 2)).unsqueeze(1)

    cell = LAYERS[kind](FEATURES, WIDTH, **options)
    width = WIDTH * (1 + cell.bidirectional)
    first = nn.Linear(FEATURES, cell.num_layers * width)
    return Parts(run, cell=cell, first=first, head=nn.Linear(width, CLASSES))


def unrolled(kind, start=False, bias=True):
    """A cell called at every step, a second one on what it gives."""

    def run(m, x):
        a = b = None
        if start:
            a = (x[:, 0, :WIDTH], x[:, 1, :WIDTH]) if kind == "lstm" else x[:, 0, :WIDTH]
        for step in x.unbind(1):
            a = m.a(step, a)
            b = m.b(a[0] if kind == "lstm" else a, b)
        return m.head(b[0] * b[1] if kind == "lstm" else b)

    a, b = CELLS[kind](FEATURES, WIDTH, bias=bias), CELLS[kind](WIDTH, WIDTH, bias=bias)
    return Parts(run, a=a, b=b, head=nn.Linear(WIDTH, CLASSES))


def batch(n=N):
    return torch.randn(n, LENGTH, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (n,))


@every_pair(
    kind=["lstm", "gru", "rnn"],  # with another activation the rows are the same, and outputs are compared below
    layers=[1, 2],
    both_ways=[False, True],
    first=[True, False],
    bias=[True, False],
    start=[False, True],
    n=[N, LENGTH, 1],
    frozen=["", "weight_ih_l0 bias_ih_l0", "bias_hh_l0 weight_ih_l0", "weight_hh_l0 bias_hh_l0"],
)
def test_rows_and_steps_of_recurrent_layers_are_the_dense_ones(
    kind, layers, both_ways, first, bias, start, n, frozen
):
    """Also where parts are frozen."""
    options = {"num_layers": layers, "bidirectional": both_ways, "batch_first": first, "bias": bias}
    model = reader(kind, start, **options).double()
    if not start:
        model.first.requires_grad_(False)
    for name in frozen.split():
        if bias or "weight" in name:
            getattr(model.cell, name).requires_grad_(False)
    inputs, targets = batch(n)
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, list(range(n))[::-2])


@every_pair(kind=list(LAYERS), layers=[1, 3], both_ways=[False, True], first=[True, False], dropout=[0.0, 0.4])
def test_a_pass_by_steps_gives_what_torch_gives(kind, layers, both_ways, first, dropout):
    """Masks too. An entry is a sum of a few terms of size 1, carried through all steps and layers."""
    if layers == 1:
        dropout = 0.0
    options = {"num_layers": layers, "bidirectional": both_ways, "batch_first": first, "dropout": dropout}
    layer = LAYERS[kind](FEATURES, WIDTH, **options).double()
    inputs = batch()[0]
    for given in (inputs if first else inputs.transpose(0, 1), torch.randn(7, 6, FEATURES, dtype=torch.float64)):
        torch.manual_seed(1)
        outputs, states = layer(given)
        torch.manual_seed(1)
        own_outputs, own_states = recurrent_forward(layer, {}, None, given)
        pairs = [(outputs, own_outputs)]
        pairs += zip(states, own_states, strict=True) if isinstance(states, tuple) else [(states, own_states)]
        for theirs, ours in pairs:
            assert ours.shape == theirs.shape
            size = max(1.0, float(theirs.detach().abs().max()))
            bound = bounds.rounding(WIDTH + FEATURES, steps=layers * max(given.shape[:2]))
            assert (ours - theirs).abs().max() <= bound * size


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_steps_of_recurrent_layers_with_dropout_need_no_fallback(kind):
    for method in METHODS.values():
        model = reader(kind, num_layers=2, dropout=0.5, batch_first=True).double()
        model.first.requires_grad_(False)
        optimizer = method(model, LOSS, damping=0.1, curvature_samples=3)
        for n in (N, LENGTH):
            inputs, targets = batch(n)
            assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)
            check_ratio(optimizer, inputs, targets, subset=list(range(n)))  # with the same masks
        forms = woodbury.rows(model, LOSS, inputs, targets).forms
        assert not any(isinstance(form, ExplicitRows) for form in forms.values())


def called(run, **options):
    """A recurrent layer in some other way."""
    cell, head = nn.LSTM(FEATURES, WIDTH, **options), nn.LazyLinear(CLASSES)
    return Parts(lambda m, x: m.head(run(m.cell, x)), cell=cell, head=head)


def packed(cell, x):
    lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
    given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(cell(given)[0], batch_first=True, total_length=x.shape[1])[0].sum(1)


def folded(cell, x):
    return cell(x.reshape(-1, 1, FEATURES))[0].reshape(len(x), -1)


def after_itself(cell, x):
    """Called twice, the second time by keyword, from where it ended."""
    outputs, state = cell(x)
    return cell(hx=state, input=x.sin())[0].mean(1) + outputs[:, 0]


def last_outputs(cell, x):
    return cell(x)[0].mean(1)


REFUSED = {
    "packed": (packed, {"batch_first": True}, r"layer 'cell' gets a packed sequence.*fallback='autograd'"),
    "folded": (folded, {"batch_first": True}, r"layer 'cell' has an input of shape \(15, 1, 4\).*axis 0"),
    "projected": (last_outputs, {"batch_first": True, "proj_size": 2}, r"'cell' has projections \(proj_size\)"),
    "computed": (last_outputs, {"batch_first": True}, r"'cell\.parametrizations\.weight_hh_l0\.original0'"),
}


@pytest.mark.parametrize("name", [*REFUSED, "frozen projections"])
def test_other_calls_are_refused_by_name_and_exact_by_the_fallback(name):
    run, options, message = REFUSED.get(name, REFUSED["projected"])
    model = called(run, **options).double()
    inputs, targets = batch()
    model(inputs)
    if name == "frozen projections":
        model.cell.weight_hr_l0.requires_grad_(False)
    if name == "computed":
        parametrizations.weight_norm(model.cell, "weight_hh_l0")
    with pytest.raises(ValueError, match=message):
        woodbury.rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [3, 1], fallback="autograd")


def test_a_state_that_torch_refuses_is_refused_by_torch():
    model = called(lambda cell, x: cell(x, (torch.zeros(1, 1, WIDTH),) * 2)[0].mean(1), batch_first=True)
    model.head = nn.Linear(WIDTH, CLASSES)
    with pytest.raises(RuntimeError, match="Expected hidden"):
        woodbury.rows(model, LOSS, batch()[0].float(), batch()[1])


def learnt():
    """Learnt first states, the same for all samples: bare parameters with the samples on the second axis."""

    def run(m, x):
        return m.head(m.cell(x, m.state.expand(-1, len(x), -1).contiguous())[0].mean(1))

    cell, state = nn.GRU(FEATURES, WIDTH, num_layers=2, batch_first=True), torch.randn(2, 1, WIDTH)
    return Parts(run, cell=cell, head=nn.Linear(WIDTH, CLASSES), state=nn.Parameter(state))


CELL_PAIRS = all_pairs(list(CELLS), [False, True], [True, False])
EXACT = {f"cells, {case}": (partial(unrolled, *case), N) for case in CELL_PAIRS} | {
    "called twice and by keyword": (lambda: called(after_itself, batch_first=True), N),
    "learnt first states": (learnt, N),
    "learnt first states of two samples": (learnt, 2),
}


@pytest.mark.parametrize("name", EXACT)
def test_rows_and_steps_of_cells_and_of_unusual_calls_are_the_dense_ones(name):
    make, n = EXACT[name]
    model = make().double()
    inputs, targets = batch(n)
    model(inputs)
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [1] if n == 2 else [3, 1])
