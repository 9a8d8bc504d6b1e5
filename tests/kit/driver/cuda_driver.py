"""A CUDA driver without a GPU: checks each call as a real one would, then does it on the host.

It stands in the place of ``libcuda.so.1``, so that cuda.core, cuda.bindings and all of ours above
them are the real ones. A launch is held against the signature that the compiled kernel states, runs
in emulation from the very argument list that the driver was handed, and is logged with its stream.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgraph.kernels.compilers import ARCHITECTURES, compile_kernel
from kvgraph.kernels.errors import TransferError
from kvgraph.kernels.gpu.calls import SHARED_LIMIT, KernelCall
from kvgraph_bench.selftest import emulation
from kvgraph_bench.selftest.emulation import SHARED_OPT_IN, check_launch

_P, _I, _U, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_INVALID, _INVALID_IMAGE = 1, 200
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_KPARAM_INFO = 0x17  # in a compiled kernel: index, ordinal, offset, and the size above 18 bits
_CONTEXT, _LIBRARY, _KERNEL = 0xC0DE, 0x1000, 0x2000


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", _U * 3), ("block", _U * 3), ("shared", _U), ("stream", _P), ("attributes", _P),
        ("count", _U),
    )  # fmt: skip


class Driver:
    """One device of an architecture.

    Attributes:
        log: What was done, in order: a name and what it is about.
        refused: Why calls were refused.
        batches: Whether there is ``cuMemcpyBatchAsync``; ``refuses``: the error that it gives.
        cuda: The CUDA that it has, as it counts them; before 13000 it loads nothing that newer
            compilers make.
    """

    def __init__(
        self, architecture: str, batches: bool = True, cuda: int = 13000, refuses: int = 0
    ) -> None:
        assert architecture in ARCHITECTURES
        self.architecture, self._cuda, self._refuses = architecture, cuda, refuses
        self.log: list[tuple[Any, ...]] = []
        self.refused: list[str] = []
        self._codes: list[bytes] = []
        self._kernels: list[tuple[str, bytes]] = []
        self._allowed: dict[int, int] = {}
        self._variants: dict[bytes, tuple[tuple[str, ...], int]] = {}
        self._kept: list[Any] = []
        self._library = ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)
        self._offer_device()
        self._offer_kernels()
        self._offer("cuMemcpyAsync", self._copy, _P, _P, _S, _P)
        if batches:
            self._offer("cuMemcpyBatchAsync", self._copies, _P, _P, _P, _S, _P, _P, _S, _P)

    def expect(self, kernel: str, defines: tuple[str, ...]) -> None:
        """Learn which macros a kernel's code was compiled with: code does not say."""
        made = compile_kernel(kernel, defines, self.architecture)
        self._variants[made.code] = defines, made.registers

    def _offer(self, name: str, function: Callable[..., int | None], *types: Any) -> None:
        def call(*values: Any) -> int:
            try:
                return function(*values) or 0
            except Exception as error:
                self.refused.append(f"{name}: {error}")
                return _INVALID

        self._kept.append(ctypes.CFUNCTYPE(_I, *types)(call))
        self._library.stub_set(name.encode(), ctypes.cast(self._kept[-1], _P))

    def _offer_device(self) -> None:
        number = int(self.architecture.removeprefix("sm_"))
        attributes = {_MAJOR: number // 10, _MINOR: number % 10}
        self._offer("cuInit", lambda flags: 0, _U)
        self._offer("cuDriverGetVersion", lambda out: _put(out, self._cuda), _P)
        self._offer("cuDeviceGetCount", lambda out: _put(out, 1), _P)
        self._offer("cuDeviceGet", lambda out, index: _put(out, index), _P, _I)
        self._offer(
            "cuDeviceGetAttribute", lambda out, at, of: _put(out, attributes.get(at, 0)), _P, _I, _I
        )
        for name in ("cuCtxGetCurrent", "cuDevicePrimaryCtxRetain"):
            types = (_P,) if name == "cuCtxGetCurrent" else (_P, _I)
            self._offer(name, lambda out, *_: _put(out, _CONTEXT, ctypes.c_uint64), *types)
        self._offer("cuCtxSetCurrent", lambda context: 0, _P)
        self._offer("cuLibraryUnload", lambda library: 0, _P)

    def _offer_kernels(self) -> None:
        self._offer("cuLibraryLoadData", self._load, _P, _P, _P, _P, _U, _P, _P, _U)
        self._offer("cuLibraryGetKernel", self._find, _P, _P, ctypes.c_char_p)
        self._offer("cuKernelSetAttribute", self._allow, _I, _I, _P, _I)
        self._offer("cuLaunchKernelEx", self._launch, _P, _P, _P, _P)

    # What is called -----------------------------------------------------------------------------

    def _load(self, out: int, code: int, *_: Any) -> int:
        if self._cuda < 13000:
            return _INVALID_IMAGE
        self._codes.append(_whole_elf(code))
        _put(out, _LIBRARY + len(self._codes) - 1, ctypes.c_uint64)
        return 0

    def _find(self, out: int, library: int, name: bytes) -> None:
        self._kernels.append((name.decode(), self._codes[library - _LIBRARY]))
        _put(out, _KERNEL + len(self._kernels) - 1, ctypes.c_uint64)

    def _allow(self, attribute: int, value: int, kernel: int, device: int) -> int:
        assert attribute == _MAX_DYNAMIC_SHARED
        if value > SHARED_OPT_IN[self.architecture]:
            return _INVALID
        self._allowed[kernel] = value
        self.log.append(("allow", self._kernels[kernel - _KERNEL][0], value))
        return 0

    def _launch(self, config: int, kernel: int, arguments: int, extra: int) -> None:
        how = ctypes.cast(config, ctypes.POINTER(_Config))[0]
        name, code = self._kernels[kernel - _KERNEL]
        assert list(how.grid)[1:] == list(how.block)[1:] == [1, 1]
        defines, registers = self._variants[code]
        call = KernelCall(name, defines, how.grid[0], how.block[0], how.shared, (), ())
        allowed = self._allowed.get(kernel, SHARED_LIMIT)
        check_launch(call, self.architecture, allowed, registers)
        self.log.append(("launch", name, int(how.stream or 0), signature(code, name)))
        emulation.run_entry(name, defines, how.grid[0], how.block[0], how.shared, arguments)

    def _copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.log.append(("copy", 1, stream))
        ctypes.memmove(target, source, size)

    def _copies(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, first: int,
        kinds: int, stream: int,
    ) -> int:  # fmt: skip
        assert stream, "batches refuse the default stream"
        assert kinds == 1
        assert ctypes.cast(first, ctypes.POINTER(_S))[0] == 0
        order, *hints, flags = ctypes.cast(attributes, ctypes.POINTER(_I))[:6]
        assert (order, hints, flags) == (1, [0] * 4, 1), "sources in stream order, beside kernels"
        if self._refuses:
            return self._refuses
        self.log.append(("copy", count, stream))
        lists = [ctypes.cast(at, ctypes.POINTER(_S))[:count] for at in (targets, sources, sizes)]
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        return 0


def signature(code: bytes, kernel: str) -> list[int]:
    """Bytes of each argument, as the compiled kernel states them: EIATTR_KPARAM_INFO entries."""
    info, sizes, at = _section(code, f".nv.info.{kernel}"), dict[int, int](), 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value stands in the header
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            sizes[ordinal] = packed >> 18
        at += size
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def _section(code: bytes, wanted: str) -> bytes:
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, start + size * n) for n in range(count)]
    text = code[headers[names][4] :]
    for name, _, _, _, offset, length in headers:
        if text[name : text.index(b"\0", name)].decode() == wanted:
            return code[offset : offset + length]
    raise TransferError(f"the compiled kernel has no section {wanted}")


def _whole_elf(address: int) -> bytes:
    head = ctypes.string_at(address, 64)
    (start,) = struct.unpack_from("<Q", head, 0x28)
    size, count = struct.unpack_from("<HH", head, 0x3A)
    (program,) = struct.unpack_from("<Q", head, 0x20)
    each, number = struct.unpack_from("<HH", head, 0x36)
    return ctypes.string_at(address, max(start + size * count, program + each * number))


def _put(out: int, value: int, kind: Any = ctypes.c_int) -> None:
    ctypes.cast(out, ctypes.POINTER(kind))[0] = value


def _built() -> Path:
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        ["g++", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o",
         str(folder / "libcuda.so.1"), str(source)], check=True,
    )  # fmt: skip
    return folder / "libcuda.so.1"
