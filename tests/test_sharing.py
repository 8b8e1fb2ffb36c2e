"""Parameters used in unusual ways: several times, by several modules, computed, past every rule."""

import random
import re
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bounds
import problems
import reference
import test_bare
import woodbury
from cases import all_pairs, every_pair
from checks import random_states, refused, restore, silence, told
from fuzz.cases import laplacians
from fuzz.models import Attention, Parts, bare, list_twice
from test_layers import CLASSES, LOSS, METHODS, check_directions, check_ratio, check_rows, shaken
from woodbury._vector import flatten
from woodbury.layers.forms import add_own_product, linear

N = 5


def attention(**options):
    return nn.MultiheadAttention(4, 2, dropout=0.0, **options)


@pytest.fixture
def unbatched(monkeypatch):
    """torch.autograd.grad that refuses several gradients at once, as some operations do."""
    plain = torch.autograd.grad

    def grad(*args, is_grads_batched=False, **kwargs):
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented for aten::_cudnn_rnn_backward")
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)


def batch(*shape, n=N):
    return torch.randn(n, *shape, dtype=torch.float64), torch.randint(CLASSES, (n,))


def check_verify(optimizer, inputs, targets):
    """The residual of p is rounding; lmax of m samples is at most n / m times that of all n."""
    share = len(targets) / (optimizer.curvature_samples or len(targets))
    assert optimizer.verify(inputs, targets) <= share * bounds.of_verify(optimizer, inputs, targets)


