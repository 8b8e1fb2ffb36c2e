"""The state of an optimizer in the form that torch.distributed.checkpoint takes: an entry for every parameter.

`get_optimizer_state_dict` accepts no state beside that of parameters, and lambda, the generator of S2 and what
belongs to layers are none. So it gets the momentum of each parameter, and the rest, packed, with the first:

    {0: {"momentum": ..., "shared": b"..."}, 1: {"momentum": ...}, ...}

The keys are the same before the first step as after it, as loading into a new optimizer asks for. Everyone else
gets the state by names, as it is in memory. Loading takes both.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_READER = "torch.distributed.checkpoint.state_dict"
_DEPTH = 8  # calls between it and an optimizer: those of wrappers, such as accelerate's


def is_asked_for() -> bool:
    """Whether torch.distributed.checkpoint is what calls: it has no other way to ask."""
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < _DEPTH:
        if frame.f_globals.get("__name__") == _READER:
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False


def spread(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A state dict with an entry for each trained parameter of these groups, by number."""
    shared = dict(state_dict["state"])
    momentum: Mapping[str, Tensor] = shared.get("momentum", {})
    shared["momentum"] = bool(momentum)
    state: dict[int, dict[str, Any]] = {}
    for number, (name, parameter) in enumerate(_members(groups)):
        if parameter.requires_grad:
            state[number] = {"momentum": momentum[name] if name in momentum else torch.zeros_like(parameter)}
    if state:
        content = io.BytesIO()
        torch.save(shared, content)
        next(iter(state.values()))["shared"] = content.getvalue()
    return {**state_dict, "state": state}


def gather(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A state dict by names, from one by names or with an entry for each parameter of these groups."""
    state = state_dict["state"]
    entries = [value for value in state.values() if isinstance(value, dict)]
    packed = [entry["shared"] for entry in entries if isinstance(entry.get("shared"), bytes)]
    if packed:
        device = groups[0]["params"][0].device
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        members = zip(_members(groups), keys, strict=False)  # of another number: torch raises an error below
        momentum = {name: state[key]["momentum"] for (name, _), key in members if key in state}
        state = torch.load(io.BytesIO(packed[0]), map_location=device, weights_only=True)
        if state.pop("momentum"):
            state["momentum"] = momentum
    moved = {key: value.cpu() for key, value in state.items() if key == "generator" and isinstance(value, Tensor)}
    return {**state_dict, "state": {**state, **moved}}


def _members(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of all groups, with their names."""
    return [member for group in groups for member in zip(group["param_names"], group["params"], strict=True)]
