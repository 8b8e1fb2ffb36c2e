"""The trainable part of a model, split into layers that rules cover, and what passes through it have shown."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from woodbury._vector import Space
from woodbury.device.recording import Replays
from woodbury.layers.maps import projects_out
from woodbury.layers.rules import LOOKUPS, Rule, layer_rule, refused_option
from woodbury.layers.sums import Place, whole_parameter
from woodbury.model.buffers import Holder, changing_buffers
from woodbury.model.compiled import is_compiled


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters and the rule that covers them."""

    name: str
    module: nn.Module
    rule: Rule
    parameters: dict[str, str]  # the module's own name -> name in the model
    places: dict[str, Place]  # the same, each as a whole


# a module, its submodules, whether it is in training mode, and what runs in its place if it was compiled
ModuleState = tuple[nn.Module, tuple["nn.Module | None", ...], bool, Any]


def _module_state(module: nn.Module) -> ModuleState:
    return module, tuple(module._modules.values()), module.training, module._compiled_call_impl


def _is_distributed(kind: type) -> bool:
    """Whether it is a class, or derives from one, of DataParallel, DistributedDataParallel, FSDP or DTensor."""
    return any(base.__module__.startswith(("torch.distributed.", "torch.nn.parallel.")) for base in kind.__mro__)


# modules that in eval mode may give other numbers where no gradient is asked for
FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_WATCHED = (_BatchNorm, *LOOKUPS)  # modules with which there are no steps in some modes
_MANY_PASSES = 20  # of a step, from which on it says so
_MAX_CHECKED = 256  # shapes, and kinds of uses, that are remembered


@dataclass
class Findings:
    """What passes through a model have shown about it, noted where it is seen."""

    compiled: bool | None = None  # whether the model runs compiled code; None until a pass has shown it
    is_chain: bool | None = None  # whether a pass over a batch was one along a chain; None until one has shown it
    uncapturable: dict[str, str] = field(default_factory=dict)  # layers whose calls cannot be captured, and why
    checked_bare: set[Hashable] = field(default_factory=set)  # uses of bare parameters whose rows were right
    wrong_bare: dict[Hashable, int] = field(default_factory=dict)  # and how often they were wrong
    fallback_method: str | None = None  # the one that worked, as `woodbury.model.fallback` names it
    checked_rows: set[tuple[str, torch.Size]] = field(default_factory=set)  # its methods and shapes found right
    can_exchange: bool | None = None  # whether all uses of parameters are by modules; None until a pass shows it
    compared_loss: bool = False  # whether the values of a loss rule were compared with its loss
    warned: bool = False  # whether someone was told how many passes a step takes
    warned_of_mixing: bool = False  # whether someone was told that a later look found samples mixed
    passes: int = 0  # how many, over more than one sample
    parts: int = 0  # how many steps with curvature samples that are part of the batch
    quiet_buffers: dict[int, Tensor] = field(default_factory=dict)  # large ones that no pass changes, by id

    def note_bare(self, uses: Mapping[str, Hashable], wrong: Collection[str], shape: torch.Size) -> None:
        """Rows of the uses of bare parameters were right for columns of a shape, but for the wrong ones."""
        if len(self.checked_bare) + len(self.wrong_bare) >= _MAX_CHECKED:
            self.checked_bare.clear()
            self.wrong_bare.clear()
        for name, use in uses.items():
            if name in wrong:
                self.wrong_bare[use] = self.wrong_bare.get(use, 0) + 1
            else:
                self.checked_bare.add((use, shape))

    def note_method(self, method: str, shape: torch.Size | None = None) -> None:
        """A method of the fallback gave rows; those for columns of this shape were right."""
        self.fallback_method = method
        if shape is not None:
            if len(self.checked_rows) >= _MAX_CHECKED:
                self.checked_rows.clear()
            self.checked_rows.add((method, shape))

    def warn_of_passes(self, count: int, text: str) -> None:
        """Say once that a step takes many passes, and why."""
        if count > _MANY_PASSES and not self.warned:
            self.warned = True
            message = f"a step takes the time of {count} passes through the model: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def warn_of_mixing(self, reason: str) -> None:
        """Say once that samples look mixed after they did not."""
        if not self.warned_of_mixing:
            self.warned_of_mixing = True
            message = f"{reason}. An earlier look found nothing, so that the steps go on; they may be wrong"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


