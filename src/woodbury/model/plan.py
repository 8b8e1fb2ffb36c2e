"""The trainable part of a model, split into layers that rules cover."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from woodbury._vector import Space
from woodbury.layers.attention import projects_out
from woodbury.layers.registry import Rule, layer_rule
from woodbury.layers.rules import LOOKUPS, refused_option
from woodbury.model.buffers import Holder, changing_buffers
from woodbury.model.compiled import is_compiled


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters and the rule that covers them."""

    name: str
    module: nn.Module
    rule: Rule
    parameters: dict[str, str]  # the module's own name -> name in the model


# a module, its submodules, whether it is in training mode, and what runs in its place if it was compiled
ModuleState = tuple[nn.Module, tuple["nn.Module | None", ...], bool, Any]


@dataclass
class Findings:
    """What passes through a model have shown about it."""

    uncapturable: dict[str, str] = field(default_factory=dict)  # layers whose calls cannot be captured, and why
    checked_bare: set[Hashable] = field(default_factory=set)  # uses of bare parameters whose rows were right
    wrong_bare: dict[Hashable, int] = field(default_factory=dict)  # and how often they were wrong
    fallback_method: str | None = None  # the one that worked, as `woodbury.model.fallback` names it
    checked_rows: set[tuple[str, torch.Size]] = field(default_factory=set)  # its methods and shapes found right
    checked_curve: bool = False  # whether second derivatives by forward mode were compared with differences
    compiled: bool | None = None  # whether the model runs compiled code; None until a pass has shown it
    forward_order: int = 2  # how often forward mode differentiates the model, until it has failed to
    warned: bool = False  # whether someone was told how many passes a step takes
    warned_of_mixing: bool = False  # whether someone was told that a later look found samples mixed
    passes: int = 0  # how many, over more than one sample
    parts: int = 0  # how many steps with curvature samples that are part of the batch
    quiet_buffers: dict[int, Tensor] = field(default_factory=dict)  # large ones that no pass changes, by id


def _is_distributed(kind: type) -> bool:
    """Whether it is a class, or derives from one, of DataParallel, DistributedDataParallel, FSDP or DTensor."""
    return any(base.__module__.startswith(("torch.distributed.", "torch.nn.parallel.")) for base in kind.__mro__)


