"""Launches kernels on torch's current stream by cuda.core."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..compilers import OLDEST, compile_kernel, why_not_loaded
from ..errors import BuildError, TransferError
from .calls import KernelCall

if TYPE_CHECKING:
    from cuda.core import Kernel


def run(call: KernelCall) -> None:
    """Launch on torch's current stream, and return. Raises BuildError or TransferError."""
    with bound(next(tensor.device for tensor in call.held if tensor.is_cuda)) as index:
        from cuda.core import LaunchConfig, Stream, launch

        config = LaunchConfig(grid=call.grid, block=call.threads, shmem_size=call.shared)
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        kernel = loaded_kernel(call.kernel, call.defines, call.shared_to_ask_for, index)
        launch(stream, config, kernel, *call.args)


@contextlib.contextmanager
def bound(device: torch.device) -> Iterator[int]:
    """Make the device current for torch and driver, even in a thread that is new to CUDA."""
    try:
        from cuda.core import Device
    except ImportError as error:
        raise BuildError("CUDA kernels need cuda.core: pip install 'kvgraph[cuda]'") from error
    with torch.cuda.device(device):
        Device(device.index).set_current()
        yield device.index


@contextlib.contextmanager
def batch_stream() -> Iterator[int]:
    """Yield the current stream, or a side stream for the default, which batches refuse."""
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
def side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", index))


@functools.cache
def loaded_kernel(name: str, defines: tuple[str, ...], shared: int, index: int) -> Kernel:
    """Return a kernel, loaded once per device. Raises BuildError or TransferError."""
    from cuda.core import ObjectCode

    major, minor = torch.cuda.get_device_capability(index)
    if major < OLDEST:
        raise BuildError(
            f"GPU {index} has compute capability {major}.{minor}; kernels need {OLDEST}.0 or later"
        )
    made = compile_kernel(name, defines, f"sm_{major}{minor}")
    try:
        kernel = ObjectCode.from_cubin(made.code).get_kernel(name)
    except Exception as error:  # cuda.core's own hierarchy differs between its versions
        raise BuildError(why_not_loaded(name, error)) from error
    if shared:
        allow_shared(kernel, name, shared, index)
    return kernel


def allow_shared(kernel: Kernel, name: str, shared: int, index: int) -> None:
    """Allow launches with ``shared`` bytes of dynamic shared memory, more than the default."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(index)
    (error,) = driver.cuKernelSetAttribute(attribute, shared, kernel.handle, device)
    if int(error):
        raise TransferError(
            f"{name} needs {shared} bytes of shared memory: the driver gives error {int(error)}"
        )
