"""C++ compiled by the machine's own compiler into a library that ctypes loads."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

from ..errors import BuildError
from .compiled import compiled


def load_library(name: str, sources: list[Path], options: list[str]) -> ctypes.CDLL:
    """Compile ``sources[0]``, which may include the others, and load it.

    Raises:
        BuildError: There is no compiler, or it refuses the source.
    """
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++ (apt-get install g++)")
    texts = [source.read_text() for source in sources]
    ingredients = [*texts, *options, compiler, _version(compiler), _processor()]

    def build(path: Path) -> None:
        command = [compiler, "-std=c++17", "-shared", "-fPIC", "-pthread", *options]
        done = subprocess.run(
            [*command, "-o", str(path), str(sources[0])], capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"{compiler} refuses {sources[0].name}:\n{done.stderr[-2000:]}")

    return ctypes.CDLL(str(compiled(f"{name}.so", ingredients, build)))


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({ln for ln in lines if ln.startswith(("model name", "flags"))}))
