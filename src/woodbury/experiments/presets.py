"""The default network and settings for each data set.

Those of the paper (Ren & Goldfarb, section 7) are in `PAPER`; every data set has an entry in `PRESETS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from woodbury.optimizers import OPTIMIZERS, default_arguments
from woodbury.policies.plain import from_plain, to_plain
from woodbury.runs.config import RunConfig

# Arguments of an optimizer that are objects, not settings.
_NOT_SETTINGS = ("model", "loss", "params", "forward")


@dataclass(frozen=True)
class Preset:
    """A network, its batch sizes and the settings of each optimizer on one data set."""

    widths: tuple[int, ...]
    batch_size: int  # N1
    epochs: int
    curvature_samples: int | float  # N2, or N2 / N1
    settings: Mapping[str, Mapping[str, Any]]  # by optimizer; other settings have the optimizer's own defaults
    evaluations: int = 1  # per epoch

    def config(
        self, dataset: str, optimizer: str, seed: int, settings: Mapping[str, Any] | None = None, **others: Any
    ) -> RunConfig:
        """The configuration of one run; settings and other fields that differ from the preset's, None for its own.

        Raises TypeError that names a setting the optimizer does not have.
        """
        shared = {"curvature_samples": self.curvature_samples, "seed": seed}
        known = default_settings(optimizer)
        preset = {name: value for name, value in shared.items() if name in known}
        preset |= self.settings.get(optimizer, {})
        full = full_settings(optimizer, {**preset, **(settings or {})})
        names = ("widths", "batch_size", "epochs", "evaluations")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {name: value for name, value in others.items() if value is not None}
        return RunConfig(dataset, optimizer, full, seed=seed, **fields)


def default_settings(optimizer: str) -> dict[str, Any]:
    """Every setting of an optimizer with its default."""
    arguments = default_arguments(optimizer)
    return {name: default for name, default in arguments.items() if name not in _NOT_SETTINGS}


def full_settings(optimizer: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, and the default of every other setting of the optimizer, as plain values for JSON.

    Raises TypeError that names a setting the optimizer does not have, an unknown policy or an unknown field.
    """
    defaults = default_settings(optimizer)
    for name in settings:
        if name not in defaults:
            raise TypeError(f"there is no setting {name!r}, only {', '.join(sorted(defaults))}")
    return {name: to_plain(from_plain(value)) for name, value in {**defaults, **settings}.items()}


def try_settings(config: RunConfig) -> None:
    """Raise what these settings would raise in a run, by a step on a random batch of the same size."""
    settings = config.optimizer_settings()
    with torch.random.fork_rng(devices=[]):
        inputs, targets = torch.randn(config.batch_size, 2), torch.randint(2, (config.batch_size,))
        model = nn.Linear(2, 2)
        OPTIMIZERS[config.optimizer](model, nn.CrossEntropyLoss(), **settings).step(inputs, targets)
    config.plain()  # what JSON cannot hold


def _one_rate(rate: float) -> dict[str, dict[str, Any]]:
    """The same learning rate for every optimizer but Adam."""
    return {name: {"lr": rate} for name in OPTIMIZERS if name != "adam"}


# Tuned by the paper for each method (caption of its webspam figure).
_WEBSPAM_RATES = {
    "sgd": {"lr": 0.4},
    "hf": {"lr": 0.05},
    "smw-gn": {"lr": 0.05},
    "smw-ng": {"lr": 0.1},
    "smw-ng-bd": {"lr": 0.1},
    "kfac": {"lr": 0.1},
}

# Damping is not set anywhere here: the Levenberg-Marquardt rule with the paper's constants is the default.
PAPER: dict[str, Preset] = {
    "mnist": Preset((784, 500, 10), 60, 10, 30, _one_rate(0.1)),
    # A factor of KFAC has 3073 rows here: it is inverted every 20 steps, as Martens & Grosse (2015) do.
    "cifar10": Preset((3072, 400, 400, 10), 100, 10, 50, {**_one_rate(0.01), "kfac": {"lr": 0.01, "refresh": 20}}),
    "webspam": Preset((254, 400, 400, 1), 60, 1, 30, _WEBSPAM_RATES, evaluations=10),
    "covtype": Preset((54, 400, 400, 1), 60, 1, 30, _WEBSPAM_RATES, evaluations=10),  # not in the paper
}

PRESETS: dict[str, Preset] = {
    "digits": Preset(
        widths=(64, 100, 10),
        batch_size=60,
        epochs=20,
        curvature_samples=0.5,
        # lr and momentum: the best of one grid for all, see docs/digits.md. Adam was not in that grid: its rate is
        # the best of 0.001, 0.003, 0.01 and 0.03.
        settings={
            "smw-gn": {"lr": 0.3, "momentum": 0.9},
            "smw-ng": {"lr": 0.3, "momentum": 0.9},
            "smw-ng-bd": {"lr": 1.0, "momentum": 0.9},
            "hf": {"lr": 2.0},
            "kfac": {"lr": 1.0},
            "sgd": {"lr": 1.0, "momentum": 0.9},
            "adam": {"lr": 0.03},
        },
    ),
    **PAPER,
}
