"""The same steps on a CUDA device: equal to the CPU's, rejected on the device, and without waiting for it."""

import copy
import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import problems
import woodbury
from checks import silence, through_a_file, unchanged
from fuzz.models import Parts
from problems import CHANGES, Scaled
from woodbury import _random
from woodbury._vector import flatten
from woodbury.device import fingerprint, recording, scalars
from woodbury.optimizers import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMW = ["smw-gn", "smw-ng", "smw-ng-bd"]
every_optimizer = pytest.mark.parametrize("kind", SMW)
every_optimizer_and_kfac = pytest.mark.parametrize("kind", [*SMW, "kfac"])


def moved(name, device="cuda"):
    problem = problems.make(name)
    problem.model.to(device)
    problem.loss.to(device)
    problem.inputs, problem.targets = problem.inputs.to(device), problem.targets.to(device)
    return problem


def pair(name, kind, **settings):
    """The same optimizer on the CPU and on the GPU."""
    made = [moved(name, device) for device in ("cpu", "cuda")]
    return [(own, OPTIMIZERS[kind](own.model, own.loss, seed=0, **settings)) for own in made]


def vectors(classes=3, samples=6, width=4):
    """A batch on the GPU."""
    return torch.randn(samples, width, device="cuda"), torch.randint(classes, (samples,), device="cuda")


def assert_close(model, other, rtol=0.0, atol=0.0):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=rtol, atol=atol)


