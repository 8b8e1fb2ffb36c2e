"""The configuration of a run as plain values: saved beside its results, and enough to repeat it."""

import dataclasses
import importlib.metadata
import inspect
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import torch

from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.storage import write_whole
from woodbury.optim import OPTIMIZERS
from woodbury.policies import from_plain, to_plain

FORMAT = 3  # of a run folder; raised whenever an older version would misread it
_READABLE = (2, FORMAT)  # 2 has the fields of a damping policy without its name
CONFIG_FILE, RECORDS_FILE = "config.json", "records.jsonl"  # in a run folder

# Arguments of an optimizer that are objects, not settings.
_NOT_SETTINGS = ("model", "loss", "params", "forward")
NOT_INSTALLED = "not installed"  # in place of a version
_RECORDED_PACKAGES = ("woodbury", "torch", "numpy", "scikit-learn")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers of a run."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = NOT_INSTALLED
    return versions


def this_machine() -> dict[str, Any]:
    """What the seconds of a run depend on: processor, threads, GPU."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    """The name of the processor where the system gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


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
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write the configuration as JSON into the run folder."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_whole(folder / CONFIG_FILE, text.encode())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder holds a configuration, of any version."""
        return (folder / CONFIG_FILE).exists()

    @classmethod
    def load(cls, folder: Path) -> "RunConfig":
        """Read the configuration of a run folder."""
        path = folder / CONFIG_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunFolderError(f"{folder} is not a run folder: it has no {CONFIG_FILE}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path} is damaged: {error}") from None
        return cls.from_dict(values, where=str(folder))

    @classmethod
    def from_dict(cls, values: Any, where: str) -> "RunConfig":
        """The configuration in a dictionary that came from JSON; `where` names its file in messages."""
        version = values.get("format", 1) if isinstance(values, dict) else None
        if version not in _READABLE:
            readable = " and ".join(map(str, _READABLE))
            raise RunFolderError(
                f"{where} was written by another version of woodbury (format {version}, this one reads {readable})"
            )
        missing = sorted(_TYPES.keys() - values.keys())
        if missing:
            raise RunFolderError(f"{where} is damaged: its configuration lacks {', '.join(missing)}")
        for name, kind in _TYPES.items():
            if type(values[name]) is not kind or (name == "widths" and {type(w) for w in values[name]} != {int}):
                raise RunFolderError(f"{where} is damaged: its configuration has no proper '{name}'")
        try:
            settings = {name: to_plain(from_plain(value)) for name, value in values["settings"].items()}
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{where} has settings that cannot be read: {one_line(error)}") from None
        converted = {"widths": tuple(values["widths"]), "settings": settings, "format": FORMAT}
        return cls(**{name: values[name] for name in _TYPES} | converted)

    def differences(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """{name: (own value, other's)} where the two differ, apart from versions and machine."""
        own, others = self._flat(), other._flat()
        pairs = {name: (own.get(name), others.get(name)) for name in own | others}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _flat(self) -> dict[str, Any]:
        values = json.loads(json.dumps(dataclasses.asdict(self)))  # a tuple becomes a list, as in a saved one
        for name in ("versions", "machine", "format"):
            del values[name]
        return {f"settings {name}": value for name, value in values.pop("settings").items()} | values

    def optimizer_settings(self) -> dict[str, Any]:
        """The settings as the optimizer takes them: the damping a policy again, not a dictionary."""
        return {name: from_plain(value) for name, value in self.settings.items()}


# The type of each field as JSON gives it; true and false are not of type int.
_IN_JSON: dict[Any, Any] = {Mapping: dict, tuple: list}
_TYPES = {field.name: _IN_JSON.get(get_origin(field.type), field.type) for field in dataclasses.fields(RunConfig)}


def default_settings(optimizer: str) -> dict[str, Any]:
    """Every setting of an optimizer with its default, read from its signature."""
    make: Any = OPTIMIZERS[optimizer]
    return {
        name: parameter.default
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in _NOT_SETTINGS and parameter.default is not inspect.Parameter.empty
    }


def full_settings(optimizer: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, and the default of every other setting of the optimizer, as plain values for JSON.

    Raises TypeError that names a setting the optimizer does not have, an unknown policy or an unknown field.
    """
    defaults = default_settings(optimizer)
    unknown = sorted(settings.keys() - defaults.keys())
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}, only {', '.join(sorted(defaults))}")
    return {name: to_plain(from_plain(settings.get(name, default))) for name, default in defaults.items()}
