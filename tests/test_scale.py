"""Columns in other units as a layer: what it maps to, that it is saved, and that nothing else changes."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import reference
import woodbury
from checks import silence, told
from fuzz.models import Parts

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


# -- columns far from (-1, 1) are said once; others are not ---------------------------------------------


SAMPLES = 40


def unit(columns=2):
    draws = torch.Generator().manual_seed(0)
    return 2 * torch.rand(SAMPLES, columns, generator=draws, dtype=torch.float64) - 1


def small_network(*first, inputs=2):
    return nn.Sequential(*first, nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def columns_named(model, inputs, **settings):
    """The columns that a fit of one step warns of."""
    with told() as texts:
        data = inputs if callable(inputs) else (inputs, torch.sin(unit(1)))
        woodbury.fit(model, nn.MSELoss(), data, steps=2, progress=False, **settings)
    named = [text for text in texts if "far from (-1, 1)" in text]
    assert len(named) <= 1 and all("woodbury.Scale.inputs(x)" in own for own in named)
    return re.search(r"columns? (.*) of the inputs", named[0])[1] if named else None


FAR = {
    "wide": 30 * unit(1),
    "narrow": 0.1 * unit(1),
    "shifted": 5 + unit(1),
    "years": 1990 + 30 * unit(1),
    "pixels from 0 to 255": 255 * (unit(1) > 0.5),
}
NEAR = {
    "unit": unit(1),
    "from 0 to 1": (1 + unit(1)) / 2,
    "from 0 to 10": 5 + 5 * unit(1),
    "constant": torch.full((SAMPLES, 1), 7.0),
    "one-hot": torch.arange(SAMPLES) == 3,
    "mostly one": torch.arange(SAMPLES) != 3,
    "a pixel that is hardly lit": 0.05 * (torch.arange(SAMPLES) % 5 == 0),
    "an outlier": torch.where(torch.arange(SAMPLES) == 3, 25.0, unit(1)[:, 0]),
}


@pytest.mark.parametrize("name", FAR | NEAR)
def test_far_columns_are_named_and_near_ones_are_not(name):
    inputs = torch.cat([unit(1), (FAR | NEAR)[name].reshape(SAMPLES, 1).double()], 1)
    assert columns_named(small_network(), inputs) == ("1" if name in FAR else None)
    if name in FAR:
        assert columns_named(small_network(), torch.cat([FAR[name], unit(1), FAR[name]], 1)[:, [0, 2]]) == "0, 1"


YEARS = 1990 + 30 * unit()
MODELS = {
    "a scale": (small_network(woodbury.Scale.inputs(YEARS)), YEARS),
    "a norm": (small_network(nn.BatchNorm1d(2)), YEARS),
    "a norm without parameters": (small_network(nn.BatchNorm1d(2, affine=False)), YEARS),
    "by hand": (Parts(lambda m, x: m.net((x - 1990) / 30), net=small_network()), YEARS),
    "images": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)).double(),
        255 * torch.rand(SAMPLES, 1, 4, 4, dtype=torch.float64),
    ),
    "tokens": (
        nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 1)).double(),
        torch.randint(9, (40, 2)),
    ),
}


@pytest.mark.filterwarnings("ignore:.*model depends on other samples")
@pytest.mark.parametrize("name", MODELS)
def test_what_something_else_sees_first_is_not_judged(name):
    model, inputs = MODELS[name]
    settings = {"validation": (inputs, torch.sin(unit(1)))} if "norm" in name else {}
    model.eval()
    assert columns_named(model, inputs, **settings) is None


def draw_years(count):
    inputs = 1990 + 60 * torch.rand(count, 2, dtype=torch.float64)
    return inputs, torch.sin(inputs[:, :1])


@pytest.mark.parametrize("points", ["by residual", "as drawn"])
def test_samplers_and_equations_are_judged_by_their_first_step(points):
    assert columns_named(small_network(), draw_years, points=points, samples=32) == "0, 1"
    model = small_network()
    poisson = lambda model, x: woodbury.laplacian(model, x).laplacian - 1  # noqa: E731
    written = lambda model, x: poisson(lambda x: model(x), x)  # noqa: E731
    for function in (poisson, written):
        terms = woodbury.Equations(inside=(lambda count: draw_years(count)[0], function))
        with pytest.warns(UserWarning, match="columns 0, 1 of the inputs are far"):
            woodbury.fit(model, terms, steps=2, samples=32, points=points, progress=False)


def test_nothing_is_left_on_the_model_and_a_run_that_goes_on_or_has_few_samples_says_nothing():
    model, data = small_network(), (YEARS, torch.sin(unit(1)))
    with pytest.warns(UserWarning, match="far from"):
        fit = woodbury.fit(model, nn.MSELoss(), data, steps=2, progress=False)
    assert not any(own._forward_pre_hooks for own in model.modules()) and model.training
    with silence(message=".*far from"):
        woodbury.fit(model, nn.MSELoss(), data, steps=4, resume=fit.state_dict(), progress=False)
        woodbury.fit(small_network(), F.mse_loss, (YEARS[:10], YEARS[:10, :1]), steps=1, progress=False)


def offset(size=1.0, far=400.0):
    return far + size * torch.sin(3 * unit(1))


TARGETS = {
    "offset": (small_network(), offset(20), "0"),
    "wide": (small_network(), 1e4 * unit(1), "0"),
    "flat": (nn.Sequential(small_network(), nn.Flatten(0)), offset()[:, 0], "0"),
    "near": (small_network(), offset(40.0, 20.0), None),
    "counts": (small_network(), offset(), None),
    "scaled": (nn.Sequential(small_network(), woodbury.Scale.targets(offset())), offset(), None),
    "by hand": (Parts(lambda m, x: 400 + 20 * m.net(x), net=small_network()), offset(20), None),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", ["validation", "evidence", "loader", "search"])
def test_far_targets_of_a_linear_layer_are_named_unless_steps_have_a_search(name, kind):
    model, targets, column = TARGETS[name]
    settings = {"validation": {"validation": 0.2}, "evidence": {"weight_decay": "evidence"}}.get(kind, {})
    data = [(unit(), targets)] * 2 if kind == "loader" else (unit(), targets)
    with told() as texts:
        loss = nn.PoissonNLLLoss() if name == "counts" else nn.MSELoss()
        woodbury.fit(model, loss, data, steps=1, progress=False, **settings)
    named = [re.search(r"column (.*) of the targets is far from \(-1, 1\)", text) for text in texts]
    assert [own[1] for own in named if own] == ([] if column is None or kind == "search" else [column])
