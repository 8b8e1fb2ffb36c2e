"""Batches of several terms with points of their own: steps against dense matrices, errors that name the term."""

import itertools
import math
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from checks import refused, silence, told
from fuzz.models import Parts
from woodbury._vector import flatten
from woodbury.fit.equations import Equations, TermSource

N = 7
equations, solving = (import_module(f"woodbury.fit.{name}") for name in ("equations", "solving"))


def make_net():
    """A network, and an unknown coefficient that one term uses."""
    torch.manual_seed(0)
    return Parts(lambda m, x: m.body(x), body=problems.mlp(2, 5, 2), rate=nn.Parameter(torch.tensor(0.7))).double()


def by_autograd(model, x):
    x = x.detach().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u[:, 0].sum(), x, create_graph=True)
    return slope[:, :1] - model.rate * slope[:, 1:] + u[:, 1:].square()


def by_layers(model, x):
    value, slope, bend = woodbury.laplacian(model.body, x)
    return torch.cat([bend[:, :1] + value[:, :1] ** 2, slope[:, 1, :1]], 1)


def data():
    torch.manual_seed(0)
    points = [torch.rand(count, 2, dtype=torch.float64) for count in (N, 4, 3)]
    return points, torch.rand(3, 2, dtype=torch.float64)


def source(model, weights=(1.0, 10.0, 3.0)):
    (inside, edge, known), values = data()
    return TermSource(
        model,
        Equations(
            equation=(inside, by_layers, weights[0]),
            flux=(edge, by_autograd, weights[1]),
            data=((known, values), lambda model, x: model(x), weights[2]),
        ).terms,
    )


def dense_parts(model, weights=(1.0, 10.0, 3.0)):
    """B and g of f = sum_t w_t mean r_t^2."""
    (inside, edge, known), values = data()
    residuals = by_layers(model, inside), by_autograd(model, edge), model(known) - values
    return reference.of_squares(residuals, weights, list(model.parameters()))


def test_a_step_on_several_terms_is_that_of_the_sum_of_their_weighted_means():
    model, damping = make_net(), 0.1
    terms = source(model)
    settings = {"forward": terms.forward, "fallback": "autograd"}
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=damping, **settings)
    B, g = dense_parts(model)
    expected = torch.linalg.solve(B + damping * torch.eye(len(g), dtype=torch.float64), -g)
    batch = terms.batch(N)
    p = optimizer.direction(*batch)
    assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B, damping)
    assert optimizer.verify(*batch) <= bounds.of_solve(B, damping)
    squares = terms.mean_squares()
    loss = sum(weight * squares[name] for weight, name in zip((1, 10, 3), squares, strict=True))
    info = optimizer.step(*batch)
    assert abs(float(info.loss) - loss) <= bounds.rounding(100) * loss
    assert terms.loss() == pytest.approx(loss, rel=bounds.rounding(100))


def test_a_searched_step_on_terms_is_the_one_on_their_numbers_together():
    """J p, second derivatives and losses along the path, against one function of all points."""
    model, other = make_net(), make_net()
    terms, (inside, edge, known), values = source(model), *data()

    def together(model, index):
        parts = (by_layers(model, inside), by_autograd(model, edge), model(known) - values)
        count = sum(part.numel() for part in parts)
        scaled = [
            (weight * count / part.numel()) ** 0.5 * part.flatten()
            for weight, part in zip((1, 10, 3), parts, strict=True)
        ]
        return torch.cat(scaled)[index].unsqueeze(1)

    settings = {"search": woodbury.CurvedSearch(), "fallback": "autograd"}
    ours = woodbury.GaussNewton(model, nn.MSELoss(), forward=terms.forward, **settings)
    theirs = woodbury.GaussNewton(other, nn.MSELoss(), forward=together, **settings)
    batch = terms.batch(N)
    held_out = terms.batch(N)
    for _ in range(3):
        a = ours.step(*batch, held_out=held_out)
        b = theirs.step(batch[0][0], None, held_out=(batch[0][0], None))
        assert a.length == b.length and a.accepted and b.accepted
    # steps of the smallest rung, which is 1e-15 of the trace: half of the digits are left
    bound = torch.finfo(torch.float64).eps ** 0.5
    assert reference.model_error(model, other) <= bound


def test_terms_that_need_different_methods_do_not_slow_each_other_down():
    """One differentiates by torch.autograd.grad, the other by torch.func."""

    def by_func(model, x):
        return torch.func.vmap(torch.func.jacrev(lambda point: model.body(point)[0]))(x)

    model = make_net()
    terms = TermSource(model, Equations(one=(points, by_autograd, 1.0), two=(points, by_func, 1.0)).terms)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, forward=terms.forward, fallback="autograd")
    with silence(RuntimeWarning):  # of many passes
        for _ in range(3):
            optimizer.step(*terms.batch(32))
    assert optimizer._plan().findings.fallback_method in ("expanded", "func")


