"""Steps with a CurvedSearch: the ladder, the bend and the length, against dense formulas that share no code."""

import copy
import dataclasses
import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from checks import refused, unchanged
from fuzz.models import Parts
from test_chain import scale
from test_layers import check_ratio
from woodbury import _random
from woodbury.linalg import minimize_nonnegative
from woodbury.losses.rules import ScaledLoss
from woodbury.model import tangents
from woodbury.model.capture import call_model, capture
from woodbury.model.chain import ACTIVATIONS, read_chain
from woodbury.model.plan import plan_layers
from woodbury.policies import curved
from woodbury.policies.curved import CORRECTIONS, Choice, Memory, Path
from woodbury.policies.search import Length, find_length

NOT_IN_THE_ROWS = ("counts-by-rate",)  # part of the gradient
# so mild that p keeps ten digits
MILD = woodbury.CurvedSearch(rungs=(1e-1, 1e-2, 1e-3), bend=1e-2, first=None, deep=1e-4)


# -- the parts -------------------------------------------------------------------------------------------


def nonnegative_by_enumeration(matrix, linear):
    """argmin c A c / 2 - linear . c over c >= 0, by all supports."""
    k, best = len(linear), (0.0, torch.zeros_like(linear))
    for size in range(1, k + 1):
        for support in map(list, combinations(range(k), size)):
            own = torch.linalg.solve(matrix[support][:, support], linear[support])
            value = float(-0.5 * linear[support] @ own)
            if (own >= 0).all() and value < best[0]:
                c = torch.zeros_like(linear)
                c[support] = own
                best = value, c
    return best[1]


