"""The other ways to solve for p: in the space of parameters, and through products without any row."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import processes
import reference
import woodbury
from checks import refused
from fuzz.models import Parts
from test_layers import METHODS
from woodbury import linalg
from woodbury._bytes import available_bytes
from woodbury._vector import flatten
from woodbury.model.capture import GraphCapture
from woodbury.model.chain import ChainCapture
from woodbury.optim import problems as posing
from woodbury.row_matrix import Rows

every_kind = pytest.mark.parametrize("kind", list(METHODS))
every_blocks = pytest.mark.parametrize("blocks", ["full", "layer"])
every_subset = pytest.mark.parametrize("subset", [[5, 0, 9, 2], list(range(12))], ids=["part", "all"])


def forbid(monkeypatch, owner, name):
    def refuse(*args, **kwargs):
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(owner, name, refuse)


# -- in the space of parameters -------------------------------------------------------------------------------


def few_parameters(kind):
    """More rows than the model has parameters, for either method and four samples."""
    if kind == "gauss-newton":  # 2 + 12 parameters, 5 words of 2 rows each a sample
        model = nn.Sequential(nn.Embedding(4, 1), nn.Linear(1, 3, bias=False), transposed())
        return model.double(), nn.CrossEntropyLoss(), torch.randint(4, (12, 5)), torch.randint(3, (12, 5))
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1))  # 3 parameters
    return model.double(), nn.MSELoss(), torch.randn(12, 1).double(), torch.randn(12, 1).double()


def transposed():
    return Parts(lambda m, x: x.transpose(1, 2))


@every_kind
@every_blocks
@every_subset
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_more_rows_than_parameters_are_solved_in_parameter_space(kind, blocks, subset, weight_decay, monkeypatch):
    model, loss, inputs, targets = few_parameters(kind)
    settings = {"damping": 0.05, "blocks": blocks, "momentum": 0.7, "weight_decay": weight_decay}
    optimizer = METHODS[kind](model, loss, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(woodbury.quadratic.quadratic.Blocks, "are_smaller", lambda *args: False)
        in_samples = flatten(optimizer.direction(inputs, targets, subset=subset))
    forbid(monkeypatch, Rows, "layer_grams")
    previous = flatten(optimizer.direction(inputs, targets, subset=subset))
    optimizer.step(inputs, targets, subset=subset)
    decay = weight_decay * torch.ones_like(previous)
    before = {"decay": decay, "shift": 0.7 * previous}
    expected, B, g = reference.dense_direction(model, loss, inputs, targets, subset, 0.05, kind, blocks, **before)
    p = flatten(optimizer.direction(inputs, targets, subset=subset))
    bound = bounds.of_solve(B + torch.diag(decay), 0.05, steps=2)
    assert reference.relative_error(previous, in_samples) <= bound
    assert reference.relative_error(p, expected) <= bound
    assert optimizer.verify(inputs, targets, subset=subset) <= bound
    theta = reference.theta(model)
    info = optimizer.step(inputs, targets, subset=subset)
    curvature = expected @ (B + torch.diag(decay)) @ expected
    torch.testing.assert_close(info.predicted, -(g + decay * theta) @ expected - 0.5 * curvature)
    torch.testing.assert_close(info.step_norm, expected.norm())


@every_kind
def test_parameter_space_takes_a_decay_by_group_and_the_gradient_of_a_loader(kind, monkeypatch):
    model, loss, x, t = few_parameters(kind)
    forbid(monkeypatch, Rows, "layer_grams")
    first, *others = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.3}, {"params": others}]
    optimizer = METHODS[kind](model, loss, damping=0.1, params=groups)
    theta = reference.theta(model)
    W = torch.zeros_like(theta)
    W[: first.numel()] = 0.3
    B = reference.curvature_matrix(reference.per_sample(model, loss, x[:5], t[:5]), kind)
    g = reference.gradient(model, loss, x, t)
    expected = torch.linalg.solve(B + torch.diag(W + 0.1), -g - W * theta)
    p = optimizer.direction(x[:5], t[:5], full=[(x[:8], t[:8]), (x[8:], t[8:])])
    assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B + torch.diag(W), 0.1)


@every_kind
def test_gram_dtype_is_that_of_the_system_in_parameter_space(kind):
    """float32 and lambda = 1e-6 lambda_max: two digits more than in sample space, and one more by float64."""
    model, twin, loss = problems.mlp(6, 8, 3), problems.mlp(6, 8, 3).double(), nn.MSELoss()
    twin.load_state_dict(model.state_dict())
    inputs, targets = torch.randn(300, 6), torch.randn(300, 3)
    gram = woodbury.rows(model, loss, inputs, targets, curvature=kind).gram()
    damping = float(1e-6 * torch.linalg.eigvalsh(gram.double())[-1])
    exact = flatten(METHODS[kind](twin, loss, damping=damping).direction(inputs.double(), targets.double()))

    def error(dtype):
        p = flatten(METHODS[kind](model, loss, damping=damping, gram_dtype=dtype).direction(inputs, targets))
        assert p.dtype == torch.float32
        return reference.relative_error(p.double(), exact)

    assert error(None) <= 2e-3 and error(torch.float64) <= 2e-4


# -- through products -----------------------------------------------------------------------------------------


NUMBERED = list(enumerate(problems.PROBLEMS))


@pytest.mark.parametrize(
    "index, name, kind",
    [(*own, "gauss-newton") for own in NUMBERED] + [(*own, "empirical") for own in NUMBERED[::5]],
)
def test_products_give_the_dense_direction_without_a_row(index, name, kind, monkeypatch):
    """With blocks and subsets in turn; of a loss, the products of gradients need its gradient alone."""
    blocks, subset = ("full", "layer")[index % 2], ([5, 0, 2, 3], [4], list(range(problems.N)))[index % 3]
    forbid(monkeypatch, GraphCapture, "rows")
    forbid(monkeypatch, ChainCapture, "rows")
    problem = problems.make(name)
    settings = {"damping": 0.03, "blocks": blocks, "solver": "products", "solver_tolerance": 1e-12}
    optimizer = METHODS[kind](problem.model, problem.loss, **settings)
    with bounds.known_apart():
        p = optimizer.direction(problem.inputs, problem.targets, subset=subset)
    expected, B, _ = reference.dense_direction(*problem, subset, 0.03, kind, blocks=blocks)
    bound = 1e-12 * bounds.condition(B, 0.03) + bounds.of_solve(B, 0.03)
    assert reference.relative_error(flatten(p), expected) <= bound


def fused_attention(m, x):
    """A language model of one layer; outputs (n, C, T)."""
    h = m.words(x)
    q, k, v = (part(h).unsqueeze(1) for part in m.maps)
    return m.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)).transpose(1, 2)


def test_fused_attention_can_be_differentiated_twice():
    """torch's fused kernels have no second derivative: verify, HessianFree and products ask for the plain one."""
    maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = Parts(fused_attention, words=nn.Embedding(7, 4), maps=maps, head=nn.Linear(4, 7)).double()
    loss = nn.CrossEntropyLoss()
    inputs, targets = torch.randint(7, (4, 5)), torch.randint(7, (4, 5))
    expected, B, _ = reference.dense_direction(model, loss, inputs, targets, [0, 2], 0.1, "gauss-newton")
    by_products = {"solver": "products", "solver_tolerance": 1e-12}
    for optimizer, tolerance in (
        (woodbury.GaussNewton(model, loss, damping=0.1), 0.0),
        (woodbury.GaussNewton(model, loss, damping=0.1, **by_products), 1e-12 * bounds.condition(B, 0.1)),
        (woodbury.HessianFree(model, loss, damping=0.1, progress=0.0, max_iterations=300), 1e-7),
    ):
        p = flatten(optimizer.direction(inputs, targets, subset=[0, 2]))
        assert reference.relative_error(p, expected) <= tolerance + bounds.of_solve(B, 0.1)
        assert optimizer.verify(inputs, targets, subset=[0, 2]) <= tolerance + bounds.of_solve(B, 0.1)
    assert optimizer.step(inputs, targets).accepted


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver, needed", [("cg", "38.2 GiB"), ("cholesky", "0.0766 GiB")])
def test_rows_that_do_not_fit_are_refused_before_anything_is_allocated_and_the_ways_out_work(
    solver, needed, monkeypatch
):
    """58500 rows of 2000 outputs; the Gram matrix thrice, or the rows of 175 parameters written out."""
    model, loss = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 40), transposed()), nn.CrossEntropyLoss()
    inputs, targets = torch.randint(5, (30, 50)), torch.randint(40, (30, 50))
    monkeypatch.setattr(posing, "available_bytes", lambda device: 2**28)
    monkeypatch.setattr(posing, "_WORTH_ASKING", 2**20)
    forbid(monkeypatch, woodbury.losses.softmax.Softmax, "compact_factor")
    optimizer = woodbury.GaussNewton(model, loss, solver=solver)
    with pytest.raises(MemoryError) as error:
        optimizer.step(inputs, targets)
    for part in ("58500 rows, 1950 each", "0.436 GiB", needed, "0.25 GiB are available", "curvature_samples"):
        assert part in str(error.value)
    for way_out in ("NaturalGradient", "solver='products'"):
        assert way_out in str(error.value)
    monkeypatch.undo()
    monkeypatch.setattr(posing, "available_bytes", lambda device: 2**28)
    monkeypatch.setattr(posing, "_WORTH_ASKING", 2**20)
    by_products = {"solver": "products", "solver_tolerance": 1e-2}
    assert woodbury.GaussNewton(model, loss, curvature_samples=2, solver=solver).step(inputs, targets).accepted
    assert woodbury.NaturalGradient(model, loss, solver=solver).step(inputs, targets).accepted
    assert woodbury.GaussNewton(model, loss, **by_products).step(inputs, targets).accepted


