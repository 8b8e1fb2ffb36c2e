"""Faults and their outcomes: bad samples, overflow, singular systems, options and values out of range."""

import copy
import math
import re
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import reference
import test_optim_contract as contract
import woodbury
from cases import every_pair
from checks import refused, silence, told, unchanged
from fuzz.models import Parts
from test_optim_contract import SECOND_ORDER, SOLVING, TIGHT, build, every_second_order, method
from woodbury._vector import flatten
from woodbury.losses import rules as loss_rules
from woodbury.optim import BadSamplesError, NonFiniteLossError
from woodbury.optimizers import OPTIMIZERS

NAN, INF = math.nan, math.inf
BAD = 3  # the place of the bad sample


# -- one bad sample -------------------------------------------------------------------------------------------


def root():
    """sqrt(|h|) of a last layer: the outputs are finite where h is 0, their derivative is not."""
    layers = {"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(4, 2, bias=False)}
    return Parts(lambda m, x: m.b(torch.tanh(m.a(x)).abs().sqrt()), **layers)


def too_much(problem, model, scale=0.0):
    """A model that the bad sample, scaled, is too much for."""
    problem.model = model.double()
    problem.inputs[BAD] *= scale


FAULTS = {
    "inputs": lambda problem: problem.inputs[BAD, 1:2].fill_(NAN),
    "targets": lambda problem: problem.targets[BAD, :1].fill_(INF),
    # finite inputs and targets; the model gives inf for x = 0
    "loss": lambda problem: too_much(problem, Parts(lambda m, x: m.a(1 / x), a=nn.Linear(3, 2))),
    "gradient": lambda problem: too_much(problem, root()),  # a finite loss; only its derivative is not
    "overflow": lambda problem: too_much(problem, nn.Linear(3, 2), 1e200),  # squares of outputs beyond the type
}


def with_fault(name):
    problem = problems.make("squared")
    FAULTS[name](problem)
    return problem


@every_pair(kind=SECOND_ORDER, fault=list(FAULTS), part=[None, 2])
def test_bad_samples_are_named_by_their_places_in_the_batch_and_nothing_changes(kind, fault, part):
    """S2 is put in front before the model runs: the place is that in the batch that was passed all the same."""
    for seed in range(1 if part is None else 2):
        problem = with_fault(fault)
        optimizer = build(kind, problem, curvature_samples=part, seed=seed)
        for call in (optimizer.step, optimizer.direction, optimizer.verify):
            with refused(optimizer, rf"(at|for) .*index {BAD} of the batch"):
                call(problem.inputs, problem.targets)
    for tensor in (problem.inputs, problem.targets):
        tensor[5] = tensor[BAD]
    with pytest.raises(BadSamplesError, match=rf"index {BAD}, 5 of the batch") as caught:
        optimizer.step(problem.inputs, problem.targets)
    assert caught.value.indices == [BAD, 5]


def test_bad_samples_of_a_dictionary_are_named():
    """By their place; a tensor without a sample axis by its shape."""
    batch = {"x": torch.randn(7, 2), "y": torch.randn(7, 1), "scale": torch.ones(3)}

    def forward(model, batch):
        return model(torch.cat([batch["x"], batch["y"]], dim=1) * batch["scale"])

    optimizer = woodbury.GaussNewton(problems.mlp(3, 5, 2), nn.MSELoss(), forward=forward)
    batch["y"][BAD] = NAN
    with pytest.raises(BadSamplesError, match=rf"inputs hold nan .* index {BAD} of the batch"):
        optimizer.step(batch, torch.randn(7, 2))
    with pytest.raises(ValueError, match=r"inputs hold nan or inf in a tensor of shape \(3,\)"):
        optimizer.step({"x": batch["x"], "y": torch.ones(7, 1), "scale": NAN * batch["scale"]}, torch.randn(7, 2))


@every_second_order
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_bad_sample_of_a_loader_moves_nothing(kind, fault):
    problem = with_fault(fault)
    batch = problem.inputs[:BAD], problem.targets[:BAD]
    said = pytest.raises(NonFiniteLossError) if fault == "loss" else pytest.warns(RuntimeWarning, match="rejected")
    with unchanged(problem.model), said:
        build(kind, problem).step(*batch, full=[batch, (problem.inputs, problem.targets)])


@contract.over([kind for kind in SECOND_ORDER if method(kind).any_layer])
def test_a_registered_loss_without_a_derivative_names_the_sample(kind):
    """|y - t|^1.5 has no second derivative at 0, |y - t|^0.5 no first."""

    for power in (1.5, 0.5) if method(kind).curvature == "gauss-newton" else (0.5,):
        problem = problems.make("squared")
        problem.loss = problems.Own(lambda y, t, power=power: (y - t).abs().pow(power).sum(1))
        problem.targets = problem.model(problem.inputs).detach() + 1.0
        problem.targets[BAD, 0] -= 1.0
        with pytest.raises(ValueError, match=f"index {BAD} of the batch"):
            build(kind, problem).step(problem.inputs, problem.targets)


# -- overflow -------------------------------------------------------------------------------------------------


@every_second_order
def test_a_gradient_beyond_the_type_is_a_rejected_step_with_a_warning(kind):
    model = nn.Linear(3, 1)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss())
    batch = torch.full((4, 3), 1e30), torch.zeros(4, 1)  # v . v' is beyond float32
    with refused(optimizer, "not finite: numbers overflow", ArithmeticError):
        optimizer.direction(*batch)
    rejected = "not finite: numbers overflow.*The step is rejected"
    with unchanged(model), pytest.warns(RuntimeWarning, match=rejected):
        info = optimizer.step(*batch)
    assert torch.isfinite(info.loss) and not info.accepted and info.ratio == -INF
    assert optimizer.state["damping"] == 1.01


