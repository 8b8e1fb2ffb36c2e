"""Steps in two threads at once: settings of the whole process are there for both, and put back at the end."""

import threading
import warnings

import pytest
import torch
from torch import nn

import processes
import reference
import woodbury
from woodbury.linalg import full_precision, matmul_precision
from woodbury.model.expanded import Copies

N, CLASSES = 4, 3
LOSS = nn.CrossEntropyLoss()


class Meeting(nn.Module):
    """A model whose passes inside a setting wait: for the other thread to be inside as well, or to be done."""

    def __init__(self, is_inside, arrived, until):
        super().__init__()
        self.gain, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, CLASSES)
        self.is_inside, self.arrived, self.until = is_inside, arrived, until
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.is_inside(self, x):
            self.arrived.set()
            assert self.until.wait(60)
        return self.head(torch.tanh(x.abs() ** self.gain))


def run_overlapping(method, is_inside):
    """Two threads that ask for a direction: the second is inside when the first leaves, and leaves last."""
    first_inside, second_inside, first_done = threading.Event(), threading.Event(), threading.Event()
    models = [Meeting(is_inside, first_inside, second_inside), Meeting(is_inside, second_inside, first_done)]
    inputs, targets = torch.randn(N, 4), torch.randint(CLASSES, (N,))
    errors = []

    def ask(model):
        try:
            method(model).direction(inputs, targets)
        except BaseException as error:
            errors.append(error)

    first, second = (threading.Thread(target=ask, args=(model,)) for model in models)
    first.start()
    assert first_inside.wait(60)
    second.start()
    first.join(60)
    first_done.set()
    second.join(60)
    assert not errors and first_inside.is_set() and second_inside.is_set()


def enabled_kernels():
    cuda = torch.backends.cuda
    kinds = "flash", "mem_efficient", "math", "cudnn"
    return tuple(getattr(cuda, f"{kind}_sdp_enabled")() for kind in kinds)


def test_kernels_of_attention_are_allowed_again_after_two_threads():
    before = enabled_kernels()
    assert before[0]
    seen = []

    def is_inside(model, x):
        """Of the pass over the batch: the one before it looks at a sample for the structure of the model."""
        if model.calls == 2:
            seen.append(torch.backends.cuda.flash_sdp_enabled())
        return model.calls == 2

    run_overlapping(lambda model: woodbury.HessianFree(model, LOSS), is_inside)
    assert seen == [False, False] and enabled_kernels() == before


def test_filters_of_warnings_are_as_before_after_two_threads():
    before = list(warnings.filters)
    run_overlapping(
        lambda model: woodbury.GaussNewton(model, LOSS, fallback="autograd"),
        lambda model, x: isinstance(model.gain, Copies),
    )
    assert list(warnings.filters) == before


def check_precision_of_two_threads():
    torch.set_float32_matmul_precision("high")
    before, full = matmul_precision(), {"ieee", "none", "highest"}
    assert not set(before) <= full
    inside, left = threading.Event(), threading.Event()
    seen = []

    def second():
        with full_precision():
            inside.set()
            assert left.wait(60)
            seen.append(matmul_precision())

    thread = threading.Thread(target=second)
    with full_precision():
        thread.start()
        assert inside.wait(60)
    left.set()
    thread.join(60)
    assert seen and set(seen[0]) <= full, seen
    assert matmul_precision() == before, matmul_precision()


def test_precision_is_full_until_the_last_thread_is_done():
    done = processes.run_alone(check_precision_of_two_threads)
    assert done.returncode == 0, done.stderr


def convolutions():
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, CLASSES))


def attention():
    encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    "method, build",
    [
        *((method, convolutions) for method in (woodbury.NaturalGradient, woodbury.HessianFree)),
        *((woodbury.GaussNewton, build) for build in (convolutions, attention)),
    ],
)
def test_models_trained_in_several_threads_are_those_trained_one_after_the_other(method, build):
    def trained(seed):
        generator = torch.Generator().manual_seed(seed)
        model = build().double()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        inputs = torch.randn(N, 2, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(CLASSES, (N,), generator=generator)
        optimizer = method(model, LOSS, curvature_samples=2, seed=seed)
        for _ in range(5):
            optimizer.step(inputs, targets)
        return reference.theta(model)

    alone, together = {seed: trained(seed) for seed in (1, 2, 3)}, {}
    threads = [threading.Thread(target=lambda s=seed: together.update({s: trained(s)})) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together.keys() == alone.keys() and all(torch.equal(together[seed], alone[seed]) for seed in alone)
