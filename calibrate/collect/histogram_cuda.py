"""The counting kernel of `histogram.cu`: compiled for the GPU at hand by NVRTC, which comes with torch, and launched on torch's stream.

No build step and no dependency: where it cannot be compiled the plain path counts the same, slower, and one note says so.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from calibrate.errors import HostError
from calibrate.progress import note
from calibrate.statistics import CODES, CacheDtype

SOURCE = Path(__file__).with_name("histogram.cu")
_MAX_SHARED, _MAX_DYNAMIC_SHARED = 97, 8  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BESIDE = 16  # bytes of shared memory beside the counters
_FIXED_ROWS = 256  # what clearing and adding up a block's counters costs, in rows
_LOW = {"bfloat16": 0x3000, "float16": 0x1800}  # where the window begins on a GPU without room for all codes: 2^-31, 2^-9


class KernelError(HostError):
    """The kernel cannot be used here; the message says why."""


@dataclass(frozen=True)
class Shape:
    """How a kernel is compiled.

    Attributes:
        threads: of a block. ahead: rows that a thread loads before it counts them. bins: codes that are counted in shared memory, from `low` on.
    """

    threads: int
    ahead: int
    low: int = 0
    bins: int = CODES

    @classmethod
    def fitting(cls, shared_bytes: int, cache_dtype: CacheDtype) -> "Shape":
        """The fastest that was measured (docs/performance.md), with as many bins as a block's shared memory holds."""
        bins = min(CODES, (shared_bytes - _BESIDE) // 4 // 4096 * 4096)
        return cls(768, 2, min(CODES - bins, _LOW[cache_dtype.name]), bins)


class Histogram:
    """The kernel on one device, for one type of cache.

    Raises:
        KernelError: no NVRTC, or a GPU that it does not know.
    """

    def __init__(self, device: torch.device, cache_dtype: CacheDtype, shape: Shape | None = None) -> None:
        """`shape`: tests and benchmarks give others than the one that was chosen."""
        if torch.version.cuda is None:
            raise KernelError("this torch is not built for CUDA")
        self._device = device
        self._half = cache_dtype.name == "float16"
        self._driver = _library(["libcuda.so.1"], "the CUDA driver")
        properties = torch.cuda.get_device_properties(device)
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._multiprocessors = properties.multi_processor_count
        shared = self._shared_bytes()
        self.shape = shape or Shape.fitting(shared, cache_dtype)
        self._functions: dict[tuple[bool, bool], ctypes.c_void_p] = {}
        self._narrow: bool | None = None  # whether the kernel for odd numbers of channels compiles; None: not asked for yet
        for sums in (False, True):  # fail now rather than in the middle
            self._function(wide=True, sums=sums)

    def _shared_bytes(self) -> int:
        handle, value = ctypes.c_int(), ctypes.c_int()
        self._check(self._driver.cuDeviceGet(ctypes.byref(handle), torch.cuda.current_device() if self._device.index is None else self._device.index))
        self._check(self._driver.cuDeviceGetAttribute(ctypes.byref(value), _MAX_SHARED, handle))
        return value.value

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise KernelError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")

    def _function(self, *, wide: bool, sums: bool) -> ctypes.c_void_p:
        if (wide, sums) not in self._functions:
            shape, module, function = self.shape, ctypes.c_void_p(), ctypes.c_void_p()
            binary = compiled(self._architecture, macros(shape, half=self._half, wide=wide, sums=sums))
            with torch.cuda.device(self._device):
                torch.cuda.current_stream(self._device).query()  # the device's context is the thread's from here on
                self._check(self._driver.cuModuleLoadData(ctypes.byref(module), binary))
                self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, b"count"))
                self._check(self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, 4 * shape.bins + _BESIDE))
            self._functions[wide, sums] = function
        return self._functions[wide, sums]

    def takes(self, dim: int) -> bool:
        """Whether a row of so many channels is no more than a block's threads take, and the kernel for it compiles."""
        if dim // (8 if dim % 8 == 0 else 1) > self.shape.threads:
            return False
        if dim % 8 and self._narrow is None:
            try:
                self._narrow = all(self._function(wide=False, sums=sums) for sums in (False, True))
            except KernelError as error:
                note(f"counting heads of {dim} channels by torch.bincount, slower and to the same counts: the CUDA kernel cannot be used ({error})")
                self._narrow = False
        return dim % 8 == 0 or self._narrow

    def count(self, values: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor, *, sums: bool) -> torch.Tensor | None:
        """Count one tensor as it lies, and say nothing to the host.

        Args:
            values: [batch, heads, seq, dim] of the cache's type, any strides. lengths: int32 [batch], true rows of each sample.
            counts: int64 [heads, 32768], contiguous, added to. amax: int32 [heads], contiguous, raised to the largest code.

        Returns:
            float64 [2, heads, dim], Σx and Σx², where `sums` asks for them.
        """
        batch, heads, seq, dim = values.shape
        wide = dim % 8 == 0
        if values.stride(3) != 1 or (wide and (values.data_ptr() % 16 or any(stride % 8 for stride in values.stride()[:3]))):
            values = values.contiguous()
        strides = values.stride()[:3]
        shape, chunks = self.shape, chunks_of(heads, batch * seq, self._multiprocessors)
        parts = torch.empty((chunks, 2, heads, dim), dtype=torch.float64, device=values.device) if sums else None
        given = (
            ctypes.c_void_p(values.data_ptr()),
            *map(ctypes.c_longlong, strides),
            ctypes.c_void_p(lengths.data_ptr()),
            *map(ctypes.c_int, (batch, seq, dim)),
            *(ctypes.c_void_p(tensor.data_ptr() if tensor is not None else 0) for tensor in (counts, amax, parts)),
            ctypes.c_int(4 * shape.bins),
        )
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        function = self._function(wide=wide, sums=sums)
        with torch.cuda.device(values.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(values.device).cuda_stream)
            shared = 4 * shape.bins + _BESIDE
            self._check(self._driver.cuLaunchKernel(function, chunks, heads, 1, shape.threads, 1, 1, shared, stream, pointers, None))
        return None if parts is None else parts.sum(dim=0)


