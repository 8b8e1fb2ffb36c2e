"""Arithmetic on jets: derivatives of ansatz functions, residual networks and single operations, and their rows."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import reference
import woodbury
from checks import silence
from fuzz.models import Parts
from test_laplacian import build
from woodbury.layers.shared import SharedRows

POINTS, PI = 5, math.pi
AXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 1), (1, 1, 1), (0, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1)]


def network(activation=nn.Tanh, inputs=2, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 4), activation(), nn.Linear(4, 3), activation(), nn.Linear(3, outputs))


def on_points(function, *inputs, **modules):
    return lambda: Parts(function, net=network(*inputs), **modules)


def residuals(parts, x):
    v = torch.tanh(parts.first(x))
    v = v + torch.sin(parts.second(v))
    return parts.last(torch.cat([v, x], dim=1))


def boundary(parts, x):
    return x[:, :1] * (1 - x[:, :1]) * x[:, 1:] * parts.net(x)


def start(parts, x):
    t, y = x.split(1, dim=1)
    return torch.sin(PI * y) + t * parts.net(x)


def with_constants(parts, x):
    """Numbers, tensors for each sample, and one for all of them."""
    each = torch.arange(len(x), dtype=x.dtype).unsqueeze(1)
    return parts.net(2 * x - 1) * each / 3 + x.new_tensor([0.5]) - (x @ x.new_tensor([[1.0], [2.0]]))


def features(parts, x):
    return torch.cat([torch.cos(PI * x), x.square().sum(1, keepdim=True)], 1)


ANSATZ = {
    "boundary": on_points(boundary),
    "start": on_points(start),
    "constants": on_points(with_constants),
    "quotient": on_points(lambda parts, x: parts.net(x) / (2 + x[:, :1] ** 2)),
    "number over": on_points(lambda parts, x: 1 / (3 + parts.net(x).square())),
    "powers": on_points(lambda parts, x: (2 + parts.net(x)) ** 3 * (3 + x[..., 1:]) ** 0.5 - (4 + x).sqrt()),
    "functions": on_points(lambda parts, x: torch.exp(parts.net(x)) * x[:, 1:].cos() + F.softplus(parts.net(x))),
    "features": lambda: nn.Sequential(Parts(features), network(inputs=3)),
    "periodic": lambda: nn.Sequential(woodbury.Periodic(1, harmonics=2), network(inputs=5)),
    "several": on_points(lambda parts, x: torch.stack(parts.net(x).unbind(1), 1) * x.mean(1, keepdim=True)),
    "broadcast": on_points(lambda parts, x: (parts.net(x) + x).sum(-1, keepdim=True) - x * 2),
    "branches": on_points(lambda parts, x: torch.where(x[:, :1] > 0, parts.net(x), parts.net(-x) * 2)),
    "layer norm": lambda: nn.Sequential(network(outputs=3), nn.LayerNorm(3), nn.Linear(3, 1)),
    "no rule": on_points(lambda m, x: torch.einsum("ni,ni->n", x, torch.softmax(m.net(x) * x, 1))[:, None]),
    "scaled": lambda: nn.Sequential(
        woodbury.Scale.inputs(5 * draw() + 3), network(), woodbury.Scale.targets(draw()[:, :1])
    ),
    "residual": lambda: Parts(residuals, first=nn.Linear(2, 4), second=nn.Linear(4, 4), last=nn.Linear(6, 1)),
    "function of weights": on_points(lambda parts, x: F.linear(x, parts.net[0].weight).tanh()),
}  # fmt: skip
ACTIVATIONS = [
    *(nn.Tanh, woodbury.Sine, nn.GELU, nn.Softplus, nn.SiLU, nn.Sigmoid, nn.ELU, nn.Mish, nn.LogSigmoid),
    *(nn.Softsign, nn.Tanhshrink, lambda: nn.GELU("tanh"), lambda: nn.SiLU(inplace=True)),
    lambda: woodbury.Sine(3.0),
]
MODELS = ANSATZ | {f"activation {at}": lambda kind=kind: network(kind) for at, kind in enumerate(ACTIVATIONS)}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def draw():
    return torch.rand(POINTS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.6 - 0.8


def by_autograd(model, x, *orders):
    """Derivatives of the sum of the outputs of each sample, by torch.autograd.grad once for every axis."""
    x = x.clone().requires_grad_()
    known = {(): model(x).sum(1)}
    for axes in orders:
        for order in range(1, len(axes) + 1):
            if axes[:order] not in known:
                slopes = torch.autograd.grad(known[axes[: order - 1]].sum(), x, create_graph=True)[0]
                known[axes[:order]] = slopes[:, axes[order - 1]]
    return [known[axes] for axes in orders]


def references(model, x, orders, dtype=torch.float64):
    """By axes the derivative of the outputs' sum, and a bound on what rounding does to it.

    The rounding of a pass acts like changes of parameters and points by a few eps of themselves. How far such
    changes move a derivative, a change of 1e-5 shows.
    """
    torch.manual_seed(2)
    moved, share = deepcopy(model), 1e-5
    with torch.no_grad():
        for own in (*moved.parameters(), places := x.clone()):
            own *= 1 + share * torch.randn_like(own).sign()
    parameters, depth = sum(own.numel() for own in model.parameters()), len(list(model.modules()))
    found = {}
    pairs = (model, x), (moved, places)
    here, there = (by_autograd(reference.written_out(own), at, *orders) for own, at in pairs)
    for axes, before, after in zip(orders, here, there, strict=True):
        size = float((after - before).detach().abs().max()) / share + float(before.detach().abs().max())
        found[axes] = before.detach(), bounds.rounding(parameters, size, depth, dtype)
    return found


@every_model
def test_derivatives_and_laplacian_equal_nested_autograd(make):
    model, x = build(make), draw()
    known, found = references(model, x, AXES), woodbury.derivatives(model, x, AXES)
    for axes, ours in zip(AXES, found, strict=True):
        theirs, bound = known[axes]
        assert bound < 1e-3 * float(theirs.abs().max())  # a wrong formula shows
        torch.testing.assert_close(ours.sum(1), theirs, atol=bound, rtol=0, msg=str(axes))
    _, gradient, bend = woodbury.laplacian(model, x, weights=(1.0, -0.5))
    (first, of_first), (second, of_second) = known[0, 0], known[1, 1]
    torch.testing.assert_close(bend.sum(1), first - 0.5 * second, atol=of_first + of_second, rtol=0)
    for axis in (0, 1):
        theirs, bound = known[axis,]
        torch.testing.assert_close(gradient[..., axis].sum(1), theirs, atol=bound, rtol=0)


@pytest.mark.parametrize("make", [ANSATZ["boundary"], ANSATZ["residual"], lambda: network(nn.GELU)])
def test_derivatives_against_jacfwd_of_several_outputs_in_both_types(make):
    model, x = build(make), draw()
    model = nn.Sequential(model, nn.Linear(1, 2)).double()

    def one(point):
        return model(point[None])[0]

    nests = [one]
    for _ in range(4):
        nests.append(torch.func.jacfwd(nests[-1]))
    kinds = torch.float64, torch.float32
    double, single = (woodbury.derivatives(model.to(kind), x.to(kind), AXES) for kind in kinds)
    model.double()
    theirs = [torch.func.vmap(nest)(x) for nest in nests]
    wide, narrow = (references(model, x, AXES, kind) for kind in (torch.float64, torch.float32))
    for axes, ours, rounded in zip(AXES, double, single, strict=True):
        exact = theirs[len(axes)][(slice(None), slice(None), *axes)]
        torch.testing.assert_close(ours, exact, atol=wide[axes][1], rtol=0)
        torch.testing.assert_close(rounded.double(), exact, atol=narrow[axes][1], rtol=0)


def test_no_derivative_and_wrong_axes():
    model, x = build(network), draw()
    assert woodbury.derivatives(model, x, []) == ()
    assert torch.equal(woodbury.derivatives(model, x, [()])[0], model(x))
    first, twice = woodbury.derivatives(model, x, [(1, 0), (0, 1)])
    assert torch.equal(first, twice)
    for axes in ([(2,)], [(0,), (-1, 0)], [0], (0, 0)):
        with pytest.raises(ValueError, match="tuples of numbers from 0 to 1"):
            woodbury.derivatives(model, x, axes)
    assert all(not own.any() for own in woodbury.derivatives(nn.Linear(2, 1).double(), x, [(0, 1), (1, 1, 1)]))


def test_periodic_columns():
    x, module = draw(), woodbury.Periodic(0, period=3.0, harmonics=2)
    angle = 2 * PI / 3 * x[:, :1]
    waves = [angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()]
    torch.testing.assert_close(module(x), torch.cat([*waves, x[:, 1:]], 1), atol=bounds.rounding(1), rtol=0)
    shift = torch.tensor([3.0, 0.0], dtype=x.dtype)
    torch.testing.assert_close(module(x + shift), module(x), atol=bounds.rounding(1, 2 * PI * 3), rtol=0)
    assert woodbury.Periodic(0, 1)(x).shape == (POINTS, 4)
    assert torch.equal(woodbury.Periodic(-1)(x), woodbury.Periodic(1)(x))
    for columns in ((), ([1],), (2,), (0, -3)):
        with pytest.raises(ValueError, match=r"Periodic (needs the|has) columns"):
            woodbury.Periodic(*columns)(x)


# Rows


def by_derivatives(model, x):
    """A residual with a mixed, a third and a fourth derivative, of two numbers per point."""
    u, u_t, u_tx, u_xxx, u_xxxx = woodbury.derivatives(model, x, [(), (0,), (0, 1), (1, 1, 1), (1, 1, 1, 1)])
    return torch.cat([u_t + 6 * u * u_tx + u_xxx, u_xxxx - u.square()], 1)


def by_laplacian(model, x):
    u, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1))
    return torch.cat([slopes[..., 0] + u * slopes[..., 1] - bend, u], 1)


def with_autograd(residuals):
    """The same residual from derivatives by autograd, for models of one output."""

    def run(model, x):
        if residuals is by_laplacian:
            u, u_t, u_x, u_xx = by_autograd(model, x, (), (0,), (1,), (1, 1))
            return torch.stack([u_t + u * u_x - u_xx, u], 1)
        u, u_t, u_tx, u_xxx, u_xxxx = by_autograd(model, x, (), (0,), (0, 1), (1, 1, 1), (1, 1, 1, 1))
        return torch.stack([u_t + 6 * u * u_tx + u_xxx, u_xxxx - u.square()], 1)

    return run


OTHERS = ("broadcast", "constants", "powers", "layer norm", "function of weights")
ONE_OUTPUT = [name for name in ANSATZ if name not in OTHERS]
ROWS = {name: ANSATZ[name] for name in ONE_OUTPUT}
GAIN, SHIFT = (nn.Parameter(torch.tensor([number])) for number in (0.7, -0.4))
BARE = {"parameters": on_points(lambda m, x: m.gain * m.net(x) + m.shift * x[:, :1].sin(), gain=GAIN, shift=SHIFT)}


@pytest.mark.parametrize(
    "name, residuals",
    [
        *((name, by_derivatives) for name in (*ROWS, *BARE)),
        *((name, by_laplacian) for name in ("boundary", "no rule", "residual", *BARE)),
    ],
)
def test_rows_of_each_sample(name, residuals):
    """By layer rules where all parameters belong to Linear layers, by the fallback for others."""
    model, x = build({**ROWS, **BARE}[name]), draw()
    settings = {"forward": residuals, "fallback": "autograd" if name in BARE else None}
    ours = woodbury.rows(model, nn.MSELoss(), x, torch.zeros(POINTS, 2, dtype=x.dtype), **settings)
    theirs = torch.cat(reference.jacobians(model, x, POINTS, with_autograd(residuals)))
    known = references(model, x, [(), (0,), (0, 1), (1, 1), (1, 1, 1), (1, 1, 1, 1)]).values()
    size = 1 + sum(float(value.abs().max()) for value, _ in known)
    bound = sum(own for _, own in known) * 10 * size  # a product of two, and one more derivative
    scale = math.sqrt(POINTS)  # of rows; the loss is a mean
    torch.testing.assert_close(scale * ours.dense(), theirs, atol=bound * float(theirs.abs().max()), rtol=0)
    if name in ROWS:
        assert all(isinstance(form, SharedRows) for form in ours.forms.values())


# What cannot run on jets


def write(parts, x):
    v = parts.net(x)
    v += x[:, :1]
    return v


def write_and_use_again(parts, x):
    v = parts.net(x)
    return F.silu(v, inplace=True) + v


def write_over_the_input(parts, x):
    return F.elu(x, inplace=True)[:, :1] + parts.net(x)


def laplacian_by_autograd(parts, x):
    x = x if x.requires_grad else x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(parts.net(x).sum(), x, create_graph=True)
    terms = [torch.autograd.grad(slopes[:, axis].sum(), x, create_graph=True)[0][:, axis] for axis in (0, 1)]
    return (terms[0] + terms[1]).unsqueeze(1)


def net_alone(parts, x):
    return parts.net(x)


def write_nothing(parts, x):
    return parts.net(x) + x[:, :1]


# what a module does, the same in a form that autograd can differentiate, and what is said of it
HINDERED = {
    "input": (write_over_the_input, lambda parts, x: F.elu(x)[:, :1] + parts.net(F.elu(x)), "into is used again"),
    "iadd": (write, write_nothing, "writes into a tensor"),
    "used again": (write_and_use_again, lambda parts, x: 2 * F.silu(parts.net(x)), "written into is used again"),
    "two tensors": (lambda parts, x: parts.net(x).max(1, keepdim=True)[0], net_alone, "max has no.*one tensor"),
    "all samples": (lambda parts, x: parts.net(x) + 0 * x.sum(), net_alone, "sum leaves no axis of samples"),
    "transform": (lambda parts, x: torch.func.vmap(parts.net)(x), net_alone, "torch.func transform"),
    "inner": (
        lambda parts, x: woodbury.laplacian(parts.net, x).laplacian, laplacian_by_autograd,
        r"use woodbury\.derivatives",
    ),
}  # fmt: skip


@pytest.mark.parametrize("function, same, why", HINDERED.values(), ids=HINDERED)
def test_modules_that_cannot_run_on_jets_are_told_once_and_differentiated_all_the_same(function, same, why):
    model, x = build(on_points(function)), draw()
    with pytest.warns(RuntimeWarning, match=f"Parts.*nested forward mode.*{why}"):
        found = woodbury.laplacian(model, x, weights=(0, 1)).laplacian
    theirs, bound = references(Parts(same, net=model.net), x, [(1, 1)])[1, 1]
    torch.testing.assert_close(found.sum(1), theirs, atol=bound, rtol=0)
    with silence(RuntimeWarning):
        woodbury.laplacian(model, x, weights=(0, 1))


def test_a_function_that_is_made_again_is_told_of_once():
    net, x = build(network), draw()
    with pytest.warns(RuntimeWarning, match=r"use woodbury\.derivatives") as told:
        for _ in range(3):
            found = woodbury.laplacian(lambda x: woodbury.laplacian(net, x).laplacian, x).laplacian
    assert [own.filename for own in told if own.category is RuntimeWarning] == [__file__]
    terms = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 1, 1), (1, 1, 1, 1)]
    known = references(net, x, terms)
    expected, bound = sum(known[own][0] for own in terms), sum(known[own][1] for own in terms)
    torch.testing.assert_close(found.sum(1), expected, atol=bound, rtol=0)


def test_a_value_and_its_derivatives_have_one_mask_of_dropout():
    model, x = build(between(lambda parts, x: F.dropout(x.sin(), 0.5))), draw()
    torch.manual_seed(1)
    mask = F.dropout(torch.ones(POINTS, 4, dtype=x.dtype), 0.5)
    assert 0 < int((mask == 0).sum()) < mask.numel()
    masked = nn.Sequential(model[0], Parts(lambda parts, x: mask * x.sin()), model[2])
    for derive in (woodbury.laplacian, lambda model, x: woodbury.derivatives(model, x, AXES)):
        torch.manual_seed(1)
        for ours, theirs in zip(derive(model, x), derive(masked, x), strict=True):
            torch.testing.assert_close(ours, theirs, atol=bounds.rounding(1), rtol=0)


class WrongTwice(torch.autograd.Function):
    """x^2 with a first derivative that forward mode cannot differentiate right."""

    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(inputs[0].detach().clone())
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0].detach() * tangent


def test_what_forward_mode_would_get_wrong_is_an_error():
    model, x = build(on_points(lambda parts, x: WrongTwice.apply(parts.net(x)))), draw()
    with pytest.raises(ValueError, match=r"torch\.autograd\.Function.*own functions"):
        woodbury.laplacian(model, x)
    written = build(network)
    scripted = torch.jit.trace(written, x)
    for model in (scripted, Parts(lambda parts, x: parts.inner(x), inner=scripted)):
        with pytest.raises(ValueError, match=r"torch\.jit: pass the module as it was written"):
            woodbury.laplacian(model, x)


def between(function):
    return lambda: nn.Sequential(nn.Linear(2, 4), Parts(function), nn.Linear(4, 1))


@pytest.mark.parametrize(
    "written, plain, fallback",
    [
        (on_points(write), on_points(write_nothing), "autograd"),
        (between(lambda parts, x: x.sin_()), between(lambda parts, x: x.sin()), None),
    ],
)
@pytest.mark.filterwarnings("ignore:derivatives of Parts")
def test_a_step_after_an_attempt_that_failed_half_way(written, plain, fallback):
    """Layers that ran on jets before a function that cannot leave nothing behind."""
    x, targets = draw(), torch.zeros(POINTS, 2, dtype=torch.float64)
    settings, steps = {"damping": 0.1, "forward": by_laplacian, "fallback": fallback}, []
    for make in (written, plain):
        optimizer = woodbury.GaussNewton(build(make), nn.MSELoss(), **settings)
        steps.append(reference.flat(optimizer.direction(x, targets).values()))
    bound = bounds.of_step(optimizer.model, nn.MSELoss(), x, targets, 0.1, forward=by_laplacian)
    assert reference.relative_error(*steps) <= bound
