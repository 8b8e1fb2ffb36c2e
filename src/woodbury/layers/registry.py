"""The open registry from layer class to rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from woodbury.layers.forms import ExplicitRows, RowForm

# (layer, input (n, ...), output gradients (n, k, ...)) -> rows
Rule = Callable[[nn.Module, Tensor, Tensor], "RowForm | Mapping[str, Tensor]"]

_RULES: dict[type[nn.Module], Rule] = {}


def register_layer(kind: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Function decorator that makes a function the rule for layers of class `kind`.

    The function gets the layer, its input (n, ...) and the gradients of k scalars per sample in its
    output, (n, k, *output shape). It returns the gradients of those scalars in the layer's own
    parameters, as a dictionary name -> (n, k, *parameter shape), or as one of the forms in
    `woodbury.layers`.

    >>> @woodbury.register_layer(Scale)          # forward: self.gain * x
    ... def scale_rows(layer, inputs, grads):
    ...     return {"gain": inputs.unsqueeze(1) * grads}
    """

    def register(rule: Rule) -> Rule:
        _RULES[kind] = rule
        return rule

    return register


def layer_rule(layer: nn.Module) -> Rule | None:
    """The rule for this layer, or None. A subclass inherits a rule only if it inherits `forward` too."""
    for kind in type(layer).__mro__:
        if kind in _RULES:
            inherited = type(layer).forward is kind.forward and "forward" not in vars(layer)
            return _RULES[kind] if inherited else None
    return None


def as_form(rows: RowForm | Mapping[str, Tensor]) -> RowForm:
    """Rows as a rule returned them, brought to a form."""
    if isinstance(rows, Mapping):
        return ExplicitRows({name: value.flatten(0, 1) for name, value in rows.items()})
    return rows
