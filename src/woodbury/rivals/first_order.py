"""First-order rivals from torch.optim behind the same `step(inputs, targets)`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from woodbury._batch import check_batch, is_empty
from woodbury._choice import check_number
from woodbury._vector import Space
from woodbury.device.scalars import scalar
from woodbury.model.capture import call_model
from woodbury.model.fallback import Forward
from woodbury.optim.info import Numbers, StepInfo
from woodbury.optim.settings import check_model_and_loss, explain_inputs
from woodbury.optim.shards import describe, find_group, start_alike
from woodbury.products import loss_of
from woodbury.quadratic.passes import check_loss


class FirstOrder(torch.optim.Optimizer):
    """A torch.optim optimizer that takes a batch and returns a `StepInfo`.

    The optimizer itself is `self.optimizer`, whose groups and state these are; `damping`, `ratio` and `predicted`
    of the info are nan. Where torch.distributed has several processes, each gives its part of the batch, and the
    gradient is that of the mean over all samples; process_group="self" lets each process train for itself.
    """

    process_group: Any = None

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        kind: type[torch.optim.Optimizer],
        forward: Forward | None = None,
        process_group: Any = None,
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
        self.process_group = process_group
        self._group = find_group(process_group, model)
        self._group.check_same(describe(SimpleNamespace(method=kind.__name__, loss=loss), self.param_groups))
        start_alike(self._group, self._trained())

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "loss", "forward", "optimizer", "last", "defaults", "process_group")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        super().__setstate__({"param_groups": self.optimizer.param_groups, "state": self.optimizer.state})
        self._group = find_group(self.process_group, self.model)

    def step(self, inputs: Any = None, targets: Tensor | None = None) -> StepInfo:  # type: ignore[override]
        """One gradient step on the mean loss of the batch.

        f = sum over processes of (n_r / n) f_r for n_r samples of process r, or the sum of f_r where f is a sum.
        """
        group = self._group
        with group.together():
            samples = 0 if group.size > 1 and is_empty(inputs) else self._count_samples(inputs, targets)
        (total,) = group.sums(samples)
        if not total:
            raise ValueError("empty batch: no process has a sample")
        self.optimizer.zero_grad()
        share = 1.0 if getattr(self.loss, "reduction", "mean") == "sum" else samples / total
        value = torch.zeros(())
        with group.together():
            if samples:
                value = share * loss_of(self.loss, self.forward(self.model, inputs), targets)
        own = value.detach()
        loss = check_loss(scalar(own) if group.size == 1 else group.sums(float(own))[0])
        with group.together():
            if samples:
                value.backward()
        if group.size > 1:
            self._sum_gradients()
        self.optimizer.step()
        absent = math.nan
        self.last = StepInfo.later(Numbers(loss, absent, absent, absent, absent, True))
        return self.last

    def _count_samples(self, inputs: Any, targets: Tensor | None) -> int:
        try:
            return check_batch(inputs, targets)
        except (TypeError, ValueError):
            explain_inputs(inputs)
            raise

    def _sum_gradients(self) -> None:
        """Put the sum over all processes into `grad`."""
        parameters = self._trained()
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in parameters]
        parts = {str(number): gradient for number, gradient in enumerate(gradients)}
        summed = self._group.sum_vector(Space.of(parts).pack(parts))
        for parameter, gradient in zip(parameters, summed.values(), strict=True):
            parameter.grad = gradient


def sgd(
    model: nn.Module,
    loss: nn.Module,
    lr: float = 1e-3,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    forward: Forward | None = None,
    process_group: Any = None,
) -> FirstOrder:
    """torch.optim.SGD behind the common contract."""
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return FirstOrder(model, loss, torch.optim.SGD, forward, process_group, **settings)


def adam(
    model: nn.Module,
    loss: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    forward: Forward | None = None,
    process_group: Any = None,
) -> FirstOrder:
    """torch.optim.Adam behind the common contract."""
    settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return FirstOrder(model, loss, torch.optim.Adam, forward, process_group, **settings)
