"""Layer rules: how the rows of a layer follow from its input and its back-propagated factor columns."""

from woodbury.layers import rules as _rules  # noqa: F401  (fills the registry)
from woodbury.layers.forms import ExplicitRows, Layout, OuterRows, RowForm
from woodbury.layers.registry import layer_rule, register_layer

__all__ = ["ExplicitRows", "Layout", "OuterRows", "RowForm", "layer_rule", "register_layer"]