@contextmanager
def without_waiting():
    """Raises where the device is waited for."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@problems.every_problem
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, settings) for kind in SMW for settings in ({}, {"momentum": 0.5, "weight_decay": 0.01})),
        *((kind, {"weight_decay": 0.01}) for kind in ("kfac", "hf")),
        *(("kfac", {"refresh": 2}), ("hf", {})),
    ],
)
def test_steps_agree_with_the_cpu(name, kind, settings):
    if kind == "kfac" and name in problems.SHARED:
        pytest.skip("KFAC has no factors for parameters shared over positions")
    (cpu, on_cpu), (gpu, on_gpu) = pair(name, kind, curvature_samples=4, **settings)
    for _ in range(3 if kind in SMW else 5):
        a = on_cpu.step(cpu.inputs, cpu.targets).as_dict()
        b = on_gpu.step(gpu.inputs, gpu.targets).as_dict()
        assert a == pytest.approx(b, rel=1e-8 if kind in SMW else 1e-6)
    if kind in SMW:
        assert_close(cpu.model, gpu.model, rtol=1e-8, atol=1e-10)
        assert on_gpu.verify(gpu.inputs, gpu.targets) < 1e-10


@every_optimizer_and_kfac
@pytest.mark.parametrize("bad", ["inputs", "parameters", "cliff"])
def test_bad_numbers_become_a_rejection_on_the_device(kind, bad):
    model = problems.mlp(4, 5, 3).cuda()
    inputs, targets = vectors()
    optimizer = OPTIMIZERS[kind](model, nn.CrossEntropyLoss())
    if bad == "cliff":
        passes = []

        def forward(model, inputs):
            passes.append(1)
            return model(inputs) / float(len(passes) != 2 or not rises)  # the trial pass comes second

        optimizer.forward, rises = forward, False
    optimizer.step(inputs, targets)
    if bad == "inputs":
        inputs[2, 1] = torch.nan
    elif bad == "parameters":
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
    else:
        passes.clear()
        rises = True
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    damping = float(optimizer.state["damping"])
    info = optimizer.step(inputs, targets)
    assert not info.accepted and info.ratio == -torch.inf
    assert float(optimizer.state["damping"]) == pytest.approx(1.01 * damping)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True)
    for factors in optimizer.state.get("averages", {}).values():
        assert all(torch.isfinite(factor).all() for factor in factors.values())


LOSSES = [
    *("softmax-weighted-plain", "softmax-weighted-probabilities", "softmax-sum", "likelihood", "logistic-sum"),
    *("squared-sum", "huber", "smooth-absolute", "absolute", "counts", "counts-by-rate", "gaussian"),
]


@pytest.mark.parametrize(
    "name, kind, settings",
    [
        *(("softmax", kind, {"capture": False, "curvature_samples": n}) for kind in SMW for n in (4, None)),
        *((name, "smw-gn", {"capture": False, "curvature_samples": 4}) for name in LOSSES),
        ("softmax", "kfac", {"curvature_samples": 4}),
    ],
)
def test_a_step_does_not_wait_for_the_device(name, kind, settings):
    _, (problem, optimizer) = pair(name, kind, **settings)
    for _ in range(3):
        optimizer.step(problem.inputs, problem.targets)
    with without_waiting():
        optimizer.step(problem.inputs, problem.targets)


def test_logits_in_place_of_log_probabilities_are_rejected():
    problem = moved("softmax")
    optimizer = woodbury.GaussNewton(problem.model, nn.NLLLoss())
    with unchanged(problem.model):
        assert not optimizer.step(problem.inputs, problem.targets).accepted


@every_optimizer
def test_tf32_stays_out_of_the_gram_matrix(kind):
    model = problems.mlp(300, 200, 10).cuda()
    inputs, targets = vectors(10, 60, 300)
    curvature = "gauss-newton" if kind == "smw-gn" else "empirical"
    rows = woodbury.rows(model, nn.CrossEntropyLoss(), inputs, targets, curvature=curvature)
    exact = rows.gram(dtype=torch.float64)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        gram = rows.gram()
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert (gram - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize(
    ("kind", "settings"), [*((kind, {"momentum": 0.5}) for kind in SMW), ("kfac", {"refresh": 10}), ("hf", {})]
)
def test_state_moves_between_devices(kind, settings):
    (cpu, on_cpu), (gpu, on_gpu) = pair("softmax", kind, curvature_samples=4, **settings)
    for _ in range(3):
        on_cpu.step(cpu.inputs, cpu.targets)
    gpu.model.load_state_dict(cpu.model.state_dict())
    with silence():
        on_gpu.load_state_dict(on_cpu.state_dict())
    a = flatten(on_cpu.direction(cpu.inputs, cpu.targets))
    torch.testing.assert_close(flatten(on_gpu.direction(gpu.inputs, gpu.targets)).cpu(), a)


@pytest.mark.parametrize("kind", [*SMW, "kfac", "hf"])
def test_state_whose_every_tensor_is_on_the_gpu_goes_on(kind):
    """The state of the generator of S2 too, which lives on the CPU."""
    (_, (one, optimizer)), (_, (other, resumed)) = (pair("softmax", kind, curvature_samples=4) for _ in range(2))
    for _ in range(3):
        optimizer.step(one.inputs, one.targets)
    other.model.load_state_dict(one.model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict(), map_location="cuda"))
    for _ in range(3):
        a = optimizer.step(one.inputs, one.targets).as_dict()
        assert a == pytest.approx(resumed.step(other.inputs, other.targets).as_dict(), rel=1e-12)


# -- steps recorded into a CUDA graph ---------------------------------------------------------------------------


def is_recorded(optimizer):
    return bool(optimizer._recordings._recordings)


def recorded(name, kind, **settings):
    """The same optimizer twice: ordinary steps alone, and recorded by itself."""
    made = [(moved(name), capture) for capture in (False, True)]
    return [(own, OPTIMIZERS[kind](own.model, own.loss, seed=0, capture=how, **settings)) for own, how in made]


@every_optimizer
@problems.every_problem
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "dense"])
def test_recorded_steps_are_the_ordinary_ones(name, kind, settings):
    (plain, ordinary), (same, replaying) = recorded(name, kind, curvature_samples=4, lr=0.5, **settings)
    for step in range(8):
        if step == 5:  # a scheduler's work
            ordinary.param_groups[0]["lr"] = replaying.param_groups[0]["lr"] = 0.25
        a = ordinary.step(plain.inputs, plain.targets).as_dict()
        b = replaying.step(same.inputs, same.targets).as_dict()
        # sums over positions are added up in an order that changes from run to run
        assert a == (pytest.approx(b, rel=1e-9) if name in problems.SHARED else b)
    assert is_recorded(replaying)
    assert_close(plain.model, same.model, rtol=1e-9 if name in problems.SHARED else 0, atol=1e-12)


def test_a_recorded_step_does_not_wait_for_the_device_and_infos_keep_their_numbers():
    (_, (problem, optimizer)) = recorded("softmax", "smw-ng", curvature_samples=4)
    infos = [optimizer.step(problem.inputs, problem.targets) for _ in range(4)]
    assert is_recorded(optimizer)
    with without_waiting():
        infos += [optimizer.step(problem.inputs, problem.targets) for _ in range(4)]
    assert infos[4].accepted and len({float(info.loss) for info in infos}) == 8


def test_batches_of_several_shapes_are_recorded_each():
    ((plain, ordinary), (problem, optimizer)) = recorded("softmax", "smw-ng", lr=1)  # a whole number
    with silence():
        for step in range(15):
            size = 4 if step % 3 == 2 else 7
            a = ordinary.step(plain.inputs[:size], plain.targets[:size]).as_dict()
            b = optimizer.step(problem.inputs[:size], problem.targets[:size]).as_dict()
            assert a == b
    assert len(optimizer._recordings._recordings) == 2


def test_random_numbers_capture_false_and_large_steps_take_ordinary_steps(monkeypatch):
    drawing = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).cuda()
    plain = nn.Linear(4, 3).cuda()
    for model, worth, settings in ((drawing, None, {}), (plain, None, {"capture": False}), (plain, 0, {})):
        if worth is not None:
            monkeypatch.setattr(recording, "WORTH_RECORDING", worth)
        optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), **settings)
        for _ in range(5):
            optimizer.step(*vectors())
        assert optimizer._recordings is None if settings else not is_recorded(optimizer)


def test_batches_that_no_graph_can_read_take_ordinary_steps():
    """A copy to the device, or an array that changes in place, would be read as it was when recorded."""
    model = nn.Linear(4, 3).cuda()
    targets = torch.randint(3, (6,), device="cuda")

    def forward(model, inputs):
        values, scale = inputs
        return model(values.to("cuda")) * float(scale[0])

    scale = np.ones(2000)
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), forward=forward, lr=0.0)
    inputs = torch.randn(6, 4, device="cuda")
    expected = [float(optimizer.step((inputs, scale), targets).loss) for _ in range(5)]
    assert not is_recorded(optimizer) and len(set(expected)) == 1
    scale[0] = 2.0
    assert float(optimizer.step((inputs, scale), targets).loss) != expected[0]
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), forward=lambda net, x: net(x.to("cuda")))
    for _ in range(5):
        optimizer.step(inputs.cpu(), targets)
    assert not is_recorded(optimizer)


def test_a_model_that_waits_takes_ordinary_steps_and_leaves_no_harm():
    """It looks at a number as it goes, which no graph can record."""
    model = Parts(lambda m, x: m.layer(x if float(x.sum()) < 1e9 else -x), layer=nn.Linear(4, 3)).cuda()
    inputs, targets = vectors()
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss())
    losses = [float(optimizer.step(inputs, targets).loss) for _ in range(6)]
    assert not is_recorded(optimizer) and losses == sorted(losses, reverse=True)
    noise = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5)  # the generator works on
    assert 0 < float(noise.mean()) < 2
    problem = moved("softmax")
    other = woodbury.NaturalGradient(problem.model, problem.loss)
    for _ in range(5):
        other.step(problem.inputs, problem.targets)
    assert is_recorded(other)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_numbers_is_seen_by_a_recording(change, monkeypatch):
    """Against ordinary steps on the same model, changed in the same way."""
    torch.manual_seed(1)
    models = [Scaled().to("cuda", torch.float64)]
    models.append(copy.deepcopy(models[0]))
    inputs = torch.randn(8, 4, device="cuda", dtype=torch.float64)
    targets = torch.randint(3, (8,), device="cuda")
    settings = {"seed": 0, "curvature_samples": 5}
    ordinary = woodbury.GaussNewton(models[0], nn.CrossEntropyLoss(), capture=False, **settings)
    replaying = woodbury.GaussNewton(models[1], nn.CrossEntropyLoss(), capture=True, **settings)
    for _ in range(5):
        assert ordinary.step(inputs, targets).as_dict() == replaying.step(inputs, targets).as_dict()
    assert is_recorded(replaying)
    before = float(replaying.last.loss)
    with monkeypatch.context() as patch:
        for model, optimizer in zip(models, (ordinary, replaying), strict=True):
            change(model, optimizer, patch)
        for _ in range(4):
            assert ordinary.step(inputs, targets).as_dict() == replaying.step(inputs, targets).as_dict()
        assert float(replaying.last.loss) != before


@pytest.mark.parametrize("steps", [2, 6], ids=["before recording", "after it"])
@pytest.mark.parametrize("taken", [0, 3], ids=["fresh", "used"])
def test_the_state_of_an_optimizer_on_the_cpu_reaches_the_recorded_step(steps, taken):
    """Its numbers are plain, its tensors on the CPU; a fresh one has no momentum yet."""
    ((plain, ordinary), (problem, optimizer)) = recorded("softmax", "smw-ng", momentum=0.5)
    source = problems.make("softmax")
    on_cpu = OPTIMIZERS["smw-ng"](source.model, source.loss, seed=1, momentum=0.5)
    for _ in range(taken):
        on_cpu.step(source.inputs, source.targets)
    for _ in range(steps):
        ordinary.step(plain.inputs, plain.targets)
        optimizer.step(problem.inputs, problem.targets)
    assert is_recorded(optimizer) == (steps > 2)
    for one in (ordinary, optimizer):
        one.load_state_dict(copy.deepcopy(on_cpu.state_dict()))
    for _ in range(6):
        a = ordinary.step(plain.inputs, plain.targets).as_dict()
        assert a == pytest.approx(optimizer.step(problem.inputs, problem.targets).as_dict(), rel=1e-12)
    assert is_recorded(optimizer)


def test_a_rejected_step_in_a_recording_keeps_the_parameters():
    (_, (problem, optimizer)) = recorded("softmax", "smw-ng")
    for _ in range(5):
        optimizer.step(problem.inputs, problem.targets)
    bad = problem.inputs.clone()
    bad[0, 0] = torch.nan
    with unchanged(problem.model):
        assert not optimizer.step(bad, problem.targets).accepted
    assert optimizer.step(problem.inputs, problem.targets).accepted


@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
@pytest.mark.parametrize("projections, fallback", [(0, None), (2, "autograd")], ids=["rule", "fallback"])
def test_cudnns_recurrent_layers_are_exact(method, projections, fallback):
    """With projections it has no rule; the bare parameter has one."""
    cell = nn.LSTM(4, 3, proj_size=projections, batch_first=True)
    parts = {"start": nn.Parameter(torch.randn(5, 4)), "head": nn.Linear(projections or 3, 2)}
    model = Parts(lambda m, x: m.head(m.cell(x + m.start)[0][:, -1]), cell=cell, **parts).to("cuda", torch.float64)
    inputs = torch.randn(6, 5, 4, device="cuda", dtype=torch.float64)
    targets = torch.randint(2, (6,), device="cuda")
    optimizer = method(model, nn.CrossEntropyLoss(), damping=0.1, fallback=fallback)
    p = flatten(optimizer.direction(inputs, targets)).cpu()
    on_cpu = method(model.cpu(), nn.CrossEntropyLoss(), damping=0.1, fallback=fallback)
    q = flatten(on_cpu.direction(inputs.cpu(), targets.cpu()))
    torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


class Halving:
    """A policy of one's own, written for tensors."""

    initial, floor = 1.0, 1e-3

    def next(self, value, ratio):
        return torch.where(ratio.clamp(0, 1) > 0.5, value / 2, value * 2)


