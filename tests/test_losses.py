"""The loss rules against autograd on the loss modules themselves."""

import copy

import pytest
import torch
from torch import nn

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from woodbury._vector import flatten
from woodbury.losses.rules import loss_rule
from woodbury.optimizers import OPTIMIZERS
from woodbury.products import loss_of

SECOND_ORDER = {name: kind for name, kind in OPTIMIZERS.items() if name not in ("sgd", "adam")}


def outputs_of(name, dtype=torch.float64):
    problem = problems.make(name, dtype)
    with torch.no_grad():
        outputs = problem.model(problem.inputs)
    return problem, outputs


@problems.every_problem
def test_values_residual_factor_and_products_with_it_match_the_loss_module(name):
    problem, outputs = outputs_of(name)
    rule = loss_rule(problem.loss)
    prepared = rule.prepare(problem.loss, outputs, problem.targets)
    # where the outputs are log-probabilities, those of the cross entropy: see `woodbury.losses.softmax`
    loss = problem.loss
    if isinstance(loss, nn.NLLLoss):
        loss = nn.CrossEntropyLoss(loss.weight, ignore_index=loss.ignore_index)
    # of the terms of the loss that each sample has: the loss of the batch times what it divides by
    derivatives = reference.loss_derivatives(loss, outputs, problem.targets)
    slopes, hessians = (problem.count * own for own in derivatives)
    flat = outputs.flatten(1)
    values = rule.values(problem.loss, flat, prepared)
    if not rule.is_sum(problem.loss):
        assert rule.count(problem.loss, prepared) == pytest.approx(problem.count, rel=bounds.rounding(problems.N))
    value = reference.value_of(problem.loss, outputs, problem.targets)
    torch.testing.assert_close(values.sum() / problem.count, value)
    torch.testing.assert_close(rule.total(problem.loss, flat, prepared), values.sum())
    short = rule.prepare(problem.loss, outputs.float(), problem.targets)  # as it is for float32 parameters
    rounding = bounds.rounding(flat.numel(), dtype=torch.float32)
    torch.testing.assert_close(rule.total(problem.loss, flat, short), values.sum(), rtol=rounding, atol=0)
    torch.testing.assert_close(rule.residual(problem.loss, flat, prepared), slopes)
    compact = rule.compact_factor(problem.loss, flat, prepared)
    columns, e = compact.columns(), compact.e
    assert columns.shape == (len(outputs), rule.column_count(outputs.shape), flat.shape[1])
    torch.testing.assert_close(columns.mT @ columns, hessians)  # S S^T = H
    c, y = torch.randn_like(columns[:, :, 0]), torch.randn_like(flat)
    torch.testing.assert_close(compact.matvec(c), torch.einsum("nkc,nk->nc", columns, c))
    torch.testing.assert_close(compact.rmatvec(y), torch.einsum("nkc,nc->nk", columns, y))
    rest = compact.rest
    image = (columns.mT @ e.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(image if rest is None else image + rest, slopes)  # S e = r
    assert (rest is not None) == (name == "counts-by-rate")  # where a count is 0, r is not in the range of S


def test_ignored_targets_add_nothing_wherever_their_outputs_are():
    problem, outputs = outputs_of("tokens-ignored")
    ignored = problem.targets == -100
    outputs.transpose(1, 2)[ignored] = 1e30
    rule, loss, flat = loss_rule(problem.loss), problem.loss, outputs.flatten(1)
    prepared = rule.prepare(loss, outputs, problem.targets)
    factor = rule.compact_factor(loss, flat, prepared)
    columns, e = factor.columns(), factor.e
    rows = ignored.repeat_interleave(3, dim=1)  # three columns a token
    assert columns[rows].abs().max() == 0 and e[rows].abs().max() == 0
    residual = rule.residual(loss, flat, prepared).unflatten(1, outputs.shape[1:])
    assert residual.transpose(1, 2)[ignored].abs().max() == 0
    mean = rule.values(loss, flat, prepared).sum() / problem.count
    torch.testing.assert_close(mean, loss(outputs, problem.targets))


@every_pair(dtype=[torch.float32, torch.float64], size=[30.0, 200.0, 1e4])
def test_saturated_outputs_stay_finite_and_keep_the_residual(dtype, size):
    softmax = torch.tensor([[size, 0, -size], [0, size, 0], [-size, 0, 0]], dtype=dtype)
    labels = torch.tensor([2, 1, 0])
    logistic = torch.tensor([[size], [-size], [size]], dtype=dtype)
    for loss, outputs, targets in (
        (nn.CrossEntropyLoss(), softmax, labels),
        (nn.BCEWithLogitsLoss(), logistic, torch.tensor([[0.0], [0.0], [1.0]], dtype=dtype)),
    ):
        rule = loss_rule(loss)
        factor = rule.compact_factor(loss, outputs, targets)
        columns, e = factor.columns(), factor.e
        assert torch.isfinite(columns).all() and torch.isfinite(e).all()
        residual = rule.residual(loss, outputs, targets)
        image = (columns.mT @ e.unsqueeze(2)).squeeze(2)
        assert (image - residual).abs().max() <= bounds.rounding(3, dtype=dtype)  # of sums of numbers up to 1


def smoothed(value):
    """A loss that torch itself would not make."""
    loss = nn.CrossEntropyLoss()
    loss.label_smoothing = value
    return loss


@pytest.mark.parametrize(
    "loss, option",
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1.0, 1.0])), "weight"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, float("nan"), 1.0])), "weight"),
        (nn.NLLLoss(weight=torch.tensor([1.0, float("inf"), 1.0])), "weight"),
        (nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, -1.0, 1.0])), "weight"),
        *((kind(reduction="none"), "reduction.*'mean' or 'sum'") for kind in (nn.MSELoss, nn.CrossEntropyLoss)),
        *((kind(reduction="none"), "reduction.*'mean' or 'sum'") for kind in (nn.L1Loss, nn.BCEWithLogitsLoss)),
        (nn.HuberLoss(delta=0.0), "delta"),
        (nn.SmoothL1Loss(beta=-1.0), "beta"),
        (nn.SmoothL1Loss(beta=float("nan")), "beta"),
        *((smoothed(value), r"label_smoothing must lie in \[0, 1\]") for value in (1.5, -0.1, float("nan"))),
        *(
            (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([value, 1.0])), "pos_weight")
            for value in (-1.0, float("nan"), float("inf"))
        ),
        (nn.SoftMarginLoss(), r"SoftMarginLoss.*register_loss"),  # a way out
    ],
)
def test_unsupported_losses_and_options_are_refused_by_name(loss, option):
    with pytest.raises(TypeError if isinstance(loss, nn.SoftMarginLoss) else ValueError, match=option):
        woodbury.GaussNewton(nn.Linear(2, 3), loss)


CROSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    "loss, outputs, targets, message",
    [
        (nn.CrossEntropyLoss(), (4, 3), torch.tensor([0, 1, 2, 3]), "0..2, got 3"),
        (nn.CrossEntropyLoss(), (4, 3), torch.tensor([0, -1, 2, -100]), "got -1$"),
        (nn.CrossEntropyLoss(ignore_index=3), (4, 3), torch.tensor([0, 3, 2, 4]), "0..2, got 4"),
        (nn.CrossEntropyLoss(ignore_index=0), (4, 3), torch.tensor([0, -100, 2, 0]), "got -100"),
        (nn.CrossEntropyLoss(), (4, 3), torch.zeros(4, 1, dtype=torch.long), r"targets\.squeeze\(1\)$"),
        (nn.CrossEntropyLoss(), (4, 3), torch.ones(4), r"float32 are.*\(4, 3\), got \(4,\); .*targets\.long\(\)$"),
        (nn.CrossEntropyLoss(), (4, 3), torch.ones(4, 1), r"got \(4, 1\); .*targets\.squeeze\(1\)\.long\(\)$"),
        (CROSS, (4, 3), torch.ones(4, 3).int(), r"int32 of.*\(4, 3\): .*float32\), .*argmax\(1\)$"),
        (nn.CrossEntropyLoss(), (4, 3), torch.full((4, 3), -0.5), "not be negative"),
        (nn.CrossEntropyLoss(), (4, 1), torch.zeros(4).long(), "BCEWithLogitsLoss"),
        (nn.CrossEntropyLoss(), (4, 3), None, "needs targets"),
        (CROSS, (4, 3, 2), torch.zeros(4).long(), r"shape \(4, 2\), got torch.int64 of shape \(4,\)$"),
        (nn.CrossEntropyLoss(), (4,), torch.zeros(4).long(), r"outputs \(n, C\)"),
        (nn.CrossEntropyLoss(), (4, 5, 3), torch.zeros(4, 5).long(), r"\(n, C, T\).*\.transpose\(1, 2\)"),
        (nn.CrossEntropyLoss(), (4, 1, 3), torch.zeros(4, 1).long(), r"\.transpose\(1, 2\)"),
        (nn.CrossEntropyLoss(), (4, 5, 6, 3), torch.zeros(4, 5, 6).long(), r"\.movedim\(-1, 1\)"),
        (nn.CrossEntropyLoss(), (4, 3, 5), torch.zeros(4, 3, 4), "shape of the outputs"),
        (nn.MSELoss(), (4, 3), torch.ones(4), "do not fit"),
        (nn.MSELoss(), (4, 1), torch.ones(4), r"do not fit.*equal, as by targets\.reshape\(-1, 1\)"),
        (nn.MSELoss(), (4, 2, 3), torch.ones(4, 3, 2), "do not fit"),
        (nn.BCEWithLogitsLoss(), (4, 1), 2 * torch.ones(4, 1), "between 0 and 1, got 2 to 2$"),
        (
            nn.BCEWithLogitsLoss(),
            (4, 3),
            torch.ones(4).long(),
            "equal. For class indices use CrossEntropyLoss, or a rule of your own that defines prepare$",
        ),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), (4, 3), torch.zeros(4).long(), r"weight.*\(4,\).*3 classes"),
        (nn.NLLLoss(), (4, 3), torch.zeros(4).long(), "logsumexp.*LogSoftmax.*CrossEntropyLoss"),
        (nn.NLLLoss(), (4, 3), torch.full((4, 3), 0.5), "class indices"),
        (nn.NLLLoss(), (4, 3), None, "needs targets"),
        (nn.NLLLoss(), (4, 5, 3), torch.zeros(4, 5).long(), r"NLLLoss takes outputs.*\.transpose\(1, 2\)"),
        (nn.PoissonNLLLoss(), (4, 1), -torch.ones(4, 1), "counts"),
        (nn.GaussianNLLLoss(), (4, 1), torch.ones(4, 1), r"torch.stack\(\[target, var\], dim=1\).*\(4, 2, 1\)"),
        (nn.GaussianNLLLoss(), (4, 1), None, "torch.stack"),
        (nn.GaussianNLLLoss(), (4, 1), -torch.ones(4, 2, 1), "must not be negative"),
        (nn.HuberLoss(), (4, 1), torch.ones(4), "do not fit"),
    ],
)
def test_wrong_targets_are_refused(loss, outputs, targets, message):
    with pytest.raises(ValueError, match=message):
        loss_rule(loss).prepare(loss, torch.zeros(outputs), targets)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_class_weights_may_have_another_type_than_the_model(kind):
    x, t, weight = torch.randn(9, 2).double(), torch.arange(9) % 3, torch.tensor([0.5, 1.0, 2.0])

    def fit(weight):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(1)).double()
        return woodbury.fit(model, kind(weight=weight), (x, t), steps=2).loss

    assert fit(weight) == fit(weight.double())