def test_memory_of_this_machine_is_known_or_not_claimed(monkeypatch):
    found = available_bytes(torch.device("cpu"))
    assert found is None or 0 < found < 2**50
    assert available_bytes(torch.device("meta")) is None

    def missing(*args):
        raise OSError

    monkeypatch.setattr("builtins.open", missing)
    assert available_bytes(torch.device("cpu")) is None


# -- the small solvers and the precision of the products that feed them ---------------------------------


def seen_precision():
    try:
        older = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch mixes no settings of the two kinds
        older = None
    return linalg.matmul_precision(), older


def check_full_precision(setting):
    exec(setting)
    before = seen_precision()
    with linalg.full_precision():
        assert set(linalg.matmul_precision()) <= {"ieee", "none", "highest"}, linalg.matmul_precision()
    assert seen_precision() == before, (before, seen_precision())


@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "pass",
    ],
)
def test_full_precision_holds_inside_and_leaves_the_users_setting_alone(setting):
    if "fp32_precision" in setting and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    done = processes.run_alone(check_full_precision, setting)  # torch cannot go back to the older settings
    assert done.returncode == 0, done.stderr


class Once(torch.autograd.Function):
    """tanh, as an extension may have it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].square())


def test_what_can_be_differentiated_once_is_refused_where_products_need_more():
    model = Parts(lambda m, x: m.b(Once.apply(m.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    loss, plain = nn.CrossEntropyLoss(), Parts(lambda m, x: m.b(torch.tanh(m.a(x))), a=model.a, b=model.b)
    right, ours = (woodbury.GaussNewton(own, loss).direction(inputs, targets) for own in (plain, model))
    assert reference.relative_error(reference.flat(ours.values()), reference.flat(right.values())) < 1e-12
    for optimizer in (woodbury.GaussNewton(model, loss, solver="products"), woodbury.HessianFree(model, loss)):
        for call in (optimizer.step, optimizer.verify):
            with refused(model, "cannot be differentiated twice.*once_differentiable"):
                call(inputs, targets)