def test_a_model_that_no_parameter_changes_is_told_from_an_overflow():
    """As with second derivatives of a network of ReLU."""
    settings = {"forward": lambda model, inputs: 0.0 * model(inputs), "search": woodbury.CurvedSearch()}
    optimizer = woodbury.GaussNewton(nn.Linear(3, 1), nn.MSELoss(), **settings)
    with pytest.warns(RuntimeWarning, match="no parameter changes outputs.*The step is rejected"):
        optimizer.step(torch.ones(4, 3), torch.ones(4, 1))


@every_second_order
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_huge_range_of_values_gives_a_finite_step_or_a_rejected_one(kind):
    for size in (1e-30, 1e-15, 1e10, 1e15):
        model = problems.mlp(3, 6, 2)
        inputs, targets = torch.randn(8, 3), torch.randn(8, 2)
        inputs[::2] *= size
        targets[1::2] *= size
        info = OPTIMIZERS[kind](model, nn.MSELoss()).step(inputs, targets)
        assert torch.isfinite(reference.theta(model)).all()
        assert info.accepted or info.ratio == -INF


# -- the system of a step -------------------------------------------------------------------------------------


@contract.that_take("solver")
def test_a_failed_cholesky_raises_the_damping_and_reports_it(kind):
    """Rows that repeat each other, with a damping below their rounding error."""
    model = problems.mlp(3, 6, 2)
    x, t = torch.randn(1, 3).repeat(8, 1), torch.randn(1, 2).repeat(8, 1)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=woodbury.LevenbergMarquardt(1e-12, floor=0.0))
    with pytest.warns(RuntimeWarning, match="damping raised to"):
        info = optimizer.step(x, t)
    assert info.damping > 1e-12 and info.accepted and torch.isfinite(info.predicted)
    assert torch.isfinite(info.ratio) and optimizer.state["damping"] > 1e-12


@pytest.mark.parametrize("curvature", ["gauss-newton", "empirical"])
def test_a_damping_of_1e_minus_30_in_float32_is_told_of_or_gives_the_right_step(curvature):
    """Samples twice: K is singular, and whether a Cholesky factorisation passes is a matter of rounding.

    Where it does and nothing is said, p is the limit of damping 0, which is -B^+ g as g is in the range of B.
    """
    kind = woodbury.GaussNewton if curvature == "gauss-newton" else woodbury.NaturalGradient
    for seed in range(6):
        torch.manual_seed(seed)
        model, x, t = problems.mlp(3, 8, 1), torch.randn(3, 3).repeat(2, 1), torch.randn(6, 1)
        t[3:] = t[:3] if seed % 2 == 0 else t[3:]
        with told() as texts:
            p = flatten(kind(model, nn.MSELoss(), damping=1e-30).direction(x, t)).double()
        if any("nearly singular" in text or "damping raised" in text for text in texts):
            continue
        samples = reference.per_sample(model.double(), nn.MSELoss(), x.double(), t.double())
        B = reference.curvature_matrix(samples, curvature)
        g = sum(J.T @ r for J, r, _ in samples) / len(samples)
        assert reference.relative_error(p, -torch.linalg.pinv(B, rcond=1e-10) @ g) < 0.05


