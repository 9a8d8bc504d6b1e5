"""Every error that the kernels raise on purpose. Imports no torch: doctor runs without it."""

from __future__ import annotations


class KernelError(Exception):
    """Base of every deliberate error of ``kvgraph.kernels``."""


class LayoutError(KernelError):
    """A layout cannot be described, or two layouts do not fit each other."""


class SlotError(KernelError):
    """A block, slot or handle is out of range or no longer valid."""


class RopeError(KernelError):
    """The model's positions cannot be re-anchored; the message names model and reason."""


class BuildError(KernelError):
    """A kernel could not be compiled; the message says what is missing and how to get it."""


class StorageError(KernelError):
    """The disk tier cannot be opened or written."""


class TransferError(KernelError):
    """The GPU's driver refused a copy, a launch, or to page-lock memory; its error is quoted."""