@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_the_minimum_over_nonnegative_coefficients_is_that_of_all_supports(k, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(k, k + 2, dtype=torch.float64, generator=generator)
    root = root * torch.logspace(-3, 3, k, dtype=torch.float64).unsqueeze(1)
    matrix, linear = root @ root.T, root @ torch.randn(k + 2, dtype=torch.float64, generator=generator)
    ridged = matrix + 1e-4 * matrix.diagonal().diag()
    c, expected = minimize_nonnegative(matrix, linear, 1e-4), nonnegative_by_enumeration(ridged, linear)
    assert (c >= 0).all()
    value, least = (0.5 * x @ ridged @ x - linear @ x for x in (c, expected))
    # scaled to a unit diagonal, the ridge bounds the condition by k / 1e-4
    assert value <= least + bounds.rounding(k, k / 1e-4) * abs(least)


def test_a_direction_without_curvature_gets_no_weight():
    matrix, linear = torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double(), torch.tensor([1.0, 0.0]).double()
    c = minimize_nonnegative(matrix, linear, 0.0)
    assert abs(c[0] - 0.5) <= bounds.rounding(1) and c[1] == 0


@every_pair(start=[2.0, 1.0, 2.0**-7, 2.0**-20], minimum=[1.9, 0.3, 2.0**-9.2, 2.0**-19])
def test_the_length_is_the_best_power_of_two_from_any_start(start, minimum):
    trials = []

    def decrease(length, bent):
        trials.append(length)
        return minimum**2 - (length - minimum) ** 2 - (0.0 if bent else 1e-3 * minimum**2)

    found = find_length(decrease, start, bends=True)
    grid = [2.0**-k for k in range(-1, 21)]
    best = max(grid, key=lambda length: minimum**2 - (length - minimum) ** 2)
    assert found.length == best and found.bent and found.decrease == decrease(best, True)
    assert len(set(trials)) <= abs(math.log2(start / best)) + 4


def test_nothing_better_than_staying_is_a_length_of_0():
    found = find_length(lambda length, bent: -length, 1.0, bends=True)
    assert found == (0.0, False, 0.0)
    assert find_length(lambda length, bent: math.nan, 1.0, bends=True).length == 0.0


@pytest.mark.parametrize(
    "kind, first, last",
    [
        *((kind, (), ()) for kind in ACTIVATIONS),
        *((nn.Tanh, (scale(3),), last) for last in ((), (nn.Tanh(),), (scale(2),))),
    ],
)
def test_derivatives_along_p_agree_by_hand_and_from_other_passes(kind, first, last):
    layers = nn.Linear(3, 5), kind(), nn.Linear(5, 4, bias=False), kind(), nn.Linear(4, 2)
    model = nn.Sequential(*first, *layers, *last).double()
    inputs = torch.randn(7, 3, dtype=torch.float64)
    plan = plan_layers(model, dict(model.named_parameters()), False)
    with torch.no_grad():
        by_hand = read_chain(plan, model).run(inputs)
    captured = capture(plan, call_model, inputs, 7)
    vectors = [{name: torch.randn_like(own) for name, own in model.named_parameters()} for _ in range(3)]
    images = captured.push_forward(vectors), tangents.push_forward_again(captured, vectors)
    first, second = by_hand.push_forward(vectors), by_hand.second_derivative(vectors[0])
    p = reference.flat(vectors[0].values())
    along = outputs_along(model, inputs, p)
    dense_first = torch.autograd.functional.jacobian(along, torch.zeros((), dtype=torch.float64))
    bound = bounds.rounding(len(p))
    assert reference.relative_error(first[0], dense_first) <= bound
    assert reference.relative_error(second, second_derivatives(model, inputs, p)) <= bound
    assert all(reference.relative_error(own, first) <= bound for own in images)
    # sqrt(eps) |p|^2 / |theta|^2 of the outputs, and the next term of the series
    torch.testing.assert_close(captured.second_derivative(vectors[0]), second, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_has_the_random_numbers_of_its_pass():
    model = problems.mlp(3, 5, 2).double().append(nn.Dropout(0.5))
    inputs, random = torch.randn(6, 3, dtype=torch.float64), _random.snapshot(torch.device("cpu"))
    captured = capture(plan_layers(model, dict(model.named_parameters()), False), call_model, inputs, 6)
    vector = {name: torch.randn_like(own) for name, own in model.named_parameters()}

    def with_its_numbers(model, x):
        _random.restore(random)
        return model(x)

    with _random.replayed(random):
        ours = captured.second_derivative(vector)
    theirs = second_derivatives(model, inputs, reference.flat(vector.values()), with_its_numbers)
    assert 0 < int((theirs == 0).sum()) < theirs.numel()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_derivatives_along_a_parameter_that_the_function_holds_by_itself():
    """As an unknown coefficient of an equation may be; forward mode exchanges what modules hold."""
    rate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    model, inputs = Parts(net=problems.mlp(2, 4, 1).double(), rate=rate), torch.randn(6, 2, dtype=torch.float64)
    functions = (lambda m, x: rate.square() * m.net(x), False), (lambda m, x: m.rate**2 * m.net(x), True)
    for function, reaches in functions:
        plan = plan_layers(model, dict(model.named_parameters()), True)
        captured = capture(plan, function, inputs, 6)
        along = {name: torch.zeros_like(own) for name, own in model.named_parameters()}
        along["rate"] = torch.ones_like(rate)
        outputs = model.net(inputs).detach()
        first, second = captured.push_forward([along])[0], captured.second_derivative(along)
        assert reference.relative_error(first, 2 * rate.item() * outputs) <= bounds.rounding(len(outputs))
        torch.testing.assert_close(second, 2 * outputs, rtol=1e-5, atol=1e-5)  # by differences
        assert captured._can_exchange is reaches


def of_rung(problem, search, steps=1, dtype=torch.float64):
    """The bound for the system of the smallest damping, which is relative to the trace: K / trace is below 1."""
    size = len(reference.flat(reference.parameters(problem.model).values())) + problem.targets.numel()
    return bounds.rounding(size, 1 + 1 / search.rungs[-1], steps, dtype)


# -- the step, dense --------------------------------------------------------------------------------------


def outputs_along(model, inputs, p, forward=None):
    """The outputs at theta + t p, as a function of t."""
    run = forward or (lambda m, x: m(x))
    model = reference.written_out(model)
    point = {name: own.detach() for name, own in reference.parameters(model).items()}
    parts = p.split([own.numel() for own in point.values()])
    bound = Parts(lambda m, x: run(m.model, x), model=model)

    def along(t):
        pairs = zip(point.items(), parts, strict=True)
        moved = {f"model.{name}": own + t * part.view_as(own) for (name, own), part in pairs}
        return torch.func.functional_call(bound, moved, (inputs,))

    return along


def second_derivatives(model, inputs, p, forward=None):
    """y_i'' along p for every sample, (n, C), by reverse mode in one number t.

    d(u.y)/dt is linear in u, and its gradient in u is dy/dt: two passes back for each derivative of all outputs.
    """
    along = outputs_along(model, inputs, p, forward)
    zero = torch.zeros((), dtype=p.dtype, requires_grad=True)
    value = along(zero)
    for _ in range(2):
        u = torch.zeros_like(value, requires_grad=True)
        (slope,) = torch.autograd.grad(value + 0 * zero, zero, u, create_graph=True)
        (value,) = torch.autograd.grad(slope, u, create_graph=True)
    return value.detach().flatten(1)


def dense_deepened(B, D, damping, g, p, iterations):
    """argmin g x + x B x / 2 over p + span of (M^-1 B)^k M^-1 r: what conjugate gradients find, M the damped B.

    And the smallest curvature of B in that space, in units of D.
    """
    damped, s = B + damping * D, D.diagonal().rsqrt().unsqueeze(1)
    own, basis = torch.linalg.solve(damped, -g - B @ p), []
    for _ in range(iterations):
        basis.append(own / own.norm())
        own = torch.linalg.solve(damped, B @ own)
    V = s * torch.linalg.qr(torch.stack(basis, 1) / s).Q
    curvature = V.T @ B @ V
    found = p + V @ torch.linalg.lstsq(curvature, V.T @ (-g - B @ p)).solution
    return found, torch.linalg.eigvalsh(curvature)[0]


def dense_path(
    problem, search, held_out=None, decay=0.0, subset=None, blocks="full", forward=None, metric=None, depth=0
):
    """p, bend, c, what corrects a point, and a bound on the errors of rounding in units s, by dense matrices.

    The metric D = s^-2 is I, or the diagonal of B where that is no rounding error.
    """
    model, loss, inputs, targets = copy.deepcopy(problem.model), problem.loss, problem.inputs, problem.targets
    subset = list(range(len(targets))) if subset is None else subset
    samples = reference.per_sample(model, loss, reference.chosen(inputs, subset), targets[subset], forward)
    times = len(targets) if reference.is_sum(loss) else 1  # of a mean over samples
    B = times * reference.curvature_matrix(samples, "gauss-newton")
    whole = B
    if blocks == "layer":
        B = B * reference.block_mask(reference.parameters(model)).to(B)
    g = reference.gradient(model, loss, inputs, targets, forward)
    theta = reference.theta(model)
    eye, diagonal = torch.eye(len(g), dtype=g.dtype), B.diagonal()
    negligible = (4 * torch.finfo(g.dtype).eps) ** 2 * diagonal.max()
    D = eye if metric is None else torch.where(diagonal > negligible, diagonal, diagonal.max()).diag()
    trace = (diagonal / D.diagonal()).sum()
    ladder = [torch.linalg.solve(B + decay * eye + r * trace * D, -(g + decay * theta)) for r in search.rungs]
    least = search.rungs[-1] * trace
    if depth:
        least = search.deep * trace
        ladder.append(torch.linalg.solve(B + least * D, -g))
    if depth > 1:
        deepened, curvature = dense_deepened(B, D, least, g, ladder[-1], 2 ** (depth - 2))
        ladder.append(deepened)
        least = min(least, curvature)
    P = torch.stack(ladder)
    if held_out is not None:
        others = reference.per_sample(model, loss, *held_out, forward)
        whole = reference.curvature_matrix(others, "gauss-newton")
        whole = whole * (len(others) if reference.is_sum(loss) else 1)
        g = reference.gradient(model, loss, *held_out, forward)
    matrix, linear = P @ (whole + decay * eye) @ P.T, -P @ (g + decay * theta)
    c = nonnegative_by_enumeration(matrix + 1e-10 * matrix.diagonal().diag(), linear)
    p = c @ P
    s = D.diagonal().rsqrt()
    # J^T H J cancels where outputs move together: it errs by eps of its terms
    terms = times * reference.curvature_matrix([(J.abs(), r, H.abs()) for J, r, H in samples], "gauss-newton")
    bound = bounds.of_solve(terms * s * s.unsqueeze(1), least)
    inside = reference.chosen(inputs, subset)

    def pulled_back(changes):
        """(B + lambda_b D)^-1 J^T H y for changes y of the outputs."""
        force = sum(J.T @ H @ y for (J, _, H), y in zip(samples, changes, strict=True)) * (times / len(samples))
        return torch.linalg.solve(B + decay * eye + search.bend * trace * D, force)

    def corrected(length, point):
        with torch.no_grad():
            moved, before = (outputs_along(model, inside, point, forward)(t).flatten(1) for t in (1.0, 0.0))
        wanted = torch.stack([length * J @ p for J, _, _ in samples])
        return point - pulled_back(moved - before - wanted)

    bend = -0.5 * pulled_back(second_derivatives(model, inside, p, forward))
    return p, bend, c, corrected, bound, s


def points_of(info, p, bend, corrected):
    """Where the dense path is at the length of a step, and its corrections there."""
    length = info.length.item()
    points = [length * p + length**2 * bend * info.bent]
    while corrected is not None and info.bent and len(points) <= CORRECTIONS:
        points.append(corrected(length, points[-1]))
    return points


def check_against_dense(problem, held_out=None, decay=0.0, subset=None, forward=None, depth=0, **settings):
    """Take a step, which must be a point of the dense path, or with held-out samples a corrected one.

    Returns the number of corrections.
    """
    blocks, metric = settings.get("blocks", "full"), settings.get("metric")
    dense = dense_path(problem, MILD, held_out, decay, subset, blocks, forward, metric, depth)
    p, bend, c, corrected, bound, s = dense
    settings |= {"search": MILD, "weight_decay": decay, "forward": forward}
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, **settings)
    if depth:
        optimizer.state["search"] = dataclasses.asdict(Memory(depth=depth))
    arguments = {"held_out": held_out, "subset": subset}
    direction = optimizer.direction(problem.inputs, problem.targets, **arguments)
    before = reference.theta(problem.model)
    info = optimizer.step(problem.inputs, problem.targets, **arguments)
    assert info.accepted and 0 < info.length.item() <= 2
    points = points_of(info, p, bend, corrected if held_out is not None else None)
    found = reference.flat(direction.values())
    corrections, expected = min(enumerate(points), key=lambda own: reference.relative_error(found, own[1]))
    # where y'' is a central difference with h = eps^(1/4) |theta| / |p|, the bend has half of its digits at best
    chain = optimizer._problems.structure.chain
    by_hand = chain is not None and forward is None and chain.takes(problem.inputs)
    of_point = 1e-5 if info.bent and not by_hand else bound
    assert reference.relative_error(found / s, expected / s) <= of_point
    after = reference.theta(problem.model)
    off = ((after - before - expected) / s).norm()
    assert off <= of_point * (expected / s).norm() + bounds.rounding(1) * (after / s).norm()
    assert abs(info.share - c.sum()) <= bound * c.sum()
    return corrections


@pytest.mark.parametrize("index, name", list(enumerate(problems.PROBLEMS)))
def test_the_step_is_the_dense_combination_with_its_bend(index, name):
    """The metric: the identity and the diagonal of the curvature in turn."""
    check_against_dense(problems.make(name), metric=(None, "diagonal")[index % 2])


@every_pair(
    name=["softmax", "squared-sum", "residual", "pictures"],
    changes=[{}, {"decay": 0.05}, {"metric": "diagonal"}],
    subset=[None, [1, 4, 5]],
    blocks=["full", "layer"],
)
def test_weight_decay_the_metric_subsets_and_blocks_enter_as_in_the_dense_formula(name, changes, subset, blocks):
    check_against_dense(problems.make(name), subset=subset, blocks=blocks, **changes)


def test_corrected_points_are_those_of_the_dense_formula_and_lower(monkeypatch):
    """A step on held-out samples ends as low as without corrections, and lower where it was corrected."""
    corrections, some = [], [0, 2, 3, 5]
    ways = ({}, {"subset": [1, 4, 5]}, {"decay": 0.05}, {"metric": "diagonal"}, {"depth": 2})
    names = ("softmax", "squared", "residual", "tokens", "narrow")
    for name, changes in [*zip(names, ways, strict=True), *zip(names, ways[2:] + ways[:2], strict=True)]:
        problem, other = (narrow_fit() if name == "narrow" else problems.make(name) for _ in range(2))
        held_out = reference.chosen(problem.inputs, some), problem.targets[some]
        corrections.append(check_against_dense(problem, held_out=held_out, **changes))
        decay, subset = changes.get("decay", 0.0), changes.get("subset")
        settings = {"search": MILD, "weight_decay": decay, "metric": changes.get("metric")}
        optimizer = woodbury.GaussNewton(other.model, other.loss, **settings)
        optimizer.state["search"] = dataclasses.asdict(Memory(depth=changes.get("depth", 0)))
        with monkeypatch.context() as patched:
            patched.setattr(curved, "CORRECTIONS", 0)
            optimizer.step(other.inputs, other.targets, held_out=held_out, subset=subset)
        corrected, straight = (objective(own, held_out, decay) for own in (problem, other))
        bound = bounds.rounding(problem.targets.numel())
        assert corrected <= straight * (1 + bound)
        assert (corrections[-1] > 0) == (corrected < straight * (1 - bound)), (name, changes)
    assert set(corrections) == {0, 1, 2}


def test_corrections_that_leave_the_domain_of_a_model_are_left_out(monkeypatch):
    plain, finite = Path.corrected, []

    def corrected(self, length, vector):
        point = plain(self, length, vector)
        finite.append(all(bool(value.isfinite().all()) for value in point.values()))
        return point

    monkeypatch.setattr(Path, "corrected", corrected)
    torch.manual_seed(2)
    logarithm = Parts(lambda m, x: torch.log(1 - x))  # nan above 1
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1, bias=False), logarithm).double()
    with torch.no_grad():
        model[2].weight.mul_(0.3)
    inputs = torch.rand(40, 2, dtype=torch.float64)
    batch = inputs, -2 - inputs.sum(1, keepdim=True)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch())
    losses = [optimizer.step(*batch, held_out=batch).loss.item() for _ in range(8)]
    assert all(after <= before for before, after in pairwise(losses)) and set(finite) == {True, False}


