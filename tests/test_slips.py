"""Usual slips of a new user, each an error that says what to write, and what Python shows of the package."""

import importlib.util
import pydoc
import re
import sys
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import problems
import woodbury
from processes import run_alone

MSE = nn.MSELoss()
X = torch.linspace(-1, 1, 60).reshape(30, 2)
Y = X[:, :1] * X[:, 1:]
SET = TensorDataset(X, Y)
LOADER = DataLoader(SET, 10)


network = partial(problems.network, 2, 5, 1, dtype=torch.float32)


def fit(*arguments, **options):
    return woodbury.fit(network(), *arguments, steps=2, progress=False, **options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((MSE, X, Y), r"inputs and targets are one argument, a pair: .* fit\(model, loss, \(inputs, targets\)\)"),
        (((X, Y),), r"the loss or the data is missing, got tuple alone: write fit\(model, loss"),
        ((LOADER,), "the loss or the data is missing, got DataLoader alone"),
        ((MSE,), "the loss or the data is missing, got MSELoss alone"),
        ((MSE, woodbury.Equations(a=(X, lambda model, x: model(x)))), r"write fit\(model, equations\)"),
        ((X, Y), "second argument must be the loss as a module .*, got Tensor, such as"),
        (((X, Y), MSE), "second argument must be the loss as a module .*, got tuple"),
        (("mse", (X, Y)), "second argument must be the loss as a module .*, got str"),
        ((nn.MSELoss, (X, Y)), r"got the class MSELoss: write MSELoss\(\)"),
        ((lambda outputs, targets: 0, (X, Y)), r"got <lambda>: woodbury\.register_loss adds .*watch=True\) takes"),
        ((nn.SoftMarginLoss(), (X, Y)), r"no rule for the loss SoftMarginLoss; known: BCE.*, SmoothL1Loss\. "),
    ],
)
def test_a_loss_that_is_missing_or_none(arguments, message):
    with pytest.raises(TypeError, match=message):
        fit(*arguments)


@pytest.mark.parametrize(
    "data, message",
    [
        ("data.csv", "got str: read the file first"),
        (X, r"got Tensor: pass the targets with it, \(inputs, targets\)"),
        (X.numpy(), r"got ndarray: pass the targets with it, \(inputs, targets\)"),
        (problems.Table(X), r"got Table: choose its columns, \(data\[\['a', 'b'\]\], data\[\['y'\]\]\)"),
        ({"x": X, "y": Y}, r"got dict: pass two of its entries, \(data\['inputs'\], data\['targets'\]\)"),
        (SET, "got TensorDataset: put a Dataset into a DataLoader, or its tensors into a pair"),
        ((X, Y, Y), "got tuple of 3"),
    ],
)
def test_data_of_another_kind(data, message):
    with pytest.raises(TypeError, match=f"data must be a function .* or a pair .*{message}"):
        fit(MSE, data)
    with pytest.raises(TypeError, match=rf"validation must be a share of it \(0\.2\), or a pair .*{message}"):
        fit(MSE, (X, Y), validation=data)
    with pytest.raises(TypeError, match=f"validation must be a pair .*{message}"):
        fit(MSE, LOADER, validation=data)


def test_a_model_that_is_none():
    with pytest.raises(TypeError, match=r"the model itself .*, not its parameters"):
        woodbury.fit(network().parameters(), MSE, (X, Y))
    with pytest.raises(TypeError, match="got the class Linear: make one of it first"):
        woodbury.fit(nn.Linear, MSE, (X, Y))


@pytest.mark.parametrize("inputs, dtype", [(X.double(), "float32"), (X, "float64"), ((10 * X).long(), "float32")])
def test_inputs_of_another_type_than_the_model(inputs, dtype):
    model = network(dtype=getattr(torch, dtype))
    types = rf"inputs of {inputs.dtype} do not fit parameters of torch.{dtype}"
    message = rf"{types}: write inputs\.to\(torch\.{dtype}\), of an array inputs\.astype\('{dtype}'\)"
    with pytest.raises(TypeError, match=message):
        woodbury.GaussNewton(model, MSE).step(inputs, Y)
    if not inputs.is_floating_point():  # floats are converted, whole numbers may be what the model wants
        with pytest.raises(TypeError, match=message):
            woodbury.fit(model, MSE, (inputs, Y), progress=False)


def test_floats_of_nested_inputs_are_converted():
    def forward(model, inputs):
        return model(torch.cat([inputs["a"], inputs["b"][0]], 1))

    with pytest.warns(UserWarning, match="float64 is converted to torch.float32"):
        nested = fit(MSE, ({"a": X[:, :1].double(), "b": [X[:, 1:].double()]}, Y), forward=forward)
    plain = fit(MSE, ({"a": X[:, :1], "b": [X[:, 1:]]}, Y), forward=forward)
    assert nested.loss == plain.loss


def test_a_mapping_that_torch_does_not_know_counts_as_a_dictionary():
    def step(inputs):
        return woodbury.GaussNewton(network(), MSE, forward=forward).step(inputs, Y).loss

    def forward(model, inputs):
        return model(**inputs)

    plain = {"input": X}
    assert step(UserDict(plain)) == step(type("Own", (dict,), {})(plain)) == step(plain)
    assert fit(MSE, [(UserDict(plain), Y)], forward=forward).loss == fit(MSE, [(plain, Y)], forward=forward).loss


