"""What was measured, on its way from where it was measured to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....kernels.gpu.streams import Fence, mark

if TYPE_CHECKING:
    from ....kernels.tensors import Tensor


class ReadBack:
    """Tensors that are copied to host memory behind all that was queued; nobody waits for them.

    Args:
        tensors: On one GPU, or in host memory, where they have arrived at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._fence: Fence = mark(tensors[0].device)

    def arrived(self) -> bool:
        """Whether they are there; asks the driver, never waits."""
        return self._fence.event is None or bool(self._fence.event.query())

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which they were given; only once they arrived."""
        return self._tensors
