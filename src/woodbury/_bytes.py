"""How much memory a device has left, and numbers of bytes as text."""

from __future__ import annotations

import torch


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could still be allocated on the device, or None if that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what torch's allocator holds and does not use is free as well
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as lines:
            entry = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(entry.split()[1]) * 1024
    except (OSError, StopIteration):  # Linux alone has it
        return None


def in_words(byte_count: int) -> str:
    """A number of bytes as text: "3.2 GiB"."""
    return f"{byte_count / 2**30:.3g} GiB"
