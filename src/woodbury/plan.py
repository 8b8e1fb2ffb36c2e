"""The trainable part of a model, split into layers that rules cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from woodbury.layers.registry import Rule, layer_rule


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters of its own and the rule that covers them."""

    name: str
    module: nn.Module
    rule: Rule
    parameters: dict[str, str]  # the module's own name -> name in the model


def _mixes_samples(norm: nn.Module) -> bool:
    return norm.training or norm.running_mean is None


@dataclass(frozen=True)
class Plan:
    """The trainable part of a model, split into layers; `rest` is what no rule covers."""

    layers: tuple[Layer, ...]
    rest: tuple[str, ...]
    parameters: dict[str, nn.Parameter]
    fallback: str | None  # "autograd": rows past the rules are computed by autograd instead of refused
    frozen: tuple[nn.Parameter, ...]
    norms: tuple[nn.Module, ...]  # those that must stay in eval mode

    def is_current(self, model: nn.Module) -> bool:
        """Whether planning again would give the same, as far as can be told without walking the model."""
        for layer in self.layers:
            if model.get_submodule(layer.name) is not layer.module:
                return False
            own = layer.module._parameters
            for local, name in layer.parameters.items():
                if own.get(local) is not self.parameters[name]:
                    return False
            if "forward" in vars(layer.module):
                return False
        return (
            all(parameter.requires_grad for parameter in self.parameters.values())
            and not any(parameter.requires_grad for parameter in self.frozen)
            and not any(_mixes_samples(norm) for norm in self.norms)
        )

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """Parameter names block by block, as the block-diagonal methods take them."""
        blocks = [tuple(layer.parameters.values()) for layer in self.layers]
        return [*blocks, *((name,) for name in self.rest)]


def _uncovered(own: Mapping[str, str]) -> str:
    return next((full for local, full in own.items() if local not in ("weight", "bias")), next(iter(own.values())))


def plan_layers(
    model: nn.Module, trainable: Mapping[str, nn.Parameter], fallback: str | None, by_layers: bool = True
) -> Plan:
    """Assign every trainable parameter to a layer rule, or refuse by name what none covers.

    by_layers=False is for methods that need no rows: then no parameter belongs to a layer.
    """
    parameters = {name: parameter for name, parameter in trainable.items() if parameter.requires_grad}
    if not parameters:
        why = (
            "every requires_grad is False"
            if trainable
            else "none of the optimizer's belongs to the model any more"
        )
        raise ValueError(f"no trainable parameter: {why}")
    names = {id(parameter): name for name, parameter in parameters.items()}
    layers: list[Layer] = []
    rest: list[str] = []
    norms: list[nn.Module] = []
    seen: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            norms.append(module)
            if _mixes_samples(module):
                raise ValueError(
                    f"{type(module).__name__} {path!r} is in training mode, or keeps no statistics of its own: "
                    "its outputs mix the samples of a batch, so rows per sample do not exist. Call .eval() on "
                    "it, or use GroupNorm or LayerNorm instead"
                )
        if not by_layers:
            continue
        own = {}
        for local, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in names:
                continue
            full = f"{path}.{local}" if path else local
            if id(parameter) in seen:
                raise ValueError(
                    f"parameter {seen[id(parameter)]!r} is shared with {full!r}: tied parameters are not supported"
                )
            seen[id(parameter)] = full
            own[local] = names[id(parameter)]
        if not own:
            continue
        rule = layer_rule(module, own)
        if rule is not None:
            layers.append(Layer(path, module, rule, own))
        elif fallback == "autograd":
            rest.extend(own.values())
        else:
            raise ValueError(
                f"no layer rule covers parameter {_uncovered(own)!r} of {type(module).__name__} "
                f"{path!r}. Two ways out: register a rule with woodbury.register_layer, or pass "
                "fallback='autograd' (GaussNewton and NaturalGradient). Or leave it alone: requires_grad_(False)"
            )
    frozen = tuple(parameter for parameter in trainable.values() if not parameter.requires_grad)
    return Plan(
        tuple(layers), tuple(rest if by_layers else parameters), parameters, fallback, frozen, tuple(norms)
    )