@pytest.mark.parametrize(
    "loss", [nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.CrossEntropyLoss(), nn.NLLLoss()], ids=str
)
def test_whole_numbers_of_any_type_count_as_those_that_torch_takes(loss):
    has_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    inputs, targets = torch.randn(8, 2), torch.arange(8) % 2
    targets = targets if has_classes else targets.unsqueeze(1)
    found = []
    for kind in (torch.int64 if has_classes else torch.float32, torch.bool, torch.uint8, torch.int32, torch.int64):
        own = targets.to(kind)
        torch.manual_seed(0)
        end = nn.LogSoftmax(1) if isinstance(loss, nn.NLLLoss) else nn.Identity()
        model, data = nn.Sequential(nn.Linear(2, 1 + has_classes), end), (inputs, own)
        first = OPTIMIZERS["sgd"](model, loss, lr=0.1).step(*data)
        verified = woodbury.GaussNewton(model, loss).verify(*data)
        whole = woodbury.fit(model, loss, data, steps=2, progress=False)
        parts = woodbury.fit(model, loss, [data], epochs=1, validation=data, progress=False)
        found.append([float(first.loss), float(verified), whole.loss, parts.loss, parts.validation])
        assert found[-1] == found[0], kind


def test_masks_and_places_in_the_shape_of_the_outputs_reach_a_loss_of_the_users_as_they_are():
    class Seen(nn.Module):
        def forward(self, outputs, targets):
            return targets

    for targets in (torch.ones(4) > 0, torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 2) > 0):
        assert loss_of(Seen(), torch.zeros(4, 2), targets) is targets


def test_softmax_columns_are_the_householder_reflection_of_the_symmetric_factor():
    """S Q without column j, Q the reflection that maps sqrt(p) to -e_j; e is Q (r / sqrt(p))."""
    loss, outputs = nn.CrossEntropyLoss(), 3 * torch.randn(7, 4, dtype=torch.float64)
    targets = torch.randint(4, (7,))
    rule = loss_rule(loss)
    factor = rule.compact_factor(loss, outputs, targets)
    columns, e = factor.columns(), factor.e
    assert columns.shape == (7, 3, 4)  # one column less than classes
    residual = rule.residual(loss, outputs, targets)
    for i, p in enumerate(outputs.softmax(1)):
        root, j = p.sqrt(), int(p.argmax())
        S = torch.diag(root) - torch.outer(p, root)
        w = root + torch.eye(4).double()[j]
        Q = torch.eye(4).double() - 2 * torch.outer(w, w) / (w @ w)
        others = [c for c in range(4) if c != j]
        torch.testing.assert_close((S @ Q)[:, j], torch.zeros(4).double())
        torch.testing.assert_close(columns[i], (S @ Q)[:, others].T)
        torch.testing.assert_close(e[i], (Q @ (residual[i] / root))[others])


def test_a_target_of_zero_mass_adds_nothing():
    loss, outputs = nn.CrossEntropyLoss(), torch.randn(4, 3).double()
    targets = torch.rand(4, 3).double()
    targets[2] = 0
    factor = loss_rule(loss).compact_factor(loss, outputs, targets)
    columns, e = factor.columns(), factor.e
    assert torch.isfinite(e).all() and columns[2].abs().max() == 0 and e[2].abs().max() == 0


@every_pair(
    kind=["smw-gn", "smw-ng", "smw-ng-bd"],
    tokens=[False, True],
    options=[{}, {"weight": [0.5, 2.0, 3.0], "ignore_index": 1}, {"reduction": "sum"}],
)
def test_a_step_of_log_softmax_and_nll_is_that_of_logits_and_cross_entropy(kind, tokens, options):
    """J_y^T H J_y = J_z^T H J_z and J_y^T r = J_z^T r for y = log_softmax(z)."""
    options = {**options, "weight": torch.tensor(options["weight"]).double()} if "weight" in options else options
    name = "tokens-smoothed" if tokens else "softmax-smoothed"
    problem = problems.make(name)
    p, verified = [], []
    for model, loss in (
        (problem.model, nn.CrossEntropyLoss(**options)),
        (nn.Sequential(problem.model, nn.LogSoftmax(1)), nn.NLLLoss(**options)),
    ):
        optimizer = OPTIMIZERS[kind](model, loss, damping=0.01, curvature_samples=0.7, seed=0)
        p.append(flatten(optimizer.direction(problem.inputs, problem.targets)))
        verified.append(float(optimizer.verify(problem.inputs, problem.targets)))
    bound = bounds.of_verify(optimizer, problem.inputs, problem.targets)
    assert reference.relative_error(p[1], p[0]) <= bound and max(verified) <= bound


ROBUST = [nn.HuberLoss(delta=0.7), nn.SmoothL1Loss(beta=0.4), nn.SmoothL1Loss(beta=0.0), nn.L1Loss()]


