"""First-order rivals from torch.optim behind the same `step(inputs, targets)`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._batch import check_batch
from woodbury._choice import check_number
from woodbury.device.scalars import scalar
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.settings import check_model_and_loss, explain_inputs
from woodbury.parallel.group import all_processes
from woodbury.products import loss_of
from woodbury.quadratic.passes import check_loss


class FirstOrder(torch.optim.Optimizer):
    """Makes an optimizer of torch.optim take a batch and return a `StepInfo`.

    `damping`, `ratio` and `predicted` of the info are nan.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, forward: Forward | None, **settings: Any) -> None:
        """settings: handed to the optimizer, which refuses what it does not know."""
        check_model_and_loss(model, loss)
        if all_processes().size > 1:
            raise ValueError("sgd and adam are for one process: use torch.optim with DistributedDataParallel")
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if name in settings:
                check_number(name, settings[name])
        self.model, self.loss, self.forward = model, loss, forward or call_model
        self.last: StepInfo | None = None
        super().__init__((p for p in model.parameters() if p.requires_grad), **settings)

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "loss", "forward", "last")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in names}}

    def step(self, inputs: Any = None, targets: Tensor | None = None) -> StepInfo:  # type: ignore[override]
        """One gradient step on the mean loss of the batch."""
        try:
            check_batch(inputs, targets)
        except (TypeError, ValueError):
            explain_inputs(inputs)
            raise
        self.zero_grad()
        value = loss_of(self.loss, self.forward(self.model, inputs), targets)
        loss = check_loss(scalar(value.detach()))
        value.backward()
        super().step()
        absent = math.nan
        self.last = StepInfo.later(Numbers(loss, absent, absent, absent, absent, True))
        return self.last


class SGD(FirstOrder, torch.optim.SGD):
    """torch.optim.SGD behind the common contract."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        forward: Forward | None = None,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(model, loss, forward, **settings)


class Adam(FirstOrder, torch.optim.Adam):
    """torch.optim.Adam behind the common contract."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        forward: Forward | None = None,
    ) -> None:
        super().__init__(model, loss, forward, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
