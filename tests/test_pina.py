"""PINA's solver with Gauss-Newton steps: a step against dense matrices of its own losses, whole runs, refusals."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from checks import refused, silence
from woodbury._vector import flatten

pytest.importorskip("lightning")
pina = pytest.importorskip("pina")

from pina import Condition, LabelTensor, Trainer  # noqa: E402
from pina.domain import CartesianDomain  # noqa: E402
from pina.equation import Equation, SystemEquation  # noqa: E402
from pina.operator import grad, laplacian  # noqa: E402
from pina.problem import InverseProblem, SpatialProblem  # noqa: E402
from pina.weighting import ScalarWeighting, SelfAdaptiveWeighting  # noqa: E402

from woodbury.pina import PINN  # noqa: E402

SILENT = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
BOX = CartesianDomain({"x": [0, 1], "y": [0, 1]})
KNOWN = LabelTensor(torch.tensor([[0.2, 0.3], [0.5, 0.5], [0.7, 0.1]], dtype=torch.float64), ["x", "y"])


@pytest.fixture(autouse=True)
def double():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(default)


def values(points):
    found = torch.sin(3 * points["x"]) * torch.sin(3 * points["y"])
    return LabelTensor(found.as_subclass(torch.Tensor), ["u"])


def poisson(x, u, unknown):
    return laplacian(u, x, components=["u"], d=["x", "y"]) + unknown["rate"] * values(x)


def slopes(x, u, unknown):
    return grad(u, x, components=["u"], d=["x"]) * unknown["rate"]


def problem(equation=None):
    """The rate, 18, is unknown; three values are known, and the edge."""

    class Poisson(SpatialProblem, InverseProblem):
        output_variables, spatial_domain = ["u"], BOX
        unknown_parameter_domain = CartesianDomain({"rate": [10, 30]})
        domains: ClassVar = {"inside": BOX, "edge": BOX.partial()}
        conditions: ClassVar = {
            "inside": Condition(domain="inside", equation=equation or Equation(poisson)),
            "edge": Condition(domain="edge", equation=Equation(lambda x, u: u - values(x))),
            "known": Condition(input=KNOWN, target=values(KNOWN)),
        }

    found = Poisson()
    found.discretise_domain(n=8, mode="grid", domains=["inside"])  # 64 points
    found.discretise_domain(n=8, mode="grid", domains=["edge"])
    return found


def network():
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))


@pytest.mark.parametrize("equation", [None, SystemEquation([poisson, slopes], reduction=None)], ids=["one", "two"])
def test_the_rows_are_those_of_the_losses_of_pina(equation):
    weights = {"inside": 0.5, "edge": 20.0}
    solver = PINN(problem(equation), network(), weighting=ScalarWeighting(weights))
    seen = {}
    trainer = Trainer(solver, max_epochs=1, **SILENT)
    solver.configure_optimizers()
    optimizer = solver.gauss_newton
    solver.configure_optimizers = lambda: None
    optimizer.step = lambda *data: seen.update(batch=data)
    trainer.train()
    residuals, conditions = [], solver.problem.conditions
    for name, condition in conditions.items():
        points = {"input": condition.input.clone()}
        if name == "known":
            points["target"] = condition.target
        residuals.append(condition.evaluate(points, solver).as_subclass(torch.Tensor))
    shares = [weights.get(name, 1) for name in conditions]
    B, g = reference.of_squares(residuals, shares, list(optimizer.model.parameters()))
    damping = 0.1
    expected = torch.linalg.solve(B + damping * torch.eye(len(g)), -g)
    settings = {"damping": damping, "forward": optimizer.forward, "fallback": "autograd"}
    plain = woodbury.GaussNewton(optimizer.model, nn.MSELoss(), **settings)
    p = flatten(plain.direction(*seen["batch"]))
    assert reference.relative_error(p, expected) <= bounds.of_solve(B, damping)


def test_a_run_finds_the_solution_and_the_unknown():
    given = problem()
    solver = PINN(given, network())
    trainer = Trainer(solver, max_epochs=100, **SILENT)
    with silence(UserWarning, ".*no optimizer"):
        trainer.train()
    assert float(trainer.callback_metrics["train_loss"]) < 0.01
    assert set(trainer.callback_metrics) >= {"inside_loss", "edge_loss", "known_loss"}
    assert abs(float(given.unknown_parameters["rate"]) - 18) < 0.5
    assert float((solver(KNOWN) - values(KNOWN)).abs().max()) < 0.05 and trainer.global_step == 100


def test_what_cannot_be_taken_is_named():
    with pytest.raises(ValueError, match="SelfAdaptiveWeighting change"):
        PINN(problem(), network(), weighting=SelfAdaptiveWeighting())
    with pytest.raises(ValueError, match="not a mean of squares"):
        PINN(problem(), network(), loss=nn.L1Loss())
    with pytest.raises(TypeError, match="its own optimizer: leave out optimizer"):
        PINN(problem(), network(), optimizer=None)
    solver = PINN(problem(Equation(lambda x, u, p: u / 0)), network())
    with refused(solver.model, "the loss is"):
        Trainer(solver, max_epochs=1, **SILENT).train()


def test_the_script_of_the_page_runs():
    from test_readme import README, blocks

    _, after = blocks(README.parent / "docs" / "pina.md", "py")
    names = {"problem": problem(), "model": network(), "Trainer": lambda *a, **k: Trainer(*a, **k, **SILENT)}
    exec(after.replace("max_epochs=1000", "max_epochs=2"), names)
    assert names["trainer"].global_step == 2
