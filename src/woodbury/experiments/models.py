"""Networks of the experiments: linear layers of the given widths with sigmoids between them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """The network; its weights depend on `seed` alone, and torch's global random state is left as it was."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])  # the last layer gives logits


def parameter_count(widths: Sequence[int]) -> int:
    """Weights and biases of the network."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


def network_name(widths: Sequence[int]) -> str:
    """The network in tables and titles, as 784-500-10."""
    return "-".join(map(str, widths))
