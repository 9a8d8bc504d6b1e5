"""Back ends by name, and the fastest one that works here, chosen at the first operation."""

from __future__ import annotations

import functools
import os
from typing import Final

from ..errors import BuildError, KernelError
from . import native, reference
from .base import Backend, Observer

SWITCH: Final = "AITHER_KVCACHE_KERNELS"
CHOICES: Final = ("auto", "reference")
BACKENDS: Final = ("reference", "native", "device", "emulation")
OBSERVERS: Final = ("attention", "device", "emulation")


def backend_named(name: str) -> Backend:
    """Return a back end of ``BACKENDS``, without compiling anything.

    Raises:
        KernelError: There is none of that name.
    """
    match name:
        case "reference":
            return reference
        case "native":
            return native
        case "device":
            from . import device

            return device
        case "emulation":
            from . import emulation

            return emulation
    raise KernelError(f"back end {name!r} is not known; allowed: {', '.join(BACKENDS)}")


def observer_named(name: str) -> Observer:
    """Return a module of ``OBSERVERS``, without compiling anything.

    Raises:
        KernelError: There is none of that name.
    """
    match name:
        case "attention":
            from . import attention

            return attention
        case "device":
            from . import device

            return device
        case "emulation":
            from . import emulation

            return emulation
    raise KernelError(f"observer {name!r} is not known; allowed: {', '.join(OBSERVERS)}")


@functools.cache
def fastest(on_gpu: bool) -> Backend:
    """Return the back end for memory on a GPU or on the host; the switch is read at the first call.

    Raises:
        KernelError: The switch has an unknown value.
    """
    chosen = os.environ.get(SWITCH, "auto")
    if chosen not in CHOICES:
        raise KernelError(f"{SWITCH}={chosen!r} is not known; allowed: {', '.join(CHOICES)}")
    if chosen == "reference":
        return reference
    if on_gpu:
        return backend_named("device")
    return reference if native_problem() else native


@functools.cache
def native_problem() -> str | None:
    """Return why host memory is moved by torch and not by compiled C++; None if it is compiled."""
    try:
        native.library()
    except BuildError as error:
        return str(error)
    return None