@pytest.mark.parametrize("capture", [False, True])
def test_a_policy_of_ones_own_may_use_torch(capture):
    problem = moved("softmax")
    optimizer = woodbury.NaturalGradient(problem.model, problem.loss, damping=Halving(), capture=capture)
    for _ in range(5):
        info = optimizer.step(problem.inputs, problem.targets)
        expected = (info.damping - 1e-3) * (0.5 if info.ratio > 0.5 else 2.0)
        torch.testing.assert_close(optimizer.state["damping"], expected)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_steps_along_a_chain_are_those_of_the_same_layers_run_by_torch(kind, dtype, is_scaled):
    model = problems.mlp(9, 12, 10, 4)
    if is_scaled:
        scales = woodbury.Scale.inputs(torch.randn(30, 9)), woodbury.Scale.targets(torch.randn(30, 4))
        model = nn.Sequential(scales[0], model, scales[1])
    model = model.to("cuda", dtype)
    wrapped = nn.ModuleDict({"inside": copy.deepcopy(model)})
    settings = {"curvature_samples": 8, "seed": 0, "lr": 0.5}
    own = OPTIMIZERS[kind](model, nn.CrossEntropyLoss(), **settings)
    other = OPTIMIZERS[kind](wrapped, nn.CrossEntropyLoss(), forward=lambda net, x: net["inside"](x), **settings)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    for samples in (20, 20, 13):
        inputs, targets = torch.randn(samples, 9, dtype=dtype, device="cuda"), torch.randint(4, (samples,)).cuda()
        a, b = own.step(inputs, targets), other.step(inputs, targets)
        assert a.as_dict() == pytest.approx(b.as_dict(), rel=tolerance)
    assert own._problems.structure.chain is not None and other._problems.structure.chain is None
    assert_close(model, wrapped, rtol=tolerance, atol=tolerance)


