"""Loss rules: the values, residuals and curvature of a loss at the outputs."""

from woodbury.losses import elementwise as _elementwise  # noqa: F401  (these fill the registry)
from woodbury.losses import softmax as _softmax  # noqa: F401
from woodbury.losses.rules import LossRule, loss_rule, register_loss

__all__ = ["LossRule", "loss_rule", "register_loss"]
