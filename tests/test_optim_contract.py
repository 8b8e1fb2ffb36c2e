"""The public contract of an optimizer, over every line of the table `OPTIMIZERS`.

A new line is tested as it stands: what is asked of it follows from its type and from the arguments of its
constructor. `METHODS` says where a method does less than solve the system that the contract describes.
"""

import copy
import math
import pickle
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury
from checks import assert_same, refused, state_of, through_a_file, unchanged
from fuzz.models import Parts
from woodbury._vector import flatten
from woodbury.optim import SecondOrder
from woodbury.optimizers import OPTIMIZERS, default_arguments
from woodbury.quadratic.metric import METRICS
from woodbury.rivals import FirstOrder

NAN, INF = float("nan"), float("inf")
NUMBERS = ("loss", "damping", "ratio", "predicted", "step_norm", "accepted", "length", "share", "bent")


@dataclass(frozen=True)
class Method:
    """What a method promises of p: by default (B + damping I) p = -g to rounding, for a model of any layers."""

    curvature: str = "gauss-newton"  # B: "gauss-newton" or "empirical"
    blocks: str = "full"  # unless the constructor has an argument of that name
    solves: bool = True  # the system, with the settings TIGHT
    any_layer: bool = True  # or Linear layers on one vector per sample alone
    tolerance: float = 0.0  # of p, relative: where an iteration stops, beside the rounding errors


METHODS = {
    woodbury.NaturalGradient: Method(curvature="empirical"),
    woodbury.HessianFree: Method(tolerance=1e-7),
    woodbury.KFAC: Method(blocks="layer", solves=False, any_layer=False),
}
# Settings of whatever constructor takes them.
TIGHT = {"solver_tolerance": 1e-13, "progress": 0.0, "max_iterations": 300}  # an iteration runs to the end
LOOSE = {"solver": "cg", "solver_tolerance": 0.3, "max_iterations": 2}  # and here it does not
FORGETFUL = {"warm_start": 0.0, "decay": 0.0}  # p depends on this batch alone
RICH = {"curvature_samples": 4, "momentum": 0.6, "weight_decay": 0.01, "refresh": 4}  # as much state as there is

arguments = cache(default_arguments)
SPECIMENS = {kind: make(nn.Linear(2, 1), nn.MSELoss()) for kind, make in OPTIMIZERS.items()}
SECOND_ORDER = [kind for kind, made in SPECIMENS.items() if isinstance(made, SecondOrder)]
FIRST_ORDER = [kind for kind, made in SPECIMENS.items() if isinstance(made, FirstOrder)]


def method(kind):
    return next((METHODS[base] for base in type(SPECIMENS[kind]).__mro__ if base in METHODS), Method())


def taken(kind, settings):
    """Those of the settings that the constructor takes."""
    return {name: value for name, value in settings.items() if name in arguments(kind)}


SOLVING = [kind for kind in SECOND_ORDER if method(kind).solves]


def over(kinds):
    return pytest.mark.parametrize("kind", kinds)


def that_take(name):
    return over([kind for kind in SECOND_ORDER if name in arguments(kind)])


every_optimizer = over(OPTIMIZERS)
every_second_order = over(SECOND_ORDER)


def build(kind, problem, *several, **settings):
    """An optimizer for a problem, with settings by name and those of `several` that the constructor takes."""
    for more in several:
        settings = taken(kind, more) | settings
    return OPTIMIZERS[kind](problem.model, problem.loss, **settings)


def dense(kind, problem, subset, damping, blocks=None, **options):
    """p, B and g by plain autograd."""
    blocks = blocks or arguments(kind).get("blocks", method(kind).blocks)
    return reference.dense_direction(*problem, subset, damping, method(kind).curvature, blocks, **options)


def bound(kind, B, damping, steps=1):
    """On the relative error of p, and of its residual."""
    return method(kind).tolerance + bounds.of_solve(B, damping, steps)


def check_verify(kind, optimizer, inputs, targets=None, subset=None):
    """The residual is rounding, and what an iteration leaves; lmax of m of n samples is n / m of all at most."""
    options = {"curvature": method(kind).curvature, "forward": optimizer.forward}
    model, damping = optimizer.model, optimizer.current_damping
    whole = bounds.of_step(model, optimizer.loss, inputs, targets, damping, steps=2, **options)
    residual = optimizer.verify(inputs, targets, subset=subset)
    assert residual <= 10 * method(kind).tolerance + len(inputs) * whole


theta_of = reference.theta


def loss_at(problem, theta, decay=0.0):
    """The loss of the batch with its parameters at theta, and decay |theta|^2 / 2."""
    twin = copy.deepcopy(problem.model)
    nn.utils.vector_to_parameters(theta, reference.parameters(twin).values())
    value = reference.value_of(problem.loss, twin(problem.inputs), problem.targets).detach()
    return value + 0.5 * (decay * theta) @ theta


def assert_moved(model, before, p, lr):
    """theta went from `before` to before + lr p; lr is a number, or a function of a parameter's name."""
    for name, value in model.named_parameters():
        rate = lr(name) if callable(lr) else lr
        torch.testing.assert_close(value.detach(), before[name] + rate * p[name] if name in p else before[name])


def with_dropout():
    layers = (nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 10), nn.Tanh(), nn.Dropout(0.5))
    model = nn.Sequential(*layers, nn.Linear(10, 3)).double()
    return problems.Problem(model, nn.CrossEntropyLoss(), torch.randn(7, 5).double(), torch.randint(3, (7,)))


def plainly_told(optimizer):
    """The plain values among what an optimizer tells of itself."""
    shown = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    return {name: value for name, value in shown.items() if isinstance(value, bool | int | float | str | None)}


