"""Tiny problems in float64 that the tests run over."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import woodbury


class Residual(nn.Module):
    """Linear layers at several depths of the module tree, with a skip connection and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 6)
        parts = {"a": nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), "b": nn.Linear(6, 6, bias=False)}
        self.body = nn.ModuleDict(parts)
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


def network(*widths, seed=0, dtype=torch.float64):
    """The same network for the same seed."""
    torch.manual_seed(seed)
    return mlp(*widths).to(dtype)


class Counting(nn.Module):
    """Counts the passes through its inner module in a buffer, as BatchNorm does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


class Own(nn.Module):
    """A loss by the values of its samples, of which it is the mean unless `forward` says otherwise."""

    reduction = "mean"

    def __init__(self, values, forward=None):
        super().__init__()
        self.values, self.whole = values, forward

    def forward(self, outputs, targets):
        if self.whole is not None:
            return self.whole(outputs, targets)
        values = self.values(outputs, targets)
        return values.sum() if self.reduction == "sum" else values.mean()


@woodbury.register_loss(Own)
class OwnRule(woodbury.LossRule):
    def prepare(self, loss, outputs, targets):
        return targets

    def values(self, loss, outputs, targets):
        return loss.values(outputs, targets)


class Table:
    """What a table of pandas has of interest here."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values.numpy()

    def __iter__(self):
        return iter(["a", "b"])  # names of columns


@dataclass
class Problem:
    model: nn.Module
    loss: nn.Module
    inputs: Any
    targets: torch.Tensor

    def __iter__(self):
        """What the functions of `reference` and `woodbury.rows` take."""
        return iter((self.model, self.loss, self.inputs, self.targets))

    @property
    def count(self):
        """What the loss divides by."""
        if getattr(self.loss, "reduction", "mean") == "sum":
            return 1
        if isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss) and not self.targets.is_floating_point():
            counted = self.targets[self.targets != self.loss.ignore_index]
            return len(counted) if self.loss.weight is None else float(sum(self.loss.weight[i] for i in counted))
        if isinstance(self.loss, nn.CrossEntropyLoss) and self.targets.dim() > 2:
            return len(self.targets) * self.targets[0, 0].numel()
        return len(self.targets)


N = 7  # samples: different from every number of classes, outputs and factor columns below
THREE = torch.tensor([0.5, 2.0, 3.0])  # weights of classes or outputs


def labels(classes, *shape, ignored=None):
    """Classes; of those with a number that is to be ignored, some and all of sample 6."""
    targets = torch.randint(classes, (N, *shape))
    if ignored is not None:
        targets.view(-1)[2::5] = ignored
        targets[6] = ignored
    return targets


def distributions():
    return torch.rand(N, 3, dtype=torch.float64).softmax(1)


def on_vectors(model, loss, make, *arguments, **options):
    """A model on vectors, with targets by a function of what remains."""
    inputs = torch.randn(N, next(model.parameters()).shape[1])
    return Problem(model, loss, inputs, make(*arguments, **options))


def softmax(make=None, classes=3, **options):
    return on_vectors(mlp(5, 6, classes), nn.CrossEntropyLoss(**options), make or partial(labels, classes))


def logistic(**options):
    return on_vectors(mlp(4, 6, 3), nn.BCEWithLogitsLoss(**options), torch.rand, N, 3)


def squared(loss, **options):
    return on_vectors(mlp(3, 6, 2, **options), loss, torch.randn, N, 2)


def tokens(loss, classes=4, length=3, last=(), **options):
    """Classes at the positions of sentences; see `labels` for the options."""
    model = Tokens(classes=classes)
    model = nn.Sequential(model, *last) if last else model
    return Problem(model, loss, torch.randint(6, (N, length)), labels(classes, length, **options))


