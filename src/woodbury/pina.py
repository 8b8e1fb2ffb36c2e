"""PINA: its physics-informed solver with Gauss-Newton steps.

>>> from woodbury.pina import PINN  # in place of: from pina.solver import PINN
>>> trainer = Trainer(PINN(problem, model), max_epochs=100, max_time={"minutes": 1})
>>> trainer.train()

Each condition of a batch is a term with the residuals that PINA squares. Steps are those of `woodbury.fit`: plain
Levenberg-Marquardt steps, and with a search once they creep. They move only if the loss of the batch falls, which
without `batch_size` is that of all points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pina import LabelTensor
from pina.solver import PhysicsInformedSingleModelSolver
from pina.weighting import ScalarWeighting
from torch import Tensor, nn

from woodbury.fit.equations import Equations, TermSource
from woodbury.fit.run import PLAIN, use_search
from woodbury.fit.solving import WINDOW
from woodbury.optim import GaussNewton


class _Solution(nn.Module):
    """The network of a solver, and the unknown parameters of its problem."""

    def __init__(self, model: nn.Module, unknowns: Mapping[str, nn.Parameter] | None) -> None:
        super().__init__()
        self.model, self.unknowns = model, nn.ParameterDict(dict(unknowns or {}))
        for layer in model.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                layer.register_forward_pre_hook(_without_labels)


def _without_labels(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers see plain tensors, models those with labels."""
    return tuple(own.as_subclass(Tensor) if isinstance(own, LabelTensor) else own for own in inputs)


class PINN(PhysicsInformedSingleModelSolver):
    """`pina.solver.PINN` without `optimizer` and `scheduler`: every step is a Gauss-Newton step.

    Args:
        problem, model: as in PINA; inverse problems too.
        weighting: None or `ScalarWeighting`, which are constant.
        loss: None or `torch.nn.MSELoss()`.
    """

    _params: Any  # the unknown parameters of the problem, by name

    def __init__(
        self, problem: Any, model: nn.Module, weighting: Any = None, loss: Any = None, **others: Any
    ) -> None:
        if others:
            raise TypeError(f"woodbury.pina: PINN brings its own optimizer: leave out {', '.join(others)}")
        if weighting is not None and not isinstance(weighting, ScalarWeighting):
            raise ValueError(f"woodbury.pina: weights of {type(weighting).__name__} change: use ScalarWeighting")
        if loss is not None and (type(loss) is not nn.MSELoss or loss.reduction != "mean"):
            raise ValueError(f"woodbury.pina: the loss {loss} is not a mean of squares: use torch.nn.MSELoss()")
        super().__init__(problem=problem, model=model, weighting=weighting, loss=loss)
        self.automatic_optimization = False
        self.gauss_newton: GaussNewton | None = None

    def configure_optimizers(self) -> list[Any]:
        """None that Lightning has to know: []; unknown parameters have been moved to the device by now."""
        solution = _Solution(self.model, self._params)
        is_single = all(own.dtype == torch.float32 for own in solution.parameters())
        self.gauss_newton = GaussNewton(
            solution,
            nn.MSELoss(),
            forward=TermSource.forward,
            fallback="autograd",
            damping=PLAIN,
            gram_dtype=torch.float64 if is_single else None,
        )
        use_search(self.gauss_newton, False)
        self.losses: list[float] = []  # before each plain step
        return []

    def training_step(self, batch: Sequence[tuple[str, Mapping[str, Any]]], batch_idx: int) -> Tensor:
        """Log the losses as PINA does, and take a step."""
        loss: Tensor = super().training_step(batch, batch_idx).detach()
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"woodbury.pina: the loss is {float(loss)}")
        optimizer = self.gauss_newton
        assert optimizer is not None
        weights = self.weighting.update_weights(dict(batch))
        terms = {name: self._term(name, points, float(weights[name])) for name, points in batch}
        source = TermSource(optimizer.model, Equations(**terms).terms)
        self.losses.append(float(loss))
        if len(self.losses) == 2 * WINDOW and self.losses[-WINDOW] < math.e * float(loss):
            use_search(optimizer, True)
        elif len(self.losses) == 2 * WINDOW:
            del self.losses[0]
        optimizer.step(*source.batch(1))
        self._clamp_params()
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1
        return loss

    def _term(self, name: str, points: Mapping[str, Any], weight: float) -> tuple[Any, ...]:
        x = points["input"]
        if not isinstance(x, LabelTensor):
            raise ValueError(f"woodbury.pina: the points of condition {name!r} must be a LabelTensor")
        target = points.get("target")
        plain = x.detach().as_subclass(Tensor)
        source = plain if target is None else (plain, target.detach().as_subclass(Tensor))
        return source, partial(self._residual, name=name, labels=x.labels), weight

    def _residual(self, solution: _Solution, x: Tensor, name: str, labels: Sequence[str]) -> Tensor:
        """Of a condition at these points; values that are known are subtracted later."""
        follow, before = torch.is_grad_enabled(), self._params
        with torch.enable_grad():
            labelled = x.detach().clone().as_subclass(LabelTensor)
            labelled.labels = labels
            condition = self.problem.conditions[name]
            try:
                self._params = dict(solution.unknowns.items()) or None
                if hasattr(condition, "equation"):
                    found = condition.evaluate({"input": labelled}, self)
                else:
                    found = self.forward(labelled)
            finally:
                self._params = before
        result = found.as_subclass(Tensor)
        return result if follow else result.detach()
