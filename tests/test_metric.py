"""Steps with the curvature of earlier batches (memory=) and in another metric than the identity (metric=)."""

import copy
import math

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from cases import every_pair
from fuzz.models import Parts
from test_layers import METHODS
from woodbury._vector import Space
from woodbury.layers import OuterRows
from woodbury.quadratic.metric import FORGETTING, METRICS, POWER, SMALLEST
from woodbury.row_matrix import rows


def chain():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), lambda n: torch.randn(n, 5)


def images():
    layers = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers), lambda n: torch.randn(n, 2, 3, 3)


def sequences():
    """Embeddings, a Linear layer over places and a normalisation."""

    def run(m, x):
        return m.head(m.norm(torch.tanh(m.mix(m.table(x)))).mean(1))

    layers = {"table": nn.Embedding(6, 4, padding_idx=0), "mix": nn.Linear(4, 5), "norm": nn.LayerNorm(5)}
    return Parts(run, **layers, head=nn.Linear(5, 3)), lambda n: torch.randint(6, (n, 4))


def residual():
    """Linear layers that are no chain."""

    def run(m, x):
        hidden = x + torch.tanh(m.first(x))
        return m.head(hidden + torch.tanh(m.second(hidden)))

    return Parts(run, first=nn.Linear(5, 5), second=nn.Linear(5, 5), head=nn.Linear(5, 3)), chain()[1]


MODELS = {"chain": chain, "images": images, "sequences": sequences, "residual": residual}


def problem(kind, count=4, samples=7):
    """A float64 model and batches of three classes."""
    torch.manual_seed(3)
    model, draw = MODELS[kind]()
    batches = []
    for _ in range(count):
        inputs = draw(samples)
        batches.append((inputs.double() if inputs.is_floating_point() else inputs, torch.randint(3, (samples,))))
    return model.double(), batches


def split(model, vector):
    sizes = [p.numel() for p in model.parameters()]
    return [part.view_as(p) for part, p in zip(vector.split(sizes), model.parameters(), strict=True)]


def adams_metric(model, gradients):
    """D of the docstring of `woodbury.quadratic.metric`, from all gradients so far, written out."""
    moments = []
    for step, gradient in enumerate(gradients):
        share = max(1 - FORGETTING, 1 / (step + 1))
        squares = [own**2 for own in split(model, gradient)]
        new = [(s.flatten(1).mean(1), s.flatten(1).mean(0)) if s.dim() > 1 else (s,) for s in squares]
        if moments:
            pairs = [zip(a, b, strict=True) for a, b in zip(moments, new, strict=True)]
            new = [tuple((1 - share) * a + share * b for a, b in pair) for pair in pairs]
        moments = new
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    mean = sum(size * own[0].mean() for size, own in zip(sizes, moments, strict=True)) / sum(sizes)
    rows_of, result = {}, []
    for name, parameter, own in zip(names, model.parameters(), moments, strict=True):
        module = name.rpartition(".")[0]
        if len(own) == 2:
            rows_of[module] = (own[0] / mean + SMALLEST) ** POWER
            result.append(torch.outer(rows_of[module], (own[1] / own[0].mean() + SMALLEST) ** POWER))
        elif module in rows_of:  # a bias has the units of its outputs
            result.append(rows_of[module])
        else:
            result.append((own[0] / mean + SMALLEST) ** POWER)
        assert result[-1].numel() == parameter.numel()
    return reference.flat(result)


