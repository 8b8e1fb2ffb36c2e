"""One kernel for the small system on a CUDA device, against the dense p and the ordinary operations.

Without a device its text runs as C++ (`cuda_in_cpp`).
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cuda_in_cpp
import problems
import woodbury
from cases import every_pair
from woodbury import _cuda, _small_system
from woodbury._batch import take
from woodbury.linalg import solve_cholesky, solve_in_sample_space

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
as_cpp = pytest.mark.skipif(cuda_in_cpp.COMPILER is None, reason="needs g++")
ways = pytest.mark.parametrize(
    "way", ["ordinary", pytest.param("c++", marks=as_cpp), pytest.param("kernel", marks=on_gpu)]
)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
dtypes = pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
SIZES = [(1, 0), (1, 3), (5, 0), (30, 30), (31, 1), (32, 0), (60, 196), (64, 64)]


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory):
    """The kernels as C++, by type."""
    made = {}

    def kernel(dtype):
        if dtype not in made:
            folder = tmp_path_factory.mktemp("kernel")
            made[dtype] = cuda_in_cpp.compiled(_small_system._KERNELS[dtype], folder)
        return made[dtype]

    return kernel


@pytest.fixture
def solved(way, in_cpp, monkeypatch):
    """solve_in_sample_space(gram, m, D, M, e, None, lambda) in one of the ways; says where."""
    if way == "c++":

        def launch(self, device, blocks, threads, shared_bytes, arguments):
            dtype = next(dtype for dtype, kernel in _small_system._KERNELS.items() if kernel is self)
            in_cpp(dtype)(arguments, blocks, 64)
            return True

        monkeypatch.setattr(_cuda.Kernel, "launch", launch)
        monkeypatch.setattr(_small_system, "fits", lambda *args: True)
        monkeypatch.setattr("woodbury.linalg.placed", lambda value, device: value)

    def function(gram, m, divisor, count, e, damping):
        if way == "kernel":
            assert _small_system.fits(gram, m, e)
        solve = solve_cholesky if way == "ordinary" else None
        found = solve_in_sample_space(gram, m, divisor, count, e, None, damping, solve)
        assert (found.known_norm is None) == (way == "ordinary")
        return SimpleNamespace(
            coefficients=found.coefficients, bend=found.bend, ok=found.ok, squared_norm=found.squared_norm(gram)
        )

    function.device = "cuda" if way == "kernel" else "cpu"
    return function


def system(m, rest, blocks, with_e, mean=0.0):
    """Rows Z with e or None, lambda, D and M."""
    return SimpleNamespace(
        Z=torch.randn(blocks, m + rest, 400, dtype=torch.float64) + mean,
        e=torch.randn(m, dtype=torch.float64) if with_e else None,
        m=m,
        divisor=m + 2,
        count=m + rest + 1,
        damping=torch.tensor(0.7, dtype=torch.float64),
    )


def answer(solved, s, dtype):
    gram = (s.Z @ s.Z.mT).to(solved.device, dtype)
    e = None if s.e is None else s.e.to(solved.device, dtype)
    return solved(gram, s.m, s.divisor, s.count, e, s.damping.to(solved.device))


def dense(s):
    """p of every block and |U p|^2 over all, in the space of parameters."""
    p, bend = [], 0.0
    for Z in s.Z:
        U = Z[: s.m] / s.divisor**0.5
        weights = torch.cat([torch.ones(s.m) if s.e is None else s.e, torch.ones(len(Z) - s.m)]).double()
        matrix = U.T @ U + s.damping * torch.eye(Z.shape[1], dtype=torch.float64)
        p.append(torch.linalg.solve(matrix, -(Z.T @ weights) / s.count))
        bend += (U @ p[-1]).square().sum()
    return torch.stack(p), bend


@ways
@every_pair(sizes=SIZES, blocks=[1, 3], with_e={"ones": False, "e": True}, dtype=DTYPES)
def test_the_small_system_gives_the_dense_p(solved, sizes, blocks, with_e, dtype):
    s = system(*sizes, blocks, with_e)
    found = answer(solved, s, dtype)
    p, bend = dense(s)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    own = -(s.Z.mT @ found.coefficients.cpu().double().unsqueeze(-1)).squeeze(-1)
    assert (own - p).norm() <= tolerance * p.norm()
    assert float(found.squared_norm) == pytest.approx(float(p.square().sum()), rel=tolerance)
    assert float(found.bend) == pytest.approx(float(bend), rel=tolerance)
    assert bool(found.ok)


ROUNDING = torch.finfo(torch.float32).eps / 2


def float32_error(solved, Z, m, divisor, count, damping):
    """Of the coefficients of the first m rows, relative to the same system in float64."""
    gram = (Z @ Z.mT).float()  # its own rounding does not count
    damping = torch.tensor(damping, dtype=torch.float64)
    exact = solve_in_sample_space(gram.double(), m, divisor, count, None, None, damping, solve_cholesky)
    found = solved(gram.to(solved.device), m, divisor, count, None, damping.to(solved.device))
    error = found.coefficients.cpu().double() - exact.coefficients
    return float(error[0, :m].norm() / exact.coefficients[0, :m].norm())


@ways
def test_many_rows_that_point_one_way_cost_no_digits(solved):
    """float32: the sum over samples outside S2 is large beside each of them.

    The rows of U are orthogonal, so the condition number is 1 and the error is that of the sum, which is of one
    number 226 times: a running total loses 28 to 34 roundings here. Bound: the 8 roundings (log2 226) of a sum by
    halves, and one each for D lambda - sum, the root, two quotients by it, M lambda, and the quotient by that.
    """
    for _ in range(5):
        rows = torch.linalg.qr(torch.randn(400, 30, dtype=torch.float64)).Q.T * 20
        repeated = (torch.randn(400, dtype=torch.float64) + 1).expand(226, 400)
        Z = torch.cat([rows, repeated]).unsqueeze(0)
        assert float32_error(solved, Z, 30, 32, 257, 0.01) <= (8 + 6) * ROUNDING


@ways
def test_a_system_in_float32_is_as_exact_as_its_condition_allows(solved):
    """Roundings of sums over m terms add up to sqrt(m) of them (Higham and Mary, 2019), times the condition."""
    for _ in range(5):
        s = system(60, 196, 1, False, mean=1.0)
        matrix = s.Z[0, :60] @ s.Z[0, :60].T + s.divisor * 0.01 * torch.eye(60, dtype=torch.float64)
        bound = math.sqrt(60) * torch.linalg.cond(matrix) * ROUNDING
        assert float32_error(solved, s.Z, 60, s.divisor, s.count, 0.01) <= bound


@ways
@dtypes
@pytest.mark.parametrize("entry", [-9.0, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_matrix_that_is_not_positive_definite_is_told(solved, way, dtype, entry, place):
    gram = torch.eye(10, dtype=dtype, device=solved.device)
    gram[place, place] = entry
    damping = torch.tensor(1e-3, dtype=torch.float64, device=solved.device)
    found = solved(gram, 10, 1, 10, None, damping)
    assert not bool(found.ok) or (way == "ordinary" and math.isnan(found.squared_norm))


@pytest.mark.parametrize("way", [pytest.param("kernel", marks=on_gpu)])
@pytest.mark.parametrize("given", ["float", "on the CPU", "float32", "a view", "e in double"])
def test_the_kernel_takes_what_the_ordinary_operations_take(solved, given):
    s = system(20, 10, 1, True)
    gram, damping = (s.Z[0] @ s.Z[0].T).cuda(), s.damping.cuda()
    e = s.e.cuda()
    expected = solve_in_sample_space(gram, 20, 20, 30, e, None, damping, solve_cholesky).coefficients
    damping = {"float": 0.7, "on the CPU": s.damping, "float32": damping.float()}.get(given, damping)
    if given == "a view":
        e = torch.stack([e, e], dim=1)[:, 0]
    if given == "e in double":
        gram = gram.float()
    found = solved(gram, 20, 20, 30, e, damping).coefficients
    torch.testing.assert_close(found.double(), expected, rtol=1e-3 if given == "e in double" else 1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [woodbury.NaturalGradient, woodbury.GaussNewton])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_steps_without_the_kernel_are_the_same(kind, blocks, monkeypatch):
    def taken():
        torch.manual_seed(0)
        model = problems.mlp(6, 8, 3).cuda().double()
        inputs, targets = torch.randn(12, 6).cuda().double(), torch.randint(3, (12,)).cuda()
        optimizer = kind(model, nn.CrossEntropyLoss(), blocks=blocks, curvature_samples=7, seed=0)
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
    Z = torch.randn(60, 400, dtype=torch.float64, device="cuda")
    right, damping = Z @ Z.T, torch.tensor(0.7, dtype=torch.float64, device="cuda")
    expected, _ = _small_system.solved(right, 40, 40, 60, None, damping)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would read the zeros below
        gram = torch.zeros_like(right)
        gram += right
        found, _ = _small_system.solved(gram, 40, 40, 60, None, damping)
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
    assert fits(torch.empty(256, 256), 96, torch.empty(96))
    assert fits(torch.empty(2, 74, 74, dtype=torch.float64), 74, None)
    assert not fits(torch.empty(257, 257), 30, None)  # rows
    assert not fits(torch.empty(97, 97), 97, None)  # rows of U
    assert not fits(torch.empty(96, 96, dtype=torch.float64), 96, None)  # shared memory
    assert not fits(torch.empty(30, 60), 30, None)  # Z Z^T not whole
    assert not fits(torch.empty(60, 60, dtype=torch.float16), 30, None)
    assert not fits(torch.empty(60, 60).expand(2, 60, 60), 30, None)
    assert not fits(torch.empty(60, 60), 30, torch.empty(29))
    assert not fits(torch.empty(2, 60, 60), 30, torch.empty(2, 30))


def test_the_norm_of_a_step_is_that_of_p_where_rows_nearly_repeat():
    """250 samples with ten distinct inputs, float32: c^T Z Z^T c has no digits left, and here p is formed."""
    inputs, targets = torch.randn(250, 50)[torch.arange(250) % 10], torch.randint(10, (250,))
    model = problems.mlp(50, 60, 60, 60, 10)
    optimizer = woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), damping=1e-6, lr=0.0)
    p = optimizer.direction(inputs, targets)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in p.values()))
    assert float(optimizer.step(inputs, targets).step_norm) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_chosen_samples_keep_the_form_that_models_were_written_for(device):
    index = torch.tensor([3, 1], device=device)
    images = torch.randn(5, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
    assert take(images, index, 5).is_contiguous()
    sparse = torch.eye(5, device=device).to_sparse()
    assert torch.equal(take(sparse, index, 5).to_dense(), torch.eye(5, device=device)[index])