def two_layers(run):
    return Parts(run, inner=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


def check_step(method, model, inputs, targets, **options):
    """p solves its system, and rho is that of the model at the new point."""
    optimizer = method(model, LOSS, damping=0.5, curvature_samples=2, seed=0, **options)
    check_verify(optimizer, inputs, targets)
    check_ratio(optimizer, inputs, targets)


class Headed(Parts):
    """A module, then a head; of several outputs the first, of positions the last."""

    def __init__(self, inner, width=4):
        super().__init__(inner=inner, head=nn.Linear(width, CLASSES))

    def forward(self, x):
        h = self.inner(x)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(torch.tanh(h[:, -1] if h.dim() == 3 else h))


def attending(kind="self", bias=True, mask=None, calls=1):
    """Attention of each kind torch has, mean over positions, a head."""
    options = {"bias": bias, "batch_first": kind != "positions first"}
    if kind == "separate":
        options |= {"kdim": 3, "vdim": 2}

    def run(m, x):
        masks = {}
        if mask == "causal":
            masks["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
        elif mask == "padding":
            masks["key_padding_mask"] = torch.arange(x.shape[1]).expand(x.shape[:2]) == x.shape[1] - 1
        for _ in range(calls):
            keys, values = m.key(x), m.value(x)
            others = {"memory": (keys, keys), "cross": (keys, values), "separate": (keys, values)}
            x = x.transpose(0, 1) if kind == "positions first" else x
            x = m.attend(x, *others.get(kind, (x, x)), need_weights=mask is None, **masks)[0]
            x = x.transpose(0, 1) if kind == "positions first" else x
        return m.head(torch.tanh(x).mean(1))

    layers = {"key": nn.Linear(4, options.get("kdim", 4)), "value": nn.Linear(4, options.get("vdim", 4))}
    return Parts(run, attend=attention(**options), head=nn.Linear(4, CLASSES), **layers)


def pairs(a, b, o, bias):
    """A bilinear layer on the two parts of each position."""

    def run(m, x):
        return m.head(torch.tanh(m.pair(x[..., :a], x[..., a:])).mean(1))

    return Parts(run, pair=nn.Bilinear(a, b, o, bias=bias), head=nn.Linear(o, CLASSES))


def repeated(make, calls):
    """A layer applied several times, each time to what it gave before."""
    return nn.Sequential(*[make(), nn.Tanh()] * calls, nn.Flatten(), nn.LazyLinear(CLASSES))


def words(count, width, padding, tied, bias, twice):
    """Embeddings used twice, and tied to the head or not."""

    def run(m, x):
        h = torch.tanh(m.inner(m.words(x)))
        h = h * m.words(x.flip(1)) if twice else h
        return m.last(torch.tanh(m.head(h)).mean(1))

    table, head = nn.Embedding(count, width, padding_idx=padding), nn.Linear(width, count, bias=bias)
    if tied:
        head.weight = table.weight
    return Parts(run, words=table, inner=nn.Linear(width, width), head=head, last=nn.Linear(count, CLASSES))


def tied(width):
    """Two Linear layers with one weight and a bias each, and two with everything in common."""
    a, b, c, d = (nn.Linear(width, width) for _ in range(4))
    b.weight, d.weight, d.bias = a.weight, c.weight, c.bias
    layers = [part for layer in (a, b, c, d) for part in (layer, nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


# Past the rules: most of these need fallback="autograd".


def test_a_module_with_two_names_keeps_its_parameters_and_moves():
    """torch.func.functional_call leaves such a module with the tensors of the call."""
    layer = nn.Linear(3, 3)
    run = lambda m, x: m.b(torch.tanh(m.a(x))) * torch.sin(m.gain.weight)  # noqa: E731
    model = Parts(run, a=layer, b=layer, gain=nn.Linear(3, 1))
    model, inputs, targets = model.double(), torch.randn(N, 3).double(), torch.randn(N, 3).double()
    before = dict(model.named_parameters())
    options = {"fallback": "autograd", "search": woodbury.CurvedSearch()}
    check_directions(model, nn.MSELoss(), inputs, targets, [1, 3], fallback="autograd")
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **options)
    losses = [optimizer.step(inputs, targets).loss for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    optimizer.verify(inputs, targets)
    assert all(own is before[name] for name, own in model.named_parameters()) and model.a.weight is model.b.weight


def projected():
    """An LSTM without a rule, which torch.func cannot map over."""
    return nn.LSTM(4, 5, proj_size=4, batch_first=True)


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, CLASSES))


def functional(m, x):
    """A table used as an embedding by its module and as a head by a function."""
    return F.linear(torch.tanh(m.inner(m.table(x) @ m.table.weight)).mean(1), m.table.weight)


# On sequences (3, 4).
BY_RULES = {"bare": lambda: Headed(bare(4)), "encoder": encoder}
BY_RULES["gru"] = lambda: Headed(nn.GRU(4, 4, batch_first=True))
FALLBACKS = {
    "lstm with projections": lambda: Headed(projected()),
    "weight norm": lambda: Headed(parametrizations.weight_norm(nn.Linear(4, 4))),
    "orthogonal": lambda: Headed(parametrizations.orthogonal(nn.Linear(4, 4))),
    "attention with extra keys": lambda: Headed(Attention(attention(add_bias_kv=True, batch_first=True))),
    "function": lambda: Parts(functional, table=nn.Linear(4, CLASSES, bias=False), inner=nn.Linear(4, 4)),
}


def way(optimizer):
    """How the rows past the rules were computed."""
    return optimizer._plan().findings.fallback_method


def told_of_passes(optimizer, inputs, targets, between=lambda: None):
    """What three steps say about passes."""
    with told() as texts:
        for _ in range(2):
            optimizer.step(inputs, targets)
        between()
        optimizer.step(inputs, targets)
    return [text for text in texts if "passes" in text]


@pytest.mark.parametrize("name, samples", [("graph", 40), ("chunks", 20), ("chunks", 21), ("chunks", 40)])
def test_a_step_of_many_passes_says_so_once(name, samples):
    whole = name == "graph"  # takes whole batches only
    first = Parts(lambda m, x: x.reshape(samples, 3, 4)) if whole else nn.Tanh()
    model = nn.Sequential(first, FALLBACKS["lstm with projections"]()).double()
    optimizer = woodbury.NaturalGradient(model, LOSS, fallback="autograd")
    texts = told_of_passes(optimizer, *batch(3, 4, n=samples), between=model.eval)  # which makes a new plan
    passes = samples if whole else min(samples, 32)
    assert way(optimizer) == name and len(texts) == (passes > 20)
    for text in texts:
        assert f"the time of {passes} passes" in text and "solver='products'" in text
        reason = "on part of a batch" if whole else "cannot map"
        assert re.search(rf"parameter '1.inner.weight_ih_l0' of LSTM '1.inner'.*{reason}", text)


def test_columns_that_go_back_one_at_a_time_say_so_once(unbatched):
    for classes in (21, 22):  # rows of a sample: one fewer
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, classes))
        inputs, targets = torch.randn(N, 4), torch.randint(classes, (N,))
        texts = told_of_passes(woodbury.GaussNewton(model, LOSS), inputs, targets)
        assert len(texts) == (classes == 22)
        assert all("the time of 21 passes" in text and "NaturalGradient" in text for text in texts)


def test_a_step_of_few_passes_is_silent():
    """Rules, bare parameters, and expanded weights with dropout."""
    for name, make in (*BY_RULES.items(), ("weight norm", FALLBACKS["weight norm"])):
        model = nn.Sequential(nn.Dropout(0.1), make().double())
        optimizer = woodbury.NaturalGradient(model, LOSS, fallback="autograd")
        with silence(RuntimeWarning):
            optimizer.step(*batch(3, 4, n=40))
        assert way(optimizer) == ("expanded" if name == "weight norm" else None)


