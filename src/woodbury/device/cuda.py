"""CUDA kernels of our own: compiled at run time by NVRTC, which torch brings along, and launched on its streams.

Where one cannot be had (no NVRTC, ROCm) `Kernel.launch` says so, and ordinary operations must do.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


class Kernel:
    """`extern "C" __global__ void name(const Arguments)` in CUDA C++, compiled once for each device."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self._functions: dict[int, ctypes.c_void_p | None] = {}

    def launch(
        self, device: torch.device, blocks: int, threads: int, shared_bytes: int, arguments: ctypes.Structure
    ) -> bool:
        """Launch it on the current stream of a device; False if there is no such kernel on this machine."""
        index = device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.launch(device, blocks, threads, shared_bytes, arguments)
        function = self._function(index)
        if function is None:
            return False
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        status = _driver().cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None
        )
        if status:
            raise RuntimeError(
                f"CUDA error {status} ({_in_words(status)}) at the launch of woodbury's kernel {self.name!r}; "
                "it may come from an earlier operation on the device"
            )
        return True

    def _function(self, index: int) -> ctypes.c_void_p | None:
        """The kernel on the current device, which has this index; None if there is none, or none for now."""
        if index not in self._functions:
            if torch.cuda.is_current_stream_capturing():  # nothing can be compiled then
                return None
            try:
                self._functions[index] = self._made()
            except _BusyError:
                return None
            except _UnavailableError:
                self._functions[index] = None
        return self._functions[index]

    def _made(self) -> ctypes.c_void_p:
        image = _compiled(self.source)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = _driver().cuModuleLoadData(ctypes.byref(module), image)
        status = status or _driver().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode())
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"no memory on the device for woodbury's kernel {self.name!r}")
        if status in _CAPTURING:
            raise _BusyError(_in_words(status))
        if status:
            raise _UnavailableError(_in_words(status))
        return function


class _UnavailableError(Exception):
    """There is no such kernel on this machine."""


class _BusyError(Exception):
    """Another thread records a CUDA graph, and nothing can be loaded meanwhile."""


_OUT_OF_MEMORY, _CAPTURING = 2, range(900, 909)  # codes of the driver


def _in_words(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown").decode()


@cache
def _driver() -> Any:
    return _loaded(["nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"])


@cache
def _compiler() -> Any:
    """NVRTC of the CUDA that torch was built with."""
    major = (torch.version.cuda or "none").split(".")[0]
    version = {"11": "11.2"}.get(
        major, major
    )  # as the library is named: one name from 11.2 on, then one a version
    if sys.platform == "win32":
        return _loaded([f"nvrtc64_{version.replace('.', '').ljust(3, '0')}_0.dll"])
    return _loaded([f"libnvrtc.so.{version}", "libnvrtc.so"])


def _loaded(names: Sequence[str]) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise _UnavailableError(f"no library {names[0]}")


def _compiled(source: str) -> bytes:
    """Machine code for the current device."""
    compiler = _compiler()
    major, minor = torch.cuda.get_device_capability()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{major}{minor}".encode())
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    failed = compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"woodbury.cu", 0, None, None)
    if failed:
        raise _UnavailableError(f"NVRTC error {failed}")
    try:
        failed = compiler.nvrtcCompileProgram(program, 1, options)
        failed = failed or compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        failed = failed or compiler.nvrtcGetCUBIN(program, image)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise _UnavailableError(f"NVRTC error {failed}")
    return image.raw
