"""What a run is made of, as plain values: saved beside its results and enough to repeat it."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from woodbury.experiments.errors import RunFolderError, one_line
from woodbury.experiments.machine import installed_versions, this_machine
from woodbury.experiments.storage import write_whole
from woodbury.optim import OPTIMIZERS
from woodbury.policies import from_plain, to_plain

FORMAT = 3  # of a run folder; raised whenever an older reader would misread it
_READABLE = (2, FORMAT)  # 2 has the fields of a damping policy without its name
CONFIG_FILE, RECORDS_FILE = "config.json", "records.jsonl"  # in a run folder

# Arguments of an optimizer that are objects of the program rather than settings of a run.
_NOT_SETTINGS = ("model", "loss", "params", "forward")


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
    evaluations: int = 1  # of the whole training and test set, in each epoch
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
        """Whether the folder holds a configuration, of whatever version."""
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
        """The configuration in a dictionary that came from JSON; `where` names it in messages."""
        found = values.get("format", 1) if isinstance(values, dict) else None
        if found not in _READABLE:
            raise RunFolderError(
                f"{where} was written by another version of woodbury (format {found}, this one reads {FORMAT})"
            )
        missing = sorted(_TYPES.keys() - values.keys())
        if missing:
            raise RunFolderError(f"{where} is damaged: its configuration lacks {', '.join(missing)}")
        proper = {name: type(values[name]) is kind for name, kind in _TYPES.items()}
        proper["widths"] = proper["widths"] and {type(width) for width in values["widths"]} == {int}
        for name in proper:
            if not proper[name]:
                raise RunFolderError(f"{where} is damaged: its configuration has no proper '{name}'")
        try:
            settings = {name: to_plain(from_plain(value)) for name, value in values["settings"].items()}
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{where} has settings that cannot be read: {one_line(error)}") from None
        read = {"widths": tuple(values["widths"]), "settings": settings, "format": FORMAT}
        return cls(**{name: values[name] for name in _TYPES} | read)

    def differences(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """What the two ask for differently, name -> (own, other's); versions and machine are not asked for."""
        asked = [
            field.name for field in dataclasses.fields(self) if field.name not in ("versions", "machine", "format")
        ]
        # through JSON, where a tuple is a list
        pairs = {name: [json.loads(json.dumps(getattr(run, name))) for run in (self, other)] for name in asked}
        return {name: (own, others) for name, (own, others) in pairs.items() if own != others}

    def optimizer_settings(self) -> dict[str, Any]:
        """The settings as the optimizer takes them: the damping a policy again, not a dictionary."""
        return {name: from_plain(value) for name, value in self.settings.items()}


# The type of each field as JSON gives it; true and false are not of type int.
_IN_JSON: dict[Any, Any] = {Mapping: dict, tuple: list}
_TYPES = {field.name: _IN_JSON.get(get_origin(field.type), field.type) for field in dataclasses.fields(RunConfig)}


def default_settings(optimizer: str) -> dict[str, Any]:
    """Every setting of an optimizer with its default, as its signature gives them."""
    maker: Any = OPTIMIZERS[optimizer]
    return {
        name: parameter.default
        for name, parameter in inspect.signature(maker).parameters.items()
        if name not in _NOT_SETTINGS and parameter.default is not inspect.Parameter.empty
    }


def full_settings(optimizer: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` and the defaults of every other setting of the optimizer, as JSON can hold them.

    Raises TypeError for a setting the optimizer does not have, and for a policy or a field there is not.
    """
    defaults = default_settings(optimizer)
    unknown = sorted(settings.keys() - defaults.keys())
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}, only {', '.join(sorted(defaults))}")
    return {name: to_plain(from_plain(settings.get(name, default))) for name, default in defaults.items()}