def noisy(inner):
    """Random numbers of every kind: masks, numbers for the whole batch, layers left out, positions first."""

    def run(m, x):
        x = m.drop(m.inner(x))
        if random.random() < 0.7 and numpy.random.rand() < 0.7:
            x = m.attend(x)
        x = F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1) * torch.rand(())
        keep = torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.7
        return m.head((x * keep + torch.randn_like(x) * torch.bernoulli(torch.full_like(x, 0.5))).mean(1))

    attend = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)
    return Parts(run, inner=inner, drop=nn.Dropout1d(0.5), head=nn.Linear(4, CLASSES), attend=attend)


# No rule, and torch.func can map over its functions or not.
INNER = {
    "expanded": lambda: Parts(lambda m, x: x * m.inner(x), inner=parametrizations.weight_norm(nn.Linear(4, 4))),
    "graph": lambda: Parts(lambda m, x: x + m.inner(x)[0], inner=projected()),
}


@pytest.mark.parametrize("expected_way", INNER)
def test_random_numbers_of_rows_are_those_of_the_pass(expected_way):
    random.seed(0), numpy.random.seed(0)
    model, (inputs, targets) = noisy(INNER[expected_way]()).double(), batch(3, 4)
    for method in METHODS.values():
        optimizer = method(model, LOSS, damping=1.0, fallback="autograd")
        check_verify(optimizer, inputs, targets)
        before = optimizer.direction(inputs, targets)
        assert torch.equal(flatten(before), flatten(optimizer.direction(inputs, targets)))
        assert way(optimizer) == expected_way


# Functions of a model.


def masked_mean(model, batch):
    """A dictionary with padded positions."""
    kept = batch["mask"].unsqueeze(-1)
    return (model(batch["x"]) * kept).sum(1) / kept.sum(1)


def test_dictionaries_masks_and_several_inputs():
    model = problems.mlp(4, 5, CLASSES).double()
    (x, targets), (other, _) = batch(3, 4), batch(4)
    mask = (torch.rand(N, 3) < 0.6).double()
    mask[:, 0] = 1
    check_directions(model, LOSS, {"x": x, "mask": mask}, targets, [3, 0], masked_mean)
    # siamese: the model is called twice
    check_directions(model, LOSS, (x[:, 0], other), targets, [3, 0], lambda m, pair: m(pair[0]) - m(pair[1]))


def poisson(model, points):
    """Laplacian inside, value on the boundary, each with a weight of its own."""
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    bends = [torch.autograd.grad(slope[:, axis].sum(), points, create_graph=True)[0][:, axis] for axis in (0, 1)]
    inside = 0.5 * (sum(bends) + points.sum(1)).unsqueeze(1)
    return torch.where(points[:, :1] < 0.6, inside, 3.0 * u)


@pytest.mark.parametrize("forward, expected_way", [(poisson, "expanded"), (laplacians, "func")])
def test_residuals_of_a_differential_equation(forward, expected_way):
    """By autograd, and by torch.func."""
    model = problems.mlp(2, 4, 3, 1).double()
    inputs, targets = torch.rand(N, 2).double(), torch.zeros(N, 1).double()
    options = {"forward": forward, "fallback": "autograd"}
    optimizer = woodbury.NaturalGradient(model, nn.MSELoss(), **options)
    optimizer.direction(inputs, targets)
    assert way(optimizer) == expected_way
    assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)
    check_directions(model, nn.MSELoss(), inputs, targets, [3, 0], **options)


def beside_itself(width):
    """Uses its weight beside the layer's own call, so that rows are written out."""

    def run(m, x):
        return m.head(m.bend(m.layer(x) + F.linear(x, m.layer.weight)))

    return Parts(run, layer=nn.Linear(2, 2), bend=nn.PReLU(), head=nn.Linear(2, width))


@pytest.mark.parametrize("samples, width", [(3, 3), (7, 1), (5, 2)], ids=["n = k", "k = 1", "other"])
def test_rows_that_torch_func_gets_wrong_are_noticed(samples, width):
    """Mapped over as many samples as seeds, the backward pass of prelu mixes them (torch 2.13)."""
    inputs, targets = torch.randn(samples, 2).double(), torch.randn(samples, width).double()
    check_directions(beside_itself(width).double(), nn.MSELoss(), inputs, targets, [1, 2], fallback="autograd")


