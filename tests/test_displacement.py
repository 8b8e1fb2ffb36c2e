"""The model at theta + p without forming p, against one with its parameters replaced; derivatives along p."""

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from woodbury.model.capture import call_model, capture
from woodbury.model.plan import plan_layers
from woodbury.quadratic.displacement import Displacement
from woodbury.taylor import derivatives_along


def test_trial_pass_does_not_read_the_weights_of_the_first_layer():
    problem = problems.make("softmax")
    plan = plan_layers(problem.model, dict(problem.model.named_parameters()), False)
    held, rows = capture(plan, call_model, problem.inputs, problems.N), woodbury.rows(*problem)
    rows.gram()  # leaves v V^T + 1 behind
    p = Displacement(plan, rows, torch.randn(rows.row_count, dtype=torch.float64))
    with torch.no_grad():
        expected = p.outputs_on(held)
        problem.model[0].weight.fill_(torch.nan)
        torch.testing.assert_close(p.outputs_on(held), expected)


# -- derivatives along a direction ----------------------------------------------------------------------


STEP = 1e-3


def differences(function, point, direction, step):
    """f'[d] and f''[d, d] by central differences."""
    plus, minus = function(point + step * direction), function(point - step * direction)
    return (plus - minus) / (2 * step), (plus - 2 * function(point) + minus) / step**2


def draw(*shape):
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(6), nn.LayerNorm((2, 3), bias=False), nn.LayerNorm(3, elementwise_affine=False), nn.Tanh()],
)
def test_first_and_second_derivatives_equal_differences(module):
    module = module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    shape = getattr(module, "normalized_shape", (6,))
    point, direction = draw(4, *shape)
    value, first, second = (tensor.detach() for tensor in derivatives_along(module, point, direction))
    # without the module's own layer norm, which is computed by other operations here
    assert reference.relative_error(value, module(point).detach()) <= bounds.rounding(point.numel())
    with torch.no_grad():
        near, far = (differences(module, point, direction, step) for step in (STEP, 2 * STEP))
    for ours, theirs, further in zip((first, second), near, far, strict=True):
        # errors grow with the square of the step: this is three times that of the nearer one, and rounding
        bound = (theirs - further).abs().max() + 100 * torch.finfo(torch.float64).eps / STEP**2
        assert float((ours - theirs).abs().max()) <= float(bound) < 0.01 * float(theirs.abs().max())


def test_nested_dictionaries_have_derivatives_too():
    point, direction = ({"a": a, "b": [2 * a]} for a in draw(3))
    value, first, second = derivatives_along(lambda x: {"p": x["a"] * x["b"][0] ** 2}, point, direction)
    a, d = point["a"], direction["a"]  # 4 (a + t d)^3
    for ours, theirs in ((value, 4 * a**3), (first, 12 * a**2 * d), (second, 24 * a * d**2)):
        assert reference.relative_error(ours["p"], theirs) <= bounds.rounding(len(a))


@pytest.mark.parametrize(
    "function",
    [
        *(torch.det, torch.linalg.det, lambda x: x.logdet(), lambda x: torch.linalg.slogdet(x)[1]),
        *(lambda x: torch.linalg.solve(x, x), nn.InstanceNorm1d(3)),
    ],
)
def test_functions_that_torch_gets_wrong_raise(function):
    point, direction = draw(2, 3, 3)
    point = point @ point.mT + torch.eye(3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="wrong second derivative of"):
        derivatives_along(function, point, direction)