@every_pair(
    curvature=list(METHODS),
    kind=list(MODELS),
    change=[(None, 2), ("adam", 0), ("adam", 2), ("diagonal", 0), ("diagonal", 2)],
    curvature_samples=[None, 4],
    blocks=["full", "layer"],
    momentum=[0.5, 0.0],
)
def test_steps_solve_the_dense_system_of_all_kept_batches_in_their_metric(
    curvature, kind, change, curvature_samples, blocks, momentum
):
    """(B + lambda D) p = lambda D mu p_prev - g, B the mean over the last batches, each at its own theta.

    And rho is that of the loss at theta + p.
    """
    metric, memory = change
    model, batches = problem(kind)
    loss = nn.CrossEntropyLoss()
    mask = reference.block_mask(reference.parameters(model)) if blocks == "layer" else 1.0
    optimizer = METHODS[curvature](
        *(model, loss, 0.5),
        momentum=momentum,
        damping=woodbury.LevenbergMarquardt(initial=0.05, relative=True, boost=1.0, drop=1.0, forgetting=0.0),
        guard=None,
        memory=memory,
        metric=metric,
        blocks=blocks,
    )
    gradients, matrices, previous = [], [], 0.0
    for inputs, targets in batches:
        subset = torch.randperm(len(targets))[: curvature_samples or len(targets)]
        picked = reference.per_sample(model, loss, reference.chosen(inputs, subset), targets[subset])
        matrices.append(reference.curvature_matrix(picked, curvature))
        gradients.append(reference.gradient(model, loss, inputs, targets))
        B = torch.stack(matrices[-1 - memory :]).mean(0) * mask
        if metric is None:
            D = torch.ones(len(B), dtype=B.dtype)
        else:
            largest = torch.stack([own.diagonal() for own in matrices]).max(0).values
            D = adams_metric(model, gradients) if metric == "adam" else torch.where(largest > 0, largest, 1.0)
        scaled = B / D.sqrt() / D.sqrt().unsqueeze(1)  # the system in units of D
        damping = (0.05 + 1e-3) * scaled.trace()
        p = torch.linalg.solve(B + damping * D.diag(), damping * D * momentum * previous - gradients[-1])
        chosen = None if curvature_samples is None else subset
        found = reference.flat(optimizer.direction(inputs, targets, subset=chosen).values())
        bound, s = bounds.of_solve(scaled, damping, len(gradients)), D.rsqrt()
        assert reference.relative_error(found / s, p / s) <= bound
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for own, part in zip(moved.parameters(), split(model, p), strict=True):
                own += part
            decrease = loss(model(inputs), targets) - loss(moved(inputs), targets)
        info = optimizer.step(inputs, targets, subset=chosen)
        assert abs(info.step_norm - p.norm()) <= bound * s.max() * (p / s).norm()
        promised = -(gradients[-1] @ p) - 0.5 * p @ B @ p
        assert abs(info.predicted - promised) <= bound * ((s * gradients[-1]).norm() * (p / s).norm() + p @ B @ p)
        assert math.isclose(info.damping, damping, rel_tol=bounds.rounding(len(B), steps=len(gradients)))
        if promised > 0:
            of_ratio = bound * ((s * gradients[-1]).norm() * (p / s).norm() + p @ B @ p) / promised
            of_ratio += bounds.of_decrease(info.loss, decrease, len(p))
            assert math.isclose(info.ratio, decrease / promised, rel_tol=of_ratio)
        previous = p if info.accepted else 0.0


@every_pair(metric=list(METRICS), kind=list(MODELS))
def test_verify_knows_the_metric_and_rows_in_units_of_adams_stay_outer_products(kind, metric):
    model, batches = problem(kind)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), momentum=0.5, memory=2, metric=metric)
    for batch in batches:
        optimizer.step(*batch)
    matrix = rows(model, nn.CrossEntropyLoss(), *batches[0])
    scaled, damping, residual = matrix.dense(), optimizer.current_damping, optimizer.verify(*batches[0])
    optimizer.step(*batches[0])  # leaves the metric that verify had
    moments = optimizer.state["metric"]["moments"]
    units = METRICS[metric].units(Space.of(moments).pack(moments), matrix.plan)
    s = reference.flat(units.vector.values())
    assert residual <= bounds.of_solve((scaled * s).T @ (scaled * s), damping) * s.max() / s.min()
    forms = units.of_rows(matrix.forms)
    found = type(matrix)(matrix.plan, forms, matrix.row_count).dense()
    assert reference.relative_error(found, scaled * s) <= bounds.rounding(1)
    linear = [name for name, form in matrix.forms.items() if type(form) is OuterRows]
    assert metric != "adam" or all(type(forms[name]) is OuterRows for name in linear)


def make_curve(unit):
    """b exp(-a x) + c with a in other units."""
    values = nn.Parameter(torch.tensor([0.5 * unit, 1.0, 0.0], dtype=torch.float64))
    return Parts(lambda m, x: m.values[1] * torch.exp(-m.values[0] / unit * x) + m.values[2], values=values)


