"""Tiny problems in float64 that the tests run over."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Linear layers at several depths of the module tree, with a skip connection and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.body = nn.ModuleDict(
            {"a": nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), "b": nn.Linear(6, 6, bias=False)}
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        h = self.stem(x)
        h = h + self.body["a"](h)
        h = torch.sigmoid(self.frozen(h))
        return self.head(nn.functional.silu(self.body["b"](h)))


class Sentences(nn.Module):
    """Embedding, norm, attention written out from three projections, a feed-forward part, mean, head."""

    def __init__(self, words=7, width=4, padding=0):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=padding)
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.words(x)
        v = self.before(h)
        scores = self.query(v) @ self.key(v).transpose(1, 2) / 2
        h = h + scores.softmax(-1) @ self.value(v)
        return self.head((h + self.feed(self.after(h))).mean(1))


class Pictures(nn.Module):
    """Convolutions, norms, a slope and a head on flattened features."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.b, self.slope = nn.Conv2d(4, 4, 2, stride=2, groups=2, bias=False), nn.PReLU(4)
        self.up, self.still = nn.ConvTranspose2d(4, 2, 2), nn.BatchNorm2d(2)
        self.head = nn.Linear(2 * 9, 3)
        self.still.eval()

    def forward(self, x):
        h = F.relu(self.norm(self.a(x)), inplace=True)
        return self.head(torch.tanh(self.still(self.up(self.slope(self.b(h))))).flatten(1))


class Tokens(nn.Module):
    """A class at each position of a sentence, from the words up to there; outputs (n, C, T)."""

    def __init__(self, words=6, width=3, classes=4):
        super().__init__()
        self.words, self.mix = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.words(x)).cumsum(1))).transpose(1, 2)


def mlp(*widths, activation=nn.Tanh, bias=True):
    layers = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Problem:
    model: nn.Module
    loss: nn.Module
    inputs: Any
    targets: torch.Tensor

    @property
    def count(self):
        """What the loss divides by."""
        if getattr(self.loss, "reduction", "mean") == "sum":
            return 1
        if isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss) and not self.targets.is_floating_point():
            labels = self.targets[self.targets != self.loss.ignore_index]
            return len(labels) if self.loss.weight is None else float(sum(self.loss.weight[i] for i in labels))
        if isinstance(self.loss, nn.CrossEntropyLoss) and self.targets.dim() > 2:
            return len(self.targets) * self.targets[0, 0].numel()
        return len(self.targets)


def _class_targets(n, classes):
    return torch.randint(classes, (n,))


def _some_ignored(targets, index=-100):
    """Some of the targets and all of sample 6."""
    targets = targets.clone()
    targets.view(-1)[2::5] = index
    targets[6] = index
    return targets


def _distributions(n, classes):
    return torch.rand(n, classes, dtype=torch.float64).softmax(1)


N = 7  # samples: different from every number of classes, outputs and factor columns below

