"""The example that solves a differential equation, in small form."""

import json

import pytest
import torch

import poisson


@pytest.mark.parametrize("dimensions", [2, 5])
def test_the_equations_hold_for_their_solutions(dimensions):
    equation = poisson.EQUATIONS[dimensions]
    points, inside = poisson.draw_points(equation, "cpu")
    assert inside.sum() == equation.inside and len(points) == equation.inside + equation.boundary
    faces = ((points == 0) | (points == 1)).any(1)
    assert torch.equal(faces, ~inside)
    hessians = torch.func.vmap(torch.func.hessian(lambda x: equation.solution(x[None])[0]))(points[:20])
    bends = hessians.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(bends, -equation.force(points[:20]))
    model = poisson.network(equation.widths, "cpu")
    hessians = torch.func.vmap(torch.func.hessian(lambda x: model(x)[0]))(points[:20])
    torch.testing.assert_close(poisson.laplacian(model, points[:20]), hessians.diagonal(dim1=1, dim2=2).sum(1))


@pytest.mark.parametrize("dimensions, points, steps", [(2, "0.2", "12"), (5, "0.02", "8")])
def test_a_few_steps_lower_the_error_and_leave_a_record(dimensions, points, steps, tmp_path, capsys):
    options = ["--dimensions", str(dimensions), "--points", points, "--steps", steps, "--rates", "1e-3"]
    poisson.main([*options, "--out", str(tmp_path)])
    curves = json.loads((tmp_path / f"poisson-{dimensions}.json").read_text())["curves"]
    errors = [error for _, error in curves["Gauss-Newton"]]
    assert len(errors) == int(steps)
    assert errors[-1] < 0.5 * errors[0]
    assert "Gauss-Newton" in capsys.readouterr().out


def test_a_figure_is_drawn_from_a_record(tmp_path):
    pytest.importorskip("matplotlib")
    curve = [(0.1, 1.0), (0.2, 0.1)]
    record = {"dimensions": 2, "device": "CPU", "goal": 1e-4, "curves": {"Gauss-Newton": curve, "Adam": curve}}
    path = tmp_path / "poisson-2.json"
    path.write_text(json.dumps(record))
    poisson.main(["--draw", str(path)])
    assert (tmp_path / "poisson-2.png").stat().st_size > 5000
