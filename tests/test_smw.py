"""The sample-space step against dense solves, the paper's printed equations and proofs, another library."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from fuzz.models import Parts, drawn
from test_layers import METHODS, check_ratio
from woodbury._vector import flatten
from woodbury.layers import Layout, OuterRows
from woodbury.linalg import Solution, solve_in_sample_space
from woodbury.row_matrix import Rows

BLOCKS = ["full", "layer"]
SUBSETS = {"part": [5, 0, 2, 3], "one": [4], "all": list(range(problems.N))}

every_kind = pytest.mark.parametrize("kind", list(METHODS))


def dense(problem, subset, damping, kind, **options):
    return reference.dense_direction(*problem, subset, damping, kind, **options)


@pytest.mark.parametrize("index, name", list(enumerate(problems.PROBLEMS)))
def test_gauss_newton_equals_the_papers_equations_6_and_7(index, name):
    """With each kind of subset in turn."""
    problem, subset = problems.make(name), list(SUBSETS.values())[index % 3]
    optimizer = woodbury.GaussNewton(problem.model, problem.loss, damping=0.1)
    p = flatten(optimizer.direction(problem.inputs, problem.targets, subset=subset))
    samples = reference.per_sample(problem.model, problem.loss, problem.inputs[subset], problem.targets[subset])
    if reference.is_sum(problem.loss):  # the paper's is a mean: a sum is N1 times as much
        samples = [(J, r, problems.N * H) for J, r, H in samples]
    g = reference.gradient(*problem)
    B = reference.curvature_matrix(samples, "gauss-newton")
    bound = bounds.of_solve(B, 0.1) * float(g.norm() / (0.1 * p.norm()))  # (g - ...) / lambda cancels
    assert reference.relative_error(p, reference.equation_7(samples, g, 0.1)) <= bound
    # H is singular for softmax, and for the rate of a count that is 0: (6) does not apply
    if not isinstance(problem.loss, nn.CrossEntropyLoss | nn.NLLLoss) and name != "counts-by-rate":
        bound *= max(float(torch.linalg.cond(H)) for _, _, H in samples)
        assert reference.relative_error(p, reference.equation_6(samples, g, 0.1)) <= bound


@every_pair(
    name=["softmax", "logistic", "squared", "residual", "tokens-smoothed"],
    kind=list(METHODS),
    blocks=BLOCKS,
    subset=SUBSETS,
    solver=["cg", "products"],
    tolerance=[1e-4, 1e-12],
)
def test_conjugate_gradient_solvers_agree_to_their_tolerance(name, kind, blocks, subset, solver, tolerance):
    problem = problems.make(name)
    damping = 0.1
    options = {"damping": damping, "blocks": blocks, "weight_decay": 0.01}
    exact = METHODS[kind](problem.model, problem.loss, **options)
    iterative = METHODS[kind](problem.model, problem.loss, solver=solver, solver_tolerance=tolerance, **options)
    p = flatten(exact.direction(problem.inputs, problem.targets, subset=subset))
    q = flatten(iterative.direction(problem.inputs, problem.targets, subset=subset))
    _, B, _ = dense(problem, subset, damping, kind, blocks=blocks)
    # the condition of B + lambda says how a residual turns into an error
    bound = tolerance * bounds.condition(B, damping) + bounds.of_solve(B, damping)
    assert reference.relative_error(q, p) <= bound


@every_pair(
    kind=list(METHODS), gram_dtype=[None, torch.float64], name=["softmax", "logistic", "squared"], seed=range(3)
)
def test_small_damping_keeps_float32_accurate(kind, gram_dtype, name, seed):
    """lambda = 1e-6 lambda_max with N1 = N2, on a wider network than the tiny ones.

    The subtracted form -(g - U^T (K + lambda I)^-1 U g) / lambda loses the digits that pushing through keeps.
    """
    torch.manual_seed(seed)
    n, outputs = 40, {"softmax": 10, "logistic": 1, "squared": 3}[name]
    model = problems.mlp(50, 64, 64, outputs)
    inputs = torch.randn(n, 50)
    loss = {"softmax": nn.CrossEntropyLoss, "logistic": nn.BCEWithLogitsLoss, "squared": nn.MSELoss}[name]()
    targets = torch.randn(n, outputs) if name == "squared" else torch.randint(max(outputs, 2), (n,))
    targets = targets.float().unsqueeze(1) if name == "logistic" else targets
    U = woodbury.rows(model, loss, inputs, targets, curvature=kind).dense()
    K, g = U @ U.T, reference.gradient(model, loss, inputs, targets)
    damping = float(1e-6 * torch.linalg.eigvalsh(K.double())[-1])
    subtracted = -(g - U.T @ torch.linalg.solve(K + damping * torch.eye(len(K)), U @ g)) / damping
    single = METHODS[kind](model, loss, damping=damping, gram_dtype=gram_dtype).direction(inputs, targets)
    twin = problems.mlp(50, 64, 64, outputs).double()
    twin.load_state_dict(model.state_dict())
    wide = targets.double() if targets.is_floating_point() else targets
    double = METHODS[kind](twin, loss, damping=damping).direction(inputs.double(), wide)
    assert torch.isfinite(flatten(single)).all()
    ours = reference.relative_error(flatten(single).double(), flatten(double))
    assert ours <= (1e-2 if gram_dtype is None else 1e-4)
    assert reference.relative_error(subtracted.double(), flatten(double)) >= 10 * ours


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", [None, 30])
def test_step_solves_the_system_of_an_independent_library(kind, dtype, part):
    """(B + lambda I) p = -g with curvlinops' matrix-free operators on the paper's MNIST network."""
    curvlinops = pytest.importorskip("curvlinops")
    n, damping = 60, 1.001
    model = problems.mlp(784, 500, 10, activation=nn.Sigmoid).to(dtype)
    inputs, targets = torch.randn(n, 784, dtype=dtype), torch.randint(10, (n,))
    loss = nn.CrossEntropyLoss()
    subset = torch.randperm(n)[: part or n]
    p = flatten(METHODS[kind](model, loss, damping=damping).direction(inputs, targets, subset=subset))
    params = list(model.parameters())
    data = [(inputs[subset], targets[subset])]
    if kind == "gauss-newton":
        operator = curvlinops.GGNLinearOperator(model, loss, params, data, check_deterministic=False)
    else:
        operator = curvlinops.EFLinearOperator(model, loss, params, data, check_deterministic=False)
    g = reference.gradient(model, loss, inputs, targets)
    residual = operator @ p + damping * p + g
    bound = bounds.of_step(model, loss, *data[0], damping, size=784 + 9 * len(subset), curvature=kind)
    assert float(residual.norm() / g.norm()) <= bound


class Embedded(Parts):
    """A linear map with fixed work before and after it, and a rule."""


@woodbury.register_layer(Embedded)
def embedded_rows(layer, inputs, grads):
    layout = Layout((tuple(grads.shape[:2]),))
    return OuterRows(2 * torch.sin(inputs), grads.flatten(0, 1), layout, bias=None)


@every_kind
def test_user_layer_may_return_outer_rows_without_being_a_plain_linear_layer(kind):
    layer = Embedded(lambda m, x: 2 * torch.sin(x) @ m.weight.T, **drawn(weight=(3, 4)))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, targets = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    optimizer = METHODS[kind](model, nn.MSELoss(), damping=0.1)
    p, B, g = reference.dense_direction(model, nn.MSELoss(), inputs, targets, [0, 2], 0.1, kind)
    check_ratio(optimizer, inputs, targets, subset=[0, 2])
    torch.testing.assert_close(optimizer.last.step_norm, p.norm())
    torch.testing.assert_close(optimizer.last.predicted, -g @ p - 0.5 * p @ B @ p)


def test_small_system_gives_p_and_u_p_of_the_dense_problem():
    """U p = lambda a - e, and p = p0 + Z^T c minimises the damped model around p0."""
    n1, n2, k, size, damping = 6, 4, 3, 40, 0.07
    m = n2 * k
    Z = torch.randn(m + n1 - n2, size, dtype=torch.float64)
    e, p0 = torch.randn(m, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    U, g = Z[:m] / n2**0.5, (Z[:m].T @ e + Z[m:].sum(0)) / n1

    def solve(matrix, rhs):
        return Solution(torch.linalg.solve(matrix, rhs), True)

    gram, projected = (Z @ Z.T).unsqueeze(0), (Z[:m] @ p0).unsqueeze(0)
    found = solve_in_sample_space(gram, m, n2, n1, e, projected, damping, solve)
    c, curvature = found.coefficients, found.curvature
    p = p0 + Z.T @ c[0]
    expected = torch.linalg.solve(U.T @ U + damping * torch.eye(size).double(), damping * p0 - g)
    bound = bounds.of_solve(U.T @ U, damping)
    assert reference.relative_error(p, expected) <= bound
    a, scaled = -(n2**0.5) * c[0, :m], n2**0.5 / n1 * e
    bound *= float(scaled.norm() / (U @ p).norm())  # lambda a - e cancels
    assert reference.relative_error(damping * a - scaled, U @ p) <= bound
    assert float(curvature) == pytest.approx(float((U @ p).square().sum()), rel=2 * bound) and bool(found.ok)


@pytest.mark.parametrize("kind, columns", [("gauss-newton", 9), ("empirical", 1)])
def test_matrix_products_of_a_step_stay_within_the_papers_cost(kind, columns):
    """O(r n + r^2 sum_l m_l) with r = columns N2 rows; a Gram matrix from written-out rows takes r^2 n."""
    n, widths = 40, (60, 50, 30, 10)
    model, loss = problems.mlp(*widths), nn.CrossEntropyLoss()
    inputs, targets = torch.randn(n, widths[0]), torch.randint(10, (n,))
    optimizer = METHODS[kind](model, loss)
    with FlopCounterMode(display=False):  # which has hooks on modules: the first such step looks at the model
        optimizer.step(inputs, targets)
    with FlopCounterMode(display=False) as counter:
        optimizer.step(inputs, targets)
    size, r = sum(a * b for a, b in pairwise(widths)), columns * n
    assert counter.get_total_flops() <= 8 * (r * size + r**2 * sum(widths))


@every_pair(
    name=["softmax", "logistic-many", "squared-no-bias", "one-layer", "images"],
    method=[woodbury.GaussNewton, woodbury.NaturalGradient],
    blocks=BLOCKS,
    subset={"part": [3, 0, 5], "all": list(range(problems.N))},
    gram_dtype=[None, torch.float64],
)
def test_a_formed_step_is_the_factored_one(name, method, blocks, subset, gram_dtype, monkeypatch):
    """With p formed only the first rows of K are computed, and |p|^2 is that of p itself."""
    infos, moved, directions = [], [], []
    for pays in (False, True):
        monkeypatch.setattr(Rows, "forming_pays", lambda *args, pays=pays: pays)
        problem = problems.make(name)
        if name == "images":  # wide enough for the first layer to be known from its Gram matrix
            problem.inputs = torch.sin(torch.arange(40.0 * problems.N)).reshape(-1, 40).double()
            torch.manual_seed(0)
            problem.model = problems.mlp(40, 16, 3).double()
        optimizer = method(problem.model, problem.loss, lr=0.7, damping=0.1, blocks=blocks, gram_dtype=gram_dtype)
        directions.append(flatten(optimizer.direction(problem.inputs, problem.targets, subset=subset)))
        if not pays:
            _, B, _ = dense(problem, subset, 0.1, optimizer.curvature.name, blocks=blocks)
        infos.append(optimizer.step(problem.inputs, problem.targets, subset=subset))
        moved.append(flatten({key: p.detach() for key, p in problem.model.named_parameters()}))
    bound = bounds.of_solve(B, 0.1)
    assert infos[0].as_dict() == pytest.approx(infos[1].as_dict(), rel=bounds.of_info(infos[1], bound))
    assert reference.relative_error(*directions) <= bound and reference.relative_error(*moved) <= bound


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("middle", [nn.Identity, lambda: nn.LayerNorm(30)], ids=["chain", "norm"])
@pytest.mark.parametrize("damping", [1e2, 1e-4, 1e-8, 1e-10])
def test_the_norm_of_p_keeps_its_digits_where_rows_nearly_repeat_each_other(damping, middle, blocks):
    """From the Gram matrix |p|^2 has an error of eps lmax |c|^2, c up to |e| / lambda: p itself does not."""
    inputs, targets = torch.randn(10, 2).double(), torch.randn(10, 1).double()
    inputs[5:] = inputs[:5] + 1e-9 * torch.randn(5, 2).double()
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), middle(), nn.Linear(30, 1)).double()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=damping, blocks=blocks)
    p = flatten(optimizer.direction(inputs, targets))
    info = optimizer.step(inputs, targets)
    assert info.step_norm.item() == pytest.approx(p.norm().item(), rel=1e-3)


# -- what the paper proves, in numbers ------------------------------------------------------------------


def test_lemma_1_predicted_decrease_bounds_gradient_times_step():
    """m(0) - m(p) >= lambda |p|^2 >= c1 |g| |p| with c1 = lambda / (beta + lambda)."""
    for name in ("softmax", "squared-sum", "pictures", "tokens-ignored"):
        problem = problems.make(name)
        solve = reference.dense_system(*problem, [0, 1, 2])
        for kind, method in (("gauss-newton", woodbury.GaussNewton), ("empirical", woodbury.NaturalGradient)):
            _, B, g = solve(1.0, kind)
            beta = torch.linalg.eigvalsh(B)[-1]
            for damping in (1e-3, 0.1, 10.0):
                optimizer = method(problem.model, problem.loss, lr=0.0, damping=damping)
                info = optimizer.step(problem.inputs, problem.targets, subset=[0, 1, 2])
                slack = 1 + bounds.of_solve(B, damping)
                assert info.predicted * slack >= damping * info.step_norm**2
                assert info.predicted * slack >= damping / (beta + damping) * g.norm() * info.step_norm


@pytest.mark.parametrize(
    "method", [woodbury.GaussNewton, pytest.param(woodbury.NaturalGradient, marks=pytest.mark.slow)]
)
def test_theorem_1_semi_stochastic_variant_converges_to_a_stationary_point(method):
    """Full gradients, random S2, theta moves only if rho >= eta: f never rises and |g| falls below 1e-6.

    f is a non-convex loss plus an l2 term, which the method treats as part of f and of the model.
    """
    decay = 0.05
    inputs = torch.randn(24, 3).double()
    targets = torch.sin(inputs.sum(1, keepdim=True)) + 0.3 * torch.randn(24, 1).double()
    model, loss = problems.mlp(3, 4, 1).double(), nn.MSELoss()
    loader = [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
    settings = {"curvature_samples": 12, "accept": 0.1, "weight_decay": decay, "seed": 0}
    policy = woodbury.LevenbergMarquardt(boost=1.5, drop=0.7)
    optimizer = method(model, loss, damping=policy, **settings)

    def objective():
        theta = reference.flat(list(model.parameters())).detach()
        return (loss(model(inputs), targets) + decay / 2 * theta @ theta).item()

    def gradient_norm():
        theta = reference.flat(list(model.parameters())).detach()
        return float((reference.gradient(model, loss, inputs, targets) + decay * theta).norm())

    before, rejected, start = objective(), 0, gradient_norm()
    for step in range(4000):
        rejected += not optimizer.step(inputs, targets, full=loader).accepted
        after = objective()
        assert after <= before * (1 + bounds.rounding(len(targets)))
        before = after
        if step % 10 == 0 and gradient_norm() < 1e-6:
            break
    assert start > 0.1 and gradient_norm() < 1e-6
    assert rejected > 0  # so the threshold had an effect


def test_overparameterised_regression_reaches_machine_precision_in_twenty_steps():
    inputs = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    targets = torch.sin(3 * inputs)
    model = problems.mlp(1, 40, 40, 1).double()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1e-12)
    losses = [optimizer.step(inputs, targets).loss.item() for _ in range(20)]
    final = nn.MSELoss()(model(inputs), targets).item()
    assert losses[0] > 0.1 and final <= 1e-24