@cache
def histogram_for(device: torch.device, cache_dtype: CacheDtype) -> Histogram | None:
    """The kernel for a device, or None, with one note, where only the plain path can count."""
    try:
        return Histogram(device, cache_dtype)
    except KernelError as error:
        note(f"counting by torch.bincount, slower and to the same counts: the CUDA kernel cannot be used ({error})")
        return None


@cache
def chunks_of(heads: int, rows: int, multiprocessors: int) -> int:
    """Into how many blocks the rows of a head are cut: all multiprocessors busy to the end, few counters to clear and to add up."""
    return min(range(1, multiprocessors + 1), key=lambda chunks: -(-heads * chunks // multiprocessors) * (-(-rows // chunks) + _FIXED_ROWS))


def macros(shape: Shape, *, half: bool, wide: bool, sums: bool) -> list[str]:
    """Compiler options for one variant of the kernel."""
    values = {"HALF": half, "WIDE": wide, "SUMS": sums, "LOW": shape.low, "BINS": shape.bins, "THREADS": shape.threads, "AHEAD": shape.ahead}
    return [f"-D{name}={int(value)}" for name, value in values.items()]


def compiled(architecture: str, options: Sequence[str]) -> bytes:
    """Machine code of the kernel for an architecture as "sm_90". Raises KernelError with the compiler's first words."""
    library = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    arguments = [option.encode() for option in (f"--gpu-architecture={architecture}", "--std=c++17", *options)]
    status = library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None)
    if status:
        raise KernelError(f"NVRTC does not start (error {status})")
    try:
        if library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise KernelError(f"NVRTC: {' '.join(log.value.decode(errors='replace').split())[:200]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    major = torch.version.cuda.split(".")[0] if torch.version.cuda else "13"
    name = f"libnvrtc.so.{major}"
    site = Path(torch.__file__).parent.parent
    beside = sorted(site.glob(f"nvidia/*/lib/{name}")) + sorted(Path(torch.__file__).parent.glob(f"lib/{name}"))  # where torch's wheels put it
    for file in beside[:1]:
        for builtins in file.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC looks for it by name alone: then it is there already
            ctypes.CDLL(str(builtins))
    return _library([*map(str, beside), name, "libnvrtc.so"], "NVRTC")


def _library(names: Sequence[str], what: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KernelError(f"{what} is not found ({names[-1]})")
