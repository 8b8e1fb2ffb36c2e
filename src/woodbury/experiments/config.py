"""The configuration of a run as plain values: saved beside its results, and enough to repeat it."""

import dataclasses
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import torch

from woodbury._group import all_processes
from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.storage import SEAL, read_json, seal, write_whole
from woodbury.optimizers import OPTIMIZERS, default_arguments
from woodbury.policies import change, from_plain, to_plain

FORMAT = 4  # of a run folder; raised whenever an older version would misread it
RECORDED = 5  # the format of a run that `woodbury.Recorder` wrote: it knows nothing of the fields in UNKNOWN
UNKNOWN: dict[str, Any] = {"widths": (), "batch_size": 0, "epochs": 0, "dtype": ""}  # with what stands for them
_READABLE = (
    2,
    3,
    FORMAT,
    RECORDED,
)  # 2 has the fields of a damping policy without its name, 2 and 3 have no checksum
_SEALED = 4  # formats from here on have a checksum
CONFIG_FILE = "config.json"  # in a run folder
_REMEDY = "put back a whole copy, or train again in a new folder"
_LONGEST = 100  # characters of a name
_LARGEST = 2**63 - 1

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

    @classmethod
    def of_loop(cls, problem: str, method: str, settings: Mapping[str, Any], seed: int) -> "RunConfig":
        """What is known of a run that a training loop of the user's own records."""
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        return cls(problem, method, settings, seed=seed, device=device, format=RECORDED, **UNKNOWN)

    @property
    def recorded(self) -> bool:
        """Whether a `woodbury.Recorder` wrote the run, not `woodbury train`."""
        return self.format == RECORDED

    def save(self, folder: Path) -> None:
        """Write the configuration as JSON into the run folder, with the checksum of its values."""
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        text = json.dumps({**values, SEAL: seal(values)}, indent=2) + "\n"
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
            values = read_json(path.read_bytes())
        except FileNotFoundError:
            raise RunFolderError(f"{folder} is not a run folder: it has no {CONFIG_FILE}") from None
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged: {one_line(error)}; {_REMEDY}") from None
        config = cls.from_dict(values, where=str(folder))
        check_seal(values, str(path))
        return config

    @classmethod
    def from_dict(cls, values: Any, where: str) -> "RunConfig":
        """The configuration in a dictionary that came from JSON; `where` names its file in messages."""
        version = values.get("format", 1) if isinstance(values, dict) else None
        check_format(version, where)
        missing = sorted(_TYPES.keys() - values.keys())
        if missing:
            raise RunFolderError(f"{where} is damaged: its configuration lacks {', '.join(missing)}")
        for name in values.keys() - _TYPES.keys() - {SEAL}:
            raise RunFolderError(f"{where} is damaged: its configuration has an unknown '{name}'")
        for name, kind in _TYPES.items():
            if type(values[name]) is not kind or not _is_proper(name, values[name], version == RECORDED):
                raise RunFolderError(f"{where} is damaged: its configuration has no proper '{name}'")
        try:
            settings = {name: to_plain(from_plain(value)) for name, value in values["settings"].items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{where} has settings that cannot be read: {one_line(error)}") from None
        converted = {
            "widths": tuple(values["widths"]),
            "settings": settings,
            "format": RECORDED if version == RECORDED else FORMAT,
        }
        return cls(**{name: values[name] for name in _TYPES} | converted)

    def with_all_settings(self, where: str) -> "RunConfig":
        """The configuration with the default of every setting that did not exist yet when it was saved.

        Raises RunFolderError that names a setting the optimizer does not have; `where` names its folder.
        """
        if self.optimizer not in OPTIMIZERS:
            return self
        try:
            settings = full_settings(self.optimizer, self.settings)
        except (TypeError, ValueError) as error:
            raise RunFolderError(
                f"cannot resume {where}: it was written by another version of woodbury ({one_line(error)})"
            ) from None
        return dataclasses.replace(self, settings=settings)

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


def is_name(value: Any) -> bool:
    """Whether a value can stand in a table, a figure and a file name: a short line of printable characters."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()


def _is_count(value: int) -> bool:
    return 0 < value <= _LARGEST


def _are_widths(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int and _is_count(value) for value in values)


def _are_settings(values: dict[str, Any]) -> bool:
    return all(is_name(name) and is_setting(value) for name, value in values.items())


def is_setting(value: Any) -> bool:
    """Whether a value can be that of a setting: a finite number, a name, true, false, null, or a few of these."""
    if isinstance(value, dict):
        return len(value) <= _LONGEST and _are_settings(value)
    if isinstance(value, list):
        return len(value) <= _LONGEST and all(map(is_setting, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return value is None or is_name(value)


# What a field must be beyond its type.
_PROPER: dict[str, Callable[[Any], bool]] = {
    "dataset": is_name,
    "optimizer": is_name,
    "settings": _are_settings,
    "widths": _are_widths,
    "batch_size": _is_count,
    "epochs": _is_count,
    "seed": lambda seed: 0 <= seed <= _LARGEST,
    "evaluations": _is_count,
    "device": lambda device: device.split(":")[0] in ("cpu", "cuda") and is_name(device),
    "dtype": lambda dtype: dtype in ("float32", "float64"),
    "versions": lambda versions: all(isinstance(version, str) for version in versions.values()),
}


def _is_proper(name: str, value: Any, recorded: bool) -> bool:
    """Whether a field has a value that it can have; of a recorded run some are not known."""
    if recorded and name in UNKNOWN:
        return bool((tuple(value) if name == "widths" else value) == UNKNOWN[name])
    return name not in _PROPER or _PROPER[name](value)


def check_format(version: Any, where: str) -> None:
    """Raise RunFolderError unless a file of this format can be read."""
    if type(version) is not int or version not in _READABLE:
        readable = f"{', '.join(map(str, _READABLE[:-1]))} and {_READABLE[-1]}"
        raise RunFolderError(
            f"{where} was written by another version of woodbury (format {version}, this one reads {readable})"
        )


def check_seal(values: Mapping[str, Any], path: str) -> None:
    """Raise RunFolderError if a JSON object has not the checksum it had when it was written.

    Formats before 4 had none: there a changed value cannot be known.
    """
    if SEAL not in values:
        if values.get("format", 1) >= _SEALED:
            raise RunFolderError(f"{path} is damaged: it lacks its checksum '{SEAL}'; {_REMEDY}")
    elif values[SEAL] != seal(values):
        raise RunFolderError(
            f"{path} is damaged: it has changed since it was written ('{SEAL}' does not agree); {_REMEDY}"
        )


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
