"""The public contract, over every optimizer in the table that solves in sample space."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import problems
import reference
import woodbury
from woodbury._vector import flatten
from woodbury.optim import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("kind", [name for name in OPTIMIZERS if name.startswith("smw-")])


def build(kind, problem, **settings):
    return OPTIMIZERS[kind](problem.model, problem.loss, **settings)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@every_optimizer
def test_is_a_torch_optimizer_and_reports_0_dim_tensors(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem)
    assert isinstance(optimizer, torch.optim.Optimizer)
    info = optimizer.step(problem.inputs, problem.targets)
    assert optimizer.last is info
    for name in ("loss", "damping", "ratio", "predicted", "step_norm", "accepted"):
        assert getattr(info, name).shape == ()
    assert set(info.as_dict()) == {"loss", "damping", "ratio", "predicted", "step_norm", "accepted"}
    assert kind and "lr" in repr(optimizer)


@every_optimizer
def test_loss_falls_with_default_settings(kind):
    problem = problems.make("softmax", torch.float32)
    optimizer = build(kind, problem)
    losses = [optimizer.step(problem.inputs, problem.targets).loss.item() for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]


@every_optimizer
def test_direction_and_verify_change_nothing(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, curvature_samples=3, momentum=0.5, seed=1)
    optimizer.step(problem.inputs, problem.targets)
    before, state, random = (
        state_of(problem.model),
        pickle.dumps(optimizer.state_dict()),
        torch.get_rng_state(),
    )
    first = optimizer.direction(problem.inputs, problem.targets)
    residual = optimizer.verify(problem.inputs, problem.targets)
    second = optimizer.direction(problem.inputs, problem.targets)
    assert residual < 1e-12
    assert_same(first, second)
    assert_same(state_of(problem.model), before)
    assert pickle.dumps(optimizer.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), random)
    start = state_of(problem.model)
    optimizer.step(problem.inputs, problem.targets)  # takes the very direction that was shown
    for name, value in problem.model.state_dict().items():
        torch.testing.assert_close(value, start[name] + first[name])


@every_optimizer
def test_verify_sees_a_wrong_step(kind, monkeypatch):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, damping=0.1)
    from woodbury.optim import smw

    right = smw.solve_in_sample_space
    monkeypatch.setattr(smw, "solve_in_sample_space", lambda gram, *args: right(gram * 1.05, *args))
    assert optimizer.verify(problem.inputs, problem.targets) > 1e-3


@every_optimizer
@pytest.mark.parametrize("name", list(problems.PROBLEMS))
def test_verify_is_small_on_every_problem(kind, name):
    problem = problems.make(name)
    optimizer = build(kind, problem, damping=0.1, curvature_samples=0.5, weight_decay=0.01, momentum=0.3)
    for _ in range(2):
        assert optimizer.verify(problem.inputs, problem.targets) < 1e-10
        optimizer.step(problem.inputs, problem.targets)


@every_optimizer
def test_state_dict_round_trip_continues_identically(kind):
    settings = {"curvature_samples": 4, "momentum": 0.6, "lr": 0.5, "weight_decay": 0.01}
    problem, other = problems.make("softmax"), problems.make("softmax")
    optimizer = build(kind, problem, seed=3, **settings)
    for _ in range(5):
        optimizer.step(problem.inputs, problem.targets)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other.model.load_state_dict(problem.model.state_dict())
    resumed = build(kind, other, seed=99, damping=woodbury.LevenbergMarquardt(initial=7.0), **settings)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for _ in range(5):
        a = optimizer.step(problem.inputs, problem.targets)
        b = resumed.step(problem.inputs, problem.targets)
        assert a.as_dict() == b.as_dict()
    assert_same(state_of(problem.model), state_of(other.model))


@every_optimizer
def test_state_keys_are_parameter_names(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, momentum=0.5)
    optimizer.step(problem.inputs, problem.targets)
    state = optimizer.state_dict()
    assert set(state["state"]["momentum"]) == set(dict(problem.model.named_parameters()))
    assert state["param_groups"][0]["param_names"] == list(dict(problem.model.named_parameters()))


@every_optimizer
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_continue_identically_and_apart(kind, how):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, curvature_samples=4, momentum=0.6)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step(problem.inputs, problem.targets)
    twin = how(optimizer)
    assert twin.model is not optimizer.model
    before = state_of(optimizer.model)
    infos = [twin.step(problem.inputs, problem.targets).as_dict() for _ in range(3)]
    assert_same(state_of(optimizer.model), before)
    assert infos == [optimizer.step(problem.inputs, problem.targets).as_dict() for _ in range(3)]
    assert_same(state_of(optimizer.model), state_of(twin.model))


@every_optimizer
def test_learning_rate_is_read_at_every_step_and_schedulers_work(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, lr=1.0, damping=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for lr in (1.0, 0.1, 0.01):
        before = state_of(problem.model)
        p = optimizer.direction(problem.inputs, problem.targets)
        optimizer.step(problem.inputs, problem.targets)
        scheduler.step()
        for name, value in problem.model.state_dict().items():
            torch.testing.assert_close(value, before[name] + lr * p[name])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, dtype=torch.float64)  # a tensor will do as well
    before, p = state_of(problem.model), optimizer.direction(problem.inputs, problem.targets)
    optimizer.step(problem.inputs, problem.targets)
    for name, value in problem.model.state_dict().items():
        torch.testing.assert_close(value, before[name] + 0.5 * p[name])


@every_optimizer
def test_cyclic_schedulers_find_lr_and_momentum_in_the_groups(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=4)
    for _ in range(3):
        optimizer.step(problem.inputs, problem.targets)
        scheduler.step()
    assert torch.isfinite(optimizer.last.loss)


@every_optimizer
def test_parameters_in_no_group_or_frozen_later_are_left_alone(kind):
    problem = problems.make("softmax")
    head = list(problem.model[2].parameters())
    optimizer = build(kind, problem, damping=0.1, params=head)
    before = state_of(problem.model)
    optimizer.step(problem.inputs, problem.targets)
    assert torch.equal(problem.model[0].weight, before["0.weight"])
    assert not torch.equal(problem.model[2].weight, before["2.weight"])
    problem.model[2].bias.requires_grad_(False)
    before = state_of(problem.model)
    assert set(optimizer.direction(problem.inputs, problem.targets)) == {"2.weight"}
    optimizer.step(problem.inputs, problem.targets)
    assert torch.equal(problem.model[2].bias, before["2.bias"])


@every_optimizer
def test_layers_that_stop_being_used_or_get_replaced_are_followed(kind):
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.use_b = nn.Linear(4, 4), nn.Linear(4, 4), True
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            h = self.a(x)
            return self.head(torch.tanh(self.b(h) if self.use_b else h))

    model = Switch().double()
    x, t = torch.randn(6, 4).double(), torch.randint(3, (6,))
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), damping=0.1)
    optimizer.step(x, t)
    model.use_b = False
    p = optimizer.direction(x, t)
    assert p["b.weight"].abs().max() == 0
    assert optimizer.verify(x, t) < 1e-12
    before = state_of(model)
    optimizer.step(x, t)
    assert torch.equal(model.b.weight, before["b.weight"])
    model.use_b = True
    model.b.weight = nn.Parameter(torch.eye(4).double())  # not in the optimizer's groups any more
    assert optimizer.verify(x, t) < 1e-12
    optimizer.step(x, t)
    assert torch.equal(model.b.weight, torch.eye(4).double())


@every_optimizer
def test_forward_takes_dictionaries_and_targets_may_be_none(kind):
    model = problems.mlp(4, 5, 2).double()
    batch = {"x": torch.randn(7, 2).double(), "y": torch.randn(7, 2).double(), "name": "batch"}

    def residual(model, batch):
        return model(torch.cat([batch["x"], batch["y"]], dim=1)) - batch["x"]

    joined = torch.cat([batch["x"], batch["y"]], dim=1)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=0.1, forward=residual, curvature_samples=3)
    plain = OPTIMIZERS[kind](model, nn.MSELoss(), damping=0.1)
    p = optimizer.direction(batch, None, subset=[1, 4])
    q = plain.direction(joined, batch["x"], subset=[1, 4])
    torch.testing.assert_close(flatten(p), flatten(q))
    assert optimizer.verify(batch) < 1e-12
    assert optimizer.step(batch).accepted


@every_optimizer
def test_one_dimensional_outputs_work(kind):
    model = nn.Sequential(*problems.mlp(3, 4, 1), nn.Flatten(0)).double()
    x, t = torch.randn(6, 3).double(), torch.randn(6).double()
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=0.1, curvature_samples=4)
    assert optimizer.verify(x, t) < 1e-12
    assert optimizer.step(x, t).accepted


@every_optimizer
@pytest.mark.parametrize("part", [None, 4])
def test_dropout_masks_agree_between_the_two_evaluations(kind, part):
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    x, t = torch.randn(7, 5).double(), torch.randint(3, (7,))
    # With a huge damping p is tiny and the model exact: any other mask would show in the ratio at once.
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), damping=1e4, curvature_samples=part)
    for _ in range(5):
        assert optimizer.verify(x, t) < 1e-10
        info = optimizer.step(x, t)
        assert abs(info.ratio - 1) < 1e-2
    # and the masks still change from step to step
    losses = {optimizer.step(x, t).loss.item() for _ in range(5)}
    assert len(losses) == 5


@every_optimizer
def test_verify_runs_the_batch_in_the_pieces_of_the_step(kind):
    """Two dropout layers: masks drawn piece by piece differ from masks drawn for the whole batch."""
    layers = (nn.Linear(5, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 30), nn.Tanh(), nn.Dropout(0.5))
    model = nn.Sequential(*layers, nn.Linear(30, 3)).double()
    x, t = torch.randn(7, 5).double(), torch.randint(3, (7,))
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), damping=0.1, curvature_samples=4)
    for _ in range(3):
        assert optimizer.verify(x, t) < 1e-10
        optimizer.step(x, t)


@every_optimizer
@pytest.mark.parametrize("accept", [None, 0.1])
def test_a_predicted_increase_is_never_a_good_step(kind, accept):
    """Momentum can point where the model itself expects f to rise: rho is -inf there, and lambda rises."""
    problem = problems.make("softmax")
    optimizer = build(kind, problem, momentum=0.9, accept=accept)
    optimizer.step(problem.inputs, problem.targets)
    g = optimizer.direction(problem.inputs, problem.targets)
    optimizer.state["momentum"] = {name: -50 * value for name, value in g.items()}  # uphill
    before = state_of(problem.model)
    info = optimizer.step(problem.inputs, problem.targets)
    assert info.predicted < 0 and info.ratio == -torch.inf
    assert bool(info.accepted) == (accept is None)
    if accept is not None:
        assert_same(state_of(problem.model), before)
        assert all(value.abs().max() == 0 for value in optimizer.state["momentum"].values())
        assert optimizer.step(problem.inputs, problem.targets).accepted  # and it does not get stuck


@every_optimizer
def test_groups_added_later_carry_names_and_settings(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, damping=0.1, params=list(problem.model[0].parameters()))
    optimizer.add_param_group({"params": list(problem.model[2].parameters()), "lr": 0.5})
    assert optimizer.param_groups[1]["param_names"] == ["2.weight", "2.bias"]
    p = optimizer.direction(problem.inputs, problem.targets)
    before = state_of(problem.model)
    optimizer.step(problem.inputs, problem.targets)
    torch.testing.assert_close(problem.model[2].weight.detach(), before["2.weight"] + 0.5 * p["2.weight"])
    torch.testing.assert_close(problem.model[0].weight.detach(), before["0.weight"] + p["0.weight"])
    with pytest.raises(ValueError, match="does not belong"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@every_optimizer
def test_a_loader_in_full_repeats_its_random_numbers(kind):
    """Dropout masks and a shuffle that drops the last batch agree between f(theta) and f(theta + p)."""
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    data = TensorDataset(torch.randn(24, 6).double(), torch.randint(3, (24,)))
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), damping=1e4)
    loader = DataLoader(data, batch_size=10, shuffle=True, drop_last=True)
    for _ in range(3):
        info = optimizer.step(*data[:8], full=loader)
        assert abs(info.ratio - 1) < 1e-2


@every_optimizer
@pytest.mark.parametrize("clone", [False, True])
def test_derivatives_of_the_network_in_its_inputs_need_the_fallback_and_are_exact_then(kind, clone):
    """u' - u for a network u: the weights enter a second time, past the rows of their layers."""
    model = problems.mlp(1, 6, 1).double()
    points = torch.rand(7, 1).double()

    def residual(model, x):
        x = (x.detach().clone() if clone else x).requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du - u

    with pytest.raises(ValueError, match=r"differentiated in its inputs.*fallback='autograd'"):
        OPTIMIZERS[kind](model, nn.MSELoss(), forward=residual).step(points)
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), forward=residual, fallback="autograd", damping=0.01)
    p, B, g = reference.dense_direction(
        model,
        nn.MSELoss(),
        points,
        torch.zeros(7, 1).double(),
        [0, 2, 3],
        0.01,
        optimizer.curvature,
        forward=residual,
        blocks=optimizer.blocks,
    )
    assert reference.relative_error(flatten(optimizer.direction(points, subset=[0, 2, 3])), p) < 1e-10
    info = optimizer.step(points, subset=[0, 2, 3])
    torch.testing.assert_close(info.predicted, -g @ p - 0.5 * p @ B @ p)
    after = residual(model, points).square().mean()
    torch.testing.assert_close(info.loss - after.detach(), info.ratio * info.predicted)
    assert optimizer.verify(points) < 1e-10


