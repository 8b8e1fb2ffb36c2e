"""Settings of an optimizer: parameter groups by name, their values at a step, checks that name a culprit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from woodbury._choice import BELOW_ONE, check_number, check_truth, check_whole_number
from woodbury.curvature import Curvature
from woodbury.losses.rules import check_is_module
from woodbury.model.fallback import Forward
from woodbury.policies.damping import Damping, is_relative
from woodbury.policies.guard import ADVICE
from woodbury.policies.search import CurvedSearch
from woodbury.quadratic.metric import Metric
from woodbury.quadratic.quadratic import Blocks, Solver


class Common(TypedDict, total=False):
    """The arguments that every second-order optimizer takes; `woodbury.GaussNewton` describes them."""

    damping: Damping | float  # lambda
    curvature_samples: int | float | str | None  # N2
    weight_decay: float
    accept: float | None  # eta
    guard: float | None
    forward: Forward | None
    seed: int | None
    params: Iterable[Any] | None
    process_group: Any
    watch: bool


@dataclass(frozen=True)
class Settings:
    """All that a user chooses beside model and groups, checked here. A step that differs takes a changed copy."""

    method: str  # the name of the optimizer, for messages
    loss: nn.Module
    forward: Forward
    curvature: Curvature
    solver: Solver
    blocks: Blocks
    damping: Damping
    curvature_samples: int | float | str | None
    accept: float | None
    guard: float | None
    has_fallback: bool
    most_momentum: float = BELOW_ONE
    gram_dtype: torch.dtype | None = None
    max_bytes: int | None = None
    capture: bool = False
    autocast: torch.dtype | None = None
    search: CurvedSearch | None = None
    memory: int = 0
    metric: Metric | None = None
    advice: str | None = ADVICE  # where the loss runs away; None: nothing is said

    def __post_init__(self) -> None:
        check_curvature_samples(self.curvature_samples)
        if self.accept is not None and (
            isinstance(self.accept, bool) or not isinstance(self.accept, int | float) or math.isnan(self.accept)
        ):
            raise ValueError(f"accept must be a number or None, got {self.accept!r}")
        if self.guard is not None:
            check_number("guard", self.guard)
        if not callable(self.forward):
            raise TypeError(f"forward must be a function of (model, inputs), got {self.forward!r}")
        if self.max_bytes is not None:
            check_number("max_bytes", self.max_bytes, above=0)
        if self.gram_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"gram_dtype must be torch.float32, torch.float64 or None, got {self.gram_dtype}")
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be torch.bfloat16 or None, got {self.autocast}")
        check_truth("capture", self.capture)
        check_whole_number("memory", self.memory, least=0)
        self._check_search()
        self._check_memory_and_metric()
        self._check_damping()

    def _check_search(self) -> None:
        if self.search is None:
            return
        if not isinstance(self.search, CurvedSearch):
            raise TypeError(f"search must be a woodbury.CurvedSearch or None, got {self.search!r}")
        if not self.curvature.fits_loss:
            raise ValueError(f"{self.method} takes no search: use GaussNewton(..., search=...)")
        if not self.solver.exact:
            raise ValueError(f"search= needs solver='cholesky', got {self.solver.name!r}")

    def _check_memory_and_metric(self) -> None:
        wanted = [f"memory={self.memory}"] if self.memory else []
        wanted += [] if self.metric is None else [f"metric={self.metric.name!r}"]
        if wanted and not self.solver.exact:
            raise ValueError(f"{wanted[0]} needs solver='cholesky', got {self.solver.name!r}")
        searchable = self.metric is None or self.metric.name == "diagonal"
        if self.search is not None and (self.memory or not searchable):
            raise ValueError(f"search= and {wanted[0]} do not go together")

    def _check_damping(self) -> None:
        if not is_relative(self.damping) or self.solver.has_trace:
            return
        raise ValueError(
            f"{self.method} (solver {self.solver.name!r}) forms no Gram matrix that its damping could be relative "
            "to: use GaussNewton or NaturalGradient with solver='cholesky' or 'cg', or relative=False"
        )

    def check_joint(self) -> None:
        """Raise where several processes cannot take steps together with these settings."""
        if self.search is not None:
            raise ValueError("search=, which fit uses for a pair or a sampler, is for one process: pass a loader")
        if not self.solver.takes_processes:
            raise ValueError(f"solver={self.solver.name!r} is for one process: use 'cholesky', or HessianFree")
        if self.memory or self.metric is not None:
            raise ValueError("memory= and metric= are for one process: leave them out")

    @property
    def is_recordable(self) -> bool:
        """Whether a step looks at no number as it goes, and its shapes repeat: then a CUDA graph can hold it."""
        return (
            self.capture and self.solver.exact and self.search is None and not self.memory and self.metric is None
        )


@dataclass(eq=False)
class Hyperparameters:
    """Group settings of this very step, by parameter name."""

    lr: dict[str, float | Tensor]
    momentum: dict[str, float]
    weight_decay: dict[str, float]


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
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        lr |= dict.fromkeys(members, group["lr"] if rates is None else rates[index])
        momentum |= dict.fromkeys(members, group["momentum"])
        decay |= dict.fromkeys(members, group["weight_decay"])
    return Hyperparameters(lr, momentum, decay)


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


def check_groups(groups: Sequence[Mapping[str, Any]], most_momentum: float) -> None:
    """Raise if a setting of a group is out of its range now; a tensor on a device is not looked at."""
    for index, group in enumerate(groups):
        rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        # comparisons with nan are false
        if type(rate) is type(momentum) is type(decay) is float and (
            0.0 <= rate < math.inf and 0.0 <= momentum <= most_momentum and 0.0 <= decay < math.inf
        ):
            continue
        for name, value, most in (
            ("lr", rate, math.inf),
            ("momentum", momentum, most_momentum),
            ("weight_decay", decay, math.inf),
        ):
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                check_number(f"{name} (of parameter group {index})", value, most=most)


def check_model_and_loss(model: Any, loss: Any) -> None:
    """Raise an error that says what to write unless these are a model and a loss."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(
            f"the first argument must be the model, got the class {model.__name__}: make one of it first"
        )
    if not isinstance(model, nn.Module):
        parameters = isinstance(model, Iterable) and not isinstance(model, str)
        instead = (
            ", not its parameters: write (model, loss, ...); params= takes some of them" if parameters else ""
        )
        raise TypeError(
            f"the first argument must be the model itself (an nn.Module){instead}; got {type(model).__name__}"
        )
    check_is_module(loss)
    if isinstance(model, _Loss) and not isinstance(loss, _Loss):
        raise TypeError(
            f"the first argument must be the model and the second the loss, got the loss {type(model).__name__} "
            f"first and {type(loss).__name__} second: exchange them"
        )


