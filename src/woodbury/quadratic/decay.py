"""Weight decay: W |theta|^2 / 2 is added to the loss, W theta to its gradient and W to its Hessian."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from woodbury._vector import Space, Vector
from woodbury.device.scalars import Scalar, Scale, compute, scalar


class Decay:
    """W, one number per parameter tensor, at theta."""

    def __init__(self, rates: Mapping[str, float], parameters: Mapping[str, Tensor]) -> None:
        self.rates = {name: rates[name] for name in parameters}
        self._parameters = parameters
        self.is_uniform = len(set(self.rates.values())) == 1

    @cached_property
    def _theta(self) -> Vector:
        theta = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return Space.of(theta).pack(theta)

    @cached_property
    def _matrix(self) -> Scale:
        """W: one number, or (p,)."""
        if self.is_uniform:
            return next(iter(self.rates.values()))
        return self._spread(list(self.rates), self._theta.flat)

    def _spread(self, names: Sequence[str], like: Tensor) -> Tensor:
        """W of some parameters, an entry for each of their numbers."""
        parts = [like.new_full((self._parameters[name].numel(),), self.rates[name]) for name in names]
        return torch.cat(parts)

    @cached_property
    def force(self) -> Vector:
        """W theta."""
        return self._theta * self._matrix

    def times(self, p: Vector) -> Vector:
        """W p."""
        return p * self._matrix

    def slope(self, p: Vector) -> Scalar:
        """W theta . p"""
        return scalar(self.force.dot(p))

    def curvature(self, p: Vector) -> Scalar:
        """p^T W p."""
        return scalar(self.times(p).dot(p))

    def decrease(self, p: Vector) -> Scalar:
        """W |theta|^2 / 2 - W |theta + p|^2 / 2, without cancellation."""
        return -(self.slope(p) + 0.5 * self.curvature(p))

    def scales(self, damping: Scalar) -> dict[str, Scale]:
        """lambda / (lambda + W) by parameter: the metric of the damped model relative to lambda I."""
        (known,) = compute(damping)
        return {name: known / (known + rate) for name, rate in self.rates.items()}

    def scaled(self, vector: Vector, damping: Scalar) -> Vector:
        """lambda / (lambda + W) times a vector."""
        (known,) = compute(damping)
        return vector * (known / (known + self._matrix))

    def shift(self, names: Sequence[str], like: Tensor, damping: Scale) -> Scale:
        """lambda + W of some parameters: one number, or one for each of their numbers."""
        if not any(self.rates[name] for name in names):
            return damping
        return self._spread(names, like) + damping