# -- what a step reports ---------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_reports_0_dim_tensors_and_they_are_kept(kind, dtype):
    problem = problems.make("softmax", dtype)
    optimizer = build(kind, problem)
    assert optimizer.last is None
    before = problem.loss(problem.model(problem.inputs), problem.targets).detach()
    info = optimizer.step(problem.inputs, problem.targets)
    assert isinstance(info, woodbury.StepInfo) and optimizer.last is info
    numbers = [getattr(info, name) for name in NUMBERS]
    assert all(isinstance(number, torch.Tensor) and number.dim() == 0 for number in numbers)
    assert tuple(info.as_dict()) == NUMBERS and info.accepted.dtype == torch.bool and info.accepted
    for name, value in info.as_dict().items():
        assert value == getattr(info, name).item() or math.isnan(value), name
        assert type(value) is type(getattr(info, name).item())
    torch.testing.assert_close(info.loss.to(dtype), before)
    assert all(p.dtype == dtype and torch.isfinite(p).all() for p in problem.model.parameters())


@every_second_order
def test_every_setting_is_described(kind):
    text = woodbury.GaussNewton.__doc__ + (SPECIMENS[kind].__doc__ or "")
    assert [name for name in arguments(kind) if not re.search(rf"\b{name}\b.*:", text)] == []


@every_optimizer
def test_the_loss_falls_with_default_settings_and_under_a_scheduler_of_torch(kind):
    problem = problems.make("softmax", torch.float32)
    optimizer = build(kind, problem)
    losses = [optimizer.step(problem.inputs, problem.targets).loss.item() for _ in range(25)]
    assert losses[-1] < (0.7 if kind in SECOND_ORDER else 0.99) * losses[0]
    assert isinstance(optimizer, torch.optim.Optimizer) and "lr" in repr(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=4)
    for _ in range(3):
        assert torch.isfinite(optimizer.step(problem.inputs, problem.targets).loss)
        scheduler.step()


@over(FIRST_ORDER)
def test_first_order_rivals_do_what_torch_does(kind):
    problem, twin = problems.make("softmax"), problems.make("softmax")
    optimizer = build(kind, problem, lr=0.1)
    plain = getattr(torch.optim, type(optimizer).__name__)(twin.model.parameters(), lr=0.1)
    for lr, size in ((0.1, 7), (0.5, 3), (0.01, 1)):
        optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = lr
        info = optimizer.step(problem.inputs[:size], problem.targets[:size])
        plain.zero_grad()
        loss = twin.loss(twin.model(twin.inputs[:size]), twin.targets[:size])
        loss.backward()
        plain.step()
        assert torch.equal(info.loss, loss.detach()) and info.accepted and torch.isnan(info.damping)
    assert_same(state_of(problem.model), state_of(twin.model))


# -- p, the model behind it, and rho ---------------------------------------------------------------------

SUBSETS = [5, 0, 2, 3], [4], list(range(problems.N))


