"""Do samples mix? Looks near the solution of an equation, where residuals are rounding errors of large terms."""

import warnings

import pytest
import torch
from torch import nn

import woodbury
from woodbury.quadratic.passes import Passes

PI = torch.pi


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def solution(x):
    return torch.sin(PI * x[:, :1]) * torch.sin(PI * x[:, 1:])


def first_derivatives(value, x):
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0].split(1, dim=1)


def cubic_by_func(model, x):
    """-Lap u + u^3 = f."""
    second = torch.func.vmap(torch.func.hessian(lambda point: model(point).squeeze()))(x)
    u, v = model(x), solution(x)
    return u**3 - second.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) - v**3 - 2 * PI**2 * v


def cubic_by_laplacian(model, x):
    (u, _, second), v = woodbury.laplacian(model, x), solution(x)
    return u**3 - second - v**3 - 2 * PI**2 * v


def helmholtz(model, x):
    """Lap u + 9 u = f."""
    u, _, second = woodbury.laplacian(model, x)
    return second + 9 * u - (9 - 2 * PI**2) * solution(x)


def heat(model, x):
    """u_t = u_xx + f."""
    _, gradient, second = woodbury.laplacian(model, x, weights=(1, 0))
    return gradient[:, 0, 1:] - second - torch.sin(PI * x[:, :1])


def burgers(model, x):
    """u_t + u u_x = 0.1 u_xx + f, by ordinary autograd."""
    x = x.clone().requires_grad_()
    u = model(x)
    u_x, u_t = first_derivatives(u, x)
    u_xx, _ = first_derivatives(u_x, x)
    return u_t + u * u_x - 0.1 * u_xx - 10 * solution(x).detach()


def korteweg_de_vries(model, x):
    """u_t + 6 u u_x + u_xxx = f, by ordinary autograd."""
    x = x.clone().requires_grad_()
    u = model(x)
    u_x, u_t = first_derivatives(u, x)
    u_xx, _ = first_derivatives(u_x, x)
    u_xxx, _ = first_derivatives(u_xx, x)
    return u_t + 6 * u * u_x + u_xxx - 10 * solution(x).detach()


EQUATIONS = [cubic_by_func, cubic_by_laplacian, helmholtz, heat, burgers, korteweg_de_vries]


@pytest.fixture
def look_at_every_pass(monkeypatch):
    monkeypatch.setattr(Passes, "_is_due", lambda *_: True)


def points():
    return torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("equation", EQUATIONS, ids=lambda equation: equation.__name__)
def test_residuals_down_to_rounding_are_not_taken_for_mixed_samples(equation, look_at_every_pass):
    model, data = network(), (points(), None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*samples")
        fit = woodbury.fit(model, nn.MSELoss(), data, forward=equation, tolerance=1e-24, steps=40, progress=False)
        assert fit.reason == "tolerance"
        # and where the first look is one at the solution
        woodbury.fit(model, nn.MSELoss(), data, forward=equation, steps=2, progress=False)


@pytest.mark.parametrize(("equation", "method"), [(cubic_by_laplacian, None), (cubic_by_func, "func")])
def test_forward_mode_and_torch_func_are_not_given_up_near_the_solution(equation, method):
    model, settings = network(), {"forward": equation, "fallback": "autograd"}
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch(), **settings)
    while optimizer.step(points(), None).loss > 1e-24:
        pass
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch(), **settings)
    for _ in range(2):
        optimizer.step(points(), None)
    findings = optimizer._problems.structure.read(model, optimizer.param_groups).findings
    assert findings.forward_order == 2
    assert findings.fallback_method == method


class Mixing:
    """Residuals that hold a share of the mean of the batch, which no gradient shows."""

    def __init__(self, share):
        self.share = share

    def __call__(self, model, x):
        value = model(x) - solution(x)
        return value - self.share * model(x).detach().mean()


def test_a_small_share_of_other_samples_is_refused_at_the_first_step_even_at_a_solution():
    model = network()
    woodbury.fit(model, nn.MSELoss(), (points(), None), forward=Mixing(0.0), tolerance=1e-20, progress=False)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), forward=Mixing(1e-5))
    with pytest.raises(ValueError, match="mixes the samples of a batch"):
        optimizer.step(points(), None)


@pytest.mark.parametrize("subset", [None, [4, 1, 2]], ids=["whole", "part"])
def test_samples_that_mix_after_a_first_look_are_told_once(subset, look_at_every_pass):
    equation = Mixing(0.0)
    optimizer = woodbury.GaussNewton(network(), nn.MSELoss(), damping=0.1, forward=equation)
    optimizer.step(points(), None, subset=subset)
    equation.share = 0.1
    with pytest.warns(RuntimeWarning, match="mixes the samples of a batch.*they may be wrong") as told:
        for _ in range(3):
            optimizer.step(points(), None, subset=subset)
    assert len(told) == 1