def test_operations_that_cannot_be_batched_are_differentiated_one_seed_at_a_time(unbatched):
    model, (inputs, targets) = Headed(projected()).double(), batch(3, 4)
    check_directions(model, LOSS, inputs, targets, [3, 0], fallback="autograd")


def mirrored():
    """An autoencoder whose decoder has no weight of its own."""

    def run(m, x):
        m.b.weight = m.a.weight.t()
        return m.b(torch.tanh(m.a(x)))

    model = Parts(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    del model.b.weight
    return model


def compared(detach):
    """A layer that is used a second time as a constant."""

    def run(m, x):
        with torch.set_grad_enabled(detach):
            constant = m.inner(x)
        return m.head(torch.tanh(m.inner(x.flip(1))) * constant.detach())

    return two_layers(run)


def checkpointed(reentrant):
    def run(m, x):
        x = x.detach().requires_grad_()
        return m.head(checkpoint(lambda z: torch.tanh(m.inner(z)), x, use_reentrant=reentrant))

    return two_layers(run)


def test_models_that_autograd_cannot_follow_are_refused():
    """Complex parameters, tensors without numbers, checkpoints by reentrance."""
    with pytest.raises(ValueError, match=r"'weight' is complex.*view_as_complex"):
        woodbury.GaussNewton(nn.Linear(4, CLASSES, dtype=torch.complex64), nn.MSELoss())
    inputs, targets = batch(4)
    with pytest.raises(ValueError, match="meta device"):
        optimizer = woodbury.GaussNewton(nn.Linear(4, CLASSES, device="meta"), LOSS)
        optimizer.step(inputs.float().to("meta"), targets.to("meta"))
    for method in (*METHODS.values(), woodbury.HessianFree):
        with pytest.raises(ValueError, match="use_reentrant=False"):
            method(checkpointed(True).double(), LOSS).step(inputs, targets)


class Twice(Parts):
    """z = a x + a^2 b + shift, with a = b or not; the rule gives rows for every name."""

    def __init__(self, tied, shape=(4,)):
        super().__init__(a=nn.Parameter(torch.rand(shape) + 0.5), shift=nn.Parameter(torch.randn(4)))
        self.b = self.a if tied else nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return self.a * x + self.a**2 * self.b + self.shift


@woodbury.register_layer(Twice)
def twice_rows(layer, inputs, grads):
    a = grads * (inputs + 2 * layer.a * layer.b).unsqueeze(1)
    b = grads * layer.a**2
    if layer.a.dim() == 0:
        a, b = a.sum(2), b.sum(2)
    return {"a": a, "b": b, "shift": grads}


def past(before, power):
    """A parameter of a registered layer used once more, past its module, before or after."""

    def run(m, x):
        scale = (lambda h: h.abs() ** m.layer.a) if power else (lambda h: h * m.layer.a)
        return m.head(m.layer(torch.tanh(scale(x))) if before else scale(torch.tanh(m.layer(x))))

    return Parts(run, layer=Twice(False), head=nn.Linear(4, CLASSES))


def traced():
    inner = torch.jit.trace(nn.Linear(4, 4).double(), torch.randn(N, 4, dtype=torch.float64))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(4, CLASSES))