def objective(problem, data, decay):
    with torch.no_grad():
        theta = reference.flat(reference.parameters(problem.model).values())
        return float(problem.loss(problem.model(data[0]), data[1]) + 0.5 * decay * theta @ theta)


def narrow_fit():
    torch.manual_seed(0)
    model = problems.mlp(1, 3, 2).double()  # 14 parameters, 60 rows
    inputs = torch.randn(30, 1, dtype=torch.float64)
    return problems.Problem(model, nn.MSELoss(), inputs, torch.cat([inputs.sin(), inputs.square()], 1))


@pytest.mark.parametrize(
    "index, name", list(enumerate(sorted(problems.PROBLEMS.keys() - {*NOT_IN_THE_ROWS})[::2]))
)
def test_the_deep_rung_goes_on_by_conjugate_gradients(index, name):
    """Four ways in turn: by itself, further on, in a metric, judged by other samples."""
    problem, some = problems.make(name), [0, 2, 3, 5]
    held_out = reference.chosen(problem.inputs, some), problem.targets[some]
    ways = {"depth": 1}, {"depth": 3, "metric": "diagonal"}, {"depth": 2}, {"depth": 3, "held_out": held_out}
    check_against_dense(problem, **ways[index % 4])


def test_more_rows_than_parameters_take_the_same_step_and_go_on_by_conjugate_gradients_too():
    check_against_dense(narrow_fit(), decay=0.01)
    for metric in (None, "diagonal"):
        problem = narrow_fit()
        check_against_dense(problem, depth=3, metric=metric)
        check_against_dense(problem, held_out=(problem.inputs[:9], problem.targets[:9]), depth=4, metric=metric)