@pytest.mark.parametrize(
    "inputs, message",
    [
        (SimpleNamespace(x=X), r"got SimpleNamespace: pass a dict of tensors: dict\(batch\)"),
        (SimpleNamespace(toarray=X.numpy), r"pass inputs\.toarray\(\) as a tensor"),  # as those of scipy.sparse
        (X.to_sparse(), r"sparse inputs: write inputs\.to_dense\(\)"),
    ],
)
def test_inputs_that_are_no_dense_tensors(inputs, message):
    for take in (lambda: woodbury.GaussNewton(network(), MSE).step(inputs, Y), lambda: fit(MSE, (inputs, Y))):
        with pytest.raises(TypeError, match=message):
            take()


def test_columns_of_a_table_that_hold_no_numbers_are_named():
    table = problems.Table(SimpleNamespace(numpy=lambda: np.array([[0.5, None], [1, "b"]] * 15, object)))
    table.columns = ["a", "name"]
    with pytest.raises(TypeError, match=r"numbers of one type \(not so in columns name\)"):
        fit(MSE, (table, Y))


@pytest.mark.parametrize("name, data", [("callback", (X, Y)), ("epoch_callback", LOADER)])
def test_a_callback_that_cannot_be_called(name, data):
    with pytest.raises(TypeError, match=f"fit: {name} must be a function of the fit, got 3"):
        fit(MSE, data, **{name: 3})


def test_rows_and_posterior_name_what_is_no_loss():
    for function in (woodbury.rows, woodbury.posterior):
        with pytest.raises(TypeError, match=r"got the class MSELoss: write MSELoss\(\)"):
            function(network(), nn.MSELoss, X, Y)
        with pytest.raises(TypeError, match=r"got mse_loss: write torch\.nn\.MSELoss\(\)"):
            function(network(), nn.functional.mse_loss, X, Y)


def test_a_function_of_torch_is_the_loss_of_its_class():
    for function, loss in ((nn.functional.mse_loss, MSE), (nn.functional.huber_loss, nn.HuberLoss())):
        assert fit(function, (X, Y)).loss == fit(loss, (X, Y)).loss


# -- what Python shows --------------------------------------------------------------------------------------


def test_the_examples_of_the_help_run():
    """One after the other; the fit has its digits, and the equation its solution, cosh(x) / cosh(1)."""
    blocks = re.findall(r"(?:^    .*\n)+", woodbury.__doc__.partition("The names")[0], flags=re.MULTILINE)
    names = {"torch": torch, "woodbury": woodbury}
    assert len(blocks) == 3
    for block in blocks:
        exec(re.sub("^    ", "", block, flags=re.MULTILINE), names)
        if "tolerance" in block:
            assert names["fit"].reason == "tolerance"
        if "Equations" in block:
            x = names["x"]
            error = (names["model"](x) - torch.cosh(x) / np.cosh(1)).abs().max()
            # e'' - e = r with a mean square of 1e-8: |e| <= 2 max |G| rms r with |G| < 0.4, and less for the ends
            assert names["fit"].reason == "tolerance" and error < 3e-4
    assert names["info"].accepted


def test_the_map_has_every_public_name_and_dir_no_other():
    table = woodbury.__doc__.partition("The names")[2]
    shown = {name for name in dir(woodbury) if not name.startswith("__")}
    assert shown <= set(re.findall(r"\w+", table))
    assert set(dir(woodbury)) == {*woodbury.__all__, "LMClassifier", "LMRegressor"}
    assert all(getattr(woodbury, name) is not None for name in dir(woodbury))
    assert woodbury.logs.TensorBoard and woodbury.sklearn.LMRegressor is woodbury.LMRegressor
    with pytest.raises(AttributeError, match="module 'woodbury' has no attribute 'nothing'"):
        _ = woodbury.nothing


def show_help():
    """With scikit-learn hidden: neither dir nor help may ask for it."""
    for name in [own for own in sys.modules if own.partition(".")[0] in ("woodbury", "sklearn")]:
        del sys.modules[name]
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "sklearn" else find(name, *more)
    sys.modules["sklearn"] = None
    print(pydoc.render_doc(importlib.import_module("woodbury"), renderer=pydoc.plaintext)[:3000])


def test_help_opens_with_the_examples_and_needs_torch_alone():
    done = run_alone(show_help)
    assert done.returncode == 0, done.stderr
    text = pydoc.plain(done.stdout)
    shown = ("woodbury.fit(model", "GaussNewton(model", "LMRegressor, LMClassifier")
    places = [text.index(name) for name in shown]
    assert places == sorted(places)


def test_the_help_of_fit_has_an_example_for_each_kind_of_data():
    examples = re.findall(r"^ *>>> .*woodbury\.fit\((.*)\)$", woodbury.fit.__doc__, flags=re.MULTILINE)
    assert len(examples) == 4
    for kind in ("A pair is", "A loader is", "A sampler ", "Equations take"):
        assert kind in woodbury.fit.__doc__
