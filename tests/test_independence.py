"""Models that mix the samples of a batch are refused, however they do it; those that do not are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import woodbury
from fuzz.models import Parts

N = 6
MIXED = "mixes the samples of a batch"


def batch(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


class Backwards(Parts):
    """An LSTM without batch_first runs along the samples; the first of them sees no other."""

    shape = (5, 3)

    def __init__(self):
        super().__init__(rnn=nn.LSTM(3, 4), head=nn.Linear(4, 1))

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Normed(Parts):
    """Raises on one sample."""

    shape = (3,)

    def __init__(self):
        super().__init__(inner=nn.Linear(3, 4), head=nn.Linear(4, 1))

    def forward(self, x):
        return self.head(F.batch_norm(self.inner(x), None, None, training=True))


class SortedInside(Parts):
    """The first and the last sample are spared."""

    shape = (3,)

    def __init__(self, dropout=0.0):
        super().__init__(inner=nn.Linear(3, 4), drop=nn.Dropout(dropout), head=nn.Linear(4, 1))

    def forward(self, x):
        order = torch.arange(len(x))
        order[1:-1] = 1 + x[1:-1, 0].argsort(descending=True)
        return self.head(self.drop(torch.tanh(self.inner(x[order]))))


class ShareOfBatch(SortedInside):
    """Statistics of the batch that no gradient shows."""

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x - x.mean(0).detach())))


class Neighbour(SortedInside):
    """One sample alone depends on one other."""

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        if len(x) > 4:
            h = torch.cat([h[:2], h[2:3] + h[3:4], h[3:]])
        return self.head(h)


MODELS = {
    "lstm": Backwards,
    "batch norm": Normed,
    "sorted": SortedInside,
    "sorted, dropout": lambda: SortedInside(0.3),
    "detached": ShareOfBatch,
    "neighbour": Neighbour,
}


@pytest.mark.parametrize("subset", [None, [4, 1, 2]], ids=["whole", "part"])
@pytest.mark.parametrize("fallback", [None, "autograd"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_samples_are_refused(name, fallback, subset):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    inputs = batch(*(Backwards if name == "lstm" else SortedInside).shape)
    inputs[:, 0] = inputs[:, 0].sort(0).values  # SortedInside turns the order round
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, fallback=fallback)
    with pytest.raises(ValueError, match=MIXED):
        optimizer.step(inputs, None, subset=subset)
    with pytest.raises(ValueError, match=MIXED):
        optimizer.verify(inputs, None, subset=subset)


@pytest.mark.parametrize("kind", [woodbury.HessianFree, woodbury.NaturalGradient])
def test_mixed_samples_are_refused_where_no_layer_is_captured(kind):
    torch.manual_seed(0)
    settings = {} if kind is woodbury.HessianFree else {"solver": "products"}
    with pytest.raises(ValueError, match=MIXED):
        kind(Backwards().double(), nn.MSELoss(), **settings).step(batch(5, 3))


class OfSixAlone(Parts):
    """Takes batches of six samples only: whether it mixes them cannot be seen by running part of them."""

    def __init__(self):
        super().__init__(inner=nn.Linear(3, 4), head=nn.Linear(4, 1))

    def forward(self, x):
        if len(x) != N:
            raise RuntimeError("six, please")
        return self.head(torch.tanh(self.inner(x)))


def test_a_model_that_takes_no_part_of_a_batch_is_refused_subsampling_only():
    torch.manual_seed(0)
    optimizer = woodbury.GaussNewton(OfSixAlone().double(), nn.MSELoss(), damping=0.1)
    assert optimizer.step(batch(3)).accepted
    with pytest.raises(
        ValueError, match=r"cannot be run on 2 of 6 samples \(six, please\).*curvature_samples=None"
    ):
        optimizer.step(batch(3), subset=[1, 4])


def exchangeable():
    def run(m, x):
        return m.head(torch.tanh(m.between(m.inner(x))))

    return Parts(run, inner=nn.Linear(3, 4), between=nn.Identity(), head=nn.Linear(4, 1))


@pytest.mark.parametrize("place", ["between", "new"])
def test_a_batch_norm_inserted_later_is_seen(place):
    torch.manual_seed(0)
    model, inputs = exchangeable().double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    optimizer.step(inputs)
    setattr(model, place, nn.BatchNorm1d(4, affine=False).double())
    with pytest.raises(ValueError, match=r"BatchNorm1d .* is in training mode"):
        optimizer.step(inputs)
    getattr(model, place).eval()
    assert optimizer.step(inputs).accepted


def test_a_module_exchanged_later_is_looked_at_again():
    torch.manual_seed(0)
    model, inputs = exchangeable().double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    for _ in range(3):
        optimizer.step(inputs)
    model.between = Parts(lambda m, x: x - x.mean(0))
    with pytest.raises(ValueError, match=MIXED):
        optimizer.step(inputs)


def _values(weights):
    return weights.tolist() if isinstance(weights, torch.Tensor) else weights


class Scaled(Parts):
    """Weights of samples that come as a list, a tuple or an array."""

    def __init__(self):
        super().__init__(inner=nn.Linear(3, 4), head=nn.Linear(4, 1))

    def forward(self, batch):
        weights = torch.tensor([float(weight) for weight in _values(batch["weights"])], dtype=torch.float64)
        return self.head(torch.tanh(self.inner(batch["x"]))) * weights.unsqueeze(1)


@pytest.mark.parametrize("fallback", [None, "autograd"])
@pytest.mark.parametrize("kind", ["list", "tuple", "strings", "array"])
def test_lists_and_arrays_with_one_entry_per_sample_follow_the_samples(kind, fallback):
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    model, inputs, targets = Scaled().double(), batch(3), batch(1)
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

    model, inputs = Scaled().double(), batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1)
    given = {"x": inputs, "weights": Weights([1.0] * N)}
    with pytest.raises(TypeError, match="inputs hold a Weights, of which the curvature samples cannot be chosen"):
        optimizer.step(given, subset=[0, 2])
    assert optimizer.step(given).accepted


def test_tensors_of_which_it_cannot_be_told_whether_there_is_one_per_sample_are_refused():
    model = Scaled().double()
    graphs = [torch.zeros(count) for count in (3, 4, N, 2, 5, 1)]
    optimizer = woodbury.GaussNewton(
        model, nn.MSELoss(), forward=lambda m, b: m({"x": b["x"], "weights": [len(g) for g in b["graphs"]]})
    )
    with pytest.raises(ValueError, match=r"inputs\['graphs'\] holds 6 tensors for 6 samples.*Pad and stack"):
        optimizer.step({"x": batch(3), "graphs": graphs})
    graphs[2] = torch.zeros(7)
    given = {"x": batch(3), "graphs": graphs}
    # B of two samples is at most three times that of six
    assert optimizer.verify(given, subset=[5, 0]) <= 3 * bounds.of_verify(optimizer, given)
