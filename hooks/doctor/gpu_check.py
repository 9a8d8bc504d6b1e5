"""Judges a machine's GPU: whether a kernel can be compiled for it, launched, and computes right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...kernels.errors import BuildError
from .environment import Check

if TYPE_CHECKING:
    from ...kernels.backends.base import Observer

_INSTALL: Final = "pip install 'kvgraph[cuda]'"
_REPORT: Final = "run `kvgraph selftest gpu`, and report what it prints"
_CLOSE: Final = 1e-3  # relative error of sums in another order; chosen


def check_gpu() -> Check:
    """Compile and launch one kernel, if there is a GPU."""
    try:
        import torch
    except ImportError:
        return Check("gpu", None, "torch is not installed")
    if not torch.cuda.is_available():
        return Check("gpu", None, "none that torch can use, so no kernel was tried")
    from ...kernels.backends import device

    name = torch.cuda.get_device_name()
    return check_kernel(device, "cuda", name)


def check_kernel(observer: Observer, where: str, name: str) -> Check:
    """Compile and launch one kernel of ``observer`` over memory on device ``where``."""
    import torch

    from ...kernels.backends import attention

    logits = torch.linspace(-4.0, 4.0, 2048).reshape(2, 1024)
    try:
        found = observer.confidence(logits.to(where))
        worst = max(
            float((got.cpu() - want).abs().max())
            for got, want in zip(found, attention.confidence(logits), strict=True)
        )
    except BuildError as error:
        return Check("gpu", False, f"{name}: no kernel can be compiled: {error}", _INSTALL)
    except Exception as error:
        detail = f"{name}: a kernel could not be run ({type(error).__name__}: {error})"
        return Check("gpu", False, detail, _REPORT)
    if not worst <= _CLOSE:
        return Check("gpu", False, f"{name}: a kernel is wrong by {worst:.3g}", _REPORT)
    return Check("gpu", True, f"{name}: a kernel was compiled and run")
