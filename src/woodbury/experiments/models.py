"""Networks of the experiments."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """A network of linear layers of the given widths with sigmoids between them.

    The weights depend on `seed` alone; torch's global random state is left as it was.
    """
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])  # the last layer gives logits
