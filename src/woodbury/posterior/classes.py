"""Probabilities of classes: the mean of a softmax over Gaussian logits, and how wide these should be.

Where classes are nearly separable the Gaussian is far too wide: the likelihood is flat towards larger logits only,
and P^-1 is as wide on the other side. With ten samples of one class, one logit and a prior of variance 100 the
probability of the other class is 0.010, and 0.126 by the Gaussian. So a share of its covariance is taken, between
0 and 1: the one that would have predicted each training sample best from all the others. No fit is repeated: with
r_i and H_i the derivatives of the loss of sample i, N(m, V) of its logits becomes without it, to second order,

    V' = (V^-1 - H_i)^-1,    m' = m + V' r_i
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_LEVERAGE = 1 - 1e-6  # a sample that alone determines a direction would leave none of it


def mean_softmax(mean: Tensor, covariance: Tensor) -> Tensor:
    """The mean of softmax(y), (n, C), over y of N(mean, covariance), by pairs of classes."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    of_pairs = (variance.unsqueeze(1) + variance.unsqueeze(2) - 2 * covariance).clamp_min(0)
    gaps = (mean.unsqueeze(1) - mean.unsqueeze(2)) / (1 + math.pi / 8 * of_pairs).sqrt()
    return (-gaps.logsumexp(2)).softmax(1)


def left_out(mean: Tensor, covariance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """m' and V' of each sample; of one that counts several times (targets sum to this) one is left out."""
    mass = targets.sum(1, keepdim=True)
    p = mean.softmax(1)
    once = mass.clamp_max(1.0)
    r = once * (p - targets / mass.clamp_min(torch.finfo(p.dtype).tiny))
    H = once.unsqueeze(2) * (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))
    identity = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
    wider = torch.linalg.solve(identity - _MOST_LEVERAGE * covariance @ H, covariance)
    return mean + (wider @ r.unsqueeze(2)).squeeze(2), wider


def share_by_left_out(mean: Tensor, covariance: Tensor, targets: Tensor) -> float:
    """Of `SHARES` the one with the least cross entropy of samples that are left out."""
    mean, covariance = left_out(mean, covariance, targets)
    losses = [-float((targets * mean_softmax(mean, share * covariance).log()).sum()) for share in SHARES]
    return SHARES[losses.index(min(losses))]
