"""A model with numbers of its own in Python, and what may change the numbers of its steps."""

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
