"""Moves beside the engine's compute: a stream of their own, ordered by events, not by waiting.

    transfer = TransferStream(device)      # once
    fence = transfer.fence()               # engine's thread: after what it has queued so far
    ticket = transfer.run(fence, move)     # any thread: queued on the side, returns at once
    ticket.done()                          # polls; only then read, match or free what was moved

On the CPU a move is over when ``run`` returns, and every ticket is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Fence(NamedTuple):
    """A point in one stream's work; a move behind it sees all that came before.

    Attributes:
        event: A CUDA event; None if there is nothing to wait for.
    """

    event: torch.cuda.Event | None


class Ticket:
    """A move that was queued."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the move is over; asks the driver, never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when the move is over; not for the engine's thread."""
        if self._event is not None:
            self._event.synchronize()


class TransferStream:
    """A side stream of one device; moves run in the order in which they are submitted.

    Threads may share it. Call ``fence`` on the engine's thread: it marks *that thread's* current
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fence(self) -> Fence:
        """Mark what the caller's current stream was given so far; waits for nothing."""
        if self._stream is None:
            return Fence(None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return Fence(event)

    def run(self, fence: Fence, operation: Callable[[], None]) -> Ticket:
        """Queue what ``operation`` queues, to begin when the fence is passed.

        Raises:
            Exception: What ``operation`` raises, after its earlier work is over, so that the memory
                in question may be reused.
        """
        if self._stream is None:
            operation()
            return Ticket(None)
        with torch.cuda.stream(self._stream):
            if fence.event is not None:
                self._stream.wait_event(fence.event)
            try:
                operation()
            except BaseException:
                self._stream.synchronize()
                raise
            event = torch.cuda.Event()
            event.record(self._stream)
        return Ticket(event)
