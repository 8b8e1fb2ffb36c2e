"""woodbury.least_squares: its steps and ends against dense formulas, scipy and each fit alone."""

import doctest
import math
from functools import cache
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from torch import nn

import bounds
import woodbury
from cases import all_pairs, every_pair
from checks import silence
from woodbury.least_squares import minimize as iteration
from woodbury.least_squares import trust_region
from woodbury.least_squares.residuals import LOSSES, Loss, Residuals

EPS = torch.finfo(torch.float64).eps
DIGITS = EPS ** (2 / 3)  # the last step of a fit moves the residuals by no more than this share of them
T = torch.linspace(0, 4, 40, dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def curve(b, t=T):
    return b[0] * torch.exp(-b[1] * t) + b[2]


def data(seed=0, outliers=0.0):
    noise = torch.randn(len(T), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = curve(double(3.0, 0.8, 0.5)) + 0.05 * noise
    y[::7] += outliers
    return y


def decay(y):
    return lambda b: curve(b) - y


def rosenbrock(b):
    return torch.stack([10 * (b[1] - b[0] ** 2), 1 - b[0]])


def freudenstein_roth(b):
    x, y = b
    return torch.stack([-13 + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y])


START = [1.0, 1.0, 0.0]


def close(a, b, tolerance):
    return (a - b).abs().max().item() <= tolerance * b.abs().max().item()


# ---------------------------------------------------------------------------------------------------- the step


def random_systems(m, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    J, f = torch.randn(5, m, p, generator=generator), torch.randn(5, m, generator=generator)
    scale = 10 ** (4 * torch.rand(5, p, generator=generator) - 2)
    return (J * scale.unsqueeze(1)).double(), f.double(), scale.double()


def step_of(factors, radius, p):
    """One step of five systems with p parameters."""
    radius, none = torch.full((5,), radius).double(), torch.zeros(5).double()
    return trust_region.solve(factors, radius, none, torch.full((5,), p))


def curvatures(J, scale, least):
    """S (5, p, p) in units of D with eigenvalues of J^T J + S between `least` and 4 times those of J^T J."""
    generator = torch.Generator().manual_seed(1)
    S = []
    for A, own in zip(J, scale, strict=True):
        L = torch.linalg.cholesky((A / own).T @ (A / own))
        Q = torch.linalg.qr(torch.randn(L.shape, generator=generator).double()).Q
        S.append(L @ Q @ torch.diag(torch.linspace(least - 1, 3, len(L)).double()) @ Q.T @ L.T)
    return torch.stack(S)


@pytest.mark.parametrize("m, p, bent", [(9, 4, False), (4, 4, False), (3, 5, False), (9, 4, True)])
@pytest.mark.parametrize("radius", [1e-3, 0.3, 1e3])
def test_step_solves_the_damped_normal_equations_inside_the_radius(m, p, bent, radius):
    """(H + damping D^2) q = -J^T f, H = J^T J, or J^T J + S where it is bent, and the model's curvature q^T H q.

    damping = 0 if |D q| <= radius, else |D q| is within a tenth of it.
    """
    J, f, scale = random_systems(m, p)
    factors, S = trust_region.factorize(J, f, scale, EPS), torch.zeros(5, p, p).double()
    if bent:
        S = curvatures(J, scale, least=0.2)
        factors = trust_region.bend(factors, S)
    step = step_of(factors, radius, p)
    for i in range(5):
        A, q, damping = J[i] / scale[i], step.scaled[i], step.damping[i].item()  # in units of D
        H = A.T @ A + S[i]
        least = torch.linalg.svdvals(A)[-1].item() ** 2 + damping
        if damping == 0 and not bent:
            dense = -torch.linalg.pinv(A) @ f[i]
        else:
            dense = -torch.linalg.solve(H + damping * torch.eye(p).double(), A.T @ f[i])
        if damping == 0:
            assert step.length[i] <= 1.1 * radius
        else:
            assert abs(step.length[i].item() / radius - 1) <= 0.1
        cancelled = float(A.norm() * f[i].norm() / (A.T @ f[i]).norm())  # of the sums in A^T f
        sweeps = min(m, p)  # of the SVD: one or two for each singular value
        bound = bounds.rounding(m * p, bounds.condition(A.T @ A, least) * cancelled, sweeps)
        if bent:  # H is formed from A: both conditions count
            damped = H + damping * torch.eye(p).double()
            bound = bounds.of_solve(damped, torch.linalg.eigvalsh(damped)[0]) * float(torch.linalg.cond(A)) ** 2
        assert close(q, dense, bound)
        assert step.length[i].item() == pytest.approx(q.norm().item(), rel=bounds.rounding(p))
        assert step.image[i].item() == pytest.approx((q @ H @ q).item(), rel=bound)
    assert (step.damping == 0).all() == (radius == 1e3)


def test_s_is_left_out_where_the_model_would_be_flat_or_curve_downwards():
    J, f, scale = random_systems(9, 4)
    A = J / scale.unsqueeze(1)
    L = torch.linalg.cholesky(A.mT @ A)
    bound = bounds.rounding(9, float(torch.linalg.cond(A).max()) ** 2)
    for least, used in ((-3.0, False), (-0.995, False), (-0.98, True)):
        change = torch.diag_embed(double(least, -0.5, 0.0, 2.0)).expand(5, 4, 4)
        s, V, c = trust_region.bend(trust_region.factorize(J, f, scale, EPS), L @ change @ L.mT)
        eye = torch.eye(4).double().expand(5, 4, 4)
        assert close(V.mT @ torch.diag_embed(s**2) @ V, L @ (eye + change if used else eye) @ L.mT, bound)
        gradient = (A.mT @ f.unsqueeze(-1)).squeeze(-1)
        assert close(((s * c).unsqueeze(1) @ V).squeeze(1), gradient, bound)  # which S leaves alone


def problem_of(function, x, limits=None):
    """One fit of parameters like x."""
    residuals = Residuals(function, (), x.shape, False, x.unsqueeze(0))
    return iteration.Problem(residuals, Loss("linear", 1.0), limits, None, 0.0, 0.0, 0.0, 10, None)


def begin(problem, x):
    rows = torch.arange(len(x))
    return iteration._begin(problem, x, problem.residuals(x, rows), problem.residuals.jacobian(x, rows))


@pytest.mark.parametrize("radius", [0.05, 5.0])
def test_step_to_bounds_predicts_what_the_linear_model_does(radius):
    """Both equations in the docstring of `_propose`, with the residuals f + J p of the model written out."""
    J, f, _ = random_systems(9, 4)
    J, f = J[0] / J[0].norm(dim=0), f[0]
    limits = iteration.Bounds(torch.full((1, 4), -0.04).double(), torch.full((1, 4), 0.03).double())
    problem = problem_of(lambda x: f + J @ x, torch.zeros(4).double(), limits)
    fits = begin(problem, torch.zeros(1, 4).double())
    fits.radius = double(radius)
    step = iteration._propose(problem, fits)
    p, size = step.p[0], f.square().sum()
    assert step.held.item() and (p >= limits.lower[0]).all() and (p <= limits.upper[0]).all()
    decrease = (size - (f + J @ p).square().sum()) / size
    assert step.predicted.item() == pytest.approx(decrease.item(), rel=bounds.of_decrease(1.0, decrease, 9))
    slope = f @ J @ p / size
    assert step.slope.item() == pytest.approx(slope.item(), rel=bounds.of_decrease(1.0, slope, 9))
    assert step.length.item() == pytest.approx((J.norm(dim=0) * p).norm().item(), rel=bounds.rounding(9))


def test_secants_find_what_the_hessian_has_beside_j_t_j():
    """S p = g(x + p) - g(x) - J^T J p after each update; all of S, for a quadratic cost, after p of them."""
    generator = torch.Generator().manual_seed(0)
    J, f = (torch.randn(*shape, generator=generator).double() for shape in ((1, 9, 3), (1, 9)))
    S = torch.randn(1, 3, 3, generator=generator).double()
    S = S + S.mT
    fits = begin(problem_of(lambda x: f[0] + J[0] @ x, torch.zeros(3).double()), torch.zeros(1, 3).double())
    yes, ratio = torch.ones(1, dtype=torch.bool), double(0.5)
    steps = torch.randn(3, 1, 3, generator=generator).double()
    bound = bounds.rounding(9, float((J.mT @ J).norm() / S.norm()))  # S p is the rest of a difference
    for p in steps:
        g = (f.unsqueeze(1) @ J).squeeze(1) + ((J.mT @ J + S) @ p.unsqueeze(-1)).squeeze(-1)
        fits.S = iteration._with_secant(fits, p, g, ratio, yes)
        assert close(fits.S @ p.unsqueeze(-1), S @ p.unsqueeze(-1), bound)
        assert close(fits.S, fits.S.mT, bounds.rounding(1))
    assert close(fits.S, S, bound * float(torch.linalg.cond(steps[:, 0])))


# ---------------------------------------------------------------------------------------------------- the fit


def path(function, start, **settings):
    points = []
    result = woodbury.least_squares(function, start, callback=points.append, **settings)
    return torch.stack(points), result


def test_fit_is_a_minimum_with_what_belongs_to_it():
    f = decay(data())
    result = woodbury.least_squares(f, START)
    J = torch.autograd.functional.jacobian(f, result.x)
    assert result.success and result.status == 2 and result.message == result["message"]
    assert torch.equal(result.fun, f(result.x)) and close(result.jac, J, bounds.rounding(1))
    assert result.cost == pytest.approx(0.5 * result.fun.square().sum().item(), rel=bounds.rounding(len(T)))
    # what is left of f in the columns of J is less than the last step took away
    assert (torch.linalg.qr(J).Q.T @ result.fun).norm() <= DIGITS * result.fun.norm()
    assert close(result.grad, J.T @ result.fun, 1.0) and result.optimality == result.grad.abs().max().item()
    assert result.active_mask.tolist() == [0, 0, 0]


OF_DECAY = sorted({*permutations([1e-7, 1.0, 1.0]), *permutations([1e5, 1.0, 1.0])})
OF_LARGE = (2**-10, 2**13), (2**17, 1)  # powers of 2, which round nothing, where residuals stay large
UNITS = [
    *((decay(data()), START, units) for units in OF_DECAY),
    *((freudenstein_roth, [0.5, -2.0], units) for units in OF_LARGE),
]


@pytest.mark.parametrize("f, start, units", UNITS)
def test_another_unit_for_a_parameter_takes_the_same_path(f, start, units):
    units = double(*units)
    points, result = path(f, start)
    others, same = path(lambda b: f(b * units), double(*start) / units)
    assert (same.nfev, same.njev, same.status) == (result.nfev, result.njev, result.status)
    assert close(others * units, points, 1e-6)
    assert f is freudenstein_roth or close(same.x * units, result.x, 10 * DIGITS)


def test_fit_whose_residuals_stay_large_ends_at_the_minimum():
    """The sum of the residuals f is 0 there and their difference least: y = (2 - sqrt(22)) / 3.

    J is singular: along one direction the Hessian is f f'' alone. The error is that of the gradient, eps |J| |f|.
    """
    y = (2 - math.sqrt(22)) / 3
    minimum = double(21 - 3 * y**2 + 8 * y, y)
    result = woodbury.least_squares(freudenstein_roth, [0.5, -2.0])
    assert result.success and close(result.x, minimum, 1000 * EPS)
    J = result.jac
    assert abs(torch.linalg.det(J)) <= 1e-10 * J.norm() ** 2


def test_fixed_scale_depends_on_units_and_is_that_of_minpack():
    optimize = pytest.importorskip("scipy.optimize")
    f, scales = decay(data()), double(2.0, 0.01, 30.0)
    points, result = path(f, START, x_scale=scales)
    steps = []

    def jacobian(b):
        steps.append(torch.tensor(b))
        return torch.autograd.functional.jacobian(f, steps[-1]).numpy()

    settings = {"jac": jacobian, "method": "lm", "x_scale": scales.numpy()}
    optimize.least_squares(lambda b: f(torch.tensor(b)).numpy(), START, **settings)
    moved = [points[0], *(b for a, b in pairwise(points) if not torch.equal(a, b))]
    assert len(steps) >= 6
    for own, other in zip(moved, steps[1:6], strict=False):
        assert close(own, other, 1e-9)
    plain, _ = path(f, START)
    assert not close(plain[:3], points[:3], 1e-2) and close(result.x, plain[-1], 1e-8)


def test_underdetermined_systems_are_solved():
    f = lambda b: torch.stack([b[0] * b[1] - 2, b[1] + b[2].exp() - 3])  # noqa: E731
    result = woodbury.least_squares(f, [1.0, 1.0, 0.5])
    assert result.success and result.fun.abs().max() <= 3 * bounds.rounding(1)  # of numbers up to 3


def test_parameters_and_residuals_keep_their_shapes():
    target = double(1, 2, 3, 4).reshape(2, 2)
    result = woodbury.least_squares(lambda A: (A @ A - target @ target).reshape(1, 2, 2), target + 0.1)
    assert result.x.shape == result.grad.shape == result.active_mask.shape == (2, 2)
    assert result.fun.shape == (1, 2, 2) and result.jac.shape == (4, 4)
    assert close(result.x @ result.x, target @ target, bounds.rounding(2))
    scalar = woodbury.least_squares(lambda b: b * b - 2, 1.0)
    assert scalar.x.shape == scalar.fun.shape == ()
    assert scalar.x.item() == pytest.approx(math.sqrt(2), rel=bounds.rounding(1))


@pytest.mark.parametrize("start", [START, tuple(START), double(*START), double(*START).numpy(), [1, 1, 0]])
def test_starts_of_all_kinds(start):
    assert woodbury.least_squares(decay(data()), start).x.dtype == torch.float64


def test_float32_fits_to_its_own_digits():
    """The minimum moves by J^+ times the rounding of data and residuals, some eps |y|."""
    y = data()
    exact = woodbury.least_squares(decay(y), START)
    t, y = T.float(), y.float()
    result = woodbury.least_squares(lambda b: curve(b, t) - y, torch.tensor(START))
    assert result.x.dtype == result.fun.dtype == result.jac.dtype == torch.float32 and result.success
    eps = torch.finfo(torch.float32).eps
    bound = 10 * eps * y.norm().item() * torch.linalg.pinv(exact.jac).norm(dim=1)
    assert ((result.x - exact.x).abs() <= bound).all()


def test_residuals_in_less_precision_than_the_parameters_set_the_tolerance():
    t, y = T.float(), data().float()
    result = woodbury.least_squares(lambda b: curve(b, t) - y, START)  # 0-dim b[0] does not promote t
    assert result.x.dtype == torch.float64 and result.success and result.nfev < 40


def test_a_point_that_is_not_finite_is_rejected():
    """From 10 the first step of log(b) leads to 10 - 10 log(10) < 0, where the logarithm is not a number."""
    points, result = path(torch.log, [10.0])
    assert result.success and result.x.item() == pytest.approx(1, rel=bounds.rounding(1))
    assert points[0].item() == 10.0 and torch.isfinite(points).all()


def kink(b):
    """Zero, with a derivative that autograd cannot give below 1/2: that of sqrt(0^2)."""
    above = b - 0.5
    return 0 * ((above + above.abs()) ** 2).sqrt()


def test_status_of_each_end():
    f = decay(data())
    stopped = woodbury.least_squares(f, START, max_nfev=3)
    assert (stopped.status, stopped.success, stopped.nfev) == (0, False, 3)
    assert woodbury.least_squares(lambda b: b - 1, [1.0]).status == 1
    looser = woodbury.least_squares(f, START, ftol=1e-3)
    assert looser.status == 2 and looser.nfev < woodbury.least_squares(f, START).nfev
    assert woodbury.least_squares(rosenbrock, [-1.2, 1.0], xtol=0.5).status == 3
    assert woodbury.least_squares(f, START, gtol=0.1).status == 1
    broken = woodbury.least_squares(lambda b: b + 3 + kink(b), [2.0])
    assert (broken.status, broken.success) == (-1, False) and "Jacobian" in broken.message


# ------------------------------------------------------------------------------------------ losses and bounds


@every_pair(C=[5.0, 0.3, 1e-3], name=list(LOSSES))
def test_gauss_newton_model_of_a_loss(name, C):
    """J^T f is the gradient of the cost, J^T J its Hessian where the function is linear and rho convex in f."""
    A, y, _ = random_systems(7, 3)
    A, y = A[0] / A[0].norm(dim=0), y[0]
    x = 0.1 * torch.ones(3, dtype=torch.float64)
    loss = Loss(name, C)

    def cost(x):
        return loss.cost((A @ x - y).unsqueeze(0))[0]

    f, J = (value[0] for value in loss.gauss_newton((A @ x - y).unsqueeze(0), A.unsqueeze(0)))
    assert close(J.T @ f, torch.func.grad(cost)(x), bounds.rounding(7))
    if C == 5.0:
        assert close(J.T @ J, torch.func.hessian(cost)(x), bounds.rounding(7))


def trf(f, start, **settings):
    optimize = pytest.importorskip("scipy.optimize")
    return optimize.least_squares(
        lambda b: f(torch.tensor(b)).numpy(), start, jac=lambda b: torch.func.jacrev(f)(torch.tensor(b)).numpy(),
        method="trf", x_scale="jac", ftol=1e-15, xtol=1e-15, gtol=1e-15, max_nfev=2000, **settings,
    )  # fmt: skip


def agrees_with_scipy(result, other):
    """The cost to rounding; x to where scipy sees the cost fall by 1e-15 of it: sqrt(1e-15 2 cost) / least s."""
    assert result.cost == pytest.approx(other.cost, rel=bounds.rounding(len(T)) + 1e-15)
    smallest = torch.linalg.svdvals(result.jac)[-1].item()
    assert (result.x - torch.tensor(other.x)).norm() <= 10 * math.sqrt(1e-15 * 2 * result.cost) / smallest
    assert result.active_mask.tolist() == other.active_mask.tolist()
    return True


@every_pair(f_scale=[0.1, 1.0], loss=list(LOSSES))
def test_robust_fits_are_those_of_scipy(loss, f_scale):
    f = decay(data(outliers=2.0))
    result = woodbury.least_squares(f, START, loss=loss, f_scale=f_scale)
    assert result.success and agrees_with_scipy(result, trf(f, START, loss=loss, f_scale=f_scale))


OF_DECAY_IN_BOUNDS = [
    *(((0, 0, 0), (2, 5, 5)), ((0, 1, 0), (10, 5, 0.4))),
    *(((0, 0, 0), (2, 0.5, 0.1)), ((3.5, 0, 0.6), (4, 3, 5))),
]
OF_ROSENBROCK_IN_BOUNDS = [((-2, -2), (0.5, 5)), ((-2, 1.5), (2, 3)), ((-2, -1), (2, 0.3))]


@pytest.mark.parametrize(
    "lower, upper, loss",
    [
        *((*own, loss) for own in OF_DECAY_IN_BOUNDS for loss in ("linear", "cauchy")),
        *((*own, "linear") for own in OF_ROSENBROCK_IN_BOUNDS),  # which begins on a bound
    ],
)
def test_fits_within_bounds_are_those_of_scipy(lower, upper, loss):
    lowest, highest = double(*lower), double(*upper)
    if len(lower) == 2:
        f, start = rosenbrock, torch.clamp(double(-1.2, 1.0), lowest, highest)
    else:
        f, start = decay(data(outliers=2.0)), torch.clamp(double(*START), lowest + 0.1, highest - 0.05)
    result = woodbury.least_squares(f, start, bounds=(lower, upper), loss=loss)
    other = trf(f, start.numpy(), bounds=(lower, upper), loss=loss)
    assert result.success and agrees_with_scipy(result, other) and result.active_mask.any()
    # on its bounds exactly
    at_lower, at_upper = result.active_mask < 0, result.active_mask > 0
    assert torch.equal(result.x[at_lower], lowest[at_lower])
    assert torch.equal(result.x[at_upper], highest[at_upper])
    # at a bound the gradient points outwards, and counts for nothing
    assert (result.active_mask * result.grad <= 0).all() and result.optimality <= 1e-8


def test_a_bound_that_is_not_reached_changes_nothing():
    f = decay(data())
    free, bounded = woodbury.least_squares(f, START), woodbury.least_squares(f, START, bounds=(-100, [100] * 3))
    assert torch.equal(free.x, bounded.x) and free.nfev == bounded.nfev
    assert not woodbury.least_squares(f, START, bounds=(None, None)).active_mask.any()


def test_function_is_computed_within_the_bounds_only():
    """By the look for lost derivatives, too."""

    def lost(b):
        return torch.stack([b[0] - 1, b[1].item() * b[0]])

    for function, start, lower, upper in (
        (rosenbrock, [-1.2, 0.2], [-2, -1], [2, 0.3]),
        (lost, [2, 3], [2, 1], [4, 3]),
    ):
        seen = []

        def f(b, function=function, seen=seen):
            seen.append(torch.func.debug_unwrap(b, recurse=True).detach().reshape(-1, 2))
            return function(b)

        with pytest.warns(RuntimeWarning, match=r"parameter\[1\]") if function is lost else silence():
            woodbury.least_squares(f, start, bounds=(lower, upper))
        points = torch.cat(seen)
        assert len(points) > 2 and (points >= double(*lower)).all() and (points <= double(*upper)).all()


# ---------------------------------------------------------------------------------------------- many fits at once


def many(count=12):
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    truth = double(1, 0.4, -0.5) + double(3, 1.5, 1) * draws
    y = torch.stack([curve(b) for b in truth])
    return y + 0.02 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


def curve_of(b, y):
    return curve(b) - y


def unmappable(b, y):
    return curve(b) - y if b[0].item() > -1e300 else b


IN_UNITS = {
    "plain": lambda of_x, of_f: {},
    "robust": lambda of_x, of_f: {"loss": "soft_l1", "f_scale": 0.1 * of_f},
    "bounded": lambda of_x, of_f: {"bounds": ([0, 0.5 * of_x, 0], 2.5 * of_x)},
    "fixed scale": lambda of_x, of_f: {"x_scale": [2.0 * of_x, 0.5 * of_x, of_x]},
}
SETTINGS = {name: make(1.0, 1.0) for name, make in IN_UNITS.items()} | {"few points": {"max_nfev": 7}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_batched_fits_are_those_of_each_alone(settings):
    y, starts = many(4), double(0.8, 1.2, 1.5, 1.9).unsqueeze(1) * double(1.0, 0.7, 0.1)
    each = [woodbury.least_squares(curve_of, starts[i], args=(y[i],), **settings) for i in range(4)]
    for function in (curve_of, unmappable):
        together = woodbury.least_squares(function, starts, args=(y,), batched=True, **settings)
        assert together.x.shape == (4, 3) and together.jac.shape == (4, 40, 3) and len(together.message) == 4
        assert together.nfev.unique().numel() > 1 or "max_nfev" in settings  # they do not end together
        for i, alone in enumerate(each):
            assert close(together.x[i], alone.x, 1e-9) and close(together.fun[i], alone.fun, 1e-9)
            assert together.cost[i].item() == pytest.approx(alone.cost, rel=1e-9)
            assert together.active_mask[i].tolist() == alone.active_mask.tolist()
            for name in ("nfev", "njev", "status", "message", "success"):
                assert together[name][i] == alone[name], name


def test_batched_fits_with_large_residuals_are_those_of_each_alone():
    """Beside one that goes to a solution, and needs no S."""
    starts = double(0.5, -2.0) + torch.linspace(-0.2, 0.2, 7, dtype=torch.float64).unsqueeze(1)
    starts = torch.cat([starts, double(5.0, 4.1).unsqueeze(0)])
    together = woodbury.least_squares(freudenstein_roth, starts, batched=True)
    for i, start in enumerate(starts):
        alone = woodbury.least_squares(freudenstein_roth, start)
        assert close(together.x[i], alone.x, 1e-12) and together.success[i]
    assert together.cost[-1] < 1e-20 < together.cost[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [SETTINGS[name] for name in ("plain", "robust", "bounded")])
def test_fits_on_a_gpu_are_those_on_the_cpu(settings):
    y, starts, t = many(), double(1.0, 0.7, 0.1).expand(12, 3), T.cuda()
    cpu = woodbury.least_squares(curve_of, starts, args=(y,), batched=True, **settings)
    on_gpu = lambda b, y: curve(b, t) - y  # noqa: E731
    gpu = woodbury.least_squares(on_gpu, starts.cuda(), args=(y.cuda(),), batched=True, **settings)
    assert gpu.x.is_cuda and gpu.jac.is_cuda and bool(gpu.success.all())
    assert close(gpu.x.cpu(), cpu.x, 1e-8)
    alone = woodbury.least_squares(lambda b: curve(b, t) - y[0].cuda(), starts[0].cuda(), **settings)
    assert close(alone.x.cpu(), cpu.x[0], 1e-8)


def test_batched_fits_may_have_bounds_of_their_own():
    y, starts = many(3), double(0.1, 1.0, 0.0).expand(3, 3)
    free = woodbury.least_squares(curve_of, starts, args=(y,), batched=True)
    upper = torch.full((3, 3), math.inf).double()
    upper[0, 0], upper[2, 0] = 0.9 * free.x[0, 0], 0.8 * free.x[2, 0]
    result = woodbury.least_squares(curve_of, starts, args=(y,), batched=True, bounds=(None, upper))
    assert result.active_mask.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert torch.equal(result.x[[0, 2], 0], upper[[0, 2], 0]) and close(result.x[1], free.x[1], 1e-9)


def test_a_fit_that_breaks_leaves_the_others_alone():
    def f(b, y):
        return b + y + kink(b)

    result = woodbury.least_squares(f, double(2, 2, 2).unsqueeze(1), args=(double(-1, 3, -2),), batched=True)
    assert result.status.tolist()[1] == -1 and result.success.tolist() == [True, False, True]
    assert result.x[[0, 2], 0].tolist() == pytest.approx([1.0, 2.0], rel=bounds.rounding(1))


# ------------------------------------------------------------------------------------- numbers of any size

FAR = {torch.float64: (1e-70, 1e70), torch.float32: (1e-25, 1e25)}


def scaled_decay(of_x, of_f, y, t=T):
    """The residuals of `decay`, in other units."""
    return lambda b: (curve(b / of_x, t) - y) * of_f


FAR_CASES = [
    (dtype, *case)
    for dtype, units in FAR.items()
    for case in all_pairs((1.0, *units), (1.0, *units), list(IN_UNITS))
    if torch.finfo(dtype).tiny ** 0.24 < case[1] / case[0] < torch.finfo(dtype).max ** 0.24
]
FROM_ZERO = [(torch.float64, 1e-30, 1e40, "from zero"), (torch.float32, 1e-25, 1.0, "from zero")]


def far_problem(dtype, case):
    """Data, times, start and settings."""
    start = torch.tensor([0.0] * 3 if case == "from zero" else [1.0, 1.0, 0.1], dtype=dtype)
    return data(outliers=1.0).to(dtype), T.to(dtype), start, IN_UNITS["plain" if case == "from zero" else case]


@cache
def fit_in_ordinary_units(dtype, case):
    y, t, start, settings = far_problem(dtype, case)
    return woodbury.least_squares(scaled_decay(1.0, 1.0, y, t), start, **settings(1.0, 1.0))


@pytest.mark.parametrize("dtype, of_x, of_f, case", [*FAR_CASES, *FROM_ZERO])
def test_fits_in_units_far_from_1(dtype, of_x, of_f, case):
    """The fit in ordinary units is that of scipy, and this one the same in other units."""
    of_x, of_f = (2.0 ** round(math.log2(unit)) for unit in (of_x, of_f))  # which rounds nothing
    (y, t, start, settings), plain = far_problem(dtype, case), fit_in_ordinary_units(dtype, case)
    other = woodbury.least_squares(scaled_decay(of_x, of_f, y, t), start * of_x, **settings(of_x, of_f))
    eps = torch.finfo(dtype).eps
    assert plain.success and close(other.x / of_x, plain.x, 1000 * eps ** (2 / 3))
    assert torch.equal(other.fun, scaled_decay(of_x, of_f, y, t)(other.x))
    assert torch.equal(other.active_mask, plain.active_mask)
    assert (other.success, other.nfev, other.status) == (plain.success, plain.nfev, plain.status)
    assert other.cost == pytest.approx(plain.cost * of_f * of_f, rel=1000 * eps)
    # the unit of derivatives may be no number of the type: then they are 0 or infinite
    expected = plain.jac.double() / of_x * of_f
    assert torch.allclose(other.jac.double(), expected.to(dtype).double(), 1000 * eps ** (2 / 3), atol=1e-300)
    assert not other.grad.isnan().any() and not math.isnan(other.optimality)
    if case == "from zero" and dtype == torch.float64:
        assert agrees_with_scipy(plain, trf(decay(data(outliers=1.0)), START))


@pytest.mark.parametrize(
    "of_x, of_f, batched, what",
    [
        (1.0, 1e-170, False, "residuals"),
        (1.0, 1e160, True, r"residuals\[0\]"),
        (1e-100, 1.0, False, r"derivatives\[0\]"),
        (1e100, 1.0, True, r"derivatives\[0, 0\]"),
    ],
)
def test_units_whose_squares_are_no_numbers_are_an_error(of_x, of_f, batched, what):
    start = (double(*START) * of_x).expand(2, 3) if batched else double(*START) * of_x
    with pytest.raises(ValueError, match=f"the {what} are of the size .*another unit"):
        woodbury.least_squares(scaled_decay(of_x, of_f, data()), start, batched=batched)


def test_each_fit_of_a_batch_may_have_its_own_units():
    units = double(1e-70, 1.0, 1e-60, 1e70, 1e-20)
    y, starts = many(5), double(1.0, 0.7, 0.1).expand(5, 3)

    def f(b, y, unit):
        return (curve(b / unit) - y) * unit

    together = woodbury.least_squares(f, starts * units[:, None], args=(y, units), batched=True)
    each = woodbury.least_squares(curve_of, starts, args=(y,), batched=True)
    assert close(together.x / units[:, None], each.x, 1e-8) and together.success.all()


@cache
def fit_of_squares():
    return woodbury.least_squares(decay(data(outliers=2.0)), START)


@every_pair(f_scale=[1e20, 1e120, 1e140], loss=[name for name in LOSSES if name != "linear"])
def test_a_scale_far_above_the_residuals_gives_least_squares(loss, f_scale):
    plain = fit_of_squares()
    result = woodbury.least_squares(decay(data(outliers=2.0)), START, loss=loss, f_scale=f_scale)
    assert result.success and close(result.x, plain.x, 10 * DIGITS)
    assert result.cost == pytest.approx(plain.cost, rel=bounds.rounding(len(T)))
    assert close(result.jac, plain.jac, 10 * DIGITS)


@every_pair(f_scale=[1e-6, 1e-70], loss=["soft_l1", "huber"])
def test_a_scale_far_below_the_residuals_gives_least_absolute_deviations(loss, f_scale):
    """Of a constant that is the median, and the cost C sum |f_i|."""
    y = double(0.0, 1.0, 2.5, 7.0, 100.0)
    result = woodbury.least_squares(lambda b: b - y, [3.0], loss=loss, f_scale=f_scale)
    assert result.x.item() == pytest.approx(2.5, abs=1e-4)
    assert result.cost == pytest.approx(f_scale * float((y - 2.5).abs().sum()), rel=1e-4)


@pytest.mark.parametrize("start, status", [([1.0, 1.0, 0.0], 0), ([3.0, 0.8, 0.5], 1)])
@pytest.mark.parametrize("batched", [False, True])
def test_one_evaluation_is_the_start(start, status, batched):
    seen, y = [], curve(double(3.0, 0.8, 0.5))
    x = [start, start] if batched else start
    result = woodbury.least_squares(decay(y), x, max_nfev=1, batched=batched, callback=seen.append)
    assert torch.equal(result.x, double(*start).expand_as(result.x)) and not seen
    for name, value in (("nfev", 1), ("njev", 1), ("status", status)):
        assert (torch.as_tensor(result[name]) == value).all()
    assert result.cost == pytest.approx(0.5 * float((curve(double(*start)) - y).square().sum()))


def of_tensors(b, y, scale):
    return (curve(b) - y) * scale


def of_arrays(b, y, scale):
    return (curve(b) - torch.as_tensor(y)) * torch.as_tensor(scale)


def by_numbers(b, y, scale):
    return of_arrays(b, y, scale) if b[0].item() > -1e300 else b


@pytest.mark.parametrize("function", [of_tensors, of_arrays, by_numbers])
def test_arrays_are_shared_out_over_a_batch_like_tensors(function):
    y, starts, scale = many(6), double(1.0, 0.7, 0.1).expand(6, 3), torch.arange(1, 7)
    tensors = woodbury.least_squares(function, starts, args=(y, scale), batched=True)
    for arrays in ((y.numpy(), scale.numpy()), (y, scale.numpy()), (y.numpy(), scale)):
        result = woodbury.least_squares(function, starts.numpy(), args=arrays, batched=True)
        assert torch.equal(result.x, tensors.x) and result.fun.shape == (6, 40)
    with pytest.raises(ValueError, match=r"args\[0\] has the shape \(5, 40\)"):
        woodbury.least_squares(function, starts, args=(y.numpy()[:5], scale), batched=True)


# ------------------------------------------------------------------------------------- functions of all kinds


class Cube(torch.autograd.Function):
    """A cube that torch.func cannot transform."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


@pytest.mark.parametrize("batched", [False, True])
def test_function_that_torch_func_cannot_transform_gets_the_same_fit(batched):
    start = double(1.5, 2.5).unsqueeze(0) if batched else double(1.5, 2.5)
    plain = woodbury.least_squares(lambda b: b**3 - double(8, 27), start, batched=batched)
    custom = woodbury.least_squares(lambda b: Cube.apply(b) - double(8, 27), start, batched=batched)
    assert close(custom.x, plain.x, bounds.rounding(1)) and close(custom.jac, plain.jac, bounds.rounding(1))


def test_function_may_compute_derivatives_itself_and_the_result_holds_no_graph():
    """The minimum of a quartic, where its derivative by autograd is zero, with or without gradients outside."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def f(b):
        b = b if b.requires_grad else b.detach().requires_grad_()
        return scale * torch.autograd.grad((b**4 / 4 - 2 * b).sum(), b, create_graph=True)[0]

    for outside in (False, True):
        with torch.set_grad_enabled(outside):
            result = woodbury.least_squares(f, [1.0])
        assert result.x.item() == pytest.approx(2 ** (1 / 3), rel=bounds.rounding(1))
        assert not any(value.requires_grad for value in (result.x, result.fun, result.jac, result.grad))


# --------------------------------------------------------------------------------------------------- messages


def nan_at_third(b):
    return torch.stack([b[0], b[1], torch.sqrt(b[0] - 10)])


y3 = torch.zeros(3, 40, dtype=torch.float64)
BAD = [
    ({"function": 3}, TypeError, "function must be a function of the parameters, got int"),
    ({"start": "abc"}, TypeError, "start must be a tensor, an array or a list"),
    ({"start": 1.0, "batched": True}, ValueError, "starts along its first axis"),
    ({"bounds": 3}, ValueError, r"bounds must be a pair \(lower, upper\), got 3"),
    ({"ftol": -1}, ValueError, "ftol must not be negative"),
    ({"max_nfev": 0}, ValueError, "max_nfev must be a whole number from 1 on"),
    ({"function": lambda b: (b, b)}, TypeError, "tensor of residuals, got tuple; torch.stack"),
    ({"function": lambda b: b[:0]}, ValueError, r"one residual or more .* shape \(0,\)"),
    ({"function": lambda b: b.detach()}, ValueError, "do not depend on the parameters .* without detach"),
    ({"function": lambda b: np.exp(b) - 1}, TypeError, r"must compute in torch, .* write torch\.exp for np\.exp"),
    ({"function": lambda b: b * np.ones(2)}, TypeError, r"torch\.as_tensor\(data\) for arrays"),
    ({"function": nan_at_third}, ValueError, r"residual\[2\] is not finite at the start; start elsewhere"),
    ({"function": lambda b: (b - double(0, 2)).sqrt()}, ValueError, r"derivative in parameter\[1\] is not finite"),
    ({"start": [1.0, math.nan]}, ValueError, r"start\[1\] is not finite"),
    ({"start": []}, ValueError, "holds no parameters"),
    ({"start": torch.ones(2, dtype=torch.bfloat16)}, ValueError, "float32 or float64, got torch.bfloat16"),
    ({"bounds": (0, 0.5)}, ValueError, r"start\[0\] = 1 is outside its bounds 0 to 0.5; start inside"),
    ({"bounds": ([0, 3], 4)}, ValueError, r"start\[1\] = 2 is outside its bounds 3 to 4"),
    ({"bounds": ([0, 3], [1, 3])}, ValueError, r"lower bound\[1\] is not below the upper"),
    ({"bounds": ([0, 0, 0], 9)}, ValueError, r"the lower bound must be .* shape \(2,\) of start"),
    ({"x_scale": "auto"}, ValueError, 'x_scale must be "jac" or positive numbers'),
    ({"x_scale": [1.0, 0.0]}, ValueError, r"x_scale\[1\] is not a positive number"),
    ({"loss": "squared"}, ValueError, "loss must be one of .*'huber'"),
    ({"loss": "huber", "f_scale": 0}, ValueError, "f_scale must not be less than 1e-75, got 0"),
    ({"start": torch.ones(2, 3), "batched": True, "args": (y3,)}, ValueError, r"args\[0\] has .* \(3, 40\)"),
    ({"function": nan_at_third, "start": [[11.0, 1], [1, 1]], "batched": True}, ValueError, r"residual\[1, 2\] i"),
    ({"start": [[1.0], [5.0]], "batched": True, "bounds": (0, 2)}, ValueError, r"start\[1, 0\] = 5 is outside"),
    ({"function": lambda b: 1 / 0}, ZeroDivisionError, ""),  # errors of the function itself come through
]  # fmt: skip


@pytest.mark.parametrize("arguments, kind, message", BAD, ids=[message[:30] for _, _, message in BAD])
def test_errors_name_the_argument(arguments, kind, message):
    arguments = {"function": lambda b, *_: b - 1, "start": [1.0, 2.0], **arguments}
    with pytest.raises(kind, match=message):
        woodbury.least_squares(**arguments)


def test_a_parameter_whose_derivative_is_lost_is_warned_of():
    t = torch.linspace(0, 1, 20, dtype=torch.float64)
    for lost in (lambda b: b.item(), lambda b: b.detach(), lambda b: torch.tensor(b.tolist())):
        with pytest.warns(RuntimeWarning, match=r"change with parameter\[1\] of start, .* without item"):
            woodbury.least_squares(lambda b, lost=lost: lost(b[1]) * torch.exp(-b[0] * t) - 2, [1.0, 3.0])
    batch = {"start": [[1.0, 3.0], [2.0, 4.0]], "batched": True, "max_nfev": 1}
    with pytest.warns(RuntimeWarning, match=r"parameter\[1\]"):
        woodbury.least_squares(lambda b: b[1].detach() * t - b[0], **batch)
    right = (lambda b: t - b[0], lambda b: b[1] ** 2 * t - b[0], lambda b: b[1].abs() + t - b[0])
    for function in right:  # without the parameter, and with a derivative of zero at zero
        with silence(RuntimeWarning):
            woodbury.least_squares(function, [1.0, 0.0])


def test_docstring_example_runs():
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(woodbury.least_squares, globs={"torch": torch, "woodbury": woodbury}):
        assert test.examples
        runner.run(test)
    assert runner.failures == 0
