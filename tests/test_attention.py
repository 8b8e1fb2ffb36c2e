"""torch's attention: its fast path in eval mode, and what others see of torch while a step watches it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import reference
import woodbury
from fuzz.models import Parts
from test_layers import CLASSES, LOSS, METHODS, check_directions, check_ratio, check_rows, shaken
from woodbury._vector import flatten

N, LENGTH, WORDS = 6, 4, 7


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4))


def encoding(first, hide):
    """Positions, of which the encoder gets some as hidden: what it gives there reaches the outputs."""

    def run(m, x):
        positions = m.first(x).reshape(len(x), LENGTH, 4)
        return m.head(m.encode(positions, src_key_padding_mask=hide(x)).flatten(1))

    model = Parts(run, first=first, encode=encoder(), head=nn.Linear(4 * LENGTH, CLASSES))
    return shaken(model.double()).eval()


def spread():
    """A Linear layer on one vector per sample in front of the encoder."""
    return encoding(
        nn.Linear(6, 4 * LENGTH),
        lambda x: torch.arange(LENGTH) >= 1 + (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long(),
    )


def padded():
    """Sentences with padding at their end."""
    model = encoding(nn.Embedding(WORDS, 4), lambda x: x == 0)
    x = torch.randint(1, WORDS, (N, LENGTH))
    for sample, length in enumerate(torch.randint(1, LENGTH + 1, (N,)).tolist()):
        x[sample, length:] = 0
    x[0, -1] = 1  # one has full length
    return model, x, torch.randint(CLASSES, (N,))


OPTIMIZERS = {
    "gauss-newton": lambda model: woodbury.GaussNewton(model, LOSS, damping=0.5),
    "subset": lambda model: woodbury.GaussNewton(model, LOSS, damping=0.5, curvature_samples=3),
    "natural gradient": lambda model: woodbury.NaturalGradient(model, LOSS, damping=0.5, blocks="layer"),
    "products": lambda model: woodbury.GaussNewton(model, LOSS, damping=0.5, solver="products"),
    "fallback": lambda model: woodbury.GaussNewton(model, LOSS, damping=0.5, fallback="autograd"),
    "hessian-free": lambda model: woodbury.HessianFree(model, LOSS, damping=0.5),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_trial_pass_of_an_encoder_in_eval_mode_is_that_of_the_step(name):
    model, inputs, targets = padded()
    with torch.no_grad():
        fast = model(inputs)
    assert not torch.allclose(fast, model(inputs))  # else there is nothing to test
    optimizer = OPTIMIZERS[name](model)
    loader = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    for full in (None, None, loader):
        check_ratio(optimizer, inputs, targets, full=full)


@pytest.mark.parametrize("frozen, curvature_samples", [(False, None), (True, 3)])
def test_a_frozen_encoder_takes_the_same_path_in_both_passes(frozen, curvature_samples):
    model = spread()
    model.encode.requires_grad_(not frozen)
    inputs, targets = torch.randn(N, 6, dtype=torch.float64), torch.randint(CLASSES, (N,))
    check_directions(model, LOSS, inputs, targets, [1, 3])
    for method in METHODS.values():
        optimizer = method(model, LOSS, damping=0.5, curvature_samples=curvature_samples)
        for _ in range(2):
            check_ratio(optimizer, inputs, targets)


def test_rows_and_directions_of_an_encoder_with_padding():
    model, inputs, targets = padded()
    check_rows(model, LOSS, inputs, targets)
    check_directions(model, LOSS, inputs, targets, [1, 3])
    for kind, method in METHODS.items():
        expected, B, _ = reference.dense_direction(model, LOSS, inputs, targets, [1, 3], 0.5, kind)
        with torch.no_grad():  # a caller's mode changes nothing
            p = method(model, LOSS, damping=0.5).direction(inputs, targets, subset=[1, 3])
        assert reference.relative_error(flatten(p), expected) <= bounds.of_solve(B, 0.5)


def test_no_function_of_torch_is_exchanged_while_attention_runs():
    seen = []

    class Inside(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(F.linear)
            return super().__torch_function__(function, types, args, kwargs or {})

    def run(m, x):
        return m.head(torch.tanh(m.attend(x, x, x, need_weights=False)[0]).mean(1))

    before = dict(vars(F))
    model = Parts(run, attend=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, CLASSES))
    inputs = torch.randn(N, LENGTH, 4).as_subclass(Inside)
    woodbury.NaturalGradient(model, LOSS).step(inputs, torch.randint(CLASSES, (N,)))
    assert seen and all(function is before["linear"] for function in seen) and dict(vars(F)) == before
