"""Settings of an optimizer: parameter groups by name, their values at a step, checks that name a culprit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, TypedDict

from torch import Tensor, nn

from woodbury.damping import Damping
from woodbury.model.fallback import Forward


class Common(TypedDict, total=False):
    """The arguments that every second-order optimizer takes; `woodbury.GaussNewton` describes them."""

    damping: Damping | float  # lambda
    curvature_samples: int | float | None  # N2
    weight_decay: float
    accept: float | None  # eta
    forward: Forward | None
    seed: int | None
    params: Iterable[Any] | None
    process_group: str | None


def full_signature(own: Callable[..., None], common: Callable[..., None]) -> Signature:
    """The arguments of a constructor with those it hands on by **common written out, as help() shows them."""
    shown = [p for p in signature(own).parameters.values() if p.name not in ("self", "common")]
    names = {parameter.name for parameter in shown} | {"self"}
    base = signature(common).parameters
    shown += [base[name] for name in Common.__annotations__ if name not in names]
    return Signature(sorted(shown, key=lambda parameter: parameter.kind))


@dataclass(frozen=True)
class Hyperparameters:
    """Group settings of this very step, by parameter name."""

    lr: dict[str, float | Tensor]
    momentum: dict[str, float]
    weight_decay: dict[str, float]
    any_momentum: bool
    any_decay: bool


def read_settings(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    rates: Sequence[float | Tensor] | None = None,
) -> Hyperparameters:
    """The settings of each parameter as its group has them now; rates, one a group, stand in for its lr.

    names are those of the parameters in each group.
    """
    lr: dict[str, float | Tensor] = {}
    momentum: dict[str, float] = {}
    decay: dict[str, float] = {}
    for index, (group, own) in enumerate(zip(groups, names, strict=True)):
        lr.update(dict.fromkeys(own, group["lr"] if rates is None else rates[index]))
        momentum.update(dict.fromkeys(own, group["momentum"]))
        decay.update(dict.fromkeys(own, group["weight_decay"]))
    return Hyperparameters(lr, momentum, decay, any(momentum.values()), any(decay.values()))


def plain_groups(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """The groups asked for; by default one with every trainable parameter of the model."""
    if params is None:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ValueError("no trainable parameter: every requires_grad is False")
        return [{"params": trainable}]
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be parameters or groups of them, as torch.optim takes them, got {params!r}")
    given = list(params)
    return [dict(group) for group in given] if given and isinstance(given[0], dict) else [{"params": given}]


def with_names(model: nn.Module, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group whose parameters carry their names in the model; members may be parameters or (name, parameter)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    members = [member[1] if isinstance(member, tuple) else member for member in members]
    foreign = [tuple(p.shape) for p in members if id(p) not in names]
    if foreign:
        raise ValueError(f"params: a parameter of shape {foreign[0]} does not belong to the model")
    return {**group, "params": [(names[id(p)], p) for p in members]}


def check_number(name: str, value: Any, *, above: float | None = None) -> None:
    """Raise an error that names the setting unless it is a finite number, not negative or above a bound."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if above is None and value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be more than {above:g}, got {value}")


def check_whole_number(name: str, value: Any, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f", at least {least}"
        raise ValueError(f"{name} must be a whole number{bound}, got {value!r}")


def check_model_and_loss(model: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument must be the model (an nn.Module), got {type(model).__name__}")
    if not isinstance(loss, nn.Module):
        raise TypeError(f"the second argument must be the loss (an nn.Module), got {type(loss).__name__}")


def check_curvature_samples(value: int | float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"curvature_samples must be None, an int or a fraction, got {value!r}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"curvature_samples must be at least 1, got {value}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"curvature_samples as a fraction must lie in (0, 1], got {value}")