def test_what_conjugate_gradients_do_not_cover_keeps_its_rungs():
    others = [{"name": name} for name in NOT_IN_THE_ROWS]
    for changes in ({"decay": 0.05}, {"subset": [1, 4, 5]}, {"blocks": "layer"}, *others):
        plain, deeper = (direction_at(depth, **changes) for depth in (0, 3))
        assert torch.equal(plain, deeper)


def direction_at(depth, name="squared", decay=0.0, subset=None, **settings):
    """The direction of a search at this depth."""
    problem = problems.make(name)
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD, weight_decay=decay, **settings)
    optimizer.state["search"] = dataclasses.asdict(Memory(depth=depth))
    return reference.flat(optimizer.direction(problem.inputs, problem.targets, subset=subset).values())


def test_steps_that_keep_what_was_promised_go_deeper_and_others_less_deep():
    """And within limits; step by step: see `test_the_depth_follows_the_steps_of_an_optimizer`."""
    search, memory = woodbury.CurvedSearch(), Memory(depth=3)
    assert memory.after(search, chosen(2.0**-20, 1.0), loss=2.0, promised=1.0).depth == 0  # a rung is left out
    assert memory.after(search, chosen(1.0, 0.0), loss=2.0, promised=0.0).depth == 2
    plain = woodbury.CurvedSearch(deep=None)
    assert Memory().after(plain, chosen(1.0, 1.0), loss=2.0, promised=1.0).depth == 0


