"""The equations of `python -m benchmarks equations`: terms, a network and the error of its solution.

The error is |u_network - u| / |u| in L2 on points that no step has seen; u is known, by Cole and Hopf, or by a
spectral method (Allen-Cahn). The last two measure an unknown coefficient and an eigenvalue instead.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import woodbury
from benchmarks.common import chain

PI = math.pi
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Box:
    """Points in a box, on its faces, and at its start, the lower end of the first axis (time)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    device: str

    def inside(self, count: int) -> Tensor:
        low, high = torch.tensor([self.low, self.high], dtype=torch.float64, device=self.device)
        return low + (high - low) * torch.rand(count, len(low), dtype=torch.float64, device=self.device)

    def faces(self, count: int, axes: tuple[int, ...]) -> Tensor:
        points, ends = self.inside(count), torch.tensor([self.low, self.high], dtype=torch.float64).to(self.device)
        axis = torch.tensor(axes, device=self.device)[torch.randint(len(axes), (count,), device=self.device)]
        side = torch.randint(2, (count,), device=self.device)
        return points.scatter(1, axis.unsqueeze(1), ends[side, axis].unsqueeze(1))

    def start(self, count: int) -> Tensor:
        points = self.inside(count)
        points[:, 0] = self.low[0]
        return points


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    terms: Mapping[str, tuple[Any, Any]]
    error: Callable[[nn.Module], float]


def value(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def network(device: str, *widths: int, before: nn.Module | None = None) -> nn.Module:
    model = chain(nn.Tanh, *widths)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return (model if before is None else nn.Sequential(before, model)).double().to(device)


def relative_error(points: Tensor, truth: Tensor) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def measure(model: nn.Module) -> float:
        return float((model(points) - truth).norm() / truth.norm())

    return measure


def evolution(
    box: Box, model: nn.Module, equation: Any, start: Function, error: Any, edges: Function | None
) -> Problem:
    """u_t = ... from a start on; edges are values on the faces of space, None for periodic networks."""
    terms: dict[str, tuple[Any, Any]] = {"equation": (box.inside, equation)}
    terms["start"] = (lambda count: (points := box.start(count), start(points)), value)
    if edges is not None:
        axes = tuple(range(1, len(box.low)))
        terms["edges"] = (lambda count: (points := box.faces(count, axes), edges(points)), value)
    return Problem(model, terms, error)


def known(box: Box, solution: Function) -> Callable[[nn.Module], float]:
    points = box.inside(10_000)
    return relative_error(points, solution(points))


# -- the list -------------------------------------------------------------------------------------------------


def burgers(device: str, nu: float, width: int) -> Problem:
    box = Box((0.0, -1.0), (1.0, 1.0), device)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1))
        return slopes[..., 0] + u * slopes[..., 1] - nu * bend

    model = network(device, 2, *[width] * 4, 1)
    wave, still = lambda x: -torch.sin(PI * x[:, 1:]), lambda x: torch.zeros_like(x[:, 1:])
    return evolution(box, model, equation, wave, known(box, partial(cole_hopf, nu)), still)


def cole_hopf(nu: float, points: Tensor) -> Tensor:
    """u = -int sin(pi y) g dz / int g dz,  g = exp(-cos(pi y) / (2 pi nu) - z^2),  y = x - 2 sqrt(nu t) z."""
    from numpy.polynomial.hermite import hermgauss

    z, weights = (torch.from_numpy(array).to(points.device) for array in hermgauss(180))
    y = PI * (points[:, 1:] - 2 * (nu * points[:, :1]).sqrt() * z)
    exponents = -torch.cos(y) / (2 * PI * nu)
    f = weights * torch.exp(exponents - exponents.amax(1, keepdim=True))
    return -(torch.sin(y) * f).sum(1, keepdim=True) / f.sum(1, keepdim=True)


def poisson(device: str, *widths: int) -> Problem:
    """-Lap u = f in the unit cube: a wave in 2 dimensions, cosines in 5, and sum x_{2i-1} x_{2i} in 10."""
    d = widths[0]
    box = Box((0.0,) * d, (1.0,) * d, device)
    solutions: dict[int, tuple[Function, float]] = {
        2: (lambda x: torch.sin(PI * x).prod(1, keepdim=True), 2 * PI**2),
        5: (lambda x: torch.cos(PI * x).sum(1, keepdim=True), PI**2),
        10: (lambda x: (x[:, 0::2] * x[:, 1::2]).sum(1, keepdim=True), 0.0),
    }
    solution, factor = solutions[d]

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.laplacian(model, x).laplacian + factor * solution(x)

    edges = (lambda count: (points := box.faces(count, tuple(range(d))), solution(points)), value)
    model = network(device, *widths, 1)
    return Problem(model, {"equation": (box.inside, equation), "edges": edges}, known(box, solution))