def cases():
    """Every problem with both kinds of B, of which one is full and one by layer, and the rest in turn.

    Methods without rows take every fifth problem: their products are those of solver="products", for which
    `test_solvers.py` takes every one.
    """
    for j, (kind, blocks) in enumerate([*((kind, None) for kind in SOLVING), ("smw-gn", "layer")]):
        by_layer = (blocks or arguments(kind).get("blocks")) == "layer"
        is_second = by_layer == (method(kind).curvature == "gauss-newton")
        turn = slice(int(is_second), None, 2) if SPECIMENS[kind].settings.solver.forms_rows else slice(0, None, 5)
        for i, name in list(enumerate(problems.PROBLEMS))[turn]:
            decay, momentum = (0.0, 0.1)[(i // 2 + j) % 2], (0.0, 0.7)[(i // 4 + j // 2) % 2]
            if method(kind).any_layer or name not in problems.SHARED:
                yield kind, blocks, name, SUBSETS[(i + j) % 3], decay, momentum


@pytest.mark.parametrize("kind, blocks, name, subset, decay, momentum", list(cases()))
def test_p_its_norm_the_predicted_decrease_and_rho_are_those_of_dense_matrices(
    kind, blocks, name, subset, decay, momentum
):
    problem = problems.make(name)
    momentum = momentum if "momentum" in arguments(kind) else 0.0
    settings = TIGHT | {"momentum": momentum} | ({"blocks": blocks} if blocks else {})
    # without the guard: some of these steps raise the loss, and theta is to move all the same
    optimizer = build(kind, problem, settings, lr=0.3, damping=0.2, weight_decay=decay, guard=None)
    p = torch.zeros_like(theta_of(problem.model))
    remembers = momentum > 0 or "warm_start" in arguments(kind)
    for steps in (1, 2) if remembers else (1,):  # the second starts from the first p
        theta, W = theta_of(problem.model), torch.full_like(p, decay)
        p, B, g = dense(kind, problem, subset, 0.2, blocks, decay=W, shift=momentum * p)
        with bounds.known_apart():
            shown = flatten(optimizer.direction(problem.inputs, problem.targets, subset=subset))
        error = bound(kind, B, 0.2, steps)
        assert reference.relative_error(shown, p) <= error
        residual = optimizer.verify(problem.inputs, problem.targets, subset=subset)
        assert residual <= 10 * method(kind).tolerance + error
        loss = loss_at(problem, theta)
        # rho is measured at theta + p, although theta moves by lr p
        actual = loss_at(problem, theta, W) - loss_at(problem, theta + p, W)
        info = optimizer.step(problem.inputs, problem.targets, subset=subset)
        predicted = -(g + W * theta) @ p - 0.5 * p @ (B @ p + W * p)
        close = {"rtol": 0, "atol": float(error * ((g + W * theta).norm() + p.norm()) * p.norm())}
        torch.testing.assert_close(info.loss, loss)
        torch.testing.assert_close(info.damping.item(), 0.2)
        torch.testing.assert_close(info.predicted, predicted, **close)
        torch.testing.assert_close(info.step_norm, p.norm(), rtol=error, atol=0)
        ratio = actual / predicted if predicted > 0 else torch.tensor(-INF).double()
        torch.testing.assert_close(info.ratio, ratio)
        assert reference.relative_error(theta_of(problem.model) - theta, 0.3 * p) <= 2 * error


@every_second_order
@pytest.mark.parametrize("subset", SUBSETS, ids=["part", "one", "all"])
def test_a_p_that_does_not_solve_the_system_shows_in_verify_and_is_judged_by_the_model(kind, subset):
    """verify is its residual by dense matrices; m(0) - m(p) = -g.p - p B p / 2 for this very p.

    An approximate B is exact where S2 is one sample.
    """
    problem = problems.make("softmax")
    optimizer = build(kind, problem, LOOSE, damping=0.05)
    batch = problem.inputs, problem.targets
    _, B, g = dense(kind, problem, subset, 0.05)
    p = flatten(optimizer.direction(*batch, subset=subset))
    residual = (B @ p + 0.05 * p + g).norm() / g.norm()
    assert residual > 1e-3 or len(subset) == 1  # it is a wrong step
    torch.testing.assert_close(optimizer.verify(*batch, subset=subset), residual)
    if method(kind).solves or len(subset) == 1:
        predicted = optimizer.step(*batch, subset=subset).predicted
        torch.testing.assert_close(predicted, -g @ p - 0.5 * p @ B @ p)


@every_second_order
def test_p_tends_to_the_scaled_gradient_for_large_damping(kind):
    problem = problems.make("softmax")
    p = build(kind, problem, TIGHT, damping=1e9).direction(problem.inputs, problem.targets)
    g = reference.gradient(*problem)
    # damping split over two Kronecker factors leaves a term of the order 1 / sqrt(damping)
    assert reference.relative_error(1e9 * flatten(p), -g) < (1e-8 if method(kind).solves else 1e-3)


@every_second_order
def test_float32_gives_the_p_of_float64(kind):
    single, double = problems.make("softmax", torch.float32), problems.make("softmax")
    p, q = (
        build(kind, one, TIGHT, damping=0.1).direction(one.inputs, one.targets, subset=[0, 3, 5])
        for one in (single, double)
    )
    assert {value.dtype for value in p.values()} == {torch.float32}
    assert reference.relative_error(flatten(p).double(), flatten(q)) < 1e-4


# -- direction and verify --------------------------------------------------------------------------------


@every_second_order
@pytest.mark.parametrize("what", ["plain", "dropout", "buffers"])
def test_direction_and_verify_change_nothing_and_the_next_step_takes_that_p(kind, what):
    problem = with_dropout() if what == "dropout" else problems.make("softmax")
    if what == "buffers":
        problem.model = problems.Counting(nn.Linear(5, 4)).double()
    optimizer = build(kind, problem, RICH, lr=0.3, seed=1)
    batch = problem.inputs, problem.targets
    optimizer.step(*batch)
    for parameter in problem.model.parameters():
        parameter.grad = torch.ones_like(parameter)  # the user's own
    before, random, told = state_of(problem.model), torch.get_rng_state(), plainly_told(optimizer)
    with unchanged(optimizer):
        optimizer.direction(1e-6 * problem.inputs[:1], problem.targets[:1])
        first = optimizer.direction(*batch)
        optimizer.verify(*batch)
        optimizer.direction(*batch, subset=[1, 2], full=[batch])
        assert_same(first, optimizer.direction(*batch))
    assert list(first) == list(dict(problem.model.named_parameters()))
    assert plainly_told(optimizer) == told and torch.equal(torch.get_rng_state(), random)
    assert all((parameter.grad == 1).all() for parameter in problem.model.parameters())
    optimizer.step(*batch)
    assert_moved(problem.model, before, first, 0.3)


@every_second_order
def test_a_step_runs_the_model_twice_and_leaves_gradients_alone(kind):
    problem, calls = problems.make("softmax"), []
    problem.model[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = build(kind, problem)
    optimizer.step(problem.inputs, problem.targets)  # looks at the model first
    calls.clear()
    optimizer.step(problem.inputs, problem.targets)
    assert len(calls) == 2  # once at theta, once at theta + p
    assert all(p.grad is None for p in problem.model.parameters())


# -- state and copies ------------------------------------------------------------------------------------


def from_saved_state(optimizer, kind, name, settings):
    """A new optimizer, of another seed, lr and damping, that has loaded the state; its keys are names."""
    problem, state = problems.make(name), optimizer.state_dict()
    names = list(dict(problem.model.named_parameters()))
    if kind in SECOND_ORDER and settings is RICH:
        assert state["param_groups"][0]["param_names"] == names
        named = {*names, *dict(problem.model.named_modules())}
        assert all(isinstance(key, str) for key in state["state"])
        assert all(set(value) <= named for value in state["state"].values() if isinstance(value, dict))
    problem.model.load_state_dict(optimizer.model.state_dict())
    start = woodbury.LevenbergMarquardt(initial=7.0)
    resumed = build(kind, problem, settings, {"seed": 99, "damping": start}, lr=0.1)
    saved = through_a_file(state, map_location="cpu")
    kept = dict(saved["state"])
    resumed.load_state_dict(saved)
    assert saved["state"].keys() == kept.keys()
    assert all(saved["state"][key] is value for key, value in kept.items())
    return resumed


COPIES = {
    "deepcopy": lambda optimizer, *case: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, *case: pickle.loads(pickle.dumps(optimizer)),
    "state_dict": from_saved_state,
}
MEMORY = {"momentum": 0.9, "memory": 2, "curvature_samples": 4}  # rows of every form
CARRIED = [(kind, "softmax", RICH) for kind in OPTIMIZERS]
CARRIED += [
    ("smw-gn", name, MEMORY | {"metric": metric}) for name, metric in zip(problems.SHARED, METRICS, strict=False)
]
CARRIED.append(("smw-ng", "softmax", MEMORY))


@pytest.mark.parametrize("kind, name, settings", CARRIED)
@pytest.mark.parametrize("how", COPIES)
def test_copies_and_saved_states_go_on_identically_and_apart(kind, name, settings, how):
    problem = problems.make(name)
    optimizer = build(kind, problem, settings, {"seed": 3}, lr=0.5)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(6):  # between two refreshes of what is kept for several steps
        optimizer.step(problem.inputs, problem.targets)
    twin = COPIES[how](optimizer, kind, name, settings)
    assert twin.model is not optimizer.model
    with unchanged(optimizer):
        infos = [str(twin.step(problem.inputs, problem.targets).as_dict()) for _ in range(3)]  # nan: no damping
    assert infos == [str(optimizer.step(problem.inputs, problem.targets).as_dict()) for _ in range(3)]
    assert_same(state_of(optimizer.model), state_of(twin.model))


# -- settings, read at every step ------------------------------------------------------------------------


IN_GROUPS = {"lr": 0.3, "weight_decay": 0.2, "momentum": 0.6}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in OPTIMIZERS for name in taken(kind, IN_GROUPS)])
def test_settings_in_the_groups_act_as_if_it_had_been_built_with_them(kind, name):
    """A decay may be a tensor, and change there."""
    value = IN_GROUPS[name]
    built, changed, held = (problems.make("softmax") for _ in range(3))
    optimizers = build(kind, built, **{name: value}), build(kind, changed), build(kind, held)
    is_decay = name == "weight_decay" and kind in SECOND_ORDER
    tensor = torch.tensor(value, dtype=torch.float64) if is_decay else value
    for step in range(3):
        if step == 2:
            value *= 0.5
            tensor *= 0.5
        for optimizer, own in zip(optimizers, (value, value, tensor), strict=True):
            optimizer.param_groups[0][name] = own
            optimizer.step(built.inputs, built.targets)
    assert_same(state_of(built.model), state_of(changed.model))
    torch.testing.assert_close(theta_of(held.model), theta_of(built.model))
    plain = problems.make("softmax")
    optimizer = build(kind, plain)
    for _ in range(3):
        optimizer.step(plain.inputs, plain.targets)
    assert not torch.equal(theta_of(plain.model), theta_of(built.model))


@every_second_order
@pytest.mark.parametrize("subset", SUBSETS, ids=["part", "one", "all"])
def test_groups_have_their_own_lr_and_weight_decay_in_the_one_system(kind, subset):
    """An lr may be a tensor."""
    problem = problems.make("softmax")
    named = list(problem.model.named_parameters())
    weights, biases = ([p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias"))
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": torch.tensor(0.5).double()}]
    optimizer = build(kind, problem, TIGHT, damping=0.05, params=groups)
    decay = {n: torch.full_like(p, 0.3 * n.endswith("weight")) for n, p in problem.model.named_parameters()}
    p = optimizer.direction(problem.inputs, problem.targets, subset=subset)
    if method(kind).solves:
        expected, B, _ = dense(kind, problem, subset, 0.05, decay=flatten(decay))
        assert reference.relative_error(flatten(p), expected) <= bound(kind, B, 0.05)
    before = state_of(problem.model)
    optimizer.step(problem.inputs, problem.targets, subset=subset)
    assert_moved(problem.model, before, p, lambda name: 0.5 if name.endswith("bias") else 1.0)


@every_second_order
def test_groups_added_later_carry_names_and_settings(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, damping=0.1, params=list(problem.model[0].parameters()))
    before = state_of(problem.model)
    optimizer.step(problem.inputs, problem.targets)
    assert torch.equal(problem.model[2].weight, before["2.weight"])  # in no group
    optimizer.add_param_group({"params": list(problem.model[2].parameters()), "lr": 0.5})
    assert optimizer.param_groups[1]["param_names"] == ["2.weight", "2.bias"]
    before, p = state_of(problem.model), optimizer.direction(problem.inputs, problem.targets)
    optimizer.step(problem.inputs, problem.targets)
    assert not torch.equal(problem.model[2].weight, before["2.weight"])
    assert_moved(problem.model, before, p, lambda name: 0.5 if name.startswith("2") else 1.0)
    with pytest.raises(ValueError, match="does not belong"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@every_optimizer
def test_frozen_parameters_stay(kind):
    problem = problems.make("residual")  # a frozen layer and a frozen bias
    optimizer = build(kind, problem, RICH)
    fixed = {name for name, p in problem.model.named_parameters() if not p.requires_grad}
    for _ in range(2):
        before = state_of(problem.model)
        for _ in range(2):
            optimizer.step(problem.inputs, problem.targets)
        after = state_of(problem.model)
        assert {name for name in after if torch.equal(after[name], before[name])} == fixed
        problem.model.stem.bias.requires_grad_(False)  # and frozen on the way
        fixed = {*fixed, "stem.bias"}
    if kind in SECOND_ORDER:
        assert not fixed & set(optimizer.direction(problem.inputs, problem.targets))


@every_second_order
def test_layers_that_stop_being_used_or_get_replaced_are_followed(kind):
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    model = Parts(lambda m, x: m.head(torch.tanh(m.b(m.a(x)) if m.use_b else m.a(x))), **layers, use_b=True)
    model.double()
    x, t = torch.randn(6, 4).double(), torch.randint(3, (6,))
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), damping=0.1, **taken(kind, TIGHT | FORGETFUL))
    optimizer.step(x, t)
    model.use_b = False
    assert optimizer.direction(x, t)["b.weight"].abs().max() == 0
    if method(kind).solves:
        check_verify(kind, optimizer, x, t)
    before = state_of(model)
    optimizer.step(x, t)
    assert torch.equal(model.b.weight, before["b.weight"])
    assert not torch.equal(model.a.weight, before["a.weight"])
    model.use_b = True
    model.b.weight = nn.Parameter(torch.eye(4).double())  # which the optimizer does not have
    with pytest.raises(
        ValueError, match=r"parameter 'b\.weight' is not one .* Make a new optimizer, or call add_pa"
    ):
        optimizer.step(x, t)
    optimizer.add_param_group({"params": [model.b.weight]})
    optimizer.step(x, t)
    assert not torch.equal(model.b.weight, torch.eye(4).double())
    model.b = nn.Identity()  # nothing in its place
    optimizer.step(x, t)


# -- damping and acceptance ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thirds:
    """A policy of one's own."""

    initial: float = 2.0
    floor: float = 0.25

    def next(self, value, ratio):
        return value / 3 if ratio > 0.9 else 1.5 * value


def levenberg_marquardt(value, ratio):
    """The rule of the default policy with boost 2, drop 1/2 and threshold 1/4, written out."""
    return value * (2 if not ratio >= 0.25 else 0.5 if ratio > 0.75 else 1)


@every_second_order
@pytest.mark.parametrize(
    "policy, rule",
    [
        (woodbury.LevenbergMarquardt(initial=1.0, boost=2, drop=0.5, floor=1e-3), levenberg_marquardt),
        (woodbury.Constant(0.7, floor=0.1), lambda value, ratio: 0.7),
        (Thirds(), Thirds().next),
    ],
    ids=["levenberg-marquardt", "constant", "own"],
)
def test_damping_follows_its_policy(kind, policy, rule):
    problem = problems.make("squared")
    optimizer = build(kind, problem, damping=policy, curvature_samples=2, seed=0)
    value = policy.initial
    for _ in range(8):
        info = optimizer.step(problem.inputs, problem.targets)
        assert info.damping.item() == pytest.approx(value + policy.floor, rel=bounds.rounding(8))
        value = rule(value, info.ratio.item())


@every_second_order
def test_accept_threshold_keeps_theta_where_the_model_failed(kind):
    problem = problems.make("softmax")
    optimizer, before = build(kind, problem, accept=1e6, curvature_samples=3), problem.model[0].weight.clone()
    with unchanged(problem.model):
        info = optimizer.step(problem.inputs, problem.targets)
    assert not info.accepted and torch.isfinite(info.ratio) and info.step_norm > 0
    eta = build(kind, problem, damping=10.0).step(problem.inputs, problem.targets).ratio.item()
    for accept in (eta - 1e-3, eta + 1e-3):  # rho >= eta is the rule
        again = problems.make("softmax")
        info = build(kind, again, damping=10.0, accept=accept).step(again.inputs, again.targets)
        assert info.ratio.item() == pytest.approx(eta) and bool(info.accepted) == (accept < eta)
        assert torch.equal(again.model[0].weight, before) == (accept > eta)


@that_take("momentum")
@pytest.mark.parametrize("accept", [None, 0.1])
def test_a_predicted_increase_is_never_a_good_step(kind, accept):
    """Momentum can point where the model itself expects f to rise: rho is -inf there, and lambda rises."""
    problem = problems.make("softmax")
    optimizer = build(kind, problem, momentum=0.9, accept=accept)
    optimizer.step(problem.inputs, problem.targets)
    g = optimizer.direction(problem.inputs, problem.targets)
    optimizer.state["momentum"] = {name: -50 * value for name, value in g.items()}  # uphill
    with unchanged(problem.model) if accept is not None else nullcontext():
        info = optimizer.step(problem.inputs, problem.targets)
    assert info.predicted < 0 and info.ratio == -torch.inf and bool(info.accepted) == (accept is None)
    if accept is not None:
        assert all(value.abs().max() == 0 for value in optimizer.state["momentum"].values())
        assert optimizer.step(problem.inputs, problem.targets).accepted  # and it does not get stuck


@every_second_order
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_non_finite_trial_loss_is_a_rejected_step(kind, momentum):
    """Of a model that is finite where it stands, infinite a step further on."""
    model = Parts(lambda m, x: torch.where(m.limit < m.inner(x), torch.inf, 1.0) * m.inner(x), limit=3 + 1e-6)
    model.inner = nn.Linear(3, 1).double()
    nn.init.constant_(model.inner.weight, 1.0)
    nn.init.constant_(model.inner.bias, 0.0)
    x, t = torch.ones(4, 3).double(), 100 * torch.ones(4, 1).double()
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), **taken(kind, {"momentum": momentum}))
    with unchanged(model):
        info = optimizer.step(x, t)
    assert not info.accepted and info.ratio == -torch.inf
    model.limit = 1e9
    info = optimizer.step(x, t)
    assert info.accepted and info.damping.item() == pytest.approx(1.01 + 1e-3)


