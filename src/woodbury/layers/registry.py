"""The open registry from layer class to rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import isfunction
from typing import Any

from torch import Tensor, nn

from woodbury.layers.forms import ExplicitRows, RowForm

# (layer, input (n, ...), output gradients (n, k, ...)) -> rows
Rule = Callable[[nn.Module, Any, Tensor], "RowForm | Mapping[str, Tensor]"]


_RULES: dict[type[nn.Module] | str, tuple[Rule, frozenset[str] | None]] = {}  # with the parameters of each


def register_layer(
    kind: type[nn.Module] | str, parameters: Collection[str] | None = None
) -> Callable[[Rule], Rule]:
    """Function decorator that makes a function the rule for layers of class `kind`.

    A class of a library that need not be there may be given by its full name, "package.module.Class".

    The function gets the layer, its input (n, ...) (a tuple if it was called with several tensors) and the
    gradients of k scalars per sample in its output, (n, k, *output shape). It returns the gradients of those
    scalars in the layer's own parameters, as a dictionary name -> (n, k, *parameter shape), or as one of the
    forms in `woodbury.layers`.

    With `parameters` the rule applies only to layers that have no other trainable parameters (as a layer has whose
    weight is computed from parameters of its own).

    >>> @woodbury.register_layer(Scale)          # forward: self.gain * x
    ... def scale_rows(layer, inputs, grads):
    ...     return {"gain": inputs.unsqueeze(1) * grads}
    """

    def register(rule: Rule) -> Rule:
        _RULES[kind] = rule, None if parameters is None else frozenset(parameters)
        return rule

    return register


def layer_rule(layer: nn.Module, parameters: Collection[str]) -> Rule | None:
    """The rule for this layer and these of its parameters, or None.

    A subclass inherits a rule only if it inherits `forward` and the private methods that `forward` may call.
    """
    for kind in type(layer).__mro__:
        entry = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if entry is not None:
            rule, covered = entry
            covers_all = covered is None or covered.issuperset(parameters)
            return rule if covers_all and _computes_as(kind, layer) else None
    return None


def _computes_as(kind: type, layer: nn.Module) -> bool:
    """Whether the layer has not replaced `forward` or a private method of `kind`."""
    private = {name for name in dir(kind) if name.startswith("_") and not name.startswith("__")} - set(
        dir(nn.Module)
    )
    methods = ["forward", *(name for name in private if isfunction(getattr(kind, name)))]
    own = vars(layer)
    return all(getattr(type(layer), name) is getattr(kind, name) and name not in own for name in methods)


def as_form(rows: RowForm | Mapping[str, Tensor]) -> RowForm:
    """The form of the rows that a rule returned."""
    if isinstance(rows, Mapping):
        own = {name: value.flatten(0, 1) for name, value in rows.items()}
        # a rule may compute with the parameters themselves
        return ExplicitRows({name: rows.detach() if rows.requires_grad else rows for name, rows in own.items()})
    return rows
