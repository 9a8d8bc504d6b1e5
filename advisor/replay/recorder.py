"""``Recorder`` writes the events of a live engine as a trace, without tokens or names: blocks,
sessions and tenants are keyed hashes, and the key is discarded with the recorder.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ...graph.types import LAYER_NAMES
from ...graph.wire.events import AnyEvent, RequestFinished, RequestStarted, Segment
from .reader import HEADER_VERSION, new_file

logger = logging.getLogger(__name__)

_MAX_RUNNING: Final = 65_536  # requests; chosen


class Recorder:
    """Writes a line per finished request until a full disk ends it. Raises TraceError."""

    def __init__(
        self,
        path: Path,  # the file to write, gzipped if it ends in `.gz`; must not exist
        *,
        clock: Callable[[], float] = time.monotonic,  # monotonic seconds
        secret: bytes | None = None,  # the key of the hashes
    ) -> None:
        self.written = 0  # requests
        self.left_out = 0  # requests of which not all blocks were reported
        self.failed = False
        self._clock = clock
        self._began = clock()
        self._path = path
        self._file = new_file(path)
        self._secret = secret or secrets.token_bytes(32)
        self._running: dict[tuple[str, str], tuple[float, RequestStarted]] = {}
        self._block_size: int | None = None

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        now = self._clock() - self._began
        try:
            for event in events if not self.failed else ():
                if isinstance(event, RequestStarted):
                    self._started(engine, event, now)
                elif isinstance(event, RequestFinished):
                    self._finished(engine, event, now)
        except OSError as error:
            self.failed = True
            logger.error("the log ends here: %s: %s", self._path, error.strerror)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.failed = True
            logger.error("the log is cut short: %s: %s", self._path, error.strerror)

    def _started(self, engine: str, event: RequestStarted, now: float) -> None:
        if len(self._running) >= _MAX_RUNNING:  # requests whose end was never received
            del self._running[next(iter(self._running))]
        self._running[engine, event.request_id] = (now, event)

    def _finished(self, engine: str, event: RequestFinished, now: float) -> None:
        at, started = self._running.pop((engine, event.request_id), (0.0, None))
        if started is None or started.prompt_tokens < 1 or not self._fits(started.block_size):
            return
        if not _is_whole(started, event):  # its line would make the whole trace unreadable
            self.left_out += 1
            return
        line = {
            "at": round(at, 6),
            "seconds": round(now - at, 6),
            "input_length": started.prompt_tokens,
            "output_length": max(0, event.total_tokens - started.prompt_tokens),
            "cached_tokens": started.cached_tokens,
            "session": self._name(event.tenant, event.session),
            "ended": event.session_ended,
            **self._said(started, event),
            "hash_ids": self._hashed(started.hashes),
            "output_hash_ids": self._hashed(event.hashes[len(started.hashes) :]),
        }
        self._write(line)
        self.written += 1

    def _said(self, started: RequestStarted, event: RequestFinished) -> dict[str, Any]:
        """Return what the caller stated besides the session; unknown fields are absent."""
        said = {
            "tenant": event.tenant and self._digest(f"\0\0{event.tenant}".encode()).hex(),
            "waiting_for_tool": event.waiting_for_tool,
            "expected_return_s": event.expected_return_s,
            "layers": [_part(segment, started) for segment in started.segments] or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _fits(self, block_size: int) -> bool:
        if self._block_size is None:
            self._block_size = block_size
            self._write({"kvgraph_trace": HEADER_VERSION, "block_size": block_size})
        return self._block_size == block_size

    def _hashed(self, hashes: bytes) -> list[int]:
        return [
            int.from_bytes(self._digest(hashes[i : i + 8]), "little")
            for i in range(0, len(hashes) - 7, 8)
        ]

    def _name(self, tenant: str | None, session: str | None) -> str | None:
        if session is None:
            return None
        return self._digest(f"{tenant or ''}\0{session}".encode("utf-8", "replace")).hex()

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8, key=self._secret).digest()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line).decode() + "\n")


def _is_whole(started: RequestStarted, finished: RequestFinished) -> bool:
    """Whether all blocks are told: engines leave most out while the sidecar is overloaded."""
    blocks, tokens = len(started.hashes) // 8, started.prompt_tokens
    least, most = tokens // started.block_size, -(-tokens // started.block_size)
    return not (started.skipped or finished.skipped) and least <= blocks <= most


def _part(segment: Segment, started: RequestStarted) -> tuple[str, int, int]:
    end = min(segment.end, started.prompt_tokens)
    return LAYER_NAMES[segment.layer], min(segment.start, end), end