def test_orders_drawn_ahead_are_those_drawn_one_at_a_time():
    ahead, state = _random.Orders(), _random.new_state(3)
    expected, device = state.clone(), torch.device("cuda")
    for index in range(50):
        count = 7 if index < 40 else 5
        generator = torch.Generator()
        generator.set_state(expected)
        order, expected = torch.randperm(count, generator=generator), generator.get_state()
        again, _ = ahead.draw(count, state, device)  # `direction` draws what the next step will draw
        drawn, state = ahead.draw(count, state, device)
        assert torch.equal(drawn.cpu(), order) and torch.equal(again, drawn) and torch.equal(state, expected)
        if index == 20:  # a state loaded into the same memory
            state.copy_(_random.new_state(4))
            expected = state.clone()


def test_a_long_loader_with_ignored_targets():
    problem = moved("softmax")
    optimizer = woodbury.GaussNewton(problem.model, nn.CrossEntropyLoss(ignore_index=2))
    batch = problem.inputs, problem.targets
    info = optimizer.step(*batch, full=[batch] * 700)
    alone = nn.functional.cross_entropy(problem.model(batch[0]), batch[1], ignore_index=2)
    assert info.accepted and alone < info.loss


def test_a_state_loaded_in_inference_mode_draws_on():
    problem = moved("softmax")
    optimizer = woodbury.NaturalGradient(problem.model, problem.loss, curvature_samples=4, seed=0)
    batch = problem.inputs, problem.targets
    optimizer.step(*batch)
    with torch.inference_mode():
        optimizer.state["generator"] = optimizer.state["generator"].clone()
    generator = torch.Generator()
    generator.set_state(optimizer.state["generator"].clone())
    for _ in range(3):
        optimizer.step(*batch)
        torch.randperm(problems.N, generator=generator)
        assert torch.equal(optimizer.state["generator"], generator.get_state())


