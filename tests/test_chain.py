"""Chains run by hand, against the same layers run by torch and differentiated by it."""

import copy
import itertools

import pytest
import torch
from torch import nn

import problems
import reference
import woodbury
from woodbury import chain as chains
from woodbury.capture import call_model, capture
from woodbury.chain import ACTIVATIONS, read_chain
from woodbury.plan import plan_layers
from woodbury.rows import Rows

METHODS = {
    "gn": woodbury.GaussNewton,
    "ng": woodbury.NaturalGradient,
    "ng-bd": lambda *args, **settings: woodbury.NaturalGradient(*args, blocks="layer", **settings),
}


class Wrapped(nn.Module):
    """The same model in another module: nothing about its structure shows what it computes."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


def plan_of(model):
    return plan_layers(model, dict(model.named_parameters()), None)


def chain_of(model):
    return read_chain(plan_of(model), model)


def batch(outputs, loss, n=9):
    inputs = torch.randn(n, 4, dtype=torch.float64)
    if isinstance(loss, nn.CrossEntropyLoss):
        return inputs, torch.randint(outputs, (n,))
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return inputs, torch.rand(n, outputs, dtype=torch.float64)
    return inputs, torch.randn(n, outputs, dtype=torch.float64)


def instance(kind):
    return {nn.GELU: nn.GELU("tanh"), nn.LeakyReLU: nn.LeakyReLU(0.3), nn.ELU: nn.ELU(0.7)}.get(kind) or kind()


@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.__name__)
def test_an_activation_computes_what_its_module_does_and_so_does_the_way_back(kind):
    module, (forward, backward) = instance(kind), ACTIVATIONS[kind]
    z = torch.randn(30, dtype=torch.float64, requires_grad=True)
    h = torch.randn(30, dtype=torch.float64)
    v = forward(module, z)
    torch.testing.assert_close(v, module(z))
    torch.testing.assert_close(backward(module, z, v, h), torch.autograd.grad(module(z), z, h)[0])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()], ids=str)
@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_steps_equal_those_of_the_same_layers_run_by_torch(loss, kind, bias, method):
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6, bias=bias), instance(kind), nn.Linear(6, 5, bias=bias), instance(kind)]
    model = nn.Sequential(*layers, nn.Linear(5, 3, bias=bias)).double()
    other = copy.deepcopy(model)
    own = METHODS[method](model, loss, curvature_samples=3, damping=0.1, seed=0, lr=0.5)
    by_torch = METHODS[method](Wrapped(other), loss, curvature_samples=3, damping=0.1, seed=0, lr=0.5)
    for _ in range(3):
        inputs, targets = batch(3, loss)
        a, b = own.step(inputs, targets), by_torch.step(inputs, targets)
        assert own._chain is not None
        assert by_torch._chain is None
        for name, value in a.as_dict().items():
            assert value == pytest.approx(b.as_dict()[name], rel=1e-9), name
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


SETTINGS = {
    "all samples": {},
    "one": {"curvature_samples": 1},
    "momentum": {"curvature_samples": 4, "momentum": 0.6},
    "decay": {"curvature_samples": 4, "weight_decay": 0.05},
    "cg": {"curvature_samples": 4, "solver": "cg", "solver_tolerance": 1e-13},
    "products": {"curvature_samples": 4, "solver": "products", "solver_tolerance": 1e-13},
    "gram in double": {"curvature_samples": 4, "gram_dtype": torch.float64},
    "accept": {"curvature_samples": 4, "accept": 0.9},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_the_same_along_a_chain(name, method):
    torch.manual_seed(2)
    model = problems.mlp(4, 6, 5, 3).double()
    other = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss()
    own = METHODS[method](model, loss, seed=0, **SETTINGS[name])
    by_torch = METHODS[method](Wrapped(other), loss, seed=0, **SETTINGS[name])
    for n in (9, 9, 5):
        inputs, targets = batch(3, loss, n)
        a, b = own.step(inputs, targets), by_torch.step(inputs, targets)
        assert bool(a.accepted) == bool(b.accepted)
        assert float(a.ratio) == pytest.approx(float(b.ratio), rel=1e-7)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_the_full_loader_and_the_first_batch_are_the_same_along_a_chain(method):
    torch.manual_seed(3)
    model, loss = problems.mlp(4, 6, 3).double(), nn.CrossEntropyLoss()
    other = copy.deepcopy(model)
    full = [batch(3, loss), batch(3, loss, 5)]
    own, by_torch = (METHODS[method](net, loss, seed=0) for net in (model, Wrapped(other)))
    for _ in range(2):
        a, b = (optimizer.step(*full[0], full=full) for optimizer in (own, by_torch))
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
        assert float(a.ratio) == pytest.approx(float(b.ratio), rel=1e-8)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_kfac_is_the_same_along_a_chain():
    torch.manual_seed(4)
    model, loss = problems.mlp(4, 6, 3).double(), nn.CrossEntropyLoss()
    other = copy.deepcopy(model)
    own, by_torch = (woodbury.KFAC(net, loss, seed=0, curvature_samples=4) for net in (model, Wrapped(other)))
    for _ in range(4):
        sample = batch(3, loss)
        own.step(*sample)
        by_torch.step(*sample)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("samples", [2, 6, 7])
def test_a_pass_gives_outputs_rows_and_gradient_of_autograd(samples):
    """Rows for columns of some samples, or of all, with one column or several."""
    torch.manual_seed(5)
    model = problems.mlp(4, 6, 5, 3).double()
    inputs = torch.randn(7, 4, dtype=torch.float64)
    plan = plan_of(model)
    made, seen = read_chain(plan, model).run(inputs), capture(plan, model, call_model, inputs, 7)
    torch.testing.assert_close(made.outputs, seen.outputs.detach())
    weights = torch.randn(7, 3, dtype=torch.float64)
    expected = seen.gradient(weights)
    for name, value in made.gradient(weights).items():
        torch.testing.assert_close(value, expected[name])
    segments = [torch.randn(2, 3, 3, dtype=torch.float64)]
    if samples > 2:
        segments.append(torch.randn(samples - 2, 1, 3, dtype=torch.float64))
    jacobian = [j for j, _, _ in reference.per_sample(model, nn.MSELoss(), inputs, torch.zeros(7, 3).double())]
    dense = torch.cat([columns @ jacobian[i] for i, columns in enumerate(itertools.chain(*segments))])
    rows = Rows(plan, made.rows(segments), len(dense))
    torch.testing.assert_close(rows.dense(), dense)


def test_a_chain_may_be_nested_share_an_activation_and_hold_identities():
    act = nn.Tanh()
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), act), nn.Identity(), nn.Linear(6, 6), act, nn.Linear(6, 2)
    )
    assert chain_of(model) is not None
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(chain_of(model).run(inputs).outputs, model(inputs).detach())


def _hooked(model):
    model[2].register_forward_hook(lambda module, given, outputs: 2 * outputs)


def _with_own_forward(model):
    model[1].forward = torch.sin


def _with_another_activation(model):
    model[1] = nn.Softsign()


def _longer(model):
    model.append(nn.Tanh())
    model.append(nn.Linear(3, 3).double())


def _with_a_scaled_weight(model):
    nn.utils.parametrizations.weight_norm(model[2])


def _tied(model):
    model[2] = model[0]


def _frozen(model):
    model[0].weight.requires_grad_(False)


def _ending_in_an_activation(model):
    model.append(nn.Tanh())


NOT_CHAINS = [_hooked, _with_own_forward, _with_another_activation, _with_a_scaled_weight, _frozen]
NOT_CHAINS += [_tied, _ending_in_an_activation]


@pytest.mark.parametrize("change", NOT_CHAINS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after a step"])
def test_what_is_no_chain_is_not_run_as_one(change, late):
    """p stays right by products that know of no chain, also where the model changes between two steps."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    loss, inputs = nn.MSELoss(), torch.randn(7, 4, dtype=torch.float64)
    targets = torch.randn(7, 4, dtype=torch.float64)
    if not late:
        change(model)
    optimizer = woodbury.GaussNewton(model, loss, damping=0.1, fallback="autograd")
    optimizer.step(inputs, targets)
    if late:
        assert optimizer._chain is not None
        change(model)
        for group in optimizer.param_groups:  # parameters of new modules
            group["params"] = [p for p in model.parameters() if p.requires_grad]
        optimizer = (
            optimizer
            if change is not _with_a_scaled_weight
            else woodbury.GaussNewton(model, loss, damping=0.1, fallback="autograd")
        )
        optimizer.step(inputs, targets)
    assert optimizer._chain is None
    assert optimizer.verify(inputs, targets) < 1e-11


