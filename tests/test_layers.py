"""Every layer rule against dense autograd, one sample at a time, over random shapes and settings."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import bounds
import problems
import reference
import woodbury
from cases import every_count, every_pair
from checks import random_states, restore
from fuzz.models import Parts
from woodbury._vector import flatten
from woodbury.layers import EmbeddingRows, SharedRows, positions
from woodbury.losses.rules import loss_rule
from woodbury.quadratic.joint import Assembler, take_apart

METHODS = {"gauss-newton": woodbury.GaussNewton, "empirical": woodbury.NaturalGradient}
CLASSES = 3


def finish(layer, inputs):
    """The layer, then a nonlinearity and a head; every parameter and statistic away from its initial value."""
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)).double().eval()
    model(inputs)
    return shaken(model)


def shaken(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = torch.randn_like(module.weight[0])
            if getattr(module, "running_var", None) is not None:
                module.running_var.uniform_(0.5, 2.0)
                module.running_mean.normal_()
    return model


def dense_rows(model, loss, inputs, targets):
    """By kind: S^T J / sqrt(count), S from the loss rule (checked in test_losses), or gradients over sqrt(n).

    Nothing is divided by for a loss that is a sum.
    """
    samples = reference.per_sample(model, loss, inputs, targets)
    rule, outputs = loss_rule(loss), model(inputs).detach()
    prepared = rule.prepare(loss, outputs, targets)
    columns = rule.compact_factor(loss, outputs.flatten(1), prepared).columns()
    count = problems.Problem(model, loss, inputs, targets).count
    mean_of = 1 if reference.is_sum(loss) else len(samples)
    return {
        "gauss-newton": torch.cat([columns[i] @ J for i, (J, _, _) in enumerate(samples)]) / count**0.5,
        "empirical": torch.stack([r @ J for J, r, _ in samples]) / mean_of**0.5,
    }


def check_rows(model, loss, inputs, targets, **options):
    """Dense, Gram, its diagonal, both scaled, cross-Gram, U^T U and products against a loop over samples.

    Of both kinds of rows what they are and the Gram matrix of the two, and the rest in turn.
    """
    names = reference.parameters(model)
    found, expected = {}, dense_rows(model, loss, inputs, targets)
    whole = list(expected)[len(reference.theta(model)) // 2 % 2]
    for kind, U in expected.items():
        with bounds.known_apart() if found else nullcontext():
            rows = found[kind] = woodbury.rows(model, loss, inputs, targets, curvature=kind, **options)
        assert rows.shape == U.shape
        torch.testing.assert_close(rows.dense(), U)
        if kind != whole:
            continue
        sent = copy.copy(rows)  # as another process gets it
        heads = take_apart(model, rows.forms).items()
        sent.forms = {name: Assembler(head.skeleton, head.tensors, model).load() for name, head in heads}
        torch.testing.assert_close(sent.gram(), U @ U.T)
        torch.testing.assert_close(rows.gram(), U @ U.T)
        scales = {name: torch.rand((), dtype=U.dtype) for name in names}
        D = reference.flat([scales[name].expand(p.shape) for name, p in names.items()])
        torch.testing.assert_close(rows.gram(scales=scales), (U * D) @ U.T)
        torch.testing.assert_close(rows.diagonal(scales=scales), (U * D * U).sum(1))
        own = U.unflatten(0, (len(targets), -1))  # by sample
        blocks = rows.diagonal(own.shape[1]).reshape(len(own), own.shape[1], own.shape[1])
        torch.testing.assert_close(blocks, own @ own.mT)
        vector = {name: torch.randn_like(p) for name, p in names.items()}
        torch.testing.assert_close(rows.matvec(vector), U @ flatten(vector))
        first = len(U) - len(U) // 2
        columns = dict(zip(names, U[:first].split([p.numel() for p in names.values()], 1), strict=True))
        blocks = [list(names)[-2:], list(names)][: 2 if kind == "gauss-newton" else 1]
        for block, found_block in zip(blocks, rows.curvature(first, blocks), strict=True):
            own = torch.cat([columns[name] for name in block], 1)
            torch.testing.assert_close(found_block, own.T @ own)
        c = torch.randn(len(U), dtype=U.dtype)
        torch.testing.assert_close(flatten(rows.rmatvec(c)), U.T @ c)
    cross = found["gauss-newton"].gram(found["empirical"])
    torch.testing.assert_close(cross, expected["gauss-newton"] @ expected["empirical"].T)


def well_conditioned(B):
    """A damping at which B + damping I has a condition below 1e5: float64 then leaves more than 10 digits of p."""
    return max(0.05, 1e-5 * float(B.trace()))


def check_directions(model, loss, inputs, targets, subset, forward=None, **options):
    """p of both methods, one full and the other by layer, in turn, with the curvature of a subset."""
    solve = reference.dense_system(model, loss, inputs, targets, subset, forward)
    run = model if forward is None else partial(forward, model)
    lost = reference.residual_condition(run, loss, inputs, targets)  # softmax may be 1 - 1e-8
    turn = ("full", "layer") if len(reference.theta(model)) % 2 else ("layer", "full")
    for kind, blocks in zip(METHODS, turn, strict=True):
        expected, B, _ = solve(well_conditioned, kind, blocks)
        settings = {"damping": well_conditioned(B), "blocks": blocks, "forward": forward, **options}
        with nullcontext() if kind == "gauss-newton" else bounds.known_apart():
            p = flatten(METHODS[kind](model, loss, **settings).direction(inputs, targets, subset=subset))
        assert reference.relative_error(p, expected) <= lost * bounds.of_solve(B, well_conditioned(B))


def check_ratio(optimizer, inputs, targets, **options):
    """rho times the predicted decrease is that of the loss of the model, run with the same random numbers."""
    model, states, losses = optimizer.model, random_states(), []
    run = model if optimizer.forward is None else partial(optimizer.forward, model)
    losses.append(optimizer.loss(run(inputs), targets).item())
    restore(states)
    info = optimizer.step(inputs, targets, **options)
    after = random_states()
    restore(states)
    losses.append(optimizer.loss(run(inputs), targets).item())
    restore(after)
    decrease = losses[0] - losses[1]
    bound = bounds.of_decrease(losses[0], decrease, sum(p.numel() for p in model.parameters()))
    assert (info.ratio * info.predicted).item() == pytest.approx(decrease, rel=bound)
    return decrease


# Each draws a layer and the shape of one sample.


@st.composite
def linears(draw):
    width = draw(st.integers(1, 4))
    lead = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    return nn.Linear(width, draw(st.integers(1, 4)), bias=draw(st.booleans())), (*lead, width)


def per_axis(draw, axes, least, most):
    return [draw(st.integers(least, most)) for _ in range(axes)]


@st.composite
def convolutions(draw, axes):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    groups, c, o = per_axis(draw, 3, 1, 2)
    kernel, dilation = per_axis(draw, axes, 1, 3 if axes < 3 else 2), per_axis(draw, axes, 1, 2)
    sizes, stride = per_axis(draw, axes, 5 if axes < 3 else 3, 6 if axes < 3 else 4), per_axis(draw, axes, 1, 2)
    by_axis = st.lists(st.integers(0, 2), min_size=axes, max_size=axes).map(tuple)
    padding = draw(st.sampled_from(["same", "valid", 1]) | by_axis)
    options = {"stride": 1 if padding == "same" else stride, "padding": padding, "dilation": dilation}
    options |= {"padding_mode": draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))}
    layer = kind(groups * c, groups * o, kernel, groups=groups, bias=draw(st.booleans()), **options)
    return layer, (groups * c, *sizes)


@st.composite
def transposed(draw, axes):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    groups, c, o = per_axis(draw, 3, 1, 2)
    kernel = per_axis(draw, axes, 1, 3 if axes < 3 else 2)
    most = 3 if axes < 3 else 2
    dilation, stride = per_axis(draw, axes, 1, most), per_axis(draw, axes, 1, most)
    extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    padding, sizes = per_axis(draw, axes, 0, 2), per_axis(draw, axes, 2, 3)
    parts = zip(sizes, stride, padding, dilation, kernel, extra, strict=True)
    lengths = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in parts]
    assume(min(lengths) >= 1 and math.prod(lengths) <= 60)
    options = {"stride": stride, "padding": padding, "output_padding": extra, "dilation": dilation}
    layer = kind(groups * c, groups * o, kernel, groups=groups, bias=draw(st.booleans()), **options)
    return layer, (groups * c, *sizes)


@st.composite
def embeddings(draw):
    count = draw(st.integers(1, 6))
    padding = draw(st.none() | st.integers(-count, count - 1))
    layer = nn.Embedding(count, draw(st.integers(1, 3)), padding_idx=padding)
    return layer, tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=2)))


@st.composite
def layer_norms(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    lead = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    if draw(st.booleans()):
        return nn.RMSNorm(shape, eps=draw(st.sampled_from([None, 0.1]))), (*lead, *shape)
    return nn.LayerNorm(shape, eps=0.1, bias=draw(st.booleans())), (*lead, *shape)


@st.composite
def channel_norms(draw):
    axes = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(2, 3), min_size=axes, max_size=axes))
    groups = draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 2))
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[max(0, axes - 1)]
    batch = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes]
    choices = [batch(channels, eps=0.1)]
    if axes or channels > groups:  # torch refuses groups of a single number
        choices.append(nn.GroupNorm(groups, channels, eps=0.1))
    if axes:
        tracking = draw(st.booleans())
        choices.append(instance(channels, affine=True, eps=0.1, track_running_stats=tracking))
    return draw(st.sampled_from(choices)), (channels, *sizes)


@st.composite
def slopes(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return nn.PReLU(draw(st.sampled_from([1, sizes[0]]))), tuple(sizes)


LAYERS = {
    "linear": linears(),
    "conv1d": convolutions(1),
    "conv2d": convolutions(2),
    "conv3d": convolutions(3),
    "transposed1d": transposed(1),
    "transposed2d": transposed(2),
    "transposed3d": transposed(3),
    "embedding": embeddings(),
    "layer norm": layer_norms(),
    "channel norm": channel_norms(),
    "prelu": slopes(),
}


@pytest.mark.parametrize("name", list(LAYERS))
@every_count
def test_rows_and_directions_of_a_layer_equal_dense_autograd(name, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data):
        torch.manual_seed(data.draw(st.integers(0, 10**6)))
        layer, shape = data.draw(LAYERS[name])
        n = data.draw(st.integers(1, 5))
        inputs = torch.randn(n, *shape, dtype=torch.float64)
        if isinstance(layer, nn.Embedding):
            inputs = torch.randint(layer.num_embeddings, (n, *shape))
        model = finish(layer, inputs)
        loss, targets = nn.CrossEntropyLoss(), torch.randint(CLASSES, (n,))
        if data.draw(st.booleans()):
            loss, targets = nn.MSELoss(), torch.randn(n, CLASSES, dtype=torch.float64)
        subset = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        with pytest.MonkeyPatch.context() as patch:
            by_pairs = data.draw(st.none() | st.booleans())
            if by_pairs is not None:
                for form in (SharedRows, EmbeddingRows):
                    patch.setattr(form, "pairs_are_cheaper", lambda *args: by_pairs)
            max_bytes = data.draw(st.sampled_from([None, 2000, 300, 1]))
            check_rows(model, loss, inputs, targets, max_bytes=max_bytes)
            check_directions(model, loss, inputs, targets, subset, max_bytes=max_bytes)

    check()


N = 5


def mixture(name):
    problem = problems.make(name, seed=1)
    return shaken(problem.model), problem.inputs[:N], problem.targets[:N]


LOSS = nn.CrossEntropyLoss()
MIXTURES = ["pictures", "sentences", "tokens", "pixels"]  # one for each model


@every_pair(
    name=["pictures", "sentences", "tokens-ignored", "pixels"],
    by_pairs=[False, True],
    max_bytes=[None, 500],
    subset=[[3], [4, 0, 2]],
    frozen=["nothing", "weight", "bias"],
)
def test_mixtures_of_layers_give_the_dense_direction(name, by_pairs, max_bytes, subset, frozen, monkeypatch):
    """Also where all weights or all biases are frozen, which are left out."""
    model, inputs, targets = mixture(name)
    for full, p in model.named_parameters():
        p.requires_grad_(not full.endswith(frozen))
    for form in (SharedRows, EmbeddingRows):
        monkeypatch.setattr(form, "pairs_are_cheaper", lambda *args: by_pairs)
    check_rows(model, LOSS, inputs, targets, max_bytes=max_bytes)
    check_directions(model, LOSS, inputs, targets, subset, max_bytes=max_bytes)


def test_layers_that_do_not_reach_the_outputs_stay_where_they_are():
    """The output of one is not used, another is not called at all."""
    layers = {"a": nn.Conv1d(2, 3, 2), "aside": nn.Conv1d(2, 3, 2), "idle": nn.Embedding(3, 2)}
    run = lambda m, x: (m.aside(x), m.head(torch.tanh(m.a(x)).flatten(1)))[1]  # noqa: E731
    model = Parts(run, **layers, head=nn.Linear(9, CLASSES)).double()
    inputs, targets = torch.randn(N, 2, 4, dtype=torch.float64), torch.randint(CLASSES, (N,))
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [1, 3])


def part(n, k, s, g, o, i, seed=0):
    torch.manual_seed(seed)
    inputs, grads = torch.randn(n, s, g, i), torch.randn(n, k, s, g, o)
    return positions.Part(inputs.__getitem__, grads)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_both_routes_agree_for_parts_of_different_length_in_any_memory(data):
    sizes = st.integers(1, 3)
    g, o, i = data.draw(sizes), data.draw(sizes), data.draw(sizes)

    def form(seed):
        shapes = data.draw(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=3))
        parts = tuple(part(n, k, s, g, o, i, seed + index) for index, (n, k, s) in enumerate(shapes))
        return SharedRows(parts, (g * o, i), max_bytes=data.draw(st.sampled_from([None, 1, 100, 1000, 5000])))

    a, b = form(0), form(10)
    for other in (a, b):
        dense = (form.dense() for form in (a, other))
        rows, rest = (torch.cat([own["weight"].flatten(1), own["bias"]], 1).double() for own in dense)
        weight, whole = rows[:, : g * o * i] @ rest[:, : g * o * i].T, rows @ rest.T
        short, exactly = (
            bounds.rounding(3**4, dtype=dtype) * rows.norm() * rest.norm()  # positions, groups, outputs, inputs
            for dtype in (torch.float32, torch.float64)
        )
        for route in (a.gram_by_pairs, a.gram_by_gradients):
            exact = route(other, torch.float64)
            assert exact.dtype == torch.float64
            assert (exact - weight).norm() <= short  # dense is in float32
            assert (route(other, torch.float32) - weight).norm() <= short
        assert (a.gram(other, None, torch.float64) - whole).norm() <= short
        by_pairs, by_gradients = (route(other, torch.float64) for route in (a.gram_by_pairs, a.gram_by_gradients))
        assert (by_pairs - by_gradients).norm() <= exactly


@pytest.mark.parametrize("max_bytes", [2**14, 2**17])
def test_patches_of_a_batch_never_exist_at_once(max_bytes):
    seen = []

    def cut(window):
        block = own.features(window)
        seen.append(block.numel() * block.element_size())
        return block

    own = part(64, 2, 9, 1, 4, 8)  # 64 samples of 288 bytes in, 576 bytes of columns
    form = SharedRows((positions.Part(cut, own.grads),), (4, 8), max_bytes=max_bytes)
    vector = {"weight": torch.randn(4, 8), "bias": torch.randn(4)}
    for compute in (
        lambda: form.gram_by_pairs(form, torch.float32),
        lambda: form.gram_by_gradients(form, torch.float32),
        lambda: form.matvec(vector),
        lambda: form.rmatvec(torch.randn(128)),
    ):
        seen.clear()
        compute()
        assert 0 < max(seen) <= max_bytes // 4


def test_the_product_of_summed_grams_is_something_else():
    """What a Gram of summed inputs and summed columns would give is not the Gram of the rows."""
    form = SharedRows((part(3, 1, 4, 1, 2, 2),), (2, 2), bias=None)
    K = form.gram(form, None, torch.float64)
    v, h = form.parts[0].features(slice(0, None)).sum((1, 2)).double(), form.parts[0].grads.sum((1, 2, 3)).double()
    assert reference.relative_error((v @ v.T) * (h @ h.T), K) > 0.1


class Standardised(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


def again(by_module):
    """Uses the weight of a convolution past its module, beside a call of it or alone."""

    def run(m, x):
        return m.head(F.conv1d(torch.tanh(m.a(x) if by_module else x), m.a.weight, padding=1).flatten(1))

    return Parts(run, a=nn.Conv1d(2, 2, 3, padding=1, bias=by_module), head=nn.Linear(6, CLASSES))


def slope(*layers):
    """The derivative of a network in its inputs: the last layer is used by its derivative alone."""

    def run(m, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.layers(x).sum(), x, create_graph=True)[0].flatten(1)

    return Parts(run, layers=nn.Sequential(*layers))


def computed(layer):
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(4, CLASSES))


OUTSIDE = r"weight' is used outside"
PAST_THE_RULES = {
    "a second time": (lambda: again(True), OUTSIDE),
    "by a function alone": (lambda: again(False), OUTSIDE),
    "slope of linear": (lambda: slope(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), OUTSIDE),
    "slope of one linear": (lambda: slope(nn.Linear(4, 1)), OUTSIDE),
    "slope of conv": (lambda: slope(nn.Conv1d(2, 3, 2), nn.LayerNorm(2), nn.Tanh(), nn.Linear(2, 1)), OUTSIDE),
    "slope, norm last": (lambda: slope(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.GroupNorm(1, 3)), OUTSIDE),
    "slope of a transposed": (
        lambda: slope(nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.PReLU(), nn.Conv1d(3, 1, 1)),
        OUTSIDE,
    ),
    "standardised": (lambda: computed(Standardised(2, 2, 2)), r"'0\.weight' of Standardised"),
    "pruned": (lambda: computed(prune.l1_unstructured(nn.Conv1d(2, 2, 2), "weight", 0.3)), r"'0\.weight_orig' of"),
    "weight norm": (lambda: computed(parametrizations.weight_norm(nn.Conv1d(2, 2, 2))), r"weight\.original0'"),
}


@pytest.mark.parametrize("name", list(PAST_THE_RULES))
def test_what_no_rule_covers_is_refused_or_exact_by_the_fallback(name):
    make, message = PAST_THE_RULES[name]
    model, inputs = make().double(), torch.randn(N, *((4,) if "linear" in name else (2, 3))).double()
    targets = torch.randn_like(model(inputs))
    with pytest.raises(ValueError, match=message):
        woodbury.rows(model, nn.MSELoss(), inputs, targets)
    check_directions(model, nn.MSELoss(), inputs, targets, [3, 0], fallback="autograd")


@pytest.mark.parametrize(
    "first, layer, message",
    [
        (nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), "Linear on several positions of a sample"),
        (nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 1), "Conv1d"),
        (nn.Linear(4, 4), nn.LayerNorm(4), "LayerNorm"),
    ],
)
def test_kfac_refuses_layers_it_has_no_factors_for(first, layer, message):
    with pytest.raises(ValueError, match=f"KFAC covers .* on one vector per sample only and '1' is a {message}"):
        woodbury.KFAC(nn.Sequential(first, layer, nn.Flatten()), nn.MSELoss()).step(torch.randn(N, 4), None)


@pytest.mark.parametrize("name", ["softmax", *MIXTURES])
def test_gram_accumulates_in_the_type_asked_for(name):
    model, inputs, targets = mixture(name)
    model, inputs = model.float(), inputs.float() if inputs.is_floating_point() else inputs
    rows = woodbury.rows(model, LOSS, inputs, targets)
    assert rows.gram().dtype == torch.float32
    dense, K = rows.dense().double(), rows.gram(dtype=torch.float64)
    assert K.dtype == torch.float64
    assert reference.relative_error(K, dense @ dense.T) <= bounds.rounding(dense.shape[1], dtype=torch.float32)


# Options of embeddings under which there is no step.


def lookup(kind, frozen=False, by_function=None, **options):
    """An embedding, looked up by its module or by a function, and a head."""
    function = F.embedding_bag if kind is nn.EmbeddingBag else F.embedding

    def run(m, x):
        h = m.words(x) if by_function is None else function(x, m.words.weight, **by_function)
        return m.head(torch.tanh(h.mean(1) if h.dim() == 3 else h))

    words, head = kind(6, 3, **options), nn.Linear(3, CLASSES)
    words.weight.requires_grad_(not frozen)
    return Parts(run, words=words, head=head, by_function=by_function)


LOOKUP_METHODS = {
    "rows": lambda model, x, t: woodbury.rows(model, LOSS, x, t, fallback="autograd"),
    "gauss-newton": lambda model, x, t: woodbury.GaussNewton(model, LOSS, fallback="autograd").step(x, t),
    "natural gradient": lambda model, x, t: woodbury.NaturalGradient(model, LOSS, fallback="autograd").step(x, t),
    "by layers": lambda model, x, t: woodbury.GaussNewton(
        model, LOSS, fallback="autograd", blocks="layer"
    ).direction(x, t),
    "products": lambda model, x, t: woodbury.GaussNewton(model, LOSS, solver="products").step(x, t),
    "hessian-free": lambda model, x, t: woodbury.HessianFree(model, LOSS).step(x, t),
    "kfac": lambda model, x, t: woodbury.KFAC(model, LOSS).step(x, t),
}
REFUSED_OPTIONS = {"max_norm": 0.5, "scale_grad_by_freq": True, "sparse": True}


def check_refused(method, model, message):
    """By an error, before the weight changes where a module does it."""
    before = model.words.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        LOOKUP_METHODS[method](model, torch.randint(6, (N, 4)), torch.randint(CLASSES, (N,)))
    assert model.by_function or torch.equal(model.words.weight, before)


@every_pair(method=list(LOOKUP_METHODS), kind=[nn.Embedding, nn.EmbeddingBag], option=list(REFUSED_OPTIONS))
def test_options_of_embeddings_that_leave_no_step_are_refused_everywhere(method, kind, option):
    """Of a module and of a function; a frozen table as well where it is renormalised."""
    chosen, renormalised = {option: REFUSED_OPTIONS[option]}, option == "max_norm"
    of_function = "'words.weight' in place" if renormalised else f"{option}=True"
    for frozen in (False, True) if renormalised else (False,):
        check_refused(method, lookup(kind, frozen, **chosen), rf"{kind.__name__} 'words' with {option}=")
        if method != "kfac":
            check_refused(method, lookup(kind, frozen, by_function=chosen), of_function)
    if not renormalised:  # only gradients in the weight know of these
        inputs, targets = torch.randint(6, (N, 4)), torch.randint(CLASSES, (N,))
        check_directions(lookup(kind, frozen=True, **chosen).double(), LOSS, inputs, targets, [1, 3])


def test_an_option_set_after_the_first_step_is_seen():
    inputs, targets = torch.randint(6, (N, 4)), torch.randint(CLASSES, (N,))
    for option, value in REFUSED_OPTIONS.items():
        model = lookup(nn.Embedding)
        optimizer = woodbury.HessianFree(model, LOSS)
        optimizer.step(inputs, targets)
        setattr(model.words, option, value)
        with pytest.raises(ValueError, match=rf"'words' with {option}="):
            optimizer.step(inputs, targets)


@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.HessianFree, woodbury.KFAC])
def test_a_model_that_changes_its_parameters_in_place_is_refused(method):
    def clipped(m, x):
        with torch.no_grad():
            m.inner.weight.clamp_(-0.1, 0.1)
        return m.head(torch.tanh(m.inner(x)))

    model = Parts(clipped, inner=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"'inner.weight' in place"):
        method(model, LOSS).step(torch.randn(N, 4), torch.randint(CLASSES, (N,)))


# Memory with channels last.

CHANNELS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "one group": lambda: nn.GroupNorm(1, 4),
    "group per channel": lambda: nn.GroupNorm(4, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2),
    "prelu": lambda: nn.PReLU(4),
}


@pytest.mark.parametrize("name", list(CHANNELS))
@pytest.mark.parametrize("inputs_last, model_last", [(True, False), (False, True)])
def test_channels_may_lie_last_in_memory(name, inputs_last, model_last):
    inputs, targets = torch.randn(N, 2, 3, 3, dtype=torch.float64), torch.randint(CLASSES, (N,))
    head = nn.Linear(4 * 9, CLASSES)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), CHANNELS[name](), nn.Tanh(), nn.Flatten(), head).double().eval()
    shaken(model)
    if model_last:
        model = model.to(memory_format=torch.channels_last)
    if inputs_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [1, 3])
    check_ratio(woodbury.GaussNewton(model, LOSS, damping=0.5), inputs, targets)