POLICIES = {
    "damping": {
        "damping": woodbury.LevenbergMarquardt(initial=1.0, boost=3.0, drop=0.3, floor=1e-9, relative=True),
        "accept": 0.0,
    },
    "search": {"search": woodbury.CurvedSearch()},  # lengths are powers of two: the same ones
}


@pytest.mark.parametrize("policy, steps, lowest", [("damping", 12, 1e-3), ("search", 6, 1e-8)])
def test_steps_in_the_metric_of_the_diagonal_do_not_change_with_the_unit_of_a_parameter(policy, steps, lowest):
    x = torch.linspace(0, 2, 30, dtype=torch.float64).unsqueeze(1)
    y, losses = 2 * torch.exp(-1.3 * x) + 0.3, []
    for unit in (1.0, 1e4):
        settings = {"metric": "diagonal", "fallback": "autograd", **POLICIES[policy]}
        optimizer = woodbury.GaussNewton(make_curve(unit), nn.MSELoss(), **settings)
        losses.append([float(optimizer.step(x, y).loss) for _ in range(steps)])
    U = rows(make_curve(1.0), nn.MSELoss(), x, y, fallback="autograd").dense()
    U = U / U.norm(dim=0)
    condition = bounds.condition(U.T @ U, torch.linalg.svdvals(U)[-1] ** 2)
    bound = bounds.rounding(len(x), condition, steps)  # of the outputs: of the root of a loss beside the first's
    if policy == "search":  # the bend has half of its digits
        bound += steps * torch.finfo(torch.float64).eps ** 0.5
    for first, second in zip(*losses, strict=True):
        assert abs(first - second) <= bound * math.sqrt(second * losses[0][0])
    assert losses[0][-1] < lowest * losses[0][0]


def test_rows_of_a_large_shared_layer_are_not_saved():
    """A state without them is loaded as well, and the memory fills anew."""
    model = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Flatten(), nn.Linear(260, 1))
    batch = torch.randn(6, 2, 130), torch.randn(6, 1)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), memory=2)
    for _ in range(3):
        optimizer.step(*batch)
    assert len(optimizer.state["kept"].batches) == 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["kept"] == {} and optimizer.step(*batch).accepted
    assert len(optimizer.state["kept"].batches) == 1


def test_rows_of_another_model_are_forgotten():
    model, batches = problem("chain")
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), memory=2)
    for batch in batches[:2]:
        optimizer.step(*batch)
    model[0].weight.requires_grad_(False)
    assert optimizer.step(*batches[2]).accepted and len(optimizer.state["kept"].batches) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 1, "solver": "cg"}, "memory=1 needs solver='cholesky'"),
        ({"metric": "adam", "solver": "products"}, "metric='adam' needs solver='cholesky'"),
        ({"metric": "adam", "search": woodbury.CurvedSearch()}, "search= and metric='adam' do not go together"),
        ({"memory": 1, "search": woodbury.CurvedSearch()}, "search= and memory=1 do not go together"),
        ({"metric": "adam", "weight_decay": 0.1}, "metric='adam' and weight_decay do not go together"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer = woodbury.GaussNewton(nn.Linear(2, 1), nn.MSELoss(), **settings)
        optimizer.step(torch.randn(4, 2), torch.randn(4, 1))


@pytest.mark.parametrize("settings", [{}, {"memory": 2, "metric": "adam"}], ids=str)
def test_a_parameter_without_entries_changes_no_step(settings):
    model, batches = problem("chain")
    wider = Parts(lambda m, x: m.inner(x) + m.nothing.sum(), inner=copy.deepcopy(model))
    wider.nothing, loss = nn.Parameter(torch.zeros(0, 5, dtype=torch.float64)), nn.CrossEntropyLoss()
    for own in (model, wider):
        settings = {"damping": 1.0, "momentum": 0.9, "fallback": "autograd"} | settings
        optimizer = woodbury.GaussNewton(own, loss, **settings)
        for batch in batches:
            optimizer.step(*batch)
        for name, part in optimizer.state["momentum"].items():
            assert part.shape == own.get_parameter(name).shape
    bound = bounds.of_step(model, loss, *batches[0], 1.0, len(batches))
    found, expected = [reference.flat(own.parameters()).detach() for own in (wider, model)]
    assert reference.relative_error(found, expected) <= bound
