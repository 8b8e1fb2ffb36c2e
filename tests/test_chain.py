"""Chains run by hand, against the same layers run by torch and differentiated by it."""

import copy
import dataclasses
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from fuzz.models import Parts
from woodbury import _process
from woodbury._vector import flatten
from woodbury.losses import rules as losses
from woodbury.losses.elementwise import SquaredError
from woodbury.model import chain as chains
from woodbury.model.capture import call_model, capture
from woodbury.model.chain import ACTIVATIONS, read_chain
from woodbury.model.plan import plan_layers
from woodbury.modules import Scale, Sine
from woodbury.row_matrix import Rows

METHODS = {"gn": woodbury.GaussNewton, "ng": woodbury.NaturalGradient}
METHODS["ng-bd"] = partial(woodbury.NaturalGradient, blocks="layer")


def wrapped(model):
    """The same model in another module: nothing about its structure shows what it computes."""
    return Parts(lambda m, x: m.inside(x), inside=model)


def plan_of(model):
    return plan_layers(model, dict(model.named_parameters()), False)


def chain_of(model):
    return read_chain(plan_of(model), model)


def batch(outputs, loss, n=9):
    inputs = torch.randn(n, 4, dtype=torch.float64)
    if isinstance(loss, nn.CrossEntropyLoss):
        return inputs, torch.randint(outputs, (n,))
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return inputs, torch.rand(n, outputs, dtype=torch.float64)
    return inputs, torch.randn(n, outputs, dtype=torch.float64)


def assert_verified(optimizer, inputs, targets):
    assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)


class Noisy(list):
    """Batches that are read with noise."""

    def __iter__(self):
        for inputs, targets in super().__iter__():
            yield inputs + torch.randn_like(inputs), targets


def assert_same_steps(optimizers, batches, full=None):
    """The numbers and the parameters of a model run by hand, and of the same one in a module: `pair_of`.

    And what is drawn after a step.
    """
    own, by_torch = optimizers
    bound = 0.0
    for seed, (inputs, targets) in enumerate(batches):
        bound += bounds.of_verify(by_torch, inputs, targets)
        infos = []
        for optimizer in optimizers:
            torch.manual_seed(seed)
            infos.append(optimizer.step(inputs, targets, full=full).as_dict() | {"drawn": float(torch.rand(()))})
        assert infos[0] == pytest.approx(infos[1], rel=bounds.of_info(by_torch.last, bound))
    assert reference.model_error(own.model, by_torch.model) <= bound


def pair_of(method, model, loss, **settings):
    """The same optimizer for a model that is a chain, and for a copy that does not show it."""
    return [method(own, loss, seed=0, **settings) for own in (model, wrapped(copy.deepcopy(model)))]


def scale(*size):
    """With numbers of its own, in float64."""
    made = woodbury.Scale(*size).double()
    for own in (made.center, made.factor, made.shift):
        own.copy_(0.5 + torch.rand(size, dtype=torch.float64))
    return made


def instance(kind):
    own = {nn.GELU: nn.GELU("tanh"), nn.LeakyReLU: nn.LeakyReLU(0.3), nn.ELU: nn.ELU(0.7)}
    return (own | {Scale: scale(), Sine: Sine(1.7)}).get(kind) or kind()


@every_pair(
    loss=[nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()],
    kind=list(ACTIVATIONS),
    bias=[True, False],
    method=[*METHODS, "kfac"],
)
def test_steps_equal_those_of_the_same_layers_run_by_torch(loss, kind, bias, method):
    layers = [nn.Linear(4, 6, bias=bias), instance(kind), nn.Linear(6, 5, bias=bias), instance(kind)]
    model = nn.Sequential(*layers, nn.Linear(5, 3, bias=bias)).double()
    make = METHODS.get(method, woodbury.KFAC)
    pair = pair_of(make, model, loss, curvature_samples=3, damping=0.1, lr=0.5)
    assert_same_steps(pair, [batch(3, loss)])
    assert [optimizer._problems.structure.chain is None for optimizer in pair] == [False, True]


SETTINGS = {  # tolerances below rounding
    "all samples": {},
    "one": {"curvature_samples": 1},
    "momentum": {"curvature_samples": 4, "momentum": 0.6},
    "decay": {"curvature_samples": 4, "weight_decay": 0.05},
    "cg": {"curvature_samples": 4, "solver": "cg", "solver_tolerance": 1e-15},
    "products": {"curvature_samples": 4, "solver": "products", "solver_tolerance": 1e-15},
    "gram in double": {"curvature_samples": 4, "gram_dtype": torch.float64},
    "accept": {"curvature_samples": 4, "accept": 0.9},
    "a full loader": {},
}


