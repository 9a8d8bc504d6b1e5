"""Moves beside the engine's compute: a stream of their own, ordered by events, not by waiting.

    transfer = TransferStream(device)      # once
    fence = mark(device)                   # engine's thread: after what it has queued so far
    ticket = transfer.run(fence, move)     # any thread: queued on the side, returns at once
    ticket.done()                          # polls; only then read, match or free what was moved

On the CPU a move is over when ``run`` returns, and every ticket is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

_FIRST: Final = -1  # CUDA's priority of work that goes before the ordinary, 0


class Fence(NamedTuple):
    """A point in one stream's work; a move behind it sees all that came before.

    Attributes:
        event: A CUDA event; None if there is nothing to wait for.
    """

    event: torch.cuda.Event | None


def mark(device: torch.device) -> Fence:
    """Mark what the caller's current stream on ``device`` was given so far; waits for nothing.

    Call it on the engine's thread: each thread has a current stream of its own.
    """
    if device.type != "cuda":
        return Fence(None)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)


class Ticket:
    """A move that was queued between two events, or one that is over and took ``seconds``."""

    def __init__(
        self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, seconds: float = 0.0
    ) -> None:
        self._start, self._end, self._seconds = start, end, seconds

    def done(self) -> bool:
        """Whether the move is over; asks the driver, never waits."""
        return self._end is None or bool(self._end.query())

    def wait(self) -> None:
        """Return when the move is over, asleep until then; not for the engine's thread."""
        if self._end is not None:
            self._end.synchronize()

    def seconds(self) -> float:
        """How long the move itself took: not what it waited for its fence, and for moves before it.

        Only of a move that is over.
        """
        if self._start is None:
            return self._seconds
        return float(self._start.elapsed_time(self._end)) / 1e3


class TransferStream:
    """A side stream of one device; moves run in the order in which they are submitted.

    Threads may share it.

    Args:
        device: Where the moves run.
        first: Whether its moves go before those of other streams, where the device has to choose.
    """

    def __init__(self, device: torch.device, first: bool = False) -> None:
        priority = _FIRST if first else 0
        self._stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    def bind_thread(self) -> None:
        """Make the device the calling thread's own, for a thread that works for this stream alone.

        A thread begins with the first GPU: whatever it asks there, were it only whether a move is
        over, would take some hundred MiB of that GPU's memory, for each process of the others.
        """
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def run(self, fence: Fence, operation: Callable[[], None]) -> Ticket:
        """Queue what ``operation`` queues, to begin when the fence is passed.

        Raises:
            Exception: What ``operation`` raises, after its earlier work is over, so that the memory
                in question may be reused.
        """
        if self._stream is None:
            began = time.perf_counter()
            operation()
            return Ticket(None, None, time.perf_counter() - began)
        with torch.cuda.stream(self._stream):
            if fence.event is not None:
                self._stream.wait_event(fence.event)
            start, end = _event(), _event()
            start.record(self._stream)
            try:
                operation()
            except BaseException:
                end.record(self._stream)
                end.synchronize()
                raise
            end.record(self._stream)
        return Ticket(start, end)


def _event() -> torch.cuda.Event:
    """One that lets who waits for it sleep: the usual kind keeps a core busy until it is passed."""
    return torch.cuda.Event(enable_timing=True, blocking=True)
