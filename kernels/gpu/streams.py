"""Runs moves on a stream beside the engine's, ordered by events instead of waiting.

    transfer = TransferStream(device)      # once
    fence = mark(device)                   # engine's thread: after what it has queued so far
    ticket = transfer.run(fence, move)     # any thread: queued on the side, returns at once
    ticket.done()                          # polls; only then read, match or free what was moved

On the CPU a move is complete when ``run`` returns, and every ticket is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

_FIRST: Final = -1  # CUDA's priority above the ordinary one, 0


class Fence(NamedTuple):
    """A point in one stream's work; a move after it sees all earlier work."""

    event: torch.cuda.Event | None  # None: nothing to wait for


def mark(device: torch.device) -> Fence:
    """Mark the work queued so far on the caller's current stream of ``device``, without waiting.
    Must be called on the engine's thread, since each thread has its own current stream.
    """
    if device.type != "cuda":
        return Fence(None)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)


class Ticket:
    """A move queued between two events, or a finished one that took ``seconds``."""

    def __init__(
        self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, seconds: float = 0.0
    ) -> None:
        self._start, self._end, self._seconds = start, end, seconds

    def done(self) -> bool:
        """Return whether the move is complete; never waits."""
        return self._end is None or bool(self._end.query())

    def wait(self) -> None:
        """Sleep until the move is complete; not for the engine's thread."""
        if self._end is not None:
            self._end.synchronize()

    def seconds(self) -> float:
        """Return how long a finished move took, without waiting for its fence and earlier moves."""
        if self._start is None:
            return self._seconds
        return float(self._start.elapsed_time(self._end)) / 1e3


class TransferStream:
    """A side stream that threads may share, in order; ``first``: before other streams."""

    def __init__(self, device: torch.device, first: bool = False) -> None:
        priority = _FIRST if first else 0
        self._stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    def bind_thread(self) -> None:
        """Make the device current for the calling thread, which must work for this stream only."""
        # A new thread's device is the first GPU: any question there, even whether a move is over,
        # would take some hundred MiB of that GPU's memory for each process of the other GPUs.
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def run(self, fence: Fence, operation: Callable[[], None]) -> Ticket:
        """Queue ``operation``'s work, to start when the fence is passed. An exception of
        ``operation`` is raised once its earlier work is complete, so that its memory may be reused.
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
    """An event whose waiters sleep; the usual kind keeps a core busy."""
    return torch.cuda.Event(enable_timing=True, blocking=True)