# -- S2, batches and loaders -----------------------------------------------------------------------------


@every_second_order
def test_curvature_samples_says_how_many_are_drawn(kind):
    problem = problems.make("squared")
    batch = problem.inputs[:4], problem.targets[:4]
    fixed = build(kind, problem, damping=0.1)
    possible = {
        count: [flatten(fixed.direction(*batch, subset=list(chosen))) for chosen in combinations(range(4), count)]
        for count in range(1, 5)
    }
    for wanted, expected in ((None, 4), (3, 3), (0.6, 2), (1.0, 4), (0.01, 1), (4, 4)):
        p = flatten(build(kind, problem, curvature_samples=wanted, damping=0.1).direction(*batch))
        errors = {count: min(reference.relative_error(p, q) for q in some) for count, some in possible.items()}
        rounding = bounds.of_step(problem.model, problem.loss, *batch, 0.1 / 4, curvature=method(kind).curvature)
        same = method(kind).tolerance + rounding
        assert [count for count, error in errors.items() if error <= same] == [expected]


@every_second_order
def test_subset_is_drawn_at_random_and_by_seed(kind):
    problem = problems.make("softmax")

    def directions(seed, **options):
        optimizer = build(kind, problem, FORGETFUL, curvature_samples=3, seed=seed, lr=0.0, damping=1.0)
        found = []
        for _ in range(2):
            found.append(flatten(optimizer.direction(problem.inputs, problem.targets, **options)))
            optimizer.step(problem.inputs, problem.targets, **options)
        return found

    first, again, other = directions(1), directions(1), directions(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    given = [*directions(1, subset=[5, 0, 2, 3]), *directions(2, subset=torch.tensor([0, 2, 3, 5]))]
    _, B, _ = dense(kind, problem, [5, 0, 2, 3], 1.0)
    assert all(reference.relative_error(p, given[0]) <= bound(kind, B, 1.0) for p in given)


@every_optimizer
def test_any_batch_size_at_any_step(kind):
    problem = problems.make("softmax")
    options = FORGETFUL | TIGHT | {"damping": 0.1}
    optimizer = build(kind, problem, options, {"curvature_samples": 4}, lr=0.1)
    batches = [(problem.inputs[:size], problem.targets[:size]) for size in (7, 2, 1)]
    loader = DataLoader(TensorDataset(problem.inputs, problem.targets), batch_size=5, shuffle=True)
    for batch in [*batches, *loader]:
        if kind in SECOND_ORDER:
            subset = list(range(min(4, len(batch[0]))))
            p = flatten(optimizer.direction(*batch, subset=subset))
            fresh = build(kind, problem, options).direction(*batch, subset=subset)  # has seen no other batch
            part = problems.Problem(problem.model, problem.loss, *batch)
            expected, B, _ = dense(kind, part, subset, 0.1)
            assert reference.relative_error(p, flatten(fresh)) <= bound(kind, B, 0.1)
            if kind in SOLVING:
                assert reference.relative_error(p, expected) <= bound(kind, B, 0.1)
        assert optimizer.step(*batch).accepted


OF_LOADERS = ["squared-sum", "softmax-weighted-plain", "tokens-ignored"]


@pytest.mark.parametrize(
    "kind, name",
    [
        (k, name if method(k).any_layer else name.replace("tokens", "softmax"))
        for k in SECOND_ORDER
        for name in OF_LOADERS
    ],
)
def test_full_takes_gradient_loss_and_trial_over_a_loader_and_the_curvature_from_the_batch(kind, name):
    """A mean is over what is not ignored in all of it, whatever the batches' own means are."""
    problem = problems.make(name)
    x, t = problem.inputs, problem.targets
    loader = [(x[:4], t[:4]), (x[4:6], t[4:6]), (x[6:], t[6:])]  # where some are ignored, all of the last
    optimizer = build(kind, problem, TIGHT, damping=0.1, guard=None)
    p = flatten(optimizer.direction(x[:3], t[:3], full=loader))
    chosen = flatten(optimizer.direction(x[:5], t[:5], subset=[2, 0, 1], full=loader))
    same = flatten(optimizer.direction(x, t, subset=[0, 1, 2]))
    expected, B, g = dense(kind, problem, [0, 1, 2], 0.1)
    for other in (p, chosen, *([expected] if method(kind).solves else [])):
        assert reference.relative_error(other, same) <= bound(kind, B, 0.1)
    theta = theta_of(problem.model)
    info = optimizer.step(x[:3], t[:3], full=loader)
    torch.testing.assert_close(info.loss, loss_at(problem, theta))
    if method(kind).solves:
        torch.testing.assert_close(info.predicted, -g @ p - 0.5 * p @ B @ p)
    decrease = loss_at(problem, theta) - loss_at(problem, theta + p)
    torch.testing.assert_close(info.ratio * info.predicted, decrease, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(theta_of(problem.model), theta + p)


@every_second_order
@pytest.mark.parametrize("part", [None, 4])
def test_dropout_masks_agree_between_the_two_evaluations_and_in_verify(kind, part):
    """Two dropout layers: masks drawn piece by piece differ from masks drawn for the whole batch.

    With a loader in full= as well, whose shuffle drops the last batch.
    """
    problem = with_dropout()
    batch = problem.inputs, problem.targets
    # With a huge damping p is tiny and the model exact: any other mask would show in the ratio at once.
    optimizer = build(kind, problem, TIGHT, damping=1e4, curvature_samples=part)
    for _ in range(3):
        # a p that is tiny for any B says nothing about the masks of B, but those of g show
        if method(kind).solves:
            check_verify(kind, optimizer, *batch)
        else:
            assert optimizer.verify(*batch) < 0.1
        assert abs(optimizer.step(*batch).ratio - 1) < 1e-2
    if method(kind).solves:
        check_verify(kind, build(kind, problem, TIGHT, damping=0.1, curvature_samples=part), *batch)
    # and the masks still change from step to step
    assert len({optimizer.step(*batch).loss.item() for _ in range(3)}) == 3
    loader = DataLoader(TensorDataset(*batch), batch_size=3, shuffle=True, drop_last=True)
    for _ in range(3):
        assert abs(optimizer.step(*batch, full=loader).ratio - 1) < 1e-2


# -- forward, targets and outputs ------------------------------------------------------------------------


@every_optimizer
def test_forward_takes_dictionaries_and_targets_may_be_none(kind):
    """forward(model, batch) against zeros is model(joined) against x, up to rounding."""
    batch = {"x": torch.randn(7, 2).double(), "y": torch.randn(7, 2).double(), "name": "batch"}
    joined = torch.cat([batch["x"], batch["y"]], dim=1)

    def residual(model, batch):
        return model(torch.cat([batch["x"], batch["y"]], dim=1)) - batch["x"]

    model = problems.mlp(4, 5, 2).double()
    twin = copy.deepcopy(model)
    settings = taken(kind, {"damping": 0.1})
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), forward=residual, **settings)
    plain = OPTIMIZERS[kind](twin, nn.MSELoss(), **settings)
    chosen = {"subset": [1, 4]} if kind in SECOND_ORDER else {}
    for _ in range(2):
        a, b = optimizer.step(batch, **chosen), plain.step(joined, batch["x"], **chosen)
        torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(theta_of(model), theta_of(twin))
    if kind in SECOND_ORDER:
        a, b = optimizer.verify(batch, None, subset=[1, 4]), plain.verify(joined, batch["x"], subset=[1, 4])
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-10)