def explain_inputs(inputs: Any) -> None:
    """Raise an error that says what to write if this looks like the call of another optimizer's `step`."""
    write = "write optimizer.step(inputs, targets), without loss.backward() before it"
    if inputs is None:
        raise TypeError(f"step takes the batch, whose inputs must hold at least one tensor: {write}")
    if isinstance(inputs, Tensor) and inputs.dim() == 0:
        raise ValueError(
            f"inputs must have a sample axis, got a 0-dim tensor; step takes the batch, not its loss: {write}"
        )
    if callable(inputs):
        raise TypeError(f"step takes the batch or a closure, not a module, got {inputs!r}: {write}")


def check_curvature_samples(value: int | float | str | None) -> None:
    if value is None or value == "auto":
        return
    if isinstance(value, str):
        raise ValueError(f"curvature_samples must be None, an int, a fraction or 'auto', got {value!r}")
    if isinstance(value, float):
        check_number("curvature_samples as a fraction", value, above=0, most=1)
    else:
        check_whole_number("curvature_samples", value, least=1)


def refuse_others(method: str, given: Collection[str]) -> None:
    """Raise if an argument was given that does not exist, or that a method fixes itself."""
    for name in given:
        if name in ("blocks", "momentum", "fallback"):
            raise TypeError(f"{method} has no argument {name!r}: what it stands for is fixed in this method")
        if name not in Common.__annotations__:
            raise TypeError(f"{method} has no argument {name!r}: help(woodbury.{method}) names all of them")


def check_state(state_dict: Mapping[str, Any], model: nn.Module) -> None:
    """Raise unless this is what `state_dict` gave, of an optimizer of a model with these parameters."""
    state = state_dict["state"]
    if "damping" not in state:
        raise ValueError("the state to load has no damping: it is not that of a second-order optimizer")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, own in state.get("momentum", {}).items():
        if shapes.get(name) != tuple(own.shape):
            mine = f"has it as {shapes[name]}" if name in shapes else "has none of that name"
            raise ValueError(
                f"the state to load is that of another model: its parameter {name!r} has the shape "
                f"{tuple(own.shape)}, and this model {mine}"
            )