def substituted(how):
    """A layer used as it is, then with other parameters: constants, computed ones, its own but frozen."""

    def run(m, x):
        own = dict(m.layer.named_parameters())
        if how == "computed":
            x = functional_call(m.layer, {name: torch.tanh(value) for name, value in own.items()}, (x,))
            return m.head(torch.tanh(x))
        x = torch.tanh(m.layer(x))
        if how == "constant":
            x = functional_call(m.layer, {name: value.detach() for name, value in own.items()}, (x,))
        else:
            m.layer.requires_grad_(False)
            x = m.layer(x)
            m.layer.requires_grad_(True)
        return m.head(torch.tanh(x))

    return Parts(run, layer=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


VECTORS, SEQUENCES = (4,), (3, 4)
OUTSIDE = r"'layer.a' is used outside .*"
PAST_THE_RULES = {
    **{name: (make, SEQUENCES, "") for name, make in FALLBACKS.items()},
    "a traced module": (traced, VECTORS, ""),
    "a weight computed from another layer's": (mirrored, VECTORS, r"'a.weight' is used outside .*"),
    **{
        how: (partial(substituted, how), VECTORS, r"layer 'layer' is called with other parameters .*")
        for how in ("computed", "constant", "frozen")
    },
    **{
        make.__name__: (make, SEQUENCES, rf"no layer rule covers parameter '{name}' of Parts.*")
        for make, name in test_bare.PAST_THE_RULES.items()
    },
    "a power before its registered layer": (lambda: past(True, power=True), VECTORS, OUTSIDE),
    "a power after its registered layer": (lambda: past(False, power=True), VECTORS, OUTSIDE),
}


@pytest.mark.parametrize("name", list(PAST_THE_RULES))
def test_the_fallback_gives_the_dense_direction(name):
    """And without it an error names the way out."""
    make, shape, message = PAST_THE_RULES[name]
    model = shaken(make().double())
    with pytest.raises(ValueError, match=message + "fallback='autograd'"):
        woodbury.GaussNewton(model, LOSS).step(*batch(*shape))
    for n, max_bytes in ((N, None), (1, 1)):
        subset = list(range(n))[::-2]
        check_directions(model, LOSS, *batch(*shape, n=n), subset, fallback="autograd", max_bytes=max_bytes)
    check_step(woodbury.NaturalGradient, model, *batch(*shape), fallback="autograd")


def halved(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.inner(x)
    return m.head(torch.tanh(h.float()))


@torch.autocast("cpu", dtype=torch.bfloat16)
def all_halved(m, x):
    return m.head(torch.tanh(m.inner(x)))


@pytest.mark.parametrize("run", [halved, all_halved])
def test_autocast_inside_the_model_needs_the_fallback_or_that_of_the_optimizer(run):
    inputs, targets = torch.randn(N, 4), torch.randint(CLASSES, (N,))
    ways = r"pass autocast=torch\.bfloat16 to the optimizer.* fallback='autograd'"
    with pytest.raises(ValueError, match=rf"layer 'inner' gives torch.bfloat16 .*{ways}"):
        woodbury.GaussNewton(two_layers(run), LOSS).step(inputs, targets)
    for settings in ({"fallback": "autograd"}, {"autocast": torch.bfloat16}):
        optimizer = woodbury.GaussNewton(two_layers(run), LOSS, **settings)
        assert optimizer.verify(inputs, targets) <= 0.05  # what bfloat16 leaves
        assert optimizer.step(inputs, targets).accepted


def queries():
    """Attention among constants, which has no sample axis, unbatched."""

    def run(m, x):
        return m.head(torch.tanh(x * m.attend(m.queries, m.queries, m.queries)[0].mean(0)))

    return Parts(run, queries=nn.Buffer(torch.randn(3, 4)), attend=attention(), head=nn.Linear(4, CLASSES))


def by_keyword():
    def run(m, x):
        return m.head(input=torch.tanh(m.pair(input2=x.sin(), input1=x)))

    return Parts(run, pair=nn.Bilinear(4, 4, 4), head=nn.Linear(4, CLASSES))


def hooked(at):
    """Halves gradients on their way back, at a layer's output or behind the activation."""

    def run(m, x):
        h = m.inner(x)
        v = torch.tanh(h)
        if v.requires_grad:
            (h, v)[at].register_hook(lambda grad: 0.5 * grad)
        return m.head(v)

    return two_layers(run)


def mixing(m, x):
    """Samples mixed between the layers in training, or behind them where all inputs are positive."""
    h = m.inner(x)
    h = m.head(torch.tanh(h - h.mean(0) if m.training else h))
    return h.flip(0) if x.min() > 0 else h


def test_mixing_that_shows_later_is_refused_when_it_is_looked_for_again():
    """A new mode is looked at at once, other data at the second pass."""
    inputs, targets = torch.rand(N, 4, dtype=torch.float64), torch.randint(CLASSES, (N,))
    model = two_layers(mixing).double().eval()
    optimizer = woodbury.NaturalGradient(model, LOSS)
    optimizer.step(-inputs, targets)
    with pytest.raises(ValueError, match="mixes the samples"):
        optimizer.step(inputs, targets)
    model.train()
    with pytest.raises(ValueError, match="layer 'inner' gives for another"):
        optimizer.step(-inputs, targets)


@pytest.mark.parametrize("mask", [torch.rand(3, 3), [0.5, 1.0, 2.0]], ids=["tensor", "list"])
def test_what_has_no_sample_axis_is_not_cut_where_its_length_happens_to_fit(mask):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES))
    inputs, targets = torch.randn(N, 3), torch.randint(CLASSES, (N,))

    def forward(model, batch):
        assert len(batch["mask"]) == 3
        return model(batch["x"] @ torch.as_tensor(batch["mask"]).expand(3, 3))

    optimizer = woodbury.NaturalGradient(model, LOSS, curvature_samples=2, forward=forward)
    optimizer.step({"x": inputs, "mask": mask}, targets)
    named = "list with 3 entries" if isinstance(mask, list) else r"Tensor of shape \(3, 3\)"
    with refused(optimizer, rf"inputs\['mask'\], {named}, had no sample axis"):
        optimizer.step({"x": inputs[:3], "mask": mask}, targets[:3])
    optimizer.step({"x": inputs[:4], "mask": mask}, targets[:4])