@pytest.mark.parametrize("samples", [2, 6, 7])
def test_a_pass_gives_outputs_rows_and_gradient_of_autograd(samples):
    """Rows for columns of some samples, or of all, with one column or several."""
    model = problems.mlp(4, 6, 5, 3).double()
    inputs = torch.randn(7, 4, dtype=torch.float64)
    plan = plan_of(model)
    made, seen = read_chain(plan, model).run(inputs), capture(plan, call_model, inputs, 7)
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
    inner = nn.Sequential(nn.Linear(4, 6), act)
    model = nn.Sequential(inner, nn.Identity(), nn.Linear(6, 6), act, nn.Linear(6, 2))
    assert chain_of(model) is not None
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(chain_of(model).run(inputs).outputs, model(inputs).detach())


@every_pair(
    first=[(), (4,), (nn.Flatten,), (nn.Flatten, 4)],
    last=[(), (3,), (nn.Tanh,)],
    method=list(METHODS),
    name=list(SETTINGS),
)
def test_settings_mean_the_same_along_a_chain(first, last, method, name):
    """Which may begin with a flatten or a scale, and end in one or in an activation."""
    ends = [[scale(own) if isinstance(own, int) else own() for own in end] for end in (first, last)]
    model = nn.Sequential(*ends[0], nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), *ends[1]).double()
    loss = nn.CrossEntropyLoss()
    pair = pair_of(METHODS[method], model, loss, **SETTINGS[name])
    shape = (2, 2) if nn.Flatten in first else (4,)
    batches = [(x.reshape(-1, *shape), y) for x, y in (batch(3, loss, n) for n in (7, 5))]
    assert name == "products" or pair[0]._problems.structure.chain.takes(batches[0][0])
    assert_same_steps(pair, batches, full=Noisy(batches) if name == "a full loader" else None)
    assert_verified(pair[0], *batches[0])


def test_settings_of_a_flatten_are_read_at_each_step():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), damping=0.1)
    optimizer.step(inputs, targets)
    model[0].start_dim = 0
    with pytest.raises(RuntimeError):  # from torch, in its own words
        optimizer.step(inputs, targets)
    assert optimizer._problems.structure.chain is None
    model[0].start_dim = 1
    optimizer.step(inputs, targets)


class Doubled(nn.Tanh):
    def forward(self, z):
        return 2 * super().forward(z)


NOT_CHAINS = {
    "a hook": lambda model, patch: model[2].register_forward_hook(lambda module, given, outputs: 2 * outputs),
    "a forward of its own": lambda model, patch: setattr(model[1], "forward", torch.sin),
    "a forward for a whole class": lambda model, patch: patch.setattr(nn.Tanh, "forward", lambda own, z: z.sin()),
    "another activation": lambda model, patch: setattr(model, "1", nn.Softsign()),
    "another class": lambda model, patch: setattr(model[1], "__class__", Doubled),
    "something in a container": lambda model, patch: model[3].append(nn.Softsign()),
    "a computed weight": lambda model, patch: nn.utils.parametrizations.weight_norm(model[2]),
    "one layer twice": lambda model, patch: setattr(model, "2", model[0]),
    "a frozen weight": lambda model, patch: model[0].weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", NOT_CHAINS)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after a step"])
