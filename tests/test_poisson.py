"""The example that solves a differential equation, in small form."""

import json

import pytest
import torch

import poisson
from fuzz.models import Parts


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


def test_the_residual_vanishes_at_the_solution_and_weighs_the_boundary():
    equation = poisson.EQUATIONS[2]
    batch, _ = equation.draw(40, "cpu")

    def exact(shift):
        return Parts(lambda m, points: equation.solution(points) + shift)

    torch.testing.assert_close(equation.residuals(exact(0.0), batch), torch.zeros(40, 1, dtype=torch.float64))
    shifted = equation.residuals(exact(0.1), batch)
    torch.testing.assert_close(shifted, torch.where(batch[1], 0.0, 0.1 * poisson.WEIGHT).double())


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


def test_a_figure_is_drawn_from_a_record(tmp_path):
    pytest.importorskip("matplotlib")
    curve = [(0.1, 1.0), (0.2, 0.1)]
    names = ("woodbury.fit", "torch Adam, lr 0.01", "torch Adam, lr 0.003", "torch L-BFGS, 1 x points")
    record = {"dimensions": 2, "device": "CPU", "runs": {name: [curve] for name in names}}
    path = tmp_path / "poisson-2.json"
    path.write_text(json.dumps(record))
    poisson.main(["--draw", str(path)])
    assert (tmp_path / "poisson-2.png").stat().st_size > 5000
