"""Which CUDA the driver has, and which the compiler: the one must be able to load what the other
makes."""

from __future__ import annotations

from typing import Final

OLDEST: Final = 8  # major compute capability: kernels copy to shared memory asynchronously


def driver_cuda() -> str | None:
    """The newest CUDA that the driver supports, such as ``12.8``; None where it does not say."""
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except Exception:  # no bindings, or no driver
        return None
    return None if int(error) else f"{version // 1000}.{version % 1000 // 10}"


def compiler_cuda() -> str | None:
    """The CUDA that NVRTC is of; None where it is missing."""
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception:
        return None
    return None if int(error) else f"{major}.{minor}"


def why_not_loaded(kernel: str, error: Exception) -> str:
    """Why a driver may have refused a kernel that was compiled for its GPU, and what to do."""
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
