"""The configuration of a run as plain values: saved beside its results, and enough to repeat it."""

import dataclasses
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

from woodbury.parallel.group import all_processes
from woodbury.policies.plain import from_plain
from woodbury.runs.storage import RunFolderError, printable, read_checked, with_checksum, write_whole

CONFIG_FILE = "config.json"  # in a run folder
# What a `woodbury.Recorder` does not know of a run, with what stands for it.
UNKNOWN: dict[str, Any] = {"widths": (), "batch_size": 0, "epochs": 0, "dtype": ""}
NAMES_IN_LOOPS = {"dataset": "problem", "optimizer": "method"}  # what a recorder calls them
_LONGEST = 100  # characters of the name of a data set

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
    def network(self) -> str:
        """The name of the network in tables and titles, such as 784-500-10."""
        return "-".join(map(str, self.widths))

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

    def check_same(self, asked: "RunConfig", folder: Path, way_out: str) -> None:
        """Raise RunFolderError, which names a difference, if this run of a folder is not the one asked for.

        Versions and machine may differ.
        """
        own, others = self._flat(), asked._flat()
        for field in own | others:
            there, here = own.get(field), others.get(field)
            if there != here:
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

    Raises RunFolderError if runs of these names were begun, but all of them with other settings.
    """
    dataset = configs[0].dataset
    numbers = [path.name.removeprefix(f"{dataset}-") for path in out.glob(f"{dataset}-*") if path.is_dir()]
    mismatch: RunFolderError | None = None  # in the newest folder with runs of these names
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        folder = out / f"{dataset}-{number}"
        try:
            begun = [check_same_run(config, run_folder(folder, config)) for config in configs]
            if any(begun):
                return folder
        except RunFolderError as error:  # another experiment with the same optimizer; try an older folder
            mismatch = mismatch or error
    if mismatch is not None:
        raise mismatch
    return None


def check_same_run(config: RunConfig, folder: Path) -> bool:
    """Whether the folder holds a run; raises RunFolderError if that is another one than this."""
    if not RunConfig.is_in(folder):
        return False
    RunConfig.load(folder).check_same(config, folder, "without --resume the run gets a new folder")
    return True
