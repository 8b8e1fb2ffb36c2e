"""Arithmetic written down and done later, against the same arithmetic on plain floats."""

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from woodbury.device import numbers as _numbers
from woodbury.device.numbers import Number, forced, keep, multiples, written_down
from woodbury.device.scalars import as_double, as_truth, magnitude, ratio_where, root, where

COMPARISONS = [operator.gt, operator.ge, operator.lt]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, *COMPARISONS]
NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, math.inf, -math.inf, math.nan])


def written(values, device="cpu"):
    """Numbers on one tape, as a CUDA device would have them."""
    tape = _numbers._Tape()
    return [Number(tape, tape.name(torch.tensor(v, dtype=torch.float64, device=device))) for v in values]


def by_ieee(operation, a, b):
    """On tensors: Python raises where IEEE arithmetic gives inf or nan."""
    return operation(torch.tensor(a, dtype=torch.float64), b).double()


@given(st.lists(NUMBERS, min_size=3, max_size=3), st.sampled_from(BINARY), st.sampled_from(BINARY))
@settings(deadline=None)
def test_operators_are_those_of_plain_numbers(values, first, second):
    a, b, c = written(values)
    for left, right, expected in (
        (a, b, by_ieee(first, values[0], values[1])),
        (a, values[1], by_ieee(first, values[0], values[1])),
    ):
        value = first(left, right)
        torch.testing.assert_close(as_double(value), expected, equal_nan=True)
        if first not in COMPARISONS:
            again = by_ieee(second, float(expected), values[2])
            torch.testing.assert_close(as_double(second(value, c)), again, equal_nan=True)
    swapped = by_ieee(first, values[0], torch.tensor(values[1], dtype=torch.float64))
    torch.testing.assert_close(as_double(first(values[0], b)), swapped, equal_nan=True)


@given(st.lists(NUMBERS, min_size=3, max_size=3))
@settings(deadline=None)
def test_choices_roots_and_magnitudes_are_those_of_plain_numbers(values):
    a, b, c = written(values)
    x, y, z = values
    truth, both = x > y, (x > y) & (y > z)
    assert bool(as_truth(a > b)) == truth
    assert bool(as_truth((a > b) & (b > c))) == both
    assert bool(as_truth(True & (b > c))) == (y > z)
    expected = {
        "where": (where(a > b, c, 2.0), z if truth else 2.0),
        "constants": (where(a > b, 0.99, 1.01), 0.99 if truth else 1.01),
        "magnitude": (magnitude(a), abs(x)),
        "root": (root(a), math.nan if math.isnan(x) else math.sqrt(max(x, 0.0))),
        "ratio": (ratio_where(b > 0, a, b, -math.inf), x / y if y > 0 else -math.inf),
    }
    for name, (value, known) in expected.items():
        assert float(value) == pytest.approx(known, nan_ok=True), name


def test_a_number_is_a_tensor_to_torch_and_to_tensors():
    a, b = written([2.0, 3.0])
    vector = torch.arange(3, dtype=torch.float32)
    for value in (vector * (a + b), (a + b) * vector, torch.mul(vector, a + b)):
        assert torch.equal(value, 5 * vector)
    assert torch.equal((a + b) - vector, 5 - vector)
    assert vector.clone().add_(a).dtype == torch.float32
    assert torch.equal(
        torch.stack([a.tensor(), b.tensor()]), torch.stack([torch.as_tensor(x) for x in forced(a, b)])
    )
    assert float(torch.tensor(2.0) * a) == 4.0


def test_nothing_is_written_down_elsewhere_than_on_a_cuda_device():
    with written_down(torch.device("cpu")):
        assert isinstance(_numbers.number(torch.tensor(1.0)), torch.Tensor)
    assert forced(1.0, 2.0, True) == (1.0, 2.0, True)


def test_numbers_of_another_step_are_taken_as_they_are():
    (a,), (b,) = written([2.0]), written([5.0])
    assert float((a * 2) + (b + 1)) == 10.0


@pytest.mark.parametrize("rate", [None, 2, 0.5, torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_kept_is_zero_whatever_it_was(rate, kept):
    values = torch.tensor([1.0, -2.0]) if kept else torch.tensor([math.nan, math.inf])
    result = keep(values, torch.tensor(kept), rate)
    assert torch.equal(result, values * (1.0 if rate is None else float(rate)) if kept else torch.zeros(2))
    assert result.dtype == torch.float32


def test_a_long_sum_is_computed():
    (total,) = written([0.0])
    for _ in range(5000):
        total = total + 1.0
    assert float(total) == 5000.0


def test_numbers_are_doubles_whatever_they_come_from():
    tape = _numbers._Tape()
    norm = Number(tape, tape.name(torch.tensor(1e25)))
    assert float(norm * norm) == pytest.approx(1e50, rel=1e-6)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "values", [(1.5, -2.0, 3.0), (0.0, 0.0, 1.0), (math.nan, 1.0, 2.0), (math.inf, -1.0, 0.0)]
)
def test_one_kernel_gives_what_ordinary_operations_give(values):
    def compute(a, b, c):
        ratio = ratio_where((magnitude(a + b) < math.inf) & (b > 0), a, b, -math.inf)
        scaled = where(ratio >= 0.25, where(ratio > 0.75, 0.99, 1.0), 1.01) * c
        return ratio, scaled, root(a) - 2 / c, (a == b) & (c >= 1), 3 - a * b

    together = forced(*compute(*written(values, "cuda")))
    kernels = len(_numbers._kernels)
    assert _numbers._works
    for one, expected in zip(together, compute(*written(values, "cuda")), strict=True):
        torch.testing.assert_close(one.double(), as_double(expected), equal_nan=True, rtol=1e-15, atol=0)
    forced(*compute(*written([v + 1 for v in values], "cuda")))
    assert len(_numbers._kernels) == kernels  # the same arithmetic on other numbers is the same kernel


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rate", [None, 2, 0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_the_kernel_that_keeps_rounds_as_torch_does(rate, kept):
    values = torch.randn(50, 7, device="cuda")
    if not kept:
        values[0] = math.nan
    rate = rate.cuda() if isinstance(rate, torch.Tensor) else rate
    result = keep(values, torch.tensor(kept, dtype=torch.float64, device="cuda"), rate)
    expected = values if rate is None else values * rate
    assert torch.equal(result, expected if kept else torch.zeros_like(values))


def test_multiples_are_computed():
    (a,) = written([0.3])
    shift, length = multiples(a + 0.1, 30, 60.0)
    assert float(shift) == pytest.approx(12.0) and float(length) == pytest.approx(24.0)
    assert multiples(0.5, 2, 4.0) == (1.0, 2.0)
    other = written([2.0])[0]
    assert [float(value) for value in multiples(a, other, 3.0)] == pytest.approx([0.6, 0.9])
