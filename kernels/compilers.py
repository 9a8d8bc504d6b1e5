"""Compiles C++ and CUDA sources at first use, and caches the results, under a lock, in
``AITHER_KVCACHE_KERNEL_CACHE`` or a directory below the user's cache directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import BuildError

CACHE_ENV: Final = "AITHER_KVCACHE_KERNEL_CACHE"


def cache_directory() -> Path:
    chosen = os.environ.get(CACHE_ENV)
    if chosen:
        return Path(chosen)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvgraph" / "kernels"


def compiled(name: str, ingredients: list[str], build: Callable[[Path], None]) -> Path:
    """Return the path of a compiled file, which is built once per machine.

    Args:
        name: The file's name; a digest of ``ingredients`` is added to it.
        ingredients: Everything that the file depends on: sources, options, compiler, processor.
        build: Makes the file at a path.

    Raises:
        BuildError: The file cannot be built, or cannot be stored.
    """
    digest = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    stem, dot, suffix = name.partition(".")
    path = cache_directory() / f"{stem}-{digest}{dot}{suffix}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # another process may have been first
                _build_beside(path, build)
    except OSError as error:
        raise BuildError(
            f"compiled kernels cannot be kept in {path.parent}: {error.strerror}; "
            f"set {CACHE_ENV} to a directory that can be written"
        ) from error
    return path


def _build_beside(path: Path, build: Callable[[Path], None]) -> None:
    """Build in a scratch directory, then rename, so that no half-written file is ever loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        made = Path(scratch) / path.name
        build(made)
        made.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def load_library(name: str, sources: list[Path], options: list[str]) -> ctypes.CDLL:
    """Compile ``sources[0]``, which may include the others, and load it; raises BuildError."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++ (apt-get install g++)")
    texts = [source.read_text() for source in sources]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    ingredients = [*texts, *options, compiler, version, _processor()]

    def build(path: Path) -> None:
        command = [compiler, "-std=c++17", "-shared", "-fPIC", "-pthread", *options]
        done = subprocess.run(
            [*command, "-o", str(path), str(sources[0])], capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"{compiler} refuses {sources[0].name}:\n{done.stderr[-2000:]}")

    return ctypes.CDLL(str(compiled(f"{name}.so", ingredients, build)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({ln for ln in lines if ln.startswith(("model name", "flags"))}))


OLDEST: Final = 8  # lowest major compute capability: kernels copy to shared memory asynchronously


def driver_cuda() -> str | None:
    """Return the driver's newest CUDA version, such as ``12.8``; None if unknown."""
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except Exception:  # no bindings, or no driver
        return None
    return None if int(error) else f"{version // 1000}.{version % 1000 // 10}"


def compiler_cuda() -> str | None:
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception:
        return None
    return None if int(error) else f"{major}.{minor}"


def why_not_loaded(kernel: str, error: Exception) -> str:
    """Describe why a driver may have refused a kernel compiled for its GPU, and what to do."""
    has, made_by = driver_cuda(), compiler_cuda()
    said = f"the driver does not load {kernel} ({type(error).__name__}: {error})"
    if has is None or made_by is None or _major(has) >= _major(made_by):
        return said
    return (
        f"{said}: it has CUDA {has}, the compiler is of CUDA {made_by}; update the driver, or "
        f"pip install 'kvgraph[cuda{_major(has)}]'"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


# NVRTC through cuda.core compiles CUDA C++ without nvcc and without a GPU.
SOURCES: Final = Path(__file__).parent / "cuda"
ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100", "sm_120")
_STANDARD: Final = "c++17"
_HEAD: Final = struct.Struct("<III")  # of a cached file: registers, spilled bytes, bytes of stack
_MISSING: Final = "CUDA kernels need NVRTC and cuda.core: pip install 'kvgraph[cuda]'"


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel for one architecture; numbers are per thread."""

    kernel: str
    architecture: str
    code: bytes
    registers: int
    spilled_bytes: int  # stored to local memory for lack of registers
    stack_bytes: int  # of local memory, such as arrays that have no registers


def compile_kernel(kernel: str, defines: Iterable[str], architecture: str) -> Compiled:
    """Return the machine code of ``cuda/<kernel>.cu``, compiled or cached; raises BuildError."""
    defines = tuple(defines)
    core = _cuda_core()
    source = kernel_source(kernel)
    version = f"{core['Program'].__module__} {core['version']} {compiler_cuda()}"
    ingredients = [source, *defines, _STANDARD, architecture, version, _HEAD.format]

    def build(path: Path) -> None:
        code, log = _compile(core, source, defines, architecture)
        path.write_bytes(_HEAD.pack(*_resources(log)) + code)

    path = compiled(f"{kernel}-{architecture}.cubin", ingredients, build)
    packed = path.read_bytes()
    return Compiled(kernel, architecture, packed[_HEAD.size :], *_HEAD.unpack_from(packed))


def kernel_source(kernel: str) -> str:
    """Return a kernel's source with its header pasted in, so that NVRTC needs no files."""
    common = (SOURCES / "common.cuh").read_text()
    return (SOURCES / f"{kernel}.cu").read_text().replace('#include "common.cuh"', common)


def _compile(
    core: dict[str, Any], source: str, defines: tuple[str, ...], architecture: str
) -> tuple[bytes, str]:
    log = io.StringIO()
    macros = [tuple(define.split("=", 1)) for define in defines]
    # Without fused products and sums the kernels round as the reference does, to the last bit.
    options = core["ProgramOptions"](
        arch=architecture, std=_STANDARD, fma=False, define_macro=macros, ptxas_options=["-v"]
    )
    try:
        program = core["Program"](source.replace("#pragma once", ""), "c++", options)
        return program.compile("cubin", logs=log).code, log.getvalue()
    except Exception as error:  # cuda.core's own hierarchy differs between its versions
        raise BuildError(f"NVRTC for {architecture}: {error}\n{log.getvalue()[-2000:]}") from error


def _resources(log: str) -> list[int]:
    """Registers, spilled bytes and bytes of stack from the assembler's log; 0 where unknown."""
    wanted = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame")
    found = (re.search(pattern, log) for pattern in wanted)
    return [int(match[1]) if match else 0 for match in found]


def _cuda_core() -> dict[str, Any]:
    """Import cuda.core, here only, so that machines without it can use everything else."""
    try:
        import cuda.core
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise BuildError(_MISSING) from error
    return {"Program": Program, "ProgramOptions": ProgramOptions, "version": cuda.core.__version__}