# One parameter under several names of one module.


def tie(module, **names):
    """A module with one parameter under two names."""
    for name, other in names.items():
        setattr(module, name, getattr(module, other))
    return module


def tied_recurrent(kind):
    cell = kind(4, 4, batch_first=True)
    return tie(cell, weight_hh_l0="weight_ih_l0", bias_hh_l0="bias_ih_l0")


def keyed():
    """Attention whose projections of keys and values are one."""
    attend = tie(attention(kdim=3, vdim=3, batch_first=True), v_proj_weight="k_proj_weight")
    return Parts(lambda m, x: m.attend(x, x[..., :3], x[..., 1:])[0], attend=attend)


TWO_NAMES = {
    "layer norm": (lambda: tie(nn.LayerNorm(4), bias="weight"), VECTORS, {}),
    "registered": (lambda: Twice(True), VECTORS, {}),
    "registered, one number": (lambda: Twice(True, ()), VECTORS, {}),
    "attention": (keyed, SEQUENCES, {}),
    "rnn": (lambda: tied_recurrent(nn.RNN), SEQUENCES, {}),
    "lstm": (lambda: tied_recurrent(nn.LSTM), SEQUENCES, {}),
    "gru cell": (lambda: tie(nn.GRUCell(4, 4), weight_hh="weight_ih"), VECTORS, {}),
    "parameter list": (lambda: list_twice(4), VECTORS, {"fallback": "autograd"}),
    "bare": (lambda: list_twice(4, names=True), VECTORS, {"fallback": "autograd"}),
}


@pytest.mark.parametrize("name", list(TWO_NAMES))
def test_one_parameter_under_two_names_of_a_module_counts_once(name):
    make, shape, options = TWO_NAMES[name]
    model = shaken(Headed(make()).double())
    inputs, targets = batch(*shape)
    check_rows(model, LOSS, inputs, targets, **options)
    check_directions(model, LOSS, inputs, targets, [1, 3], **options)
    check_directions(model, LOSS, inputs, targets, [1, 3], solver="products", solver_tolerance=1e-15)
    expected, _, _ = reference.dense_direction(model, LOSS, inputs, targets, [1, 3], 0.5, "gauss-newton")
    optimizer = woodbury.HessianFree(model, LOSS, damping=0.5, progress=0.0, max_iterations=500)
    p = flatten(optimizer.direction(inputs, targets, subset=[1, 3]))
    assert reference.relative_error(p, expected) <= 1e-7  # where the iteration stops

    def decayed_loss():
        return (LOSS(model(inputs), targets) + sum(0.05 * p.square().sum() for p in model.parameters())).item()

    blocks = ("full", "layer")[list(TWO_NAMES).index(name) % 2]
    settings = {"damping": 0.5, "momentum": 0.3, "weight_decay": 0.1, **options}
    optimizer = woodbury.GaussNewton(model, LOSS, blocks=blocks, **settings)
    for _ in range(2):
        check_verify(optimizer, inputs, targets)
        before = decayed_loss()
        info = optimizer.step(inputs, targets)
        decrease = before - decayed_loss()
        bound = bounds.of_decrease(before, decrease, sum(p.numel() for p in model.parameters()))
        assert (info.ratio * info.predicted).item() == pytest.approx(decrease, rel=bound)


# Attention with part of its parameters frozen.

PARTS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


@pytest.mark.parametrize("kind", ["self", "cross", "separate"])
def test_attention_with_any_part_of_its_parameters_frozen(kind):
    """Frozen and thawed between the steps of one optimizer."""
    names = SEPARATE if kind == "separate" else PARTS
    inputs, targets = batch(3, 4)
    model = shaken(attending(kind).double())
    optimizer = woodbury.GaussNewton(model, LOSS, damping=0.5)
    for chosen in all_pairs(*[(False, True)] * len(names)):
        for name, trained in zip(names, chosen, strict=True):
            model.attend.get_parameter(name).requires_grad_(trained)
        check_rows(model, LOSS, inputs, targets)
        if kind == "self":
            check_verify(optimizer, inputs, targets)
            assert optimizer.step(inputs, targets).accepted
    check_directions(model, LOSS, inputs, targets, [1, 3])


class OutwardOnly(nn.MultiheadAttention):
    """Attention of someone's own, which calls the module of its last projection."""

    def forward(self, x):
        weights = (x @ x.transpose(1, 2)).softmax(-1)
        return self.out_proj(weights @ F.linear(x, self.in_proj_weight[:4]))


