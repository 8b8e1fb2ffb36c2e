"""Random training loops against dense steps: `python -m tests.fuzz.loops --count 2000 --seed 0`.

A loop is a small network and a random expression of its outputs, written as loops write them: in place, by index,
with masks, sums, factors, scalers, accumulated micro-batches, hooks, gradients that are changed by hand. Each
expression is also there as a function of the outputs, from which the dense step follows by autograd alone. A loop
is right if its steps are the dense ones, or if `step` raises and leaves the parameters alone.
"""

import argparse
import random
import re
import sys
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

import woodbury
from tests.bounds import rounding
from tests.checks import loop_step

from .dense import dense_parameters

DAMPING = 0.3
WAY_OUT = re.compile(r"[Ww]ay|step\(\)|Write|one backward|two backward|zero_grad")

# -- expressions: as a loop writes them, and as functions of the outputs ----------------------------------------


def zero_first(y):
    y[:, 0] = 0
    return y


def scale_some(y):
    y[y.detach() > 0.2] *= 3
    y += 0.5
    return y


def zero_without_gradient(y):
    with torch.no_grad():
        y[:, 0] = 0
    return y


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


def into_a_buffer(y):
    buffer = torch.zeros_like(y.detach())
    buffer[:, 0] = y[:, 0]
    buffer[:, 1:] = 2 * y[:, 1:]
    return buffer


def third_left_out(gradient):
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


def mask_of(t):
    return ((t > 0.3) | (t == t.max(1, keepdim=True).values)).double()


def masked(y, t):
    return (mask_of(t) * (y - t) ** 2).sum() / mask_of(t).sum()


STEPS = {
    "nothing": (lambda y: y, lambda y: y),
    "double in place": (lambda y: y.mul_(2), lambda y: 2 * y),
    "zero by index": (zero_first, lambda y: torch.cat([0 * y[:, :1], y[:, 1:]], 1)),
    "scale by mask": (scale_some, lambda y: torch.where(y > 0.2, 3 * y, y) + 0.5),
    "elu in place": (lambda y: F.elu(y, 1.0, True), F.elu),
    "elu in place by name": (lambda y: F.elu(y, inplace=True), F.elu),
    "module in place": (lambda y: nn.CELU(inplace=True)(y), F.celu),
    "exp in place": (lambda y: y.exp_(), torch.exp),
    "view": (lambda y: y.view(-1).reshape(len(y), -1), lambda y: y),
    "noise": (lambda y: y + 0 * torch.randn_like(y), lambda y: y),
    "through a view": (lambda y: (y[:, 1].mul_(2), y)[1], None),
    "into a buffer": (into_a_buffer, None),
    "of detached outputs": (lambda y: (y.detach().mul_(1.5), y)[1], None),
    "of data": (lambda y: (y.data.mul_(2), y * 1)[1], None),
    "hook": (lambda y: (y.register_hook(third_left_out), y)[1], None),
    "without gradient": (zero_without_gradient, None),
    "dropout": (lambda y: F.dropout(y, 0.5), None),
    "random activation": (lambda y: F.rrelu(y - 5, training=True), None),
    "function of one's own": (Reversed.apply, None),
}
LOSSES = {
    "mse": (F.mse_loss, lambda y, t: (y - t).square().mean()),
    "sum over batch": (
        lambda y, t: F.mse_loss(y, t, reduction="sum") / len(y),
        lambda y, t: (y - t).square().sum() / len(y),
    ),
    "logistic sum": (
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="sum") / y.numel(),
        lambda y, t: (F.softplus(y) - t * y).mean(),
    ),
    "Poisson sum": (
        lambda y, t: F.poisson_nll_loss(y, t, reduction="sum").div(len(y)),
        lambda y, t: (y.exp() - y * t).sum() / len(y),
    ),
    "mean of a sum": (
        lambda y, t: F.mse_loss(y, t, reduction="none").sum(1).mean(),
        lambda y, t: (y - t).square().sum() / len(y),
    ),
    "constant added": (lambda y, t: F.mse_loss(y, t) + 5, lambda y, t: (y - t).square().mean() + 5),
    "mask": (masked, masked),
    "selected": (lambda y, t: F.mse_loss(y[mask_of(t) > 0], t[mask_of(t) > 0]), masked),
    "by sample": (
        lambda y, t: sum(F.mse_loss(y[i], t[i]) for i in range(len(y))) / len(y),
        lambda y, t: (y - t).square().mean(),
    ),
    "soft labels": (
        lambda y, t: F.cross_entropy(y, t.softmax(1)),
        lambda y, t: -(y.log_softmax(1) * t.softmax(1)).sum(1).mean(),
    ),
    "quartic": (lambda y, t: ((y - t) ** 4).mean(), lambda y, t: (y - t).pow(4).mean()),
    "picked classes": (
        lambda y, t: -F.log_softmax(y, 1)[torch.arange(len(t)), t.argmax(1)].sum(),
        lambda y, t: F.cross_entropy(y, t.argmax(1), reduction="sum"),
    ),
}


def multiply(model, factor):
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def add_one(parameter):
    parameter.grad.add_(1)


def hooked(register, change):
    """A hook on a bias, registered before the backward pass and removed after it."""

    def ending(loss, model, optimizer):
        handle = getattr(model[-1].bias, register)(change)
        loss.backward()
        handle.remove()

    return ending


def penalty(model):
    return 0.1 * model[0].weight.square().sum()


