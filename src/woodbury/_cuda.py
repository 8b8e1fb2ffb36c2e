"""CUDA kernels of our own: compiled at run time by NVRTC, which torch brings along, and launched on its streams.

Where one cannot be had (no NVRTC, ROCm) `Kernel.launch` says so, and ordinary operations must do.
"""

from __future__ import annotations

import ctypes
import sys
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
        if index not in self._functions:
            if torch.cuda.is_current_stream_capturing():  # nothing can be compiled then
                return False
            self._functions[index] = self._made()
        function = self._functions[index]
        if function is None:
            return False
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(
            _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None)
        )
        return True

    def _made(self) -> ctypes.c_void_p | None:
        """The kernel on the current device."""
        try:
            image = _compiled(self.source)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), image))
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()))
        except (OSError, AttributeError, _CudaError):
            return None
        return function


class _CudaError(RuntimeError):
    pass


def _check(status: int) -> None:
    if status:
        raise _CudaError(f"CUDA error {status} at a kernel of woodbury")


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _compiler() -> Any:
    major = (torch.version.cuda or "none").split(".")[0]
    return ctypes.CDLL(f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}")


def _compiled(source: str) -> bytes:
    """Machine code for the current device."""
    compiler = _compiler()
    major, minor = torch.cuda.get_device_capability()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{major}{minor}".encode())
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"woodbury.cu", 0, None, None))
    try:
        _check(compiler.nvrtcCompileProgram(program, 1, options))
        _check(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(compiler.nvrtcGetCUBIN(program, image))
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw
