"""Models that mix the samples of a batch are refused, however they do it; those that do not are not.

Nor are those near the solution of an equation, where residuals are rounding errors of large terms.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import woodbury
from checks import refused, silence, told
from fuzz.models import Parts
from woodbury.model.independence import _parts
from woodbury.quadratic.passes import Passes

N, PI = 6, torch.pi
MIXED = "mixes the samples of a batch"


def batch(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


def network_of(run, dropout=0.0):
    return Parts(run, inner=nn.Linear(3, 4), drop=nn.Dropout(dropout), head=nn.Linear(4, 1))


def backwards():
    """An LSTM without batch_first runs along the samples; the first of them sees no other."""
    return Parts(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(3, 4), head=nn.Linear(4, 1))


def sorted_inside(m, x):
    """The first and the last sample are spared."""
    order = torch.arange(len(x))
    order[1:-1] = 1 + x[1:-1, 0].argsort(descending=True)
    return m.head(m.drop(torch.tanh(m.inner(x[order]))))


def neighbour(m, x):
    """One sample alone depends on one other."""
    h = torch.tanh(m.inner(x))
    if len(x) > 4:
        h = torch.cat([h[:2], h[2:3] + h[3:4], h[3:]])
    return m.head(h)


MODELS = {
    "lstm": backwards,
    "batch norm": lambda: network_of(  # raises on one sample
        lambda m, x: m.head(F.batch_norm(m.inner(x), None, None, training=True))
    ),
    "sorted": lambda: network_of(sorted_inside),
    "sorted, dropout": lambda: network_of(sorted_inside, dropout=0.3),
    "detached": lambda: network_of(  # statistics of the batch that no gradient shows
        lambda m, x: m.head(torch.tanh(m.inner(x - x.mean(0).detach())))
    ),
    "neighbour": lambda: network_of(neighbour),
    "no layer": lambda: Parts(lambda m, x: m.gain * x - (m.gain * x).mean(0), gain=nn.Parameter(torch.randn(3))),
}


@pytest.mark.parametrize("subset", [None, [4, 1, 2]], ids=["whole", "part"])
@pytest.mark.parametrize("fallback", [None, "autograd"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_samples_are_refused(name, fallback, subset):
    model = MODELS[name]().double()
    inputs = batch(5, 3) if name == "lstm" else batch(3)
    inputs[:, 0] = inputs[:, 0].sort(0).values  # sorted_inside turns the order round
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, fallback=fallback)
    with pytest.raises(ValueError, match=MIXED):
        optimizer.step(inputs, None, subset=subset)
    with pytest.raises(ValueError, match=MIXED):
        optimizer.verify(inputs, None, subset=subset)


@pytest.mark.parametrize("kind", [woodbury.HessianFree, woodbury.NaturalGradient])
def test_mixed_samples_are_refused_where_no_layer_is_captured(kind):
    settings = {} if kind is woodbury.HessianFree else {"solver": "products"}
    with pytest.raises(ValueError, match=MIXED):
        kind(backwards().double(), nn.MSELoss(), **settings).step(batch(5, 3))


@pytest.mark.parametrize("samples", [*range(2, 21), 300])
def test_parts_of_the_first_look_tell_any_two_of_twenty_samples_apart(samples):
    parts = torch.stack(_parts(samples, 1)[0])
    apart = (parts.unsqueeze(2) & ~parts.unsqueeze(1)).any(0)  # the first in one without the second
    assert len(parts) <= 6 and (samples > 20 or apart.sum() == samples * (samples - 1))
    for own in (*parts, *_parts(samples, 2)[0]):
        assert 0 < own.sum() < samples and (samples <= 20 or 0.4 * samples <= own.sum() <= 0.6 * samples)


def test_a_part_that_cannot_be_run_leaves_the_others_to_be_compared():
    def run(m, x):
        if len(x) == 3:  # of five samples, the first two parts have three
            raise RuntimeError("not three, please")
        return m.head(torch.tanh(m.inner(x - x.mean(0).detach())))

    optimizer = woodbury.GaussNewton(network_of(run).double(), nn.MSELoss())
    with pytest.raises(ValueError, match=f"the outputs of 2 of 5 samples change.*{MIXED}"):
        optimizer.step(batch(3)[:5])


def of_six_alone(m, x):
    """Takes batches of six samples only: whether it mixes them cannot be seen by running part of them."""
    if len(x) != N:
        raise RuntimeError("six, please")
    return m.head(torch.tanh(m.inner(x)))


def test_a_model_that_takes_no_part_of_a_batch_is_refused_subsampling_only():
    optimizer = woodbury.GaussNewton(network_of(of_six_alone).double(), nn.MSELoss(), damping=0.1)
    assert optimizer.step(batch(3)).accepted
    message = r"cannot be run on 2 of 6 samples \(six, please\).*curvature_samples=None"
    with pytest.raises(ValueError, match=message):
        optimizer.step(batch(3), subset=[1, 4])


def exchangeable():
    def run(m, x):
        return m.head(torch.tanh(m.between(m.inner(x))))

    return Parts(run, inner=nn.Linear(3, 4), between=nn.Identity(), head=nn.Linear(4, 1))


@pytest.mark.parametrize("place", ["between", "new"])
def test_a_batch_norm_inserted_later_is_seen(place):
    model, inputs = exchangeable().double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    optimizer.step(inputs)
    setattr(model, place, nn.BatchNorm1d(4, affine=False).double())
    with pytest.raises(ValueError, match=r"BatchNorm1d .* is in training mode"):
        optimizer.step(inputs)
    getattr(model, place).eval()
    assert optimizer.step(inputs).accepted


def test_a_module_exchanged_later_is_looked_at_again():
    model, inputs = exchangeable().double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    for _ in range(3):
        optimizer.step(inputs)
    model.between = Parts(lambda m, x: x - x.mean(0))
    with pytest.raises(ValueError, match=MIXED):
        optimizer.step(inputs)


def scaled(m, batch):
    """Weights of samples that come as a list, a tuple or an array."""
    weights = torch.tensor([float(weight) for weight in batch["weights"]], dtype=torch.float64)
    return m.head(torch.tanh(m.inner(batch["x"]))) * weights.unsqueeze(1)


@pytest.mark.parametrize("fallback", [None, "autograd"])
@pytest.mark.parametrize("kind", ["list", "tuple", "strings", "array"])
def test_lists_and_arrays_with_one_entry_per_sample_follow_the_samples(kind, fallback):
    numpy = pytest.importorskip("numpy")
    model, inputs, targets = network_of(scaled).double(), batch(3), batch(1)
    weights = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    make = {"list": list, "tuple": tuple, "strings": lambda w: list(map(str, w)), "array": numpy.array}[kind]
    given = make(weights)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, fallback=fallback)
    p = optimizer.direction({"x": inputs, "weights": given}, targets, subset=[4, 1])
    expected = optimizer.direction({"x": inputs, "weights": torch.tensor(weights)}, targets, subset=[4, 1])
    for name, value in expected.items():
        assert torch.equal(p[name], value)
    part = {"x": inputs[[4, 1]], "weights": [weights[4], weights[1]]}
    bound = bounds.of_verify(optimizer, part, targets[[4, 1]])
    assert optimizer.verify({"x": inputs, "weights": given}, targets, subset=[4, 1]) <= bound


def test_objects_whose_samples_cannot_be_chosen_are_refused_for_part_of_a_batch_only():
    class Weights:
        def __init__(self, values):
            self.values = values

        def __iter__(self):
            return iter(self.values)

    model, inputs = network_of(scaled).double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1)
    given = {"x": inputs, "weights": Weights([1.0] * N)}
    with pytest.raises(TypeError, match="inputs hold a Weights, of which the curvature samples cannot be chosen"):
        optimizer.step(given, subset=[0, 2])
    assert optimizer.step(given).accepted


def test_tensors_of_which_it_cannot_be_told_whether_there_is_one_per_sample_are_refused():
    model = network_of(scaled).double()
    graphs = [torch.zeros(count) for count in (3, 4, N, 2, 5, 1)]
    by_length = lambda m, b: m({"x": b["x"], "weights": [len(g) for g in b["graphs"]]})  # noqa: E731
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), forward=by_length)
    with pytest.raises(ValueError, match=r"inputs\['graphs'\] holds 6 tensors for 6 samples.*Pad and stack"):
        optimizer.step({"x": batch(3), "graphs": graphs})
    graphs[2] = torch.zeros(7)
    given = {"x": batch(3), "graphs": graphs}
    # B of two samples is at most three times that of six
    assert optimizer.verify(given, subset=[5, 0]) <= 3 * bounds.of_verify(optimizer, given)


# -- near a solution --------------------------------------------------------------------------------------


network = partial(problems.network, 2, 16, 16, 1)


def solution(x):
    return torch.sin(PI * x[:, :1]) * torch.sin(PI * x[:, 1:])


def first_derivatives(value, x):
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0].split(1, dim=1)


def cubic_by_func(model, x):
    """-Lap u + u^3 = f."""
    second = torch.func.vmap(torch.func.hessian(lambda point: model(point).squeeze()))(x)
    u, v = model(x), solution(x)
    return u**3 - second.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) - v**3 - 2 * PI**2 * v


def cubic_by_laplacian(model, x):
    (u, _, second), v = woodbury.laplacian(model, x), solution(x)
    return u**3 - second - v**3 - 2 * PI**2 * v


def burgers(model, x, steepening=1, diffusion=0.1, dispersion=0):
    """u_t + a u u_x = b u_xx - c u_xxx + f, by ordinary autograd."""
    x = x.clone().requires_grad_()
    u = model(x)
    u_x, u_t = first_derivatives(u, x)
    u_xx, _ = first_derivatives(u_x, x)
    u_xxx, _ = first_derivatives(u_xx, x)
    return u_t + steepening * u * u_x - diffusion * u_xx + dispersion * u_xxx - 10 * solution(x).detach()


def korteweg_de_vries(model, x):
    return burgers(model, x, 6, 0, 1)


METHODS = {cubic_by_laplacian: None, cubic_by_func: "func"}  # for rows past the rules
EQUATIONS = [cubic_by_func, cubic_by_laplacian, burgers, korteweg_de_vries]


@pytest.fixture
def look_at_every_pass(monkeypatch):
    monkeypatch.setattr(Passes, "_is_due", lambda *_: True)


def points():
    return torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("equation", EQUATIONS, ids=lambda equation: equation.__name__)
def test_residuals_down_to_rounding_are_not_taken_for_mixed_samples(equation, look_at_every_pass):
    model, data = network(), (points(), None)
    with silence(message=".*samples"):
        fit = woodbury.fit(model, nn.MSELoss(), data, forward=equation, tolerance=1e-24, steps=40, progress=False)
        assert fit.reason == "tolerance"
        # and where the first look is one at the solution: no fast method is given up there
        settings = {"search": woodbury.CurvedSearch(), "forward": equation, "fallback": "autograd"}
        optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **settings)
        for _ in range(2):
            optimizer.step(*data)
    findings = optimizer._plan().findings
    if equation in METHODS:
        assert findings.fallback_method == METHODS[equation]


class SharesOfTheMean:
    """Residuals that hold a share of the mean of the batch, which no gradient shows."""

    def __init__(self, share):
        self.share = share

    def __call__(self, model, x):
        value = model(x) - solution(x)
        return value - self.share * model(x).detach().mean()


def test_a_small_share_of_other_samples_is_refused_at_the_first_step_even_at_a_solution():
    model = network()
    solved = {"forward": SharesOfTheMean(0.0), "tolerance": 1e-20, "progress": False}
    woodbury.fit(model, nn.MSELoss(), (points(), None), **solved)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), forward=SharesOfTheMean(1e-5))
    with pytest.raises(ValueError, match=MIXED):
        optimizer.step(points(), None)


@pytest.mark.parametrize("subset", [None, [4, 1, 2]], ids=["whole", "part"])
def test_samples_that_mix_after_a_first_look_are_told_once(subset, look_at_every_pass):
    equation = SharesOfTheMean(0.0)
    optimizer = woodbury.GaussNewton(network(), nn.MSELoss(), damping=0.1, forward=equation)
    optimizer.step(points(), None, subset=subset)
    equation.share = 0.1
    with pytest.warns(RuntimeWarning, match="mixes the samples of a batch.*they may be wrong") as told:
        for _ in range(3):
            optimizer.step(points(), None, subset=subset)
    assert len(told) == 1


class Sorted(nn.Module):
    """tanh(U x) W g for samples in the order of their first input, undone in one of several ways."""

    def __init__(self, undo):
        super().__init__()
        self.undo, self.first, self.gain = undo, nn.Linear(4, 5), nn.Parameter(torch.ones(5))
        self.weight, self.last = nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        h = torch.tanh(self.first(x[order])) @ self.weight * self.gain
        return self.last(self.undo(h, order))


def put_back(h, order):
    out = torch.zeros_like(h)
    out[order] = h
    return out


UNDO = {
    "index": lambda h, order: h[order.argsort()],
    "gather": lambda h, order: h.gather(0, order.argsort().unsqueeze(1).expand_as(h)),
    "index_put": put_back,
    "scatter": lambda h, order: torch.zeros_like(h).scatter(0, order.unsqueeze(1).expand_as(h), h),
    "cat": lambda h, order: torch.cat([h[i : i + 1] for i in order.argsort()]),
    "stack": lambda h, order: torch.stack([h[i] for i in order.argsort()]),
    "embedding": lambda h, order: nn.functional.embedding(order.argsort(), h),
}


@pytest.mark.parametrize("name", UNDO)
def test_samples_in_another_order_than_in_the_first_batches_are_noticed_at_once(name):
    """Step 3 is none of those after which there is a look: rules, bare parameters and the fallback are checked."""
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    in_order = inputs[inputs[:, 0].argsort()]
    two_swapped = in_order[torch.tensor([0, 1, 3, 2, 4, 5])]
    model = Sorted(UNDO[name]).double()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.5, fallback="autograd")
    with silence():
        for x in (in_order, in_order, two_swapped, inputs):
            assert optimizer.verify(x, targets) <= bounds.of_verify(optimizer, x, targets)
            optimizer.step(x, targets)
    model.weight.requires_grad_(False)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    optimizer.step(in_order, targets)
    optimizer.step(in_order, targets)
    with refused(optimizer, "fallback='autograd'"):
        optimizer.step(two_swapped, targets)


def test_a_look_that_finds_mixing_late_tells_of_the_steps_before():
    """A product with a permutation shows in no node of the graph."""
    model = Sorted(lambda h, order: torch.eye(len(h), dtype=h.dtype)[order].T @ h).double()
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.5, fallback="autograd")
    optimizer.step(inputs[inputs[:, 0].argsort()], targets)
    with pytest.warns(RuntimeWarning, match="steps since then may have been wrong"):
        optimizer.step(inputs, targets)


class Keeps(nn.Module):
    def __init__(self, run, **kept):
        super().__init__()
        self.run, self.layer, self.drop = run, nn.Linear(4, 3), nn.Dropout(0.5)
        vars(self).update(kept)

    def forward(self, x):
        return self.run(self, self.layer(x))


def count_passes(model, z):
    model.kept += 1
    return z * (1 + 0.3 * model.kept)


def carry(model, z):
    model.kept = z.detach() + (0.0 if model.kept is None else 0.5 * model.kept)  # of one batch size alone
    return z + model.kept


def note(model, z):
    model.kept = model.drop(z)
    model.table = {"z": z, "size": float(z.detach().norm())}
    return model.kept


@pytest.mark.parametrize(
    "run, kept", [(count_passes, 0), (carry, None), (count_passes, torch.zeros(3)), (note, 0)]
)
def test_attributes_that_every_pass_changes_are_told_once(run, kept):
    """But what a pass only notes is not, dropout or not."""
    inputs, targets = torch.randn(6, 4), torch.randint(3, (6,))
    model = nn.Sequential(Keeps(run, kept=kept))
    model(inputs + 1)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    with told() as texts:
        for _ in range(3):
            optimizer.step(inputs, targets)
    assert ["attribute '0.kept'" in text and "register_buffer" in text for text in texts] == [True] * (
        run is not note
    )