# Layers whose outputs are changed in place.

IN_PLACE = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False), (3, 4)),
    "bilinear": (lambda: nn.Bilinear(2, 2, 4), (3, 4)),
    "embedding": (lambda: nn.Embedding(5, 4), (3,)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 1), (3, 2, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 1), (3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(1, 3), (3, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 2)),
    "instance norm, kept": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 2)),
    "prelu": (lambda: nn.PReLU(3), (3, 4)),
}


def in_place(make):
    """A layer whose outputs are changed where they are, twice."""

    def run(m, x):
        h = m.layer(x[..., :2], x[..., 2:]) if isinstance(m.layer, nn.Bilinear) else m.layer(x)
        return m.head(torch.relu_(h.mul_(1.5)).flatten(1))

    return Parts(run, layer=make(), head=nn.LazyLinear(CLASSES)).eval()


def attending_in_place(batch_first):
    def run(m, x):
        x = x if batch_first else x.transpose(0, 1)
        return m.head(torch.relu_(m.attend(x, x, x)[0]).mean(1 if batch_first else 0))

    return Parts(run, attend=attention(batch_first=batch_first), head=nn.Linear(4, CLASSES))


def own_attention():
    model = nn.Sequential(OutwardOnly(4, 2), nn.Flatten(), nn.Linear(12, CLASSES))
    model[0].in_proj_weight.requires_grad_(False)
    model[0].in_proj_bias.requires_grad_(False)
    return model


# kind, bias, mask, calls
ATTENTION = [
    *(("self", True, "padding", 1), ("positions first", False, "causal", 2), ("memory", True, None, 2)),
    *(("cross", False, "padding", 1), ("separate", True, "causal", 1)),
]
REPEATED = {
    "linear": (lambda: nn.Linear(3, 3, bias=False), (3,)),
    "linear on positions": (lambda: nn.Linear(3, 3), (2, 3)),
    "prelu": (nn.PReLU, (3,)),
    "convolution in groups": (lambda: nn.Conv1d(4, 4, 3, padding=1, groups=2), (4, 3)),
    "convolution": (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 3)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 2, 3, padding=1), (2, 4)),
    "layer norm": (lambda: nn.LayerNorm(3), (2, 3)),
    "group norm": (lambda: nn.GroupNorm(1, 2), (2, 3)),
}
# where the trial pass might differ from the step's own
OTHERWISE_IN_THE_TRIAL = {
    "a detached call": (lambda: compared(True), VECTORS),
    "a call without gradients": (lambda: compared(False), VECTORS),
    **{f"{name} changed in place": (partial(in_place, make), shape) for name, (make, shape) in IN_PLACE.items()},
}
EXACT = {
    **{f"attention {case}": (partial(attending, *case), SEQUENCES) for case in ATTENTION},
    **{f"{name} three times": (partial(repeated, make, 3), shape) for name, (make, shape) in REPEATED.items()},
    **{
        f"words {case}": (partial(words, 5, 3, *case), (3,))
        for case in all_pairs([None, 0, 1], [True, False], [True, False], [True, False])  # see `words`
    },
    "tied layers": (lambda: tied(4), VECTORS),
    "bilinear over positions": (lambda: pairs(1, 3, 2, False), SEQUENCES),
    "attention without a sample axis": (queries, VECTORS),
    "layers called by keyword": (by_keyword, VECTORS),
    "a hook on a layer's gradients": (lambda: hooked(0), VECTORS),
    "a hook behind the activation": (lambda: hooked(1), VECTORS),
    "attention of one's own, frozen inside": (own_attention, SEQUENCES),
    "attention changed in place": (lambda: attending_in_place(True), SEQUENCES),
    "the same, positions first": (lambda: attending_in_place(False), SEQUENCES),
    "the same, one position": (lambda: attending_in_place(True), (1, 4)),
    "the same, one position, positions first": (lambda: attending_in_place(False), (1, 4)),
    "a checkpoint": (lambda: checkpointed(False), VECTORS),
    "registered": (lambda: Headed(Twice(False)), VECTORS),
    "registered, one number": (lambda: Headed(Twice(False, ())), VECTORS),
    "registered, called twice": (partial(repeated, partial(Twice, False), 2), VECTORS),
    "registered, one number, called twice": (partial(repeated, partial(Twice, False, ()), 2), VECTORS),
    "a factor before its registered layer": (lambda: past(True, power=False), VECTORS),
    "a factor after its registered layer": (lambda: past(False, power=False), VECTORS),
    **OTHERWISE_IN_THE_TRIAL,
}


