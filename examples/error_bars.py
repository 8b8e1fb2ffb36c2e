"""`woodbury.posterior` beside laplace-torch on the same trained networks: the same numbers, and the time.

Two networks of tanh units with 3 inputs and 1 output, 200 samples of a noisy function, float64, one thread. Each
method gets the same prior and noise, and gives the variance of the output at 200 new inputs and the evidence. It
needs laplace-torch (`pip install --no-deps laplace-torch asdfghjkl==0.1a4`) and what requirements-peers.txt lists.

    OMP_NUM_THREADS=1 python examples/error_bars.py                # about a minute
    OMP_NUM_THREADS=1 python examples/error_bars.py --widths 10    # a small network alone
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import woodbury
from harness import tanh_network

PRIOR, NOISE = 1.0, 0.01
MOST = 20_000  # parameters up to which a matrix of all of them is formed
Method = Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, float]]


def problem(width: int, samples: int = 200) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained network, its data, and new inputs a little outside them as well."""
    torch.manual_seed(0)
    inputs = 2 * torch.rand(samples, 3, dtype=torch.float64) - 1
    targets = torch.sin(3 * inputs.sum(1, keepdim=True)) + NOISE**0.5 * torch.randn(samples, 1).double()
    model = tanh_network((3, width, width, 1))
    decay = 2 * NOISE * PRIOR / samples  # of the mean squared error, for this prior and this noise
    woodbury.fit(model, nn.MSELoss(), (inputs, targets), weight_decay=decay, steps=60, progress=False)
    return model, inputs, targets, 3 * torch.rand(samples, 3, dtype=torch.float64) - 1.5


def ours(model: nn.Module, inputs: Tensor, targets: Tensor, new: Tensor) -> tuple[Tensor, float]:
    posterior = woodbury.posterior(model, nn.MSELoss(), inputs, targets, prior=PRIOR, noise=NOISE)
    return posterior.variance(new)[:, 0], posterior.log_evidence


def theirs(structure: str) -> Method:
    def method(model: nn.Module, inputs: Tensor, targets: Tensor, new: Tensor) -> tuple[Tensor, float]:
        import laplace

        own = {"n_subset": len(inputs)} if structure == "gp" else {}
        approximation = laplace.Laplace(
            model,
            "regression",
            subset_of_weights="all",
            hessian_structure=structure,
            sigma_noise=NOISE**0.5,
            prior_precision=PRIOR,
            **own,
        )
        approximation.fit(DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs)))
        _, variance = approximation(new, pred_type="glm" if structure != "gp" else "gp")
        return variance.detach().flatten(), float(approximation.log_marginal_likelihood())

    return method


METHODS: dict[str, Method] = {
    "woodbury.posterior": ours,
    "laplace-torch, full": theirs("full"),
    "laplace-torch, gp": theirs("gp"),
    "laplace-torch, kron": theirs("kron"),
    "laplace-torch, diag": theirs("diag"),
}


def compare(width: int, repeats: int = 3) -> dict[str, dict[str, float]]:
    """Seconds, and how far variances (median factor) and evidence are from those of `woodbury.posterior`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # laplace-torch rounds its full matrix to the default type
    try:
        return _compare(problem(width), repeats)
    finally:
        torch.set_default_dtype(before)


def _compare(case: tuple[nn.Module, Tensor, Tensor, Tensor], repeats: int) -> dict[str, dict[str, float]]:
    exact, evidence = ours(*case)
    size = sum(own.numel() for own in case[0].parameters())
    result = {}
    for name, method in METHODS.items():
        if name.endswith("full") and size > MOST:
            continue
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                variance, own = method(*case)
            times.append(time.perf_counter() - started)
        off = (variance / exact).log().abs()
        result[name] = {
            "seconds": min(times),
            "factor": float(off.median().exp()),
            "largest": float(off.max().exp() - 1),
            "evidence": abs(own - evidence),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 300], help="of the two hidden layers")
    print(f"{'':22} {'seconds':>8} {'variance, median factor':>24} {'largest error':>14} {'evidence off by':>16}")
    for width in parser.parse_args().widths:
        print(f"3-{width}-{width}-1, {width * width + 6 * width + 1:,} parameters")
        for name, own in compare(width).items():
            numbers = f"{own['seconds']:8.3f} {own['factor']:24.3f} {own['largest']:14.1e} {own['evidence']:16.2e}"
            print(f"  {name:20} {numbers}", flush=True)


if __name__ == "__main__":
    main()