def is_plain(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is trainable, of this type, and without hooks on its gradient."""
    return (
        parameter.requires_grad
        and parameter.dtype is dtype
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _mixes_samples(norm: nn.Module) -> bool:
    return norm.training or norm.running_mean is None


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
    norms: tuple[nn.Module, ...]  # batch norms, which must stay in eval mode
    lookups: tuple[nn.Module, ...]  # embeddings, some of whose options are refused
    tied: bool  # whether some parameter is used by several layers
    modules: tuple[ModuleState, ...]  # all of them: what a pass shows holds for one structure in one mode
    buffers: tuple[Holder, ...]  # those that a pass may change
    findings: Findings = field(default_factory=Findings, compare=False)

    @cached_property
    def space(self) -> Space:
        """The coordinates of vectors in parameter space."""
        return Space.of(self.parameters)

    @cached_property
    def block_of(self) -> dict[str, tuple[str, str]]:
        """Parameter name -> its module, and its name there."""
        return {full: (block, own) for block, names in self.owned.items() for own, full in names.items()}

    @property
    def training(self) -> bool:
        """model.training."""
        return self.modules[0][2]

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
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    @cached_property
    def block_sizes(self) -> list[int]:
        """The number of parameters in each of `blocks`."""
        return [sum(self.parameters[name].numel() for name in block) for block in self.blocks]

    @cached_property
    def size(self) -> int:
        """The number of trainable parameters."""
        return sum(self.block_sizes)

    @cached_property
    def layer_named(self) -> dict[str, Layer]:
        """Layer name -> layer."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _outside_layers(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """The modules that own parameters and are no layers, with these parameters."""
        return [
            (self.model.get_submodule(block), local, self.parameters[full])
            for block, names in self.owned.items()
            if block not in self.layer_named
            for local, full in names.items()
        ]

    @cached_property
    def fast_paths(self) -> tuple[nn.Module, ...]:
        """Modules that in eval mode may give other numbers where no gradient is asked for."""
        return tuple(module for module in self.model.modules() if isinstance(module, FAST_PATHS))

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The parameter names of each block of the block-diagonal methods."""
        return [tuple(names.values()) for names in self.owned.values()]

    def is_current(self, model: nn.Module) -> bool:
        """Whether a new plan would be the same, and what passes have shown still holds."""
        if model is not self.model:
            return False
        for module, children, training, compiled in self.modules:
            if (
                module.training is not training
                or tuple(module._modules.values()) != children
                or module._compiled_call_impl is not compiled
            ):
                return False
        for layer in self.layers:
            own = layer.module._parameters
            for local, name in layer.parameters.items():
                if own.get(local) is not self.parameters[name]:
                    return False
            if "forward" in vars(layer.module):
                return False
        for module, local, parameter in self._outside_layers:
            own = module._parameters
            if local not in own or own[local] is not parameter:  # a scripted module has no `get`
                return False
        return (
            all(is_plain(parameter, self.dtype) for parameter in self.parameters.values())
            and not any(parameter.requires_grad for parameter in self.frozen)
            and not any(_mixes_samples(norm) for norm in self.norms)
            and not (self.lookups and any(refused_option(module, self.names) for module in self.lookups))
        )


def _no_rule(parameter: str, path: str, module: nn.Module) -> str:
    """Why a parameter has no rows, and what to do."""
    return (
        f"no layer rule covers parameter {parameter!r} of {type(module).__name__} {path!r}, and it is not only "
        "added to or multiplied with what the samples give. Two ways out: register a rule with "
        "woodbury.register_layer, or pass fallback='autograd' (GaussNewton and NaturalGradient). Or leave it "
        "alone: requires_grad_(False)"
    )


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
    parameters = {name: parameter for name, parameter in trainable.items() if parameter.requires_grad}
    if not parameters:
        why = (
            "every requires_grad is False"
            if trainable
            else "none of the optimizer's belongs to the model any more"
        )
        raise ValueError(f"no trainable parameter: {why}")
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex, and a step is defined for real numbers: keep it as a real "
                "parameter of shape (..., 2) and take torch.view_as_complex of it in forward"
            )
        if _is_distributed(type(parameter)):
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__}, sharded over devices: not supported"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a hook on its gradient, which a step here would not run: remove it (a "
                "mask belongs into the model)"
            )
        if parameter.dtype != first.dtype:
            raise ValueError(
                f"parameter {name!r} is of type {parameter.dtype}, another of {first.dtype}: bring the model to "
                "one type, model.float() or model.double()"
            )
    names = {id(parameter): name for name, parameter in parameters.items()}
    layers: list[Layer] = []
    owned: dict[str, dict[str, str]] = {}
    uncovered: dict[str, str] = {}
    norms: list[nn.Module] = []
    lookups: list[nn.Module] = []
    owned_names: set[str] = set()
    tied = False
    for path, module in model.named_modules():
        if _is_distributed(type(module)):
            raise ValueError(
                f"the model is wrapped in {type(module).__name__}, which spreads it or its batches over several "
                "devices: not supported yet, as nothing would be reduced between them. Pass the module inside"
            )
        if isinstance(module, _BatchNorm):
            norms.append(module)
            if _mixes_samples(module):
                raise ValueError(
                    f"{type(module).__name__} {path!r} is in training mode, or keeps no statistics of its own: "
                    "its outputs mix the samples of a batch, so rows per sample do not exist. Call .eval() on "
                    "it, or use GroupNorm or LayerNorm instead"
                )
        if isinstance(module, LOOKUPS):
            lookups.append(module)
            refused = refused_option(module, names)
            if refused is not None:
                raise ValueError(f"{type(module).__name__} {path!r} with {refused}. Leave that option out")
        used = {
            local: names[id(parameter)]
            for local, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in names
        }
        if not used and not projects_out(module, names):
            continue
        own: dict[str, str] = {}
        for local, full in used.items():  # of a parameter with two names here the first counts
            if full not in owned_names:
                own[local] = full
                owned_names.add(full)
        if own:
            owned[path] = own
        tied = tied or len(own) < len(used)
        rule = layer_rule(module, used) if by_layers else None
        if rule is not None:
            layers.append(Layer(path, module, rule, used))
        else:
            uncovered.update({full: _no_rule(full, path, module) for full in used.values()})
    # A module may hold what a layer inside it uses (the bias of a tied head); that all uses are those of layers, a
    # pass shows.
    ruled = {full for layer in layers for full in layer.parameters.values()}
    uncovered = {full: why for full, why in uncovered.items() if full not in ruled}
    frozen = tuple(parameter for parameter in trainable.values() if not parameter.requires_grad)
    return Plan(
        model,
        tuple(layers),
        owned,
        uncovered,
        parameters,
        first.dtype,
        has_fallback,
        max_bytes,
        frozen,
        tuple(norms),
        tuple(lookups),
        tied,
        tuple(
            (module, tuple(module._modules.values()), module.training, module._compiled_call_impl)
            for module in model.modules()
        ),
        changing_buffers(model),
        Findings(compiled=any(map(is_compiled, model.modules())) or None),
    )