@pytest.mark.parametrize("loss", ROBUST)
def test_the_curvature_of_a_robust_loss_is_a_parabola_that_touches_it_and_lies_nowhere_below(loss):
    """q(x) = rho(d) + w (x^2 - d^2) / 2."""
    rule, t = loss_rule(loss), torch.zeros(1, 1).double()
    x = torch.linspace(-4, 4, 801, dtype=torch.float64).unsqueeze(1)

    def rho(y):
        return rule.values(loss, y, t.expand_as(y))

    for d in (-2.5, -0.5, 1e-6, 0.3, 0.7, 3.0):
        y = torch.full((1, 1), d, dtype=torch.float64)
        w = rule.compact_factor(loss, y, t).columns().square().squeeze()
        torch.testing.assert_close(w, rule.residual(loss, y, t).squeeze() / d)
        parabola = rho(y) + 0.5 * w * (x.square() - d**2).squeeze(1)
        rounding = 8 * torch.finfo(w.dtype).eps * (rho(y) + 0.5 * w * (x.square() + d**2).squeeze(1))
        assert (rho(x) <= parabola + rounding).all()
        slope = torch.autograd.functional.jacobian(lambda y: rho(y).sum(), y)
        torch.testing.assert_close(rule.residual(loss, y, t), slope)


@every_pair(dtype=[torch.float32, torch.float64], loss=ROBUST)
def test_an_output_that_meets_its_target_has_a_finite_curvature_and_no_residual(loss, dtype):
    t = torch.tensor([[0.0, 2.0]], dtype=dtype)
    factor = loss_rule(loss).compact_factor(loss, t.clone(), t)
    assert torch.isfinite(factor.columns()).all() and factor.e.abs().max() == 0
    if getattr(loss, "beta", 0.0) == 0.0 and not isinstance(loss, nn.HuberLoss):
        floor = 1e-4 * t + torch.finfo(dtype).eps
        torch.testing.assert_close(factor.columns().square().sum(1), 0.5 / floor)


@every_pair(kind=list(SECOND_ORDER), name=["squared", "softmax", "gaussian"])
def test_a_sum_is_the_mean_times_what_that_divides_by(kind, name):
    """f_sum = N C f and g_sum = N C g; B_sum = N C B, or N C^2 B for the empirical Fisher."""
    problem = problems.make(name)
    mean, total = problem.loss, copy.deepcopy(problem.loss)
    total.reduction = "sum"
    classes = isinstance(mean, nn.CrossEntropyLoss | nn.NLLLoss)
    C = 1 if classes else problem.model(problem.inputs).shape[1]
    power, steps = 2 if kind.startswith("smw-ng") else 1, []
    for loss, damping in ((mean, 0.03), (total, 0.03 * problems.N * C**power)):
        tight = {"progress": 1e-14, "max_iterations": 1000} if kind == "hf" else {}
        settings = {"damping": damping, "curvature_samples": 0.6, "seed": 0, **tight}
        optimizer = SECOND_ORDER[kind](problem.model, loss, **settings)
        steps.append(flatten(optimizer.direction(problem.inputs, problem.targets)))
    bound = bounds.of_verify(optimizer, problem.inputs, problem.targets) + (1e-5 if kind == "hf" else 0)
    assert reference.relative_error(C ** (power - 1) * steps[1], steps[0]) <= bound


def test_a_sum_of_ignored_targets_is_zero_and_moves_nothing():
    problem = problems.make("softmax")
    loss = nn.CrossEntropyLoss(reduction="sum")
    p = woodbury.GaussNewton(problem.model, loss).direction(problem.inputs, torch.full((problems.N,), -100))
    assert max(float(own.abs().max()) for own in p.values()) == 0


def test_a_mean_over_classes_of_weight_zero_is_refused():
    problem = problems.make("softmax")
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0, 1.0]).double())
    optimizer = woodbury.GaussNewton(problem.model, loss)
    with pytest.raises(ValueError, match="a class of weight 0"):
        optimizer.step(problem.inputs, torch.zeros(problems.N).long())


def test_variances_beside_the_targets_reach_every_door():
    problem = problems.make("gaussian")
    target, variance = problem.targets.unbind(1)
    first = OPTIMIZERS["adam"](copy.deepcopy(problem.model), problem.loss).step(problem.inputs, problem.targets)
    before = problem.loss(problem.model(problem.inputs), target, variance).detach()
    torch.testing.assert_close(first.loss, before)  # as of the second-order methods: `test_optim_contract.py`
    fit = woodbury.fit(problem.model, problem.loss, (problem.inputs, problem.targets), steps=5, progress=False)
    after = problem.loss(problem.model(problem.inputs), target, variance).item()
    assert fit.loss == pytest.approx(after, rel=bounds.rounding(target.numel())) and after < before