def test_what_is_no_chain_is_not_run_as_one(name, late, monkeypatch):
    """p stays right by products that know of no chain, also where the model changes between two steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sequential()).double()
    loss, inputs = nn.MSELoss(), torch.randn(7, 4, dtype=torch.float64)
    targets = torch.randn(7, 4, dtype=torch.float64)
    if not late:
        NOT_CHAINS[name](model, monkeypatch)
    optimizer = woodbury.GaussNewton(model, loss, damping=0.1, fallback="autograd")
    optimizer.step(inputs, targets)
    if late:
        assert optimizer._problems.structure.chain is not None
        NOT_CHAINS[name](model, monkeypatch)
        for group in optimizer.param_groups:  # parameters of new modules
            group["params"] = [p for p in model.parameters() if p.requires_grad]
        if name == "a computed weight":
            optimizer = woodbury.GaussNewton(model, loss, damping=0.1, fallback="autograd")
        expected = loss(model(inputs), targets).item()
        assert float(optimizer.step(inputs, targets).loss) == pytest.approx(expected)
    assert optimizer._problems.structure.chain is None
    assert_verified(optimizer, inputs, targets)


@pytest.mark.parametrize(
    "register, options",
    [
        ("register_module_forward_pre_hook", {}),
        ("register_module_forward_hook", {}),
        ("register_module_forward_hook", {"with_kwargs": True}),
        ("register_module_forward_hook", {"always_call": True}),
        ("register_module_full_backward_pre_hook", {}),
        ("register_module_full_backward_hook", {}),
    ],
)
def test_every_kind_of_global_hook_is_seen(register, options):
    model = problems.mlp(4, 5, 3)
    chain = chain_of(model)
    seen = (_process.has_global_hook, lambda: not chain.is_current())
    handle = getattr(nn.modules.module, register)(lambda *given: None, **options)
    try:
        assert all(see() for see in seen)
    finally:
        handle.remove()
    assert not any(see() for see in seen)


class Reversed(nn.Flatten):
    def forward(self, x):
        return super().forward(x).flip(1)


def test_batches_of_another_kind_and_a_flatten_of_ones_own_are_left_to_torch():
    chain = chain_of(problems.mlp(4, 5, 3))
    for inputs in (torch.randn(3, 2, 4), torch.randn(3, 4).double(), torch.randn(3, 5), [torch.randn(3, 4)]):
        assert not chain.takes(inputs)
    for first in ([Reversed()], [nn.Flatten(), Reversed()], [nn.Flatten(0)]):
        assert chain_of(nn.Sequential(*first, nn.Linear(4, 3))) is None
    plain = chain_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    assert not plain.takes(torch.randn(4)) and not plain.takes(torch.randn(3, 2, 3))


def test_activations_may_change_their_settings_and_write_in_place():
    for activation, changes in ((nn.LeakyReLU(0.1), {"negative_slope": 0.5}), (nn.ReLU(inplace=True), {})):
        model = nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3)).double()
        inputs, targets = batch(3, nn.CrossEntropyLoss())
        optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), damping=0.1)
        optimizer.step(inputs, targets)
        vars(activation).update(changes)
        assert_verified(optimizer, inputs, targets)
        assert optimizer._problems.structure.chain is not None


def test_every_activation_is_one_the_graph_shows_as_elementwise():
    """What is taken for a chain by its structure is one by its graph too."""
    for kind in ACTIVATIONS:
        model = wrapped(nn.Sequential(nn.Linear(4, 5), instance(kind), nn.Linear(5, 3)))
        plan = plan_of(model)
        assert capture(plan, call_model, torch.randn(3, 4), 3).chain is not None, kind
        assert chains.read_chain(plan, model) is None


def test_a_model_that_is_no_chain_on_a_later_batch_has_the_rows_of_that_batch():
    """Of the curvature samples and of the others, by the one pass that a chain needs."""

    def run(m, x):
        return m.head(torch.tanh(m.inner(x)) if x.max() < 0 else m.inner(x).softmax(1))

    inputs, targets = torch.rand(6, 4, dtype=torch.float64) + 0.1, torch.randint(3, (6,))
    model = Parts(run, inner=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.1)
    for sign in (-1, 1):
        p = flatten(optimizer.direction(sign * inputs, targets, subset=[4, 1]))
        given = model, nn.CrossEntropyLoss(), sign * inputs, targets
        expected, B, _ = reference.dense_direction(*given, [4, 1], 0.1, "gauss-newton")
        assert reference.relative_error(p, expected) <= bounds.of_solve(B, 0.1)


@pytest.fixture
def setting():
    """A model with more parameters than rows, and a batch."""
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Tanh(), nn.Linear(30, 3)).double()
    return model, torch.randn(7, 40, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)


def replace_parameters(model, optimizer):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def gain_a_bias(model, optimizer):
    model[0].bias = nn.Parameter(torch.ones(30, dtype=torch.float64))


def grow(model, optimizer):
    model.extend([nn.Tanh(), nn.Linear(3, 3).double()])
    optimizer.add_param_group({"params": list(model[4].parameters())})


def exchange(model, optimizer):
    optimizer.model = copy.deepcopy(model)
    optimizer.param_groups[0]["params"] = list(optimizer.model.parameters())


def double_outputs(model, optimizer):
    optimizer.forward = lambda net, x: 2 * net(x)


@pytest.mark.parametrize("change", [replace_parameters, gain_a_bias, grow, exchange, double_outputs])
def test_a_model_that_changes_is_run_as_what_it_became(setting, change):
    model, *batch = setting
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1)
    optimizer.step(*batch)
    change(model, optimizer)
    model = optimizer.model
    outputs = (2 if change is double_outputs else 1) * model(batch[0])
    loss = nn.functional.mse_loss(outputs, batch[1]).item()
    before = model[0].weight.detach().clone()
    assert float(optimizer.step(*batch).loss) == pytest.approx(loss)
    assert not torch.equal(model[0].weight, before)
    assert_verified(optimizer, *batch)
    assert_verified(copy.deepcopy(optimizer), *batch)


def moved_by_a_step(model, optimizer, inputs, targets):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(inputs, targets)
    return [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]


def test_groups_that_exchange_their_parameters_exchange_their_rates(setting):
    model, *batch = setting
    groups = [{"params": list(model[0].parameters()), "lr": 0.0}, {"params": list(model[2].parameters())}]
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, params=groups)
    optimizer.step(*batch)
    optimizer.param_groups.reverse()
    assert moved_by_a_step(model, optimizer, *batch) == [False, True, True]
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    assert moved_by_a_step(model, optimizer, *batch) == [True, False, False]


class Own(nn.MSELoss):
    """A loss of one's own."""


