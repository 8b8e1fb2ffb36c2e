"""First-order rivals from torch.optim behind the same `step(inputs, targets)`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._batch import check_batch
from woodbury.device.scalars import scalar
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward
from woodbury.optim.passes import check_loss
from woodbury.optim.settings import check_model_and_loss, check_number, explain_inputs
from woodbury.optim.step import Numbers, StepInfo
from woodbury.products import loss_of


class FirstOrder(torch.optim.Optimizer):
    """A torch.optim optimizer that takes a batch and returns a `StepInfo`.

    The optimizer itself is `self.optimizer`, whose groups and state these are; `damping`, `ratio` and `predicted`
    of the info are nan.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        kind: type[torch.optim.Optimizer],
        forward: Forward | None = None,
        **settings: Any,  # handed to `kind`, which refuses what it does not know
    ) -> None:
        check_model_and_loss(model, loss)
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if name in settings:
                check_number(name, settings[name])
        self.model = model
        self.loss = loss
        self.forward = forward or call_model
        self.optimizer = kind((p for p in model.parameters() if p.requires_grad), **settings)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.state = self.optimizer.state
        self.last: StepInfo | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "loss", "forward", "optimizer", "last", "defaults")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        super().__setstate__({"param_groups": self.optimizer.param_groups, "state": self.optimizer.state})

    def step(self, inputs: Any = None, targets: Tensor | None = None) -> StepInfo:  # type: ignore[override]
        """One gradient step on the mean loss of the batch."""
        try:
            check_batch(inputs, targets)
        except (TypeError, ValueError):
            explain_inputs(inputs)
            raise
        self.optimizer.zero_grad()
        outputs = self.forward(self.model, inputs)
        value = loss_of(self.loss, outputs, targets)
        check_loss(scalar(value.detach()))
        value.backward()
        self.optimizer.step()
        absent = math.nan
        self.last = StepInfo.later(Numbers(scalar(value.detach()), absent, absent, absent, absent, True))
        return self.last


def sgd(
    model: nn.Module,
    loss: nn.Module,
    lr: float = 1e-3,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    forward: Forward | None = None,
) -> FirstOrder:
    """torch.optim.SGD behind the common contract."""
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return FirstOrder(model, loss, torch.optim.SGD, forward, **settings)


def adam(
    model: nn.Module,
    loss: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    forward: Forward | None = None,
) -> FirstOrder:
    """torch.optim.Adam behind the common contract."""
    settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return FirstOrder(model, loss, torch.optim.Adam, forward, **settings)