@every_pair(space=["samples", "parameters"], dtype=[torch.float32, torch.float64])
def test_a_nearly_singular_system_warns_once(space, dtype):
    """Two samples that agree to rounding: lmin / lmax is at most (damping + rounding) / lmax."""
    eps = torch.finfo(dtype).eps
    model = (problems.mlp(3, 20, 2) if space == "samples" else nn.Linear(3, 2)).to(dtype)
    x = torch.randn(6, 3, dtype=dtype)
    if space == "samples":
        x[1] = x[0]
    else:
        x[:, 1] = x[:, 0]  # a feature twice
    t = torch.randn(6, 2, dtype=dtype)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=2 * eps)
    with pytest.warns(RuntimeWarning, match="nearly singular|not numerically positive definite"):
        optimizer.direction(x, t)
    with silence():
        for damping in (1e-3, 1e4 * eps):  # an error below 1e-3
            woodbury.GaussNewton(copy.deepcopy(model), nn.MSELoss(), damping=damping).step(x, t)


def test_the_condition_is_looked_at_again_where_the_damping_falls():
    model = problems.mlp(3, 20, 2)
    x, t = torch.randn(3, 3).repeat(2, 1), torch.randn(3, 2).repeat(2, 1)
    policy = woodbury.LevenbergMarquardt(initial=1.0, drop=0.1, boost=1.0, floor=0.0)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=policy, lr=0.0)
    with pytest.warns(RuntimeWarning, match="nearly singular"):
        for _ in range(30):
            optimizer.step(x, t)


@contract.that_take("solver")
@pytest.mark.parametrize("solver", ["cg", "products"])
def test_conjugate_gradients_that_stop_short_warn_and_the_step_is_rejected(kind, solver, monkeypatch):
    from woodbury.quadratic import by_iteration

    problem = problems.make("softmax")

    def two_iterations(product, rhs, tolerance, max_iterations):
        return plain(product, rhs, tolerance, 2)

    plain = by_iteration.solve_conjugate_gradient
    monkeypatch.setattr(by_iteration, "solve_conjugate_gradient", two_iterations)
    optimizer = build(kind, problem, solver=solver, damping=1e-6)
    with unchanged(problem.model), pytest.warns(RuntimeWarning, match="conjugate gradients did not reach"):
        info = optimizer.step(problem.inputs, problem.targets)
    assert not info.accepted and info.ratio == -INF and torch.isfinite(info.predicted)
    with silence():  # once an optimizer
        optimizer.step(problem.inputs, problem.targets)


# -- damping at its limits ------------------------------------------------------------------------------------


def test_levenberg_marquardt_stays_between_its_bounds():
    up, down = woodbury.LevenbergMarquardt(boost=10.0), woodbury.LevenbergMarquardt(drop=0.1, floor=0.0)
    high = low = 1.0
    for _ in range(50):
        high, low = up.next(high, -INF), down.next(low, 1.0)
    assert high == 1e18 and low == 1e-18
    assert up.next(high, 1.0) == 0.99e18 and down.next(low, 0.0) == 1.01e-18  # and comes back
    # the same numbers as on a device
    assert up.next(torch.tensor(high).double(), torch.tensor(-INF).double()) == 1e18
    squares = torch.tensor([high, low], dtype=torch.float32).square()
    assert (torch.isfinite(squares) & (squares > 0)).all()


@every_second_order
@pytest.mark.parametrize("value", [1e18, 1e-18])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_at_the_bounds_of_the_damping_is_finite(kind, value):
    for dtype in (torch.float32, torch.float64):
        problem = problems.make("softmax", dtype)
        policy = woodbury.LevenbergMarquardt(initial=value, floor=0.0)
        info = build(kind, problem, damping=policy).step(problem.inputs, problem.targets)
        assert torch.isfinite(reference.theta(problem.model)).all() and torch.isfinite(info.loss)
        if value > 1:  # p is the gradient over lambda, and the loss falls by less than its rounding error
            noise = torch.finfo(dtype).eps * info.loss
            assert info.predicted < 0.01 * noise and info.accepted
            assert abs(info.ratio - 1) <= 1.01 * info.predicted / noise


@every_second_order
def test_a_damping_that_is_no_positive_number_is_refused_before_anything_moves(kind):
    class Broken:
        initial, floor = 1.0, 0.0

        def next(self, value, ratio):
            return broken

    for broken in (NAN, INF, 0.0, -1.0):
        problem = problems.make("softmax")
        optimizer = build(kind, problem, damping=Broken())
        with refused(optimizer, "damping must be positive and finite, and Broken gives"):
            optimizer.step(problem.inputs, problem.targets)
        optimizer.state["damping"] = broken  # as from a file
        with pytest.raises(ValueError, match="damping must be positive and finite"):
            optimizer.step(problem.inputs, problem.targets)


# -- data without information ---------------------------------------------------------------------------------


def choose(problem, samples):
    problem.inputs, problem.targets = problem.inputs[samples], problem.targets[samples]


