"""Solve a long evolution slab by slab in time: each fit goes on from the network and the values of the last one.

The Korteweg-de Vries equation u_t + u u_x + 0.0025 u_xxx = 0, periodic in -1 < x < 1, from u = cos(pi x), a wave
that breaks up into solitons. The error |u_network - u| / |u| at the end of every slab is that beside a spectral u.

    python examples/slabs.py          # 10 slabs of 0.1, 40 steps each
    python examples/slabs.py 2 15     # the first two, 15 steps each: 22 s
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn

import woodbury

LENGTH, MODES = 0.1, 256  # of a slab; of the spectral solution
PLACES = torch.linspace(-1, 1, MODES + 1, dtype=torch.float64)[:-1]


def advance(values: Tensor, steps: int = 400) -> Tensor:
    """u at the places a slab later, by Runge-Kutta steps in Fourier space, around the exact linear part."""
    k, h = 1j * np.pi * np.fft.fftfreq(MODES, 1 / MODES), LENGTH / steps
    half, v = np.exp(-0.0025 * k**3 * h / 2), np.fft.fft(values.numpy())
    slope = lambda v: -h * k * np.fft.fft(np.real(np.fft.ifft(v)) ** 2) / 2  # noqa: E731
    for _ in range(steps):
        a = slope(v)
        b = slope(half * (v + a / 2))
        c = slope(half * v + b / 2)
        d = slope(half**2 * v + half * c)
        v = half**2 * (v + a / 6) + half * (b + c) / 3 + d / 6
    return torch.from_numpy(np.real(np.fft.ifft(v)))


def equation(model: nn.Module, points: Tensor) -> Tensor:
    """In s = 2 (t - start) / LENGTH - 1, as inputs belong in (-1, 1)."""
    u, u_s, u_x, u_xxx = woodbury.derivatives(model, points, [(), (0,), (1,), (1, 1, 1)])
    return u_s + LENGTH / 2 * (u * u_x + 0.0025 * u_xxx)


def main(slabs: int = 10, steps: int = 40) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)]
    model = nn.Sequential(woodbury.Periodic(1, harmonics=4), *layers).double()
    first, last = (torch.stack([torch.full_like(PLACES, s), PLACES], 1) for s in (-1.0, 1.0))
    draw, value = lambda count: 2 * torch.rand(count, 2, dtype=torch.float64) - 1, lambda model, x: model(x)
    truth, errors = torch.cos(torch.pi * PLACES), []
    start = truth.unsqueeze(1)
    for slab in range(1, slabs + 1):
        terms = woodbury.Equations(equation=(draw, equation), start=((first, start), value))
        woodbury.fit(model, terms, steps=steps, progress=False)
        start, truth = model(last).detach(), advance(truth)
        errors.append(float((start.squeeze(1) - truth).norm() / truth.norm()))
        print(f"t = {slab * LENGTH:.1f}: relative error {errors[-1]:.1e}", flush=True)
    return errors


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
