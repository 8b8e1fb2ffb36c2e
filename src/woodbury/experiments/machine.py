"""What the figures of a run depend on besides its settings: the machine, and versions of packages."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

NOT_INSTALLED = "not installed"  # in place of a version
# Packages whose version can change the numbers of a run.
_RECORDED_PACKAGES = ("woodbury", "torch", "numpy", "scikit-learn")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a run's numbers."""
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
    """The processor's own name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()
