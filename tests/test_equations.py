"""The examples that solve differential equations by one call of fit: their equations, and a short run of each."""

import json
import math

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

import bounds
import burgers
import equations
import heat
import helmholtz
import poisson
import slabs
from fuzz.models import Parts

EXAMPLES = {"heat": heat, "burgers": burgers, "helmholtz": helmholtz}
every_example = pytest.mark.parametrize("name", EXAMPLES)
EPS = torch.finfo(torch.float64).eps


def derivatives(equation, points):
    """u (n,), its gradient (n, d) and Hessian (n, d, d), by autograd at one point at a time."""

    def u(point):
        return equation.solution(point.unsqueeze(0)).squeeze()

    values = [u(point) for point in points]
    gradients = [torch.autograd.functional.jacobian(u, point) for point in points]
    hessians = [torch.autograd.functional.hessian(u, point) for point in points]
    return tuple(map(torch.stack, (values, gradients, hessians)))


def left_side(name, points):
    """What the equation says is zero."""
    u, gradient, hessian = derivatives(EXAMPLES[name].EQUATION, points)
    bends = hessian.diagonal(dim1=1, dim2=2)
    if name == "heat":
        return gradient[:, 0] - 0.05 * (bends[:, 1] + bends[:, 2])
    if name == "burgers":
        return gradient[:, 0] + u * gradient[:, 1] - burgers.NU * bends[:, 1]
    return bends.sum(1) + (3 * math.pi) ** 2 * u


# The largest second derivative, times a number of roundings. Those of Burgers' front are about 1 / nu^2, and come
# from sums of 200 terms whose second derivatives are up to (pi / (pi nu))^2 as well.
BOUNDS = {"heat": 100 * EPS * 50, "helmholtz": 100 * EPS * 90, "burgers": 200 * EPS / burgers.NU**2}


@every_example
def test_the_solution_satisfies_the_equation(name):
    equation = EXAMPLES[name].EQUATION
    points = equations.points_in(20, equation.low, equation.high)
    assert float(left_side(name, points).abs().max()) <= BOUNDS[name]


@every_example
def test_residuals_of_the_solution_vanish_at_every_point_that_is_drawn(name):
    equation = EXAMPLES[name].EQUATION
    batch, targets = equation.draw(160)
    exact = Parts(lambda m, points: equation.solution(points))
    found = equation.residuals(exact, batch)
    assert targets is None and found.shape == (160, 1) and int(batch[1].sum()) == 120  # inside
    assert float(found.abs().max()) <= 100 * BOUNDS[name]  # the weight of residuals on the sides
    # and they do not vanish for something else
    other = nn.Linear(len(equation.low), 1).double()
    assert float(equation.residuals(other, batch).detach().abs().median()) > 0.01


def test_the_quadrature_of_burgers_solution_has_converged():
    points = equations.points_in(200, burgers.LOW, burgers.HIGH)
    # sums of 200 terms of both signs, below 1
    found, finer = burgers.solution(points), burgers.solution(points, 120)
    torch.testing.assert_close(found, finer, rtol=0, atol=bounds.rounding(200))


@every_example
def test_every_method_is_run_and_drawn(name, tmp_path, capsys, monkeypatch):
    fewer = {method: dict(list(settings.items())[-1:]) for method, settings in equations.METHODS.items()}
    monkeypatch.setattr(equations, "METHODS", fewer)
    monkeypatch.setattr(equations, "TEST_POINTS", 100)
    equation = EXAMPLES[name].EQUATION
    monkeypatch.setattr(EXAMPLES[name], "EQUATION", equation._replace(widths=(equation.widths[0], 8, 1)))
    threads = torch.get_num_threads()
    try:
        best = EXAMPLES[name].main(["--seconds", "0.05", "--seeds", "1", "--out", str(tmp_path / "figure.png")])
    finally:
        torch.set_num_threads(threads)
    assert [label.split(",")[0] for label in best] == ["woodbury.fit", "torch L-BFGS", "torch Adam"]
    for label, (curve,) in best.items():
        assert all(math.isfinite(error) for _, error in curve), label
        assert [spent for spent, _ in curve] == sorted(spent for spent, _ in curve) and curve[-1][0] >= 0.05
    assert capsys.readouterr().out.count("relative error") == 3
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_short_run_of_slabs(capsys):
    errors = slabs.main(2, 7)
    start = torch.cos(math.pi * slabs.PLACES)
    truth = slabs.advance(start)
    standing_still = float((start - truth).norm() / truth.norm())
    assert len(errors) == 2 and errors[0] < standing_still / 10
    assert capsys.readouterr().out.count("relative error") == 2


# -- Poisson's equation, with terms ---------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [2, 5])
def test_the_equations_hold_for_their_solutions(dimensions):
    equation = poisson.EQUATIONS[dimensions]
    (points, inside), targets = equation.draw(700, "cpu")
    assert targets is None and len(points) == 700
    share = equation.inside / (equation.inside + equation.boundary)
    assert abs(inside.sum() - 700 * share) <= 1
    faces = ((points == 0) | (points == 1)).any(1, keepdim=True)
    assert torch.equal(faces, ~inside)
    hessians = torch.func.vmap(torch.func.hessian(lambda x: equation.solution(x[None])[0, 0]))(points[:20])
    bends = hessians.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    torch.testing.assert_close(bends, -equation.force(points[:20]))


@pytest.mark.parametrize("dimensions", [2, 5])
def test_a_run_leaves_a_record(dimensions, tmp_path, capsys, monkeypatch):
    small = poisson.EQUATIONS[dimensions]._replace(widths=(dimensions, 8, 1))
    monkeypatch.setitem(poisson.EQUATIONS, dimensions, small)
    options = ["--seconds", "0.1", "--seeds", "1", "--alone", "--out", str(tmp_path)]
    poisson.main(["--dimensions", str(dimensions), *options])
    runs = json.loads((tmp_path / f"poisson-{dimensions}.json").read_text())["runs"]
    assert len(runs["woodbury.fit"][0]) >= 1 and "median" in capsys.readouterr().out


@pytest.mark.parametrize("method", [method for own in poisson.RIVALS.values() for method in own.values()])
def test_every_rival_takes_steps(method):
    curve = poisson.solve(method, poisson.EQUATIONS[2], "cpu", 0.05, seed=0)
    assert curve and all(error > 0 for _, error in curve)