def saturate(problem):
    """Outputs of 1e4, some of them on the wrong side."""
    with torch.no_grad():
        problem.model[-1].weight.mul_(1e4)
        problem.model[-1].bias.mul_(1e4)


CHANGES = {
    "duplicated": lambda problem: choose(problem, [2] * 7),
    "constant features": lambda problem: problem.inputs.fill_(1.0),
    "zero features": lambda problem: problem.inputs.zero_(),
    "equal targets": lambda problem: problem.targets.copy_(problem.targets[:1].clone().expand_as(problem.targets)),
    "one sample": lambda problem: choose(problem, [0]),
    "saturated": saturate,
    "huge values": lambda problem: problem.inputs.mul_(1e6),
}


@every_pair(kind=SECOND_ORDER, change=CHANGES, name=["softmax", "logistic", "squared"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_data_without_information_give_the_dense_step_and_finite_numbers(kind, change, name):
    problem = problems.make(name)
    change(problem)
    optimizer = build(kind, problem, TIGHT, damping=0.1)
    p = flatten(optimizer.direction(problem.inputs, problem.targets))
    if method(kind).solves:
        expected, B, _ = contract.dense(kind, problem, list(range(len(problem.inputs))), 0.1)
        condition = bounds.condition(B, 0.1)
        error = bounds.of_solve(B, 0.1) + method(kind).tolerance * condition
        # residuals, differences of numbers up to 1, move g by eps |J|, which is at most sqrt(lmax)
        lost = bounds.rounding(len(B), (condition / 0.1) ** 0.5)
        assert (p - expected).norm() <= error * expected.norm() + lost
    info = optimizer.step(problem.inputs, problem.targets)
    for number in ("loss", "damping", "predicted", "step_norm"):
        assert torch.isfinite(getattr(info, number)), number
    assert torch.isfinite(info.ratio) or not info.accepted
    assert torch.isfinite(reference.theta(problem.model)).all()
    problem = problems.make(name, torch.float32)
    change(problem)
    optimizer = build(kind, problem)
    for _ in range(5):
        info = optimizer.step(problem.inputs, problem.targets)
        assert torch.isfinite(info.loss) and not torch.isnan(info.ratio)
    assert torch.isfinite(reference.theta(problem.model)).all()


@every_second_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_zero_gradient_is_a_step_of_zero_that_counts_as_good(kind, dtype, momentum):
    """0 / 0 is a ratio of 1."""
    model = nn.Linear(3, 2).to(dtype)
    x = torch.randn(5, 3, dtype=dtype)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), **contract.taken(kind, {"momentum": momentum}))
    for step in range(3):
        with unchanged(model):
            info = optimizer.step(x, model(x).detach())
        # e of the natural gradient is 1, and so known up to eps: p^T B p is a multiple of its square
        assert info.accepted and info.step_norm == 0 and info.predicted < torch.finfo(dtype).eps ** 2
        assert 0.9 < info.ratio <= 1 and (step or dtype == torch.float32 or info.ratio == 1)
        assert info.damping.item() == pytest.approx(0.99**step + 1e-3)
    p = optimizer.direction(x, model(x).detach())
    assert all((value == 0).all() for value in p.values()) and optimizer.verify(x, model(x).detach()) == 0


# -- float32 with a gradient that is not made of rows ----------------------------------------------------------

DAMPINGS = (1e-4, 1e-6, 1e-8)
SQUARED = nn.MSELoss()


def float32_problem():
    """36 rows and 183 parameters, lmax about 2."""
    torch.manual_seed(0)
    return problems.mlp(5, 20, 3), torch.randn(12, 5), torch.rand(12, 3)


@cache
def exact_system(loss):
    """A function that gives p in float64 by dense matrices, from Jacobians which are computed once."""
    model, x, t = float32_problem()
    return reference.dense_system(model.double(), loss, x.double(), t.double(), list(range(12)))


@pytest.mark.parametrize("damping", DAMPINGS)
def test_a_registered_loss_keeps_its_digits_in_float32(damping):
    """e comes from the Hessian: 1e-5 for any damping, where g by itself gave 0.3 at 1e-6 and 32 at 1e-8.

    The rows and K are known up to eps, and K, whose condition is 1e4 here, is solved with: 1e4 eps = 1e-3 bounds
    the error. With gram_dtype=torch.float64 what is left is the rounding of the rows, 1e-6 measured.
    """
    loss = problems.Own(lambda outputs, targets: (outputs - targets).square().mean(1))
    (model, x, t), (exact, _, _) = float32_problem(), exact_system(loss)(damping, "gauss-newton")
    with silence(RuntimeWarning):
        for dtype, bound in ((None, 1e-3), (torch.float64, 1e-4)):
            optimizer = woodbury.GaussNewton(model, loss, damping=damping, gram_dtype=dtype)
            assert reference.relative_error(flatten(optimizer.direction(x, t)).double(), exact) < bound