@pytest.mark.parametrize("width", [1, 2])  # on a line they are not independent
def test_points_by_residual_keep_the_expected_loss(width):
    """Over many draws the weighted mean square is that of points as they are drawn."""
    model = make_net()
    term = (lambda count: torch.rand(count, width).double(), lambda m, x: m(x.expand(-1, 2)) ** 8)
    terms = TermSource(model, Equations(only=term).terms)
    chosen, drawn = [], []
    for _ in range(200):
        inputs, _ = terms.batch(64)
        chosen.append(float(terms.forward(model, inputs).detach().square().mean()))
        drawn.append(terms.mean_squares()["only"])
    chosen, drawn = torch.tensor(chosen), torch.tensor(drawn)
    error = (chosen.var() / 200 + drawn.var() / 200).sqrt()  # of the difference of the means
    assert abs(chosen.mean() - drawn.mean()) <= 5 * error
    uniform = [float(terms.forward(model, terms.draw(64)[0]).detach().square().mean()) for _ in range(200)]
    assert chosen.std() < torch.tensor(uniform).std()  # what it is for: less noise


def test_points_on_a_line_have_no_gaps():
    """Left of any candidate there are as many as its probabilities promise, but for a part of one."""
    taken, share = 48, torch.rand(300, dtype=torch.float64)
    share[:100] /= 50
    share /= share.sum()
    line = torch.rand(300, 1, dtype=torch.float64)
    index = equations._take(line, share, taken)
    for place in line:
        found, promised = int((line[index] <= place).sum()), float(share[line[:, 0] <= place].sum() * taken)
        assert abs(found - promised) <= 1 + bounds.rounding(300) * taken


