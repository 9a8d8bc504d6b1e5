"""One direction of a worker's transfers, whose thread and stream wait for no other direction."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

import torch

from ....kernels.gpu.streams import Fence, Ticket, TransferStream
from ...thread_name import shown

_CLOSE_S: Final = 5.0  # seconds to finish when the engine ends; chosen
_MOST_QUEUED: Final = 16  # moves that a device has before the first is waited for; chosen

OnDone = Callable[[float, Exception | None], None]


class _Order(NamedTuple):
    fence: Fence
    move: Callable[[], None]
    told: OnDone


class TransferLane:
    """Does moves in their order, on a thread of its own.

    What is ordered goes to the device at once, so that it passes from one move to the next; only
    then is the oldest waited for, asleep.

    Args:
        name: The thread's name.
        device: The device of the engine's memory.
        first: Whether the device is to prefer these moves to those of other lanes.
    """

    def __init__(self, name: str, device: torch.device, first: bool = False) -> None:
        self._stream = TransferStream(device, first)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._queued: deque[tuple[Ticket, OnDone]] = deque()
        self._thread = threading.Thread(target=shown(self._run), name=name, daemon=True)
        self._thread.start()

    def put(self, fence: Fence, move: Callable[[], None], told: OnDone) -> None:
        """Do ``move`` behind ``fence``; ``told`` hears how many seconds it took, and why it failed.

        It hears that on the lane's thread, once nothing of the move is under way any more.
        """
        self._orders.put(_Order(fence, move, told))

    def close(self) -> bool:
        """Finish the moves that were put; False if that takes too long."""
        self._orders.put(None)
        self._thread.join(timeout=_CLOSE_S)
        return not self._thread.is_alive()

    # On the lane's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a device that is gone fails each move by itself
            self._stream.bind_thread()
        while (order := self._next()) is not None:
            self._begin(order)
        while self._queued:
            self._settle()

    def _next(self) -> _Order | None:
        """Take the next order; what is under way is settled as long as there is none."""
        while self._queued:
            over = _is_over(self._queued[0][0])
            if not over and len(self._queued) < _MOST_QUEUED:
                with contextlib.suppress(Empty):
                    return self._orders.get_nowait()
            self._settle()
        return self._orders.get()

    def _begin(self, order: _Order) -> None:
        try:
            ticket = self._stream.run(order.fence, order.move)
        except Exception as error:
            _tell(order.told, 0.0, error)
        else:
            self._queued.append((ticket, order.told))

    def _settle(self) -> None:
        ticket, told = self._queued.popleft()
        try:
            ticket.wait()
            seconds = ticket.seconds()
        except Exception as error:
            _tell(told, 0.0, error)
        else:
            _tell(told, seconds, None)


def _is_over(ticket: Ticket) -> bool:
    """Whether a move need not be waited for; one that cannot be asked fails where it is settled."""
    try:
        return ticket.done()
    except Exception:
        return True


def _tell(told: OnDone, seconds: float, error: Exception | None) -> None:
    with contextlib.suppress(Exception):  # the lane goes on, whoever asked for this move
        told(seconds, error)
