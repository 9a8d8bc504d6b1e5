"""How work is queued on a GPU: the device made current, torch's stream, cuda.core's launch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from .build import compile_kernel
from .calls import KernelCall
from .errors import BuildError


class _Stream:
    """A stream of torch's for cuda.core, by the protocol that both know."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def run(call: KernelCall) -> None:
    """Launch on torch's current stream; returns at once.

    Raises:
        BuildError: The kernel cannot be compiled, or a part that it needs is missing.
    """
    with bound(next(tensor.device for tensor in call.held if tensor.is_cuda)) as index:
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=call.grid, block=call.threads, shmem_size=call.shared)
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        launch(stream, config, _kernel(call.kernel, call.defines, index), *call.args)


@contextlib.contextmanager
def bound(device: Any) -> Iterator[int]:
    """The device, current for torch and for the driver, also in a thread that is new to CUDA."""
    try:
        from cuda.core import Device
    except ImportError as error:
        raise BuildError("CUDA kernels need cuda.core: pip install 'kvgraph[cuda]'") from error
    with torch.cuda.device(device):
        Device(device.index).set_current()
        yield device.index


@contextlib.contextmanager
def batch_stream() -> Iterator[int]:
    """Handle of the current stream; in place of the default one, which batches refuse, another
    that is ordered with it."""
    current = torch.cuda.current_stream()
    if current.cuda_stream:
        yield current.cuda_stream
        return
    side = side_stream(current.device.index)
    side.wait_stream(current)
    try:
        yield side.cuda_stream
    finally:
        current.wait_stream(side)


@functools.cache
def side_stream(index: int) -> Any:
    """A device's stream for copies beside the current one."""
    return torch.cuda.Stream(torch.device("cuda", index))


@functools.cache
def _kernel(kernel: str, defines: tuple[str, ...], index: int) -> Any:
    from cuda.core import ObjectCode

    major, minor = torch.cuda.get_device_capability(index)
    made = compile_kernel(kernel, defines, f"sm_{major}{minor}")
    return ObjectCode.from_cubin(made.code).get_kernel(kernel)