@every_optimizer
def test_surroundings_that_a_step_cannot_work_in_are_refused(kind):
    problem = problems.make("softmax", torch.float32)
    optimizer = build(kind, problem)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        optimizer.step(problem.inputs, problem.targets)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        optimizer.step(problem.inputs, problem.targets)
    with torch.no_grad():
        assert optimizer.verify(problem.inputs, problem.targets) < 1e-4
        assert optimizer.step(problem.inputs, problem.targets).accepted
    half = problem.model.bfloat16()
    with pytest.raises(ValueError, match=r"gram_dtype=torch\.float32"):
        OPTIMIZERS[kind](half, problem.loss).step(problem.inputs.bfloat16(), problem.targets)


@every_optimizer
def test_models_that_squeeze_work_with_part_of_the_batch(kind):
    model = nn.Linear(3, 1).double()
    x, t = torch.randn(6, 3).double(), torch.randn(6).double()
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), forward=lambda m, x: m(x).squeeze(), damping=0.1)
    assert optimizer.verify(x, t, subset=[1, 2, 3]) < 1e-12


@every_optimizer
def test_subset_is_drawn_at_random_and_by_seed(kind):
    problem = problems.make("softmax")

    def directions(seed):
        optimizer = build(kind, problem, curvature_samples=3, seed=seed, lr=0.0)
        found = []
        for _ in range(4):
            found.append(flatten(optimizer.direction(problem.inputs, problem.targets)))
            optimizer.step(problem.inputs, problem.targets)
        return found

    first, again, other = directions(1), directions(1), directions(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@every_optimizer
def test_curvature_samples_counts(kind):
    problem = problems.make("softmax")
    for wanted, expected in ((None, 7), (3, 3), (0.5, 4), (1.0, 7), (0.01, 1), (7, 7)):
        optimizer = build(kind, problem, curvature_samples=wanted)
        assert optimizer._pose(problem.inputs, problem.targets, None, None).batch.curvature == expected


@every_optimizer
def test_learns_from_a_data_loader_with_a_smaller_last_batch(kind):
    problem = problems.make("softmax")
    loader = DataLoader(TensorDataset(problem.inputs, problem.targets), batch_size=5, shuffle=True)
    optimizer = build(kind, problem, curvature_samples=4)
    for _ in range(5):
        for inputs, targets in loader:
            assert optimizer.step(inputs, targets).accepted


# -- bad input -------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@every_optimizer
@pytest.mark.parametrize(
    "inputs, targets, options, message",
    [
        (torch.full((4, 5), NAN), torch.zeros(4).long(), {}, "inputs hold nan or inf in 4 sample.*index 0"),
        (
            torch.tensor([[0.0] * 5, [INF] * 5]),
            torch.zeros(2).long(),
            {},
            "inputs hold nan or inf in 1.*index 1",
        ),
        (torch.zeros(4, 5), torch.full((4, 4), NAN), {}, "targets hold nan or inf"),
        (torch.zeros(0, 5), torch.zeros(0).long(), {}, "empty batch"),
        (torch.tensor(1.0), torch.zeros(1).long(), {}, "sample axis"),
        (torch.zeros(4, 5), torch.zeros(3).long(), {}, "4 samples but targets"),
        (torch.zeros(4, 5), torch.full((4,), 9), {}, r"0\.\.3, got 9"),
        (torch.zeros(4, 5), torch.zeros(4).long(), {"subset": [0, 4]}, r"0\.\.3"),
        (torch.zeros(4, 5), torch.zeros(4).long(), {"subset": [0, 0]}, "twice"),
        (torch.zeros(4, 5), torch.zeros(4).long(), {"subset": []}, "non-empty"),
        (torch.zeros(4, 5), torch.zeros(4).long(), {"full": []}, "no batch"),
    ],
)
def test_bad_batches_are_refused_before_anything_changes(kind, inputs, targets, options, message):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, momentum=0.5, curvature_samples=0.5)
    inputs = inputs.double()
    optimizer.step(problem.inputs, problem.targets)
    before, state = state_of(problem.model), pickle.dumps(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.step(inputs, targets, **options)
    assert_same(state_of(problem.model), before)
    assert pickle.dumps(optimizer.state_dict()) == state


@every_optimizer
def test_wrong_feature_count_changes_nothing_and_leaves_no_hook(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem)
    before = state_of(problem.model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        optimizer.step(torch.zeros(4, 6).double(), torch.zeros(4).long())
    assert_same(state_of(problem.model), before)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in problem.model.modules())
    assert optimizer.step(problem.inputs, problem.targets).accepted


@every_optimizer
@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"curvature_samples": 0}, ValueError, "curvature_samples"),
        ({"curvature_samples": -3}, ValueError, "curvature_samples"),
        ({"curvature_samples": 1.5}, ValueError, "curvature_samples"),
        ({"curvature_samples": 0.0}, ValueError, "curvature_samples"),
        ({"curvature_samples": True}, TypeError, "curvature_samples"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"momentum": -0.1}, ValueError, "momentum"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"damping": 0.0}, ValueError, "damping"),
        ({"damping": "high"}, TypeError, "damping"),
        ({"solver": "lu"}, ValueError, "solver"),
        ({"gram_dtype": torch.int32}, ValueError, "gram_dtype"),
        ({"fallback": "yes"}, ValueError, "fallback"),
        ({"params": [torch.nn.Parameter(torch.zeros(3))]}, ValueError, "does not belong"),
        ({"dampening": 0.0}, TypeError, "dampening"),
    ],
)
def test_bad_settings_are_refused_by_name(kind, settings, error, message):
    with pytest.raises(error, match=message):
        build(kind, problems.make("softmax"), **settings)


