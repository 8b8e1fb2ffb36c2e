"""One kernel for the small system on a CUDA device, against the dense p and the ordinary operations."""

import math
from types import SimpleNamespace

import pytest
import torch

import problems
import woodbury
from woodbury import _cuda, _small_system
from woodbury.linalg import solve_cholesky, solve_in_sample_space

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = [(1, 0), (1, 3), (5, 0), (30, 30), (31, 1), (32, 0), (60, 196), (64, 64)]


def system(m, rest, blocks, with_e, dtype=torch.float64, device="cuda"):
    """Rows Z, with Z Z^T, e or None and lambda."""
    Z = torch.randn(blocks, m + rest, 400, dtype=torch.float64)
    e = torch.randn(m, dtype=torch.float64) if with_e else None
    return SimpleNamespace(
        Z=Z,
        e=e,
        m=m,
        count=m + rest,
        gram=(Z @ Z.mT).to(device, dtype),
        given=None if e is None else e.to(device, dtype),
        damping=torch.tensor(0.7, dtype=torch.float64, device=device),
    )


def dense(s):
    """p of every block and |U p|^2 over all, in the space of parameters."""
    p, bend = [], 0.0
    for Z in s.Z:
        U = Z[: s.m] / s.m**0.5
        weights = torch.cat([torch.ones(s.m) if s.e is None else s.e, torch.ones(len(Z) - s.m)]).double()
        matrix = U.T @ U + s.damping.cpu() * torch.eye(Z.shape[1], dtype=torch.float64)
        p.append(torch.linalg.solve(matrix, -(Z.T @ weights) / s.count))
        bend += (U @ p[-1]).square().sum()
    return torch.stack(p), bend


@pytest.mark.parametrize("with_e", [False, True], ids=["ones", "e"])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("m", "rest"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_the_small_system_gives_the_dense_p(device, dtype, m, rest, blocks, with_e):
    s = system(m, rest, blocks, with_e, dtype, device)
    assert _small_system.fits(s.gram, m) == (device == "cuda")
    found = solve_in_sample_space(s.gram, m, m, s.count, s.given, None, s.damping, solve_cholesky)
    p, bend = dense(s)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    own = -(s.Z.mT @ found.coefficients.cpu().double().unsqueeze(-1)).squeeze(-1)
    assert (own - p).norm() <= tolerance * p.norm()
    assert float(found.squared_norm) == pytest.approx(float(p.square().sum()), rel=tolerance)
    assert float(found.bend) == pytest.approx(float(bend), rel=tolerance)
    assert bool(found.ok)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("entry", [-9.0, math.nan, math.inf])
def test_a_matrix_that_is_not_positive_definite_is_told(device, entry):
    gram = torch.eye(10, device=device)
    gram[4, 4] = entry
    damping = torch.tensor(1e-3, dtype=torch.float64, device=device)
    found = solve_in_sample_space(gram, 10, 1, 10, None, None, damping, solve_cholesky)
    numbers = torch.tensor([float(found.squared_norm), float(found.bend)])
    assert not (bool(found.ok) and numbers.isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [woodbury.NaturalGradient, woodbury.GaussNewton])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_steps_without_the_kernel_are_the_same(kind, blocks, monkeypatch):
    def taken():
        torch.manual_seed(0)
        model = problems.mlp(6, 8, 3).cuda().double()
        inputs, targets = torch.randn(12, 6).cuda().double(), torch.randint(3, (12,)).cuda()
        optimizer = kind(model, torch.nn.CrossEntropyLoss(), blocks=blocks, curvature_samples=7, seed=0)
        return [optimizer.step(inputs, targets).as_dict() for _ in range(5)]

    kernel = _small_system._KERNELS[torch.float64]
    launched = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    with_kernel = taken()
    assert launched == [True] * 5
    monkeypatch.setattr(kernel, "launch", lambda *args: False)
    for a, b in zip(with_kernel, taken(), strict=True):
        assert a == pytest.approx(b, rel=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_runs_on_the_stream_that_is_current():
    s = system(40, 20, 1, False)
    expected, _ = _small_system.solved(s.gram, 40, 40, 60, None, s.damping)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would read the zeros below
        gram = torch.zeros_like(s.gram)
        gram += s.gram
        found, _ = _small_system.solved(gram, 40, 40, 60, None, s.damping)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("source", ["this is no C++", 'extern "C" __global__ void another() {}'])
def test_a_kernel_that_cannot_be_had_says_so(source):
    kernel = _cuda.Kernel("wanted", source)
    device = torch.device("cuda", torch.cuda.current_device())
    assert kernel.launch(device, 1, 32, 0, _small_system._Arguments()) is False


def test_systems_the_kernel_cannot_hold_are_left_to_the_ordinary_operations(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    fits = _small_system.fits
    assert fits(torch.empty(256, 256), 96) and fits(torch.empty(2, 74, 74, dtype=torch.float64), 74)
    assert not fits(torch.empty(257, 257), 30)  # rows
    assert not fits(torch.empty(97, 97), 97)  # rows of U
    assert not fits(torch.empty(96, 96, dtype=torch.float64), 96)  # shared memory
    assert not fits(torch.empty(30, 60), 30)  # Z Z^T not whole
    assert not fits(torch.empty(60, 60, dtype=torch.float16), 30)
    assert not fits(torch.empty(60, 60).expand(2, 60, 60), 30)