@every_pair(
    kind=[kind for kind in SECOND_ORDER if "gram_dtype" in contract.arguments(kind)],
    solver=["cholesky", "cg", "products"],
    gram_dtype=[None, torch.float64],
)
def test_full_warns_where_digits_are_lost(kind, solver, gram_dtype):
    """Wherever p is off by more than 5 % there is a warning, once; with a gradient of other data there is none.

    In float64, the way out that it names, which speaks of 1 %, there is none either.
    """
    curvature, blocks = method(kind).curvature, contract.arguments(kind)["blocks"]
    settings = {"solver": solver, "gram_dtype": gram_dtype}
    for damping in (1e-2, *DAMPINGS):
        (model, x, t), (exact, _, _) = float32_problem(), exact_system(SQUARED)(damping, curvature, blocks)
        optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=damping, **settings)
        with told() as texts:
            p = flatten(optimizer.direction(x, t, full=[(x, t)])).double()
            optimizer.direction(x, t, full=[(x, t)])
        lost = [text for text in texts if "A model in float64" in text or "conjugate gradients" in text]
        assert len(lost) <= 1
        assert lost or (reference.relative_error(p, exact) < 0.05 and damping > 1e-6)
        batch, wide = (x.double(), t.double()), copy.deepcopy(model).double()
        if solver == "cholesky" and damping < 1e-2:
            with silence():
                p = OPTIMIZERS[kind](wide, nn.MSELoss(), damping=damping).direction(*batch, full=[batch])
            assert reference.relative_error(flatten(p), exact) < 0.01
    other = torch.randn(12, 5), torch.randn(12, 3)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=1e-6, **settings)
    with silence():
        optimizer.direction(x, t, full=[(x, t), other])


@contract.that_take("gram_dtype")
def test_a_rest_of_the_residual_outside_the_range_of_the_hessian_is_kept(kind):
    """l = y_1^2 + y_2 + y_3^2 - y_4^2: H is singular, and its negative eigenvalue counts as zero."""

    def values(outputs, targets):
        y = outputs - targets
        return y[:, 0].square() + y[:, 1] + y[:, 2].square() - y[:, 3].square()

    problem = problems.make("softmax")
    problem.loss, problem.targets = problems.Own(values), torch.randn(problems.N, 4).double()
    samples = reference.per_sample(*problem)
    g = sum(J.T @ r for J, r, _ in samples) / len(samples)
    for subset in ([4, 0, 5], list(range(problems.N))):
        for solver in ("cholesky", "products"):
            optimizer = build(kind, problem, TIGHT, damping=0.1, solver=solver)
            p = flatten(optimizer.direction(problem.inputs, problem.targets, subset=subset))
            if method(kind).curvature == "gauss-newton":
                B = sum(J.T @ H.clamp_min(0) @ J for J, _, H in (samples[i] for i in subset)) / len(subset)
                expected = torch.linalg.solve(B + 0.1 * torch.eye(len(B)).double(), -g)
            else:
                expected, B, _ = contract.dense(kind, problem, subset, 0.1)
            tolerance = 0 if solver == "cholesky" else TIGHT["solver_tolerance"] * bounds.condition(B, 0.1)
            assert reference.relative_error(p, expected) <= tolerance + contract.bound(kind, B, 0.1)


# -- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, weight",
    [
        *(((4, 3), shape) for shape in ((), (1,), (3,), (1, 3), (1, 1), (3, 1), (4, 3), (4, 1), (4,), (1, 1, 3))),
        *(((3, 3), shape) for shape in ((3,), (3, 1), (1, 3), (3, 3))),
        *(((4, 3, 2), shape) for shape in ((), (2,), (3, 2), (3, 1), (1, 2), (1, 3, 1), (4, 1, 1), (3,), (6,))),
        *(((4, 2, 2), shape) for shape in ((2,), (2, 1), (4,))),
        *(((4,), shape) for shape in ((), (1,), (4,))),
        *(((4, 1), shape) for shape in ((), (1,), (1, 1), (4, 1))),
    ],
)
def test_pos_weight_of_any_shape_is_that_of_torch_or_refused_by_its_shape(shape, weight):
    weight = 1 + torch.rand(weight).double()
    loss = nn.BCEWithLogitsLoss(pos_weight=weight)
    outputs, targets = torch.randn(shape).double(), torch.rand(shape).double()
    rule, flat = loss_rules.loss_rule(loss), outputs.reshape(shape[0], -1)
    try:
        each = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction="none")
    except RuntimeError:
        each = None
    try:
        prepared = rule.prepare(loss, outputs, targets)
        values = rule.values(loss, flat, prepared)
    except ValueError as error:
        assert f"pos_weight=...) of shape {tuple(weight.shape)}" in str(error)
        if each is not None:  # torch can; weights differ between samples
            assert weight.dim() >= len(shape) and (weight.shape[0] == shape[0] or each.dim() > len(shape))
        return
    torch.testing.assert_close(values, each.reshape(shape[0], -1).mean(1))
    torch.testing.assert_close(rule.total(loss, flat, prepared), values.sum())
    slopes, hessians = reference.loss_derivatives(loss, outputs, targets)
    residual = rule.residual(loss, flat, prepared)
    torch.testing.assert_close(residual, shape[0] * slopes)
    factor = rule.compact_factor(loss, flat, prepared)
    columns, e = factor.columns(), factor.e
    torch.testing.assert_close(columns.mT @ columns, shape[0] * hessians)
    torch.testing.assert_close((columns.mT @ e.unsqueeze(2)).squeeze(2), residual)