class Differentiating(woodbury.LossRule):
    """Uses autograd as it likes."""

    def values(self, loss, outputs, targets):
        return (outputs - targets).square().mean(1)

    def residual(self, loss, outputs, targets):
        point = outputs.clone().requires_grad_()
        return torch.autograd.grad(self.values(loss, point, targets).sum(), point)[0]


class WithoutWeights(SquaredError):  # noqa: N818  (no exception)
    """A factor without e, derived from a rule that always has it."""

    compact_factor = woodbury.LossRule.compact_factor

    def factor(self, loss, outputs, targets):
        return SquaredError.compact_factor(self, loss, outputs, targets).columns(), None


@every_pair(rule=[Differentiating, WithoutWeights], method=list(METHODS))
def test_loss_rules_of_ones_own_work_with_chains(setting, rule, method, monkeypatch):
    model, *batch = setting
    monkeypatch.setitem(losses._RULES, Own, rule())
    assert_same_steps(pair_of(METHODS[method], model, Own(), damping=10.0, curvature_samples=4), [batch] * 2)


def test_conjugate_gradients_see_small_residuals():
    """|e| lambda about 1e-22, whose square is zero in single precision."""
    model = nn.Sequential(nn.Linear(200, 150, bias=False), nn.Tanh(), nn.Linear(150, 3, bias=False))
    with torch.no_grad():
        model[2].weight.mul_(1e-10)
    inputs, targets = torch.randn(4, 200), torch.zeros(4, 3)
    exact = woodbury.GaussNewton(copy.deepcopy(model).double(), nn.MSELoss(), damping=1e-12)
    by_cg = woodbury.GaussNewton(model, nn.MSELoss(), damping=1e-12, solver="cg")
    expected = exact.direction(inputs.double(), targets.double())
    for name, value in by_cg.direction(inputs, targets).items():
        close = {"rtol": 1e-3, "atol": 1e-5 * float(expected[name].abs().max())}
        torch.testing.assert_close(value.double(), expected[name], **close)


def test_an_info_is_a_dataclass_whose_numbers_stay(setting):
    model, *batch = setting
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), curvature_samples=4)
    info = optimizer.step(*batch)
    copied = pickle.loads(pickle.dumps(info))
    optimizer.step(*batch)
    assert copied.as_dict() == info.as_dict() and dataclasses.asdict(info)["step_norm"] == info.step_norm
    assert dataclasses.replace(info, loss=torch.zeros(())).damping == info.damping
    assert "ratio=tensor" in repr(info)
    with pytest.raises(AttributeError, match="nothing"):
        info.nothing  # noqa: B018


def test_what_a_step_keeps_can_be_differentiated_with(setting):
    """Vectors of ones and the like are made once for all: not as the inference tensors of a first step."""
    model, *batch = setting
    optimizer = woodbury.NaturalGradient(model, nn.MSELoss(), curvature_samples=3)
    with torch.inference_mode(), torch.inference_mode(False):
        loss = optimizer.step(*batch).loss
    (loss * torch.ones((), dtype=torch.float64, requires_grad=True)).backward()
    rows = woodbury.rows(model, nn.MSELoss(), *batch)
    vector = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    rows.matvec(vector).square().sum().backward()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    rows.gram(scales=dict.fromkeys(vector, scale)).sum().backward()
    assert scale.grad is not None
