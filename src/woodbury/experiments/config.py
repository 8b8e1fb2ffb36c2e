"""What a run is made of, as plain values: saved beside its results and enough to repeat it."""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages whose version can change the numbers of a run.
_RECORDED_PACKAGES = ("woodbury", "torch", "numpy", "scikit-learn")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a run's numbers."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclass(frozen=True)
class RunConfig:
    """One training run: a data set, a network, an optimizer with its settings, a seed."""

    dataset: str
    optimizer: str
    settings: Mapping[str, Any]  # keyword arguments of the optimizer
    widths: tuple[int, ...]  # of the network, from features to classes
    batch_size: int  # N1
    epochs: int
    seed: int  # of the initial weights, the order of the batches and the curvature samples
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)

    def save(self, path: Path) -> None:
        """Write the configuration as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "RunConfig":
        """Read a configuration that `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "widths": tuple(values["widths"])})


@dataclass(frozen=True)
class Preset:
    """The network and the settings with which a data set is trained unless told otherwise."""

    widths: tuple[int, ...]
    batch_size: int
    epochs: int
    settings: Mapping[str, Mapping[str, Any]]  # by optimizer; one that is absent keeps its own defaults

    def run(self, dataset: str, optimizer: str, seed: int, epochs: int | None = None) -> RunConfig:
        """The configuration of one run; `epochs=None` takes the preset's number."""
        settings = dict(self.settings.get(optimizer, {}))
        if "seed" in settings:
            settings["seed"] = seed
        return RunConfig(
            dataset=dataset,
            optimizer=optimizer,
            settings=settings,
            widths=self.widths,
            batch_size=self.batch_size,
            epochs=self.epochs if epochs is None else epochs,
            seed=seed,
        )


# `"seed": None` marks an optimizer that draws random numbers; it receives the seed of its run.
# Damping is not set here: the Levenberg-Marquardt rule with the paper's constants is the default.
_SMW = {"curvature_samples": 0.5, "seed": None}

PRESETS: dict[str, Preset] = {
    "digits": Preset(
        widths=(64, 100, 10),
        batch_size=60,
        epochs=20,
        # lr and momentum: the best of one grid for all, see docs/digits.md. Adam was not part of that grid:
        # its rate is the best of 0.001, 0.003, 0.01 and 0.03, so the largest one tried.
        settings={
            "smw-gn": {"lr": 0.3, "momentum": 0.9, **_SMW},
            "smw-ng": {"lr": 0.3, "momentum": 0.9, **_SMW},
            "smw-ng-bd": {"lr": 1.0, "momentum": 0.9, **_SMW},
            "sgd": {"lr": 1.0, "momentum": 0.9},
            "adam": {"lr": 0.03},
        },
    ),
}
