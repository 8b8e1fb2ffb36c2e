"""Value, gradient and Laplacian by one pass, against dense Hessians of each sample."""

import math

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from cases import every_pair
from fuzz.models import Parts
from test_search import outputs_along, second_derivatives
from woodbury.layers.shared import SharedRows
from woodbury.model.capture import capture
from woodbury.model.plan import plan_layers

POINTS = 7


def waves():
    """A function of a whole sample, without parameters: (n, d) -> (n, d + 1)."""
    return Parts(lambda m, x: torch.cat([torch.cos(x), x.square().sum(1, keepdim=True)], dim=1))


class Skip(Parts):
    """No Sequential."""

    def __init__(self, d=2, width=5, outputs=2):
        super().__init__(first=nn.Linear(d, width), second=nn.Linear(width, width), last=nn.Linear(width, outputs))

    def forward(self, x):
        v = torch.tanh(self.first(x))
        return self.last(v + torch.sin(self.second(v)))


class Squared(nn.Linear):
    """A Linear that is none."""

    def forward(self, x):
        return super().forward(x).square()


def network(activation=nn.Tanh, d=2, outputs=2, bias=True):
    first, middle, last = nn.Linear(d, 6, bias), nn.Linear(6, 5, bias), nn.Linear(5, outputs, bias)
    return nn.Sequential(first, activation(), middle, activation(), last)


def build(make, *args, **kwargs):
    """A model in float64, always the same."""
    torch.manual_seed(0)
    return make(*args, **kwargs).double()


def draw(d=2):
    return 2 * torch.rand(POINTS, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1


def dense(model, points, weights=None):
    """The same three by torch.func: Jacobians and Hessians of each sample, by reverse mode alone."""

    def one(point):
        return model(point[None])[0]

    gradients = torch.func.vmap(torch.func.jacrev(one))(points)
    hessians = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(one)))(points)
    weights = torch.as_tensor(1.0 if weights is None else weights).expand(points.shape)
    bends = hessians.diagonal(dim1=2, dim2=3) * weights.to(points).unsqueeze(1)
    return model(points), gradients, bends.sum(2)


