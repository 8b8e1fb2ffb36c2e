"""`woodbury.laplacian` beside nested forward mode: a pass, a pass with its gradient, a step of Gauss-Newton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.bench.timing import Step, medians_within
from woodbury.laplacian import Laplacian, laplacian
from woodbury.optim import GaussNewton

PROBLEMS = {"2-32-32-1, 1020 points": 1020, "5-64-64-48-48-1, 875 points": 875}
QUICK = {"2-4-1, 8 points": 8}
Derive = Callable[[nn.Module, Tensor], Laplacian]


def nested(model: nn.Module, points: Tensor) -> Laplacian:
    """The same by two nested derivatives along every axis, mapped over axes and points."""

    def along(point: Tensor, axis: Tensor) -> Any:
        def push(x: Tensor) -> Any:
            return torch.func.jvp(model, (x,), (axis,))

        return torch.func.jvp(push, (point,), (axis,))

    def at(point: Tensor) -> Any:
        axes = torch.eye(len(point), dtype=point.dtype, device=point.device)
        (values, slopes), (_, bends) = torch.func.vmap(along, in_dims=(None, 0))(point, axes)
        return values[0], slopes.T, bends.sum(0)

    return Laplacian(*torch.func.vmap(at)(points))


METHODS: dict[str, Derive] = {"woodbury.laplacian": laplacian, "nested forward mode": nested}


def bench_laplacian(quick: bool = False, seconds: float = 10.0) -> dict[str, dict[str, dict[str, float]]]:
    """{problem: {method: {what: median CPU seconds}}}, in float64."""
    problems, seconds = (QUICK, 0.0) if quick else (PROBLEMS, seconds)
    return {name: _measure(name, count, seconds) for name, count in problems.items()}


def _measure(name: str, count: int, seconds: float) -> dict[str, dict[str, float]]:
    widths = [int(width) for width in name.partition(",")[0].split("-")]
    torch.manual_seed(0)
    points = torch.rand(count, widths[0], dtype=torch.float64)
    result: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    for what, make in TASKS.items():
        steps = {method: make(_network(widths), derive, points) for method, derive in METHODS.items()}
        for method, value in medians_within(steps, seconds, 200).items():
            result[method][what] = value
    return result


def _network(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def _residuals(derive: Derive, model: nn.Module, points: Tensor) -> Tensor:
    """Of an equation that uses the value, a first derivative and the Laplacian."""
    value, gradient, bend = derive(model, points)
    return bend + value * gradient[..., 0] + 1.0


def _forward(model: nn.Module, derive: Derive, points: Tensor) -> Step:
    @torch.no_grad()
    def step() -> object:
        return derive(model, points)

    return step


def _gradient(model: nn.Module, derive: Derive, points: Tensor) -> Step:
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(_residuals(derive, model, points).square().mean(), parameters)


def _step(model: nn.Module, derive: Derive, points: Tensor) -> Step:
    """Nested transforms hide the layers from their rules, and need the fallback."""
    settings: dict[str, Any] = {} if derive is laplacian else {"fallback": "autograd"}
    optimizer = GaussNewton(model, nn.MSELoss(), forward=partial(_residuals, derive), **settings)
    return lambda: optimizer.step(points)


TASKS: dict[str, Callable[[nn.Module, Derive, Tensor], Step]] = {
    "value, gradient, Laplacian": _forward,
    "and the gradient of a loss": _gradient,
    "GaussNewton step": _step,
}
