"""Arithmetic on numbers of a device, done later and together, against the same on plain floats."""

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bounds
from woodbury.device import scalars
from woodbury.device.scalars import Number, as_double, as_truth, compute, ratio_where, root, scaled_if, where

COMPARISONS = [operator.gt, operator.ge, operator.lt]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, *COMPARISONS]
NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, math.inf, -math.inf, math.nan])


def numbers(values, device="cpu"):
    """Numbers as another device than the CPU would have them."""
    return [Number(torch.tensor(v, dtype=torch.float64, device=device)) for v in values]


def by_ieee(operation, a, b):
    """On tensors: Python raises where IEEE arithmetic gives inf or nan."""
    return operation(torch.tensor(a, dtype=torch.float64), b).double()


@given(st.lists(NUMBERS, min_size=3, max_size=3), st.sampled_from(BINARY), st.sampled_from(BINARY))
@settings(deadline=None)
def test_operators_are_those_of_plain_numbers(values, first, second):
    a, b, c = numbers(values)
    bound = {"rtol": bounds.rounding(1), "atol": 0.0, "equal_nan": True}
    for left, right, expected in (
        (a, b, by_ieee(first, values[0], values[1])),
        (a, values[1], by_ieee(first, values[0], values[1])),
    ):
        value = first(left, right)
        torch.testing.assert_close(as_double(value), expected, **bound)
        if first not in COMPARISONS:
            again = by_ieee(second, float(expected), values[2])
            torch.testing.assert_close(as_double(second(value, c)), again, **bound)
    swapped = by_ieee(first, values[0], torch.tensor(values[1], dtype=torch.float64))
    torch.testing.assert_close(as_double(first(values[0], b)), swapped, **bound)


@given(st.lists(NUMBERS, min_size=3, max_size=3))
@settings(deadline=None)
def test_choices_roots_and_magnitudes_are_those_of_plain_numbers(values):
    a, b, c = numbers(values)
    x, y, z = values
    truth, both = x > y, (x > y) & (y > z)
    assert bool(as_truth(a > b)) == truth and bool(as_truth((a > b) & (b > c))) == both
    assert bool(as_truth(True & (b > c))) == (y > z)
    expected = {
        "where": (where(a > b, c, 2.0), z if truth else 2.0),
        "constants": (where(a > b, 0.99, 1.01), 0.99 if truth else 1.01),
        "magnitude": (abs(a), abs(x)),
        "root": (root(a), math.nan if math.isnan(x) else math.sqrt(max(x, 0.0))),
        "ratio": (ratio_where(b > 0, a, b, -math.inf), x / y if y > 0 else -math.inf),
    }
    for name, (value, known) in expected.items():
        assert float(value) == pytest.approx(known, rel=bounds.rounding(1), abs=0, nan_ok=True), name


def test_a_number_is_a_tensor_to_torch_and_to_tensors():
    a, b = numbers([2.0, 3.0])
    vector = torch.arange(3, dtype=torch.float32)
    for value in (vector * (a + b), (a + b) * vector, torch.mul(vector, a + b)):
        assert torch.equal(value, 5 * vector)
    assert torch.equal((a + b) - vector, 5 - vector) and vector.clone().add_(a).dtype == torch.float32
    both = torch.stack([torch.as_tensor(x) for x in compute(a, b)])
    assert torch.equal(torch.stack([a.tensor(), b.tensor()]), both) and float(torch.tensor(2.0) * a) == 4.0


def test_a_number_answers_as_its_tensor_where_more_is_asked():
    (a,) = numbers([2.0])
    assert float((a + 1).clamp(max=2.5)) == 2.5 and float(-a) == -2.0 and float(a**2) == 4.0
    assert float(torch.where((a > 1) | (a > 5), a, 0.0)) == 2.0 and not bool(~(a > 1))
    with pytest.raises(AttributeError):
        a.nothing  # noqa: B018


@pytest.mark.parametrize("rate", [1.0, 2, 0.5, torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("holds", [True, False])
def test_values_are_zero_where_the_truth_does_not_hold_whatever_they_were(rate, holds):
    values = torch.tensor([1.0, -2.0]) if holds else torch.tensor([math.nan, math.inf])
    result = scaled_if(torch.tensor(holds), values, rate)
    assert torch.equal(result, values * float(rate) if holds else torch.zeros(2))
    assert result.dtype == torch.float32


def test_a_long_sum_is_computed_in_doubles():
    (total,) = numbers([0.0])
    for _ in range(5000):
        total = total + 1.0
    assert float(total) == 5000.0
    norm = Number(torch.tensor(1e25))  # whatever it comes from
    assert float(norm * norm) == pytest.approx(1e50, rel=bounds.rounding(1, dtype=torch.float32))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("values", [(1.5, -2.0, 3.0), (0.0, 0.0, 1.0), (math.nan, 1.0, 2.0), (math.inf, -1, 0.0)])
def test_one_kernel_gives_what_ordinary_operations_give(values):
    def arithmetic(a, b, c):
        ratio = ratio_where((abs(a + b) < math.inf) & (b > 0), a, b, -math.inf)
        scaled = where(ratio >= 0.25, where(ratio > 0.75, 0.99, 1.0), 1.01) * c
        return ratio, scaled, root(a) - 2 / c, (a == b) & (c >= 1), 3 - a * b

    together = compute(*arithmetic(*numbers(values, "cuda")))
    kernels = len(scalars._kernels)
    assert scalars._kernels_work
    for one, expected in zip(together, arithmetic(*numbers(values, "cuda")), strict=True):
        torch.testing.assert_close(one.double(), as_double(expected), equal_nan=True, rtol=1e-15, atol=0)
    compute(*arithmetic(*numbers([v + 1 for v in values], "cuda")))
    assert len(scalars._kernels) == kernels  # the same arithmetic on other numbers is the same kernel


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rate", [1.0, 2, 0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("holds", [0.0, 1.0])
def test_the_kernel_that_scales_rounds_as_torch_does(rate, holds):
    values = torch.randn(50, 7, device="cuda")
    if not holds:
        values[0] = math.nan
    rate = rate.cuda() if isinstance(rate, torch.Tensor) else rate
    result = scaled_if(torch.tensor(holds, dtype=torch.float64, device="cuda"), values, rate)
    assert torch.equal(result, values * rate if holds else torch.zeros_like(values))