def test_an_info_read_late_shows_the_numbers_of_its_step():
    """Also where the tensor that held lambda has been overwritten."""
    problem = moved("softmax")
    optimizer = woodbury.NaturalGradient(problem.model, nn.CrossEntropyLoss(ignore_index=2))
    batch = problem.inputs, problem.targets
    optimizer.step(*batch)
    held = optimizer.state["damping"]
    expected = float(held) + optimizer.damping.floor
    info = optimizer.step(*batch)
    held.mul_(1000)
    assert float(info.damping) == pytest.approx(expected)


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("capture", [True, False], ids=["recorded", "ordinary"])
def test_steps_leave_the_buffers_of_one_pass_or_of_before(capture, accepted):
    norm = nn.InstanceNorm1d(3, track_running_stats=True)  # which has buffers too, and changes them in place
    model = problems.Counting(nn.Sequential(norm, nn.Flatten(), nn.Linear(15, 2))).double().cuda()
    inputs, targets = torch.randn(6, 3, 5).double().cuda(), torch.randn(6, 2).double().cuda()
    accept = None if accepted else float("inf")
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1.0, accept=accept, capture=capture)
    for _ in range(6):
        twin = copy.deepcopy(model)
        if accepted:
            twin(inputs)
        info = optimizer.step(inputs, targets)
        assert bool(info.accepted) is accepted
        for name, value in model.named_buffers():
            assert torch.equal(value, twin.get_buffer(name)), name
    assert bool(optimizer._recordings and optimizer._recordings._recordings) is capture