def chosen(length, decrease):
    return Choice({}, Length(length, True, decrease), torch.ones(1))


def test_the_depth_follows_the_steps_of_an_optimizer():
    problem, depths = narrow_fit(), [0]
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD)
    for _ in range(12):
        info = optimizer.step(problem.inputs, problem.targets)
        length, gained = info.length.item(), (info.ratio * info.predicted).item()
        promised = info.predicted.item() / (2 * length - length**2)  # along p the model is a parabola, least at 1
        depth = depths[-1] + (gained >= 0.7 * promised) - (gained < 0.4 * promised)
        depths.append(min(max(depth, 0), 5))
        assert optimizer.state["search"]["depth"] == depths[-1]
    assert max(depths) >= 2 and any(after < before for before, after in pairwise(depths))


@every_pair(name=["softmax", "squared"], metric=[None, "diagonal"])
def test_verify_checks_the_system_of_the_smallest_damping_in_the_metric_of_a_search(name, metric):
    problem = problems.make(name)
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD, metric=metric)
    for _ in range(3):
        optimizer.step(problem.inputs, problem.targets)
        D = reference.flat(optimizer.state["metric"]["moments"].values()) if metric else torch.ones(1)
        bound = of_rung(problem, MILD) * (D.max() / D.min()).sqrt()
        assert optimizer.verify(problem.inputs, problem.targets) <= bound
    assert optimizer.search is MILD


