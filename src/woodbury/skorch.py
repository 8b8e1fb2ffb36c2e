"""skorch: `NeuralNetClassifier` and `NeuralNetRegressor` with the optimizers of this package.

>>> net = woodbury.skorch.NeuralNetClassifier(
...     Network, criterion=torch.nn.CrossEntropyLoss, optimizer=woodbury.GaussNewton,
...     optimizer__momentum=0.9, lr=0.3, max_epochs=10, batch_size=60,
... )
>>> net.fit(X, y)

The only difference to skorch's own is how the optimizer is made: with the module and the criterion, in place of
the parameters. Other optimizers are made as ever. Any optimizer setting is a parameter, `optimizer__damping` for
one, so that grid search and `set_params` reach it.
"""

from __future__ import annotations

from typing import Any

import skorch

from woodbury.optim.optimizer import SecondOrder


class _SecondOrderMixin:
    """Makes an optimizer of this package from module and criterion."""

    optimizer: Any
    module_: Any
    criterion_: Any

    def initialize_optimizer(self, triggered_directly: Any = None) -> Any:
        if not (isinstance(self.optimizer, type) and issubclass(self.optimizer, SecondOrder)):
            return super().initialize_optimizer()  # type: ignore[misc]
        named = self.module_.named_parameters()
        (groups,), kwargs = self.get_params_for_optimizer("optimizer", list(named))  # type: ignore[attr-defined]
        self.optimizer_ = self.optimizer(self.module_, self.criterion_, params=groups, **kwargs)
        return self


class NeuralNetClassifier(_SecondOrderMixin, skorch.NeuralNetClassifier):
    """`skorch.NeuralNetClassifier` for the optimizers of this package. Use criterion=torch.nn.CrossEntropyLoss."""


class NeuralNetBinaryClassifier(_SecondOrderMixin, skorch.NeuralNetBinaryClassifier):
    """`skorch.NeuralNetBinaryClassifier` for the optimizers of this package."""


class NeuralNetRegressor(_SecondOrderMixin, skorch.NeuralNetRegressor):
    """`skorch.NeuralNetRegressor` for the optimizers of this package."""