@every_optimizer
@pytest.mark.parametrize("squeezed", [False, True], ids=["flattened", "squeezed"])
def test_one_dimensional_outputs_work(kind, squeezed):
    model = nn.Sequential(*problems.mlp(3, 4, 1), *([] if squeezed else [nn.Flatten(0)])).double()
    forward = (lambda model, x: model(x).squeeze()) if squeezed else None
    x, t = torch.randn(6, 3).double(), torch.randn(6).double()
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), forward=forward, **taken(kind, TIGHT | {"damping": 0.1}))
    expected = nn.MSELoss()(model(x).flatten(), t).detach()
    if method(kind).solves and kind in SECOND_ORDER:
        check_verify(kind, optimizer, x, t, subset=[1, 2, 3])
    info = optimizer.step(x, t)
    torch.testing.assert_close(info.loss, expected)
    assert info.accepted


@every_second_order
@pytest.mark.parametrize("clone", [False, True])
def test_derivatives_of_the_network_in_its_inputs_are_exact_or_refused(kind, clone):
    """u' - u for a network u: the weights enter a second time, past the rows of their layers."""
    points, zeros = torch.rand(7, 1).double(), torch.zeros(7, 1).double()
    problem = problems.Problem(problems.mlp(1, 6, 1).double(), nn.MSELoss(), points, zeros)

    def residual(model, x):
        x = (x.detach().clone() if clone else x).requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du - u

    if "fallback" in arguments(kind) or not method(kind).any_layer:  # rows come from the layers
        way_out = ".*fallback='autograd'" if "fallback" in arguments(kind) else ""
        with pytest.raises(ValueError, match=f"differentiated in its inputs{way_out}"):
            build(kind, problem, forward=residual).step(points)
    if not method(kind).any_layer:
        return
    optimizer = build(kind, problem, TIGHT, {"fallback": "autograd"}, forward=residual, damping=0.01)
    p, B, g = dense(kind, problem, [0, 2, 3], 0.01, forward=residual)
    shown = flatten(optimizer.direction(points, subset=[0, 2, 3]))
    assert reference.relative_error(shown, p) <= bound(kind, B, 0.01)
    info = optimizer.step(points, subset=[0, 2, 3])
    torch.testing.assert_close(info.predicted, -g @ p - 0.5 * p @ B @ p)
    after = residual(problem.model, points).square().mean()
    torch.testing.assert_close(info.loss - after.detach(), info.ratio * info.predicted)
    check_verify(kind, optimizer, points)


