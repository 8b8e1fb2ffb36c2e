"""Equations in time: weights against a loop over points, points that are even in time."""

import math

import torch

import bounds
from woodbury.fit.equations import CAP, Equations, TermSource
from woodbury.fit.march import LEAST, SMALL, March

COUNT = 200


def candidates():
    """(n, 2) with the time in the last column, and residuals (n, 3) that grow with it."""
    inputs = torch.rand(COUNT, 2, dtype=torch.float64)
    return inputs, torch.randn(COUNT, 3, dtype=torch.float64) * inputs[:, 1:]


def test_weights_fall_with_the_residual_at_earlier_times():
    march, (inputs, residual) = March(7.0), candidates()
    assert march.is_over  # nothing to wait for where no equation is weighed
    for size in (1.0, 0.02):
        later = march.weigh(inputs, size * residual)
        expected = []
        for time in inputs[:, 1]:
            before = (size * residual)[inputs[:, 1] < time].square().mean(1).sum() / COUNT
            expected.append(math.exp(-float(before) / (7 * SMALL)))
        # an exponent is known to eps of itself, and matters where the weight is above LEAST
        bound = bounds.rounding(COUNT, condition=-math.log(LEAST))
        assert float((later - torch.tensor(expected, dtype=torch.float64).clamp(min=LEAST)).abs().max()) <= bound
    assert abs(march.reached - sum(expected) / COUNT) <= bounds.rounding(COUNT) and not march.is_over
    assert bool((march.weigh(inputs, 1e-4 * residual) > 0.98).all()) and march.is_over
    assert bool((March(7.0, until=0.0).weigh(inputs, residual) == 1).all())  # its time is over


def test_points_are_chosen_by_their_probabilities_and_evenly_in_time():
    inputs, residual = candidates()
    share = residual.norm(dim=1) / residual.norm(dim=1).sum()
    for count in (7, 64):
        chosen = inputs[March.choose(inputs, share, count), 1]
        assert len(chosen) == count
        for time in inputs[:, 1]:  # as many until a time as expected, but for one
            expected = count * float(share[inputs[:, 1] <= time].sum())
            assert abs(int((chosen <= time).sum()) - expected) <= 1 + bounds.rounding(COUNT)


def test_points_of_a_step_have_the_weights_of_their_time():
    model, drawn = torch.nn.Linear(1, 1).double(), []

    def draw(count):
        drawn.append(torch.rand(count, 1, dtype=torch.float64))
        return drawn[-1]

    terms = Equations(equation=(draw, lambda model, x: 1 + 0 * model(x)), edge=(draw, lambda model, x: model(x)))
    source = TermSource(model, terms.terms, march=March(0.25 / SMALL))
    (_, inputs, _, scale), _ = source._points(source.sources["equation"], 64, by_residual=True)
    times = drawn[-1].flatten()
    weights = {float(t): max(math.exp(-4 * int((times < t).sum()) / len(times)), LEAST) for t in times}
    total, roots = sum(weights.values()), sum(map(math.sqrt, weights.values()))
    for t, own in zip(inputs.flatten().tolist(), scale.flatten().tolist(), strict=True):
        share = (weights[t] / total + math.sqrt(weights[t]) / roots) / 2  # all residuals are 1
        assert abs(own**2 * len(times) * share / weights[t] - 1) <= bounds.rounding(len(times), 4)
    for name, by_residual in (("equation", False), ("edge", True)):  # what judges, and conditions: as they were
        reached = source.march.reached
        (_, inputs, _, scale), _ = source._points(source.sources[name], 64, by_residual)
        assert source.march.reached == reached and float(scale.min()) >= ((1 + CAP) / 2) ** -0.5