def test_a_model_that_grows_is_run_as_what_it_became():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.1)
    optimizer.step(inputs, targets)
    _longer(model)
    optimizer.add_param_group({"params": list(model[4].parameters())})
    before = float(optimizer.step(inputs, targets).loss)
    assert optimizer.verify(inputs, targets) < 1e-11
    assert float(optimizer.step(inputs, targets).loss) != before


def test_a_global_hook_is_seen():
    model = problems.mlp(4, 5, 3).double()
    chain = chain_of(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, outputs: None)
    try:
        assert not chain.is_current()
    finally:
        handle.remove()
    assert chain.is_current()


@pytest.mark.parametrize(
    "inputs",
    [torch.randn(3, 2, 4), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 5), [torch.randn(3, 4)]],
    ids=["positions", "another type", "another width", "a list"],
)
def test_batches_of_another_kind_are_left_to_torch(inputs):
    assert not chain_of(problems.mlp(4, 5, 3)).takes(inputs)


def test_settings_of_an_activation_are_read_at_each_step():
    model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), damping=0.1)
    optimizer.step(inputs, targets)
    model[1].negative_slope = 0.5
    assert optimizer.verify(inputs, targets) < 1e-11
    assert optimizer._chain is not None


def test_activations_written_in_place_leave_what_the_step_needs():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.1)
    assert optimizer._chain is not None
    assert optimizer.verify(inputs, targets) < 1e-11


def test_every_activation_is_one_the_graph_shows_as_elementwise():
    """What is taken for a chain by its structure is one by its graph too."""
    for kind in ACTIVATIONS:
        model = Wrapped(nn.Sequential(nn.Linear(4, 5), instance(kind), nn.Linear(5, 3)))
        plan = plan_of(model)
        assert capture(plan, model, call_model, torch.randn(3, 4), 3).chain is not None, kind
        assert chains.read_chain(plan, model) is None