@every_second_order
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_complex_numbers_are_refused_by_name(kind, loss):
    x, t = torch.randn(4, 3).double(), torch.rand(4, 2).double()
    optimizer = OPTIMIZERS[kind](nn.Linear(3, 2).double(), loss())
    with pytest.raises(TypeError, match=f"{loss.__name__}: targets are complex.*view_as_real"):
        optimizer.step(x, torch.complex(t, t))
    with pytest.raises(TypeError, match="targets are complex"):
        woodbury.rows(optimizer.model, loss(), x, torch.complex(t, t))
    model, twice = nn.Linear(3, 2).double(), lambda model, x: torch.complex(model(x), model(x))
    optimizer = OPTIMIZERS[kind](model, loss(), forward=twice)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="complex"):
        optimizer.step(x, t)


OTHER_SHAPES = {(5, 2): lambda square: square, (): torch.mean, (5, 1): lambda square: square.mean(1, keepdim=True)}


@every_second_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_a_registered_loss_whose_values_have_another_shape_is_refused(kind, dtype, shape):
    loss = problems.Own(lambda y, t: OTHER_SHAPES[shape]((y - t).square()))
    x, t = torch.randn(5, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    optimizer = OPTIMIZERS[kind](nn.Linear(3, 2).to(dtype), loss)
    message = rf"OwnRule\.values, the rule for Own,.*\(5,\).*\(5, 2\), and not {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        optimizer.step(x, t)


@every_second_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rule_whose_values_are_not_those_of_its_loss_is_refused_before_the_first_step(kind, dtype):
    x, t, model = torch.randn(5, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype), nn.Linear(3, 2).to(dtype)
    wrong = problems.Own(lambda y, t: (y - t).square().sum(1), F.mse_loss)
    stated = F.mse_loss(model(x), t).item()
    with refused(model, rf"mean of OwnRule\.values is {2 * stated:.4f}.*, and Own\(.*\) is {stated:.4f}"):
        OPTIMIZERS[kind](model, wrong).step(x, t)
    for forward in (nn.Module().forward, lambda y, t: F.mse_loss(F.dropout(y), t)):  # which are no such loss
        OPTIMIZERS[kind](model, problems.Own(lambda y, t: (y - t).square().sum(1), forward)).step(x, t)


@contract.over(SOLVING)
def test_verify_sees_a_rule_that_disagrees_with_its_loss(kind):
    """Three times its derivatives: g and B are both wrong, and the residual of p with the right ones shows it."""

    def values(y, t):
        squares = (y - t).square().mean(1)
        return 3 * squares - 2 * squares.detach()

    problem = problems.make("squared")
    problem.loss = problems.Own(values, F.mse_loss)
    assert build(kind, problem, TIGHT, damping=0.1).verify(problem.inputs, problem.targets) > 0.1


@every_second_order
def test_options_of_the_loss_changed_later_act_as_if_it_had_been_built_with_them(kind):
    for name, option, value in (
        ("softmax", "label_smoothing", 0.3),
        ("softmax", "ignore_index", 0),
        ("logistic-many", "pos_weight", torch.tensor([3.0, 1.0, 0.5]).double()),
        ("logistic", "weight", torch.tensor([3.0]).double()),
        ("softmax", "weight", torch.tensor([3.0, 1.0, 0.5, 2.0]).double()),
        ("softmax", "reduction", "sum"),
        ("huber", "delta", 0.1),
    ):
        changed, built = problems.make(name), problems.make(name)
        optimizer = build(kind, changed, TIGHT, damping=0.1)
        optimizer.step(changed.inputs, changed.targets)
        built.model.load_state_dict(changed.model.state_dict())
        setattr(changed.loss, option, value)
        built.loss = type(built.loss)(**{option: value})
        if method(kind).solves and not method(kind).tolerance:
            contract.check_verify(kind, optimizer, changed.inputs, changed.targets)
        a = optimizer.step(changed.inputs, changed.targets)
        b = build(kind, built, TIGHT, damping=0.1).step(built.inputs, built.targets)
        assert a.loss == b.loss, (name, option)


@every_second_order
def test_options_that_are_not_supported_are_refused_at_the_next_step(kind):
    """Which these are is in `test_losses.py`. A weight changed in place, or another loss, is seen as well."""
    for name, option, value in (
        ("softmax", "reduction", "none"),
        ("softmax", "label_smoothing", "much"),
        ("softmax", "ignore_index", 0.5),
        ("logistic-many", "weight", torch.ones(4).double()),
        ("logistic-many", "pos_weight", torch.tensor([3.0, -3.0, 1.0]).double()),
    ):
        problem = problems.make(name)
        optimizer = build(kind, problem)
        optimizer.step(problem.inputs, problem.targets)
        good = getattr(problem.loss, option)
        if option == "pos_weight":
            good, value = good.clone(), good.copy_(value)
        setattr(problem.loss, option, value)
        for call in (optimizer.step, optimizer.direction, optimizer.verify):
            with refused(optimizer, option):
                call(problem.inputs, problem.targets)
        setattr(problem.loss, option, good)
        assert optimizer.step(problem.inputs, problem.targets).accepted
    optimizer.loss = nn.SoftMarginLoss()
    with pytest.raises(TypeError, match="no rule for the loss SoftMarginLoss"):
        optimizer.step(problem.inputs, problem.targets)


# -- values out of range --------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    *(("lr", value) for value in (INF, NAN, -0.1, "0.1", True, None, torch.ones(2))),
    *(("momentum", value) for value in (1.5, 1.0, -0.1, NAN, "0.9", True)),
    *(("weight_decay", value) for value in (-1.0, INF, NAN, "0.1", True)),
    *(("accept", value) for value in (NAN, "0.1", True)),
    *(("damping", value) for value in (NAN, INF, -1.0, 0.0, True, "1", woodbury.LevenbergMarquardt, None)),
    *(("curvature_samples", value) for value in (NAN, "4", 1.5, 0, -3, 0.0, True)),
    *(("seed", value) for value in (1.0, "one", True)),
    *(("solver_tolerance", value) for value in (-1.0, NAN, INF, "tight", True)),
    *(("max_bytes", value) for value in (0, -1, NAN, INF, "1 GiB", True)),
    *(("capture", value) for value in ("no", 3)),
    *(("warm_start", value) for value in (1.5, -0.1, NAN, "0.9")),
    *(("max_iterations", value) for value in (0, 2.5, NAN, "many")),
    *(("progress", value) for value in (-1.0, NAN, "slow")),
    *(("refresh", value) for value in (0, 2.5, NAN, "often")),
    *(("decay", value) for value in (1.0, 1.5, -0.1, NAN, "0.9")),
    *(("blocks", "row"), ("solver", "lu"), ("fallback", "yes"), ("forward", 3), ("metric", "euclid")),
    *(("gram_dtype", torch.int32), ("gram_dtype", torch.float16), ("autocast", torch.float16)),
    *(("memory", value) for value in (-1, 1.5)),
    *(("guard", value) for value in (-1.0, NAN, "no", True)),
    *(("params", value) for value in (3, [nn.Parameter(torch.zeros(3))])),
]
OUT_OF_RANGE_OF_FIRST_ORDER = [
    *((name, value) for name in ("lr", "weight_decay", "eps") for value in (NAN, INF, -1.0, "0.1", True, None)),
    *(("momentum", value) for value in (NAN, INF, -1.0, "0.1", True, None)),
    *(("betas", (2.0, 0.9)), ("nesterov", True)),
]


