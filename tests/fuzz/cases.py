"""One random problem: a model, a loss, a batch, and what the documentation promises for them."""

import math
import random
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import woodbury

from .models import Builder, Function, Parts, bare, in_turn

N_MORE = 4  # samples beside the batch, for full=


def log_cosh(outputs, targets):
    d = outputs - targets
    return d + nn.functional.softplus(-2 * d)


class LogCosh(nn.Module):
    """A convex loss whose rule says nothing but its values."""

    def forward(self, outputs, targets):
        return log_cosh(outputs, targets).mean()


class Scaled(nn.Module):
    """3 |y - t|^2 / C with a rule written out, e included."""

    def forward(self, outputs, targets):
        return 3 * (outputs - targets).square().mean()


class PerOutput(LogCosh):
    """The same loss with a rule that returns one value per output instead of one per sample."""


@woodbury.register_loss(LogCosh)
class LogCoshRule(woodbury.LossRule):
    def values(self, loss, outputs, targets):
        return log_cosh(outputs, targets).mean(1)


@woodbury.register_loss(PerOutput)
class PerOutputRule(woodbury.LossRule):
    def values(self, loss, outputs, targets):
        return log_cosh(outputs, targets)


@woodbury.register_loss(Scaled)
class ScaledRule(woodbury.LossRule):
    def values(self, loss, outputs, targets):
        return 3 * (outputs - targets).square().mean(1)

    def residual(self, loss, outputs, targets):
        return (outputs - targets) * (6 / outputs.shape[1])

    def factor(self, loss, outputs, targets):
        root = (6 / outputs.shape[1]) ** 0.5
        columns = root * torch.eye(outputs.shape[1], dtype=outputs.dtype).expand(len(outputs), -1, -1)
        return columns, root * (outputs - targets)


@dataclass
class Case:
    """A problem with its data: all N samples, of which a batch has the first n."""

    model: nn.Module
    loss: nn.Module
    x: torch.Tensor  # (N, ...)
    scale: torch.Tensor | None  # (N,): a second input, beside x
    targets: torch.Tensor | None
    n: int
    style: str  # how a batch is nested
    dtype: torch.dtype
    forward: Any = None
    features: set = field(default_factory=set)
    needs_fallback: bool = False
    mixes: bool = False
    random: bool = False  # draws random numbers
    running: bool = False  # a pass changes buffers
    twice: bool = True  # second derivatives exist
    refused: str | None = None  # why it must be refused
    may_refuse: str | None = None  # why it may be

    def inputs(self, index):
        """The batch of these samples, as the model takes it."""
        x = self.x[index]
        if self.style == "tensor":
            return x
        scale = self.scale[index]
        return {
            "dict": {"x": x, "scale": scale, "note": "kept"},
            "tuple": (x, scale),
            "list": [x, scale, 1.0],
            "whole": (x, scale, torch.full((97,), 0.5, dtype=x.dtype if x.is_floating_point() else self.dtype)),
            "per-sample-list": {"x": x, "scale": scale.tolist()},
            "per-sample-numpy": {"x": x, "scale": np.asarray(scale)},
        }[self.style]

    def target(self, index):
        return None if self.targets is None else self.targets[index]

    def batch(self):
        index = torch.arange(self.n)
        return self.inputs(index), self.target(index)

    def to(self, dtype, model=None):
        """The same problem in another type of numbers, with a copy of this model, or of its own."""
        wide = {"model": deepcopy(self.model if model is None else model).to(dtype), "dtype": dtype}
        wide["loss"] = deepcopy(self.loss).to(dtype)
        for name in ("x", "scale", "targets"):
            value = getattr(self, name)
            wide[name] = value if value is None or not value.is_floating_point() else value.to(dtype)
        return replace(self, **wide)


def nested(net):
    """A model whose inputs are nested: net(x) times one number per sample."""
    return Parts(lambda m, batch: scaled(m.net, batch), net=net)


def scaled(model, batch):
    """forward= for nested batches."""
    if isinstance(batch, dict):
        x, scale, more = batch["x"], batch["scale"], 0.0
    else:
        x, scale, *rest = batch
        more = rest[0] if rest else 0.0
        more = more[0] if isinstance(more, torch.Tensor) else more
    outputs = model(x)
    scale = torch.as_tensor(scale, dtype=outputs.dtype)
    return outputs * scale.reshape(-1, *[1] * (outputs.dim() - 1)) + more


