"""The configuration of a run as plain values: saved beside its results, and enough to repeat it."""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from woodbury._group import all_processes
from woodbury.experiments.errors import RunFolderError, printable
from woodbury.experiments.storage import read_checked, with_checksum, write_whole
from woodbury.optimizers import default_arguments
from woodbury.policies.plain import change, from_plain, to_plain

CONFIG_FILE = "config.json"  # in a run folder
# What a `woodbury.Recorder` does not know of a run, with what stands for it.
UNKNOWN: dict[str, Any] = {"widths": (), "batch_size": 0, "epochs": 0, "dtype": ""}
NAMES_IN_LOOPS = {"dataset": "problem", "optimizer": "method"}  # what a recorder calls them
_LONGEST = 100  # characters of the name of a data set

# Arguments of an optimizer that are objects, not settings.
_NOT_SETTINGS = ("model", "loss", "params", "forward")
NOT_INSTALLED = "not installed"  # in place of a version
_RECORDED_PACKAGES = ("woodbury", "torch", "numpy", "scikit-learn")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers of a run."""
    versions = {"python": platform.python_version(), **dict.fromkeys(_RECORDED_PACKAGES, NOT_INSTALLED)}
    for package in _RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def this_machine() -> dict[str, Any]:
    """What the seconds of a run depend on: processor, threads, GPU, processes."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": all_processes().size,
    }


def _processor() -> str:
    """The name of the processor where the system gives it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    return platform.machine()


@dataclass(frozen=True)
class RunConfig:
    """One training run: a data set, a network, an optimizer with all its settings, a seed."""

    dataset: str
    optimizer: str
    settings: Mapping[str, Any]  # keyword arguments of the optimizer, defaults included
    widths: tuple[int, ...]  # of the network, from features to outputs
    batch_size: int  # N1
    epochs: int
    seed: int  # of the initial weights, the order of the batches and the curvature samples
    evaluations: int = 1  # per epoch, each on the whole training and test set
    device: str = "cpu"
    dtype: str = "float32"
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)
    machine: Mapping[str, Any] = dataclasses.field(default_factory=this_machine)

    @classmethod
    def of_loop(cls, dataset: str, optimizer: str, settings: Mapping[str, Any], seed: int) -> "RunConfig":
        """What is known of a run that a training loop of the user's own records."""
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        return cls(dataset, optimizer, settings, seed=seed, device=device, **UNKNOWN)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The configuration whose `dataclasses.asdict` went through JSON."""
        name = printable(values["dataset"], _LONGEST)  # a title of tables and figures, whoever wrote the file
        return cls(**{**values, "dataset": name, "widths": tuple(values["widths"])})

    @property
    def recorded(self) -> bool:
        """Whether a `woodbury.Recorder` wrote the run, not `woodbury train`."""
        return not self.widths

    def save(self, folder: Path) -> None:
        """Write the configuration as JSON into the run folder, with the checksum of its values."""
        text = json.dumps(with_checksum(dataclasses.asdict(self)), indent=2) + "\n"
        write_whole(folder / CONFIG_FILE, text.encode())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder holds a configuration, of any version."""
        return (folder / CONFIG_FILE).exists()

    @classmethod
    def load(cls, folder: Path) -> "RunConfig":
        """Read the configuration of a run folder."""
        if not cls.is_in(folder):
            raise RunFolderError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
        return cls.from_plain(read_checked(folder / CONFIG_FILE))

    def differences(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """{name: (own value, other's)} where the two differ, apart from versions and machine."""
        own, others = self._flat(), other._flat()
        pairs = {name: (own.get(name), others.get(name)) for name in own | others}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def check_same(self, asked: "RunConfig", folder: Path, way_out: str) -> None:
        """Raise RunFolderError, which names a difference, if this run of a folder is not the one asked for."""
        for field, (there, here) in self.differences(asked).items():
            name = NAMES_IN_LOOPS.get(field, field) if self.recorded else field
            reason = f"it has {name} {there}, and {here} was asked for"
            raise RunFolderError(f"cannot resume {folder}: {reason}; {way_out}")

    def _flat(self) -> dict[str, Any]:
        values = json.loads(json.dumps(dataclasses.asdict(self)))  # a tuple becomes a list, as in a saved one
        del values["versions"], values["machine"]
        return {f"settings {name}": value for name, value in values.pop("settings").items()} | values

    def optimizer_settings(self) -> dict[str, Any]:
        """The settings as the optimizer takes them: the damping a policy again, not a dictionary."""
        return {name: from_plain(value) for name, value in self.settings.items()}


def default_settings(optimizer: str) -> dict[str, Any]:
    """Every setting of an optimizer with its default."""
    arguments = default_arguments(optimizer)
    return {name: default for name, default in arguments.items() if name not in _NOT_SETTINGS}


def full_settings(optimizer: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, and the default of every other setting of the optimizer, as plain values for JSON.

    A name `setting.field` changes one field of a policy, whichever else `settings` gives or the default. Raises
    TypeError that names a setting the optimizer does not have, an unknown policy or an unknown field.
    """
    defaults = default_settings(optimizer)
    fields: dict[str, dict[str, Any]] = {}  # by setting, then by field
    for entry, value in settings.items():
        name, dot, field = entry.partition(".")
        if name not in defaults:
            raise TypeError(f"there is no setting {name!r}, only {', '.join(sorted(defaults))}")
        if dot:
            fields.setdefault(name, {})[field] = value
    chosen = {name: settings.get(name, default) for name, default in defaults.items()}
    changed = {name: change(name, chosen[name], given) for name, given in fields.items()}
    return {name: to_plain(from_plain(value)) for name, value in {**chosen, **changed}.items()}