@contract.over(OPTIMIZERS)
def test_values_out_of_range_raise_an_error_that_names_the_argument(kind):
    problem = problems.make("softmax")
    for name, value in OUT_OF_RANGE if kind in SECOND_ORDER else OUT_OF_RANGE_OF_FIRST_ORDER:
        if contract.taken(kind, {name: value}):
            with pytest.raises((ValueError, TypeError), match=f"(?i){name.removesuffix('s')}"):
                build(kind, problem, **{name: value})
    unknown = "has no argument 'dampening': help" if kind in SECOND_ORDER else "dampening"
    with pytest.raises(TypeError, match=unknown):
        build(kind, problem, dampening=0.0)


@every_second_order
def test_values_at_the_ends_of_their_ranges_are_taken(kind):
    for settings in (
        *({"accept": INF}, {"accept": -INF}, {"solver_tolerance": 0.0}, {"warm_start": 1.0}, {"seed": -5}),
        *({"lr": 0.0}, {"lr": 1}, {"lr": np.float32(0.5)}, {"lr": torch.tensor(0.5)}),
        *({"momentum": 0.0}, {"momentum": 0.999}, {"weight_decay": 0}),
        *({"damping": np.float32(0.5)}, {"damping": 3}),
    ):
        if contract.taken(kind, settings):
            problem = problems.make("softmax")
            assert torch.isfinite(build(kind, problem, **settings).step(problem.inputs, problem.targets).loss)