def test_parameters_by_the_fallback_take_the_same_step():
    """A bare matrix, which no rule covers."""
    inputs, targets = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    scale = nn.Parameter(torch.tensor([[1.5, 0.2], [0.1, -0.5]]))
    model = Parts(lambda m, x: m.inside(x) @ m.scale, inside=problems.mlp(3, 4, 2), scale=scale)
    problem = problems.Problem(model.double(), nn.MSELoss(), inputs, targets)
    check_against_dense(problem, fallback="autograd")


def slope_of(model, x):
    """The derivative of a network in its input, by ordinary autograd: torch.func cannot transform this."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
    return slope


def test_a_model_that_torch_func_cannot_take_is_searched_too():
    model, inputs = problems.mlp(2, 4, 1).double(), torch.randn(6, 2, dtype=torch.float64)
    problem = problems.Problem(model, nn.MSELoss(), inputs, torch.randn(6, 2, dtype=torch.float64))
    other = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

    def by_func(model, x):
        return torch.func.vmap(torch.func.grad(lambda point: model(point).squeeze()))(x)

    p, bend, _, corrected, *_ = dense_path(problem, MILD, other, forward=by_func)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=MILD, forward=slope_of, fallback="autograd")
    direction = reference.flat(optimizer.direction(inputs, problem.targets, held_out=other).values())
    info = optimizer.step(inputs, problem.targets, held_out=other)
    assert info.accepted
    # y'' is known to sqrt(eps) |p|^2 / |theta|^2 of the outputs, or to the next term of the series
    points = points_of(info, p, bend, corrected)
    assert min(reference.relative_error(direction, point) for point in points) < 1e-5


# -- what it promises -------------------------------------------------------------------------------------


def path_of(factor, steps, **settings):
    model, inputs, targets = wide_fit()
    search = woodbury.CurvedSearch(**settings)
    optimizer = woodbury.GaussNewton(model, ScaledLoss(nn.MSELoss(), factor), search=search)
    path = []
    for _ in range(steps):
        assert optimizer.step(inputs, targets).accepted
        path.append(reference.theta(model))
    return torch.stack(path)


def wide_fit():
    """More parameters than samples, as most networks have."""
    torch.manual_seed(0)
    inputs = torch.rand(40, 2, dtype=torch.float64)
    return problems.mlp(2, 30, 1).double(), inputs, torch.sin(3 * inputs[:, :1]) * inputs[:, 1:]


def of_other_units(path, rung, steps=1):
    """K has the same bits (`OwnScale`), e differs by eps: in (K + lambda I)^-1 U^T e, by 1 / (2 sqrt(lambda))."""
    return bounds.rounding(path.shape[1], 1 / (2 * math.sqrt(rung)), steps)


def test_a_loss_multiplied_by_a_million_takes_the_same_path():
    """Straight ahead, a step with every rung, and eight with some; by a power of two, the very same path."""
    for steps, least, chosen in ((8, 1e-12, {"rungs": (1e-3, 1e-6, 1e-9, 1e-12)}), (1, 1e-15, {})):
        first, second = (path_of(factor, steps, bend=None, **chosen) for factor in (1.0, 1e6))
        assert reference.relative_error(second, first) <= of_other_units(first, least, steps)
    assert torch.equal(*(path_of(factor, 8) for factor in (1.0, 2.0**20)))


def test_larger_targets_reach_the_same_relative_loss_in_at_most_twice_the_steps():
    counts = []
    for unit in (1.0, 1e3):
        model, inputs, targets = wide_fit()
        data = inputs, unit * targets
        fit = woodbury.fit(model, nn.MSELoss(), data, tolerance=1e-10 * unit**2, progress=False)
        assert fit.reason == "tolerance"
        counts.append(fit.steps)
    assert counts[1] <= 2 * counts[0]


def test_float32_with_a_float64_gram_matrix_takes_nearly_the_step_of_float64():
    directions, search = [], dataclasses.replace(MILD, rungs=(1e-1, 1e-2))
    for dtype in (torch.float64, torch.float32):
        problem = problems.make("softmax", dtype)
        settings = {} if dtype == torch.float64 else {"gram_dtype": torch.float64}
        optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=search, **settings)
        directions.append(reference.flat(optimizer.direction(problem.inputs, problem.targets).values()).double())
    bound = of_rung(problem, search, dtype=torch.float32)
    assert reference.relative_error(directions[1], directions[0]) <= bound


def test_at_a_minimum_or_where_held_out_samples_promise_nothing_the_step_is_rejected_and_nothing_moves():
    """On held-out samples with the opposite targets no direction of the ladder goes down."""
    model, inputs = nn.Linear(2, 1).double(), torch.randn(9, 2, dtype=torch.float64)
    change = 1.0 + inputs[:, :1] + 0.1 * torch.randn(9, 1, dtype=torch.float64)
    targets, opposite = model(inputs).detach() + change, model(inputs).detach() - change
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch())
    with unchanged(model):
        info = optimizer.step(inputs, targets, held_out=(inputs, opposite))
    assert not info.accepted and info.share == 0 and info.length == 0
    for _ in range(12):
        before = reference.theta(model)
        info = optimizer.step(inputs, targets)
    assert not info.accepted and info.length == 0 and torch.equal(reference.theta(model), before)


def test_after_steps_that_gain_nothing_one_goes_along_a_single_rung():
    problem = problems.make("squared")
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD)
    optimizer.state["search"] = {"length": 2.0**-12, "dull": 3}
    direction = reference.flat(optimizer.direction(problem.inputs, problem.targets).values())
    B = reference.curvature_matrix(reference.per_sample(*problem), "gauss-newton")
    g = reference.gradient(*problem)
    eye = torch.eye(len(g), dtype=g.dtype)
    ladder = [torch.linalg.solve(B + r * B.trace() * eye, -g) for r in MILD.rungs]
    points = [length * p for p in ladder for length in (1, 1 / 4, 1 / 16, 1 / 64)]
    bound = bounds.of_solve(B, MILD.rungs[-1] * B.trace())
    assert min(reference.relative_error(direction, point) for point in points) <= bound
    info = optimizer.step(problem.inputs, problem.targets)
    assert info.accepted and info.share == 1 and not info.bent
    assert optimizer.state["search"]["dull"] == 0 and optimizer.state["search"]["length"] == 2.0**-12


def test_targets_out_of_scale_move_one_layer_first():
    problem = problems.make("squared")
    problem.targets = 1e4 * problem.targets
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=woodbury.CurvedSearch())
    direction = optimizer.direction(problem.inputs, problem.targets)
    B = reference.curvature_matrix(reference.per_sample(*problem), "gauss-newton")
    g = reference.gradient(*problem)
    last = torch.cat([torch.full((own.numel(),), name.startswith("2.")) for name, own in direction.items()])
    block, damping, expected = B[last][:, last], 1e-6 * B.trace(), torch.zeros_like(g)
    expected[last] = torch.linalg.solve(block + damping * torch.eye(len(block), dtype=B.dtype), -g[last])
    bound = bounds.of_solve(block, damping)
    assert reference.relative_error(reference.flat(direction.values()), expected) <= bound
    optimizer.step(problem.inputs, problem.targets)
    moved = reference.flat(optimizer.direction(problem.inputs, problem.targets).values())
    assert moved[~last].abs().max() > 0  # the next step moves all layers


def test_a_hopeless_length_leaves_out_the_smallest_rung_until_a_long_one(monkeypatch):
    model, inputs, targets = wide_fit()
    monkeypatch.setattr(curved, "HOPELESS", 0.03)
    monkeypatch.setattr(curved, "DULL", 100)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch())
    dropped = 0
    for _ in range(25):
        length = optimizer.step(inputs, targets).length.item()
        if length <= 0.03:
            dropped = min(dropped + 1, 4)
        elif length >= 0.25:
            dropped = max(dropped - 1, 0)
        assert optimizer.state["search"]["dropped"] == dropped
    directions = []
    for rungs, dropped in (((1e-1, 1e-2), 0), ((1e-1, 1e-2, 1e-3, 1e-4), 2)):
        own = woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch(rungs=rungs, bend=1e-2))
        own.state["search"] = {"length": 1.0, "dull": 0, "dropped": dropped}
        directions.append(reference.flat(own.direction(inputs, targets).values()))
    bound = bounds.rounding(len(directions[0]), 1 + 1 / 1e-2)
    assert reference.relative_error(*directions) <= bound


def test_a_dropout_mask_is_the_same_at_every_trial():
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
    inputs, targets = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    check_ratio(woodbury.GaussNewton(model, nn.MSELoss(), search=woodbury.CurvedSearch()), inputs, targets)


# -- as an optimizer ---------------------------------------------------------------------------------------


def test_an_error_in_the_middle_of_the_search_changes_nothing():
    problem, calls = problems.make("residual"), 0

    def forward(model, inputs):
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise OSError("disk")
        return model(inputs)

    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD, forward=forward)
    with refused(optimizer, "disk", OSError):
        optimizer.step(problem.inputs, problem.targets)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda m, s: woodbury.GaussNewton(m, nn.MSELoss(), search=s, momentum=0.9), ValueError, "momentum"),
        (lambda m, s: woodbury.GaussNewton(m, nn.MSELoss(), search=s, solver="cg"), ValueError, "cholesky"),
        (lambda m, s: woodbury.GaussNewton(m, nn.MSELoss(), search="curved"), TypeError, "CurvedSearch"),
        (lambda m, s: woodbury.NaturalGradient(m, nn.MSELoss(), search=s), ValueError, "GaussNewton"),
        (lambda m, s: woodbury.CurvedSearch(rungs=()), ValueError, "1 to 12 dampings"),
        (lambda m, s: woodbury.CurvedSearch(rungs=1e-3), TypeError, "tuple"),
        (lambda m, s: woodbury.CurvedSearch(rungs=(1e-3, 1e-2)), ValueError, "must fall"),
        (lambda m, s: woodbury.CurvedSearch(rungs=(1e-3, 0.0)), ValueError, r"rungs\[1\] must be more than 0"),
        (lambda m, s: woodbury.CurvedSearch(bend=-1.0), ValueError, "bend must be more than 0"),
        (lambda m, s: woodbury.CurvedSearch(first=0.0), ValueError, "first must be more than 0"),
        (lambda m, s: woodbury.CurvedSearch(bend="some"), TypeError, "bend must be a number"),
        (lambda m, s: woodbury.CurvedSearch(deep=0.0), ValueError, "deep must be more than 0"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(build, error, message):
    with pytest.raises(error, match=message):
        build(nn.Linear(2, 1).double(), woodbury.CurvedSearch())


def test_held_out_needs_a_search_and_a_pair():
    problem = problems.make("squared")
    batch = problem.inputs, problem.targets
    for kind in (woodbury.GaussNewton, woodbury.NaturalGradient, woodbury.HessianFree):
        with pytest.raises(ValueError, match="held_out= needs GaussNewton"):
            kind(problem.model, problem.loss).step(*batch, held_out=batch)
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=MILD)
    with pytest.raises(TypeError, match="pair"):
        optimizer.step(*batch, held_out=problem.inputs)
    with pytest.raises(ValueError, match="targets"):
        optimizer.step(*batch, held_out=(problem.inputs, problem.targets[:3]))
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="momentum"):
        optimizer.step(*batch)