ENDINGS = {  # what happens to (the loss, the model, the optimizer), and the factor it comes to; None: must raise
    "backward": (lambda loss, model, optimizer: loss.backward(), 1.0),
    "half": (lambda loss, model, optimizer: (loss / 2).backward(), 0.5),
    "weight of backward": (lambda loss, model, optimizer: loss.backward(torch.full_like(loss, 3.0)), 3.0),
    "divided by hand": (lambda loss, model, optimizer: (loss.backward(), multiply(model, 1 / 3)), 1 / 3),
    "scaler": (lambda loss, model, optimizer: scaled(loss, optimizer, 1000.0), 1.0),
    "penalty": (lambda loss, model, optimizer: (loss.backward(), penalty(model).backward()), None),
    "penalty before": (lambda loss, model, optimizer: (penalty(model).backward(), loss.backward()), None),
    "unseen penalty": (lambda loss, model, _: (loss.backward(), torch.autograd.backward(penalty(model))), None),
    "by torch.autograd": (lambda loss, model, optimizer: torch.autograd.backward([loss]), None),
    "twice": (lambda loss, model, optimizer: (loss.backward(retain_graph=True), loss.backward()), None),
    "clipped by value": (
        lambda loss, model, optimizer: (loss.backward(), nn.utils.clip_grad_value_(model.parameters(), 1e-3)),
        None,
    ),
    "hook on a parameter": (hooked("register_hook", lambda g: 2 * g), None),
    "hook after accumulation": (hooked("register_post_accumulate_grad_hook", add_one), None),
    "one removed": (lambda loss, model, optimizer: (loss.backward(), setattr(model[0].bias, "grad", None)), None),
    "one changed": (lambda loss, model, optimizer: (loss.backward(), model[-1].bias.grad.add_(0.1)), None),
}


def scaled(loss, optimizer, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)


# -- loops --------------------------------------------------------------------------------------------------


class Loop:
    """A random loop: ordinary steps, and one of a kind that is random too unless it is given."""

    def __init__(self, seed, names=None, ordinary=None, how=None):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        samples, outputs, width = 2 * chance.randint(1, 4), chance.randint(2, 4), chance.randint(2, 5)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).double()
        self.inputs, self.targets = torch.randn(samples, 3).double(), torch.rand(samples, outputs).double()
        # the first of each table is ordinary, and drawn more often
        tables = [[*table, *[next(iter(table))] * (len(table) // 2)] for table in (STEPS, LOSSES, ENDINGS)]
        self.names = names or [chance.choice(table) for table in tables]
        self.parts = chance.choice([1, 2]) if self.names[::2] == ["nothing", "half"] else 1
        drawn = [chance.choice(list(LOSSES)) for _ in range(chance.randint(0, 3))]
        self.ordinary = drawn if ordinary is None else ordinary
        self.how = how or chance.choice(["watch", "closure"])
        settings = {"damping": woodbury.Constant(DAMPING), "guard": None, "watch": self.how == "watch"}
        self.optimizer = woodbury.GaussNewton(self.model, None, **settings)

    def __repr__(self):
        return f"{self.how}: {', '.join(self.names)} in {self.parts} part(s), after {self.ordinary}"

    def batches(self):
        return list(zip(self.inputs.chunk(self.parts), self.targets.chunk(self.parts), strict=True))

    def step(self, change, loss, ending):
        def backward():
            for x, t in self.batches():
                ending(loss(change(self.model(x)), t), self.model, self.optimizer)

        loop_step(self.optimizer, backward, self.how)

    def run(self):
        parts, self.parts = self.parts, 1
        for name in self.ordinary:
            self.step(STEPS["nothing"][0], LOSSES[name][0], ENDINGS["backward"][0])
        self.parts = parts
        (change, _), (loss, _), (ending, factor) = kinds = [
            table[name] for table, name in zip((STEPS, LOSSES, ENDINGS), self.names, strict=True)
        ]
        must_raise = kinds[0][1] is None or factor is None
        before, dense = self.parameters(), None if must_raise else self.dense(kinds)
        try:
            self.step(change, loss, ending)
        except ValueError as error:
            if not torch.equal(self.parameters(), before):
                return "WRONG: raised and moved"
            if must_raise and not WAY_OUT.search(str(error)):
                return f"WRONG: raised without a way out: {error}"
            return "raised as it must" if must_raise else f"raised: {str(error)[:60]}"
        if must_raise:
            return "WRONG: did not raise"
        expected, condition = dense
        error = (self.parameters() - expected).norm() / expected.norm()
        bound = rounding(len(expected), condition, steps=len(self.ordinary) + 1)
        return "right" if error <= bound else f"WRONG: relative error {error:.1e}, bound {bound:.1e}"

    def parameters(self):
        return torch.cat([own.detach().flatten() for own in self.model.parameters()])

    def dense(self, kinds):
        (_, change), (_, loss), (_, factor) = kinds

        def value(y):
            pieces = zip(y.chunk(self.parts), self.batches(), strict=True)
            return sum(factor * loss(change(own), t) for own, (_, t) in pieces)

        return dense_parameters(self.model, self.inputs, value, DAMPING)


def main(count, seed):
    results = Counter()
    for number in range(seed, seed + count):
        loop = Loop(number)
        result = loop.run()
        results[result] += 1
        if result.startswith("WRONG"):
            print(f"seed {number}: {loop}: {result}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    results = main(**vars(parser.parse_args()))
    for result, times in results.most_common():
        print(f"{times:6} {result}")
    sys.exit(any(result.startswith("WRONG") for result in results))