PROBLEMS = {
    "softmax": lambda: Problem(mlp(5, 6, 4), nn.CrossEntropyLoss(), torch.randn(N, 5), _class_targets(N, 4)),
    "softmax-two-classes": lambda: Problem(
        mlp(4, 5, 2), nn.CrossEntropyLoss(), torch.randn(N, 4), _class_targets(N, 2)
    ),
    "softmax-probabilities": lambda: Problem(
        mlp(5, 6, 3), nn.CrossEntropyLoss(), torch.randn(N, 5), _distributions(N, 3)
    ),
    "softmax-unnormalised": lambda: Problem(
        mlp(5, 6, 3), nn.CrossEntropyLoss(), torch.randn(N, 5), 3 * torch.rand(N, 3, dtype=torch.float64)
    ),
    "softmax-smoothed": lambda: Problem(
        mlp(5, 6, 3), nn.CrossEntropyLoss(label_smoothing=0.2), torch.randn(N, 5), _class_targets(N, 3)
    ),
    "logistic": lambda: Problem(
        mlp(4, 6, 6, 1, activation=nn.Sigmoid),
        nn.BCEWithLogitsLoss(),
        torch.randn(N, 4),
        torch.randint(2, (N, 1)),
    ),
    "logistic-many": lambda: Problem(
        mlp(4, 6, 3),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 3.0])),
        torch.randn(N, 4),
        torch.rand(N, 3),
    ),
    "squared": lambda: Problem(mlp(3, 6, 2), nn.MSELoss(), torch.randn(N, 3), torch.randn(N, 2)),
    "squared-no-bias": lambda: Problem(
        mlp(3, 6, 2, bias=False), nn.MSELoss(), torch.randn(N, 3), torch.randn(N, 2)
    ),
    "in-place": lambda: Problem(
        nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        nn.CrossEntropyLoss(),
        torch.randn(N, 5),
        _class_targets(N, 3),
    ),
    "residual": lambda: Problem(Residual(), nn.CrossEntropyLoss(), torch.randn(N, 5), _class_targets(N, 3)),
    "one-layer": lambda: Problem(nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.randn(N, 4), _class_targets(N, 3)),
    "images": lambda: Problem(
        nn.Sequential(nn.Flatten(), *mlp(12, 5, 3)),
        nn.CrossEntropyLoss(),
        torch.randn(N, 3, 4),
        _class_targets(N, 3),
    ),
    "pictures": lambda: Problem(Pictures(), nn.CrossEntropyLoss(), torch.randn(N, 2, 4, 4), _class_targets(N, 3)),
    "sentences": lambda: Problem(
        Sentences(), nn.CrossEntropyLoss(), torch.randint(7, (N, 3)), _class_targets(N, 3)
    ),
    "softmax-ignored": lambda: Problem(
        mlp(5, 6, 3),
        nn.CrossEntropyLoss(ignore_index=-1),
        torch.randn(N, 5),
        _some_ignored(_class_targets(N, 3), -1),
    ),
    "tokens": lambda: Problem(Tokens(), nn.CrossEntropyLoss(), torch.randint(6, (N, 3)), torch.randint(4, (N, 3))),
    "tokens-ignored": lambda: Problem(
        Tokens(), nn.CrossEntropyLoss(), torch.randint(6, (N, 3)), _some_ignored(torch.randint(4, (N, 3)))
    ),
    "tokens-smoothed": lambda: Problem(
        Tokens(classes=3),
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
        torch.randint(6, (N, 4)),
        _some_ignored(torch.randint(3, (N, 4)), 1),
    ),
    "softmax-weighted": lambda: Problem(
        mlp(5, 6, 3),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 3.0]), label_smoothing=0.2, ignore_index=-1),
        torch.randn(N, 5),
        _some_ignored(_class_targets(N, 3), -1),
    ),
    "softmax-weighted-plain": lambda: Problem(
        mlp(5, 6, 3),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 0.0, 3.0])),
        torch.randn(N, 5),
        torch.tensor([0, 1, 2, 0, 2, 1, 0]),
    ),
    "softmax-weighted-probabilities": lambda: Problem(
        mlp(5, 6, 3),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 3.0]), label_smoothing=0.1),
        torch.randn(N, 5),
        _distributions(N, 3),
    ),
    "softmax-sum": lambda: Problem(
        mlp(5, 6, 3),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 3.0]), reduction="sum"),
        torch.randn(N, 5),
        _class_targets(N, 3),
    ),
    "likelihood": lambda: Problem(
        nn.Sequential(mlp(5, 6, 3), nn.LogSoftmax(1)), nn.NLLLoss(), torch.randn(N, 5), _class_targets(N, 3)
    ),
    "tokens-likelihood": lambda: Problem(
        nn.Sequential(Tokens(classes=3), nn.LogSoftmax(1)),
        nn.NLLLoss(weight=torch.tensor([0.5, 2.0, 3.0]), ignore_index=1),
        torch.randint(6, (N, 4)),
        _some_ignored(torch.randint(3, (N, 4)), 1),
    ),
    "tokens-sum": lambda: Problem(
        Tokens(),
        nn.CrossEntropyLoss(reduction="sum"),
        torch.randint(6, (N, 3)),
        _some_ignored(torch.randint(4, (N, 3))),
    ),
    "logistic-weighted": lambda: Problem(
        mlp(4, 6, 3),
        nn.BCEWithLogitsLoss(weight=torch.tensor([0.5, 2.0, 3.0])),
        torch.randn(N, 4),
        torch.rand(N, 3),
    ),
    "logistic-sum": lambda: Problem(
        mlp(4, 6, 3),
        nn.BCEWithLogitsLoss(
            weight=torch.tensor([0.5, 2.0, 3.0]), pos_weight=torch.tensor([2.0, 0.5, 1.0]), reduction="sum"
        ),
        torch.randn(N, 4),
        torch.rand(N, 3),
    ),
    "squared-sum": lambda: Problem(
        mlp(3, 6, 2), nn.MSELoss(reduction="sum"), torch.randn(N, 3), torch.randn(N, 2)
    ),
    "huber": lambda: Problem(mlp(3, 6, 2), nn.HuberLoss(delta=0.7), torch.randn(N, 3), torch.randn(N, 2)),
    "smooth-absolute": lambda: Problem(
        mlp(3, 6, 2), nn.SmoothL1Loss(beta=0.6, reduction="sum"), torch.randn(N, 3), torch.randn(N, 2)
    ),
    "absolute": lambda: Problem(mlp(3, 6, 2), nn.L1Loss(), torch.randn(N, 3), torch.randn(N, 2)),
    "counts": lambda: Problem(
        mlp(3, 6, 2), nn.PoissonNLLLoss(full=True), torch.randn(N, 3), torch.randint(4, (N, 2))
    ),
    "counts-by-rate": lambda: Problem(
        nn.Sequential(mlp(3, 6, 2), nn.Softplus()),
        nn.PoissonNLLLoss(log_input=False, reduction="sum"),
        torch.randn(N, 3),
        torch.randint(3, (N, 2)),
    ),
    "gaussian": lambda: Problem(
        mlp(3, 6, 2),
        nn.GaussianNLLLoss(full=True, eps=0.2),
        torch.randn(N, 3),
        torch.stack([torch.randn(N, 2), torch.rand(N, 2)], dim=1),
    ),
    "pixels": lambda: Problem(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 1)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        torch.randn(N, 2, 2, 3),
        torch.rand(N, 3, 1, 2),
    ),
}
# parameters shared over positions: not for KFAC
SHARED = [
    *("pictures", "sentences", "tokens", "tokens-ignored", "tokens-smoothed", "pixels"),
    *("tokens-likelihood", "tokens-sum"),
]


def make(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    problem = PROBLEMS[name]()
    problem.model.to(dtype)
    problem.loss.to(dtype)
    if problem.inputs.is_floating_point():
        problem.inputs = problem.inputs.to(dtype)
    labels = isinstance(problem.loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if problem.targets.is_floating_point() or not labels:
        problem.targets = problem.targets.to(dtype)
    return problem


every_problem = pytest.mark.parametrize("name", list(PROBLEMS))
