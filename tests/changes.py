"""A model with numbers of its own in Python, and what may change the numbers of its steps."""

import torch
from torch import nn

import woodbury


class Scaled(nn.Module):
    """A model with numbers of its own in Python."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3)
        self.scale, self.options = 1.0, {"power": 1.0}

    def forward(self, x):
        return self.scale * FACTOR * self.last(self.act(self.first(x))) ** self.options["power"]


FACTOR = 1.0


def exchange_an_activation(model, optimizer, monkeypatch):
    model.act = nn.Tanh()


def change_a_slope(model, optimizer, monkeypatch):
    model.act.negative_slope = 0.7


def hang_a_hook(model, optimizer, monkeypatch):
    model.first.register_forward_hook(lambda module, given, outputs: 2 * outputs)


def change_an_attribute(model, optimizer, monkeypatch):
    model.scale = 3.0


def change_an_entry(model, optimizer, monkeypatch):
    model.options["power"] = 2.0


def change_a_global(model, optimizer, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 0.5)


def change_the_curvature_samples(model, optimizer, monkeypatch):
    optimizer.curvature_samples = 3


def change_acceptance(model, optimizer, monkeypatch):
    optimizer.accept = 1e9


def change_the_loss(model, optimizer, monkeypatch):
    optimizer.loss.label_smoothing = 0.3


def give_a_forward(model, optimizer, monkeypatch):
    optimizer.forward = lambda net, x: net(2 * x)


def change_the_damping(model, optimizer, monkeypatch):
    optimizer.damping = woodbury.LevenbergMarquardt(boost=2.0, drop=0.5)


def replace_parameters(model, optimizer, monkeypatch):
    with torch.no_grad():
        model.first.weight.data = 2 * model.first.weight.data


CHANGES = [
    *(exchange_an_activation, change_a_slope, hang_a_hook, change_an_attribute, change_an_entry, change_a_global),
    *(change_the_curvature_samples, change_acceptance, change_the_loss, give_a_forward, change_the_damping),
    replace_parameters,
]