def helmholtz(device: str) -> Problem:
    """Lap u + u = f with u = sin(pi x) sin(4 pi y)."""
    box = Box((-1.0, -1.0), (1.0, 1.0), device)

    def solution(x: Tensor) -> Tensor:
        return torch.sin(PI * x[:, :1]) * torch.sin(4 * PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, _, bend = woodbury.laplacian(model, x)
        return bend + u - (1 - 17 * PI**2) * solution(x)

    model = network(device, 4, 30, 30, 30, 30, 1, before=woodbury.Periodic(0, 1))
    terms = {"equation": (box.inside, equation), "edges": (lambda count: box.faces(count, (0, 1)), value)}
    return Problem(model, terms, known(box, solution))


def heat(device: str) -> Problem:
    """u_t = Lap u / 4 in four dimensions."""
    box = Box((0.0,) * 5, (1.0,) * 5, device)

    def solution(x: Tensor) -> Tensor:
        return torch.exp(-x[:, :1]) * torch.sin(2 * x[:, 1:]).sum(1, keepdim=True)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        _, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1, 1, 1, 1))
        return slopes[..., 0] - bend / 4

    model = network(device, 5, 64, 64, 48, 48, 1)
    return evolution(box, model, equation, solution, known(box, solution), solution)


def allen_cahn(device: str) -> Problem:
    """u_t = 1e-4 u_xx + 5 (u - u^3), periodic, from x^2 cos(pi x)."""
    box = Box((0.0, -1.0), (1.0, 1.0), device)

    def start(x: Tensor) -> Tensor:
        return x[:, 1:].square() * torch.cos(PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, slopes, bend = woodbury.laplacian(model, x, weights=(0, 1))
        return slopes[..., 0] - 1e-4 * bend - 5 * (u - u**3)

    model = network(device, 3, 40, 40, 40, 40, 1, before=woodbury.Periodic(1))
    points, truth = _allen_cahn_reference()
    return evolution(box, model, equation, start, relative_error(points.to(device), truth.to(device)), None)


def _allen_cahn_reference(modes: int = 1024, steps: int = 4000) -> tuple[Tensor, Tensor]:
    """By Fourier series in x and fourth-order exponential steps in t (Cox and Matthews 2002)."""
    import numpy as np

    x, h = -1 + 2 * np.arange(modes) / modes, 1 / steps
    linear = -1e-4 * (PI * np.fft.fftfreq(modes, 1 / modes)) ** 2 + 5
    roots = h * linear[:, None] + np.exp(1j * PI * (np.arange(1, 33) - 0.5) / 32)

    def mean(function: Callable[[Any], Any]) -> Any:  # over a circle, where the quotients are stable
        return h * np.real(function(roots).mean(1))

    half = mean(lambda z: (np.exp(z / 2) - 1) / z)
    f1 = mean(lambda z: (-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    f2 = mean(lambda z: (2 + z + np.exp(z) * (-2 + z)) / z**3)
    f3 = mean(lambda z: (-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)

    def cubic(v: Any) -> Any:
        return np.fft.fft(-5 * np.real(np.fft.ifft(v)) ** 3)

    v, rows = np.fft.fft(x**2 * np.cos(PI * x)), []
    whole, part = np.exp(h * linear), np.exp(h * linear / 2)
    for step in range(1, steps + 1):
        n = cubic(v)
        a = part * v + half * n
        na = cubic(a)
        nb = cubic(part * v + half * na)
        nc = cubic(part * a + half * (2 * nb - n))
        v = whole * v + n * f1 + 2 * (na + nb) * f2 + nc * f3
        if step % 100 == 0:
            rows.append((step * h, np.real(np.fft.ifft(v))[::8]))
    points = np.array([[t, place] for t, _ in rows for place in x[::8]])
    return torch.from_numpy(points), torch.from_numpy(np.concatenate([row for _, row in rows])).unsqueeze(1)


def wave(device: str) -> Problem:
    """u_tt = u_xx, from two waves at rest."""
    box = Box((0.0, 0.0), (1.0, 1.0), device)

    def solution(x: Tensor) -> Tensor:
        t, place = (PI * x).split(1, 1)
        return torch.sin(place) * torch.cos(t) + 0.5 * torch.sin(3 * place) * torch.cos(3 * t)

    def rest(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.derivatives(model, x, [(0,)])[0]

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        return woodbury.laplacian(model, x, weights=(1, -1)).laplacian

    model = network(device, 2, 30, 30, 30, 1)
    problem = evolution(box, model, equation, solution, known(box, solution), solution)
    return Problem(model, {**problem.terms, "rest": (box.start, rest)}, problem.error)


def korteweg_de_vries(device: str) -> Problem:
    """u_t + 6 u u_x + u_xxx = 0: a soliton of speed 4."""
    box = Box((0.0, -4.0), (0.5, 6.0), device)

    def solution(x: Tensor) -> Tensor:
        return 2 / torch.cosh(x[:, 1:] - 4 * x[:, :1]).square()

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, u_t, u_x, u_xxx = woodbury.derivatives(model, x, [(), (0,), (1,), (1, 1, 1)])
        return u_t + 6 * u * u_x + u_xxx

    model = network(device, 2, 30, 30, 30, 1)
    return evolution(box, model, equation, solution, known(box, solution), solution)


class _WithNumber(nn.Module):
    """A network, and a number to find."""

    def __init__(self, net: nn.Module, first: float) -> None:
        super().__init__()
        self.net, self.number = net, nn.Parameter(torch.tensor(first, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def inverse(device: str) -> Problem:
    """c of u_t = c u_xx from 200 measurements; the error is that of c."""
    box, c = Box((0.0, 0.0), (1.0, 1.0), device), 0.1

    def solution(x: Tensor) -> Tensor:
        return torch.exp(-c * PI**2 * x[:, :1]) * torch.sin(PI * x[:, 1:])

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        _, slopes, bend = woodbury.laplacian(find.net, x, weights=(0, 1))
        return slopes[..., 0] - find.number * bend

    find = _WithNumber(network(device, 2, 20, 20, 1), 1.0).to(device)
    places = box.inside(200)
    terms = {"equation": (box.inside, equation), "data": ((places, solution(places)), value)}
    return Problem(find, terms, lambda model: abs(find.number.item() / c - 1))


def eigenvalue(device: str) -> Problem:
    """The smallest E of -u'' / 2 + x^2 u / 2 = E u; the error is that of E = 1/2."""
    box = Box((-6.0,), (6.0,), device)

    def equation(model: nn.Module, x: Tensor) -> Tensor:
        u, _, bend = woodbury.laplacian(find.net, x)
        return -bend / 2 + x.square() * u / 2 - find.number * u

    find = _WithNumber(network(device, 1, 20, 20, 1), 0.3).to(device)
    middle, ends = torch.zeros(1, 1, dtype=torch.float64, device=device), box.faces(2, (0,))
    terms = {
        "equation": (box.inside, equation),
        "scale": ((middle, torch.ones_like(middle)), value),
        "ends": (torch.tensor([[-6.0], [6.0]], dtype=torch.float64).to(ends), value),
    }
    return Problem(find, terms, lambda model: abs(find.number.item() / 0.5 - 1))


PROBLEMS: dict[str, Callable[[str], Problem]] = {
    "burgers, nu 0.01/pi, 4x20": lambda device: burgers(device, 0.01 / PI, 20),
    "burgers, nu 0.01/pi, 4x40": lambda device: burgers(device, 0.01 / PI, 40),
    "burgers, nu 0.01, 4x20": lambda device: burgers(device, 0.01, 20),
    "allen-cahn": allen_cahn,
    "helmholtz": helmholtz,
    "heat 4+1-d": heat,
    "poisson 2-d": lambda device: poisson(device, 2, 32, 32),
    "poisson 5-d": lambda device: poisson(device, 5, 64, 64, 48, 48),
    "poisson 10-d": lambda device: poisson(device, 10, 256, 256, 128, 128),
    "kdv": korteweg_de_vries,
    "wave": wave,
    "inverse": inverse,
    "eigenvalue": eigenvalue,
}