@every_optimizer
def test_more_curvature_samples_than_any_batch_is_refused(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, curvature_samples=8)
    with pytest.raises(ValueError, match="curvature_samples=8 is more than the 7 samples"):
        optimizer.step(problem.inputs, problem.targets)


@every_optimizer
def test_an_iterator_for_full_is_refused(kind):
    problem = problems.make("softmax")
    with pytest.raises(TypeError, match="re-iterable"):
        build(kind, problem).step(problem.inputs, problem.targets, full=iter([(problem.inputs, problem.targets)]))


class Cliff(nn.Module):
    """Finite where it stands, infinite a step further on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        nn.init.constant_(self.inner.weight, 1.0)
        nn.init.constant_(self.inner.bias, 0.0)

    def forward(self, x):
        y = self.inner(x)
        return torch.where(self.limit < y, torch.inf, 1.0) * y if hasattr(self, "limit") else y


@every_optimizer
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_non_finite_trial_loss_is_a_rejected_step(kind, momentum):
    model = Cliff().double()
    x, t = torch.ones(4, 3).double(), 100 * torch.ones(4, 1).double()
    model.limit = 3 + 1e-6
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), momentum=momentum)
    before = state_of(model)
    info = optimizer.step(x, t)
    assert not info.accepted and info.ratio == -torch.inf
    assert_same(state_of(model), before)
    assert optimizer.state["damping"] == 1.01
    model.limit = 1e9
    assert optimizer.step(x, t).accepted


@every_optimizer
def test_broken_parameters_are_named_and_nothing_changes(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem)
    with torch.no_grad():
        problem.model[0].weight[0, 0] = torch.nan
    before = problem.model[2].weight.clone()
    with pytest.raises(ValueError, match="loss at the current parameters is nan"):
        optimizer.step(problem.inputs, problem.targets)
    assert torch.equal(problem.model[2].weight, before)
    assert optimizer.state["damping"] == 1.0


@every_optimizer
def test_accept_threshold_keeps_theta_where_the_model_failed(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, accept=1e6, curvature_samples=3)
    before = state_of(problem.model)
    info = optimizer.step(problem.inputs, problem.targets)
    assert not info.accepted and torch.isfinite(info.ratio)
    assert_same(state_of(problem.model), before)


@every_optimizer
def test_a_stationary_point_counts_as_a_good_step(kind):
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3).double()
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss())
    info = optimizer.step(x, model(x).detach())  # 0 / 0
    assert info.ratio == 1 and info.accepted and info.step_norm == 0
    assert optimizer.state["damping"] == 0.99


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_first_order_rivals_do_what_torch_does(name):
    problem, twin = problems.make("softmax"), problems.make("softmax")
    optimizer = OPTIMIZERS[name](problem.model, problem.loss, lr=0.1)
    plain = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name](twin.model.parameters(), lr=0.1)
    for _ in range(3):
        info = optimizer.step(problem.inputs, problem.targets)
        plain.zero_grad()
        loss = twin.loss(twin.model(twin.inputs), twin.targets)
        loss.backward()
        plain.step()
        assert torch.equal(info.loss, loss.detach()) and info.accepted and torch.isnan(info.damping)
    assert_same(state_of(problem.model), state_of(twin.model))


def test_gradients_and_hooks_of_the_user_are_left_alone():
    problem = problems.make("softmax")
    calls = []
    handle = problem.model[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = woodbury.NaturalGradient(problem.model, problem.loss)
    optimizer.step(problem.inputs, problem.targets)  # looks at the model first
    calls.clear()
    optimizer.step(problem.inputs, problem.targets)
    assert len(calls) == 2  # once at theta, once at theta + p
    assert all(p.grad is None for p in problem.model.parameters())
    handle.remove()
    assert reference.relative_error(torch.ones(1), torch.ones(1)) == 0


@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
@pytest.mark.parametrize("name", ["softmax", "pictures", "sentences"])
def test_autocast_runs_the_model_in_bfloat16_and_solves_in_float32(method, name):
    problem = problems.make(name, dtype=torch.float32)
    exact = method(problem.model, problem.loss, damping=0.1)
    cast = method(problem.model, problem.loss, damping=0.1, autocast=torch.bfloat16)
    seen = []
    hooks = [
        module.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
        for module in problem.model.modules()
        if isinstance(module, nn.Linear)
    ]
    p, q = (flatten(one.direction(problem.inputs, problem.targets)) for one in (exact, cast))
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.float32, torch.bfloat16} and q.dtype == torch.float32
    error = (p - q).norm() / p.norm()
    assert 1e-5 < error < 0.1
    before = problem.loss(problem.model(problem.inputs), problem.targets)
    gentle = method(problem.model, problem.loss, lr=0.2, damping=1.0, autocast=torch.bfloat16)
    for _ in range(5):
        assert gentle.step(problem.inputs, problem.targets).accepted
    assert problem.loss(problem.model(problem.inputs), problem.targets) < before


def test_autocast_takes_bfloat16_only():
    with pytest.raises(ValueError, match="autocast must be"):
        woodbury.GaussNewton(nn.Linear(2, 1), nn.MSELoss(), autocast=torch.float16)