# -- bad input -------------------------------------------------------------------------------------------

FOUR, ZEROS = torch.zeros(4, 5).double(), torch.zeros(4).long()
BAD_BATCHES = [
    (FOUR + NAN, ZEROS, {}, "inputs hold nan or inf in 4 sample.*index 0"),
    (torch.tensor([[0.0] * 5, [INF] * 5]).double(), ZEROS[:2], {}, "inputs hold nan or inf in 1.*index 1"),
    (FOUR, torch.full((4, 4), NAN).double(), {}, "targets hold nan or inf"),
    (FOUR[:0], ZEROS[:0], {}, "inputs hold no sample"),
    (torch.tensor(1.0).double(), ZEROS[:1], {}, "inputs must have a sample axis"),
    (FOUR, ZEROS[:3], {}, "4 samples but targets"),
    (FOUR, [0, 0, 0, 0], {}, r"targets must be a tensor or None, got list: write torch\.as_tensor\(targets\)"),
    (None, ZEROS, {}, "inputs must hold at least one tensor"),
    (FOUR, ZEROS, {"subsets": [0]}, "unexpected keyword argument 'subsets'"),
    (torch.zeros(4, 6).double(), ZEROS, {}, "shapes cannot be multiplied"),
]
BAD_FOR_SECOND_ORDER = [
    (FOUR, ZEROS + 9, {}, r"class indices must lie in 0\.\.3, got 9"),
    (FOUR, None, {}, "CrossEntropyLoss needs targets"),
    (FOUR, ZEROS, {"subset": [0, 4]}, r"subset.*0\.\.3"),
    (FOUR, ZEROS, {"subset": [0, 0]}, "subset.*twice"),
    (FOUR, ZEROS, {"subset": [0.5]}, "subset must be.*integer"),
    (FOUR, ZEROS, {"subset": []}, "subset must be a non-empty"),
    (FOUR, ZEROS, {"subset": "ab"}, "subset"),
    (FOUR, ZEROS, {"full": 3}, "full"),
    (FOUR, ZEROS, {"full": [FOUR]}, "full"),
    (FOUR, ZEROS, {"full": []}, "full= holds no batch"),
    (FOUR, ZEROS, {"full": iter([(FOUR, ZEROS)])}, "full= must be re-iterable"),
    (FOUR, ZEROS, {"full": [(FOUR, ZEROS - 7)]}, r"0\.\.3, got -7"),
]