PROBLEMS = {
    "softmax": lambda: softmax(classes=4),
    "softmax-two-classes": lambda: on_vectors(mlp(4, 5, 2), nn.CrossEntropyLoss(), labels, 2),
    "softmax-probabilities": lambda: softmax(distributions),
    "softmax-unnormalised": lambda: softmax(lambda: 3 * torch.rand(N, 3, dtype=torch.float64)),
    "softmax-smoothed": lambda: softmax(label_smoothing=0.2),
    "logistic": lambda: on_vectors(mlp(4, 6, 6, 1, activation=nn.Sigmoid), nn.BCEWithLogitsLoss(), labels, 2, 1),
    "logistic-many": lambda: logistic(pos_weight=THREE.clone()),
    "squared": lambda: squared(nn.MSELoss()),
    "squared-no-bias": lambda: squared(nn.MSELoss(), bias=False),
    "in-place": lambda: on_vectors(
        nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), nn.CrossEntropyLoss(), labels, 3
    ),
    "residual": lambda: on_vectors(Residual(), nn.CrossEntropyLoss(), labels, 3),
    "one-layer": lambda: on_vectors(nn.Linear(4, 3), nn.CrossEntropyLoss(), labels, 3),
    "images": lambda: Problem(
        nn.Sequential(nn.Flatten(), *mlp(12, 5, 3)), nn.CrossEntropyLoss(), torch.randn(N, 3, 4), labels(3)
    ),
    "pictures": lambda: Problem(Pictures(), nn.CrossEntropyLoss(), torch.randn(N, 2, 4, 4), labels(3)),
    "sentences": lambda: Problem(Sentences(), nn.CrossEntropyLoss(), torch.randint(7, (N, 3)), labels(3)),
    "softmax-ignored": lambda: softmax(partial(labels, 3, ignored=-1), ignore_index=-1),
    "tokens": lambda: tokens(nn.CrossEntropyLoss()),
    "tokens-ignored": lambda: tokens(nn.CrossEntropyLoss(), ignored=-100),
    "tokens-smoothed": lambda: tokens(
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1), classes=3, length=4, ignored=1
    ),
    "softmax-weighted": lambda: softmax(
        partial(labels, 3, ignored=-1), weight=THREE.clone(), label_smoothing=0.2, ignore_index=-1
    ),
    "softmax-weighted-plain": lambda: softmax(
        lambda: torch.tensor([0, 1, 2, 0, 2, 1, 0]), weight=torch.tensor([0.5, 0.0, 3.0])
    ),
    "softmax-weighted-probabilities": lambda: softmax(distributions, weight=THREE.clone(), label_smoothing=0.1),
    "softmax-sum": lambda: softmax(weight=THREE.clone(), reduction="sum"),
    "likelihood": lambda: on_vectors(nn.Sequential(mlp(5, 6, 3), nn.LogSoftmax(1)), nn.NLLLoss(), labels, 3),
    "tokens-likelihood": lambda: tokens(
        nn.NLLLoss(THREE.clone(), ignore_index=1), classes=3, length=4, last=[nn.LogSoftmax(1)], ignored=1
    ),
    "tokens-sum": lambda: tokens(nn.CrossEntropyLoss(reduction="sum"), ignored=-100),
    "logistic-weighted": lambda: logistic(weight=THREE.clone()),
    "logistic-sum": lambda: logistic(weight=THREE.clone(), pos_weight=torch.tensor([2, 0.5, 1]), reduction="sum"),
    "squared-sum": lambda: squared(nn.MSELoss(reduction="sum")),
    "huber": lambda: squared(nn.HuberLoss(delta=0.7)),
    "smooth-absolute": lambda: squared(nn.SmoothL1Loss(beta=0.6, reduction="sum")),
    "absolute": lambda: squared(nn.L1Loss()),
    "counts": lambda: on_vectors(mlp(3, 6, 2), nn.PoissonNLLLoss(full=True), labels, 4, 2),
    "counts-by-rate": lambda: on_vectors(
        nn.Sequential(mlp(3, 6, 2), nn.Softplus()), nn.PoissonNLLLoss(False, reduction="sum"), labels, 3, 2
    ),
    "gaussian": lambda: on_vectors(
        mlp(3, 6, 2),
        nn.GaussianNLLLoss(full=True, eps=0.2),
        lambda: torch.stack([torch.randn(N, 2), torch.rand(N, 2)], dim=1),
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


def set_seed(seed):
    """As torch.manual_seed, which takes 1.5 ms to note, for each kind of device, from where it was called."""
    set_all = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    set_all(seed)


def make(name, dtype=torch.float64, seed=0):
    """A problem by its name, or by a function that makes it."""
    set_seed(seed)
    problem = name() if callable(name) else PROBLEMS[name]()
    problem.model.to(dtype)
    problem.loss.to(dtype)
    if problem.inputs.is_floating_point():
        problem.inputs = problem.inputs.to(dtype)
    classes = isinstance(problem.loss, nn.CrossEntropyLoss | nn.NLLLoss)
    if problem.targets.is_floating_point() or not classes:
        problem.targets = problem.targets.to(dtype)
    return problem


every_problem = pytest.mark.parametrize("name", list(PROBLEMS))


# what may change the numbers of steps


class Scaled(nn.Module):
    """A model with numbers of its own in Python."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3)
        self.scale, self.options = 1.0, {"power": 1.0}

    def forward(self, x):
        return self.scale * FACTOR * self.last(self.act(self.first(x))) ** self.options["power"]


FACTOR = 1.0


# by name: what is done to a model, its optimizer, or by a monkeypatch
CHANGES = {
    "an activation": lambda model, optimizer, patch: setattr(model, "act", nn.Tanh()),
    "a frozen layer": lambda model, optimizer, patch: model.first.requires_grad_(False),
    "a slope": lambda model, optimizer, patch: setattr(model.act, "negative_slope", 0.7),
    "a hook": lambda model, optimizer, patch: model.first.register_forward_hook(lambda *given: 2 * given[-1]),
    "an attribute": lambda model, optimizer, patch: setattr(model, "scale", 3.0),
    "an entry": lambda model, optimizer, patch: model.options.update(power=2.0),
    "a global": lambda model, optimizer, patch: patch.setitem(globals(), "FACTOR", 0.5),
    "curvature samples": lambda model, optimizer, patch: setattr(optimizer, "curvature_samples", 3),
    "acceptance": lambda model, optimizer, patch: setattr(optimizer, "accept", 1e9),
    "the loss": lambda model, optimizer, patch: setattr(optimizer.loss, "label_smoothing", 0.3),
    "forward": lambda model, optimizer, patch: setattr(optimizer, "forward", lambda net, x: net(2 * x)),
    "damping": lambda model, optimizer, patch: setattr(
        optimizer, "damping", woodbury.LevenbergMarquardt(boost=2.0, drop=0.5)
    ),
    "parameters": lambda model, optimizer, patch: setattr(model.first.weight, "data", 2 * model.first.weight.data),
}
