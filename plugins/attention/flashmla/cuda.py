"""CUDA C++ compiled when it is first needed, by the NVRTC that comes with PyTorch, and launched through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

Pointer = ctypes.c_void_p

_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EARLY: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BFLOAT16: Final = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLED: Final = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTED: Final = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class Map(ctypes.Structure):
    """A CUtensorMap, which kernels take by value."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", Pointer),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> Any:
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(
            f"attention backend 'flashmla' compiles its kernels with NVRTC, but {name} can't be loaded ({error}); "
            "install nvidia-cuda-nvrtc of PyTorch's CUDA version, or use attention backend 'triton'"
        ) from error


def _check(code: int, what: str) -> None:
    """Raise RuntimeError for a driver's error code."""
    if code:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(said))
        raise RuntimeError(f"attention backend 'flashmla': {what} failed: {(said.value or b'?').decode()} ({code})")


def compiled(source: str, defines: dict[str, int]) -> bytes:
    """Machine code for compute capability 9.0a; raises RuntimeError with the compiler's words."""
    compiler, program, size = _compiler(), Pointer(), ctypes.c_size_t()
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"flashmla.cu", 0, None, None)
    if compiler.nvrtcCompileProgram(program, len(options), given):
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"attention backend 'flashmla': NVRTC refused its kernels: {log.value.decode()}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class Module:
    """Loaded machine code; needs PyTorch's CUDA context."""

    def __init__(self, code: bytes) -> None:
        self._module = Pointer()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), code), "loading its kernels")

    def kernel(self, name: str, shared: int = 0) -> Pointer:
        """The kernel, allowed `shared` bytes of dynamic shared memory."""
        found = Pointer()
        _check(_driver().cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()), f"finding {name}")
        if shared:
            _check(_driver().cuFuncSetAttribute(found, _SHARED_BYTES, shared), f"shared memory for {name}")
        return found


def launch(kernel: Pointer, grid: Sequence[int], threads: int, shared: int, arguments: Sequence[ctypes._CData]) -> None:
    """On PyTorch's stream; the kernel may begin before the one ahead of it has ended, for which it has to wait."""
    early = _Attribute(_EARLY, 0, 1, b"")
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config(tuple(grid), (threads, 1, 1), shared, stream, ctypes.pointer(early), 1)
    places = (Pointer * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), kernel, places, None), "launching a kernel")


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Map:
    """bfloat16 in boxes whose lines of 128 bytes are swizzled; strides in bytes, from the second dimension on."""
    rank, room = len(sizes), ctypes.create_string_buffer(256)
    at = (ctypes.addressof(room) + 127) & ~127  # the driver writes it to a multiple of 64 bytes
    code = _driver().cuTensorMapEncodeTiled(
        Pointer(at), _BFLOAT16, rank, Pointer(address),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, _SWIZZLED, _PROMOTED, 0,
    )  # fmt: skip
    _check(code, "describing pages")
    return Map.from_buffer_copy(ctypes.string_at(at, 128))


__all__ = ["Map", "Module", "Pointer", "compiled", "launch", "tensor_map"]
