"""Checks GPUs: whether kernels compile, launch and compute, and memory can be page-locked."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...kernels.errors import BuildError, TransferError
from .environment import Check

if TYPE_CHECKING:
    from ...kernels.backends.base import Observer

_INSTALL: Final = "pip install 'kvgraph[cuda]'"
_REPORT: Final = "run `kvgraph selftest gpu`, and report what it prints"
_CLOSE: Final = 1e-3  # relative error of sums in another order; chosen
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def check_gpu(root: Path = Path("/")) -> Check:
    """Compile and launch one kernel on each GPU, and page-lock some host memory."""
    try:
        import torch
    except ImportError:
        return Check("gpu", None, "torch is not installed")
    if not torch.cuda.is_available():
        return _none(torch.version.cuda, root)
    from ...kernels.backends import device

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    for index, name in enumerate(names):
        check = check_kernel(device, f"cuda:{index}", name)
        if check.ok is not True:
            return check
    if problem := page_locking_problem():
        remedy = "let the container lock memory: docker run --ulimit memlock=-1, or more memory"
        return Check("gpu", False, problem, remedy)
    counted = ", ".join(f"{count} × {name}" for name, count in Counter(names).items())
    return Check("gpu", True, f"{counted}: a kernel was compiled and run, memory page-locked")


def _none(built_for: str | None, root: Path) -> Check:
    driver = root / "proc/driver/nvidia/version"
    if not driver.exists() and not (root / "dev/nvidiactl").exists():
        return Check("gpu", None, "none that torch can use, so no kernel was tried")
    if os.environ.get(_VISIBLE) in ("", "-1"):
        return Check("gpu", None, f"{_VISIBLE} hides all of them, so no kernel was tried")
    if built_for is None:
        detail = "NVIDIA's driver is here, but this torch was built without CUDA"
        return Check("gpu", True, detail, "for an engine on the GPU: pip install 'kvgraph[vllm]'")
    detail = (
        f"NVIDIA's driver is here, but torch, built for CUDA {built_for}, can use no GPU: the "
        "driver is too old for it, or the container was given none"
    )
    remedy = "see nvidia-smi; update the driver, or start the container with --gpus all"
    return Check("gpu", False, detail, remedy)


def page_locking_problem() -> str | None:
    """Return why tiers cannot use host memory that a GPU can access; None if they can."""
    from ...kernels.arena import SLAB_BYTES, Arena
    from ...kernels.layout import gpu_layout

    piece = gpu_layout("BLHNC", 1, 1, 1, 16, 128)
    try:
        Arena.for_cache(piece, SLAB_BYTES, pin=True).close()
    except TransferError as error:
        return f"tiers need page-locked host memory: {error}"
    return None


def check_kernel(observer: Observer, where: str, name: str) -> Check:
    import torch

    from ...kernels.backends import attention

    logits = torch.linspace(-4.0, 4.0, 2048).reshape(2, 1024)
    try:
        found = observer.confidence(logits.to(where))
        worst = max(
            float((got.cpu() - want).abs().max())
            for got, want in zip(found, attention.confidence(logits), strict=True)
        )
    except Exception as error:
        return _failed(name, error)
    if not worst <= _CLOSE:
        return Check("gpu", False, f"{name}: a kernel is wrong by {worst:.3g}", _REPORT)
    return Check("gpu", True, f"{name}: a kernel was compiled and run")


def _failed(name: str, error: Exception) -> Check:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        detail = f"{name}: its memory is full, so no kernel was tried"
        return Check("gpu", None, detail, "ask again when no engine runs on it")
    if isinstance(error, BuildError):
        detail = f"{name}: no kernel can be compiled: {error}"
        return Check("gpu", False, detail, _remedy(error))
    detail = f"{name}: a kernel could not be run ({type(error).__name__}: {error})"
    return Check("gpu", False, detail, _REPORT)


def _remedy(error: BuildError) -> str:
    says_how = "pip install" in str(error) or "compute capability" in str(error)
    if says_how or isinstance(error.__cause__, OSError):  # the last: where kernels are kept
        return ""
    return _REPORT if error.__cause__ else _INSTALL