def test_early_times_count_more_by_time_and_by_what_is_wrong_before():
    model, x = make_net(), torch.rand(40, 2, dtype=torch.float64)
    x[:10, 1] = 0.3  # at the same time
    terms = TermSource(model, Equations(only=(x, run_model)).terms, time=1, decline=6.0)
    scale = terms.batch(40)[0][3]
    squares, times = model(x).detach().square().sum(1).tolist(), x[:, 1].tolist()
    shares = [sum(own for own, other in zip(squares, times, strict=True) if other < time) for time in times]
    first, span = min(times), max(times) - min(times)
    expected = [
        math.exp(-6 * ((time - first) / span + share / sum(squares)))
        for time, share in zip(times, shares, strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64) * 40 / sum(expected)
    assert float((scale[:, 0].square() / expected - 1).abs().max()) <= bounds.rounding(40, condition=12)
    mean = float((expected * torch.tensor(squares)).mean()) / model(x).shape[1]
    assert terms.mean_squares()["only"] == pytest.approx(mean)
    known = zip(times, shares, squares, strict=True)
    half = [time for time, share, own in known if share + own < sum(squares) / 2]
    assert terms.middles == pytest.approx([(min(time for time in times if time > max(half)) - first) / span])
    assert bool((terms.draw(40)[0][3] == 1).all())  # where models are compared


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize(("units", "bound"), [(1.0, None), (1e4, 1000.0), (1e-4, 0.1)])
def test_conditions_have_one_weight_unless_the_units_of_the_equation_are_far_off(units, bound, is_near):
    model, (inside, edge, _), _ = make_net(), *data()
    equation = lambda model, x: units * by_layers(model, x)  # noqa: E731
    terms = TermSource(
        model, Equations(first=(inside, equation), second=(edge, by_autograd), third=(edge, run_model, 7.0)).terms
    )
    terms.balance(is_near)
    residuals = equation(model, inside), by_autograd(model, edge)
    rows = [reference.rows_of(own, list(model.parameters())) for own in residuals]
    lengths = [float(own.square().sum(1).mean()) for own in rows]
    second = (100 if is_near else 10) * (1.0 if bound is None else lengths[0] / lengths[1] / bound)
    assert terms.weights == pytest.approx({"first": 1.0, "second": second, "third": 7.0})


def points(count):
    return torch.rand(count, 2, dtype=torch.float64)


def run_model(model, x):
    return model(x)


WRONG = {
    "too few points": ((lambda count: points(count // 2), run_model), r"'odd': draw\(\d+\) gave \d+"),
    "not finite": ((points, lambda m, x: m(x) / 0), "'odd' gives residuals that are not finite"),
    "other rows": ((points, lambda m, x: m(x).sum(0)), r"'odd' gave \(2,\) for"),
    "no tensor": ((points, lambda m, x: 3.0), "'odd' gave float"),
    "other targets": (
        (lambda count: (points(count), torch.rand(count, 3)), run_model),
        "'odd' has targets of shape",
    ),
    "nan points": ((lambda count: points(count) * float("nan"), run_model), "'odd'.*nan"),
    "other type": ((lambda count: points(count).float(), run_model), "'odd'.*dtype"),
    "complex": ((points, lambda m, x: m(x) * 1j), "'odd' gave residuals of torch.complex128"),
    "an error of its own": ((points, lambda m: m), "'odd': .*2 were given"),
    "no number to draw": ((lambda: points(4), run_model), r"'odd': draw\(\d+\): .*1 was given"),
    "detached": ((points, lambda m, x: m(x).detach()), "'odd' does not depend on the parameters.*detached"),
    "no graph": (
        (points, lambda m, x: torch.autograd.grad(m(x.requires_grad_()).sum(), x)[0] + x),
        "'odd' does not depend on the parameters.*create_graph",
    ),
    "no columns": (
        (lambda count: points(count)[:, :1].split(1, 1) * 2, run_model),
        "'odd'.*join columns by torch.cat",
    ),
    "(n,) with (n, 1)": ((points, lambda m, x: m(x)[:, :1] - x[:, 0]), r"'odd' gives \(n, n\) numbers"),
    "mixed samples": ((points, lambda m, x: m(x) - m(x).mean()), "'odd'.*mixes the samples"),
}


@pytest.mark.parametrize("weight", [(), (1.0,)], ids=["balanced", "given"])
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_term(name, weight):
    term, message = WRONG[name]
    model = make_net()
    equations = Equations(even=(points, lambda m, x: m(x) - 1, *weight), odd=(*term, *weight))
    terms = TermSource(model, equations.terms)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), forward=terms.forward, fallback="autograd")
    with refused(model, message):
        optimizer.step(*terms.batch(16))


@pytest.mark.parametrize(
    "term",
    [
        3,
        (points,),
        (points, 3),
        (points, run_model, -1.0),
        (points, run_model, "x"),
        ((points(2), 0.0), run_model),
    ],
)
def test_what_is_no_term_is_refused_by_name(term):
    with pytest.raises((TypeError, ValueError), match="odd"):
        Equations(odd=term)


# -- fits -----------------------------------------------------------------------------------------------------


def bend(model, x):
    return woodbury.laplacian(model, x).laplacian + torch.pi**2 * torch.sin(torch.pi * x)


def line_problem():
    """-u'' = pi^2 sin(pi x), u = 0 at both ends."""
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    draw = lambda count: torch.rand(count, 1, dtype=torch.float64)  # noqa: E731
    return problems.network(1, 8, 1), Equations(inside=(draw, bend), ends=(ends, run_model))


def wave_problem():
    """One that eight functions cannot solve, and whose steps are cheap."""
    return Equations(wave=(lambda count: points(count)[:, :1], lambda model, x: model(x) - torch.sin(20 * x)))


def fitted(model, equations, **settings):
    return woodbury.fit(model, equations, **{"progress": False, "seed": 0, **settings})


def test_a_fit_of_terms_solves_the_equation_and_says_how_far_each_term_is():
    model, (_, equations) = problems.network(1, 24, 1), line_problem()
    fit = fitted(model, equations, steps=30, samples=128)
    x = torch.linspace(0, 1, 50, dtype=torch.float64).unsqueeze(1)
    assert float((model(x) - torch.sin(torch.pi * x)).abs().max()) < 1e-4
    first, last = fit.history[0]["terms"], fit.history[-1]["terms"]
    assert set(first) == set(last) == {"inside", "ends"} and last["inside"] < 1e-6 * first["inside"]


def test_points_are_converted_to_what_the_model_takes():
    line, ends = torch.linspace(0, 1, 65).double().unsqueeze(1), torch.tensor([[0.0], [1.0]]).double()
    fits = []
    for own in (torch.Tensor.double, torch.Tensor.numpy, torch.Tensor.float):
        terms = {"inside": (own(line), bend), "ends": ((own(ends), own(0 * ends)), run_model)}
        with told() as texts:
            fits.append(fitted(problems.network(1, 8, 1), Equations(**terms), steps=3).loss)
        assert sum("is converted to torch.float64" in text for text in texts) == (own is torch.Tensor.float)
    assert fits == pytest.approx([fits[0]] * 3, rel=1e-3)  # of points in float32


def test_conditions_keep_their_weight_where_the_rows_of_the_equation_are_zero():
    """As those of u^2 are where the last layer of a network is zero."""
    model, ends = problems.network(1, 8, 1), torch.tensor([[0.0], [1.0]]).double()
    torch.nn.init.zeros_(model[-1].weight), torch.nn.init.zeros_(model[-1].bias)
    square = lambda model, x: model(x).square()  # noqa: E731
    terms = TermSource(model, Equations(inside=(ends, square), ends=(ends, run_model)).terms)
    terms.balance()
    assert terms.weights == {"inside": 1.0, "ends": 10.0}


def test_a_fit_tells_of_a_derivative_without_a_graph_and_of_parameters_that_stay():
    rate = nn.Parameter(torch.tensor(2.0))

    def by_hand(model, x, keep=False):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=keep, retain_graph=True)
        return slope + rate.double() * model(x)

    (model, _), x = line_problem(), torch.rand(9, 1).double()
    for keep, expected in (
        (False, ["without create_graph=True", "stay as they are"]),
        (True, ["stay as they are"]),
    ):
        with told() as texts:
            fitted(model, Equations(odd=(x, partial(by_hand, keep=keep))), steps=1)
        texts = [text for text in texts if "term 'odd'" in text]
        assert len(texts) == len(expected) and all(map(str.__contains__, texts, expected))
    rate.requires_grad_(False)

    def forced(model, x):  # by the derivative of a known function
        known = x.detach().clone().requires_grad_()
        return by_hand(model, x, keep=True) + torch.autograd.grad(known.sin().sum(), known)[0]

    with silence(UserWarning, "fit: term"):
        fitted(model, Equations(odd=(x, forced)), steps=1)
    with pytest.warns(UserWarning, match=r"'odd' gives \(n, n\) numbers"):
        fitted(model, Equations(odd=(x, lambda model, _: model(_) - x[:, 0])), steps=1)


@pytest.mark.parametrize(
    ("lengths", "step"),
    [
        ([1 / 256, 1 / 64, 1 / 256, 1 / 256], 8),
        ([1 / 16, 1 / 64, 1 / 32, 1 / 32], 12),  # one of them was longer
        ([1 / 16, 1 / 64, 1.0, 1 / 16], 16),
        ([1 / 16, 1 / 8, 1 / 64, 1 / 8], None),
    ],
)
def test_plain_steps_follow_where_half_of_the_last_searched_ones_are_short(monkeypatch, lengths, step):
    monkeypatch.setattr(solving, "FAR", 0.0)
    model, begun, course = problems.network(1, 8, 1), [], itertools.cycle(lengths)
    begin = solving.SolvingRun.begin_plain
    monkeypatch.setattr(solving.SolvingRun, "begin_plain", lambda run: (begun.append(run.fit.steps), begin(run)))
    shorten = lambda fit: fit.history[-1].update(length=next(course))  # noqa: E731
    fit = fitted(model, wave_problem(), steps=18, callback=shorten)
    assert begun == ([] if step is None else [step]) and fit.steps == 18


@pytest.mark.parametrize("most", [0, 256])
def test_plain_steps_end_close_to_a_solution(monkeypatch, most):
    begin = solving.SolvingRun.begin_plain
    monkeypatch.setattr(solving.SolvingRun, "begin_plain", lambda run: begin(run, most))
    monkeypatch.setattr(solving, "LOOKS", {8: 1.0})
    monkeypatch.setattr(solving, "FAR", 0.0)
    monkeypatch.setattr(solving, "CLOSE", 1e-2)
    searched = lambda fit: any(own["bent"] for own in fit.history[8:])  # noqa: E731
    fit = fitted(*line_problem(), steps=100, samples=64, callback=searched)
    losses, plain = [own["loss"] for own in fit.history], [not own["bent"] for own in fit.history]
    close = next(place for place, loss in enumerate(losses) if place > 8 and loss < 1e-2 * losses[0])
    assert close < 99 and all(plain[8 : close + 1]) and not all(plain[close + 1 :])


def test_conditions_weigh_more_from_where_a_solution_is_near_on(monkeypatch):
    weights, sources, balance = [], [], TermSource.balance
    monkeypatch.setattr(solving, "NEAR", 0.5)
    monkeypatch.setattr(TermSource, "balance", lambda own, *near: (sources.append(own), balance(own, *near)))
    note = lambda fit: weights.append(sources[0].weights["ends"])  # noqa: E731
    fit = fitted(*line_problem(), steps=12, samples=64, callback=note)
    losses = [record["loss"] for record in fit.history]
    near = next(place for place, loss in enumerate(losses) if loss < 0.5 * losses[0]) + 1
    assert 0 < near < 12 and weights == pytest.approx([10.0] * near + [100.0] * (12 - near))


def test_a_fit_of_other_terms_is_not_resumed():
    (model, equations), ends = line_problem(), torch.zeros(1, 1).double()
    state = fitted(model, equations, steps=2, samples=64).state_dict()
    with refused(model, r"of the terms \['inside', 'ends'\], and here are \['ends'\]"):
        fitted(model, Equations(ends=(ends, run_model)), steps=3, resume=state)


def test_memory_that_runs_out_takes_fewer_points_and_loses_nothing(monkeypatch):
    model, equations = line_problem()
    step, most = woodbury.GaussNewton.step, 600

    def small_memory(self, inputs, *args, **kwargs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("too much")
        return step(self, inputs, *args, **kwargs)

    monkeypatch.setattr(woodbury.GaussNewton, "step", small_memory)
    with pytest.warns(RuntimeWarning, match="memory has run out: from now on a step has 512 samples") as told:
        fit = fitted(model, equations, steps=3, samples=1024)
    assert sum("memory" in str(own.message) for own in told) == 1 and fit.steps == 3 and fit.samples == 512
    assert fit.history[-1]["loss"] < fit.history[0]["loss"]


def test_samples_do_not_grow_beyond_what_memory_and_time_hold(monkeypatch):
    """Where more of them are wanted after any two steps; one of eight samples takes half a second."""
    monkeypatch.setattr(solving, "LIMITED", 2.0)
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(import_module("woodbury.fit.run").time, "perf_counter", lambda: next(clock))
    ends = []
    for available, seconds in (
        (None, None),
        (6 * 16 * 25 * 8, None),
        (None, 4.0),
    ):  # rows of 16 samples, 25 parameters
        monkeypatch.setattr(solving, "available_bytes", lambda device, own=available: own)
        fit = fitted(problems.network(1, 8, 1), wave_problem(), steps=5, samples=8, seconds=seconds)
        ends.append(max(record["samples"] for record in fit.history))
    assert ends[0] >= 16 > ends[1] == ends[2] == 8


@pytest.mark.parametrize("width, at_first", [(1, 256), (3, 85), (8, 64)])
def test_systems_begin_with_as_many_rows_as_one_equation(width, at_first, monkeypatch):
    """And a fit that is taken up has the points of one that went on."""
    monkeypatch.setattr(solving, "LIMITED", 0.0)
    monkeypatch.setattr(solving, "LOOKS", {})  # no plain steps
    several = lambda model, x: torch.cat([model(x) - k * x[:, :1] for k in range(width)], 1)  # noqa: E731
    terms, model = Equations(system=(points, several), edge=(points(5), run_model)), problems.network(2, 80, 1)
    begun = fitted(model, terms, steps=2)
    resumed = fitted(model, terms, steps=9, resume=begun)
    assert [record["samples"] for record in resumed.history] == [at_first] * 8 + [2 * at_first]


def test_points_that_stay_are_counted():
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    fit = fitted(problems.network(1, 8, 1), Equations(inside=(ends.repeat(7, 1), run_model)), steps=2)
    assert fit.samples == 14 and "14 samples per step" in str(fit)


def test_weights_follow_the_rows_of_the_first_steps(monkeypatch):
    """Those of an equation are short in a network that is nearly linear, as if its units were others."""

    class Small(nn.Linear):
        def forward(self, x):
            return x + 0.03 * torch.tanh(super().forward(x))

    weights, balance = [], TermSource.balance
    noted = lambda own, *near: (balance(own, *near), weights.append(own.weights["ends"]))  # noqa: E731
    monkeypatch.setattr(TermSource, "balance", noted)
    torch.manual_seed(0)
    fitted(nn.Sequential(nn.Linear(1, 16), Small(16, 16), nn.Linear(16, 1)).double(), line_problem()[1], steps=5)
    assert (
        len(weights) == 4 and weights[0] < 0.01 and max(weights[1:]) > 10 * weights[0]
    )  # before steps 1, 2, 3, 5


@pytest.mark.parametrize(
    "settings",
    [
        {"data": (torch.zeros(3, 1), None)},
        {"forward": run_model},
        {"validation": (torch.zeros(3, 1), torch.zeros(3, 1))},
        {"epochs": 3},
        {"points": "elsewhere"},
        {"weight_decay": "evidence"},
        {"samples": 0},
    ],
)
def test_what_terms_have_no_use_for_is_refused_by_name(settings):
    model, equations = line_problem()
    with refused(model, f"fit: {next(iter(settings))}"):
        fitted(model, equations, steps=3, **settings)
