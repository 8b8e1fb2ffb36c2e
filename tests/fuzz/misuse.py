"""Calls that must raise an error of the package which names the culprit."""

import torch
from torch import nn

import woodbury


def _problem():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.randn(5, 3), torch.randint(2, (5,))


def _step(change=None, **arguments):
    """A step of GaussNewton on a small problem with something wrong about it."""

    def call():
        model, x, t = _problem()
        options = {"loss": nn.CrossEntropyLoss(), **arguments}
        loss = options.pop("loss")
        if change is not None:
            model, x, t = change(model, x, t)
        woodbury.GaussNewton(model, loss, **options).step(x, t)

    return call


def _spoil(value):
    def change(model, x, t):
        x[3, 1] = value
        return model, x, t

    return change


class _Two(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x), x


def _parameters():
    model, _, _ = _problem()
    woodbury.GaussNewton(model.parameters())


def _no_batch():
    model, _, _ = _problem()
    woodbury.GaussNewton(model, nn.CrossEntropyLoss()).step()


def _inference():
    with torch.inference_mode():
        _step()()


def _autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _step()()


def _iterator():
    model, x, t = _problem()
    woodbury.GaussNewton(model, nn.CrossEntropyLoss()).step(x, t, full=iter([(x, t)]))


def _subset(subset):
    def call():
        model, x, t = _problem()
        woodbury.GaussNewton(model, nn.CrossEntropyLoss()).step(x, t, subset=subset)

    return call


def _later(name, value):
    """An option of the loss set to something bad after the optimizer was made."""

    def call():
        model, x, t = _problem()
        loss = nn.CrossEntropyLoss()
        optimizer = woodbury.GaussNewton(model, loss)
        optimizer.step(x, t)
        setattr(loss, name, value)
        optimizer.step(x, t)

    return call


MISUSES = {
    "lr=inf": _step(lr=float("inf")),
    "lr=nan": _step(lr=float("nan")),
    "lr=-1": _step(lr=-1.0),
    "lr=string": _step(lr="fast"),
    "momentum=1.5": _step(momentum=1.5),
    "weight_decay=-1": _step(weight_decay=-1.0),
    "accept=nan": _step(accept=float("nan")),
    "accept=string": _step(accept="often"),
    "damping=0": _step(damping=0.0),
    "damping=nan": _step(damping=float("nan")),
    "damping=string": _step(damping="little"),
    "damping=-1": _step(damping=-1.0),
    "blocks=unknown": _step(blocks="none"),
    "solver=unknown": _step(solver="lu"),
    "fallback=unknown": _step(fallback="jax"),
    "gram_dtype=half": _step(gram_dtype=torch.float16),
    "curvature_samples=0": _step(curvature_samples=0),
    "curvature_samples=9": _step(curvature_samples=9),
    "curvature_samples=1.5": _step(curvature_samples=1.5),
    "curvature_samples=True": _step(curvature_samples=True),
    "max_bytes=-1": _step(max_bytes=-1),
    "label_smoothing=1.5": _step(loss=nn.CrossEntropyLoss(label_smoothing=1.5)),
    "reduction=none": _step(loss=nn.CrossEntropyLoss(reduction="none")),
    "class-weights": _step(loss=nn.CrossEntropyLoss(weight=torch.ones(3))),
    "negative-weights": _step(loss=nn.CrossEntropyLoss(weight=-torch.ones(2))),
    "no-log-probabilities": _step(loss=nn.NLLLoss()),
    "memory=-1": _step(memory=-1),
    "unknown-loss": _step(loss=nn.SoftMarginLoss()),
    "unknown-option": _step(lerning_rate=1.0),
    "forward=5": _step(forward=5),
    "seed=string": _step(seed="a"),
    "nan-input": _step(_spoil(float("nan"))),
    "inf-input": _step(_spoil(float("inf"))),
    "few-targets": _step(lambda m, x, t: (m, x, t[:-1])),
    "no-targets": _step(lambda m, x, t: (m, x, None)),
    "target-out-of-range": _step(lambda m, x, t: (m, x, t + 1)),
    "list-targets": _step(lambda m, x, t: (m, x, t.tolist())),
    "empty-batch": _step(lambda m, x, t: (m, x[:0], t[:0])),
    "all-ignored": _step(lambda m, x, t: (m, x, torch.full_like(t, -100))),
    "frozen": _step(lambda m, x, t: (m.requires_grad_(False), x, t)),
    "two-outputs": _step(lambda m, x, t: (_Two(m), x, t)),
    "DataParallel": _step(lambda m, x, t: (nn.DataParallel(m), x, t)),
    "complex": _step(lambda m, x, t: (m.to(torch.complex64), x.to(torch.complex64), t)),
    "half": _step(lambda m, x, t: (m.bfloat16(), x.bfloat16(), t)),
    "meta": _step(lambda m, x, t: (m.to("meta"), x.to("meta"), t.to("meta"))),
    "complex-targets": _step(lambda m, x, t: (m, x, torch.randn(5, 2, dtype=torch.complex64)), loss=nn.MSELoss()),
    "wrong-shape-targets": _step(lambda m, x, t: (m, x, torch.randn(5, 1)), loss=nn.MSELoss()),
    "targets-above-1": _step(lambda m, x, t: (m, x, torch.full((5, 2), 2.0)), loss=nn.BCEWithLogitsLoss()),
    "parameters-for-model": _parameters,
    "step-without-batch": _no_batch,
    "inference_mode": _inference,
    "autocast": _autocast,
    "full=iterator": _iterator,
    "subset-twice": _subset([1, 1]),
    "subset-outside": _subset([5]),
    "subset-empty": _subset([]),
    "subset-floats": _subset([0.5]),
    "later-reduction": _later("reduction", "none"),
    "later-weight": _later("weight", torch.ones(3)),
}
