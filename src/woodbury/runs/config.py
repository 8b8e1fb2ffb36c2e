"""The configuration of a run as plain values: saved beside its results, and enough to repeat it."""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from woodbury._files import OneLineError, write_whole
from woodbury.policies.plain import from_plain

FORMAT = 7  # of all files of a run; raised whenever another version would misread one of them
CONFIG_FILE = "config.json"  # in a run folder
_RECORDED_PACKAGES = ("woodbury", "torch", "numpy", "scikit-learn")


class RunFolderError(OneLineError):
    """A run folder has no run or another one, is damaged, or in use."""


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers of a run."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
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
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    return platform.machine()


@dataclass(frozen=True)
class RunConfig:
    """One training run: a data set, a network, an optimizer with all its settings, a seed.

    A `woodbury.Recorder` does not know the fields with a default.
    """

    dataset: str
    optimizer: str
    settings: Mapping[str, Any]  # keyword arguments of the optimizer, defaults included
    seed: int  # of the initial weights, the order of the batches and the curvature samples
    widths: tuple[int, ...] = ()  # of the network, from features to outputs
    batch_size: int = 0  # N1
    epochs: int = 0
    evaluations: int = 1  # per epoch, each on the whole training and test set
    device: str = "cpu"
    dtype: str = "float32"
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)
    machine: Mapping[str, Any] = dataclasses.field(default_factory=this_machine)

    @property
    def network(self) -> str:
        """The name of the network in tables and titles, such as 784-500-10."""
        return "-".join(map(str, self.widths))

    @property
    def recorded(self) -> bool:
        """Whether a `woodbury.Recorder` wrote the run, not `woodbury train`."""
        return not self.widths

    def plain(self) -> dict[str, Any]:
        """The fields as JSON gives them back."""
        fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False, default=float))
        return fields

    def save(self, folder: Path) -> None:
        """Write the configuration as JSON into the run folder, with the checksum of its values."""
        fields = self.plain()
        text = json.dumps({"format": FORMAT, **fields, "sha256": _checksum(fields)}, indent=2) + "\n"
        write_whole(folder / CONFIG_FILE, text.encode())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder holds a configuration, of any version."""
        return (folder / CONFIG_FILE).exists()

    @classmethod
    def load(cls, folder: Path) -> "RunConfig":
        """Read the configuration of a run folder; raises RunFolderError if it has changed."""
        path = folder / CONFIG_FILE
        if not cls.is_in(folder):
            raise RunFolderError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
        try:
            fields = json.loads(path.read_bytes())
            version, sha256 = fields.pop("format"), fields.pop("sha256", None)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):  # of a list or a number
            version, sha256, fields = FORMAT, None, {}
        if version != FORMAT:
            formats = f"format {version}, this one reads {FORMAT}"
            raise RunFolderError(f"{path} was written by another version of woodbury ({formats})")
        if sha256 != _checksum(fields):
            raise RunFolderError(f"{path} is damaged; put back a whole copy, or train again in a new folder")
        return cls(**{**fields, "widths": tuple(fields["widths"])})

    def check_same(self, asked: "RunConfig", folder: Path) -> None:
        """Raise RunFolderError, which names a difference, if this run of a folder is not the one asked for.

        Versions and machine may differ.
        """
        ours, others = _compared(self), _compared(asked)
        for name in ours | others:
            there, here = ours.get(name), others.get(name)
            if there != here:
                reason = f"it has {name} {there}, and {here} was asked for"
                raise RunFolderError(f"cannot resume {folder}: {reason}; start in another folder")

    def optimizer_settings(self) -> dict[str, Any]:
        """The settings as the optimizer takes them: the damping a policy again, not a dictionary."""
        return {name: from_plain(value) for name, value in self.settings.items()}


def _checksum(fields: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object, the same for any spacing and order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _compared(config: RunConfig) -> dict[str, Any]:
    """The fields and settings that make a run."""
    fields = {name: value for name, value in config.plain().items() if name not in ("versions", "machine")}
    return {f"settings {name}": value for name, value in fields.pop("settings").items()} | fields


# -- where the runs of a command go: `out/<data set>-<number>/<optimizer>-seed<seed>`


def run_folder(folder: Path, config: RunConfig) -> Path:
    """The folder of one run inside the folder of a command."""
    return folder / f"{config.optimizer}-seed{config.seed}"


def new_folder(out: Path, dataset: str) -> Path:
    """Create and return the first of `out/dataset-1`, `out/dataset-2`, ... that does not exist."""
    out.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with suppress(FileExistsError):
            folder = out / f"{dataset}-{number}"
            folder.mkdir()
            break
    return folder


def folder_to_resume(out: Path, configs: Sequence[RunConfig]) -> Path | None:
    """The newest of `out/dataset-1`, `out/dataset-2`, ... in which one of these runs was begun, if any.

    Raises RunFolderError if a run of that name has other settings.
    """
    start = f"{configs[0].dataset}-"
    numbers = [path.name.removeprefix(start) for path in out.glob(f"{start}*")]
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        folders = {run_folder(out / f"{start}{number}", config): config for config in configs}
        begun = [folder for folder in folders if RunConfig.is_in(folder)]
        for folder in begun:
            RunConfig.load(folder).check_same(folders[folder], folder)
        if begun:
            return out / f"{start}{number}"
    return None
