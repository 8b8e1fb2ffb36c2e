"""Models of DeepXDE: steps against dense matrices of its own losses, caches, refusals, what a fit leaves."""

import itertools
import math
import os
import time
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from checks import assert_same, refused, silence, state_of
from woodbury._vector import flatten

os.environ.setdefault("DDE_BACKEND", "pytorch")
pytest.importorskip("scipy")
np = pytest.importorskip("numpy")
dde = pytest.importorskip("deepxde")

from woodbury import deepxde  # noqa: E402
from woodbury.fit.equations import Equations, TermSource  # noqa: E402
from woodbury.fit.run import use_search  # noqa: E402
from woodbury.policies.damping import Constant  # noqa: E402

DAMPING = 0.1


@pytest.fixture(autouse=True)
def double():
    """float64 as DeepXDE's own type, and the process as it was after it."""
    default = torch.get_default_dtype()
    dde.config.set_default_float("float64")
    dde.config.set_random_seed(0)
    yield
    dde.config.set_default_float("float32")
    torch.set_default_dtype(default)
    dde.config.set_default_autodiff("reverse")


@pytest.fixture
def clock():
    """Time goes on where it is looked at alone: a slow machine takes as many steps as a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", itertools.count(step=0.02).__next__)
        yield


def square(x, y):
    bends = dde.grad.hessian(y, x, i=0, j=0) + dde.grad.hessian(y, x, i=1, j=1)
    return bends - y**2 + torch.sin(x[:, :1])


def system(x, y):
    slopes = [dde.grad.jacobian(y, x, i=i) for i in range(2)]
    return [slopes[0][:, :1] - y[:, 1:], slopes[1] + y[:, :1] * slopes[0]]  # (n, 1) and (n, 2)


def right(x, on_boundary):
    return on_boundary and np.isclose(x[0], 1)


def left(x, on_boundary):
    return on_boundary and np.isclose(x[0], 0)


MEASURED = np.array([[0.2, 0.3], [0.5, 0.5], [0.7, 0.1]])


def slope(x, y, X):
    return dde.grad.jacobian(y, x, i=0, j=1) - torch.as_tensor(X[:, :1]) * y[:, :1]


CONDITIONS = {
    "dirichlet": lambda g: dde.icbc.DirichletBC(g, lambda x: np.cos(x[:, 1:]), right),
    "constant": lambda g: dde.icbc.DirichletBC(g, lambda x: 0.3, right),
    "neumann": lambda g: dde.icbc.NeumannBC(g, lambda x: np.sin(x[:, 1:]), right),
    "robin": lambda g: dde.icbc.RobinBC(g, lambda x, y: torch.as_tensor(x[:, 1:]) - y**2, right),
    "periodic": lambda g: dde.icbc.PeriodicBC(g, 0, left),
    "periodic slope": lambda g: dde.icbc.PeriodicBC(g, 0, left, derivative_order=1),
    "operator": lambda g: dde.icbc.OperatorBC(g, slope, right),
    "point set": lambda g: dde.icbc.PointSetBC(MEASURED, MEASURED[:, :1]),
    "point set operator": lambda g: dde.icbc.PointSetOperatorBC(MEASURED, MEASURED[:, 1:], slope),
}


def compiled(data, outputs=1, inputs=None, hidden=4, net=None, **settings):
    net = net or dde.nn.FNN([inputs or data.geom.dim, hidden, outputs], "tanh", "Glorot normal")
    model = dde.Model(data, net)
    model.compile("adam", lr=1e-3, verbose=0, **settings)
    return model


def poisson(*conditions, pde=square, num_domain=6, num_boundary=12, **settings):
    geometry = dde.geometry.Rectangle([0, 0], [1, 1])
    bcs = [CONDITIONS[name](geometry) for name in conditions]
    options = {name: settings.pop(name) for name in ("anchors", "auxiliary_var_function") if name in settings}
    data = dde.data.PDE(geometry, pde, bcs, num_domain, num_boundary, **options)
    return compiled(data, **settings)


def heat(**settings):
    """Two equations with an unknown coefficient, an IC, a hard constraint and features."""
    geometry = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))
    rate = dde.Variable(0.7)

    def pde(x, y):
        slopes = dde.grad.jacobian(y, x, i=0), dde.grad.jacobian(y, x, i=1)
        bend = dde.grad.hessian(y, x, component=0, i=0, j=0)
        return [slopes[0][:, 1:] - rate * bend, slopes[1][:, :1] - torch.exp(rate) * y[:, :1]]

    start = dde.icbc.IC(geometry, lambda x: np.sin(np.pi * x[:, :1]), lambda _, on: on, component=1)
    data = [start, dde.icbc.PointSetBC(MEASURED, MEASURED, component=[0, 1])]
    net = dde.nn.FNN([3, 4, 2], "tanh", "Glorot normal")
    net.apply_feature_transform(lambda x: torch.cat([x, torch.sin(x[:, :1])], 1))
    net.apply_output_transform(lambda x, y: y * x[:, :1])
    kind = dde.data.TimePDE(geometry, pde, data, num_domain=5, num_boundary=4, num_initial=3, anchors=MEASURED[:1])
    return compiled(kind, net=net, external_trainable_variables=[rate], **settings)


MODELS = {
    **{name: lambda name=name: poisson(name, loss_weights=[2.0, 5.0]) for name in CONDITIONS},
    "several": lambda: poisson("dirichlet", "neumann", "point set", loss_weights=[1.0, 3.0, 0.0, 7.0]),
    "system": lambda: poisson("dirichlet", pde=system, outputs=2, loss_weights=[2.0, 0.5, 3.0]),
    "auxiliary": lambda: poisson(
        pde=lambda x, y, a: dde.grad.jacobian(y, x, i=0, j=0) - a * y,
        auxiliary_var_function=lambda x: x[:, :1] ** 2 + 1,
    ),
    "anchors": lambda: poisson("dirichlet", anchors=MEASURED),
    "unknown": lambda: heat(loss_weights=[1.0, 2.0, 3.0, 4.0]),
}


def dense_parts(model):
    """B and g of the losses that DeepXDE adds up, from the numbers that it squares."""
    unknowns = [*model.net.parameters(), *model.external_trainable_variables]
    seen, weights = [], model.loss_weights or [1.0] * 99

    def collect(zeros, error):
        seen.append(error)
        return error.square().mean()

    x = torch.as_tensor(model.data.train_x).requires_grad_()
    if model.data.auxiliary_var_fn is not None:
        model.net.auxiliary_vars = torch.as_tensor(model.data.auxiliary_var_fn(model.data.train_x))
    model.data.losses_train(None, model.net(x), collect, x, model)
    found = reference.of_squares(seen, weights, unknowns)
    dde.grad.clear()
    return found


def terms_of(model, points="given", **settings):
    run, problem = deepxde._Run(model, None, 0), deepxde.Problem(model)
    return run, Equations(**problem.terms(run.solution, points, **settings)).terms


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_losses_of_deepxde(name):
    model = MODELS[name]()
    run, terms = terms_of(model)
    deepxde._check_losses(deepxde.Problem(model), run)
    source = TermSource(run.solution, terms)
    settings = {"damping": DAMPING, "forward": source.forward, "fallback": "autograd"}
    optimizer = woodbury.GaussNewton(run.solution, nn.MSELoss(), **settings)
    B, g = dense_parts(model)
    expected = torch.linalg.solve(B + DAMPING * torch.eye(len(g)), -g)
    p = optimizer.direction(*source.batch(1))
    assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B, DAMPING)
    total = float(deepxde.Problem(model).their_losses().sum())
    assert source.loss() == pytest.approx(total, rel=bounds.rounding(100))


def test_nothing_remembered_of_the_training_points_is_used_at_others(monkeypatch):
    """Of the normals alone, and each is computed once."""
    asked, normal = [], dde.geometry.Rectangle.boundary_normal
    note = lambda own, x: (asked.extend(map(tuple, x)), normal(own, x))[1]  # noqa: E731
    monkeypatch.setattr(dde.geometry.Rectangle, "boundary_normal", note)
    model = poisson("dirichlet", "neumann")
    model._outputs_losses(True, *model.data.train_next_batch())
    run, terms = terms_of(model, "as drawn")
    asked.clear()
    for count in (5, 5, 9):
        x = terms["DirichletBC 1"].draw_some(count)
        assert (x[:, 0] == 1).all() and x[:, 1].unique().numel() > 1
        found = terms["DirichletBC 1"].residual.function(run.solution, x)
        assert float((found - model.net(x) + torch.cos(x[:, 1:])).detach().abs().max()) <= bounds.rounding(10)
        x = terms["NeumannBC 2"].draw_some(count).requires_grad_()
        (slopes,) = torch.autograd.grad(model.net(x).sum(), x)
        found = terms["NeumannBC 2"].residual.function(run.solution, x)
        assert float((found - (slopes[:, :1] - torch.sin(x[:, 1:]))).detach().abs().max()) <= bounds.rounding(10)
        terms["NeumannBC 2"].residual.function(run.solution, x)
    assert 10 < len(asked) == len(set(asked)) < 20
    assert not dde.gradients.gradients_reverse.jacobian._Jacobians.Js


def test_points_are_drawn_of_all_kinds_of_training_points():
    model = heat()
    _, terms = terms_of(model, "by residual")
    x = terms["equation"].draw_some(1300)
    numbers = {"anchors": int((x == torch.tensor([0.2, 0.3])).all(1).sum()), "start": int((x[:, 1] == 0).sum())}
    numbers["edge"] = int(((x[:, 0] == 0) | (x[:, 0] == 1)).sum())
    assert numbers == {"anchors": 100, "start": 300, "edge": 400}  # of 1, 3, 4 and 5
    assert (terms["IC 1"].draw_some(50)[:, 1] == 0).all()
    assert terms["PointSetBC 2"].draw_some is None and len(terms["PointSetBC 2"].fixed[0]) == 3
    _, given = terms_of(heat(), "given")
    assert all(own.draw_some is None for own in given.values())
    _, balanced = terms_of(heat(loss_weights=[1, 2, 3, 4]), "given", balanced=True)
    assert all(own.weight is None for own in balanced.values())


REFUSED = {
    "not compiled": lambda: dde.Model(poisson().data, poisson().net),
    "mean of squares": lambda: poisson("dirichlet", loss="MAE"),
    "not all are numbers": lambda: poisson(pde=lambda x, y: y / 0 * 0),
    "depend on other points": lambda: poisson(pde=lambda x, y: y - y.mean()),
    "random numbers": lambda: poisson(pde=lambda x, y: y + torch.rand_like(y)),
    "IDE cannot be taken": lambda: compiled(
        dde.data.IDE(dde.geometry.TimeDomain(0, 1), lambda x, y, z: y, [], 4, kernel=lambda x, s: s, num_domain=5)
    ),
    "Function cannot be taken": lambda: compiled(
        dde.data.Function(dde.geometry.Interval(0, 1), np.sin, 5, 5), inputs=1
    ),
    "regularizer": lambda: poisson(
        net=dde.nn.FNN([2, 3, 1], "tanh", "Glorot normal", regularization=["l2", 1e-3])
    ),
    "loss_weights must not be negative": lambda: poisson("dirichlet", loss_weights=[1.0, -1.0]),
}
SETTINGS = {
    "PDEPointResampler": {"callbacks": [dde.callbacks.PDEPointResampler()]},
    "use": {"points": "everywhere"},
    "seconds must not be negative": {"seconds": -1.0},
    "seconds must be finite": {"seconds": math.nan},
}


@pytest.mark.parametrize("message", [*REFUSED, *SETTINGS])
def test_what_cannot_be_taken_is_named_and_the_model_stays_as_it_was(message):
    model = REFUSED.get(message, poisson)()
    with refused(model.net, message):
        woodbury.deepxde.fit(model, steps=2, verbose=0, **SETTINGS.get(message, {}))
    assert all(own.requires_grad for own in model.net.parameters())
    assert not model.losshistory.steps and model.train_state.step == 0


def test_another_back_end_and_another_model_are_refused(monkeypatch):
    model = poisson()
    monkeypatch.setattr(dde.backend, "backend_name", "jax")
    with pytest.raises(ValueError, match="the back end is jax"):
        woodbury.deepxde.fit(model)
    with pytest.raises(TypeError, match="got Linear"):
        woodbury.deepxde.fit(nn.Linear(1, 1))


def decay(rate):
    geometry, times = dde.geometry.TimeDomain(0, 1), np.linspace(0, 1, 9)[:, None]
    start = dde.icbc.IC(geometry, lambda x: 1, lambda _, on: on)
    conditions = [start, dde.icbc.PointSetBC(times, np.exp(-2 * times))]
    data = dde.data.PDE(geometry, lambda x, y: dde.grad.jacobian(y, x) + rate * y, conditions, 20, 2, num_test=7)
    return compiled(data, hidden=16, external_trainable_variables=[rate], metrics=["l2 relative error"] * 0)


def test_a_fit_leaves_a_model_that_deepxde_goes_on_with(tmp_path):
    dde.config.set_default_float("float32")
    rate = dde.Variable(1.0)
    model = decay(rate)
    model.train(iterations=20, verbose=0, display_every=10)
    before = model.train_state.loss_train.sum()
    file, variables = str(tmp_path / "model"), str(tmp_path / "rate.dat")
    callbacks = [dde.callbacks.VariableValue(rate, period=1, filename=variables)]
    callbacks.append(dde.callbacks.ModelCheckpoint(file, save_better_only=True, period=20))
    fit = woodbury.deepxde.fit(model, steps=30, verbose=0, callbacks=callbacks)
    history = model.losshistory
    assert model.train_state.step == 50 and history.steps[-1] == 50
    assert isinstance(fit, woodbury.Fit) and fit.steps == len(fit.history) == 30 and fit.reason == "steps"
    losses = model._outputs_losses(True, *model.data.train_next_batch())[1]
    assert (history.loss_train[-1] == losses).all() and len(history.loss_test[-1]) == 3
    assert losses.sum() < 1e-4 * before and fit.loss == pytest.approx(losses.sum(), rel=1e-6)
    assert losses.sum() == min(map(np.sum, history.loss_train))
    assert abs(rate.item() - 2) < 0.05 and rate.dtype == torch.float32 and rate.requires_grad
    assert all(own.dtype == torch.float32 and own.requires_grad for own in model.net.parameters())
    lines = (tmp_path / "rate.dat").read_text().split("\n")
    assert len(lines) > 30 and float(lines[-2].split("[")[1].rstrip("]")) == pytest.approx(2, abs=0.05)
    x = np.linspace(0, 1, 5, dtype=np.float32)[:, None]
    expected = model.predict(x)
    assert np.abs(expected - np.exp(-2 * x)).max() < 0.01
    path = model.save(file)
    other = decay(dde.Variable(1.0))
    other.restore(path)
    assert (other.predict(x) == expected).all() and any("model-" in own.name for own in tmp_path.iterdir())
    model.train(iterations=2, verbose=0)
    assert model.train_state.step == 52 and np.isfinite(model.train_state.loss_train).all()


def test_a_fit_is_never_worse_and_an_error_changes_nothing(monkeypatch):
    model = poisson("dirichlet")
    model.train(iterations=50, verbose=0)
    before = state_of(model.net)

    class Spoiling:
        def __init__(self, run, *rest):
            self.run = run

        def go(self, progress):
            with torch.no_grad():
                for own in self.run.solution.parameters():
                    own.add_(1.0)
            self.run.note(woodbury.Fit())
            return woodbury.Fit(reason="steps")

    monkeypatch.setattr(deepxde, "_solving", Spoiling)
    woodbury.deepxde.fit(model, steps=1, verbose=0)
    assert_same(state_of(model.net), before)
    monkeypatch.setattr(deepxde, "_solving", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        woodbury.deepxde.fit(model, steps=1, verbose=0)
    assert_same(state_of(model.net), before)


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([0.8, 0.6, 0.5, 0.4, 0.33], 50),  # twelve parts of ten seconds, five of them Adam's
        ([0.99, 0.98, 0.97, 0.96, 0.8, 0.75], 60),  # more where it falls faster,
        ([0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.89], 70),  # or has not fallen yet,
        ([0.9 ** (k * k) for k in range(1, 12)], 100),  # but two are left
    ],
)
def test_a_turn_of_adam_goes_on_over_a_plateau_and_as_long_as_the_loss_falls_faster(monkeypatch, losses, end):
    model, clock, course = poisson("dirichlet"), [0.0], iter(losses)
    run = deepxde._Run(model, None, 0)
    run.begin()
    run.length, run.deadline, run.next_look = 10.0, 120.0, math.inf
    run.first_loss, run.best_loss = 9.0, 1.0
    monkeypatch.setattr(deepxde, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(model, "_train_step", lambda *batch: clock.insert(0, clock[0] + 1))
    monkeypatch.setattr(run, "look", lambda: next(course))
    run.descend(50.0)
    assert clock[0] == end and run.turn_end == end + 10


@pytest.mark.parametrize(("share", "is_first"), [(0.9, True), (0.5, False)])
def test_a_turn_of_adam_begins_at_the_first_parameters_where_steps_gained_little(monkeypatch, share, is_first):
    model = poisson("dirichlet")
    run, begun = deepxde._Run(model, None, 0), []
    run.begin()
    run.best = [own + 1 for own in run.first]
    run.length, run.best_loss = 0.05, share * run.first_loss
    adam = model._train_step

    def see(*batch):
        begun.append([own.data.clone() for own in run.tensors])
        adam(*batch)
        model.stop_training = True

    monkeypatch.setattr(model, "_train_step", see)
    run.descend(0.05)
    wanted = run.first if is_first else [own + 1 for own in run.first]
    assert all(torch.equal(*pair) for pair in zip(begun[0], wanted, strict=True))


def judge_by(monkeypatch, enough):
    """Gauss-Newton steps are judged soon, and are enough where they leave this part of a loss."""
    for name, value in {"ENOUGH": enough, "FALLEN": enough, "JUDGED": 8}.items():
        monkeypatch.setattr(deepxde, name, value)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("enough", "trained", "expected"), [(0.0, 0, "steps Adam steps"), (1e9, 0, "steps"), (0.0, 1, "steps")]
)
def test_adam_has_a_turn_only_where_first_steps_of_a_new_model_gain_little(monkeypatch, enough, trained, expected):
    model, turns = poisson("dirichlet"), []
    if trained:
        model.train(iterations=trained, verbose=0)
    descend, solve = deepxde._Run.descend, deepxde._solving
    judge_by(monkeypatch, enough)
    monkeypatch.setattr(deepxde._Run, "descend", lambda *given: (turns.append("Adam"), descend(*given)))
    monkeypatch.setattr(deepxde, "_solving", lambda *given: (turns.append("steps"), solve(*given))[1])
    woodbury.deepxde.fit(model, seconds=1.5, verbose=0)
    assert " ".join(turns[:3]) == expected


def test_steps_of_all_turns_count(monkeypatch):
    judge_by(monkeypatch, 0.0)  # each turn ends
    monkeypatch.setattr(deepxde._Run, "descend", lambda run, _: setattr(run, "turn_end", 0.0))
    monkeypatch.setattr(deepxde, "TURNS", 1e9)
    fit = woodbury.deepxde.fit(poisson("dirichlet"), seconds=60, steps=10, verbose=0)
    assert (fit.steps, fit.reason, [own["step"] for own in fit.history]) == (10, "steps", list(range(1, 11)))


def test_another_turn_of_adam_follows_where_steps_gain_little():
    run = deepxde._Run(poisson("dirichlet"), None, 0)
    run.begin()

    def is_over(*quarters, turns_ago=0.0):  # of the losses, eight steps each, or four
        run.length, run.turn_end = 1000.0, time.perf_counter() - 1000 * turns_ago
        return run.note(woodbury.Fit(history=[{"loss": loss} for quarter in quarters for loss in quarter]))

    # the first quarter does not count, nor does a loss by itself
    assert is_over([9.0] * 8, [1.0] * 8, [1.0] * 8, [1.0] * 8) and run.turn_end == float("inf")
    assert is_over([2.0] * 8, [*[1.0] * 7, 9.0], [0.1] * 8, [*[0.95] * 7, 9.0])
    assert not is_over([0.1] * 8, [1.0] * 8, [1.0] * 8, [0.85] * 8)
    assert not is_over([11.0] * 8, [1.0] * 8, [1.0] * 8, [1.0] * 8)  # which have gained much before
    few = [[1.0] * 4] * 4  # to judge, unless they have taken two turns more
    assert not is_over(*few, turns_ago=1.9) and is_over(*few, turns_ago=2.1)
    assert not is_over(*few[:3], turns_ago=9) and run.turn_end < time.perf_counter()


def test_dear_looks_are_rare_and_warnings_without_a_way_out_are_not_heard(monkeypatch):
    geometry = dde.geometry.Interval(0, 100)  # far from (-1, 1)
    data = dde.data.PDE(geometry, lambda x, y: dde.grad.jacobian(y, x) - y, [], num_domain=30)
    run = deepxde._Run(compiled(data), None, 0)
    monkeypatch.setattr(run.model, "_test", lambda verbose: time.sleep(0.01))
    run.model.train_state.loss_train = [1.0]
    run.pause, started = 0.0, time.perf_counter()
    run.look()
    assert run.next_look - started > 0.01 / deepxde.DEAREST
    with silence():
        woodbury.deepxde.fit(compiled(data), seconds=None, steps=3, verbose=0)


def test_early_times_count_more_where_the_equation_has_a_time():
    run = deepxde._Run(heat(), None, 0)
    run.limits = deepxde.Limits(5)
    solving = deepxde._solving(run, deepxde.Problem(heat()), "as drawn", "given")
    declines = []
    for _ in range(5):
        solving.advance()
        declines.append(solving.source.decline)
    assert solving.source.time == -1 and deepxde.Problem(poisson("dirichlet")).time is None
    assert declines == pytest.approx([6, 4, 2, 0, 0])
    assert woodbury.deepxde.fit(heat(), seconds=0, verbose=0).steps == 0  # without time


@pytest.mark.parametrize(
    ("middle", "loss", "steps", "square", "expected"),
    [
        (0.2, 0.5, 32, 2e-5, True),
        (0.39, 0.5, 32, 2e-5, True),
        (0.41, 0.5, 32, 2e-5, False),  # residuals are late, as they should be,
        (0.02, 0.5, 32, 2e-5, False),  # or at the very start, as layers are,
        (0.2, 0.5, 32, 5e-6, False),  # or small
        (0.2, 0.3, 32, 2e-5, False),  # the loss falls
        (0.2, 0.5, 31, 2e-5, False),  # too few steps to tell
        (0.2, 0.5, 36, 2e-5, False),  # too late
    ],
)
def test_a_fit_is_stuck_where_residuals_are_early_and_the_loss_stands_still(middle, loss, steps, square, expected):
    run = deepxde._Run(heat(), None, 0)
    run.begin()
    run.limits, run.middles = deepxde.Limits(100), [0.9] * 8 + [middle] * 16
    run.starts, run.scale = 1, 1.0
    terms = {"terms": {"equation": square}}
    history = [{"loss": 1.0, **terms}] * (steps - 16) + [{"loss": loss, **terms}] * 16
    assert run.note(woodbury.Fit(history=history)) == expected == run.is_stuck


def test_a_fit_that_is_stuck_begins_anew_with_new_weights(monkeypatch):
    model, seen = heat(), []
    model.train(iterations=5, verbose=0)
    (rate,) = model.external_trainable_variables
    given, known = [own.clone() for own in model.net.parameters()], rate.item()
    before = model._outputs_losses(True, *model.data.train_next_batch())[1].sum()
    begin, solve = deepxde._Run.begin_anew, deepxde._solving

    def begin_anew(run):
        begin(run)
        own = list(run.model.net.parameters())
        assert list(map(torch.equal, own, given)) == [False, False, True, True]
        assert float(own[1].detach().abs().max()) == 0 and own[0].dtype == torch.float64
        assert rate.item() == known

    def solving(run, *rest):
        found = solve(run, *rest)
        seen.append((run.limits, found))
        return found

    monkeypatch.setattr(deepxde, "_solving", solving)
    monkeypatch.setattr(deepxde._Run, "begin_anew", begin_anew)
    always = {"LAYER": -1.0, "EARLY": math.inf, "SLOW": 0.0, "SOLVED": 0.0}
    for name, value in {**always, "STAYED": 2, "JUDGED": 4}.items():
        monkeypatch.setattr(deepxde, name, value)
    model.net.linears[1].weight.requires_grad_(False)  # stays what it is
    fit = woodbury.deepxde.fit(model, seconds=600, steps=25, verbose=0)
    (first, _), (second, solving), (third, _) = seen  # twice
    assert (first.steps, second.steps, third.steps) == (25, 20, 16) and 600 >= first.seconds > third.seconds > 0
    assert solving.source.decline > 0 and len(solving.source.middles) >= 4
    assert [own["step"] for own in fit.history] == list(range(1, 26)) and fit.steps == 25
    times = [own["seconds"] for own in fit.history]
    assert times == sorted(times) and fit.reason == "steps" and fit.loss <= before


def test_a_fit_never_begins_anew_where_no_layer_is_known_or_nothing_depends_on_time(monkeypatch):
    seen = []
    monkeypatch.setattr(deepxde._Run, "end", lambda run: seen.append((run.starts, run.scale > 0)))
    frozen = heat()
    for layer in frozen.net.linears:
        layer.weight.requires_grad_(False)
    for model in (heat(), frozen, poisson("dirichlet")):
        woodbury.deepxde.fit(model, seconds=None, steps=0, verbose=0)
    assert seen == [(2, True), (0, False), (0, False)]


@pytest.mark.parametrize(("end", "start", "expected"), [(1.0, False, None), (1.0, True, -1), (0.5, False, -1)])
def test_early_times_do_not_count_more_where_conditions_are_at_the_end(end, start, expected):
    geometry = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))
    conditions = [dde.icbc.PointSetBC(np.array([[0.2, end], [0.4, end]]), np.zeros((2, 1)))]
    if start:
        conditions.append(dde.icbc.IC(geometry, lambda x: 0, lambda _, on: on))
    data = dde.data.TimePDE(geometry, lambda x, y: y, conditions, num_domain=5, num_initial=3)
    assert deepxde.Problem(compiled(data)).time == expected


def test_the_best_step_is_the_one_that_led_to_the_parameters(monkeypatch):
    monkeypatch.setattr(deepxde, "DEAREST", math.inf)  # looks after every step: some do not move
    model, seen = poisson("dirichlet"), []

    class Seeing(dde.callbacks.Callback):
        def on_epoch_end(self):
            seen.append([own.detach().clone() for own in self.model.net.parameters()])

    fit = woodbury.deepxde.fit(model, seconds=None, steps=12, verbose=0, callbacks=[Seeing()])
    best = seen[fit.best_step - 1]
    assert all(torch.equal(own, other) for own, other in zip(model.net.parameters(), best, strict=True))


def test_large_networks_take_plain_steps_with_momentum_until_a_search_begins(monkeypatch):
    model = poisson("dirichlet", loss_weights=[2.0, 5.0])
    run, problem = deepxde._Run(model, None, 0), deepxde.Problem(model)
    run.limits = deepxde.Limits(3)
    small = deepxde._solving(run, problem, "given", "given")
    monkeypatch.setattr(deepxde, "LARGE", 3)
    large = deepxde._solving(run, problem, "given", "given")
    assert (small.count, large.count) == (256, 128) and small.optimizer.param_groups[0]["momentum"] == 0.0
    large.advance()
    optimizer, previous = large.optimizer, flatten(large.optimizer.state["momentum"])
    assert float(previous.norm()) > 0
    optimizer.settings = replace(optimizer.settings, damping=Constant(DAMPING))
    optimizer.state["damping"] = DAMPING
    B, g = dense_parts(model)
    expected = torch.linalg.solve(B + DAMPING * torch.eye(len(g)), 0.9 * DAMPING * previous - g)
    p = flatten(optimizer.direction(*large.source.batch(1)))
    assert reference.relative_error(p, expected) <= bounds.of_solve(B, DAMPING)
    use_search(optimizer, True)
    large.phase = "search"
    large.advance()
    assert optimizer.last.length > 0 and optimizer.param_groups[0]["momentum"] == 0.0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("at", [3, "end"])
def test_ctrl_c_while_adam_runs_loses_nothing(monkeypatch, at):
    model, seen = poisson("dirichlet"), []
    judge_by(monkeypatch, 0.0)  # of no gain: Adam has the second turn
    first = model._outputs_losses(True, *model.data.train_next_batch())[1].sum()
    train_step = model._train_step

    def interrupted(*batch):
        seen.append(train_step(*batch))
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(model, "_train_step", interrupted)
    if at == "end":  # a second time, when the fit puts things in order

        def again(run, values):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(deepxde._Run, "give_back", again)
        with pytest.raises(KeyboardInterrupt):
            woodbury.deepxde.fit(model, seconds=3, verbose=0)
    else:
        woodbury.deepxde.fit(model, seconds=3, verbose=0)
        assert model.losshistory.loss_train[-1].sum() == min(map(np.sum, model.losshistory.loss_train))
    assert len(seen) == 3
    assert model._outputs_losses(True, *model.data.train_next_batch())[1].sum() < first
    assert all(own.grad is None and own.requires_grad for own in model.net.parameters())


def test_functions_with_matrices_of_their_own_type_are_taken_in_it():
    dde.config.set_default_float("float32")
    net, matrix = dde.nn.FNN([2, 4, 1], "tanh", "Glorot normal"), torch.eye(2)
    net.apply_feature_transform(lambda x: x @ matrix)
    model = poisson("dirichlet", net=net)
    before = model._outputs_losses(True, *model.data.train_next_batch())[1].sum()
    woodbury.deepxde.fit(model, seconds=None, steps=3, verbose=0)
    assert model.losshistory.loss_train[-1].sum() < before


def test_the_measurement_runs_and_makes_a_table_of_what_it_saved(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else it starts itself again
    benchmark, files = import_module("benchmarks.__main__"), [str(tmp_path / name) for name in ("fit", "recipe")]
    for file in files:
        command = ["deepxde", "laplace", "--seconds", "0.3", "--seeds", "1"]
        assert benchmark.main([*command, "--method", os.path.basename(file), "--save", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert benchmark.main(["deepxde", "--read", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines[:2], lines[3]] and "laplace-disk" in lines[3]


@pytest.mark.usefixtures("clock")
def test_the_script_of_the_page_runs(monkeypatch):
    from test_readme import README, blocks

    given = poisson("dirichlet")
    names = {"dde": dde, "data": given.data, "net": given.net}
    _, after = blocks(README.parent / "docs" / "deepxde.md", "py")
    monkeypatch.setattr(dde, "saveplot", lambda losshistory, train_state: losshistory.loss_train[-1])
    exec(after.replace("seconds=60", "seconds=1.5, verbose=0"), names)
    losses = names["model"].losshistory.loss_train
    assert sum(losses[-1]) < sum(losses[0]) and names["fit"].reason == "seconds"
    history = names["fit"].history  # of all turns
    assert [record["step"] for record in history] == list(range(1, names["fit"].steps + 1))
    seconds = [record["seconds"] for record in history]
    assert seconds == sorted(seconds)
