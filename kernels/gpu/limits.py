"""What a GPU's driver refuses about a launch, by architecture, so that it shows without a GPU."""

from __future__ import annotations

from typing import Final

from ..errors import TransferError
from .calls import SHARED_LIMIT, KernelCall
from .macros import THREADS, WARP

# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_OPT_IN: Final = {
    "sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10
}  # fmt: skip
_REGISTERS: Final = 65_536  # per multiprocessor, and so per thread block; from the same table
_REGISTER_UNIT: Final = 8  # a thread's registers are rounded up to it; from the same table
_MOST_BLOCKS: Final = (1 << 31) - 1  # thread blocks of a grid; from the same table


def check_launch(
    call: KernelCall, architecture: str, allowed_shared: int, registers: int = 0
) -> None:
    """Do nothing if a driver would launch ``call``.

    Args:
        architecture: Such as ``sm_90``.
        allowed_shared: Bytes of dynamic shared memory that the kernel's attribute was set to; the
            default is ``SHARED_LIMIT``.
        registers: Registers per thread; 0 if they are not known.

    Raises:
        TransferError: A driver would refuse; says why.
    """
    problem = (
        _grid_problem(call)
        or _shared_problem(call, architecture, allowed_shared)
        or _register_problem(call, registers)
    )
    if problem:
        raise TransferError(f"{call.kernel} on {architecture}: {problem}")


def _grid_problem(call: KernelCall) -> str | None:
    if not 1 <= call.grid <= _MOST_BLOCKS:
        return f"{call.grid} thread blocks; allowed: 1 to {_MOST_BLOCKS}"
    if not 1 <= call.threads <= THREADS or call.threads % WARP:
        return f"{call.threads} threads; allowed: whole warps, up to {THREADS} threads"
    return None


def _shared_problem(call: KernelCall, architecture: str, allowed: int) -> str | None:
    most = SHARED_OPT_IN[architecture]
    if allowed > most:
        return f"{allowed} bytes of shared memory asked for; allowed: {most}"
    if call.shared > max(allowed, SHARED_LIMIT):
        return f"{call.shared} bytes of shared memory, {max(allowed, SHARED_LIMIT)} were asked for"
    return None


def _register_problem(call: KernelCall, registers: int) -> str | None:
    rounded = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT * call.threads
    return f"{rounded} registers; allowed: {_REGISTERS}" if rounded > _REGISTERS else None
