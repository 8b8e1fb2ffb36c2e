"""The checkpoint of a run: one line that says what follows, then what torch.save writes.

    woodbury checkpoint 1 <SHA-256 of what follows and of the two numbers> <bytes that follow>

The checksum is compared before anything is unpickled, and only tensors and plain values are (`weights_only`), so
that no file can run code. Then each field is compared with that of a run that has just begun. Older versions wrote
what torch.save gives and nothing before it: there the CRC-32 of each part of the archive is compared.
"""

import hashlib
import io
import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodbury.experiments.errors import RunFolderError, one_line, printable
from woodbury.experiments.storage import write_whole

FORMAT = 1  # raised whenever an older version would misread a checkpoint
_HEADER = re.compile(rb"woodbury checkpoint ([0-9]{1,9}) ([0-9a-f]{64}) ([0-9]{1,18})\n")
_ARCHIVE = b"PK\x03\x04"  # how the file that torch.save writes begins
_REMEDY = "delete it to train from the start"
_SINCE_FORMAT_1 = ("records_sha256",)  # fields that older versions did not write
# What a step needs and no default can stand for.
_NEEDED_STATE = ("damping", "generator")


class _FaultError(ValueError):
    """What is wrong with a checkpoint, without the name of its file."""

    verdict = "is damaged"


class _ForeignError(_FaultError):
    """The checkpoint is whole, but of another run or version."""

    verdict = "cannot be used"


def as_bytes(values: Any) -> bytes:
    """What torch.save writes, in memory: on a full disk it would raise errors that are no OSError."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def write_checkpoint(path: Path, values: Mapping[str, Any]) -> None:
    """Write a checkpoint so that at any moment the file holds the old one or the new one."""
    content = as_bytes(dict(values))
    header = f"woodbury checkpoint {FORMAT} {_checksum(FORMAT, content)} {len(content)}\n"
    write_whole(path, header.encode() + content)


def read_checkpoint(path: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a checkpoint, after each was compared with that of a `fresh` run: names, types, shapes.

    Raises RunFolderError with one line that names the file, the fault and the way out.
    """
    with _named_faults(path):
        values, version = _unpack(path.read_bytes())
        if version is None:
            warnings.warn(
                f"{path} was written by an older version of woodbury, without a checksum: its parts were checked "
                "one by one, and the records before it by their length alone",
                stacklevel=2,
            )
            values = dict.fromkeys(_SINCE_FORMAT_1) | values
        return _checked(values, fresh)


def check_model(path: Path) -> None:
    """Raise RunFolderError if the file of a trained network is damaged."""
    with _named_faults(path):
        _load(path.read_bytes())


@contextmanager
def _named_faults(path: Path) -> Iterator[None]:
    """Inside, what is wrong with a file becomes a RunFolderError of one line that names it."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {one_line(error)}") from None
    except _FaultError as fault:
        raise RunFolderError(f"{path} {fault.verdict}: {fault}; {_REMEDY}") from None


def _load(content: bytes) -> Any:
    """What torch.save wrote, after the CRC-32 of each part was compared: torch itself does not do that."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            compressed = any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist())
            damaged = None if compressed else archive.testzip()
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # zipfile raises errors of many kinds
        raise _FaultError(f"it is no whole archive ({one_line(error)})") from None
    if compressed:  # torch.save never does that, and a small part could become a large one
        raise _FaultError("a part of it is compressed")
    if damaged is not None:
        raise _FaultError(f"its part {printable(damaged, 100)} has another CRC-32")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises errors of any kind
        reason = printable(one_line(error).split(". ")[0], 300)
        raise _FaultError(f"it cannot be read ({type(error).__name__}: {reason})") from None


def _checksum(version: int, content: bytes) -> str:
    digest = hashlib.sha256(b"%d %d\n" % (version, len(content)))
    digest.update(content)
    return digest.hexdigest()


def _unpack(content: bytes) -> tuple[dict[str, Any], int | None]:
    """The values and the format of a checkpoint, None for one that older versions wrote."""
    if not content:
        raise _FaultError("it is empty")
    version = None
    if not content.startswith(_ARCHIVE):
        header = _HEADER.match(content)
        if header is None:
            raise _FaultError("it does not begin like a checkpoint")
        version, length = int(header[1]), int(header[3])
        content = content[header.end() :]
        if len(content) != length:
            raise _FaultError(f"it has {len(content)} of {length} bytes")
        if _checksum(version, content) != header[2].decode():
            raise _FaultError("its content has another SHA-256 than when it was written")
        if version != FORMAT:
            raise _ForeignError(
                f"it has format {version}, from another version of woodbury; this one reads {FORMAT}"
            )
    values = _load(content)
    if not isinstance(values, dict):
        raise _FaultError("it holds no fields")
    return values, version