def slopes(model, x):
    """forward=: u and the sum of its derivatives in x, as in a differential equation (first order)."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        u = model(point)
        (du,) = torch.autograd.grad(u.sum(), point, create_graph=True)
    return torch.cat([u, du.sum(1, keepdim=True)], dim=1)


def laplacians(model, x):
    """forward=: -u'' - u of a network of x, by torch.func."""

    def laplacian(y):
        return torch.func.hessian(lambda z: model(z).squeeze(-1))(y).diagonal().sum()

    return torch.func.vmap(laplacian)(x).unsqueeze(1) + model(x)


def transposed(model, x):
    """forward=: classes second."""
    return model(x).movedim(-1, 1)


def make_case(seed, number):
    """Case `number` of a seed: the same on every machine."""
    rng = random.Random(1_000_003 * seed + number)
    torch.manual_seed(rng.randrange(2**31))
    if rng.random() < 0.05:
        return _differential(rng), rng
    return _composed(rng), rng


def _differential(rng):
    """A network differentiated in its inputs."""
    n, width = rng.choice([4, 5, 6]), rng.choice([1, 2])
    layers = [nn.Linear(width, 4), rng.choice([nn.Tanh, nn.Softplus, nn.GELU])(), nn.Linear(4, 1)]
    features = {"PINN"}
    if rng.random() < 0.3:
        layers.insert(2, bare(4))
        features.add("bare")
    forward = rng.choice([slopes, slopes, laplacians])
    features.add(forward.__name__)
    model = nn.Sequential(*layers).double()
    x = torch.randn(n + N_MORE, width, dtype=torch.float64)
    targets = rng.choice([None, torch.randn_like(forward(model, x))])
    case = Case(model, nn.MSELoss(), x, None, targets, n, "tensor", torch.float64, forward, features)
    case.needs_fallback = True
    return case


def _composed(rng):
    mixing = rng.random() < 0.12
    n = rng.choice([4, 5, 6, 7] if mixing else [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    total = n + N_MORE
    kind = rng.choice(["vector", "vector", "sequence", "image", "words"])
    chain = not mixing and rng.random() < 0.1
    kind = rng.choice(["vector", "sequence"]) if chain else kind
    words = None
    if kind == "vector":
        x = torch.randn(total, rng.choice([2, 3, 4]))
    elif kind == "sequence":
        x = torch.randn(total, rng.choice([2, 3]), rng.choice([2, 3, 4]))
    elif kind == "image":
        x = torch.randn(total, rng.choice([1, 2]), rng.choice([3, 4]), 4)
    else:
        words = 5
        x = torch.randint(words, (total, 3))
    builder = Builder(rng, x, words)
    builder.features.add(kind)
    count = rng.choice([1, 2, 2, 3, 4])
    mix_at = rng.randrange(count) if mixing else None
    if chain:
        _chain(rng, builder)
    for index in range(0 if chain else count):
        builder.stage()
        if index == mix_at:
            builder.mix()
    loss, targets, why = _loss(rng, builder, _head(rng, builder))
    style = rng.choices(
        ["tensor", "dict", "tuple", "list", "whole", "per-sample-list", "per-sample-numpy"],
        [12, 1, 1, 1, 1, 0.5, 0.5],
    )[0]
    dtype = torch.float64 if builder.random or rng.random() < 0.8 else torch.float32
    model, forward, scale = in_turn(builder.stages), None, None
    if style != "tensor":
        builder.features.add(style)
        scale = 0.5 + torch.rand(total)
        if rng.random() < 0.5:
            model = nested(model)
        else:
            forward = scaled
    elif chain or rng.random() < 0.2:  # a chain, if it is one, without a module around it
        model = nn.Sequential(*builder.stages)
    case = Case(model, loss, x, scale, targets, n, style, dtype, forward, builder.features)
    case.needs_fallback, case.mixes, case.random = builder.needs_fallback, builder.mixes, builder.random
    case.running, case.twice = builder.running, builder.single
    case.refused = builder.refused or why
    if builder.mixes:
        case.features.add("mixes")
    if style.startswith("per-sample"):
        case.may_refuse = "one entry per sample that is not a tensor"
    if "pos_weight-part" in case.features:
        case.may_refuse = "pos_weight for part of the outputs"
    case.features.add(str(dtype).removeprefix("torch."))
    case.features.add(type(loss).__name__)
    case = case.to(dtype)
    if x.is_floating_point() and rng.random() < 0.1:
        case.features.add("strided-inputs")
        case.x = torch.stack([case.x, torch.zeros_like(case.x)], dim=-1)[..., 0]
    return case


def _chain(rng, builder):
    """Linear layers and activations alone, as `woodbury.model.chain` runs them by hand."""
    builder.features.add("chain")
    if builder.h.dim() > 2:
        builder.add("flatten", nn.Flatten())
    for _ in range(rng.choice([0, 1, 2, 3])):
        builder.add("Linear", nn.Linear(builder.h.shape[1], rng.choice([2, 3, 5]), bias=rng.random() < 0.8))
        builder.activation()


def _head(rng, builder):
    """Add the last stage; returns which kind of outputs it gives."""
    builder.features.add("head")
    h = builder.h
    if h.dim() > 2 and h[0].numel() > 30:
        builder.add("flatten", nn.Flatten())
    h = builder.h
    if h.dim() == 2 or rng.random() < 0.4:
        if h.dim() > 2:
            builder.add("flatten", nn.Flatten())
        builder.narrow()
        builder.add("Linear", nn.Linear(builder.h.shape[1], rng.choice([1, 2, 2, 3])))
        return "vector"
    if h.dim() == 3:
        builder.add("Linear-sequence", nn.Linear(h.shape[2], rng.choice([2, 3])))
        return "last"
    builder.add("Conv2d", nn.Conv2d(h.shape[1], 2, 1))
    return "second"


def _loss(rng, builder, kind):
    """A loss, targets, and why they must be refused, if they must."""
    features = builder.features
    name = rng.choice(["softmax", "softmax", "logistic", "squared", "registered"])
    h = builder.h
    if name == "softmax" and (h.shape[-1] if kind == "last" else h.shape[1]) < 2:
        name = "logistic"
    if name == "softmax":
        if kind == "last":
            builder.add("multi-dim", Function(torch.movedim, -1, 1))
        return _softmax(rng, builder.h, features)
    if kind == "vector" and h.shape[1] == 1 and rng.random() < 0.4:
        builder.add("one-dim", Function(torch.squeeze, 1))
    elif kind != "vector":
        features.add("multi-dim")
    h = builder.h
    if name == "logistic":
        return _logistic(rng, h, features)
    targets = torch.randn(h.shape)
    if name == "squared":
        if rng.random() < 0.15:
            features.add("no-targets")
            return nn.MSELoss(), None, None
        if rng.random() < 0.03:
            return nn.MSELoss(reduction="none"), targets, "reduction"
        if rng.random() < 0.2:
            features.add("counts")
            return nn.PoissonNLLLoss(full=rng.random() < 0.5, **_sum(rng, features)), targets.abs().round(), None
        return nn.MSELoss(**_sum(rng, features)), targets, None
    loss = rng.choice([LogCosh, LogCosh, Scaled, Scaled, PerOutput])()
    return loss, targets, "values (n, C)" if isinstance(loss, PerOutput) else None


def _sum(rng, features):
    """The option of a loss that is a sum, now and then."""
    if rng.random() < 0.85:
        return {}
    features.add("sum")
    return {"reduction": "sum"}


def _softmax(rng, h, features):
    classes = h.shape[1]
    shape = (len(h), *h.shape[2:])
    options = _sum(rng, features)
    if rng.random() < 0.15:
        features.add("class-weights")
        options["weight"] = 0.1 + torch.rand(classes)
    if rng.random() < 0.3:
        options["label_smoothing"] = rng.choice([0.1, 0.5])
        features.add("label_smoothing")
    if rng.random() < 0.25:
        features.add("class-probabilities")
        targets = torch.rand(h.shape)
        return nn.CrossEntropyLoss(**options), targets.softmax(1) if rng.random() < 0.7 else targets, None
    targets = torch.randint(classes, shape)
    if rng.random() < 0.1:
        targets = targets.to(torch.int32)
        features.add("int32-targets")
    elif rng.random() < 0.3:
        features.add("ignore_index")
        options["ignore_index"] = index = rng.choice([-100, -1, 0])
        targets[torch.rand(shape) < 0.3] = index
        targets[0] = classes - 1 if index != classes - 1 else 0  # one sample at least has a target
        targets[1:3] = targets[0]
    if rng.random() < 0.03:
        options["weight"] = torch.rand(classes + 1)
        return nn.CrossEntropyLoss(**options), targets, "class weights"
    return nn.CrossEntropyLoss(**options), targets, None


def _logistic(rng, h, features):
    targets = torch.rand(h.shape) if rng.random() < 0.5 else torch.randint(2, h.shape).float()
    if rng.random() < 0.15:
        targets = targets.round().long()
        features.add("int-targets")
    if rng.random() < 0.4:
        features.add("pos_weight")
        shape = rng.choice([(), (1,), h.shape[-1:], h.shape[1:], (1, *h.shape[1:])] if h.dim() > 1 else [(), (1,)])
        if rng.random() < 0.2 and h.dim() == 2:
            shape = (h.shape[1], 1)  # one number for each sample to torch, which no batch here fits
        if math.prod(shape) not in (1, h[0].numel()):
            features.add("pos_weight-part")
        weight = 0.5 + 2 * torch.rand(shape)
        wrong = h.dim() == 2 and len(shape) == 2 and shape[0] > 1
        return nn.BCEWithLogitsLoss(pos_weight=weight), targets, "pos_weight (C, 1)" if wrong else None
    options = _sum(rng, features)
    if rng.random() < 0.15 and h.dim() > 1:
        features.add("output-weights")
        options["weight"] = 0.1 + torch.rand(rng.choice([h.shape[-1:], h.shape[1:]]))
    elif rng.random() < 0.03:
        return nn.BCEWithLogitsLoss(weight=-torch.rand(h.shape[-1:])), targets, "weight"
    return nn.BCEWithLogitsLoss(**options), targets, None