def waves():
    """An ansatz."""
    net = nn.Sequential(woodbury.Periodic(1), nn.Linear(3, 8), woodbury.Sine(2.0), nn.Linear(8, 1))
    return Parts(lambda m, points: torch.sin(torch.pi * points[:, 1:]) + points[:, :1] * m.net(points), net=net)


def by_laplacian(model, points):
    value, gradient, bend = woodbury.laplacian(model, points, (0, 1))
    return bend - gradient[..., 0] + value


def by_derivatives(model, points):
    u, u_t, u_tx, u_xxx = woodbury.derivatives(model, points, [(), (0,), (0, 1), (1, 1, 1)])
    return u_t + u * u_tx + 0.01 * u_xxx


@pytest.mark.parametrize("residuals", [by_laplacian, by_derivatives])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), waves])
def test_derivatives_of_a_network_in_a_recorded_step(make, residuals):
    """Equal to the CPU's, and the step is recorded: nothing in it comes from the CPU."""
    made = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = make().double().to(device)
        optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=0.1, forward=residuals)
        points = torch.rand(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        losses = [float(optimizer.step(points).loss) for _ in range(6)]
        made.append((losses, model))
    assert is_recorded(optimizer)
    # the condition of the systems is below 1e4
    assert made[0][0] == pytest.approx(made[1][0], rel=1e-8)
    assert_close(made[0][1], made[1][1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["softmax", "squared", "residual", "tokens", "pictures"])
def test_a_search_takes_the_step_of_the_cpu(name):
    some, made = [0, 2, 3, 5], []
    search = woodbury.CurvedSearch(rungs=(1e-1, 1e-2, 1e-3), bend=1e-2)
    for device in ("cpu", "cuda"):
        problem = moved(name, device)
        inputs, targets = problem.inputs, problem.targets
        optimizer = woodbury.GaussNewton(problem.model, problem.loss, search=search, weight_decay=0.01)
        direction = optimizer.direction(inputs, targets, held_out=(inputs[some], targets[some]))
        info = optimizer.step(inputs, targets)
        assert info.accepted and optimizer._recordings is None
        made.append((flatten(direction).cpu(), info.length.item()))
    assert made[0][1] == made[1][1]
    # "residual" has a SiLU, whose second derivative comes from differences: sqrt(eps)
    torch.testing.assert_close(made[1][0], made[0][0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("how", ["closure", "watch", "scaler"])
@pytest.mark.parametrize("name", ["softmax", "squared"])
def test_a_loop_of_ones_own_takes_the_same_steps(name, how):
    """From a closure, watched, and watched with a gradient scaler."""
    problem, same = moved(name), moved(name)
    plain = woodbury.GaussNewton(problem.model, problem.loss)
    optimizer = woodbury.GaussNewton(same.model, same.loss, watch=how != "closure")
    scaler = torch.amp.GradScaler("cuda", enabled=how == "scaler")

    def backward():
        optimizer.zero_grad()
        scaler.scale(same.loss(same.model(same.inputs), same.targets)).backward()

    for _ in range(6):
        plain.step(problem.inputs, problem.targets)
        if how == "closure":
            optimizer.step(backward)
        else:
            backward()
            scaler.step(optimizer)
            scaler.update()
    assert is_recorded(optimizer) or how == "scaler"
    assert_close(problem.model, same.model)


def fitted_equation(function, steps=12, points="by residual"):
    model = problems.network(2, 8, 8, 1).cuda()
    draw = lambda count: torch.rand(count, 2, dtype=torch.float64, device="cuda")  # noqa: E731
    equation = woodbury.Equations(inside=(draw, function))
    return woodbury.fit(model, equation, steps=steps, samples=64, seed=0, points=points, progress=False)


def residual(model, x):
    return woodbury.laplacian(model, x).laplacian + torch.sin(3 * x).sum(1, keepdim=True)


def differentiated(model, x):
    x = x.requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slopes.sum(1) - 1


@pytest.mark.parametrize("function", [residual, differentiated])
def test_a_search_with_replayed_passes_takes_the_same_steps(function, monkeypatch):
    replayed = []
    ordinary_replay = recording._Kind.replay
    monkeypatch.setattr(recording._Kind, "replay", lambda *a: replayed.append(1) or ordinary_replay(*a))
    fit = fitted_equation(function)
    assert replayed
    monkeypatch.setattr(recording, "PASSES_WORTH_RECORDING", -1)
    count = len(replayed)
    ordinary = fitted_equation(function)
    assert len(replayed) == count
    losses, expected = ([record["loss"] for record in own.history] for own in (fit, ordinary))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_replayed_passes_notice_a_number_that_a_function_reads_and_random_numbers():
    replays, x = recording.Replays(), torch.ones(3, device="cuda")
    factor = 1.0

    def times(x):
        return x * factor

    def key():
        return fingerprint.of_function(times)

    for factor in (1.0,) * 5 + (2.0,) * 5:
        assert bool((replays(key, times, x) == factor).all())
    drawn = [replays(lambda: "noise", lambda x: x + torch.rand_like(x), x) for _ in range(6)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(drawn))
    waiting = [float(replays(lambda: "wait", lambda x: x * float(x.sum()), x)[0]) for _ in range(6)]
    assert waiting == [3.0] * 6


def test_a_single_number_is_computed_by_a_kernel_and_relative_damping_follows_the_scale():
    values = [torch.tensor(value, dtype=torch.float64, device="cuda") for value in (3.0, 0.5)]
    first, second = (scalars.as_number(value) for value in values)
    (result,) = scalars.compute(first * second + 1.0)
    assert result.item() == 2.5
    damping = woodbury.LevenbergMarquardt(initial=0.1, relative=True)
    for capture in (False, True):
        (on_cpu, there), (moved_problem, here) = pair("softmax", "smw-gn", damping=damping, capture=capture)
        for _ in range(5):
            there.step(on_cpu.inputs, on_cpu.targets)
            here.step(moved_problem.inputs, moved_problem.targets)
        assert_close(on_cpu.model, moved_problem.model, rtol=1e-9, atol=1e-9)
