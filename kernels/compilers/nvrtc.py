"""CUDA C++ to machine code at first use, by NVRTC through cuda.core; needs no nvcc and no GPU."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import BuildError
from .compiled import compiled
from .versions import compiler_cuda

SOURCES: Final = Path(__file__).parents[1] / "cuda"
ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100", "sm_120")
_STANDARD: Final = "c++17"
_HEAD: Final = struct.Struct("<III")  # of a kept file: registers, spilled bytes, bytes of stack
_MISSING: Final = "CUDA kernels need NVRTC and cuda.core: pip install 'kvgraph[cuda]'"


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel for one architecture.

    Attributes:
        registers: Registers per thread.
        spilled_bytes: Bytes per thread stored to local memory for want of registers.
        stack_bytes: Bytes per thread of local memory, such as arrays that have no registers.
    """

    kernel: str
    architecture: str
    code: bytes
    registers: int
    spilled_bytes: int
    stack_bytes: int


def compile_kernel(kernel: str, defines: Iterable[str], architecture: str) -> Compiled:
    """Machine code of ``cuda/<kernel>.cu``, from the cache if it was compiled before.

    Args:
        defines: Macros as ``NAME=value``.
        architecture: Such as ``sm_90``.

    Raises:
        BuildError: A part is missing (names the pip command), or NVRTC refuses the source.
    """
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
    """A kernel with its header pasted in: NVRTC then needs no files."""
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
    """Registers, spilled bytes and bytes of stack, as the assembler reports them; 0 if it does
    not."""
    wanted = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame")
    found = (re.search(pattern, log) for pattern in wanted)
    return [int(match[1]) if match else 0 for match in found]


def _cuda_core() -> dict[str, Any]:
    """cuda.core, imported only here, so that machines without it can use everything else."""
    try:
        import cuda.core
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise BuildError(_MISSING) from error
    return {
        "Program": Program, "ProgramOptions": ProgramOptions, "version": cuda.core.__version__
    }  # fmt: skip
