"""Networks of the experiments: linear layers with sigmoids between them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """The network with layers of these widths; its weights depend on `seed` alone, not on torch's random state."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])  # the last layer gives logits
