"""The model at theta + p without forming p, against the model with its parameters replaced."""

import pytest
import torch

import problems
import woodbury
from woodbury.model.capture import call_model, capture
from woodbury.model.plan import plan_layers
from woodbury.quadratic.displacement import Displacement


def setting(name):
    problem = problems.make(name)
    plan = plan_layers(problem.model, dict(problem.model.named_parameters()), False)
    held = capture(plan, call_model, problem.inputs, problems.N)
    rows = woodbury.rows(*problem)
    rows.gram()  # leaves v V^T + 1 behind
    return problem, plan, held, rows


@pytest.mark.parametrize("name", ["softmax", "squared-no-bias", "in-place", "residual"])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_trial_pass_equals_the_model_at_theta_plus_p(name, base, captured):
    """z(v) + (v V^T + 1) Hbar, and theta bit-identical afterwards."""
    problem, plan, held, rows = setting(name)
    parameters = plan.parameters
    c = torch.randn(rows.row_count, dtype=torch.float64)
    start = {key: torch.randn_like(p) for key, p in parameters.items()} if base else None
    p = Displacement(plan, rows, c)
    if start is not None:
        p = Displacement.of(plan, plan.space.pack(start) - rows.rmatvec(c))
    shifted = {key: q.detach() + p.dense()[key] for key, q in parameters.items()}
    expected = torch.func.functional_call(problem.model, shifted, (problem.inputs,)).detach()
    before = {key: q.detach().clone() for key, q in parameters.items()}
    with torch.no_grad():
        if captured:
            outputs = p.outputs_on(held)
        else:
            with p.applied(plan):
                outputs = problem.model(problem.inputs)
    torch.testing.assert_close(outputs, expected)
    assert all(torch.equal(before[key], q) for key, q in parameters.items())
    assert not any("forward" in vars(module) for module in problem.model.modules())


def test_trial_pass_does_not_read_the_weights_of_the_first_layer():
    problem, plan, held, rows = setting("softmax")
    p = Displacement(plan, rows, torch.randn(rows.row_count, dtype=torch.float64))
    with torch.no_grad():
        expected = p.outputs_on(held)
        problem.model[0].weight.fill_(torch.nan)
        torch.testing.assert_close(p.outputs_on(held), expected)