@dataclass(frozen=True, eq=False)
class Plan:
    """The trainable part of a model, split into layers and the parameters that no rule covers.

    Each parameter belongs to the first module that holds it; these modules are the blocks of the block-diagonal
    methods. A layer may use parameters of other modules too (tied weights).
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    owned: dict[str, dict[str, str]]  # module -> its own name of each parameter -> name in the model
    uncovered: dict[str, str]  # parameters that no layer rule covers -> why, as an error message
    parameters: dict[str, nn.Parameter]
    dtype: torch.dtype  # of all of them
    has_fallback: bool  # whether autograd computes the rows that no rule gives; else they raise an error
    max_bytes: int | None  # for temporaries of the rows; None: a default
    frozen: tuple[nn.Parameter, ...]
    tied: bool  # whether some parameter is used by several layers
    modules: tuple[ModuleState, ...]  # all of them: what a pass shows holds for one structure in one mode
    buffers: tuple[Holder, ...]  # those that a pass may change
    findings: Findings = field(default_factory=Findings, compare=False)
    replays: Replays = field(default_factory=lambda: Replays(False), compare=False)  # passes of a search

    @cached_property
    def space(self) -> Space:
        """The coordinates of vectors in parameter space."""
        return Space.of(self.parameters)

    @cached_property
    def block_of(self) -> dict[str, tuple[str, str]]:
        """Parameter name -> its module, and its name there."""
        return {full: (block, own) for block, names in self.owned.items() for own, full in names.items()}

    @cached_property
    def names(self) -> dict[int, str]:
        """The id of a trainable parameter -> its name."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @cached_property
    def all_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model by name, trained or not; without those that a first pass has to make."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if not nn.parameter.is_lazy(parameter)}

    def has_compiled(self) -> bool | None:
        """Whether the model runs compiled code, as far as is known."""
        return self.findings.compiled

    def versions(self) -> list[int]:
        """How often each of all parameters was changed in place so far."""
        return [parameter._version for parameter in self.all_parameters.values()]

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @cached_property
    def block_sizes(self) -> list[int]:
        """The number of parameters in each of `blocks`."""
        return [sum(self.parameters[name].numel() for name in block) for block in self.blocks]

    @cached_property
    def size(self) -> int:
        return sum(self.block_sizes)

    @cached_property
    def layer_named(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _holders(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """The modules that hold parameters, as layers or not, with these parameters."""
        held = {layer.name: layer.parameters for layer in self.layers}
        return [
            (self.model.get_submodule(path), local, self.parameters[full])
            for path, names in (self.owned | held).items()
            for local, full in names.items()
        ]

    @cached_property
    def _watched(self) -> tuple[nn.Module, ...]:
        return tuple(module for module in self.model.modules() if isinstance(module, _WATCHED))

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The parameter names of each block of the block-diagonal methods."""
        return [tuple(names.values()) for names in self.owned.values()]

    def is_current(self, model: nn.Module) -> bool:
        """Whether a new plan would be the same, and what passes have shown still holds."""
        if model is not self.model:
            return False
        for state in self.modules:
            if _module_state(state[0]) != state:
                return False
        for module, local, parameter in self._holders:
            own = module._parameters
            if local not in own or own[local] is not parameter:  # a scripted module has no `get`
                return False
            if not parameter.requires_grad or parameter.dtype is not self.dtype:
                return False
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return False
        for layer in self.layers:
            if "forward" in layer.module.__dict__:
                return False
        if self.frozen and any(parameter.requires_grad for parameter in self.frozen):
            return False
        return not self._watched or not any(_module_complaint(own, self.names) for own in self._watched)


def _no_rule(parameter: str, path: str, module: nn.Module) -> str:
    """Why a parameter has no rows, and what to do."""
    return (
        f"no layer rule covers parameter {parameter!r} of {type(module).__name__} {path!r}, and it is not only "
        "added to or multiplied with what the samples give. Two ways out: register a rule with "
        "woodbury.register_layer, or pass fallback='autograd' (GaussNewton and NaturalGradient). Or leave it "
        "alone: requires_grad_(False)"
    )


def _parameter_complaint(parameter: nn.Parameter, dtype: torch.dtype) -> str | None:
    """Why there are no steps with a trained parameter, as the end of a sentence; or None."""
    if parameter.is_complex():
        return (
            "is complex, and a step is defined for real numbers: keep it as a real parameter of shape (..., 2) "
            "and take torch.view_as_complex of it in forward"
        )
    if _is_distributed(type(parameter)):
        return f"is a {type(parameter).__name__}, sharded over devices: not supported"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has a hook on its gradient, which no step here runs: remove it (a mask belongs into the model)"
    if parameter.dtype != dtype:
        return (
            f"is of type {parameter.dtype}, another of {dtype}: bring the model to one type, model.float() or "
            "model.double()"
        )
    return None


def _module_complaint(module: nn.Module, trained: Collection[int]) -> str | None:
    """Why there are no steps with a module of `_WATCHED` as it is now, as the end of a sentence; or None."""
    if isinstance(module, LOOKUPS):
        refused = refused_option(module, trained)
        return None if refused is None else f"with {refused}. Leave that option out"
    if module.training or module.running_mean is None:
        return (
            "is in training mode, or keeps no statistics of its own: its outputs mix the samples of a batch, so "
            "rows per sample do not exist. Call .eval() on it, or use GroupNorm or LayerNorm instead"
        )
    return None


def _trained_parameters(given: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that are trained; raises an error that names a parameter with which there are no steps."""
    parameters = {name: parameter for name, parameter in given.items() if parameter.requires_grad}
    if not parameters:
        why = "every requires_grad is False" if given else "none of the optimizer's belongs to the model any more"
        raise ValueError(f"no trainable parameter: {why}")
    dtype = next(iter(parameters.values())).dtype
    for name, parameter in parameters.items():
        complaint = _parameter_complaint(parameter, dtype)
        if complaint is not None:
            raise ValueError(f"parameter {name!r} {complaint}")
    return parameters


def _check_modules(model: nn.Module, trained: Collection[int]) -> None:
    """Raise an error that names a module with which there are no steps."""
    for path, module in model.named_modules():
        kind = type(module)
        if _is_distributed(kind):
            raise ValueError(
                f"the model is wrapped in {kind.__name__}, which spreads it or its batches over several devices: "
                "not supported yet, as nothing would be reduced between them. Pass the module inside"
            )
        complaint = _module_complaint(module, trained) if isinstance(module, _WATCHED) else None
        if complaint is not None:
            raise ValueError(f"{kind.__name__} {path!r} {complaint}")


def plan_layers(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    has_fallback: bool,
    by_layers: bool = True,
    max_bytes: int | None = None,
) -> Plan:
    """The plan of a model: a layer rule for every trainable parameter that has one.

    What no rule covers may have rows all the same (`woodbury.model.bare`, the fallback). by_layers=False is for
    methods that need no rows: no parameter gets a rule.
    """
    parameters = _trained_parameters(trainable)
    names = {id(parameter): name for name, parameter in parameters.items()}
    _check_modules(model, names)
    layers: list[Layer] = []
    owned: dict[str, dict[str, str]] = {}
    uncovered: dict[str, str] = {}
    seen: set[str] = set()  # the parameters in `owned`
    tied = False
    for path, module in model.named_modules():
        held = [(local, names.get(id(parameter))) for local, parameter in module._parameters.items()]
        used = {local: full for local, full in held if full is not None}
        if not used and not projects_out(module, names):
            continue
        for local, full in used.items():  # of a parameter with two names here the first counts
            if full not in seen:
                seen.add(full)
                owned.setdefault(path, {})[local] = full
        tied = tied or len(owned.get(path, ())) < len(used)
        rule = layer_rule(module, used) if by_layers else None
        if rule is None:
            uncovered |= {full: _no_rule(full, path, module) for full in used.values()}
        else:
            places = {local: whole_parameter(full, parameters[full].shape) for local, full in used.items()}
            layers.append(Layer(path, module, rule, used, places))
    # A module may hold what a layer inside it uses (the bias of a tied head); that all uses are those of layers, a
    # pass shows.
    for layer in layers:
        for full in layer.parameters.values():
            uncovered.pop(full, None)
    return Plan(
        model=model,
        layers=tuple(layers),
        owned=owned,
        uncovered=uncovered,
        parameters=parameters,
        dtype=next(iter(parameters.values())).dtype,
        has_fallback=has_fallback,
        max_bytes=max_bytes,
        frozen=tuple(parameter for parameter in trainable.values() if not parameter.requires_grad),
        tied=tied,
        modules=tuple(map(_module_state, model.modules())),
        buffers=changing_buffers(model),
        findings=Findings(compiled=any(map(is_compiled, model.modules())) or None),
    )