@every_optimizer
def test_bad_batches_and_parameters_are_refused_by_name_before_anything_changes(kind):
    """Nor is a hook left behind."""
    problem = problems.make("softmax")
    optimizer = build(kind, problem, RICH | {"curvature_samples": 0.5})
    optimizer.step(problem.inputs, problem.targets)
    for inputs, targets, options, message in BAD_BATCHES + BAD_FOR_SECOND_ORDER * (kind in SECOND_ORDER):
        with refused(optimizer, message, (ValueError, TypeError, RuntimeError)):
            optimizer.step(inputs, targets, **options)
        assert not any(module._forward_hooks or "forward" in vars(module) for module in problem.model.modules())
    assert optimizer.step(problem.inputs, problem.targets).accepted
    with torch.no_grad():
        problem.model[0].weight[0, 0] = torch.nan
    last, state = problem.model[2].weight.clone(), pickle.dumps(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"loss at the current parameters is nan.*Check the model's parameters"):
        optimizer.step(problem.inputs, problem.targets)
    assert torch.equal(problem.model[2].weight, last) and pickle.dumps(optimizer.state_dict()) == state


@pytest.mark.parametrize(
    "kind, name",
    [(kind, "softmax-ignored") for kind in SECOND_ORDER]
    + [(kind, "tokens-ignored") for kind in SECOND_ORDER if method(kind).any_layer],
)
def test_a_batch_or_subset_whose_targets_are_all_ignored_changes_nothing(kind, name):
    problem = problems.make(name)
    optimizer = build(kind, problem)
    none = torch.full_like(problem.targets, problem.loss.ignore_index)
    with refused(optimizer, r"every target of the (batch|curvature samples) is ignored"):
        optimizer.step(problem.inputs, none)
    with refused(optimizer, "every target of the curvature samples is ignored"):
        optimizer.step(problem.inputs, problem.targets, subset=[6])
    with refused(optimizer, "every target of full= is ignored"):
        optimizer.step(problem.inputs, problem.targets, full=[(problem.inputs, none)])
    assert optimizer.step(problem.inputs, problem.targets).accepted