def _checked(values: dict[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The values, if each has the name and type of the one in `fresh`."""
    for name in fresh:
        if name not in values:
            raise _FaultError(f"it lacks the field '{name}'")
    for name in values:
        if name not in fresh:
            raise _FaultError(f"it has a field '{name}' that is not known here")
    for name in fresh:
        value, example = values[name], fresh[name]
        if name in ("model", "optimizer"):
            continue
        if value is None and name in _SINCE_FORMAT_1:
            continue
        _same_kind(f"field '{name}'", value, example)
        if isinstance(value, int | float) and value < 0:
            raise _FaultError(f"its field '{name}' is {value}")
    _check_tensors("parameter", values["model"], fresh["model"])
    optimizer = values["optimizer"]
    for part, kind in (("state", dict), ("param_groups", list)):
        if not isinstance(optimizer, dict) or not isinstance(optimizer.get(part), kind):
            raise _FaultError(f"its optimizer has no {part}")
    groups = _checked_groups(optimizer["param_groups"], fresh["optimizer"]["param_groups"])
    state = _checked_state(optimizer["state"], fresh["optimizer"]["state"], fresh["model"])
    return values | {"optimizer": {"state": state, "param_groups": groups}}


def _same_kind(what: str, value: Any, example: Any) -> None:
    """Raise unless a value is of the example's type: a tensor also of its shape and dtype, a number finite."""
    if isinstance(example, Tensor):
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise _FaultError(f"its {what} is no tensor")
        if value.shape != example.shape or value.dtype != example.dtype:
            raise _FaultError(
                f"its {what} has shape {tuple(value.shape)} and {value.dtype}, "
                f"not {tuple(example.shape)} and {example.dtype}"
            )
    elif type(value) is not type(example):
        raise _FaultError(f"its {what} is of type {type(value).__name__}, not {type(example).__name__}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _FaultError(f"its {what} is {value}")


def _check_tensors(what: str, values: Any, examples: Mapping[str, Tensor]) -> None:
    if not isinstance(values, dict):
        raise _FaultError(f"it has no {what}s")
    for name in [*examples, *values]:
        if name not in values:
            raise _FaultError(f"it lacks the {what} '{name}'")
        if name not in examples:
            raise _FaultError(f"it has a {what} '{name}' that the run does not have")
        _same_kind(f"{what} '{name}'", values[name], examples[name])


def _checked_groups(groups: Sequence[Any], fresh: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups with the settings of the run; one that did not exist yet has its default."""
    if len(groups) != len(fresh):
        raise _FaultError(f"it has {len(groups)} parameter groups, the run has {len(fresh)}")
    for group, own in zip(groups, fresh, strict=True):
        if not isinstance(group, dict):
            raise _FaultError("it has a parameter group without settings")
        for name, value in group.items():
            if name in own and not _equal(value, own[name]):
                raise _ForeignError(f"it is of another run: there '{name}' is {value}, here {own[name]}")
            if name not in own and value is not None and value is not False:
                raise _ForeignError(f"it has a setting '{name}' that the optimizer does not have here")
    return [dict(own) for own in fresh]


def _equal(value: Any, own: Any) -> bool:
    """Whether two settings are the same; a tensor is none."""
    if isinstance(value, Tensor):
        return False
    return bool(value == own) and isinstance(value, bool) == isinstance(own, bool)


def _checked_state(state: Mapping[Any, Any], fresh: Mapping[Any, Any], parameters: Mapping[str, Tensor]) -> Any:
    """The optimizer's state; of what appears in the course of a run, what belongs to a parameter has its shape."""
    by_index = dict(enumerate(parameters.values()))
    for name, example in fresh.items():
        if name in state:
            both = (example, state[name])
            if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in both):
                _same_kind(f"state '{name}'", state[name], example)
            elif not math.isfinite(state[name]):
                raise _FaultError(f"its state '{name}' is {state[name]}")
        elif name in _NEEDED_STATE:
            raise _FaultError(f"it lacks the state '{name}'")
    for name, value in state.items():
        if isinstance(name, int) and not isinstance(name, bool):  # torch's own optimizers number the parameters
            if name not in by_index or not isinstance(value, dict):
                raise _FaultError(f"it has state of a parameter {name} that the run does not have")
            for key, part in value.items():
                scalar = isinstance(part, Tensor) and part.dim() == 0 and part.is_floating_point()
                if isinstance(part, Tensor) and not scalar:
                    _same_kind(f"state '{key}' of parameter {name}", part, by_index[name])
        elif not isinstance(name, str):
            raise _FaultError(f"it has state named by a {type(name).__name__}")
        elif isinstance(value, dict):
            for key, part in value.items():
                if key in parameters:
                    _same_kind(f"state '{name}' of '{key}'", part, parameters[key])
    return {**fresh, **state}
