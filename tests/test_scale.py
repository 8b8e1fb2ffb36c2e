"""Columns in other units as a layer: what it maps to, that it is saved, and that nothing else changes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from checks import told

network = partial(problems.network, 3, 6, 1)


def table(samples=40, seed=0):
    """Inputs and targets in units that people have."""
    draws = torch.Generator().manual_seed(seed)
    u = 2 * torch.rand(samples, 3, generator=draws, dtype=torch.float64) - 1
    x = torch.stack([2000 + 20 * u[:, 0], 1e-3 * u[:, 1], 1e5 + 1e4 * u[:, 2]], 1)
    return x, 5e4 + 3e3 * (torch.sin(2 * u[:, :1]) * u[:, 1:2] + u[:, 2:])


def scaled_model(x, y, seed=0):
    return nn.Sequential(woodbury.Scale.inputs(x), network(seed=seed), woodbury.Scale.targets(y))


@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist, problems.Table])
def test_inputs_go_to_one_and_targets_come_from_unit_scale(form):
    x, y = table()
    first, last = woodbury.Scale.inputs(form(x)), woodbury.Scale.targets(form(y))
    low, high = x.numpy().min(0), x.numpy().max(0)
    expected = (x.numpy() - (low + high) / 2) / ((high - low) / 2)
    size = np.abs(x.numpy()).max(0) / (high - low)  # what the rounding of the data does to the result
    assert (np.abs(first(x).numpy() - expected) <= bounds.rounding(1, size)).all()
    z = torch.tensor([[-1.0], [0.0], [2.0]], dtype=torch.float64)
    by_hand = y.numpy().mean() + y.numpy().std() * z.numpy()
    np.testing.assert_allclose(last(z).numpy(), by_hand, rtol=bounds.rounding(len(y)))


def test_constant_columns_become_zero_and_constant_targets_stay():
    x = torch.full((5, 2), 0.1, dtype=torch.float64)
    x[:, 1] = 1e9 + torch.tensor([0.0, 1e-7, 0.0, 0.0, 1e-7])  # rounding
    assert woodbury.Scale.inputs(x)(x).abs().max() <= 1e-6
    assert torch.equal(woodbury.Scale.targets(x[:, 0])(torch.zeros(3)), torch.full((3,), 0.1))


def test_the_type_of_floats_is_that_of_the_input():
    scale = woodbury.Scale.inputs(table()[0])
    assert scale(table()[0].float()).dtype == torch.float32 and scale(table()[0]).dtype == torch.float64
    assert woodbury.Scale.targets([1, 2, 3])(torch.tensor([0, 1])).dtype == torch.float64


@pytest.mark.parametrize(
    "values, message",
    [
        (torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), "nan or inf in column 1"),
        (torch.zeros(0, 2), r"samples \(n, columns\)"),
        (3.0, r"samples \(n, columns\)"),
    ],
)
def test_what_cannot_be_scaled_is_named(values, message):
    for make in (woodbury.Scale.inputs, woodbury.Scale.targets):
        with pytest.raises(ValueError, match=message):
            make(values)
    with pytest.raises(ValueError, match=r"Scale has 3 columns, and inputs the shape \(4, 1\)"):
        woodbury.Scale(3)(torch.zeros(4, 1))


def test_a_network_is_saved_with_its_scales(tmp_path):
    x, y = table()
    model = scaled_model(x, y)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = nn.Sequential(woodbury.Scale(3), network(seed=1), woodbury.Scale(1)).double()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(model(x), other(x)) and not list(woodbury.Scale(3).parameters())


def test_steps_are_those_of_the_network_on_scaled_data_and_losses_are_in_the_units_of_the_targets():
    x, y = table()
    model, alone = scaled_model(x, y), network()
    unit = y.std(correction=0)
    data = model[0](x), (y - y.mean()) / unit
    damping = woodbury.LevenbergMarquardt(initial=0.1, relative=True)
    own, plain = (woodbury.GaussNewton(each, nn.MSELoss(), damping=damping) for each in (model, alone))
    bound = 0.0
    for _ in range(5):
        bound += bounds.of_verify(plain, *data)
        ours, theirs = own.step(x, y), plain.step(*data)
        loss, rel = float(theirs.loss) * unit.item() ** 2, bounds.of_info(theirs, bound)
        assert float(ours.loss) == pytest.approx(loss, rel=rel)
    assert reference.model_error(model[1], alone) <= bound


def test_a_fit_takes_raw_columns_where_it_fails_without_scales():
    x, y = table(120)
    losses = []
    for model in (scaled_model(x, y), network()):
        with told() as texts:
            fit = woodbury.fit(model, nn.MSELoss(), (x, y), validation=0.2, progress=False)
        assert any("columns 0, 1, 2" in text for text in texts) == bool(losses)
        losses.append(fit.loss / y.var().item())
    assert losses[0] < 1e-4 < 0.1 < losses[1]


def test_rows_and_laplacians_are_those_of_autograd():
    x, y = table(5)
    model = scaled_model(x, y)
    parameters = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (x,)).sum(1))(parameters)
    dense = torch.cat([jacobian[name].flatten(1) for name in parameters], 1)
    rows = woodbury.rows(model, None, x).dense()
    torch.testing.assert_close(rows, dense)
    found = woodbury.laplacian(model, x)
    gradient = torch.stack([torch.func.jacrev(model)(own)[0] for own in x])
    hessians = torch.stack([torch.func.hessian(model)(own)[0] for own in x])
    torch.testing.assert_close(found.gradient[:, 0], gradient)
    torch.testing.assert_close(found.laplacian[:, 0], hessians.diagonal(dim1=1, dim2=2).sum(1))