def rounding(model, dtype=torch.float64):
    """A bound on the error: some operations a layer, each off by eps of the largest number on the way.

    With P the product of 1 + |W|_inf + |b|_inf over the layers, values are below P, derivatives below 2^L P and
    Laplacians below 4^L P^2, as |phi'| and |phi''| are below 2 for every activation here.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    product = math.prod(
        1 + sum(float(p.detach().abs().reshape(len(p), -1).sum(1).max()) for p in layer.parameters())
        for layer in layers
    )
    return bounds.rounding(1, (2 ** len(layers) * product) ** 2, len(layers), dtype)


def check(model, points, weights=None):
    found, bound = woodbury.laplacian(model, points, weights), rounding(model)
    assert bound < 1e-8  # a wrong formula shows
    for name, ours, theirs in zip(found._fields, found, dense(model, points, weights), strict=True):
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    return found


OTHERS = {  # more activations are in test_jets
    **{kind.__name__: lambda kind=kind: network(kind) for kind in (nn.CELU, nn.SELU, nn.ReLU, nn.LeakyReLU)},
    "softplus": lambda: network(lambda: nn.Softplus(3.0, 1.0), bias=False),
    "elu": lambda: network(lambda: nn.ELU(0.5)),
    "gelu": lambda: network(lambda: nn.GELU("tanh"), d=1, outputs=1),
    "five dimensions": lambda: network(d=5, outputs=1),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(2, 5), nn.Tanh()), nn.Identity(), nn.Linear(5, 1)
    ),
    "inner": lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), Skip(5)),
    "subclass": lambda: nn.Sequential(Squared(2, 5), nn.Tanh(), Squared(5, 1)),
    "axes": lambda: nn.Sequential(
        nn.Linear(2, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2), nn.Tanh(), nn.Flatten()
    ),
    "parametrized": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 5)), nn.SiLU(inplace=True), nn.Linear(5, 1)
    ),
    "inplace": lambda: nn.Sequential(
        nn.Linear(2, 5), nn.ELU(inplace=True), nn.Linear(5, 5), nn.Hardswish(inplace=True)
    ),
    "affine": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
    "linear": lambda: nn.Linear(2, 3),
    "empty": lambda: nn.Sequential(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_model_in_any_number_of_dimensions(name):
    model, d = build(OTHERS[name]), {"gelu": 1, "five dimensions": 5}.get(name, 2)
    found = check(model, 3 * draw(d))
    shape = model(draw(d)).shape
    assert found.value.shape == found.laplacian.shape == shape and found.gradient.shape == (*shape, d)


def test_hooks_replaced_forwards_and_layers_used_twice_are_part_of_the_model():
    layer = build(nn.Linear, 2, 2)
    check(nn.Sequential(layer, nn.Tanh(), layer), draw())
    for target in ("0", "1", ""):
        model = build(network)
        model.get_submodule(target).register_forward_hook(lambda module, args, output: output.sin())
        check(model, draw())
    model = build(network)
    model[2].forward = lambda x, plain=model[2].forward: plain(x).square()
    check(model, draw())


def test_functions_of_a_model_are_as_good_as_a_model():
    model, points = build(network), draw()
    second = lambda model, x: woodbury.laplacian(lambda x: x[:, :1] * model(x)[:, 1:], x).laplacian  # noqa: E731
    by_func = lambda model, x: dense(lambda x: x[:, :1] * model(x)[:, 1:], x)[2]  # noqa: E731
    assert float((second(model, points) - by_func(model, points)).detach().abs().max()) <= rounding(model)
    rows = woodbury.rows(model, None, points, forward=second)
    assert all(isinstance(form, SharedRows) for form in rows.forms.values())
    expected = torch.cat(reference.jacobians(model, points, POINTS, by_func))
    assert reference.relative_error(rows.dense(), expected) <= derivative_bound(model)


@pytest.mark.parametrize("make", [network, Skip, lambda: nn.Sequential(waves(), Skip(3))])
def test_weights_of_the_second_derivatives(make):
    model, points = build(make), draw()
    each = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for weights in ((0, 1), (3, 0), (0, 0), [1.0, -1.0], torch.tensor([0.5, 2.0], dtype=torch.float64), each):
        check(model, points, weights)


def test_float32_and_points_in_the_graph():
    model = build(network).float()
    points = draw().float().requires_grad_()
    found = woodbury.laplacian(model, points)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    bound = rounding(model, torch.float32)
    for ours, theirs in zip(found, dense(model.double(), points.detach().double()), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= bound
    # the gradient of the value in the points is the gradient
    own = torch.autograd.grad(found.value[:, 1].sum(), points)[0]
    torch.testing.assert_close(own, found.gradient[:, 1].detach(), atol=bound, rtol=0)


def test_what_cannot_be_is_named():
    model = build(network)
    with pytest.raises(ValueError, match=r"shape \(n, d\), one row per point, not \(2,\)"):
        woodbury.laplacian(model, draw()[0])
    for points in (draw().numpy(), {"x": draw()}, [draw()]):
        with pytest.raises(TypeError, match=f"must be a tensor.*not {type(points).__name__}"):
            woodbury.laplacian(model, points)
    for weights in ((1.0,), torch.ones(POINTS), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"give one per axis, \(2,\), or a tensor"):
            woodbury.laplacian(model, draw(), weights)


def writing_module(write):
    """Writes into its input."""

    def run(m, x):
        result = write(x)
        return x if result is None else result

    return Parts(run)


def set_first(x):
    x[:, 0] = x[:, 1] * x[:, 0]


def add_to_first(x):
    x[:, 0] += x[:, 1].sin()


def write_and_return_another(x):
    x.mul_(x)
    return x.sin()


def write_through_views(x):
    x.view(-1).mul_(0.5)
    x[:, :1].sin_()


def with_first(x, first):
    return torch.cat([first.unsqueeze(1), x[:, 1:]], dim=1)


WRITES = {  # each beside the same function that writes nothing
    "add": (lambda x: x.add_(1), lambda x: x + 1),
    "add itself": (lambda x: x.add_(x), lambda x: x + x),
    "multiply by itself": (lambda x: x.mul_(x), lambda x: x * x),
    "function": (lambda x: x.sin_(), torch.sin),
    "part": (set_first, lambda x: with_first(x, x[:, 1] * x[:, 0])),
    "increment": (add_to_first, lambda x: with_first(x, x[:, 0] + x[:, 1].sin())),
    "other": (write_and_return_another, lambda x: (x * x).sin()),
    "views": (write_through_views, lambda x: with_first(0.5 * x, (0.5 * x[:, 0]).sin())),
    "powers": (lambda x: x.pow_(3).exp_(), lambda x: torch.exp(x**3)),
    "clamp": (lambda x: x.clamp_(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "copy": (lambda x: x.copy_(x.square()), torch.square),
    "functional": (lambda x: nn.functional.elu(x, inplace=True), nn.functional.elu),
}
WRITERS = {
    "first": lambda own: nn.Sequential(own, nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
    "middle": lambda own: nn.Sequential(nn.Linear(2, 3), own, nn.Linear(3, 1)),
    "last": lambda own: nn.Sequential(nn.Linear(2, 3), own),
    "alone": lambda own: own,
    "inside": lambda own: Parts(
        lambda parts, x: parts.last(parts.own(parts.first(x))),
        first=nn.Linear(2, 3), own=own, last=nn.Linear(3, 1),
    ),
}  # fmt: skip


WRITTEN = [(how, where) for i, how in enumerate(WRITES) for j, where in enumerate(WRITERS) if (i + j) % 5 < 2]


@pytest.mark.parametrize("how, where", WRITTEN)
def test_modules_that_write_into_their_input(how, where):
    writing, model = (build(WRITERS[where], writing_module(function)) for function in WRITES[how])
    points = draw()
    before = points.clone()
    found = woodbury.laplacian(writing, points)
    assert torch.equal(points, before)
    bound = rounding(model) + bounds.rounding(1, 100)  # derivatives of exp(x^3) are below 15 e
    for ours, theirs in zip(found, dense(model, points), strict=True):
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)
    leaf = points.clone().requires_grad_()  # into which nobody may write
    for ours, same in zip(woodbury.laplacian(writing, leaf), found, strict=True):
        torch.testing.assert_close(ours, same, atol=bound, rtol=0)


def test_hooks_that_write_into_inputs():
    writing, model = build(network), build(network)
    writing[2].register_forward_pre_hook(lambda module, args: args[0].mul_(2).add_(1))
    model[2].register_forward_pre_hook(lambda module, args: 2 * args[0] + 1)
    found, bound = woodbury.laplacian(writing, draw()), 10 * rounding(model)  # 2 v + 1 has up to 3 |v|
    for ours, theirs in zip(found, dense(model, draw()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


def large_biases(activation, sizes):
    """Float32, with biases of these sizes."""
    model = build(network, activation).float()
    with torch.no_grad():
        for layer, size in zip([model[0], model[2], model[4]], sizes, strict=True):
            layer.bias.mul_(0).add_(size)
    return model


# activations whose derivatives hardly change where z loses digits: what is lost is the derivative's own alone
BIASES = {
    "last": (nn.Tanh, (0.3, 0.3, 1e6)),
    "last of all": (nn.GELU, (0.3, 0.3, 1e30)),
    "linear": (nn.Identity, (1e5, 1e7, 1e9)),
    "straight": (nn.LeakyReLU, (1e6, 1e6, 1e6)),
    "softplus": (lambda: nn.Softplus(beta=1.0), (1e6, 1e7, 1e7)),
}


@pytest.mark.parametrize("activation, sizes", BIASES.values(), ids=BIASES)
def test_biases_that_dwarf_the_values_leave_the_derivatives_their_digits(activation, sizes):
    model, points = large_biases(activation, sizes), draw().float()
    found = woodbury.laplacian(model, points)
    product = math.prod(float(model[i].weight.detach().abs().sum(1).max()) for i in (0, 2, 4))
    bound = bounds.rounding(6, (2 * (1 + product)) ** 2, 3, torch.float32)  # |phi'|, |phi''| < 2; without b
    _, gradient, bend = dense(model.double(), points.double())
    torch.testing.assert_close(found.gradient.double(), gradient, atol=bound, rtol=0)
    torch.testing.assert_close(found.laplacian.double(), bend, atol=bound, rtol=0)
    assert torch.finfo(torch.float32).eps * max(sizes) > 10 * bound  # lost digits would show


# Derivatives in the parameters, of something that uses all three results


def combine(value, gradient, bend):
    return bend + value * gradient[..., 0] + gradient[..., 1].square()


def residual(model, points):
    return combine(*woodbury.laplacian(model, points))


def dense_residual(model, points):
    return combine(*dense(model, points))


MODELS = {
    "tanh": network,
    "gelu": lambda: network(nn.GELU),
    "skip": Skip,
    "features": lambda: nn.Sequential(waves(), nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1)),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def derivative_bound(model):
    """Each further derivative multiplies the size of a residual by at most the number of its parameters."""
    return rounding(model) * sum(p.numel() for p in model.parameters())


@every_model
def test_gradients_of_each_sample_by_torch_func(make):
    """Those of all samples together are in every step below."""
    model, points = build(make), draw()
    params, whole = dict(model.named_parameters()), Parts(lambda m, x: residual(m.model, x), model=model)

    def one(values, point):
        named = {f"model.{name}": value for name, value in values.items()}
        return torch.func.functional_call(whole, named, (point[None],)).sum()

    ours = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, points)
    for index, point in enumerate(points):
        theirs = torch.autograd.grad(dense_residual(model, point[None]).sum(), list(params.values()))
        for name, own in zip(params, theirs, strict=True):
            torch.testing.assert_close(ours[name][index], own, atol=derivative_bound(model), rtol=0)


@every_model
def test_derivatives_along_several_steps(make):
    model, points = build(make), draw()[:3]
    plan = plan_layers(model, dict(model.named_parameters()), False)
    captured = capture(plan, residual, points, len(points))
    steps = [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(2)]
    first, second = captured.push_forward(steps), captured.second_derivative(steps[0])
    for image, step in zip(first, steps, strict=True):
        p = reference.flat(step.values())
        start, size = torch.zeros((), dtype=torch.float64), 1 + float(p.abs().sum())
        along = outputs_along(model, points, p, dense_residual)
        slope = torch.autograd.functional.jacobian(along, start)
        torch.testing.assert_close(image, slope, atol=rounding(model) * size, rtol=0)
        if step is steps[0]:
            bend = second_derivatives(model, points, p, dense_residual)  # ours has half of its digits
            torch.testing.assert_close(second, bend, atol=rounding(model) * size**2, rtol=1e-5)


# In an optimizer

# whose rows are those of the value
LARGE = {"large biases": lambda: large_biases(nn.Tanh, (0.3, -0.4, 50.0))}


@every_pair(make=MODELS | LARGE, samples=[POINTS, 4], fallback=[None, "autograd"])
def test_a_step_goes_by_layer_rules_or_by_the_fallback(make, samples, fallback):
    model, points, damping = build(make), draw(), 0.1
    targets = torch.zeros_like(residual(model, points)).detach()
    settings = {"damping": damping, "forward": residual, "curvature_samples": samples, "fallback": fallback}
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **settings)
    subset = torch.arange(samples)
    ours = reference.flat(optimizer.direction(points, targets, subset=subset).values())
    given = model, nn.MSELoss(), points, targets
    theirs, B, _ = reference.dense_direction(*given, subset, damping, "gauss-newton", forward=dense_residual)
    condition = 1 + float(torch.linalg.matrix_norm(B, 2)) / damping
    assert reference.relative_error(ours, theirs) <= derivative_bound(model) * condition
    if fallback is None:
        rows = woodbury.rows(model, nn.MSELoss(), points, targets, forward=residual)
        assert all(isinstance(form, SharedRows) for form in rows.forms.values())
    assert optimizer.step(points).accepted
