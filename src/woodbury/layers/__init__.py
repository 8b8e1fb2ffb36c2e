"""Layer rules: how the rows of a layer follow from its input and its back-propagated factor columns."""

from woodbury.layers import maps as _maps  # noqa: F401  (it registers its rules)
from woodbury.layers.forms import ExplicitRows, RowForm
from woodbury.layers.outer import Layout, OuterRows
from woodbury.layers.rules import layer_rule, register_layer
from woodbury.layers.shared import EmbeddingRows, SharedRows
from woodbury.layers.sums import SumRows

__all__ = ["EmbeddingRows", "ExplicitRows", "Layout", "OuterRows", "RowForm", "SharedRows", "SumRows"]
__all__ += ["layer_rule", "register_layer"]