POLICIES_OUT_OF_RANGE = {
    "initial": (0.0, -1.0, NAN, INF, "1", True, 1e-30, 1e30),
    "boost": (0.9, NAN, INF, "2"),
    "drop": (0.0, 1.1, NAN, "0.5"),
    "threshold": (0.0, 0.5, -1.0, NAN, "0.2"),
    "floor": (-1.0, NAN, INF, "0"),
    "forgetting": (-0.1, 1.1, NAN, "slow"),
}


@pytest.mark.parametrize("field", POLICIES_OUT_OF_RANGE)
def test_fields_of_a_policy_out_of_range_raise_an_error_that_names_them(field):
    for value in POLICIES_OUT_OF_RANGE[field]:
        with pytest.raises((ValueError, TypeError), match=field):
            woodbury.LevenbergMarquardt(relative=field == "forgetting", **{field: value})
        if field == "floor":
            with pytest.raises((ValueError, TypeError), match=field):
                woodbury.Constant(1.0, floor=value)


@every_second_order
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_values_of_a_group_out_of_range_are_refused_at_the_next_step(kind, name):
    problem = problems.make("softmax")
    optimizer = build(kind, problem)
    optimizer.step(problem.inputs, problem.targets)
    good = optimizer.param_groups[0][name]
    for value in [value for option, value in OUT_OF_RANGE if option == name]:
        if (kind, name, value) == ("hf", "momentum", 1.0):
            continue  # which may start from the whole of its last p
        optimizer.param_groups[0][name] = value
        with refused(optimizer, rf"{name} \(of parameter group 0\)", (ValueError, TypeError)):
            optimizer.step(problem.inputs, problem.targets)
    optimizer.param_groups[0][name] = good
    assert optimizer.step(problem.inputs, problem.targets).accepted


@every_second_order
def test_models_without_a_trainable_parameter_or_a_single_output_are_refused(kind):
    batch = torch.randn(4, 3), torch.randn(4, 2)
    with pytest.raises(ValueError, match="no trainable parameter"):
        OPTIMIZERS[kind](nn.Linear(3, 2).requires_grad_(False), nn.MSELoss()).step(*batch)
    with pytest.raises(TypeError, match="must return a tensor, got tuple"):
        OPTIMIZERS[kind](Parts(lambda m, x: (m.layer(x), x), layer=nn.Linear(3, 2)), nn.MSELoss()).step(*batch)


# -- calls that mean another optimizer ------------------------------------------------------------------------


@contract.over(OPTIMIZERS)
def test_a_step_without_a_batch_says_what_to_write(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem)
    loss = problem.loss(problem.model(problem.inputs), problem.targets)
    for arguments_ in ((), (loss,), (lambda: loss,), (problem.model,)):
        with refused(optimizer, r"write optimizer\.step\(inputs, targets\)", (TypeError, ValueError)):
            optimizer.step(*arguments_)


@contract.over(OPTIMIZERS)
def test_a_constructor_called_as_those_of_torch_says_what_to_write(kind):
    make, model = OPTIMIZERS[kind], nn.Linear(2, 1)
    for arguments_, message in (
        ((model.parameters(), nn.MSELoss()), r"model itself \(an nn\.Module\), not its parameters"),
        ((list(model.parameters()), nn.MSELoss()), "not its parameters"),
        ((nn.Linear, nn.MSELoss()), "got the class Linear"),
        ((model, nn.MSELoss), r"write MSELoss\(\)"),
        ((model, F.mse_loss), r"got mse_loss: write torch\.nn\.MSELoss\(\)"),
        ((model, F.cross_entropy), r"write torch\.nn\.CrossEntropyLoss\(\)"),
        ((model, 0.1), "the second argument must be the loss"),
        ((nn.MSELoss(), model), "exchange them"),
        *([((model.parameters(),), "not its parameters: write")] if kind in SECOND_ORDER else []),
    ):
        with pytest.raises(TypeError, match=message):
            make(*arguments_)
