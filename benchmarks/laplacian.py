"""`woodbury.laplacian` beside nested forward mode: a pass, a pass with its gradient, a step of Gauss-Newton.

And the rows of residuals that `torch.autograd.grad` differentiates, as most programs on the web do: by expanded
weights, as they are, beside chunks of the graph, as they were.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.common import Command, Step, add_quick, chain, medians_within, table
from woodbury.laplacian import Laplacian, laplacian
from woodbury.model.fallback import WrittenRows
from woodbury.optim import GaussNewton
from woodbury.row_matrix import rows

PROBLEMS = {(2, 32, 32, 1): 1020, (5, 64, 64, 48, 48, 1): 875}  # widths and number of points
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


def bench_laplacian(quick: bool = False) -> dict[str, dict[str, float]]:
    """{problem and task: {method: median CPU seconds}}, in float64; the methods take turns."""
    result = {}
    for widths, count in PROBLEMS.items():
        torch.manual_seed(0)
        points, model = torch.rand(count, widths[0], dtype=torch.float64), chain(nn.Tanh, *widths).double()
        steps = {
            task: {method: make(model, derive, points) for method, derive in METHODS.items()}
            for task, make in TASKS.items()
        }
        steps["rows by autograd"] = {way: partial(form, model, points) for way, form in WAYS.items()}
        for task, own in steps.items():
            problem = f"{'-'.join(map(str, widths))}, {count} points: {task}"
            result[problem] = medians_within(own, 0.0 if quick else 10.0)
    return result


def _by_autograd(model: nn.Module, points: Tensor) -> Tensor:
    """The residuals of the same equation by torch.autograd.grad."""
    points = points.detach().requires_grad_()
    value = model(points)
    (slopes,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    bends = (torch.autograd.grad(own.sum(), points, create_graph=True)[0] for own in slopes.unbind(1))
    bend = sum(own[:, axis] for axis, own in enumerate(bends))
    return (bend + value[:, 0] * slopes[:, 0] + 1.0).unsqueeze(1)


def _rows(model: nn.Module, points: Tensor) -> Any:
    return rows(model, nn.MSELoss(), points, forward=_by_autograd, fallback="autograd")


def _rows_in_chunks(model: nn.Module, points: Tensor) -> Any:
    with patch.object(WrittenRows, "by_expansion", side_effect=NotImplementedError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step takes the time of many passes
        return _rows(model, points)


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {"expanded weights": _rows, "chunks": _rows_in_chunks}


def _residuals(derive: Derive, model: nn.Module, points: Tensor) -> Tensor:
    """Of an equation that uses the value, a first derivative and the Laplacian."""
    value, gradient, bend = derive(model, points)
    return bend + value * gradient[..., 0] + 1.0


def _gradient(model: nn.Module, derive: Derive, points: Tensor) -> Step:
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(_residuals(derive, model, points).square().mean(), parameters)


def _step(model: nn.Module, derive: Derive, points: Tensor) -> Step:
    """Nested transforms hide the layers from their rules, and need the fallback."""
    settings: dict[str, Any] = {} if derive is laplacian else {"fallback": "autograd"}
    optimizer = GaussNewton(model, nn.MSELoss(), forward=partial(_residuals, derive), **settings)
    return lambda: optimizer.step(points)


class Ansatz(nn.Module):
    """sin(pi y) + x y (1 - y) net, x and y being the first two inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, points: Tensor) -> Tensor:
        x, y = points[..., :1], points[..., 1:2]
        return torch.sin(torch.pi * y) + x * y * (1 - y) * self.net(points)


TASKS: dict[str, Callable[[nn.Module, Derive, Tensor], Step]] = {
    "value, gradient, Laplacian": lambda model, derive, points: torch.no_grad()(partial(derive, model, points)),
    "and the gradient of a loss": _gradient,
    "GaussNewton step": _step,
    "and of an ansatz": lambda model, derive, points: _step(Ansatz(model), derive, points),
}


def _table(result: dict[str, dict[str, float]]) -> str:
    lines = []
    for what, seconds in result.items():
        ours, other = seconds.values()
        times = {method: 1e3 * own for method, own in seconds.items()}
        lines.append({"": what, **times, "ratio": other / ours})
    return table("CPU milliseconds", lines)


COMMAND = Command(
    "woodbury.laplacian beside nested forward mode: passes and steps in 2 and 5 dimensions (1 minute)",
    lambda options: bench_laplacian(options.quick),
    _table,
    add_quick,
)
