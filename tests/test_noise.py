"""Noisy data: fits that generalise, by validation data and by the evidence; and what a `Fit` says is true."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury
from benchmarks import noise
from cases import every_pair
from checks import refused, told
from woodbury.fit import pace
from woodbury.fit.evidence import EvidenceRun, Start
from woodbury.fit.limits import Limits
from woodbury.fit.precise import PreciseRun
from woodbury.fit.run import Best, Validation

MSE = nn.MSELoss()
loss_of = reference.loss_of


def fitted(model, data, **settings):
    return woodbury.fit(model, settings.pop("loss", MSE), data, **{"progress": False, **settings})


def noisy(seed=0, samples=60, deviation=0.2, inputs=2):
    draws = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(samples, inputs, generator=draws, dtype=torch.float64) - 1
    return x, torch.sin(2 * x[:, :1]) + deviation * torch.randn(samples, 1, generator=draws, dtype=torch.float64)


def network(*widths, seed=0):
    return problems.network(*(widths or (2, 8, 1)), seed=seed)


def loader():
    return DataLoader(TensorDataset(*noisy()), 20)


def sampler(count):
    return noisy(samples=count)


def same(value, expected, samples=200):
    return value == pytest.approx(expected, rel=bounds.rounding(samples), abs=0)


# -- by validation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed, width", [(0, 10), (1, 20), (0, 40)])
def test_noise_is_not_memorised(width, seed):
    torch.manual_seed(seed)
    x = 2 * torch.rand(2210, 2, dtype=torch.float64) - 1
    y = torch.sin(x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(2210, 1, dtype=torch.float64)
    model = problems.mlp(2, width, width, 1).double()
    fitted(model, (x[:165], y[:165]), validation=(x[165:210], y[165:210]))
    assert loss_of(model, (x[210:], y[210:])) <= 0.0125  # the noise alone has 0.01


def test_without_noise_the_same_call_goes_for_digits():
    x = torch.linspace(-1, 1, 80, dtype=torch.float64).unsqueeze(1)
    y = torch.exp(-3 * x**2) * torch.cos(6 * x)
    fit = fitted(network(1, 16, 1, seed=2), (x, y), validation=0.25, steps=150)
    assert fit.validation < 1e-10


def test_the_best_parameters_come_back_and_the_fit_says_which():
    model, data, other = network(), noisy(), noisy(1, 30)
    kept = {}
    note = lambda fit: kept.update({fit.steps: reference.theta(model)})  # noqa: E731
    fit = fitted(model, data, validation=other, callback=note)
    seen = [entry["validation"] for entry in fit.history]
    assert fit.reason == "validation" and len(seen) == fit.steps
    assert fit.best_step == seen.index(min(seen)) + 1 and fit.steps == fit.best_step + 6
    assert torch.equal(reference.theta(model), kept[fit.best_step])
    assert same(fit.validation, loss_of(model, other)) and same(fit.loss, loss_of(model, data))
    assert f"(step {fit.best_step})" in repr(fit) and len(repr(fit)) < 200


@pytest.mark.parametrize(
    "data, patience, others",
    [(noisy(), 1, {}), (sampler, 3, {"samples": 40, "seed": 0}), (loader(), 2, {"epochs": 60, "seed": 0})],
)
def test_patience_is_the_number_of_steps_or_epochs_that_follow_the_best(data, patience, others):
    fit = fitted(network(2, 4, 1), data, validation=noisy(1, 30), patience=patience, **others)
    steps = 3 if "epochs" in others else 1
    assert fit.reason == "validation" and fit.steps == fit.best_step + steps * patience


def test_a_share_is_split_off_by_the_seed():
    data = noisy(samples=50)
    fits = [fitted(network(), data, validation=0.2, steps=2, seed=seed) for seed in (None, 0, 1)]
    train, others = fits[0].split
    assert len(others) == 10 and sorted([*train.tolist(), *others.tolist()]) == list(range(50))
    assert torch.equal(others, fits[1].split[1]) and not torch.equal(others, fits[2].split[1])
    model = network()
    parts = [(data[0][own], data[1][own]) for own in (train, others)]
    by_hand = fitted(model, parts[0], validation=parts[1], steps=2)
    assert by_hand.validation == fits[0].validation and by_hand.loss == fits[0].loss
    assert "10 others for validation" in str(fits[0])


def test_the_search_goes_on_where_plain_steps_creep_and_counts_if_it_halves_the_loss():
    optimizer, data = woodbury.GaussNewton(network(), MSE), noisy()
    run = PreciseRun(optimizer, data, limits=Limits(), validation=Validation([data], 6))
    assert optimizer.search is None and optimizer.accept == 0.0

    def go_on(loss, step, waited):
        run.best, run.waited = Best(loss, step, run.parameters()), waited
        run.choose_steps()
        return run.best

    losses = [*(10.0 * 0.5**step for step in range(12)), *[2e-3] * 10, 1e-3]  # falls, then creeps
    for step, loss in enumerate(losses):
        assert run.before is None
        best = go_on(loss, step, 0 if step < 12 or step == 22 else 1)
    assert run.before is best and optimizer.search is not None and optimizer.accept is None
    assert go_on(0.9e-3, 30, 2).step == 30
    assert go_on(0.9e-3, 30, 3) is best and run.waited == 0  # no better than by luck
    assert run.before is None and optimizer.search is None


# -- by the evidence ------------------------------------------------------------------------------------------


def test_a_linear_fit_has_the_decay_and_the_noise_of_the_largest_evidence():
    model, x = nn.Linear(5, 1, bias=False).double(), torch.randn(40, 5, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [0.5], [0.0], [-1.0], [0.1]], dtype=torch.float64) + 0.3 * torch.randn(40, 1)
    run = EvidenceRun(model, MSE, (x, y), limits=Limits(steps=120), starts=[Start(1.0, 0.3)], tolerance=0.0)
    fit = run.go(None)
    weight = model.weight.detach().T
    delta, s = run.precisions["weight"], fit.noise
    ridge = torch.linalg.solve(x.T @ x / s + delta * torch.eye(5, dtype=torch.float64), x.T @ y / s)
    torch.testing.assert_close(weight, ridge, rtol=1e-8, atol=1e-10)
    eigenvalues = torch.linalg.eigvalsh(x.T @ x / s)
    gamma = (eigenvalues / (eigenvalues + delta)).sum().item()
    assert fit.effective_parameters == pytest.approx(gamma, rel=1e-8)
    assert delta * weight.square().sum().item() == pytest.approx(gamma, rel=1e-8)
    assert s * (40 - gamma) == pytest.approx((x @ weight - y).square().sum().item(), rel=1e-8)


def test_a_classifier_is_at_the_minimum_with_the_decay_found():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=draws, dtype=torch.float64)
    y = (x[:, 0] > 0).long() ^ (torch.rand(60, generator=draws) < 0.1).long()
    model, loss = nn.Linear(2, 2, bias=False).double(), nn.CrossEntropyLoss()
    run = EvidenceRun(model, loss, (x, y), limits=Limits(steps=200), starts=[Start(1.0, 1.0)], tolerance=0.0)
    fit = run.go(None)
    assert fit.noise is None and 0 < fit.effective_parameters < 4
    value = loss(model(x), y) * 60  # -log p(data)
    prior = sum(run.precisions[name] * own.square().sum() / 2 for name, own in model.named_parameters())
    gradient = torch.cat([own.flatten() for own in torch.autograd.grad(value + prior, list(model.parameters()))])
    assert gradient.norm() < 1e-6 * value


def test_the_posterior_of_a_fit_is_that_of_its_prior_and_noise_now_and_later():
    model, data, other = network(), noisy(), noisy(1, 5)[0]
    fit = fitted(model, data, weight_decay="evidence", validation=noisy(2, 40))
    assert fit.reason == "evidence" and 0.1**2 < fit.noise < 0.3**2 and 2 < fit.effective_parameters < 33
    assert same(fit.loss, loss_of(model, data)) and same(fit.validation, loss_of(model, noisy(2, 40)))
    posterior = woodbury.posterior(fit)
    by_hand = woodbury.posterior(model, MSE, *data, posterior.prior, posterior.noise)
    assert torch.equal(posterior.covariance(other), by_hand.covariance(other))
    assert posterior.log_evidence == by_hand.log_evidence and posterior.noise == fit.noise
    with pytest.raises(TypeError, match="weight_decay='evidence'"):
        woodbury.posterior(fitted(network(), data, steps=1))
    with torch.no_grad():  # one that is made later is that of the fit still
        for own in (*data, *model.parameters()):
            own.mul_(3)
    assert torch.equal(woodbury.posterior(fit).covariance(other), posterior.covariance(other))


@pytest.mark.parametrize("classes", [0, 2])
def test_where_columns_are_many_the_evidence_finds_the_mean_and_says_so(classes):
    draws = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(240, 60, generator=draws, dtype=torch.float64) - 1
    y = torch.sin(3 * x[:, :1] * x[:, 1:2]) + 0.3 * torch.randn(240, 1, generator=draws, dtype=torch.float64)
    y, loss = ((y[:, 0] > 0).long(), nn.CrossEntropyLoss()) if classes else (y, MSE)
    model = network(60, 12, max(classes, 1))
    with pytest.warns(UserWarning, match="finds nothing but the mean"):
        fitted(model, (x[:80], y[:80]), loss=loss, weight_decay="evidence")
    constant = math.log(2) if classes else y[80:].var().item()
    assert loss_of(model, (x[80:], y[80:]), loss) < 1.05 * constant


@pytest.mark.parametrize("loss", [nn.HuberLoss(), nn.SmoothL1Loss(reduction="sum"), nn.L1Loss()])
def test_robust_losses_have_the_scale_of_the_data(loss):
    (x, y), model = noisy(deviation=0.1), network(2, 6, 1)
    fitted(model, (x, 0.03 * y), loss=loss, weight_decay="evidence")
    assert loss_of(model, (x, 0.03 * torch.sin(2 * x[:, :1]))) < 0.02 * 0.03**2


@pytest.mark.parametrize("how", [{}, {"validation": 0.2}, {"weight_decay": "evidence"}])
def test_slow_steps_are_said_unless_time_is_limited(how, monkeypatch):
    monkeypatch.setattr(pace, "SLOW", 1e-9)
    with pytest.warns(UserWarning, match=r"a step on all \d+ samples takes about .*epochs=20") as seen:
        fitted(network(), noisy(), steps=1, **how)
    assert seen[0].filename == __file__
    with told() as texts:
        fitted(network(), noisy(), steps=1, seconds=100.0, **how)
    assert not texts


# -- bad input ------------------------------------------------------------------------------------------------


def difference(outputs, targets):
    return outputs - targets


BAD = {
    "other columns": ({"validation": noisy(inputs=3)}, "samples of the data have the shapes"),
    "other targets": ({"validation": (noisy()[0], noisy()[1][:, 0])}, "have the shapes"),
    "nan": ({"validation": (noisy()[0] * math.nan, noisy()[1])}, "validation: inputs hold nan or inf"),
    "nan, loader": ({"data": loader(), "validation": (noisy()[0], noisy()[1] * math.nan)}, "validation: targets"),
    "nan, sampler": ({"data": sampler, "validation": (noisy()[0] * math.nan, noisy()[1])}, "validation: inputs"),
    "nan in a loader": ({"data": [(noisy()[0] * math.nan, noisy()[1])] * 3}, "inputs hold nan or inf"),
    "nan of a sampler": ({"data": lambda count: noisy(samples=count)[0] * math.nan}, "inputs hold nan or inf"),
    "other columns, sampler": ({"data": sampler, "validation": noisy(inputs=3)}, "validation data does not go"),
    "loader for a pair": ({"validation": loader()}, r"must be a share of it \(0\.2\), or a pair .*got DataLoader"),
    "true": ({"validation": True}, "validation=True .*: pass a share between 0 and 1, or a pair"),
    "split of a sampler": ({"data": sampler, "validation": 0.2}, "splits a pair"),
    "split of a loader": ({"data": loader(), "validation": 0.2}, "splits a pair .*samples, a pair or a loader"),
    "one sample": ({"data": noisy(samples=1), "validation": noisy()}, "one sample"),
    "one sample to split": ({"data": noisy(samples=1), "validation": 0.5}, "leaves nothing"),
    "no number": ({"validation": math.nan}, "validation=nan of 60 sample"),
    "constant targets": ({"data": (noisy()[0], torch.ones(60, 1).double()), "validation": 0.2}, "all targets are"),
    "constant, evidence": ({"data": (noisy()[0], noisy()[1] * 0), "weight_decay": "evidence"}, "all targets are"),
    "patience, evidence": ({"weight_decay": "evidence", "validation": 0.2, "patience": 2}, "patience= is not for"),
    "curvature samples": ({"curvature_samples": 5}, "curvature_samples= is for the batches of a loader"),
    "another word": ({"weight_decay": "auto"}, "a number or 'evidence'"),
    "evidence, loader": ({"data": loader(), "weight_decay": "evidence"}, "with a loader pass a number"),
    "evidence, sampler": ({"data": lambda count: noisy(), "weight_decay": "evidence"}, "a function that draws"),
    "other columns, loader": ({"data": loader(), "validation": noisy(inputs=3)}, "not go with model and loss"),
    "bad data": ({"data": (noisy(inputs=3)[0], noisy()[1]), "validation": 0.2}, "fit: the data does not go with"),
    "no validation": ({"data": loader(), "validation": [(noisy()[0][:0], noisy()[1][:0])]}, "validation data"),
    "other numbers": ({"data": (noisy()[0], noisy(samples=4)[1])}, "targets"),
    "nothing drawn": ({"data": lambda count: None}, "must return a pair"),
    "samples of a pair": ({"samples": 10}, "samples= is for a function"),
    "samples of a loader": ({"data": loader(), "samples": 5}, "samples= is for"),
    "epochs of a pair": ({"epochs": 3}, "epochs= is for the batches of a loader"),
    "another metric": ({"metric": "adam"}, "search= and metric='adam' do not go together"),
    "memory": ({"memory": 2}, "memory= is for the batches of a loader: leave it out"),
    "steps below zero": ({"steps": -1}, "steps must not be negative"),
    "half a step": ({"steps": 1.5}, "steps must be a whole number"),
    "seconds as text": ({"seconds": "1"}, "seconds must be a number"),
    "tolerance below zero": ({"tolerance": -1.0}, "tolerance must not be negative"),
    "no state": ({"resume": {"steps": 1}}, "state_dict"),
    "a metric by a name that is taken": ({"metrics": {"loss": difference}}, "cannot be called 'loss'"),
    "a metric that is no function": ({"metrics": {"largest": 3}}, "functions of"),
    "metrics without names": ({"metrics": [difference]}, "by name"),
    "a metric of one argument": ({"metrics": {"own": lambda outputs: 1.0}}, "metric 'own'"),
    "a metric that is no number": ({"metrics": {"own": difference}}, "metric 'own'"),
    "metric of a loader alone": ({"data": loader(), "metrics": {"own": difference}}, "a loader with validation="),
    "a metric of a sampler": ({"data": sampler, "metrics": {"own": difference}}, "metrics= are for a pair"),
    "no batches": ({"data": []}, "no batches"),
    "batches of three": ({"data": [(1, 2, 3)] * 3}, "must give pairs .* got tuple of 3"),
    "batches of inputs": ({"data": DataLoader(TensorDataset(noisy()[0]), 2)}, "must give pairs"),
    "epochs below zero": ({"data": loader(), "epochs": -1}, "epochs must not be negative"),
    "no patience": ({"data": loader(), "validation": noisy(1), "patience": 0}, "patience must be"),
    "another number": ({"data": loader(), "curvature_samples": "few"}, "'auto'"),
    "epoch callback": ({"epoch_callback": print}, "epoch_callback= is for the batches of a loader"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_and_nothing_changes(case):
    arguments, message = BAD[case]
    model = network()
    with refused(model, message, (ValueError, TypeError)):
        fitted(model, **{"data": noisy(), **arguments})
    assert model.training


# -- what a Fit says ------------------------------------------------------------------------------------------


def dropout_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 1)).double()


KINDS = {"pair": noisy, "sampler": lambda: sampler, "loader": loader}


@every_pair(has_validation=[False, True], kind=list(KINDS))
def test_losses_are_those_of_the_model_returned(kind, has_validation):
    model, other = dropout_network(), noisy(3, 25)
    batches = list(zip(*(own.split([20, 5]) for own in other), strict=True))
    settings = {"validation": batches if kind == "loader" else other} if has_validation else {}
    samples = {"samples": 60} if kind == "sampler" else {}
    fit = fitted(model, KINDS[kind](), steps=7, weight_decay=0.1, **settings, **samples)
    seen = [noisy(samples=count) for count in ((60, 120, 240) if kind == "sampler" else (60,))]
    assert any(same(fit.loss, loss_of(model, own)) for own in seen) and fit.samples in (20, 60, 120, 240)
    assert fit.validation is None if not has_validation else same(fit.validation, loss_of(model, other))


def test_the_tolerance_is_on_the_loss_without_decay():
    model = network()
    fit = fitted(model, noisy(deviation=0.0), weight_decay=0.05, tolerance=0.05, steps=50)
    assert fit.reason == "tolerance" and same(fit.loss, loss_of(model, noisy(deviation=0.0)))
    decay = 0.05 / 2 * reference.theta(model).square().sum().item()
    assert fit.loss <= 0.05 < fit.loss + decay


def test_losses_below_zero_are_losses():
    loss = nn.PoissonNLLLoss()  # exp(y) - t y, whose minimum t - t log t is below zero from t = e on
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    data = x, 20 + (15 * torch.sin(12 * x)).round()
    model = network(1, 8, 1)
    fit = fitted(model, data, loss=loss, steps=60)
    assert fit.loss < 0 and same(fit.loss, loss_of(model, data, loss), 30)
    losses = [entry["loss"] for entry in fit.history]
    assert losses[12] < 0 and losses[-1] < losses[12]  # it was not taken for stalled


@pytest.mark.parametrize("kind", ["pair", "loader"])
def test_flags_of_parts_come_back(kind):
    model, modes = dropout_network().eval(), []
    model[2].train()
    noted = {"callback": lambda fit: modes.append(model.training)}
    fitted(model, KINDS[kind](), steps=3, validation=noisy(1, 9), **noted)
    assert [own.training for own in model.modules()] == [False, False, False, True, False]
    assert modes == [kind == "loader"] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False], ids=["model in evaluation mode", "norm in evaluation mode"])
def test_a_frozen_norm_stays_frozen(kind, whole):
    model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    model.train(not whole)
    model[1].eval()
    other, mean = noisy(3, 25), model[1].running_mean.clone()
    fit = fitted(model, KINDS[kind](), steps=4, validation=other)
    assert torch.equal(mean, model[1].running_mean) and fit.validation < loss_of(network(), other)
    assert same(fit.validation, loss_of(model.eval(), other))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s["parameters"].update({"0.weight": torch.zeros(3, 2)}), r"'0.weight' has the shape \(3, 2\)"),
        (lambda state: state["best"]["parameters"].pop("0.bias"), "'0.bias' is not in both"),
        (lambda state: state.pop("history"), "must be the state_dict"),
        (lambda state: state["optimizer"].pop("param_groups"), "param_groups"),
    ],
)
def test_a_failed_resume_changes_nothing(spoil, message):
    state = fitted(network(), noisy(), steps=3, validation=noisy(1)).state_dict()
    spoil(state)
    model = network(seed=4)
    with refused(model, message, (ValueError, KeyError)):
        fitted(model, noisy(), steps=5, validation=noisy(1), resume=state)


def test_weighted_classes_count_by_their_weights_in_validation():
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(40, 2, generator=draws, dtype=torch.float64), torch.arange(40) % 2
    loss, model = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0], dtype=torch.float64)), network(2, 4, 2)
    order = data[1].sort().indices  # batches of one class each
    other = DataLoader(TensorDataset(data[0][order], data[1][order]), 20)
    fit = fitted(model, DataLoader(TensorDataset(*data), 10), loss=loss, epochs=1, validation=other)
    assert same(fit.validation, loss_of(model, data, loss), 40)


# -- inputs people have ----------------------------------------------------------------------------------------


def test_arrays_tables_and_lists_are_data():
    inputs, targets = noisy(samples=30)
    tables = problems.Table(inputs), problems.Table(targets)
    forms = {"tensors": (inputs, targets), "tables": tables, "lists": (inputs.tolist(), targets.tolist())}
    forms["arrays"] = [inputs.numpy(), targets.numpy()]
    fits = {name: fitted(network(), form, steps=3, validation=0.2) for name, form in forms.items()}
    assert len({fit.validation for fit in fits.values()}) == 1
    names = {name for entry in fits["lists"].history for name in entry}
    assert {"step", "loss", "validation"} <= names
    entries = [entry for fit in fits.values() for entry in fit.history]
    assert all(set(entry) == names for entry in entries)
    assert not any(isinstance(own, list | dict) for entry in entries for own in entry.values())


FLOATS = {"pair": (noisy(), noisy(1)), "loaders": (loader(), loader()), "sampler, loader": (sampler, loader())}


def in_floats(data, dtype):
    if callable(data):
        return lambda count: in_floats(data(count), dtype)
    if isinstance(data, DataLoader | list):
        return [in_floats(tuple(batch), dtype) for batch in data]
    return data[0].to(dtype), data[1].to(dtype)


@pytest.mark.parametrize("model_type, data_type", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_of_another_size_are_converted_and_said_once(kind, model_type, data_type):
    fits = []
    for dtype in (data_type, model_type):  # by woodbury, and by hand
        data, other = (in_floats(in_floats(own, torch.float32), dtype) for own in FLOATS[kind])
        settings = {"samples": 30, "seed": 0} if "sampler" in kind else {}
        with told() as texts:
            fits.append(fitted(network().to(model_type), data, validation=other, steps=4, **settings))
        named = [text for text in texts if f"{data_type} is converted to {model_type}" in text]
        assert len(named) == (dtype == data_type)
    assert fits[0].loss == fits[1].loss and fits[0].validation == fits[1].validation


# -- the benchmark --------------------------------------------------------------------------------------------


def test_the_benchmark_compares_with_adam(monkeypatch, capsys):
    from benchmarks import __main__ as program

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(noise, "MOST_STEPS", 30)
    assert program.main(["noise", "--only", "few", "--seeds", "2", "--methods", "validation"]) == 0
    assert "over all problems" in capsys.readouterr().out


def test_by_the_evidence_the_scale_of_targets_does_not_matter_with_a_layer_that_has_it():
    torch.manual_seed(0)
    inputs = torch.rand(60, 2, dtype=torch.float64)
    targets = torch.sin(3 * inputs[:, :1]) + 0.1 * torch.randn(60, 1, dtype=torch.float64)
    noise = []
    for scale in (1.0, 1e-6):
        torch.manual_seed(1)
        network, y = problems.mlp(2, 6, 1).double(), scale * targets
        if scale < 1:
            with (
                pytest.warns(UserWarning, match=r"column 0 of the targets is far .*woodbury\.Scale"),
                pytest.raises(ValueError, match=r"not positive definite in float64: .*woodbury\.Scale"),
            ):
                woodbury.fit(copy.deepcopy(network), nn.MSELoss(), (inputs, y), weight_decay="evidence")
        model = nn.Sequential(network, woodbury.Scale.targets(y))
        fit = woodbury.fit(model, nn.MSELoss(), (inputs, y), weight_decay="evidence", steps=60)
        noise.append(fit.noise / scale**2)
    assert noise[0] == pytest.approx(noise[1], rel=1e-3) and noise[0] == pytest.approx(0.01, rel=0.5)