@every_second_order
def test_surroundings_that_a_step_cannot_work_in_are_refused(kind):
    problem = problems.make("softmax", torch.float32)
    optimizer = build(kind, problem, TIGHT)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        optimizer.step(problem.inputs, problem.targets)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        optimizer.step(problem.inputs, problem.targets)
    with pytest.raises(ValueError, match="curvature_samples=8 is more than the 7 samples"):
        build(kind, problem, curvature_samples=8).step(problem.inputs, problem.targets)
    with torch.no_grad():
        assert optimizer.verify(problem.inputs, problem.targets) < (1e-4 if method(kind).solves else 1)
        assert optimizer.step(problem.inputs, problem.targets).accepted


# -- precision of the passes -----------------------------------------------------------------------------


@that_take("autocast")
@pytest.mark.parametrize("name", ["softmax", "pictures", "sentences"])
def test_autocast_runs_the_model_in_bfloat16_and_solves_in_float32(kind, name):
    problem = problems.make(name, dtype=torch.float32)
    exact = build(kind, problem, damping=0.1)
    cast = build(kind, problem, damping=0.1, autocast=torch.bfloat16)
    seen = []
    layers = [own for own in problem.model.modules() if isinstance(own, nn.Linear)]
    hooks = [own.register_forward_hook(lambda *args: seen.append(args[-1].dtype)) for own in layers]
    p, q = (flatten(one.direction(problem.inputs, problem.targets)) for one in (exact, cast))
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.float32, torch.bfloat16} and q.dtype == torch.float32
    error = (p - q).norm() / p.norm()
    assert 1e-5 < error < 0.1
    before = problem.loss(problem.model(problem.inputs), problem.targets)
    gentle = build(kind, problem, lr=0.2, damping=1.0, autocast=torch.bfloat16)
    for _ in range(5):
        assert gentle.step(problem.inputs, problem.targets).accepted
    assert problem.loss(problem.model(problem.inputs), problem.targets) < before


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_hooks_of_torch_and_its_profiler_see_the_steps_that_they_are_there_for(kind):
    problem = problems.make("softmax")
    optimizer = OPTIMIZERS[kind](problem.model, problem.loss)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("own, before")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("all, before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("own, after")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all, after")),
    ]
    for handle in handles:  # each alone
        optimizer.step(problem.inputs, problem.targets)
        handle.remove()
    optimizer.step(problem.inputs, problem.targets)
    kinds = ["own, before", "all, before", "own, after", "all, after"]
    assert sorted(seen) == sorted(name for index, name in enumerate(kinds) for _ in range(index + 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step(problem.inputs, problem.targets)
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert name in [event.key for event in profile.key_averages()]
