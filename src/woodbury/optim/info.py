"""What a step reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from woodbury.device.scalars import Scalar, Truth, as_double, as_truth, is_known, root


class Numbers(NamedTuple):
    """The numbers of a step as it leaves them; `StepInfo` shows them as tensors."""

    loss: Scalar
    damping: Scalar
    ratio: Scalar
    predicted: Scalar
    squared_norm: Scalar
    accepted: Truth
    length: Scalar = 1.0
    share: Scalar = 1.0
    bent: Truth = False


@dataclass(frozen=True)
class StepInfo:
    """What happened in a step, as 0-dim tensors (reading one waits for the device); `as_dict` gives plain numbers.

    Attributes:
        loss: f(theta) on the batch before the step, without the weight decay term.
        damping: lambda used; with a search that of the rung with the largest c.
        ratio: rho = actual over predicted decrease at theta + p; -inf if not finite or none predicted.
        predicted: m(0) - m(p), the decrease that the quadratic model promises.
        step_norm: |p|; theta moved by lr p. On a GPU up to a relative error of eps lmax |c|^2 / |p|^2.
        accepted: whether theta moved.
        length: alpha of a step with `search=`: theta moved by lr (alpha p + alpha^2 bend); 0 for a rejected step.
            Without a search 1.
        share: sum of c in p = sum_j c_j p_j: far below 1 says that the step is limited by the samples. Without a
            search 1.
        bent: whether a step with `search=` went along the bent path.
    """

    loss: Tensor
    damping: Tensor
    ratio: Tensor
    predicted: Tensor
    step_norm: Tensor
    accepted: Tensor
    length: Tensor
    share: Tensor
    bent: Tensor

    @classmethod
    def later(cls, numbers: Numbers | Tensor) -> StepInfo:
        """From `Numbers`, or a tensor of these: each is made when it is asked for, as few steps are looked at."""
        info = cls.__new__(cls)
        vars(info)["_numbers"] = numbers
        return info

    def __getattr__(self, name: str) -> Tensor:  # what is not there yet
        names, numbers = list(self.__dataclass_fields__), vars(self).get("_numbers")
        if numbers is None or name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        index = names.index(name)
        with torch.inference_mode(False):
            value = numbers[index] if index < len(numbers) else Numbers._field_defaults[name]
            if name in ("accepted", "bent"):
                vars(self)[name] = tensor = as_truth(value)
            else:  # it holds |p|^2 for |p|
                vars(self)[name] = tensor = as_double(root(value) if name == "step_norm" else value)
        return tensor

    def as_dict(self) -> dict[str, float | bool]:
        """The same as plain Python numbers."""
        names, numbers = list(self.__dataclass_fields__), vars(self).get("_numbers")
        if isinstance(numbers, Numbers) and all(map(is_known, numbers)):  # without a tensor for each
            plain = {name: float(value) for name, value in zip(names, numbers, strict=True)}
            plain["step_norm"] = float(root(plain["step_norm"]))
            return plain | {name: bool(plain[name]) for name in ("accepted", "bent")}
        return {name: getattr(self, name).item() for name in names}