@pytest.mark.parametrize("name", list(EXACT))
def test_layers_called_in_unusual_ways_are_exact(name):
    make, shape = EXACT[name]
    model = make().double()
    inputs, targets = batch(*shape)
    if any(isinstance(layer, nn.Embedding) for layer in model.modules()):
        inputs = torch.randint(5, (N, *shape))
    model(inputs)
    shaken(model)
    number = list(EXACT).index(name)
    check_rows(model, LOSS, inputs, targets, max_bytes=(None, 2000, 300)[number % 3])
    fallback = (None, "autograd")[number % 2]
    if name in OTHERWISE_IN_THE_TRIAL:
        method = list(METHODS.values())[number // 2 % 2]
        check_step(method, model, inputs, targets, fallback=fallback)
    else:
        check_directions(model, LOSS, inputs, targets, [1, 3], fallback=fallback)


# Layers left out at random.


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": numpy.random.rand,
    # it makes two at a time, and keeps one for the next call
    "gaussian": lambda: 0.5 + 0.3 * numpy.random.randn(),
}


def left_out(draw):
    """Stochastic depth: a random number leaves layers out; one is used twice, its weight by another too."""

    def run(m, x):
        x = m.norm(x)
        for layer in (m.a, m.b, m.c, m.b):
            if draw() < 0.5:
                x = x + torch.tanh(layer(x))
        return m.head(x)

    layers = {name: nn.Linear(4, 4) for name in "abc"}
    layers["c"].weight = layers["b"].weight
    return Parts(run, **layers, norm=nn.LayerNorm(4), head=nn.Linear(4, CLASSES))


@every_pair(
    draw=DRAWS, curvature_samples=[None, 2], fallback=[None, "autograd"], method=METHODS, blocks=["full", "layer"]
)
def test_layers_left_out_at_random_are_the_same_in_every_pass(draw, curvature_samples, fallback, method, blocks):
    """The two pieces of a batch, the curvature samples and the others, may use other layers."""
    random.seed(0)
    numpy.random.seed(0)
    inputs, targets = batch(4)
    model = left_out(draw).double()
    settings = {"curvature_samples": curvature_samples, "fallback": fallback, "blocks": blocks, "seed": 0}
    optimizer = method(model, LOSS, damping=0.5, **settings)
    used = set()
    for _ in range(5):
        check_verify(optimizer, inputs, targets)
        p = optimizer.direction(inputs, targets)
        assert torch.equal(flatten(p), flatten(optimizer.direction(inputs, targets)))
        used.add(tuple(name for name, value in p.items() if value.abs().max() > 0))
        if curvature_samples is not None:  # the two pieces of the batch draw one after the other
            optimizer.step(inputs, targets)
            continue
        states = random_states()
        model(inputs)
        after_draws = draw()
        restore(states)
        check_ratio(optimizer, inputs, targets)
        assert draw() == after_draws  # a step draws as much as one pass
    assert len(used) > 1  # the layers left out do change


@pytest.mark.parametrize(
    "samples, inputs, outputs", [(1, 9, 9), (9, 9, 9), (60, 20, 50), (60, 20, 3), (70, 1000, 9)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_that_of_its_columns_whichever_way_torch_computes_it(samples, inputs, outputs, dtype):
    draws = torch.Generator().manual_seed(0)
    sizes = (samples, inputs), (outputs, inputs), (outputs,)
    v, weight, bias = (torch.randn(size, generator=draws, dtype=dtype) for size in sizes)
    columns = [(v.double() * row).sum(1) for row in weight.double()]
    bound = bounds.rounding(inputs, dtype=dtype) * float(v.norm(dim=1).max() * weight.norm(dim=1).max())
    for own in (None, bias):
        expected = torch.stack(columns, dim=1) + (0.0 if own is None else own.double())
        torch.testing.assert_close(linear(v, weight, own).double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("rows, columns", [(300, 260), (401, 257), (130, 1030), (7, 500), (500, 7)])
def test_a_symmetric_product_in_strips_is_the_whole_product(rows, columns):
    a = torch.randn(columns, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64).t()
    first = torch.eye(rows, dtype=torch.float64)
    bound = bounds.rounding(columns) * float((a @ a.t()).abs().max())
    torch.testing.assert_close(add_own_product(first.clone(), a), first + a @ a.t(), rtol=0, atol=bound)
    unset = torch.full_like(first, torch.nan)
    product = add_own_product(unset, a, beta=0)
    assert product is unset
    torch.testing.assert_close(product, product.t(), rtol=0, atol=bound)  # a block on the diagonal is one product
    torch.testing.assert_close(product, a @ a.t(), rtol=0, atol=bound)
