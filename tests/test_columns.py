"""Inputs and targets far from (-1, 1) are said once, with their columns; others are not."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import woodbury
from checks import silence, told
from fuzz.models import Parts

SAMPLES = 40


def unit(columns=2):
    draws = torch.Generator().manual_seed(0)
    return 2 * torch.rand(SAMPLES, columns, generator=draws, dtype=torch.float64) - 1


def network(*first, inputs=2):
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
    assert columns_named(network(), inputs) == ("1" if name in FAR else None)
    if name in FAR:
        assert columns_named(network(), torch.cat([FAR[name], unit(1), FAR[name]], 1)[:, [0, 2]]) == "0, 1"


YEARS = 1990 + 30 * unit()
MODELS = {
    "a scale": (network(woodbury.Scale.inputs(YEARS)), YEARS),
    "a norm": (network(nn.BatchNorm1d(2)), YEARS),
    "a norm without parameters": (network(nn.BatchNorm1d(2, affine=False)), YEARS),
    "by hand": (Parts(lambda m, x: m.net((x - 1990) / 30), net=network()), YEARS),
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
    assert columns_named(network(), draw_years, points=points, samples=32) == "0, 1"
    model = network()
    poisson = lambda model, x: woodbury.laplacian(model, x).laplacian - 1  # noqa: E731
    written = lambda model, x: poisson(lambda x: model(x), x)  # noqa: E731
    for function in (poisson, written):
        terms = woodbury.Equations(inside=(lambda count: draw_years(count)[0], function))
        with pytest.warns(UserWarning, match="columns 0, 1 of the inputs are far"):
            woodbury.fit(model, terms, steps=2, samples=32, points=points, progress=False)


def test_nothing_is_left_on_the_model_and_a_run_that_goes_on_or_has_few_samples_says_nothing():
    model, data = network(), (YEARS, torch.sin(unit(1)))
    with pytest.warns(UserWarning, match="far from"):
        fit = woodbury.fit(model, nn.MSELoss(), data, steps=2, progress=False)
    assert not any(own._forward_pre_hooks for own in model.modules()) and model.training
    with silence(message=".*far from"):
        woodbury.fit(model, nn.MSELoss(), data, steps=4, resume=fit.state_dict(), progress=False)
        woodbury.fit(network(), F.mse_loss, (YEARS[:10], YEARS[:10, :1]), steps=1, progress=False)


def offset(size=1.0, far=400.0):
    return far + size * torch.sin(3 * unit(1))


TARGETS = {
    "offset": (network(), offset(20), "0"),
    "wide": (network(), 1e4 * unit(1), "0"),
    "flat": (nn.Sequential(network(), nn.Flatten(0)), offset()[:, 0], "0"),
    "near": (network(), offset(40.0, 20.0), None),
    "counts": (network(), offset(), None),
    "scaled": (nn.Sequential(network(), woodbury.Scale.targets(offset())), offset(), None),
    "by hand": (Parts(lambda m, x: 400 + 20 * m.net(x), net=network()), offset(20), None),
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
