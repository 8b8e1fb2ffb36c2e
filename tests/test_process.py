"""Settings of the whole process: steps in two threads at once, and other defaults of torch."""

import contextlib
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import processes
import reference
import woodbury
from checks import loop_step
from woodbury import _process
from woodbury.layers.maps import plain_attention
from woodbury.linalg import full_precision, matmul_precision
from woodbury.model.compiled import uncompiled
from woodbury.model.fallback import no_batching_warnings

N, CLASSES = 4, 3
LOSS = nn.CrossEntropyLoss()


def kernels_of_attention():
    kinds = "flash", "mem_efficient", "math", "cudnn"
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds]


SETTINGS = {  # how to see each of them, by the context that changes it
    plain_attention: kernels_of_attention,
    full_precision: matmul_precision,
    no_batching_warnings: lambda: list(warnings.filters),
    uncompiled: lambda: torch._dynamo.eval_frame._stance.stance,
}


def check_settings_of_two_threads():
    torch.set_float32_matmul_precision("high")
    for context, read in SETTINGS.items():
        inside, left, seen, before = threading.Event(), threading.Event(), [], read()

        def second(context=context, read=read, inside=inside, left=left, seen=seen):
            with context:
                inside.set()
                assert left.wait(60)
                seen.append(read())

        thread = threading.Thread(target=second)
        with context:
            changed = read()
            thread.start()
            assert inside.wait(60)
        left.set()
        thread.join(60)
        assert changed != before and seen == [changed] and read() == before, read


def test_settings_of_the_process_hold_until_the_last_thread_is_done_and_are_as_before_then():
    assert {*SETTINGS} == {*_process._CONTEXTS}
    done = processes.run_alone(check_settings_of_two_threads)
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


# -- other defaults of torch change nothing about models and data that exist ----------------------------


SAMPLES = 24


def data(outputs=2):
    generator = torch.Generator(device="cpu").manual_seed(0)
    kind = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return torch.randn(SAMPLES, 3, **kind), torch.randn(SAMPLES, outputs, **kind)


def network(outputs=2, between=()):
    torch.manual_seed(1)
    kind = {"dtype": torch.float64, "device": "cpu"}
    return nn.Sequential(nn.Linear(3, 5, **kind), nn.Tanh(), *between, nn.Linear(5, outputs, **kind))


def steps(method, loss=None, count=4, between=(), **settings):
    def run():
        model, (inputs, targets) = network(between=between), data()
        classes = targets.argmax(1) if isinstance(loss, nn.CrossEntropyLoss) else targets
        optimizer = method(model, loss or nn.MSELoss(), seed=0, **settings)
        for _ in range(count):
            optimizer.step(inputs, classes)
        optimizer.verify(inputs, classes)
        return reference.theta(model)

    return run


def watched(criterion, how):
    def run():
        model, (inputs, targets) = network(), data()
        optimizer = woodbury.GaussNewton(model, None, watch=how == "watch", curvature_samples=10, seed=0)

        for _ in range(4):
            loop_step(optimizer, lambda: criterion(model(inputs), targets).backward(), how)
        return reference.theta(model)

    return run


def fitted(source, outputs=2, **settings):
    def run():
        model = network(outputs)
        woodbury.fit(model, nn.MSELoss(), source(), progress=False, seed=0, **settings)
        return reference.theta(model)

    return run


def batches():
    return list(zip(*(own.split(8) for own in data()), strict=True))


def sampler():
    generator = torch.Generator(device="cpu").manual_seed(3)

    def draw(count):
        inputs = torch.rand(count, 3, generator=generator, dtype=torch.float64, device="cpu")
        return inputs, inputs.prod(1, keepdim=True)

    return draw


def least_squares():
    t, y = data(1)
    start = torch.zeros(4, dtype=torch.float64, device="cpu")
    return woodbury.least_squares(lambda x: x[3] + (t * x[:3]).sum(1).tanh() - y[:, 0], start).x


def posterior():
    model, (inputs, targets) = network(), data()
    found = woodbury.posterior(model, nn.MSELoss(), inputs, targets)
    return torch.cat([found.variance(inputs).reshape(-1), reference.theta(model)])


def laplacian():
    model, x = network(), data()[0]
    found = [*woodbury.laplacian(model, x), *woodbury.derivatives(model, x, [(0, 1), (1, 1, 1)])]
    return torch.cat([own.reshape(-1) for own in found]).detach()


def rows():
    return woodbury.rows(network(), nn.MSELoss(), *data()).gram()


def regressor():
    pytest.importorskip("sklearn")
    from woodbury.sklearn import LMRegressor

    inputs, targets = (own.numpy() for own in data(1))
    model = LMRegressor((4,), max_iter=5, restarts=1, random_state=0).fit(inputs, targets[:, 0])
    return torch.from_numpy(model.predict(inputs))


cross_entropy = nn.CrossEntropyLoss()
ENTRIES = {
    "Gauss-Newton": steps(woodbury.GaussNewton, curvature_samples=10),
    "every part": steps(woodbury.GaussNewton, cross_entropy, curvature_samples=10, blocks="layer", momentum=0.5),
    "memory": steps(woodbury.GaussNewton, memory=1, curvature_samples=10),
    "metric": steps(woodbury.NaturalGradient, metric="adam", curvature_samples=10),
    "search": steps(woodbury.GaussNewton, search=woodbury.CurvedSearch(), momentum=0.0),
    "dropout": steps(woodbury.GaussNewton, between=(nn.Dropout(0.5),), curvature_samples=10),
    "natural gradient": steps(woodbury.NaturalGradient, cross_entropy, curvature_samples=10),
    "Hessian-free": steps(woodbury.HessianFree, curvature_samples=10),
    "KFAC": steps(woodbury.KFAC, cross_entropy, curvature_samples=10),
    "watched": watched(F.mse_loss, "watch"),
    "watched expression": watched(lambda y, t: (y - t).pow(4).mean(), "watch"),
    "closure": watched(F.huber_loss, "closure"),
    "fit": fitted(data, steps=5),
    "fit batches": fitted(batches, epochs=2, curvature_samples=4, validation=data()),
    "fit a sampler": fitted(sampler, outputs=1, steps=4, samples=32),
    "least squares": least_squares,
    "posterior": posterior,
    "Laplacian": laplacian,
    "rows": rows,
    "LMRegressor": regressor,
}


@contextlib.contextmanager
def default(setting):
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        if isinstance(setting, torch.dtype):
            torch.set_default_dtype(setting)
        else:
            torch.set_default_device(setting)
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device if device.type != "cpu" else None)


@pytest.mark.parametrize("name", ENTRIES)
def test_results_are_the_same_under_other_defaults_of_torch(name):
    expected = ENTRIES[name]()
    for setting in ("meta", torch.float16):
        torch.manual_seed(0)
        with default(setting):
            found = ENTRIES[name]()
        assert found.dtype == expected.dtype and torch.equal(found, expected), setting
